"""Indexer scores: the formula, its gradient, its bits wherever a row and a key stand, and what nobody reads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops.indexer import indexer_scores, score_block, tile_shape, wide_dtype
from dsattn.testing import LAYOUTS, Case, Sizes, error_budget, make_case, naive_scores, strided

TILE_ROWS, TILE_KEYS = tile_shape(torch.device("cpu"))


def scores_of(case: Case, **options: Any) -> Tensor:
    return indexer_scores(case.q_i, case.k_i, case.w, case.keys, **options)


def leaves(case: Case) -> Case:
    return case.map(lambda x: x.detach().clone().requires_grad_())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("relu", [True, False])
def test_equals_the_formula(name: str, relu: bool) -> None:
    case = make_case(name, dtype=torch.float64)
    scores = scores_of(case, relu=relu)
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores, naive_scores(case.q_i, case.k_i, case.w, case.keys, relu=relu))
    single = scores_of(case.map(lambda x: x.float()), relu=relu)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), scores, rtol=1e-5, atol=1e-5)


def test_relu_stands_between_product_and_weight() -> None:
    """Products +3 and -3 with weights 1 give 3, not 0; a negative weight makes a negative score."""
    keys = Layout.causal(1).keys
    q = torch.tensor([[[3.0], [-3.0]]])
    one = torch.ones(1, 1)
    assert indexer_scores(q, one, torch.tensor([[1.0, 1.0]]), keys).item() == 3
    assert indexer_scores(q, one, torch.tensor([[1.0, 1.0]]), keys, relu=False).item() == 0
    assert indexer_scores(q.abs(), one, torch.tensor([[1.0, -2.0]]), keys).item() == -3


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("name", ["packed", "padded", "context_parallel"])
def test_gradients_equal_autograd_of_the_formula(name: str, relu: bool) -> None:
    case = make_case(name, dtype=torch.float64)
    got, exact = leaves(case), leaves(case)
    weight = torch.randn(case.keys.num_rows, case.layout.num_keys, dtype=torch.float64)
    visible = case.keys.mask(case.layout.num_keys)
    (scores_of(got, relu=relu).masked_fill(~visible, 0) * weight).sum().backward()
    oracle = naive_scores(exact.q_i, exact.k_i, exact.w, exact.keys, relu=relu)
    (oracle.masked_fill(~visible, 0) * weight).sum().backward()
    for ours, wanted in ((got.q_i, exact.q_i), (got.k_i, exact.k_i), (got.w, exact.w)):
        torch.testing.assert_close(ours.grad, wanted.grad)


@pytest.mark.parametrize("relu", [True, False])
def test_gradcheck(relu: bool) -> None:
    case = leaves(make_case(Layout.packed([4, 0, 3], total=8), dtype=torch.float64, poison=False))
    visible = case.keys.mask(8)

    def visible_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return indexer_scores(q, k, w, case.keys, relu=relu)[visible]

    assert torch.autograd.gradcheck(visible_scores, (case.q_i, case.k_i, case.w))


def test_poisoned_padding_gets_exactly_zero_gradient() -> None:
    case = leaves(make_case("padded"))
    scores = scores_of(case)
    assert not scores.isnan().any()
    visible = case.keys.mask(case.layout.num_keys)
    scores[visible].sum().backward()
    for x, dead in ((case.q_i, ~visible.any(1)), (case.w, ~visible.any(1)), (case.k_i, ~visible.any(0))):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert dead.any()
        assert not x.grad[dead].any()


@pytest.mark.parametrize("width", [8, 37, 128])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("offset", [1, 3, TILE_ROWS - 2, TILE_KEYS - 7])
def test_bits_do_not_depend_on_place_or_company(width: int, heads: int, offset: int) -> None:
    sizes = Sizes(index_heads=heads, index_width=width)
    case = make_case(Layout.causal(45), sizes)
    other = make_case(Layout.causal(offset + 45 + 9), sizes, seed=1)
    q, k, w = other.q_i * 1e20, other.k_i * 1e20, other.w
    q[:3], k[0] = torch.nan, torch.nan
    here = slice(offset, offset + 45)
    q[here], k[here], w[here] = case.q_i, case.k_i, case.w
    together = indexer_scores(q, k, w, Layout.packed([offset, 45, 9]).keys)
    assert together[here, here].equal(scores_of(case))


def test_bits_do_not_depend_on_strides_or_threads() -> None:
    case = make_case("tile_edge")
    expected = scores_of(case)
    assert scores_of(case.map(strided)).equal(expected)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert scores_of(case).equal(expected)
    finally:
        torch.set_num_threads(threads)


def test_blocks_of_keys_have_the_same_bits() -> None:
    case = make_case(Layout.causal(2 * TILE_KEYS + 60))
    whole = score_block(case.q_i, case.k_i, case.w, 0, len(case.k_i), True)
    for first, stop in ((0, TILE_KEYS), (TILE_KEYS, 2 * TILE_KEYS + 60), (TILE_KEYS, TILE_KEYS + 1)):
        assert score_block(case.q_i, case.k_i, case.w, first, stop, True).equal(whole[:, first:stop])
    rows = slice(TILE_ROWS, TILE_ROWS + 17)
    part = score_block(case.q_i[rows], case.k_i, case.w[rows], 0, len(case.k_i), True)
    assert part.equal(whole[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands_are_multiplied_in_fp32(dtype: torch.dtype) -> None:
    case = make_case("packed", dtype=dtype)
    scores = scores_of(case)
    assert scores.dtype == torch.float32
    exact = naive_scores(*(x.double() for x in (case.q_i, case.k_i, case.w)), case.keys)
    visible = case.keys.mask(case.layout.num_keys)
    torch.testing.assert_close(scores[visible].double(), exact[visible], rtol=1e-5, atol=1e-5)


def test_half_precision_gradients_are_within_budget() -> None:
    case = make_case("packed", dtype=torch.bfloat16)
    visible = case.keys.mask(case.layout.num_keys)
    got, low, exact = leaves(case), leaves(case), leaves(case.map(lambda x: x.double()))
    scores_of(got)[visible].sum().backward()
    naive_scores(low.q_i, low.k_i, low.w, low.keys)[visible].sum().backward()
    naive_scores(exact.q_i, exact.k_i, exact.w, exact.keys)[visible].sum().backward()
    for name in ("q_i", "k_i", "w"):
        ours, plain, wanted = (getattr(one, name).grad for one in (got, low, exact))
        assert ours.dtype == torch.bfloat16
        assert not error_budget(ours, wanted, plain), name


def test_products_beyond_half_precision() -> None:
    keys = Layout.causal(2).keys
    big = torch.full((2, 1, 1), 60000.0, dtype=torch.float16)
    scores = indexer_scores(big, big[:, 0], torch.ones(2, 1, dtype=torch.float16), keys)
    assert scores[1].tolist() == [3.6e9, 3.6e9]


def test_hostile_operands_stay_with_their_row_or_key() -> None:
    case = make_case("packed")
    clean = scores_of(case)
    q, k = case.q_i.clone(), case.k_i.clone()
    q[10], k[20] = torch.nan, torch.inf
    scores = indexer_scores(q, k, case.w, case.keys)
    touched = torch.zeros_like(clean, dtype=torch.bool)
    touched[10], touched[:, 20] = True, True
    assert scores[~touched].equal(clean[~touched])
    assert scores[10, 5:11][case.keys.mask(k.shape[0])[10, 5:11]].isnan().all()


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_no_rows_or_no_keys(rows: int, keys: int) -> None:
    ranges = KeyRange(torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32))
    q, k, w = (torch.randn(shape, requires_grad=True) for shape in ((rows, 2, 4), (keys, 4), (rows, 2)))
    scores = indexer_scores(q, k, w, ranges)
    assert scores.shape == (rows, keys)
    scores.sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


Q, K, W = torch.zeros(3, 2, 4), torch.zeros(5, 4), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("q", "k", "w", "rows", "says"),
    [
        (Q[0], K, W, 3, r"q must be \[T, H_I, D\], got \[2, 4\]; fold a batch into T"),
        (Q, K[:, :3], W, 3, r"k must be \[S, 4\] to meet q \[3, 2, 4\], got \[5, 3\]"),
        (Q, K[None], W, 3, r"k must be \[S, 4\]"),
        (Q, K, W[:2], 3, r"w must be \[3, 2\] to meet q \[3, 2, 4\], got \[2, 2\]"),
        (Q, K, W[..., None], 3, r"w must be \[3, 2\]"),
        (Q, K, W, 4, "keys has 4 rows, q has 3"),
        (Q.int(), K, W, 3, "q must be floating point, got torch.int32"),
        (Q, K, W.long(), 3, "w must be floating point, got torch.int64"),
    ],
)
def test_refuses(q: Tensor, k: Tensor, w: Tensor, rows: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        indexer_scores(q, k, w, Layout.causal(rows).keys)


def test_refuses_what_is_no_range_or_lives_elsewhere() -> None:
    with pytest.raises(InputError, match="KeyRange, got Layout; that of a layout is layout"):
        indexer_scores(Q, K, W, Layout.causal(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"keys is on meta, q on cpu; use layout.to\(q.device\)"):
        indexer_scores(Q, K, W, Layout.causal(3).keys.to("meta"))


def test_wide_dtype() -> None:
    half, double = torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.float64)
    assert wide_dtype(half, half) == torch.float32
    assert wide_dtype(half, double) == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [torch.clone, strided])
def test_opcheck(dtype: torch.dtype, change: Any) -> None:
    case = make_case(Layout.packed([4, 0, 3]), dtype=dtype).map(lambda x: change(x).requires_grad_())
    operands = (case.q_i, case.k_i, case.w, case.keys.start, case.keys.stop)
    torch.library.opcheck(torch.ops.dsattn.indexer_scores.default, (*operands, True))
    grad = torch.randn(7, 7)
    inputs = (grad, *(x.detach() for x in operands), False)
    torch.library.opcheck(torch.ops.dsattn.indexer_scores_backward.default, inputs)


def test_compiles_whole() -> None:
    case = make_case("packed")
    got, exact = leaves(case), leaves(case)

    def loss(q: Tensor, k: Tensor, w: Tensor, keys: KeyRange) -> Tensor:
        scores = indexer_scores(q, k, w, keys)
        return scores.masked_fill(scores == -torch.inf, 0).square().sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(got.q_i, got.k_i, got.w, case.keys).backward()
    loss(exact.q_i, exact.k_i, exact.w, case.keys).backward()
    assert got.q_i.grad is not None
    assert exact.q_i.grad is not None
    assert got.q_i.grad.equal(exact.q_i.grad)
