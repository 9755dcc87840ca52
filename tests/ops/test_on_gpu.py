"""The operations on a CUDA GPU, by whatever `auto` takes, keep the contracts that they keep on the CPU."""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import settings
from dsattn.errors import BackendUnavailable
from dsattn.keys import Layout
from dsattn.ops import (
    dense_gqa,
    dense_mla,
    dsa_attention,
    first_use,
    indexer_kl,
    indexer_scores,
    output_gate,
    select_keys,
    select_topk,
    sparse_gqa,
    sparse_mla,
)
from dsattn.selection import Selection
from dsattn.testing import (
    LAYOUTS,
    SCORES,
    Case,
    hostile_scores,
    make_case,
    naive_ranking,
    random_selection,
)

pytestmark = pytest.mark.gpu
GPU = "cuda"
ROOT = Path(__file__).parents[2]
BARS = (
    *("sparse_mla", "dense_mla", "sparse_gqa", "dense_gqa", "indexer_kl_sparse", "indexer_kl_dense"),
    *("dsa_attention", "output_gate"),
)


def _selection(case: Case) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)


OPS: dict[str, Callable[[Case, Selection], tuple[Tensor, ...]]] = {
    "sparse_mla": lambda c, s: sparse_mla(c.q, c.kv, s, **_flags(c))[:1],
    "sparse_gqa": lambda c, s: sparse_gqa(c.q, c.k, c.v, s, scale=c.scale, sink=c.sink)[:1],
    "dense_mla": lambda c, s: dense_mla(c.q, c.kv, c.keys, **_flags(c))[:1],
    "dense_gqa": lambda c, s: dense_gqa(c.q, c.k, c.v, c.keys, scale=c.scale, sink=c.sink)[:1],
    "dsa_attention": lambda c, s: dsa_attention(c.q, c.kv, s, c.q_i, c.k_i, c.w, c.keys, kl_weight=0.5, **_flags(c))[
        ::2
    ],
    "indexer_kl_sparse": lambda c, s: (_loss(c, s, sparse_mla(c.q, c.kv, s, **_flags(c))[1].detach()),),
    "indexer_kl_dense": lambda c, s: (_loss(c, None, dense_mla(c.q, c.kv, c.keys, **_flags(c))[1].detach()),),
    "output_gate": lambda c, s: (output_gate(c.grad_out, c.grad_out),),
}
LEAVES = ("q", "kv", "k", "v", "q_i", "k_i", "w", "sink", "grad_out")


def _flags(case: Case) -> dict[str, Any]:
    return {"scale": case.scale, "value_dim": case.sizes.value_dim, "sink": case.sink}


def _loss(case: Case, selection: Selection | None, lse: Tensor) -> Tensor:
    return indexer_kl(case.q_i, case.k_i, case.w, case.q, case.kv, lse, case.keys, selection, scale=case.scale)


def _outputs_and_gradients(op: str, case: Case) -> dict[str, Tensor]:
    case = case.map(lambda x: x.detach().clone().requires_grad_())
    results = OPS[op](case, _selection(case))
    seeds = [torch.cos(torch.arange(r.numel(), device=r.device, dtype=r.dtype)).view_as(r) for r in results]
    leaves = {name: getattr(case, name) for name in LEAVES}
    grads = torch.autograd.grad(results, tuple(leaves.values()), seeds, allow_unused=True)
    named = dict(zip(leaves, grads, strict=True))
    found = {f"d{name}": grad for name, grad in named.items() if grad is not None}
    return {**{f"out{i}": r.detach() for i, r in enumerate(results)}, **found}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "nothing"])
def test_equals_the_cpu(op: str, layout: str) -> None:
    if op == "output_gate" and layout != "causal":
        pytest.skip("a gate knows no layout; one is enough")
    expected = _outputs_and_gradients(op, make_case(layout, dtype=torch.float64))
    got = _outputs_and_gradients(op, make_case(layout, dtype=torch.float32, device=GPU))
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value.cpu().double(), expected[name], rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize("scores", SCORES)
def test_the_ranking_rule(scores: str) -> None:
    values = hostile_scores(scores, 33, 257)
    layout = Layout.packed([257])
    keys = layout.keys.row_slice(224, 257)
    for top_k in (1, 7, 64, 300):
        index, length = naive_ranking(values, keys, top_k)
        got = select_topk(values.to(GPU), keys.to(GPU), top_k)
        assert got.index.tolist() == index
        assert got.length.tolist() == length


def test_selection_bits_do_not_depend_on_blocks_or_neighbours() -> None:
    torch.manual_seed(0)
    lengths, heads, width, top_k = [1500, 0, 5000, 1, 3700], 8, 64, 128
    total = sum(lengths)
    q, k = torch.randn(total, heads, width, device=GPU), torch.randn(total, width, device=GPU)
    w = torch.randn(total, heads, device=GPU)
    layout = Layout.packed(lengths).to(GPU)
    whole = select_keys(q, k, w, layout.keys, top_k, return_scores=True)
    for block_bytes in (1, 2**26):
        cut = select_keys(q, k, w, layout.keys, top_k, return_scores=True, block_bytes=block_bytes)
        assert torch.equal(cut.index, whole.index)
        assert torch.equal(cut.score, whole.score)  # pyright: ignore[reportArgumentType]
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = select_keys(q[part], k[part], w[part], Layout.packed([length]).to(GPU).keys, top_k, return_scores=True)
        moved = torch.where(alone.index < 0, -1, alone.index + first)
        assert torch.equal(moved, whole.index[part])
        assert torch.equal(alone.score, whole.score[part])  # pyright: ignore[reportArgumentType, reportOptionalSubscript]
        first += length


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    """What writes the records of these errors measures them here."""
    sys.path.insert(0, str(ROOT / "results"))
    try:
        return importlib.import_module("record_errors")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("op", BARS)
def test_low_precision_stays_within_its_budget(op: str, recorder: ModuleType) -> None:
    assert set(BARS) == set(recorder.OPS)
    for layout in recorder.LAYOUTS:
        measured = recorder.measure(op, layout, torch.bfloat16)
        broken = {name: figures["problems"] for name, figures in measured.items() if figures["problems"]}
        assert not broken, layout


@pytest.mark.parametrize("op", ["select_keys", "select_topk"])
def test_selections_are_those_of_sorted_numbers(op: str, recorder: ModuleType) -> None:
    assert not recorder.wrong_selections(op)


@pytest.mark.parametrize("op", [op for op in BARS if op != "output_gate"])
def test_deterministic_gradients_repeat_bit_for_bit(op: str, recorder: ModuleType) -> None:
    case, selection = recorder.case_of(op, "packed", torch.bfloat16, GPU)
    with settings(deterministic=True):
        first = recorder.results_of(op, recorder.OPS[op][2], case, selection)
        for _ in range(100):
            again = recorder.results_of(op, recorder.OPS[op][2], case, selection)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_a_first_use_check_takes_little(recorder: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a published geometry; compiling, which the call itself would do, is left out."""
    taken = []

    def timed(*arguments: Any) -> str | None:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        problem = verdict(*arguments)
        torch.cuda.synchronize()
        taken.append((arguments[0], time.perf_counter() - begun))
        return problem

    verdict = first_use._verdict
    monkeypatch.setattr(first_use, "_verdict", timed)
    for _ in range(2):  # the first round compiles
        taken.clear()
        monkeypatch.setattr(first_use, "_verdicts", {})
        for op in ("dsa_attention", "dense_gqa", "sparse_gqa", "dense_mla"):
            case, selection = recorder.case_of(op, "packed", torch.bfloat16, GPU)
            recorder.results_of(op, recorder.OPS[op][2], case, selection)
        select_keys(case.q_i, case.k_i, case.w, case.keys, 2048)
    assert taken
    assert not [one for one in taken if one[1] > 0.5]


def test_scores_equal_the_cpu_to_rounding() -> None:
    case, host = make_case("packed", device=GPU), make_case("packed", dtype=torch.float64)
    got = indexer_scores(case.q_i, case.k_i, case.w, case.keys)
    expected = indexer_scores(host.q_i, host.k_i, host.w, host.keys)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_strict_forbids_the_reference_on_a_gpu() -> None:
    """An operation that has no kernels; one that has them goes on."""
    case = make_case("causal", device=GPU)
    with settings(strict=True):
        with pytest.raises(BackendUnavailable, match="strict forbids the reference on cuda"):
            indexer_scores(case.q_i, case.k_i, case.w, case.keys)
        select_keys(case.q_i, case.k_i, case.w, case.keys, 4)
