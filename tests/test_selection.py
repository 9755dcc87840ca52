"""The ranking rule against sorted Python numbers, and the value that carries what was ranked."""

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops import indexer_scores
from dsattn.selection import Inverse, Selection, invert, rank, selected_scores
from dsattn.testing import SCORES, hostile_scores, naive_ranking

INF, NAN = float("inf"), float("nan")


def all_keys(rows: int, keys: int) -> KeyRange:
    return KeyRange(torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32))


def columns(width: int) -> torch.Tensor:
    return torch.arange(width, dtype=torch.int32)


def assert_ranked(scores: torch.Tensor, top_k: int) -> None:
    index, length, score = rank(scores, columns(scores.shape[1]), top_k)
    assert (index.tolist(), length.tolist()) == naive_ranking(scores, all_keys(*scores.shape), top_k)
    assert index.shape == score.shape == (len(scores), top_k)
    assert (index.dtype, length.dtype, score.dtype) == (torch.int32, torch.int32, scores.dtype)
    assert index.is_contiguous()
    assert score.is_contiguous()
    taken = index >= 0
    gathered = scores.gather(1, index.clamp(min=0).long()) if scores.shape[1] else torch.zeros_like(score)
    # Bit for bit, so that -0.0 stays -0.0.
    assert score[taken].view(torch.int32).equal(gathered[taken].view(torch.int32))
    assert (score[~taken] == -INF).all()


@pytest.mark.parametrize(
    ("row", "index"),
    [
        ([1, 2, 2, 2, 0], [1, 2, 3]),
        ([0.0, -0.0, 0, 0], [0, 1, 2]),
        ([-INF, 5, -INF], [1, -1, -1]),
        ([INF, INF, 1, INF, INF], [0, 1, 3]),
        ([NAN, 1, 2], [1, 2, -1]),
        # Refilled: a NaN's slot goes to the next best, unlike in a raw radix kernel.
        ([NAN, 1, 2, 3, NAN], [1, 2, 3]),
        ([NAN, 5, 1, 1, NAN, 1], [1, 2, 3]),
        ([NAN, NAN], [-1, -1, -1]),
        ([], [-1, -1, -1]),
    ],
)
def test_worked_rows(row: list[float], index: list[int]) -> None:
    assert rank(torch.tensor([row], dtype=torch.float32), columns(len(row)), 3)[0].tolist() == [index]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("width", [1, 2, 7, 32])
def test_hostile_rows_at_every_width_of_selection(name: str, width: int) -> None:
    scores = hostile_scores(name, 12, width)
    for top_k in range(1, width + 4):
        assert_ranked(scores, top_k)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_columns(shape: tuple[int, int]) -> None:
    assert_ranked(torch.zeros(shape), 3)


def test_everything_at_once() -> None:
    draw = random.Random(0)
    values = [0.0, -0.0, 1.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, 65505.0, 3e38]
    scores = torch.tensor([[draw.choice(values) for _ in range(40)] for _ in range(60)])
    for top_k in (1, 2, 5, 16, 39, 40, 41):
        assert_ranked(scores, top_k)


def test_near_equal_scores_of_a_long_row() -> None:
    """Fixed top 22 bits: 1024 distinct values, 32 ties each."""
    assert_ranked(hostile_scores("near_equal", 1, 32768), 2048)


def test_a_row_of_more_than_2_to_the_18_columns() -> None:
    assert_ranked(hostile_scores("ties", 2, 262209), 2048)


def test_positives_then_the_lowest_zeros() -> None:
    scores = torch.zeros(1, 64)
    positive = [60, 7, 33, 2, 21]
    scores[0, positive] = torch.tensor([0.5, 4.0, 0.1, 3.0, 2.0])
    zeros = [key for key in range(64) if key not in positive][:11]
    ranked = [rank(scores, columns(64), 16)[0] for _ in range(100)]
    assert ranked[0].tolist() == [sorted(positive + zeros)]
    assert all(again.equal(ranked[0]) for again in ranked)


def test_swapped_tie_order_is_seen() -> None:
    """Negative control: preferring the larger key gives another answer wherever a tie crosses the cut."""
    scores = hostile_scores("relu_plateau", 8, 32)
    reversed_index = 31 - rank(scores.flip(1), columns(32), 8)[0]
    assert reversed_index.sort(dim=1).values.tolist() != naive_ranking(scores, all_keys(8, 32), 8)[0]


def test_columns_name_the_keys() -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0], [2.0, -INF, 2.0]])
    names = torch.tensor([[10, 20, 30], [4, 7, 9]], dtype=torch.int32)
    index, length, score = rank(scores, names, 2)
    assert index.tolist() == [[20, 30], [4, 9]]
    assert length.tolist() == [2, 2]
    assert score.tolist() == [[5, 5], [2, 2]]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("cuts", [[1], [5, 6, 20], [16], list(range(1, 40))])
def test_the_best_of_the_best_are_the_best(name: str, cuts: list[int]) -> None:
    """Ranking runs of columns in turn and carrying the best on equals ranking them whole, as `select_keys` does."""
    scores = hostile_scores(name, 10, 40)
    whole = rank(scores, columns(40), 6)
    best: tuple[torch.Tensor, ...] | None = None
    for first, stop in zip([0, *cuts], [*cuts, 40], strict=True):
        block, names = scores[:, first:stop], columns(40)[first:stop].expand(10, -1)
        if best is not None:
            block, names = torch.cat([best[2], block], 1), torch.cat([best[0], names], 1)
        best = rank(block, names, 6)
    assert best is not None
    for merged, expected in zip(best, whole, strict=True):
        assert merged.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    scores = hostile_scores("ties", 6, 20).to(dtype)
    scores[:, 3], scores[:, 7] = NAN, -INF
    index, length, score = rank(scores, columns(20), 5)
    assert (index.tolist(), length.tolist()) == naive_ranking(scores, all_keys(6, 20), 5)
    assert score.dtype == dtype


def test_scores_are_left_as_they_were() -> None:
    scores = hostile_scores("nan", 4, 9)
    before = scores.clone()
    rank(scores, columns(9), 3)
    assert scores.view(torch.int32).equal(before.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_from_index_sorts_and_moves_empty_slots_back(dtype: torch.dtype) -> None:
    empty = 9 if dtype == torch.uint8 else -1
    selection = Selection.from_index(torch.tensor([[7, empty, 3], [0, 2, 1], [empty, empty, empty]]).to(dtype))
    if dtype == torch.uint8:
        assert selection.index.tolist() == [[3, 7, 9], [0, 1, 2], [9, 9, 9]]
    else:
        assert selection.index.tolist() == [[3, 7, -1], [0, 1, 2], [-1, -1, -1]]
        assert selection.length.tolist() == [2, 3, 0]
    assert (selection.index.dtype, selection.length.dtype) == (torch.int32, torch.int32)
    assert (selection.num_rows, selection.width) == (3, 3)
    assert (selection.score, selection.inverse, selection.every_row_has_a_key) == (None, None, False)


def test_from_index_takes_any_negative_number_as_empty() -> None:
    selection = Selection.from_index(torch.tensor([[-7, 4, -(2**31)]]), every_row_has_a_key=True)
    assert selection.index.tolist() == [[4, -1, -1]]
    assert selection.every_row_has_a_key


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_from_index_without_elements(shape: tuple[int, int]) -> None:
    selection = Selection.from_index(torch.zeros(shape, dtype=torch.int64))
    assert selection.index.shape == shape
    assert selection.length.tolist() == [0] * shape[0]
    assert selection.mask(4).shape == (shape[0], 4)
    assert not selection.mask(4).any()


@pytest.mark.parametrize("index", [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(3).long()])
def test_from_index_refuses(index: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"index must be integer \[T, K\]"):
        Selection.from_index(index)


@pytest.mark.parametrize("row", [2**31 - 1, 2**31, 2**33 + 1])
def test_from_index_refuses_rows_beyond_int32(row: int) -> None:
    """They came out as an empty slot, a negative key, and key 1."""
    with pytest.raises(InputError, match=f"index holds key row {row}, but key rows must be below {2**31 - 1}"):
        Selection.from_index(torch.tensor([[3, row]]))
    assert Selection.from_index(torch.tensor([[3, 2**31 - 2]])).length.tolist() == [2]


def test_mask() -> None:
    selection = Selection.from_index(torch.tensor([[3, 0], [-1, 1], [-1, -1]]))
    assert selection.mask(4).int().tolist() == [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]


INDEX = torch.zeros(2, 3, dtype=torch.int32)
LENGTH = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("index", "length", "score", "says"),
    [
        (INDEX.long(), LENGTH, None, r"Selection.index must be int32 \[T, K\], got torch.int64"),
        (INDEX[0], LENGTH, None, r"Selection.index must be int32 \[T, K\], got torch.int32 \[3\]"),
        (INDEX, LENGTH.long(), None, r"Selection.length must be int32 \[2\], got torch.int64"),
        (INDEX, LENGTH[:1], None, r"Selection.length must be int32 \[2\], got torch.int32 \[1\]"),
        (INDEX, LENGTH, torch.zeros(2, 2), r"Selection.score must be \[2, 3\], got \[2, 2\]"),
    ],
)
def test_selection_refuses(index: torch.Tensor, length: torch.Tensor, score: torch.Tensor | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Selection(index, length, score)


def brute_inverse(index: torch.Tensor, num_keys: int) -> list[list[int]]:
    flat = index.flatten().tolist()
    return [[slot for slot, key in enumerate(flat) if key == wanted] for wanted in range(num_keys)]


def slots_of(inverse: Inverse) -> list[list[int]]:
    bounds = inverse.offset.tolist()
    return [inverse.slot[first:stop].tolist() for first, stop in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("rows", "top_k", "num_keys"), [(1, 1, 1), (9, 4, 6), (40, 7, 30), (0, 3, 4), (3, 0, 4), (5, 2, 0)]
)
def test_inverse_lists_the_slots_of_each_key(rows: int, top_k: int, num_keys: int) -> None:
    index = torch.randint(-1, max(num_keys, 1), (rows, top_k), dtype=torch.int32)
    index = index if num_keys else index.fill_(-1)
    inverse = invert(index, torch.full((rows,), top_k), num_keys)
    assert slots_of(inverse) == brute_inverse(index, num_keys)
    assert inverse.slot[int(inverse.offset[-1]) :].tolist() == [-1] * int((index < 0).sum())
    assert (inverse.slot.dtype, inverse.offset.dtype) == (torch.int32, torch.int32)
    assert (inverse.slot.shape, inverse.offset.shape) == ((rows * top_k,), (num_keys + 1,))


def test_inverse_leaves_out_what_lies_past_the_length_and_keys_that_do_not_exist() -> None:
    index = torch.tensor([[0, 2, 1], [2, 0, -1], [1, 1, 1], [3, 2, 9]], dtype=torch.int32)
    inverse = invert(index, torch.tensor([2, 3, 0, 4], dtype=torch.int32), 3)
    assert slots_of(inverse) == [[0, 4], [], [1, 3, 10]]
    assert inverse.slot.tolist() == [0, 4, 1, 3, 10] + 7 * [-1]


def test_inverse_is_made_once() -> None:
    selection = Selection.from_index(torch.tensor([[0, 1], [1, 2]])).with_inverse(3)
    assert selection.inverse is not None
    assert slots_of(selection.inverse) == [[0], [1, 2], [3]]
    assert selection.with_inverse(3) is selection
    assert selection.inverse_of(3) is selection.inverse
    assert selection.inverse_of(4) is None
    assert selection.with_inverse(5).inverse.offset.tolist() == [0, 1, 3, 4, 4, 4]
    assert selection.to("cpu").inverse is None


@pytest.mark.parametrize("part", ["index", "length"])
def test_an_inverse_counts_until_its_selection_is_written_to(part: str) -> None:
    selection = Selection.from_index(torch.tensor([[0, 1], [1, 2]])).with_inverse(3)
    assert selection.inverse_of(3) is not None
    getattr(selection, part)[0] = 0
    assert selection.inverse_of(3) is None
    again = selection.with_inverse(3)
    assert again is not selection
    expected = invert(selection.index, selection.length, 3)
    assert all(got.equal(right) for got, right in zip(again.inverse_of(3), expected, strict=True))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_without_the_inverse(copied: Callable[[Selection], Selection]) -> None:
    index, length = torch.tensor([[2, -1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    selection = Selection(index, length, torch.tensor([[1.0, -INF]]), every_row_has_a_key=True)
    made = copied(selection.with_inverse(3))
    assert made.inverse is None
    assert (made.index.tolist(), made.length.tolist(), made.score.tolist()) == ([[2, -1]], [1], [[1.0, -INF]])
    assert made.every_row_has_a_key


def test_no_inverse_can_be_given() -> None:
    selection = Selection.from_index(torch.tensor([[0, 1]])).with_inverse(2)
    with pytest.raises(TypeError, match="inverse"):
        Selection(selection.index, selection.length, inverse=selection.inverse)
    with pytest.raises((TypeError, ValueError), match="inverse"):
        replace(selection, inverse=selection.inverse)
    assert replace(selection, score=None).inverse is None


def test_inference_tensors_can_be_inverted() -> None:
    with torch.inference_mode():
        selection = Selection.from_index(torch.tensor([[0, 1]])).with_inverse(2)
    assert selection.inverse_of(2) is selection.inverse is not None


def test_inverse_of_too_many_slots_is_refused() -> None:
    index = torch.zeros(1, 1, dtype=torch.int32).expand(2**16, 2**15)
    with pytest.raises(InputError, match="2147483648 slots, but an inverse names at most 2147482624"):
        Selection(index, index[:, 0]).with_inverse(1)


def test_to_keeps_the_rest() -> None:
    score = torch.tensor([[1.0, -INF]])
    index, length = torch.tensor([[2, -1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    moved = Selection(index, length, score, every_row_has_a_key=True).to("meta")
    assert moved.index.is_meta
    assert moved.length.is_meta
    assert moved.score is not None
    assert moved.score.is_meta
    assert moved.every_row_has_a_key


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selected_scores_are_those_of_the_operands(relu: bool, dtype: torch.dtype) -> None:
    keys = Layout.packed([9, 0, 31]).keys
    q, k, w = (torch.randn(40, *rest, dtype=dtype) for rest in ((3, 8), (8,), (3,)))
    q[11], k[20] = INF, NAN  # empty slots meet neither
    index, _, _ = rank(torch.randn(40, 40).masked_fill(~keys.mask(40), -INF), columns(40), 5)
    index[11], index[index == 20] = -1, -1
    exact = indexer_scores(q, k, w, keys, relu=relu).gather(1, index.clamp(min=0).long())
    got = selected_scores(q, k, w, index, relu)
    torch.testing.assert_close(got, exact.masked_fill(index < 0, -INF))
    assert got.dtype == dtype
    assert selected_scores(q, k[:0], w, torch.full_like(index, -1), relu).eq(-INF).all()
