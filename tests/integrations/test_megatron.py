"""Our layers in Megatron Core's models. What needs the package runs in processes of its own: see megatron_parity.py."""

import ast
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsattn.errors import ConfigError, InputError
from dsattn.integrations import megatron
from dsattn.integrations.megatron import Options, with_dsattn

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
BAR = 2e-5  # fp32, relative to the largest value
UNPACKED = ROOT / ".venv" / "megatron"
NO_MEGATRON = "no megatron-core: `make test` downloads it into .venv/megatron, where pip can"


def megatron_folder() -> Path | None:
    """Where the package is: unpacked by the Makefile, or installed."""
    if (UNPACKED / "megatron" / "core").is_dir():
        return UNPACKED
    found = importlib.util.find_spec("megatron")
    return Path(next(iter(found.submodule_search_locations or []))).parent if found else None


needs_megatron = pytest.mark.skipif(megatron_folder() is None, reason=NO_MEGATRON)


@pytest.mark.slow
@needs_megatron
def test_parity(tmp_path: Path) -> None:
    """One run of two processes; every comparison, and the table of docs/megatron.md has the same rows."""
    out = tmp_path / "out.json"
    command = [sys.executable, HERE / "megatron_parity.py", out, megatron_folder()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    wrong = [row for row in found["rows"] if not row["difference"] <= BAR]
    assert not wrong, f"seed {found['seed']}: {wrong[:5]}"
    counted: dict[str, int] = {}
    for row in found["rows"]:
        counted[row["what"]] = counted.get(row["what"], 0) + 1
    told = {what: (int(count), largest) for what, count, largest in table(ROOT / "docs" / "megatron.md")}
    assert {what: count for what, (count, _) in told.items()} == counted
    assert all(largest == "equal" or float(largest) <= BAR for _, largest in told.values())


def table(page: Path) -> list[tuple[str, str, str]]:
    """The rows that megatron_parity.table has written."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^\| ([^|]+) \| (\d+) \| ([^|]+) \|$", text, re.MULTILINE)


def test_a_difference_is_seen(tmp_path: Path) -> None:
    """The report divides by Megatron's largest value, and a missing tensor is a difference without end."""
    code = (HERE / "megatron_parity.py").read_text(encoding="utf-8")
    report = next(node for node in ast.parse(code).body if isinstance(node, ast.ClassDef) and node.name == "Report")
    import torch

    space: dict[str, Any] = {"Any": Any, "Tensor": torch.Tensor}
    exec(compile(ast.Module([report], []), "report", "exec"), space)
    held = space["Report"]()
    held.add("x", "near", torch.tensor([4.0, 1.0]), torch.tensor([4.0, 1.1]))
    held.add("x", "absent", torch.tensor([4.0]), None)
    held.exact("x", "other", False)
    assert [row["difference"] > BAR for row in held.rows] == [True, True, True]
    assert held.rows[0]["difference"] == pytest.approx(0.025)


@dataclasses.dataclass
class Spec:
    """As Megatron's ModuleSpec."""

    module: Any = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    submodules: Any = None


@dataclasses.dataclass
class Submodules:
    core_attention: Any = None
    self_attention: Any = None
    layer_specs: Any = None
    mtp: Any = None


@dataclasses.dataclass
class MultiTokenPredictionBlockSubmodules:
    layer_specs: Any = None


class DSAttention: ...


class AbsorbedMLASelfAttention: ...


def config(**fields: Any) -> SimpleNamespace:
    needed = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 64, "dsa_indexer_topk": 4, "num_layers": 3}
    return SimpleNamespace(**{**needed, **fields})


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in place of the classes that Megatron's are needed for."""
    monkeypatch.setattr(megatron, "core_attention", lambda: "our core")
    monkeypatch.setattr(megatron, "self_attention", lambda: "our layer")


def layer(core: Any = DSAttention) -> Spec:
    inner = Spec(core, {"kept": 1})
    return Spec("TransformerLayer", submodules=Submodules(self_attention=Spec(
        AbsorbedMLASelfAttention, {"attn_mask_type": "causal"}, Submodules(core_attention=inner)
    )))  # fmt: skip


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("whole", [False, True])
def test_every_layer_is_changed_and_the_spec_stays(whole: bool) -> None:
    options = Options(backend="reference")
    mtp = MultiTokenPredictionBlockSubmodules([layer(("megatron.core.dsa", "DSAttention"))])
    spec = Submodules(layer_specs=[layer(), layer()], mtp=mtp)
    changed = with_dsattn(spec, config(), whole=whole, options=options)
    for one, offset in ((changed.layer_specs[1], 0), (changed.mtp.layer_specs[0], 3)):
        attention = one.submodules.self_attention
        assert attention.module == ("our layer" if whole else AbsorbedMLASelfAttention)
        assert attention.params == {"attn_mask_type": "causal"} | ({"options": options} if whole else {})
        core = attention.submodules.core_attention
        assert core.module == "our core"
        assert core.params == {"kept": 1, "options": options, "layer_offset": offset, "whole": whole}
    assert spec.layer_specs[0].submodules.self_attention.submodules.core_attention.module is DSAttention


@pytest.mark.usefixtures("classes")
def test_a_spec_without_dsa_is_refused() -> None:
    with pytest.raises(InputError, match="holds no DSAttention"):
        with_dsattn(Spec("TransformerLayer", submodules=Submodules()), config())
    with pytest.raises(ConfigError, match="dsa_indexer_topk=None"):
        with_dsattn(layer(), config(dsa_indexer_topk=None))


FLAG = re.compile(r"^\| `--([a-z0-9-]+)`")


def megatron_names() -> set[str]:
    """Every field of Megatron's dataclasses and every flag of its parser, from the text of the package."""
    folder = megatron_folder()
    assert folder is not None
    names: set[str] = set()
    for path in [
        *(folder / "megatron" / "core").glob("**/*config*.py"),
        *(folder / "megatron" / "training").glob("**/*.py"),
    ]:
        text = path.read_text(encoding="utf-8")
        names |= set(re.findall(r"^    (\w+)\s*:", text, re.MULTILINE))
        names |= {one.replace("-", "_") for one in re.findall(r"""['"]--([a-z0-9-]+)['"]""", text)}
    return names


@needs_megatron
def test_the_migration_table_names_what_megatron_has() -> None:
    flags = [found[1] for line in guide() if (found := FLAG.match(line))]
    assert len(flags) > 40
    known = megatron_names()
    assert not [flag for flag in flags if flag.replace("-", "_") not in known]
    assert "dsa_indexer_no_such_field" not in known


def test_the_migration_table_names_what_we_have() -> None:
    from dsattn import config as ours

    kinds = {name: kind for name, kind in vars(ours).items() if dataclasses.is_dataclass(kind)}
    for line in guide():
        if FLAG.match(line):
            for kind, field in re.findall(r"`(\w+Config)\.(\w+)`", line):
                assert field in {one.name for one in dataclasses.fields(kinds[kind])}, line


def guide() -> list[str]:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    return text[text.index("## From Megatron") :].splitlines()
