"""The counting sort of a selection's slots by key: in the interpreter without a GPU, else on it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import settings
from dsattn.errors import InputError
from dsattn.selection import invert as sorting

invert = pytest.importorskip("dsattn.backends.triton.invert", exc_type=ImportError)


def test_in_the_interpreter(interpret: Callable[[str], int]) -> None:
    assert interpret(__file__) >= 25


def random_index(rows: int, slots: int, keys: int, device: str) -> tuple[Tensor, Tensor]:
    """(index, length): distinct keys, holes, poison past the length, an empty row, a full row."""
    order = torch.rand(rows, max(keys, slots)).argsort(1)[:, :slots]
    index = torch.where(order < keys, order, -1).sort(1).values.to(torch.int32)
    index[::3, ::2] = -1
    length = torch.randint(0, slots + 1, (rows,), dtype=torch.int32)
    length[:1], length[1:2], length[-1:] = 0, slots, slots + 5
    index[torch.arange(slots) >= length[:, None]] = 2**31 - 1
    return index.to(device), length.to(device)


def brute_force_places(index: Tensor, length: Tensor, first: int, rows: int, keys: int) -> tuple[Tensor, list[int]]:
    line = torch.full((rows, index.shape[1]), -1, dtype=torch.int32)
    held = [[] for _ in range(keys)]
    for row, slot in itertools.product(range(rows), range(index.shape[1])):
        if slot < length[first + row] and index[first + row, slot] >= 0:
            held[index[first + row, slot]].append((row, slot))
    for place, at in enumerate(itertools.chain(*held)):
        line[at] = place
    return line, [0, *itertools.accumulate(map(len, held))]


SIZES = [
    (5, 7, 9),
    (240, 5, 8),  # two groups, the last not full
    (70, 33, 200),
    (40, 4, 1),  # one key: its bit is the sign
    (3, 1100, 1200),  # rows in two programs
    (6, 3, 70),  # keys in two programs
    (2, 5, 4),  # fewer keys than slots
    (0, 3, 4),
    (3, 0, 4),
    (5, 2, 0),
]


@pytest.mark.parametrize("records", [2**27, 1])
@pytest.mark.parametrize(("rows", "slots", "keys"), SIZES)
def test_equals_sorting(device: str, rows: int, slots: int, keys: int, records: int) -> None:
    """In one run of rows, and in several."""
    index, length = random_index(rows, slots, keys, device)
    with settings(scratch_bytes=records):
        got, expected = invert.invert(index, length, keys), sorting(index, length, keys)
    assert got.slot.equal(expected.slot)
    assert got.offset.equal(expected.offset)
    assert (got.slot.dtype, got.offset.dtype) == (torch.int32, torch.int32)


def test_keys_that_do_not_exist_are_left_out(device: str) -> None:
    index = torch.tensor([[0, 5, 2], [6, 2, -1]], dtype=torch.int32, device=device)
    length = torch.tensor([3, 3], dtype=torch.int32, device=device)
    got, expected = invert.invert(index, length, 4), sorting(index, length, 4)
    assert got.slot.tolist() == expected.slot.tolist() == [0, 2, 4, -1, -1, -1]
    assert got.offset.tolist() == expected.offset.tolist() == [0, 1, 1, 3, 3]


@pytest.mark.parametrize("records", [2**27, 1])
def test_a_key_that_a_row_repeats_leaves_no_hole(device: str, records: int) -> None:
    """It breaks the promise, and one of its slots is missing then; but sums follow no -1 out of their contributions."""
    index, length = random_index(300, 9, 20, device)
    index[:, 4] = index[:, 5] = 7
    index, length = torch.where(index < 0, 99, index).sort(1).values, length.fill_(9)
    with settings(scratch_bytes=records):
        got = invert.invert(index, length, 20)
    rows_of = [set((index == key).any(1).nonzero().flatten().tolist()) for key in range(20)]
    assert len(rows_of[7]) == 300
    for key, (first, stop) in enumerate(itertools.pairwise(got.offset.tolist())):
        slots = got.slot[first:stop].tolist()
        assert [slot // 9 for slot in slots] == sorted(rows_of[key])
        assert index.flatten()[got.slot[first:stop].long()].eq(key).all()


def test_repeats(device: str) -> None:
    index, length = random_index(300, 9, 20, device)
    one, two = (invert.invert(index, length, 20) for _ in range(2))
    assert one.slot.equal(two.slot)
    assert one.offset.equal(two.offset)


def test_refuses_what_int32_cannot_name() -> None:
    index = torch.zeros(1, 1, dtype=torch.int32).expand(2**16, 2**15)
    with pytest.raises(InputError, match="2147483648 slots, an inverse names at most 2147482624: split the rows"):
        invert.invert(index, index[:, 0], 5)


@pytest.mark.parametrize(
    ("rows", "slots", "keys", "first", "run"),
    [
        (5, 7, 9, 0, 5),
        (300, 5, 8, 0, 300),
        (70, 33, 200, 3, 64),  # runs that start and end between words
        (40, 4, 1, 8, 32),
        (3, 1100, 1200, 1, 1),
        (2, 5, 4, 0, 2),
        (500, 3, 70, 7, 230),  # a run's last group is not full
        (9, 5, 4, 0, 20),
    ],
)
def test_places(device: str, rows: int, slots: int, keys: int, first: int, run: int) -> None:
    """Of all rows from `first` on, in as many runs as that takes, found together."""
    index, length = random_index(rows, slots, keys, device)
    got = list(invert.places_of_runs(index, length, first, rows - first, run, keys))
    assert len(got) == -(-(rows - first) // run)
    for number, places in enumerate(got):
        begin = first + number * run
        line, start = brute_force_places(index.cpu(), length.cpu(), begin, min(run, rows - begin), keys)
        assert places.line.cpu().equal(line)
        assert (places.start - places.start[0]).tolist() == start


def test_more_groups_than_a_step_counts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invert, "GROUPS", 2)
    index, length = random_index(1000, 2, 3, device)
    got, expected = invert.invert(index, length, 3), sorting(index, length, 3)
    assert got.slot.equal(expected.slot)
    assert got.offset.equal(expected.offset)


def lists(held: Any, keys: int) -> list[list[int]]:
    bounds = zip(held.first.tolist(), held.stop.tolist(), strict=True)
    return [(held.slot[first:stop] - held.base).tolist() for first, stop in bounds]


@pytest.mark.parametrize("run", [1, 7, 32, 50])
@pytest.mark.parametrize("keys", [1, 9, 200])
def test_runs_are_pieces_of_the_whole(device: str, keys: int, run: int) -> None:
    index, length = random_index(50, 6, keys, device)
    whole = invert.invert(index, length, keys)
    for first in range(0, 50, run):
        part = (index, length, first, min(run, 50 - first), keys)
        taken, made = invert.slots_of_run(whole, *part), invert.slots_of_run(None, *part)
        assert lists(taken, keys) == lists(made, keys)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [4096, 131072])
def test_real_sizes(device: str, keys: int) -> None:
    from dsattn.keys import KeyRange
    from dsattn.testing import random_selection

    rows, slots = 4096, 2048
    ranges = KeyRange(torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)).to(device)
    selection = random_selection(ranges, keys, slots)
    expected = sorting(selection.index, selection.length, keys)
    for records in (invert.SCRATCH_BYTES, 2**24):
        with settings(scratch_bytes=records):
            got = invert.invert(selection.index, selection.length, keys)
        assert got.slot.equal(expected.slot)
        assert got.offset.equal(expected.offset)


@pytest.mark.gpu
@pytest.mark.parametrize("records", [2**27, 1])
def test_a_graph_replays_other_selections(device: str, records: int) -> None:
    index, length = random_index(700, 40, 300, device)
    other = random_index(700, 40, 300, device)
    with settings(scratch_bytes=records):
        invert.invert(index, length, 300)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = invert.invert(index, length, 300)
    index.copy_(other[0])
    length.copy_(other[1])
    graph.replay()
    expected = sorting(*other, 300)
    assert got.slot.equal(expected.slot)
    assert got.offset.equal(expected.offset)
