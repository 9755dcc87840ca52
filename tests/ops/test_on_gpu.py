"""The references on a CUDA GPU keep the contracts that they keep on the CPU. Recorded runs are in results/."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsattn.keys import Layout
from dsattn.ops import (
    dense_gqa,
    dense_mla,
    dsa_attention,
    indexer_kl,
    indexer_scores,
    output_gate,
    select_keys,
    sparse_gqa,
    sparse_mla,
)
from dsattn.selection import Selection
from dsattn.testing import (
    LAYOUTS,
    SCORES,
    Case,
    Sizes,
    error_budget,
    hostile_scores,
    make_case,
    naive_attention,
    naive_ranking,
    random_selection,
    tensor_similarity,
)

pytestmark = pytest.mark.gpu
GPU = "cuda"


def _selection(case: Case) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)


OPS: dict[str, Callable[[Case, Selection], tuple[Tensor, ...]]] = {
    "sparse_mla": lambda c, s: sparse_mla(c.q, c.kv, s, scale=c.scale, value_dim=c.sizes.value_dim, sink=c.sink)[:1],
    "sparse_gqa": lambda c, s: sparse_gqa(c.q, c.k, c.v, s, scale=c.scale, sink=c.sink)[:1],
    "dense_mla": lambda c, s: dense_mla(c.q, c.kv, c.keys, scale=c.scale, value_dim=c.sizes.value_dim, sink=c.sink)[:1],
    "dense_gqa": lambda c, s: dense_gqa(c.q, c.k, c.v, c.keys, scale=c.scale, sink=c.sink)[:1],
    "dsa_attention": lambda c, s: dsa_attention(
        c.q, c.kv, s, c.q_i, c.k_i, c.w, c.keys, scale=c.scale, kl_weight=0.5, value_dim=c.sizes.value_dim
    )[::2],
    "indexer_kl": lambda c, s: (indexer_kl(c.q_i, c.k_i, c.w, c.q, c.kv, _lse(c, s), c.keys, s, scale=c.scale),),
    "output_gate": lambda c, s: (output_gate(c.grad_out, c.grad_out),),
}
LEAVES = ("q", "kv", "k", "v", "q_i", "k_i", "w", "sink", "grad_out")


def _lse(case: Case, selection: Selection) -> Tensor:
    return sparse_mla(case.q, case.kv, selection, scale=case.scale, value_dim=case.sizes.value_dim)[1].detach()


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
    from dsattn.ops import select_topk

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_its_budget(dtype: torch.dtype) -> None:
    sizes = Sizes(heads=8, width=96, value_dim=64, top_k=64)
    rounded = make_case(Layout.packed([300, 1, 211]), sizes, dtype=dtype, device=GPU)
    exact = rounded.map(lambda x: x.double())
    selection = _selection(rounded)
    mask = selection.mask(rounded.layout.num_keys)

    def run(case: Case, naive: bool) -> list[Tensor]:
        q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
        if naive:
            values = kv[:, None, : sizes.value_dim]
            out, _ = naive_attention(q, kv[:, None], values, mask, scale=case.scale)
        else:
            out, _ = sparse_mla(q, kv, selection, scale=case.scale, value_dim=sizes.value_dim)
        return [out.detach(), *torch.autograd.grad(out, (q, kv), case.grad_out)]

    plain, truth = run(rounded, True), run(exact, True)
    for index, got in enumerate(run(rounded, False)):
        assert not error_budget(got, truth[index], plain[index])
        assert tensor_similarity(got, truth[index]) > 1 - (1e-3 if index == 0 else 3e-3)


@pytest.mark.parametrize("op", ["sparse_mla", "sparse_gqa", "dense_mla", "dense_gqa", "dsa_attention", "indexer_kl"])
def test_deterministic_gradients_repeat_bit_for_bit(op: str) -> None:
    case = make_case(Layout.packed([900]), Sizes(top_k=64), device=GPU)
    from dsattn import settings

    with settings(deterministic=True):
        first = _outputs_and_gradients(op, case)
        for _ in range(100):
            again = _outputs_and_gradients(op, case)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_scores_equal_the_cpu_to_rounding() -> None:
    case, host = make_case("packed", device=GPU), make_case("packed", dtype=torch.float64)
    got = indexer_scores(case.q_i, case.k_i, case.w, case.keys)
    expected = indexer_scores(host.q_i, host.k_i, host.w, host.keys)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_strict_forbids_the_reference_on_a_gpu() -> None:
    from dsattn import settings
    from dsattn.backends import TABLE
    from dsattn.errors import BackendUnavailable

    if any(len(rows) > 1 for rows in TABLE.values()):
        pytest.skip("kernels are listed; their own tests cover strict")
    case = make_case("causal", device=GPU)
    with settings(strict=True), pytest.raises(BackendUnavailable, match="strict forbids the reference on cuda"):
        select_keys(case.q_i, case.k_i, case.w, case.keys, 4)
