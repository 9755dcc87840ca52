"""What the sources promise about themselves: arrows, vendors, manners, budgets, mirrors, names."""

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "dsattn"
SOURCES = {path.relative_to(SRC).as_posix(): path.read_text(encoding="utf-8") for path in sorted(SRC.rglob("*.py"))}

# Which units of src/dsattn a unit may import. A new unit needs a row. "" is dsattn/__init__.py, the public names.
CORE = {"errors", "keys", "selection", "config", "quantize"}
MODEL = CORE | {"ops", "nn", "model"}
TRAINING = MODEL | {"parallel", "accounting", "plan", "training"}
ARROWS = {
    "errors": set(),
    "keys": {"errors"},
    "selection": {"errors", "keys"},
    "quantize": {"errors"},
    "config": {"errors"},
    "backends": {"errors", "keys", "selection", "quantize", "backends"},
    "ops": CORE | {"backends", "ops"},
    "testing": CORE | {"ops"},
    "nn": CORE | {"ops", "nn"},
    "integrations": MODEL | {"training", "parallel", "integrations"},  # a patched model recomputes as ours does
    "model": MODEL,
    "parallel": MODEL | {"parallel"},
    "accounting": MODEL | {"backends"},  # the settings that decide how much scratch there is
    "plan": {"errors", "config", "backends"},
    "training": TRAINING,
    "bench": MODEL | {"parallel", "accounting", "backends", "testing", "bench"},
    "cli": TRAINING | {"", "backends", "integrations", "testing", "bench", "cli"},
    "": TRAINING | {"backends", "plan"},
}

KERNEL_FOLDERS = ("triton", "hopper")
KERNELS = tuple(f"backends/{folder}/" for folder in KERNEL_FOLDERS)
VENDORS = {"flash_mla", "cudnn", "deep_gemm", "deep_select", "fla", "tilelang", "megatron", "transformers", "triton"}
TOKENIZER = "training/tokenizers.py"  # may load a Hugging Face tokenizer
OPTIONAL = VENDORS | {"tokenizers", "matplotlib", "tensorboard", "pyarrow"}

# Exceptions from the budgets of 300 lines a file, 60 lines a function, 8 arguments: (path, function or "") -> reason.
FIXED = "a public signature that other people's code calls"
BUDGET = {
    ("config.py", ""): "a sentence a field, all fields and all checks on one page",
    ("keys.py", ""): "KeyRange and Layout are one value, and their contracts stand beside them",
    ("ops/gathered.py", "attend_backward"): "a backward takes its forward's operands and results one by one",
    ("backends/cudnn/sparse_mla.py", "sparse_mla_backward"): "argument for argument the reference's",
    ("backends/cudnn/select.py", "select_keys"): "argument for argument the reference's",
    ("backends/cudnn/indexer_kl.py", "indexer_kl_forward"): "argument for argument the reference's",
    ("backends/cudnn/indexer_kl.py", "indexer_kl_backward"): "argument for argument the reference's",
    ("backends/deep_gemm.py", "select_keys"): "argument for argument the reference's",
    ("backends/tilelang.py", "select_keys"): "argument for argument the reference's",
    ("backends/tilelang.py", "sparse_mla_backward"): "argument for argument the reference's",
    (
        "backends/hopper/sparse_mla_forward.py",
        "_attend",
    ): "two groups take turns in one loop, in its order",
    ("ops/kda.py", "kimi_delta_attention"): "an operation takes its operands one by one",
    ("ops/select.py", "select_keys"): FIXED,
    ("ops/distill.py", "indexer_kl"): FIXED,
    ("ops/dsa.py", "dsa_attention"): FIXED,
    ("integrations/megatron_attention.py", "forward"): "argument for argument Megatron's",
    ("integrations/megatron_mla.py", "forward"): "argument for argument Megatron's",
}

PUBLIC = {
    "dsattn": {"KeyRange", "Layout", "Selection", "explain", "settings", "__version__"},
    "dsattn.ops": {
        *("indexer_scores", "select_keys", "select_topk", "sparse_mla", "sparse_gqa", "dense_mla", "dense_gqa"),
        *("indexer_kl", "dsa_attention", "pool_keys", "expand_pools", "output_gate"),
    },
    "dsattn.nn": {"LightningIndexer", "MLASelfAttention", "GQASelfAttention"},
}


class Import(NamedTuple):
    line: int
    module: str
    in_function: bool


def imports(path: str, source: str) -> Iterator[Import]:
    """Every import statement and every `import_module` of a literal, at any depth."""

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from (Import(line, alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["dsattn", *path.split("/")[:-1]]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (Import(line, _module(f"{base}.{alias.name}", base), in_function) for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and node.args
        ):
            literals = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            yield from (Import(line, str(literal), in_function) for literal in literals[:1])
        for child in ast.iter_child_nodes(node):
            yield from visit(
                child, in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            )

    yield from visit(ast.parse(source), False)


def _module(candidate: str, otherwise: str) -> str:
    """`from a import b` names module a.b where there is one, else a."""
    relative = candidate.removeprefix("dsattn.").replace(".", "/")
    return candidate if {f"{relative}.py", f"{relative}/__init__.py"} & SOURCES.keys() else otherwise


def _unit(path: str) -> str:
    return "" if path == "__init__.py" else path.split("/")[0].removesuffix(".py")


def wrong_arrows(path: str, source: str) -> Iterator[str]:
    unit = _unit(path)
    if unit not in ARROWS:
        yield f"{path}: unit {unit!r} has no row in ARROWS"
        return
    for line, module, _ in imports(path, source):
        parts = module.split(".")
        if parts[0] != "dsattn":
            continue
        target = parts[1] if len(parts) > 1 else ""
        if target != unit and target not in ARROWS[unit]:
            yield f"{path}:{line}: {unit or 'dsattn'} must not import {module}"
        own = path.split("/")[1].removesuffix(".py") if unit == "backends" else None
        free = unit == "bench" or own in ("__init__", parts[2] if len(parts) > 2 else None)  # bench times them all
        shared = own in KERNEL_FOLDERS and module.startswith("dsattn.backends.triton.launch")
        portable = ("dsattn.backends.triton.select", "dsattn.backends.triton.quantize")
        shared |= path == "backends/hopper/select.py" and module in portable  # ranks and rounds alike
        shared |= path == "backends/hopper/sparse_mla.py" and module == "dsattn.backends.triton.invert"  # sorts alike
        shared |= module == "dsattn.backends.vendors"  # what adapters share
        if target == "backends" and len(parts) > 2 and not free and not shared:
            yield f"{path}:{line}: {module} is reached through dsattn.backends, never by name"


def wrong_vendors(path: str, source: str) -> Iterator[str]:
    for line, module, in_function in imports(path, source):
        package = "tensorboard" if module == "torch.utils.tensorboard" else module.split(".")[0]
        if package in OPTIONAL and not in_function and not (package == "triton" and path.startswith(KERNELS)):
            yield f"{path}:{line}: import {package} inside the function that needs it: it may be absent"
        tokenizer = path == TOKENIZER and package == "transformers"
        if package in VENDORS and not path.startswith(("backends/", "integrations/")) and not tokenizer:
            yield f"{path}:{line}: {package} is a vendor's package: name it in backends/ or integrations/ only"


def wrong_manners(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if not path.startswith("cli/") and path not in ("parallel/mesh.py", "parallel/gloo.py"):  # torch's variables
            named = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            taken = (
                {alias.name for alias in node.names}
                if isinstance(node, ast.ImportFrom) and node.module == "os"
                else set()
            )
            if named in ("os.environ", "os.getenv", "os.putenv") or taken & {"environ", "getenv", "putenv"}:
                yield f"{path}:{line}: only cli/ and parallel/{{mesh,gloo}}.py read the environment: take an argument"
        prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if prints and not path.startswith("cli/") and path != "training/report.py":
            yield f"{path}:{line}: printing is for cli/ and training/report.py"


def loose_ends(path: str, source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        marked = token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX)\b", token.string)
        if marked and "https://" not in token.string:
            yield f"{path}:{token.start[0]}: a TODO needs the link of its issue"


def over_budget(path: str, source: str) -> Iterator[tuple[tuple[str, str], str]]:
    """((path, function or ""), sentence) of every file and function above its budget, excused or not."""
    kernel = path.startswith(KERNELS)
    file_lines, function_lines, most_arguments = (600, 120, 8) if kernel else (300, 60, 8)
    lines = len(source.splitlines())
    if lines > file_lines:
        yield (path, ""), f"{path}: {lines} lines, budget {file_lines}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{path}:{node.lineno} {node.name}"
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > function_lines:
            yield (path, node.name), f"{where}: {length} lines, budget {function_lines}"
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        arguments = [one.arg for one in every if one is not None and one.arg not in ("self", "cls")]
        if len(arguments) > most_arguments and not kernel and not _has_flat_signature(path, node):
            yield (path, node.name), f"{where}: {len(arguments)} arguments, budget {most_arguments}"


def _has_flat_signature(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """An operator's schema knows tensors and numbers only: its body, fake kernel and reference take them one by one."""
    decorators = " ".join(ast.unparse(one) for one in node.decorator_list)
    registered = "operator(" in decorators or "register_fake" in decorators
    return path.startswith("ops/") and (registered or node.name.endswith("_reference"))


def unexcused(path: str, source: str) -> Iterator[str]:
    yield from (f"{why}; split it, or say why in BUDGET" for key, why in over_budget(path, source) if key not in BUDGET)


Rule = Callable[[str, str], Iterator[str]]
RULES: tuple[Rule, ...] = (wrong_arrows, wrong_vendors, wrong_manners, loose_ends, unexcused)


@pytest.mark.parametrize("rule", RULES)
def test_source_keeps(rule: Rule) -> None:
    assert SOURCES, f"no sources under {SRC}"
    problems = [problem for path, source in SOURCES.items() for problem in rule(path, source)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (wrong_arrows, "ops/x.py", "from dsattn.nn import MLASelfAttention"),
        (wrong_arrows, "ops/x.py", "def f():\n    from dsattn import nn"),
        (wrong_arrows, "ops/x.py", "from ..training import loop"),
        (wrong_arrows, "ops/x.py", "import dsattn"),
        (wrong_arrows, "ops/x.py", "import dsattn.backends.triton as fast"),
        (wrong_arrows, "ops/x.py", "import importlib\nimportlib.import_module(f'dsattn.backends.{name}')"),
        (wrong_arrows, "backends/cudnn.py", "from dsattn.ops import select_keys"),
        (wrong_arrows, "backends/cudnn.py", "from dsattn.backends.triton import tiles"),
        (wrong_arrows, "backends/hopper/x.py", "from dsattn.backends.triton.select import select_keys"),
        (wrong_arrows, "backends/hopper/x.py", "from dsattn.backends.triton.invert import invert"),
        (wrong_arrows, "new_drawer.py", ""),
        (wrong_vendors, "nn/x.py", "def f():\n    import triton"),
        (wrong_vendors, "backends/flash_mla.py", "import flash_mla"),
        (wrong_vendors, "training/report.py", "from matplotlib import pyplot"),
        (wrong_vendors, "training/report.py", "from torch.utils.tensorboard import SummaryWriter"),
        (wrong_manners, "nn/x.py", "import os\nos.environ['A']"),
        (wrong_manners, "nn/x.py", "from os import getenv"),
        (wrong_manners, "training/loop.py", "print(1)"),
        (loose_ends, "nn/x.py", "x = 1  # TODO later"),
        (unexcused, "nn/x.py", "x = 1\n" * 301),
        (unexcused, "nn/x.py", "def f():\n" + "    x = 1\n" * 60),
        (unexcused, "nn/x.py", "def f(a, b, c, d, e, f, g, /, h, *, i): ..."),
        (unexcused, "nn/x.py", "def f_reference(a, b, c, d, e, f, g, h, i): ..."),
        (unexcused, "ops/x.py", "def f(a, b, c, d, e, f, g, h, *i): ..."),
        (unexcused, "backends/triton/x.py", "x = 1\n" * 601),
    ],
)
def test_rule_sees_a_breach(rule: Rule, path: str, source: str) -> None:
    assert list(rule(path, source))


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (
            wrong_arrows,
            "ops/x.py",
            "from dsattn.backends import choose\nfrom dsattn.ops.select import y\nimport torch.nn",
        ),
        (
            wrong_arrows,
            "backends/triton/x.py",
            "from dsattn.backends.triton import tiles\nfrom dsattn.backends import Call",
        ),
        (wrong_arrows, "backends/hopper/x.py", "from dsattn.backends.triton.launch import launch"),
        (wrong_arrows, "backends/hopper/sparse_mla.py", "from dsattn.backends.triton.invert import places_of_runs"),
        (wrong_arrows, "bench/x.py", "from dsattn.backends import cudnn"),
        (wrong_vendors, "backends/triton/x.py", "import triton.language as tl"),
        (wrong_vendors, TOKENIZER, "def f():\n    import transformers"),
        (wrong_manners, "cli/train.py", "import os\nprint(os.environ['A'])"),
        (loose_ends, "nn/x.py", "x = 'TODO'  # TODO https://example.org/1"),
        (unexcused, "nn/x.py", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ..."),
        (unexcused, "ops/x.py", "@f.register_fake\ndef _(a, b, c, d, e, f, g, h, i): ..."),
        (unexcused, "backends/triton/x.py", "def f():\n" + "    x = 1\n" * 119),
    ],
)
def test_rule_lets_pass(rule: Rule, path: str, source: str) -> None:
    assert not list(rule(path, source))


@pytest.mark.parametrize("exception", BUDGET, ids=lambda key: ":".join(filter(None, key)))
def test_budget_exception_is_needed(exception: tuple[str, str]) -> None:
    path = exception[0]
    assert path in SOURCES, f"{path} is excused in BUDGET and does not exist"
    assert exception in dict(over_budget(path, SOURCES[path])), f"{exception} keeps its budget: take it out of BUDGET"


def test_every_module_has_its_tests() -> None:
    """src/dsattn/x/y.py has tests/x/test_y.py; __init__.py, a package's front page, needs none."""
    modules = [Path(path) for path in SOURCES if not path.endswith("__init__.py")]
    wanted = [(path, ROOT / "tests" / path.with_name(f"test_{path.stem.strip('_')}.py")) for path in modules]
    missing = [f"{path}: no {test.relative_to(ROOT)}" for path, test in wanted if not test.exists()]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == PUBLIC[name]
    assert len(module.__all__) == len(PUBLIC[name])
    assert all(hasattr(module, public) for public in module.__all__)


def test_reference_needs_torch_alone(run_python: Callable[[str], None]) -> None:
    run_python(f"""
import sys
sys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))  # importing any of them raises
import torch, dsattn, dsattn.nn
from dsattn.ops import select_keys, sparse_mla
layout = dsattn.Layout.causal(12)
kv = torch.randn(12, 6)
selection = select_keys(torch.randn(12, 2, 4), torch.randn(12, 4), torch.randn(12, 2), layout.keys, 3)
out, lse = sparse_mla(torch.randn(12, 2, 6), kv, selection, scale=0.5, value_dim=4)
torch.testing.assert_close(out[0], kv[0, :4].expand(2, 4))
""")


def test_hidden_package_is_hidden(run_python: Callable[[str], None]) -> None:
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        run_python("import sys\nsys.modules['tqdm'] = None\nimport tqdm")
