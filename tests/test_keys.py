"""Layouts against a builder that walks row by row, against published tables, and against wrong input."""

import dataclasses
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dsattn.errors import InputError
from dsattn.keys import REACH_ROWS, KeyRange, Layout
from dsattn.ops import select_topk


@dataclass
class Row:
    """What the brute-force builder says of one global row."""

    document: int | None
    position: int
    start: int
    stop: int


def build(lengths: Sequence[int], padded: Sequence[int], total: int, side: str) -> list[Row]:
    """Every global row, one at a time."""
    rows = []
    for document, (real, slots) in enumerate(zip(lengths, padded, strict=True)):
        first = len(rows) + (slots - real if side == "left" else 0)
        for _ in range(slots):
            row = len(rows)
            inside = first <= row < first + real
            rows.append(Row(document, row - first, first, row + 1) if inside else Row(None, 0, row, row))
    return rows + [Row(None, 0, row, row) for row in range(len(rows), total)]


def owned(padded: Sequence[int], total: int, size: int, rank: int) -> list[int]:
    """Rows of one context-parallel rank: chunks `rank` and 2 * size - 1 - rank of documents, a share of the tail."""
    if size == 1:
        return list(range(total))
    rows, start = [], 0
    for slots in padded:
        chunk = slots // (2 * size)
        for part in (rank, 2 * size - 1 - rank):
            rows += range(start + part * chunk, start + (part + 1) * chunk)
        start += slots
    share = (total - start) // size
    return rows + list(range(start + rank * share, start + (rank + 1) * share))


def assert_layout(layout: Layout, rows: Sequence[int], every: Sequence[Row], lengths: Sequence[int]) -> None:
    mine = [every[row] for row in rows]
    real = [row.document is not None for row in mine]
    assert layout.rows.tolist() == list(rows)
    assert layout.keys.start.tolist() == [row.start for row in mine]
    assert layout.keys.stop.tolist() == [row.stop for row in mine]
    assert layout.positions.tolist() == [row.position for row in mine]
    assert layout.real_rows.tolist() == real
    assert layout.num_real_rows == sum(real)
    assert layout.num_keys == len(every)
    assert layout.every_row_has_a_key == all(real)
    assert layout.lengths == tuple(lengths)
    dtypes = (layout.keys.start.dtype, layout.keys.stop.dtype, layout.rows.dtype, layout.positions.dtype)
    assert dtypes == (torch.int32, torch.int32, torch.int64, torch.int64)


def assert_key_order(layouts: Sequence[Layout]) -> None:
    """All ranks together hold every row once, and their order undoes the gathering."""
    total = layouts[0].num_keys
    gathered = torch.cat([layout.rows for layout in layouts])
    assert sorted(gathered.tolist()) == list(range(total))
    for layout in layouts:
        assert gathered[layout.key_order].tolist() == list(range(total))
        assert torch.arange(total)[layout.key_order_inverse].tolist() == gathered.tolist()


# Tables of Megatron Core. Its padding rows read the padding suffix and are numbered 20, 21 on rank 1; here they are
# empty and numbered inside `total`.
PUBLISHED: list[tuple[dict[str, Any], list[list[int]], list[list[int]] | None, list[int] | None]] = [
    ({"lengths": [8]}, [[0, 1, 6, 7], [2, 3, 4, 5]], None, None),
    ({"lengths": [16]}, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]], None, None),
    (
        {"lengths": [4, 12]},
        [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]],
        [[0, 0, 4, 4, 4, 4, 4, 4]] * 2,
        [0, 8, 9, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15, 5, 6, 7],
    ),
    (
        {"lengths": [8, 16]},
        [[0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23], [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]],
        [[0] * 4 + [8] * 8] * 2,
        None,
    ),
    (
        {"lengths": [4, 8], "total": 16},
        [[0, 3, 4, 5, 10, 11, 12, 13], [1, 2, 6, 7, 8, 9, 14, 15]],
        [[0, 0, 4, 4, 4, 4, 12, 13], [0, 0, 4, 4, 4, 4, 14, 15]],
        [0, 8, 9, 1, 2, 3, 10, 11, 12, 13, 4, 5, 6, 7, 14, 15],
    ),
    (
        {"lengths": [8, 0, 16]},
        [[0, 7, 8, 9, 22, 23], [1, 6, 10, 11, 20, 21], [2, 5, 12, 13, 18, 19], [3, 4, 14, 15, 16, 17]],
        None,
        [0, 6, 12, 18, 19, 13, 7, 1, 2, 3, 8, 9, 14, 15, 20, 21, 22, 23, 16, 17, 10, 11, 4, 5],
    ),
]


@pytest.mark.parametrize(("asked", "rows", "starts", "order"), PUBLISHED)
def test_published_zigzag_tables(
    asked: dict[str, Any], rows: list[list[int]], starts: list[list[int]] | None, order: list[int] | None
) -> None:
    layouts = [Layout.packed(**asked, cp_size=len(rows), cp_rank=rank) for rank in range(len(rows))]
    covered = sum(asked["lengths"])
    for rank, layout in enumerate(layouts):
        assert layout.rows.tolist() == rows[rank]
        # A real row ends behind itself, a padding row before.
        assert layout.keys.stop.tolist() == [row + (row < covered) for row in rows[rank]]
        if starts is not None:
            assert layout.keys.start.tolist() == starts[rank]
        if order is not None:
            assert layout.key_order.tolist() == order
    assert_key_order(layouts)


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("seed", range(6))
def test_random_packs_equal_the_row_by_row_builder(cp_size: int, side: Any, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 2, 3, 7, 8, 31, 64]) for _ in range(draw.randint(0, 7))]
    unit = 2 * cp_size if cp_size > 1 else 1
    padded = [unit * (-(-length // unit) + draw.choice([0, 0, 1, 3])) for length in lengths]
    total = sum(padded) + cp_size * draw.choice([0, 1, 5])
    every = build(lengths, padded, total, side)
    layouts = [
        Layout.packed(lengths, padded=padded, total=total, side=side, cp_size=cp_size, cp_rank=rank)
        for rank in range(cp_size)
    ]
    for rank, layout in enumerate(layouts):
        assert_layout(layout, owned(padded, total, cp_size, rank), every, lengths)
    assert_key_order(layouts)
    assert sum(layout.num_real_rows for layout in layouts) == sum(lengths)


def dealt(lengths: Sequence[int], size: int, top_k: int | None, **rest: Any) -> list[Layout]:
    """The layouts of all ranks."""
    return [Layout.packed(lengths, **rest, cp_size=size, cp_rank=rank, top_k=top_k) for rank in range(size)]


def kept(layouts: Sequence[Layout], top_k: int) -> list[int]:
    """Keys that attention keeps, of each rank."""
    return [int(layout.keys.lengths().clamp(max=top_k).sum()) for layout in layouts]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("seed", range(4))
def test_with_top_k_ranks_own_every_pair_of_chunks_once_and_keep_about_as_much(
    cp_size: int, side: Any, seed: int
) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 2, 3, 7, 8, 31, 64, 200]) for _ in range(draw.randint(0, 9))]
    unit = 2 * cp_size if cp_size > 1 else 1
    padded = [unit * (-(-length // unit) + draw.choice([0, 0, 1, 3])) for length in lengths]
    total = sum(padded) + cp_size * draw.choice([0, 1, 5])
    every = build(lengths, padded, total, side)
    rest: dict[str, Any] = {"padded": padded, "total": total, "side": side}
    layouts = dealt(lengths, cp_size, 8, **rest)
    assert_key_order(layouts)
    covered = sum(padded)
    for rank, layout in enumerate(layouts):
        rows = layout.rows.tolist()
        assert_layout(layout, rows, every, lengths)
        tail = [row - covered for row in rows if row >= covered]
        assert tail == owned([], total - covered, cp_size, rank)
    starts = np.cumsum([0, *padded]).tolist()
    for first, stop in itertools.pairwise(starts):
        pairs = [[row - first for row in layout.rows.tolist() if first <= row < stop] for layout in layouts]
        assert sorted(pairs) == sorted(owned([stop - first], stop - first, cp_size, rank) for rank in range(cp_size))
    # Of each document the lightest rank takes the heaviest pair, so ranks part by no more than one document's pairs do.
    alone = [
        kept(dealt([length], cp_size, None, padded=[slots], side=side), 8)
        for length, slots in zip(lengths, padded, strict=True)
    ]
    loads = kept(layouts, 8)
    assert sum(loads) == sum(min(row.stop - row.start, 8) for row in every)
    assert max(loads) - min(loads) <= max((max(one) - min(one) for one in alone), default=0)


def test_top_k_evens_out_what_the_first_rows_of_documents_do_not_keep() -> None:
    """Without it they are all rank 0's, which then waits for the others."""
    lengths, top_k = [32768, 16384, 8192, 8192], 2048
    for size, most in ((2, 1.0001), (4, 1.01), (8, 1.03)):
        zigzag, even = kept(dealt(lengths, size, None), top_k), kept(dealt(lengths, size, top_k), top_k)
        assert max(zigzag) * size > 1.06 * sum(zigzag)
        assert min(zigzag) == zigzag[0]
        assert max(even) * size <= most * sum(even)
        visible = [layout.keys.num_pairs() for layout in dealt(lengths, size, top_k)]
        assert max(visible) == min(visible)


def test_top_k_leaves_a_document_alone_as_it_was() -> None:
    for size in (1, 2, 4):
        for layout, zigzag in zip(dealt([128], size, 16), dealt([128], size, None), strict=True):
            assert torch.equal(layout.rows, zigzag.rows)


def test_documents_of_one_token_are_every_ranks() -> None:
    assert [layout.num_real_rows for layout in dealt([1] * 8, 4, 2, padded=[8] * 8)] == [2, 2, 2, 2]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_causal_is_a_pack_of_equal_documents(cp_size: int) -> None:
    for rank in range(cp_size):
        layout = Layout.causal(8, batch=3, cp_size=cp_size, cp_rank=rank)
        assert_layout(layout, owned([8] * 3, 24, cp_size, rank), build([8] * 3, [8] * 3, 24, "right"), [8] * 3)
        assert layout.every_row_has_a_key


@pytest.mark.parametrize("asked", [{"tokens": 0}, {"tokens": 5, "batch": 0}])
def test_no_rows_at_all(asked: dict[str, int]) -> None:
    layout = Layout.causal(**asked)
    assert (layout.rows.numel(), layout.num_keys, layout.num_real_rows) == (0, 0, 0)
    assert layout.keys.mask(0).shape == (0, 0)
    assert_key_order([layout])


def test_only_the_tail() -> None:
    layouts = [Layout.packed([], total=6, cp_size=2, cp_rank=rank) for rank in range(2)]
    assert [layout.rows.tolist() for layout in layouts] == [[0, 1, 2], [3, 4, 5]]
    assert not any(layout.every_row_has_a_key or layout.num_real_rows for layout in layouts)
    assert_key_order(layouts)


def test_numpy_integers_are_integers() -> None:
    lengths = np.array([3, 5], dtype=np.int32)
    layout = Layout.packed(lengths, padded=lengths + 1, total=np.int64(12))
    assert_layout(layout, range(12), build([3, 5], [4, 6], 12, "right"), [3, 5])
    assert all(type(length) is int for length in layout.lengths)


def test_storage_comes_from_padded_lengths_and_sight_from_real_ones() -> None:
    layout = Layout.packed([2, 3], padded=[4, 4])
    assert layout.keys.mask(8).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0] * 8,
        [0] * 8,
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0],
        [0] * 8,
    ]
    assert layout.keys.lengths().tolist() == [1, 2, 0, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]],
        [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]],
        [[0, 1, 1, 0], [0, 0, 1, 0]],
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_attention_mask(mask: list[list[int]], dtype: torch.dtype) -> None:
    layout = Layout.from_attention_mask(torch.tensor(mask).to(dtype))
    visible = [[0] * (4 * len(mask)) for _ in range(4 * len(mask))]
    for sample, kept in enumerate(mask):
        for query, key in itertools.product(range(4), range(4)):
            visible[4 * sample + query][4 * sample + key] = int(kept[query] and kept[key] and key <= query)
    assert layout.keys.mask(layout.num_keys).int().tolist() == visible
    assert layout.real_rows.int().tolist() == [one for kept in mask for one in kept]
    assert layout.positions.tolist() == [
        sum(kept[:column]) if kept[column] else 0 for kept in mask for column in range(4)
    ]
    assert layout.lengths == tuple(map(sum, mask))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_attention_mask_without_elements(shape: tuple[int, int]) -> None:
    assert Layout.from_attention_mask(torch.ones(shape)).num_keys == 0


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.tensor([[1, 1, 1], [1, 0, 1]]), r"mask\[1\] has a hole"),
        (torch.tensor([[0.0, -1e9]]), "mask must hold only 0 and 1"),
        (torch.tensor([[0.0, float("nan")]]), "mask must hold only 0 and 1"),
        (torch.ones(1, 1, 4, 4), r"mask must be \[B, S\], got \[1, 1, 4, 4\]"),
        (torch.ones(4), r"mask must be \[B, S\], got \[4\]"),
    ],
)
def test_masks_that_a_range_cannot_say(mask: torch.Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Layout.from_attention_mask(mask)


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        (torch.tensor([0, 1, 2, 0, 0, 1]), [3, 1, 2]),
        (torch.tensor([[0, 1, 2], [0, 0, 1]]), [3, 1, 2]),
        (torch.tensor([[0, 1], [0, 1]], dtype=torch.int32), [2, 2]),
        (torch.zeros(0, dtype=torch.int64), []),
        (torch.zeros(2, 0, dtype=torch.int64), []),
    ],
)
def test_position_ids(ids: torch.Tensor, lengths: list[int]) -> None:
    layout = Layout.from_position_ids(ids)
    assert_layout(layout, range(ids.numel()), build(lengths, lengths, ids.numel(), "right"), lengths)


def test_a_batch_row_goes_on_counting_but_is_a_document_of_its_own() -> None:
    with pytest.raises(InputError, match="ids jump to 2 at row 2"):
        Layout.from_position_ids(torch.tensor([[0, 1], [2, 3]]))


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([1, 2]), "ids jump to 1 at row 0"),
        (torch.tensor([0, 1, 3]), "ids jump to 3 at row 2"),
        (torch.tensor([0, 1, 1]), "ids jump to 1 at row 2"),
        (torch.tensor([0, -1]), "ids jump to -1 at row 1"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), r"ids must be \[T\] or \[B, S\], got \[1, 1, 1\]"),
    ],
)
def test_position_ids_that_jump(ids: torch.Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Layout.from_position_ids(ids)


@pytest.mark.parametrize(("cached", "tokens"), [(0, 1), (5, 1), (5, 3), (0, 4), (4, 0)])
def test_continuation_is_the_end_of_a_document(cached: int, tokens: int) -> None:
    layout = Layout.continuation(cached, tokens)
    total = cached + tokens
    assert_layout(layout, range(cached, total), build([total], [total], total, "right"), [total])


def test_shards_are_runs_of_rows_over_whole_keys() -> None:
    whole = Layout.packed([3, 5], padded=[4, 6], total=12)
    shards = [whole.shard_rows(rank, 3) for rank in range(3)]
    every = build([3, 5], [4, 6], 12, "right")
    for rank, shard in enumerate(shards):
        assert_layout(shard, range(4 * rank, 4 * rank + 4), every, [3, 5])
        assert torch.equal(shard.key_order, whole.key_order)
    assert [shard.num_real_rows for shard in shards] == [3, 4, 1]
    full = Layout.packed([4, 4], total=12)
    assert [full.shard_rows(rank, 3).every_row_has_a_key for rank in range(3)] == [True, True, False]


def test_shards_of_a_context_parallel_rank() -> None:
    rank = Layout.packed([8, 16], cp_size=2, cp_rank=1)
    parts = [rank.shard_rows(part, 2) for part in range(2)]
    assert torch.cat([part.rows for part in parts]).equal(rank.rows)
    assert torch.cat([part.keys.start for part in parts]).equal(rank.keys.start)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_dealt_rows_are_every_so_many_th_and_equal_work(cp_size: int) -> None:
    ranks = [Layout.packed([48, 3], padded=[48, 8], total=60, cp_size=cp_size, cp_rank=r) for r in range(cp_size)]
    shards = [rank.deal_rows(part, 5) for rank in ranks for part in range(5)]
    for at, shard in enumerate(shards):
        whole, part = ranks[at // 5], at % 5
        assert shard.whole is whole
        assert shard.dealt == 5
        for name in ("rows", "positions", "real_rows"):
            assert torch.equal(getattr(shard, name), getattr(whole, name)[part::5])
        assert torch.equal(shard.keys.stop, whole.keys.stop[part::5])
        assert shard.num_real_rows == int(shard.real_rows.sum())
    gathered = torch.cat([shard.rows for shard in shards])
    assert torch.equal(shards[0].key_order_inverse, gathered)
    assert torch.equal(gathered[shards[0].key_order], torch.arange(60))
    dealt, runs = (
        [int(one.keys.lengths().sum()) for one in (cut(rank, 4) for rank in range(4))]
        for cut in (Layout.causal(1024).deal_rows, Layout.causal(1024).shard_rows)
    )
    assert max(dealt) < 1.01 * min(dealt)
    assert max(runs) > 5 * min(runs)


def test_deal_rows_refuses() -> None:
    plain = Layout.packed([3, 5], padded=[4, 6], total=12)
    with pytest.raises(InputError, match="size=5 must divide the 12 rows"):
        plain.deal_rows(0, 5)
    with pytest.raises(InputError, match="rank=3 must be below size=3"):
        plain.deal_rows(3, 3)
    with pytest.raises(InputError, match="a shard of rows already"):
        plain.deal_rows(0, 2).deal_rows(0, 3)
    with pytest.raises(InputError, match="other has dealt=1, this layout 2"):
        plain.deal_rows(0, 2).copy_(plain.shard_rows(0, 2))
    assert Layout.packed([]).deal_rows(0, 2).num_keys == 0


def test_a_shard_keeps_what_it_was_cut_from() -> None:
    whole = Layout.causal(8)
    shard = whole.deal_rows(1, 2)
    assert shard.whole is whole
    narrow = shard.last(2)
    assert [int(one.keys.lengths().sum()) for one in (narrow, narrow.whole)] == [8, 15]
    assert whole.last(2).whole is None
    assert shard.to("meta").whole.rows.device.type == "meta"
    static = Layout.packed([3, 5]).deal_rows(1, 2)
    static.copy_(shard)
    assert torch.equal(static.whole.keys.start, whole.keys.start)
    with pytest.raises(InputError, match="other is no shard of rows"):
        static.copy_(dataclasses.replace(shard, whole=None))


def test_copy_refreshes_in_place() -> None:
    static, fresh = Layout.packed([3, 5], total=8), Layout.packed([7, 1], total=8)
    tensors = [static.keys.start, static.keys.stop, static.positions, static.rows, static.real_rows]
    places = [x.data_ptr() for x in tensors]
    assert static.copy_(fresh) is static
    assert [x.data_ptr() for x in tensors] == places
    assert_layout(static, range(8), build([7, 1], [7, 1], 8, "right"), [7, 1])


def test_copy_takes_every_table() -> None:
    static = Layout.packed([8, 8], total=20, cp_size=2, cp_rank=0)
    fresh = Layout.packed([4, 12], padded=[4, 16], cp_size=2, cp_rank=1)
    static.copy_(fresh)
    for name in ("rows", "positions", "real_rows", "key_order", "key_order_inverse"):
        assert getattr(static, name).equal(getattr(fresh, name)), name
    assert static.keys.mask(20).equal(fresh.keys.mask(20))
    assert static.num_real_rows == fresh.num_real_rows


@pytest.mark.parametrize(
    ("mine", "other", "says"),
    [
        (Layout.causal(8), Layout.causal(4), "other has 4 rows and 4 keys, this layout 8 and 8"),
        (Layout.continuation(3, 2), Layout.continuation(4, 2), "other has 2 rows and 6 keys, this layout 2 and 5"),
        (Layout.packed([8]), Layout.packed([7], total=8), "other.every_row_has_a_key is False"),
    ],
)
def test_copy_refuses(mine: Layout, other: Layout, says: str) -> None:
    before = mine.keys.stop.clone()
    with pytest.raises(InputError, match=says):
        mine.copy_(other)
    assert mine.keys.stop.equal(before)


def test_copy_never_wins_a_certificate() -> None:
    static = Layout.packed([7], total=8).copy_(Layout.packed([8]))
    assert not static.every_row_has_a_key


REACHING = {
    "packed": Layout.packed([100, 0, 300, 1]),
    "left padding": Layout.packed([100, 0, 300], padded=[130, 256, 310], total=800, side="left"),
    "context parallel": Layout.packed([500, 70], padded=[512, 80], total=640, cp_size=2, cp_rank=1),
    "batch": Layout.causal(200, batch=3),
    "mask": Layout.from_attention_mask(torch.ones(2, 150)),
    "last": Layout.causal(300).last(7),
    "nothing": Layout.packed([]),
    "padding": Layout.packed([0], total=130),
}


@pytest.mark.parametrize("name", REACHING)
def test_reach_is_that_of_runs_of_rows(name: str) -> None:
    """And it is on the host, wherever the ranges are."""
    layout = REACHING[name]
    keys, reach = layout.keys, layout.to("meta").keys.reach
    assert reach is not None
    assert reach.device.type == "cpu"
    assert reach.dtype == torch.int32
    runs = range(0, keys.num_rows, REACH_ROWS)
    assert len(reach) == len(runs)
    for (first, stop), run in zip(reach.tolist(), runs, strict=True):
        read = keys.row_slice(run, run + REACH_ROWS).mask(layout.num_keys).any(0).nonzero().flatten().tolist()
        if name == "last":  # wider than it need be
            assert first <= read[0]
            assert stop == read[-1] + 1
        else:
            assert [first, stop] == [read[0], read[-1] + 1] if read else first == stop


def test_reach_is_never_that_of_other_ranges() -> None:
    layout = Layout.packed([100, 300])
    keys = layout.keys
    assert keys.reach is not None
    assert keys.row_slice(1, 9).reach is None
    assert dataclasses.replace(keys, stop=keys.stop + 1).reach is None
    assert KeyRange(keys.start, keys.stop).reach is None
    assert layout.deal_rows(0, 2).keys.reach is None
    assert layout.deal_rows(0, 2).whole.keys.reach is keys.reach
    other = Layout.packed([350, 50])
    assert layout.copy_(other).keys.reach is other.keys.reach


def test_to_moves_every_tensor() -> None:
    layout = Layout.packed([3], total=4).to("meta")
    tensors = [layout.keys.start, layout.keys.stop, layout.rows, layout.positions, layout.real_rows]
    assert all(x.is_meta for x in [*tensors, layout.key_order, layout.key_order_inverse])
    assert (layout.num_real_rows, layout.num_keys, layout.lengths) == (3, 4, (3,))


def test_layouts_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Layout.causal(4).num_keys = 5


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"lengths": [3, -1]}, r"lengths\[1\]=-1 must be an integer of at least 0"),
        ({"lengths": [2.0]}, r"lengths\[0\]=2.0 must be an integer"),
        ({"lengths": [True]}, r"lengths\[0\]=True must be an integer"),
        ({"lengths": torch.tensor([2])}, "lengths must be host integers, got a tensor"),
        ({"lengths": [2], "padded": [2, 2]}, "padded has 2 entries for 1 lengths"),
        ({"lengths": [1, 5], "padded": [2, 4]}, r"padded\[1\]=4 is shorter than lengths\[1\]=5"),
        ({"lengths": [2], "side": "middle"}, "side='middle' must be 'right' or 'left'"),
        ({"lengths": [2, 3], "total": 4}, "total=4 is smaller than the 5 rows"),
        ({"lengths": [2], "total": 2**31}, "total=2147483648 does not fit int32"),
        ({"lengths": [2], "total": 3.0}, "total=3.0 must be an integer"),
        ({"lengths": [8, 6], "cp_size": 2}, "document 1 occupies 6 rows, not a multiple of 2\\*cp_size=4"),
        ({"lengths": [8], "total": 9, "cp_size": 2}, "total=9 must be a multiple of cp_size=2"),
        ({"lengths": [8], "cp_size": 2, "cp_rank": 2}, "cp_rank=2 must be below cp_size=2"),
        ({"lengths": [8], "cp_size": 0}, "cp_size=0 must be an integer of at least 1"),
        ({"lengths": [8], "top_k": 0}, "top_k=0 must be an integer of at least 1"),
        ({"lengths": [8], "top_k": 2.0}, "top_k=2.0 must be an integer"),
        ({"lengths": [8], "cp_rank": -1}, "cp_rank=-1 must be an integer of at least 0"),
    ],
)
def test_packed_refuses(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Layout.packed(**asked)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Layout.causal(-1), "tokens=-1 must be"),
        (lambda: Layout.causal(4, batch=-1), "batch=-1 must be"),
        (lambda: Layout.causal(6, cp_size=2), r"tokens=6 must be a multiple of 2 \* cp_size=4"),
        (lambda: Layout.continuation(-1), "cached=-1 must be"),
        (lambda: Layout.continuation(1, 1.5), "tokens=1.5 must be"),
        (lambda: Layout.causal(4).shard_rows(2, 2), "rank=2 must be below size=2"),
        (lambda: Layout.causal(4).shard_rows(0, 3), "size=3 must divide the 4 rows"),
        (lambda: Layout.causal(4).shard_rows(0, 0), "size=0 must be"),
    ],
)
def test_other_makers_refuse(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("start", "stop", "says"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32), r"KeyRange.start must be int32 \[T\], got torch.float32"),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), "KeyRange.stop must be int32"),
        (torch.zeros(1, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), r"got torch.int32 \[1, 3\]"),
        (
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(4, dtype=torch.int32),
            r"must agree, got \[3\] on cpu and \[4\]",
        ),
        (
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32, device="meta"),
            "must agree, .* on cpu .* on meta",
        ),
    ],
)
def test_key_range_refuses(start: torch.Tensor, stop: torch.Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        KeyRange(start, stop)


def test_key_range_with_negative_and_swapped_ends() -> None:
    keys = KeyRange(torch.tensor([0, 0, 3, -2], dtype=torch.int32), torch.tensor([-1, 2, 1, 9], dtype=torch.int32))
    assert keys.mask(4).int().tolist() == [[0] * 4, [1, 1, 0, 0], [0] * 4, [1] * 4]
    assert keys.lengths().tolist() == [0, 2, 0, 11]
    assert keys.row_slice(1, 3).mask(4).int().tolist() == [[1, 1, 0, 0], [0] * 4]
    assert not keys.every_row_has_a_key


@pytest.mark.parametrize("count", [1, 3, 7, 100])
def test_the_last_keys_of_each_row(count: int) -> None:
    """A sliding window, row by row; it begins no earlier than the row's own range."""
    layout = Layout.packed([7, 0, 5], padded=[9, 2, 5], total=18)
    mask, last = layout.keys.mask(18), layout.keys.last(count)
    for row in range(18):
        seen = mask[row].nonzero().flatten().tolist()
        assert last.mask(18)[row].nonzero().flatten().tolist() == seen[-count:]
    assert not last.every_row_has_a_key
    assert Layout.causal(4).keys.last(count).every_row_has_a_key


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_the_last_keys_are_counted(count: Any) -> None:
    with pytest.raises(InputError, match=f"count={count!r} must be an integer of at least 1"):
        Layout.causal(4).keys.last(count)


def test_an_off_by_one_range_is_seen() -> None:
    """Negative control: the comparison above fails for a range that ends one key early."""
    keys = Layout.packed([5, 3]).keys
    wrong = KeyRange(keys.start, keys.stop - 1)
    scores = torch.randn(8, 8)
    assert not wrong.mask(8).equal(keys.mask(8))
    assert not select_topk(scores, wrong, 2).index.equal(select_topk(scores, keys, 2).index)


def test_a_stale_layout_changes_the_selection() -> None:
    """Negative control: a layout that was not refreshed for the new pack selects other keys."""
    stale, fresh = Layout.packed([5, 3]), Layout.packed([2, 6])
    scores = torch.randn(8, 8)
    wanted = select_topk(scores, fresh.keys, 2).index
    assert not select_topk(scores, stale.keys, 2).index.equal(wanted)
    assert select_topk(scores, stale.copy_(fresh).keys, 2).index.equal(wanted)


@pytest.mark.parametrize("top_k", [None, 2048])
def test_a_million_tokens_take_less_than_50_ms_a_rank(top_k: int | None) -> None:
    """Documents of 128 to 17408 rows with up to 127 rows of padding. The least of several process times counts."""
    padded = [128 * (1 + document % 31) for document in range(511)]
    padded.append(2**20 - sum(padded))
    lengths = [slots - document % 128 for document, slots in enumerate(padded)]
    seconds = []
    for rank in range(8):
        begin = time.process_time()
        layout = Layout.packed(lengths, padded=padded, cp_size=64, cp_rank=rank, top_k=top_k)
        seconds.append(time.process_time() - begin)
        assert layout.rows.numel() == 2**20 // 64
    assert min(seconds) < 0.05, f"fastest of {len(seconds)}: {1e3 * min(seconds):.0f} ms"
