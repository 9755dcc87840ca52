"""The oracles against published numbers and plain torch, and judges that must condemn."""

import math

import pytest
import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops import indexer_scores
from dsattn.testing import (
    LAYOUTS,
    SCORES,
    Sizes,
    error_budget,
    hostile_scores,
    make_case,
    naive_attention,
    naive_kl,
    naive_ranking,
    naive_scores,
    random_selection,
    strided,
    tensor_similarity,
)


def sines(*shape: int, phase: float, factor: float = 1.0) -> Tensor:
    """The operands of the published example: sin(0.7 i + phase) in C order."""
    return (torch.arange(math.prod(shape), dtype=torch.float64) * 0.7 + phase).sin().mul(factor).view(shape)


GOLDEN_SCORES = [
    [0.32237233, 0.85318332, 0.25226418, 0.64641150, 0.06892265],
    [0.72151994, 0.43374818, 0.92074456, 0.58961678, 0.70667619],
    [-0.20342958, 0.00000000, 0.02439009, -0.35842761, 0.03626401],
    [-0.81790932, -0.35674255, -0.29727744, -0.03158246, -0.62579774],
    [0.34300969, -0.33550175, 0.25650162, -0.09812981, 0.00966725],
]


def golden_operands() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q_i, k_i, w, q, kv."""
    return (
        sines(5, 2, 4, phase=0.1),
        sines(5, 4, phase=0.2),
        sines(5, 2, phase=0.3, factor=0.5),
        sines(5, 2, 6, phase=0.4, factor=2),
        sines(5, 6, phase=0.5, factor=2),
    )


def test_published_example() -> None:
    q_i, k_i, w, q, kv = golden_operands()
    everything = KeyRange(torch.zeros(5, dtype=torch.int32), torch.full((5,), 5, dtype=torch.int32))
    for scorer in (naive_scores, indexer_scores):
        scores = scorer(q_i, k_i, w, everything)
        torch.testing.assert_close(scores, torch.tensor(GOLDEN_SCORES, dtype=torch.float64), rtol=0, atol=5.1e-9)
    keys = Layout.causal(5).keys
    scores = naive_scores(q_i, k_i, w, keys)
    index, length = naive_ranking(scores, keys, 2)
    assert (index, length) == ([[0, -1], [0, 1], [1, 2], [2, 3], [0, 2]], [1, 2, 2, 2, 2])
    selected = torch.zeros(5, 6, dtype=torch.bool).scatter(1, torch.tensor(index) % 6, True)[:, :5]
    out, lse = naive_attention(q, kv[:, None], kv[:, None, :4], selected, scale=0.3)
    assert float(out.sum()) == pytest.approx(24.0912972384, abs=5e-11)
    assert lse[4].tolist() == pytest.approx([3.00834763, 3.44031724], abs=5e-9)
    dense = naive_kl(scores, q, kv[:, None], keys.mask(5), scale=0.3, divisor=5)
    sparse = naive_kl(scores, q, kv[:, None], selected, scale=0.3, divisor=5)
    assert 0.01 * float(dense) == pytest.approx(2.692619402131e-03, abs=5e-16)
    assert 0.01 * float(sparse) == pytest.approx(5.966827441341e-04, abs=5e-17)


def test_naive_attention_is_torch_attention() -> None:
    case = make_case("causal", dtype=torch.float64)
    mask = case.keys.mask(97)
    out, _ = naive_attention(case.q, case.k, case.v, mask, scale=case.scale)
    q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=case.scale, enable_gqa=True)
    torch.testing.assert_close(out, plain[0].transpose(0, 1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_cases_poison_what_nobody_reads(name: str) -> None:
    case = make_case(name)
    visible = case.keys.mask(case.layout.num_keys)
    for x, live in ((case.q, visible.any(1)), (case.w, visible.any(1)), (case.kv, visible.any(0))):
        assert x[live].isfinite().all()
        assert x[~live].isnan().all()
    clean = make_case(name, poison=False)
    assert all(x.isfinite().all() for x in (clean.q, clean.kv, clean.k, clean.v, clean.q_i, clean.k_i, clean.w))
    assert clean.q[visible.any(1)].equal(case.q[visible.any(1)])


def test_cases_take_layouts_sizes_seeds_and_dtypes() -> None:
    sizes = Sizes(heads=6, groups=3, width=10, value_dim=4, index_heads=2, index_width=5, top_k=3)
    case = make_case(Layout.causal(8), sizes, dtype=torch.bfloat16)
    shapes = [list(x.shape) for x in (case.q, case.kv, case.k, case.v, case.q_i, case.k_i, case.w, case.sink)]
    assert shapes == [[8, 6, 10], [8, 10], [8, 3, 10], [8, 3, 4], [8, 2, 5], [8, 5], [8, 2], [6]]
    assert case.grad_out.shape == (8, 6, 4)
    assert case.q.dtype == torch.bfloat16
    assert make_case("causal").q.equal(make_case("causal").q)
    assert not make_case("causal").q.equal(make_case("causal", seed=1).q)
    assert case.map(lambda x: x.double()).k_i.dtype == torch.float64
    with pytest.raises(InputError, match="layout='cyclic' must be one of causal, batch"):
        make_case("cyclic")


def test_case_layouts_cover_what_hurts() -> None:
    layouts = {name: make() for name, make in LAYOUTS.items()}
    lengths = [layout.lengths for layout in layouts.values()]
    assert any(0 in some for some in lengths)
    assert any(1 in some for some in lengths)
    edges = torch.tensor(layouts["packed"].lengths).cumsum(0).tolist()
    assert 128 in edges
    assert {128, 512} <= set(torch.tensor(layouts["tile_edge"].lengths).cumsum(0).tolist())
    assert layouts["context_parallel"].rows.numel() < layouts["context_parallel"].num_keys
    assert sum(not layout.every_row_has_a_key for layout in layouts.values()) >= 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_selections_stay_in_their_ranges(name: str) -> None:
    case = make_case(name)
    selection = random_selection(case.keys, case.layout.num_keys, 7)
    held = selection.mask(case.layout.num_keys)
    assert not (held & ~case.keys.mask(case.layout.num_keys)).any()
    assert held.sum(1).equal(selection.length)
    whole = random_selection(case.keys, case.layout.num_keys, 7, sparse_rows=False)
    assert whole.length.equal(case.keys.lengths().clamp(max=7))
    assert selection.index.shape == whole.index.shape == (case.q.shape[0], 7)


def test_hostile_scores_hold_what_they_promise() -> None:
    made = {name: hostile_scores(name, 16, 64) for name in SCORES}
    assert all(x.shape == (16, 64) and x.dtype == torch.float32 for x in made.values())
    assert made["relu_plateau"].eq(0).float().mean() > 0.8
    assert made["signed_zeros"].signbit().any()
    assert not made["signed_zeros"].any()
    assert made["infinities"].isposinf().any()
    assert made["infinities"].isneginf().any()
    assert made["nan"].isnan().any()
    assert made["only_nan"].isnan().all()
    assert made["beyond_half"].half().isinf().any()
    assert made["near_equal"].view(torch.int32).bitwise_right_shift(10).unique().numel() == 1
    assert made["near_equal"].unique().numel() > 100


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_strided_keeps_values_and_nothing_else(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert strided(x).equal(x)
    assert not strided(x).is_contiguous()
    assert strided(x).stride(0) != x.stride(0)


def test_ranking_rule() -> None:
    keys = KeyRange(torch.tensor([0, 1, -3, 2], dtype=torch.int32), torch.tensor([5, 4, 9, 1], dtype=torch.int32))
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[1, 2, 2, 2, 0], [9, -0.0, 0, nan, 9], [inf, -inf, nan, inf, 1], [1, 1, 1, 1, 1]])
    assert naive_ranking(scores, keys, 3) == ([[1, 2, 3], [1, 2, -1], [0, 3, 4], [-1, -1, -1]], [3, 2, 3, 0])


def test_budget_condemns() -> None:
    a, b = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64)
    exact, plain = a @ b, a.bfloat16() @ b.bfloat16()
    assert error_budget(plain, exact, plain) == []
    assert error_budget(exact.bfloat16(), exact, plain) == []
    # A constant offset too small for the largest error shows in the mean.
    assert [problem.split()[0] for problem in error_budget(plain + 0.1, exact, plain)] == ["mean"]
    one_wrong = plain.clone()
    one_wrong[3, 4] += 1
    assert [problem.split()[0] for problem in error_budget(one_wrong, exact, plain)] == ["largest"]
    one_wrong[3, 4] = torch.nan
    assert error_budget(one_wrong, exact, plain) == ["1 of 4096 values are not finite"]
    assert error_budget(plain[:3], exact, plain) == ["shape [3, 64], expected [64, 64]"]
    assert error_budget(plain[:0], exact[:0], plain[:0]) == []


def test_similarity() -> None:
    x = torch.randn(100)
    assert tensor_similarity(x, x) == pytest.approx(1)
    assert tensor_similarity(-x, x) == pytest.approx(-1)
    assert tensor_similarity(1.1 * x, x) == pytest.approx(2.2 / 2.21)
    assert tensor_similarity(torch.zeros(3), torch.zeros(3)) == 1
    assert math.isnan(tensor_similarity(x, torch.full((100,), torch.nan)))
