"""Every kernel file names the tests that show its exactness and that its results repeat bit for bit."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
BACKENDS = ROOT / "src" / "dsattn" / "backends"


class Shown(NamedTuple):
    """Tests, each `file::function` below tests/. exact: against an oracle. repeats: bitwise."""

    exact: tuple[str, ...]
    repeats: tuple[str, ...]


def _shown(file: str, *exact: str, repeats: str) -> Shown:
    return Shown(tuple(f"{file}::{test}" for test in exact), (f"{file}::{repeats}",))


BUDGET = "test_half_precision_is_within_budget"
DENSE = _shown("backends/triton/test_dense.py", "test_shapes", "test_layouts", BUDGET, repeats="test_repeats")
KL_SELECTED = _shown(
    "backends/triton/test_indexer_kl.py",
    *("test_shapes", "test_layouts", "test_bf16_is_within_budget", "test_many_rows"),
    repeats="test_deterministic_repeats",
)
KL_RANGES = _shown(
    "backends/triton/test_indexer_kl_dense.py",
    *("test_shapes", "test_packed_documents_with_poison", "test_bf16_is_within_budget"),
    repeats="test_repeats_bit_for_bit",
)
HOPPER = _shown(
    "backends/hopper/test_sparse_mla.py",
    *("test_is_within_budget", "test_layouts", "test_many_tiles"),
    repeats="test_deterministic_repeats",
)
MANIFEST = {
    "triton/select.py": Shown(
        exact=(
            "backends/triton/test_select.py::test_topk_against_sorted_python_numbers",
            "backends/triton/test_select.py::test_keys_against_sorted_python_numbers",
            "backends/triton/test_select.py::test_half_precision_on_a_gpu",
        ),
        repeats=(
            "backends/triton/test_select.py::test_bits_do_not_depend_on_blocks_or_company",
            "ops/test_on_gpu.py::test_selection_bits_do_not_depend_on_blocks_or_neighbours",
        ),
    ),
    "triton/select_scores.py": Shown(
        exact=(
            "backends/triton/test_select.py::test_keys_against_sorted_python_numbers",
            "backends/triton/test_select_scores.py::test_whole_numbers_give_the_selection_of_the_rule",
            "backends/triton/test_select_scores.py::test_within_the_bar",
        ),
        repeats=(
            "backends/triton/test_select.py::test_bits_do_not_depend_on_blocks_or_company",
            "backends/triton/test_select_scores.py::test_bits_follow_from_row_and_key_alone",
        ),
    ),
    "triton/quantize.py": _shown(
        "backends/triton/test_quantize.py",
        *("test_bytes_and_scales", "test_strides_and_factors"),
        repeats="test_repeats_at_any_size",
    ),
    "triton/invert.py": _shown(
        "backends/triton/test_invert.py",
        *("test_equals_sorting", "test_places", "test_real_sizes"),
        repeats="test_repeats",
    ),
    "triton/sparse_mla.py": _shown(
        "backends/triton/test_sparse_mla.py",
        *("test_shapes", "test_layouts", BUDGET),
        repeats="test_deterministic_repeats",
    ),
    "triton/sparse_gqa.py": _shown(
        "backends/triton/test_sparse_gqa.py",
        *("test_shapes", "test_layouts", BUDGET),
        repeats="test_deterministic_repeats",
    ),
    "triton/dense.py": DENSE,
    "triton/dense_backward.py": DENSE,
    "triton/chunks.py": DENSE,
    "triton/lines.py": DENSE,
    "triton/indexer_kl.py": KL_SELECTED,
    "triton/indexer_kl_dense.py": KL_RANGES,
    "triton/indexer_kl_rows.py": Shown(KL_SELECTED.exact + KL_RANGES.exact, KL_SELECTED.repeats + KL_RANGES.repeats),
    "hopper/sparse_mla_forward.py": HOPPER,
    "hopper/sparse_mla_backward.py": HOPPER,
    "hopper/sparse_mla_reduce.py": HOPPER,
    "hopper/sparse_mla_tiles.py": HOPPER,
    "hopper/dsa_attention.py": _shown(
        "backends/hopper/test_dsa_attention.py",
        *("test_shares_are_sums_over_heads", "test_equals_the_composed_operation"),
        repeats="test_equals_the_composed_operation",
    ),
    "hopper/select_scores.py": _shown(
        "backends/hopper/test_select.py",
        "test_whole_numbers_give_the_selection_of_the_rule",
        repeats="test_bits_follow_from_row_and_key_alone",
    ),
}


def kernel_files() -> dict[str, str]:
    """File below backends/ -> its text, where it holds functions that Triton compiles."""
    found = {}
    for folder in ("triton", "hopper"):
        for path in sorted((BACKENDS / folder).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if compiles(text):
                found[f"{folder}/{path.name}"] = text
    return found


def compiles(source: str) -> bool:
    """Whether a function of the source is decorated with `triton.jit` or `gluon.jit`, or with a call of it."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return any(ast.unparse(one).split("(")[0].endswith(".jit") for node in functions for one in node.decorator_list)


def exists(test: str) -> bool:
    name, _, function = test.partition("::")
    path = ROOT / "tests" / name
    if not path.is_file():
        return False
    defined = {
        node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    }
    return function.startswith("test_") and function in defined


def problems(files: dict[str, str], manifest: dict[str, Shown]) -> Iterator[str]:
    yield from (f"{name} has kernels and no row in MANIFEST" for name in files.keys() - manifest.keys())
    yield from (f"{name} is in MANIFEST and has no kernels" for name in manifest.keys() - files.keys())
    for name, shown in manifest.items():
        for what, tests in shown._asdict().items():
            if not tests:
                yield f"{name}: no test under `{what}`"
            yield from (f"{name}: there is no test {test}" for test in tests if not exists(test))


def test_every_kernel_names_its_tests() -> None:
    found = list(problems(kernel_files(), MANIFEST))
    assert not found, "\n".join(found)


SOUND = Shown(("backends/triton/test_manifest.py::test_a_gap_is_seen",), ("test_rules.py::test_source_keeps",))


@pytest.mark.parametrize(
    ("files", "manifest", "problem"),
    [
        ({"triton/new.py": ""}, {}, "triton/new.py has kernels and no row in MANIFEST"),
        ({}, {"triton/old.py": SOUND}, "triton/old.py is in MANIFEST and has no kernels"),
        ({"a.py": ""}, {"a.py": SOUND._replace(repeats=())}, "a.py: no test under `repeats`"),
        (
            {"a.py": ""},
            {"a.py": SOUND._replace(exact=("test_rules.py::no",))},
            "a.py: there is no test test_rules.py::no",
        ),
        ({"a.py": ""}, {"a.py": SOUND._replace(exact=("no.py::test_x",))}, "a.py: there is no test no.py::test_x"),
    ],
)
def test_a_gap_is_seen(files: dict[str, str], manifest: dict[str, Shown], problem: str) -> None:
    assert list(problems(files, manifest)) == [problem]
    assert not list(problems({"a.py": ""}, {"a.py": SOUND}))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("@triton.jit\ndef f(): ...", True),
        ("@triton.jit(do_not_specialize=['n'])\ndef f(): ...", True),
        ("@gluon.jit\ndef f(): ...", True),
        ("def f(): ...  # triton.jit", False),
    ],
)
def test_kernels_are_found(source: str, found: bool) -> None:
    assert compiles(source) == found
