"""Selection: the ranking rule on given scores, and the same keys with the same bits without a score matrix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.errors import BackendUnavailable, InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops import indexer_scores, select_keys, select_topk
from dsattn.ops.indexer import tile_shape
from dsattn.quantize import from_e4m3, from_mxfp8, to_e4m3, to_mxfp8
from dsattn.selection import Selection
from dsattn.testing import (
    LAYOUTS,
    SCORES,
    Case,
    Sizes,
    hostile_scores,
    make_case,
    naive_ranking,
    naive_scores,
    strided,
)

INF, NAN = float("inf"), float("nan")
TILE_ROWS, TILE_KEYS = tile_shape(torch.device("cpu"))


def pick(case: Case, **options: Any) -> Selection:
    top_k = options.pop("top_k", case.sizes.top_k)
    return select_keys(case.q_i, case.k_i, case.w, case.keys, top_k, **options)


def assert_same(got: Selection, expected: Selection) -> None:
    assert got.index.equal(expected.index)
    assert got.length.equal(expected.length)
    assert (got.score is None) == (expected.score is None)
    if got.score is not None and expected.score is not None:
        assert got.score.view(torch.int32).equal(expected.score.view(torch.int32))


def everything(rows: int, keys: int) -> KeyRange:
    return KeyRange(torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32))


@pytest.mark.parametrize("name", SCORES)
def test_topk_against_sorted_python_numbers(name: str) -> None:
    keys = Layout.packed([0, 5, 1, 25, 0, 3], padded=[0, 6, 1, 25, 2, 6], total=44).keys
    scores = hostile_scores(name, 44, 44)
    for top_k in (1, 2, 5, 24, 25, 26, 60):
        selection = select_topk(scores, keys, top_k)
        assert (selection.index.tolist(), selection.length.tolist()) == naive_ranking(scores, keys, top_k)
        assert selection.index.shape == (44, top_k)
        assert selection.score is None


@pytest.mark.parametrize("top_k", [1, 3, 5, 7])
def test_topk_of_odd_widths(top_k: int) -> None:
    assert select_topk(torch.randn(3, 7), everything(3, 7), top_k).length.tolist() == [top_k] * 3


def test_topk_ends_that_are_negative_or_swapped() -> None:
    keys = KeyRange(torch.tensor([0, 0, 0, 0, 3, 1]).int(), torch.tensor([-1, 0, 1, 2, 2, 99]).int())
    selection = select_topk(torch.zeros(6, 4), keys, 3)
    assert selection.index.tolist() == [[-1] * 3, [-1] * 3, [0, -1, -1], [0, 1, -1], [-1] * 3, [1, 2, 3]]


def test_topk_skips_nan_and_refills() -> None:
    scores = torch.tensor([[1.0, NAN, 0.5, NAN]])
    assert select_topk(scores, everything(1, 4), 2).index.tolist() == [[0, 2]]


def test_topk_does_not_look_outside_the_range() -> None:
    keys = Layout.packed([3, 4]).keys
    scores = torch.randn(7, 7)
    poisoned = scores.masked_fill(~keys.mask(7), NAN)
    assert_same(select_topk(poisoned, keys, 2), select_topk(scores, keys, 2))
    assert_same(select_topk(scores.masked_fill(~keys.mask(7), INF), keys, 2), select_topk(scores, keys, 2))


def test_topk_cuts_rows_into_blocks() -> None:
    """More columns than one block of 2**28 bytes holds rows for."""
    scores = hostile_scores("ties", 40, 262209)
    keys = KeyRange(torch.zeros(40, dtype=torch.int32), torch.randint(1, 262210, (40,), dtype=torch.int32))
    selection = select_topk(scores, keys, 9)
    for row in (0, 31, 32, 39):
        one = KeyRange(keys.start[row : row + 1], keys.stop[row : row + 1])
        assert selection.index[row].tolist() == naive_ranking(scores[row : row + 1], one, 9)[0][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_topk_dtypes_strides_and_certificate(dtype: torch.dtype) -> None:
    layout = Layout.causal(20)
    scores = hostile_scores("relu_plateau", 20, 20).to(dtype)
    selection = select_topk(strided(scores).requires_grad_(), layout.keys, 6)
    assert selection.index.tolist() == naive_ranking(scores, layout.keys, 6)[0]
    assert selection.every_row_has_a_key
    assert not select_topk(torch.zeros(3, 2), Layout.packed([2], total=3).keys, 1).every_row_has_a_key


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_topk_without_rows_or_keys(shape: tuple[int, int]) -> None:
    selection = select_topk(torch.zeros(shape), everything(*shape), 3)
    assert selection.index.tolist() == [[-1] * 3] * shape[0]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("top_k", [1, 7, 64, 701])
def test_keys_equal_topk_of_the_scores(name: str, top_k: int) -> None:
    """To the bit, whatever the block: 1 and 2**16 bytes score tile by tile and carry the best on."""
    case = make_case(name)
    scores = indexer_scores(case.q_i, case.k_i, case.w, case.keys)
    expected = select_topk(scores, case.keys, top_k)
    for block_bytes in (1, 2**16, 2**20, 2**23, 2**30):
        got = pick(case, top_k=top_k, block_bytes=block_bytes, return_scores=True)
        assert got.score is not None
        assert got.index.equal(expected.index)
        assert got.length.equal(expected.length)
        assert got.index.shape == got.score.shape == (len(scores), top_k)
        assert got.every_row_has_a_key == case.layout.every_row_has_a_key
        kept = got.index >= 0
        assert got.score[kept].equal(scores.gather(1, got.index.clamp(min=0).long())[kept])
        assert (got.score[~kept] == -INF).all()
        assert got.score.dtype == torch.float32


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("name", ["packed", "left_padded", "context_parallel", "decode"])
def test_keys_against_sorted_python_numbers(name: str, relu: bool) -> None:
    """In fp64, where the formula's order of summation cannot reorder scores; ties are the zeros of relu."""
    case = make_case(name, Sizes(index_heads=1, top_k=9), dtype=torch.float64)
    scores = naive_scores(case.q_i, case.k_i, case.w, case.keys, relu=relu)
    selection = pick(case, relu=relu, block_bytes=1, return_scores=True)
    assert (selection.index.tolist(), selection.length.tolist()) == naive_ranking(scores, case.keys, 9)
    assert selection.score is not None
    assert selection.score.dtype == torch.float64
    tied = scores.eq(0).sum(1) > 1
    assert bool(tied.any()) == relu


def long_case(**sizes: int) -> Case:
    """Several runs of keys a row, and document edges on a tile's edge, beside it and far from it."""
    lengths = [TILE_KEYS, TILE_KEYS - 1, 700, 0, 1, TILE_KEYS + 1]
    return make_case(Layout.packed(lengths), Sizes(**sizes))


@pytest.mark.parametrize("top_k", [5, 600])
def test_blocks_carry_the_best_on(top_k: int) -> None:
    case = long_case(top_k=top_k, index_heads=2)
    case = case.map(lambda x: x.round())  # whole numbers: ties everywhere, across runs too
    scores = indexer_scores(case.q_i, case.k_i, case.w, case.keys)
    assert (scores == 0).sum() > 1000
    expected = select_topk(scores, case.keys, top_k)
    for block_bytes in (1, 2**22, 2**30):
        got = pick(case, block_bytes=block_bytes)
        assert got.index.equal(expected.index)


@pytest.mark.parametrize("offset", [0, 1, 77, TILE_ROWS, TILE_KEYS - 3])
@pytest.mark.parametrize("poison", [1e30, NAN, INF])
@pytest.mark.parametrize("width", [8, 33])
def test_a_document_is_selected_alike_alone_and_in_company(offset: int, poison: float, width: int) -> None:
    mine = make_case(Layout.causal(150), Sizes(index_width=width, top_k=11))
    alone = pick(mine, return_scores=True)
    layout = Layout.packed([offset, 150, 40], total=offset + 200)
    other = make_case(layout, mine.sizes, seed=1).map(lambda x: torch.full_like(x, poison))
    here = slice(offset, offset + 150)
    for name in ("q_i", "k_i", "w"):
        getattr(other, name)[here] = getattr(mine, name)
    together = pick(other, return_scores=True, block_bytes=2**20)
    moved = torch.where(alone.index < 0, -1, alone.index + offset)
    assert together.score is not None
    assert_same(
        Selection(together.index[here], together.length[here], together.score[here]),
        Selection(moved, alone.length, alone.score),
    )


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("lengths", [[160], [16, 96, 48]])
def test_a_rank_selects_what_one_rank_would(cp_size: int, lengths: list[int]) -> None:
    whole = make_case(Layout.packed(lengths), Sizes(top_k=9))
    expected = pick(whole, return_scores=True)
    for rank in range(cp_size):
        layout = Layout.packed(lengths, cp_size=cp_size, cp_rank=rank)
        for part in (layout, layout.shard_rows(1, 2)):
            got = select_keys(whole.q_i[part.rows], whole.k_i, whole.w[part.rows], part.keys, 9, return_scores=True)
            assert expected.score is not None
            assert_same(
                got, Selection(expected.index[part.rows], expected.length[part.rows], expected.score[part.rows])
            )


def test_batch_split_and_repeats_keep_bits() -> None:
    case = make_case("tile_edge")
    whole = pick(case)
    for _ in range(20):
        assert_same(pick(case), whole)
    rows = slice(100, 301)
    part = select_keys(case.q_i[rows], case.k_i, case.w[rows], case.keys.row_slice(100, 301), case.sizes.top_k)
    assert part.index.equal(whole.index[rows])


def test_strides_keep_bits() -> None:
    case = make_case("packed")
    assert_same(pick(case.map(strided), return_scores=True), pick(case, return_scores=True))


def test_fewer_keys_than_asked_for() -> None:
    case = make_case(Layout.causal(5), Sizes(top_k=8))
    selection = pick(case)
    assert selection.index.tolist() == [list(range(row + 1)) + [-1] * (7 - row) for row in range(5)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_operands(dtype: torch.dtype) -> None:
    case = make_case("packed", dtype=dtype)
    wide = case.map(lambda x: x.float())
    assert_same(pick(case, return_scores=True), pick(wide, return_scores=True))


def test_rows_of_nan_select_nothing() -> None:
    case = make_case("causal")
    case.q_i[11] = NAN
    case.k_i[5] = NAN
    case.w[13] = -INF
    selection = pick(case)
    assert selection.length[11] == 0
    assert not (selection.index == 5).any()
    assert selection.length[96] == case.sizes.top_k
    assert selection.index[:, 1:].gt(selection.index[:, :-1]).eq(selection.index[:, 1:] >= 0).all()


def test_infinite_scores_come_first() -> None:
    layout = Layout.causal(6)
    q, k, w = torch.ones(6, 1, 1), torch.tensor([[1.0], [INF], [2.0], [-INF], [INF], [3.0]]), torch.ones(6, 1)
    assert select_keys(q, k, w, layout.keys, 3).index[5].tolist() == [1, 4, 5]
    assert select_keys(q, k, w, layout.keys, 5, relu=False).index[5].tolist() == [0, 1, 2, 4, 5]
    assert select_keys(q, k, w, layout.keys, 6).index[5].tolist() == [0, 1, 2, 3, 4, 5]  # relu(-inf) is 0


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_without_rows_or_keys(rows: int, keys: int) -> None:
    q, k, w = torch.randn(rows, 2, 4), torch.randn(keys, 4), torch.randn(rows, 2)
    selection = select_keys(q, k, w, everything(rows, max(keys, 2)), 3, return_scores=True)
    assert selection.index.shape == (rows, 3)
    if not keys:
        assert selection.index.tolist() == [[-1] * 3] * rows
        assert selection.length.tolist() == [0] * rows


def test_ranges_outside_the_keys() -> None:
    q, k, w = torch.ones(4, 1, 1), torch.ones(3, 1), torch.ones(4, 1)
    keys = KeyRange(torch.tensor([-5, -5, 2, 600]).int(), torch.tensor([-1, 2, 99, 700]).int())
    assert select_keys(q, k, w, keys, 2).index.tolist() == [[-1, -1], [0, 1], [2, -1], [-1, -1]]


def test_no_gradient_and_no_graph() -> None:
    case = make_case("causal").map(lambda x: x.requires_grad_())
    selection = pick(case, return_scores=True)
    assert selection.score is not None
    assert not selection.score.requires_grad


LOW = ("fp8", "mxfp8")


def rounded(case: Case, precision: str) -> Tensor:
    """[T, S] fp64 scores of the operands that a precision stands for, hidden keys at -inf."""
    if precision == "fp8":
        q, k = (from_e4m3(to_e4m3(x)[0], to_e4m3(x)[1].double()) for x in (case.q_i, case.k_i))
    else:
        q, k = (from_mxfp8(*to_mxfp8(x)).double() for x in (case.q_i, case.k_i))
    return indexer_scores(q, k, case.w.double(), case.keys)


@pytest.mark.parametrize("precision", LOW)
def test_low_precision_decides_what_is_selected_and_no_score(precision: Any) -> None:
    """Against scores in fp64; and another selection than without it, or this shows nothing."""
    case = make_case("packed", Sizes(index_heads=3, index_width=32, top_k=9), dtype=torch.bfloat16)
    got, plain = pick(case, precision=precision, return_scores=True), pick(case)
    scores = rounded(case, precision)
    padded = torch.cat([scores, torch.full((len(scores), 9), -INF)], 1)
    cutoff = padded.topk(9).values.masked_fill(padded.topk(9).values == -INF, INF).amin(1, keepdim=True)
    picked = scores.gather(1, got.index.clamp(min=0).long()).masked_fill(got.index < 0, INF)
    assert (picked >= cutoff - 1e-5 * scores.masked_fill(scores == -INF, 0).abs().amax()).all()
    assert got.length.equal(plain.length)
    assert 0.005 < (got.index != plain.index).float().mean() < 0.9
    own = indexer_scores(case.q_i, case.k_i, case.w, case.keys).gather(1, got.index.clamp(min=0).long())
    torch.testing.assert_close(got.score, own.masked_fill(got.index < 0, -INF))


@pytest.mark.parametrize("precision", LOW)
def test_low_precision_keeps_bits_in_blocks_and_company(precision: Any) -> None:
    case = make_case("tile_edge", Sizes(index_heads=2, index_width=32))
    whole = pick(case, precision=precision)
    assert_same(pick(case, precision=precision, block_bytes=1), whole)
    assert_same(pick(case.map(strided), precision=precision), whole)
    rows = slice(100, 301)
    keys, top_k = case.keys.row_slice(100, 301), case.sizes.top_k
    got = select_keys(case.q_i[rows], case.k_i, case.w[rows], keys, top_k, precision=precision)
    assert got.index.equal(whole.index[rows])


@pytest.mark.parametrize("precision", LOW)
def test_low_precision_takes_no_scale_of_a_neighbour(precision: Any) -> None:
    """A document of 33 keys, one more than a block of scales, between others of huge numbers or of NaN."""
    mine = make_case(Layout.causal(33), Sizes(index_heads=2, index_width=32, top_k=5))
    alone = pick(mine, precision=precision).index
    for poison in (1e30, NAN):
        other = make_case(Layout.packed([31, 33, 40]), mine.sizes).map(lambda x, poison=poison: x * poison)
        for name in ("q_i", "k_i", "w"):
            getattr(other, name)[31:64] = getattr(mine, name)
        together = pick(other, precision=precision).index[31:64]
        assert together.equal(torch.where(alone < 0, -1, alone + 31))


@pytest.mark.parametrize("precision", LOW)
def test_low_precision_selects_no_key_that_is_not_finite(precision: Any) -> None:
    case = make_case("causal", Sizes(index_heads=2, index_width=32))
    case.q_i[11, 1, 3], case.k_i[5, 0], case.k_i[6, 31] = NAN, INF, NAN
    selection = pick(case, precision=precision)
    assert selection.length[11] == 0
    assert not torch.isin(selection.index, torch.tensor([5, 6])).any()
    assert selection.length[12:].eq(case.sizes.top_k).all()


@pytest.mark.parametrize("precision", LOW)
def test_selection_alone_recomputes_nothing(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("causal", Sizes(index_heads=2, index_width=32))
    monkeypatch.delattr("dsattn.ops.select.selected_scores")
    assert pick(case, precision=precision).score is None
    with pytest.raises(NameError):
        pick(case, precision=precision, return_scores=True)


def test_low_precision_of_fp8_is_the_formula_with_scales_outside() -> None:
    """A query's and a key's scale leave the relu: both signs of a product, a negative weight."""
    q, k = torch.tensor([[[3.0, -1.0]]]), torch.tensor([[7.0, 1.0], [-2.0, 0.5], [1.0, 6.0]])
    for w, order in ((1.0, [0, 1]), (-1.0, [1, 2])):
        got = select_keys(q, k, torch.tensor([[w]]), everything(1, 3), 2, precision="fp8")
        assert got.index.tolist() == [order], "scores are 20, 0 and 0 times w, ties to the smaller key"


CASE = make_case(Layout.causal(4))


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"top_k": 0}, InputError, "top_k=0 must be an integer of at least 1"),
        ({"top_k": 2.0}, InputError, "top_k=2.0 must be an integer"),
        ({"top_k": True}, InputError, "top_k=True must be an integer"),
        ({"block_bytes": 0}, InputError, "block_bytes=0 must be an integer of at least 1"),
        ({"block_bytes": 1e9}, InputError, "block_bytes=1000000000.0 must be an integer of at least 1"),
        ({"precision": "fp4"}, InputError, "precision='fp4' must be one of bf16, fp8, mxfp8"),
        ({"precision": "mxfp8"}, InputError, "precision='mxfp8' scales blocks of 32 lanes, but q and k have"),
        ({"backend": "x"}, BackendUnavailable, "no backend named 'x'; there is auto, hopper, triton, "),
    ],
)
def test_refuses(asked: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        pick(CASE, **asked)


@pytest.mark.parametrize(
    ("scores", "top_k", "options", "error", "says"),
    [
        (torch.zeros(4), 2, {}, InputError, r"scores must be floating point \[T, S\], got torch.float32 \[4\]"),
        (torch.zeros(4, 4).int(), 2, {}, InputError, r"scores must be floating point \[T, S\], got torch.int32"),
        (torch.zeros(3, 4), 2, {}, InputError, "keys has 4 rows, scores has 3"),
        (torch.zeros(4, 4), 0, {}, InputError, "top_k=0 must be"),
        (torch.zeros(4, 4), 2, {"backend": "x"}, BackendUnavailable, "select_topk: no backend named 'x'"),
    ],
)
def test_topk_refuses(scores: Tensor, top_k: int, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        select_topk(scores, CASE.keys, top_k, **options)


@pytest.mark.parametrize("return_scores", [True, False])
@pytest.mark.parametrize(("change", "precision"), [(torch.clone, "bf16"), (strided, "bf16"), (strided, "fp8")])
def test_opcheck(return_scores: bool, change: Callable[[Tensor], Tensor], precision: str) -> None:
    case = make_case(Layout.packed([4, 0, 3]), dtype=torch.bfloat16).map(change)
    ranges = (case.keys.start, case.keys.stop)
    operands = (case.q_i, case.k_i, case.w, *ranges, 3, True, return_scores, 2**20, precision, "auto")
    torch.library.opcheck(torch.ops.dsattn.select_keys.default, operands)
    torch.library.opcheck(torch.ops.dsattn.select_topk.default, (change(torch.randn(7, 7)), *ranges, 3, "auto"))


def test_compiles_whole() -> None:
    case = make_case("packed")

    def run(q: Tensor, k: Tensor, w: Tensor, keys: KeyRange) -> Selection:
        first = select_keys(q, k, w, keys, 7)
        again = select_topk(indexer_scores(q, k, w, keys), keys, 7)
        return Selection(torch.maximum(first.index, again.index), first.length)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(case.q_i, case.k_i, case.w, case.keys)
    assert_same(got, pick(case))


# Not ru_maxrss: a child inherits its parent's. mallopt(M_MMAP_THRESHOLD, ...): the C library gives freed blocks back.
PEAK = """
import ctypes
import torch
from dsattn.keys import Layout
from dsattn.ops import select_keys

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

ctypes.CDLL(None).mallopt(-3, 2**16)
torch.set_num_threads(1)
tokens, top_k, block_bytes = 8192, 64, {block_bytes}
q, k, w = torch.randn(tokens, 2, 16), torch.randn(tokens, 16), torch.randn(tokens, 2)
select_keys(q[:300], k[:300], w[:300], Layout.packed([300]).keys, top_k)  # loads what is loaded on first use
keys = Layout.causal(tokens).keys
before = peak()
selection = select_keys(q, k, w, keys, top_k, block_bytes=block_bytes)
taken = peak() - before
assert int(selection.length.sum()) == top_k * tokens - top_k * (top_k - 1) // 2
outputs = 4 * tokens * (top_k + 1)
assert 2**20 < taken < outputs + block_bytes, f"{{taken / 2**20:.1f}} MiB, block_bytes are {{block_bytes / 2**20}} MiB"
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's record of peak memory")
def test_peak_memory_of_8192_rows_and_keys(run_python: Callable[[str], None]) -> None:
    """A score matrix would take 256 MiB, and 16 MiB must do; 14.5 MiB were measured beside the outputs."""
    run_python(PEAK.format(block_bytes=2**24))
