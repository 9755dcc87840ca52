"""Which slots of a selection hold each key, and where each slot comes among them: a stable counting sort by key.

Rows are counted in groups of 224. Of each group and key there is a record of 32 bytes, one sector of memory: a bit for
each of its rows that holds the key, in seven words, then how many rows before the group do. With where the key begins,
one record places a slot. Bits and counts are whole numbers, so the order of the atomics that make them cannot be seen.
A row's keys are distinct, as a Selection promises. No launch depends on values: CUDA graphs can capture it.
Letters: T query rows, S keys, K kept keys, R rows of a run.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import Call, scratch_bytes, unmet
from dsattn.backends.triton.launch import launch
from dsattn.errors import InputError
from dsattn.selection import MOST_SLOTS, Inverse

# Rows are taken in runs whose records fit, 32 S R / 224 bytes, or less, as settings allow.
SCRATCH_BYTES = 2**27
GROUP_ROWS = 224
WORDS = tl.constexpr(8)  # of a record; the last one counts
# Groups that one step of counting takes.
GROUPS = 4


class Places(NamedTuple):
    """Where contributions of a run of rows go. line: [R, K] int32, -1 in empty slots. start: [S + 1] int32.

    Key s has the lines start[s] .. start[s + 1] - 1, less start[0], one a row that selected it, in the order of rows.
    """

    line: Tensor
    start: Tensor


class Held(NamedTuple):
    """Which slots of a run of rows hold each key: `slot[first[s] : stop[s]]`, ascending, for key s.

    slot: int32; base, taken from it, gives the run's own flat slots. first, stop: [S] int32.
    """

    slot: Tensor
    first: Tensor
    stop: Tensor
    base: int


def record_bytes(num_keys: int) -> int:
    """Of a group of rows."""
    return 4 * WORDS.value * num_keys


def bytes_of_places(rows: int, slots: int, num_keys: int) -> int:
    """Lines of a run, and the records they are found by."""
    return 4 * rows * slots + record_bytes(num_keys) * triton.cdiv(rows, GROUP_ROWS)


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here."""
    return unmet({"a CUDA GPU of compute capability 8.0 or above": call.device == "cuda" and call.capability >= 80})


def invert(index: Tensor, length: Tensor, num_keys: int) -> Inverse:
    """The inverse of index [T, K] int32 whose rows stop at length [T] int32: `dsattn.selection.invert`, bit for bit.

    Scratch: SCRATCH_BYTES, or less, as settings allow, or the records of 224 rows. Raises InputError above MOST_SLOTS.
    """
    rows, slots = index.shape
    if rows * slots > MOST_SLOTS:
        raise InputError(f"selection has {rows * slots} slots, an inverse names at most {MOST_SLOTS}: split the rows")
    index, length = index.contiguous(), length.contiguous()
    slot = torch.full((rows * slots,), -1, dtype=torch.int32, device=index.device)
    most = GROUP_ROWS * max(1, scratch_bytes(SCRATCH_BYTES) // record_bytes(max(num_keys, 1)))
    run = min(max(rows, 1), most)
    with torch.cuda.device_of(index):
        if rows <= run:
            record, count = _records(index, length, 0, rows, run, num_keys)
            offset = count.cumsum(0, dtype=torch.int32)
            _put(index, length, record, offset, slot, (0, rows, run), lines=False)
            return Inverse(slot, offset)
        offset = _counted(index, length, num_keys).cumsum(0, dtype=torch.int32)
        start = offset.clone()
        for first in range(0, rows, run):
            held = min(run, rows - first)
            record, count = _records(index, length, first, held, run, num_keys)
            _put(index, length, record, start, slot, (first, held, run), lines=False)
            start[:-1] += count[1:]
    return Inverse(slot, offset)


def places_of_runs(
    index: Tensor, length: Tensor, first_row: int, rows: int, run: int, num_keys: int
) -> Iterator[Places]:
    """Lines for the slots of `rows` rows from first_row on, `run` rows at a time; the last of these may have fewer.

    All of them are found together, in memory that `bytes_of_places` counts for each run.
    index: [T, K] int32, length: [T] int32, contiguous; rows * K is below 2**31.
    """
    record, count = _records(index, length, first_row, rows, run, num_keys)
    start = count.cumsum(0, dtype=torch.int32)
    line = torch.empty(rows, index.shape[1], dtype=torch.int32, device=index.device)
    _put(index, length, record, start, line, (first_row, rows, run), lines=True)
    for number, lines in enumerate(line.split(run)):
        yield Places(lines, start[number * num_keys : (number + 1) * num_keys + 1])


def slots_of_run(
    inverse: Inverse | None, index: Tensor, length: Tensor, first_row: int, rows: int, num_keys: int
) -> Held:
    """The slots of `rows` rows from first_row on, by key: taken from the inverse of all rows, or made where it is None.

    index: [T, K] int32, length: [T] int32.
    """
    if inverse is None:
        part = slice(first_row, first_row + rows)
        slot, offset = invert(index[part], length[part], num_keys)
        return Held(slot, offset[:-1], offset[1:], 0)
    slot, offset = inverse
    if rows == index.shape[0]:
        return Held(slot, offset[:-1], offset[1:], 0)
    base = first_row * index.shape[1]
    bounds = torch.empty(2, num_keys, dtype=torch.int32, device=index.device)
    # Every key has at most one slot a row: so many halvings find one.
    ends = (base, base + rows * index.shape[1], index.shape[0].bit_length())
    grid = (triton.cdiv(num_keys, 128), 2)
    launch(_bounds_kernel, grid, slot, offset, bounds, *ends, num_keys, KEYS=128, num_warps=4)
    return Held(slot, bounds[0], bounds[1], base)


def _records(
    index: Tensor, length: Tensor, first_row: int, rows: int, run: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """(records [runs * groups of a run, S, WORDS], count [1 + runs * S]), of `rows` rows in runs of `run`.

    count: how many rows of a run hold each key, after a 0.
    """
    runs, groups = max(1, triton.cdiv(rows, run)), triton.cdiv(run, GROUP_ROWS)
    record = torch.zeros(runs * groups, num_keys, WORDS.value, dtype=torch.int32, device=index.device)
    count = torch.zeros(runs * num_keys + 1, dtype=torch.int32, device=index.device)
    grid, block = _slot_grid(rows, index.shape[1])
    operands = (index, length, record, first_row, run, index.shape[1], num_keys)
    launch(_mark_kernel, grid, *operands, SLOTS=block, GROUP=GROUP_ROWS, num_warps=4)
    grid = (triton.cdiv(num_keys, 64), runs)
    launch(_count_kernel, grid, record, count, groups, num_keys, GROUPS=GROUPS, KEYS=64, num_warps=4)
    return record, count


def _counted(index: Tensor, length: Tensor, num_keys: int) -> Tensor:
    """[1 + S] int32: how many rows hold each key, after a 0."""
    count = torch.zeros(num_keys + 1, dtype=torch.int32, device=index.device)
    grid, block = _slot_grid(*index.shape)
    launch(_add_kernel, grid, index, length, count, index.shape[1], num_keys, SLOTS=block, num_warps=4)
    return count


def _put(
    index: Tensor,
    length: Tensor,
    record: Tensor,
    start: Tensor,
    target: Tensor,
    rows: tuple[int, int, int],
    *,
    lines: bool,
) -> None:
    """Write to each slot its line, or to each line its slot. rows: the first, how many, and how many a run has."""
    first, count, run = rows
    grid, block = _slot_grid(count, index.shape[1])
    operands = (index, length, record, start, target, first, run, index.shape[1], record.shape[1])
    launch(_place_kernel, grid, *operands, SLOTS=block, GROUP=GROUP_ROWS, LINES=lines, num_warps=4)


def _slot_grid(rows: int, slots: int) -> tuple[tuple[int], int]:
    """(grid, slots of a program)."""
    block = min(1024, max(32, triton.next_power_of_2(slots)))
    return (rows * triton.cdiv(slots, block),), block


@triton.jit
def _slots_of_a_row(index, length, first_row, slots, num_keys, SLOTS: tl.constexpr):
    """(row from first_row on, slots, the keys in them, -1 from its length on and where there is no such key)."""
    blocks = tl.cdiv(slots, SLOTS)
    row = tl.program_id(0) // blocks
    slot = tl.program_id(0) % blocks * SLOTS + tl.arange(0, SLOTS)
    at = (first_row + row).to(tl.int64)
    count = tl.minimum(tl.load(length + at), slots)
    key = tl.load(index + at * slots + slot, mask=slot < count, other=-1)
    return row, slot, tl.where(key < num_keys, key, -1)


@triton.jit(do_not_specialize=["slots", "num_keys"], do_not_specialize_on_alignment=["index", "length"])
def _add_kernel(index, length, count, slots, num_keys, SLOTS: tl.constexpr):
    """count [1 + S]: one more at 1 + key for each slot that holds it.

    A key that a row breaks its promise by repeating counts once, as its bit does: no place is left without a slot.
    """
    row, slot, key = _slots_of_a_row(index, length, 0, slots, num_keys, SLOTS)
    before = tl.load(index + row.to(tl.int64) * slots + slot - 1, mask=(slot > 0) & (key >= 0), other=-1)
    live = (key >= 0) & (key != before)
    tl.atomic_add(count + 1 + key, tl.full([SLOTS], 1, tl.int32), mask=live, sem="relaxed")


@triton.jit
def _group_of(row, run, GROUP: tl.constexpr):
    """(the group of a row among those of all runs, the row's place in it)."""
    run_row = row % run
    return row // run * tl.cdiv(run, GROUP) + run_row // GROUP, run_row % GROUP


@triton.jit(
    do_not_specialize=["first_row", "run", "slots", "num_keys"], do_not_specialize_on_alignment=["index", "length"]
)
def _mark_kernel(index, length, record, first_row, run, slots, num_keys, SLOTS: tl.constexpr, GROUP: tl.constexpr):
    """Set the bits of the records."""
    row, _, key = _slots_of_a_row(index, length, first_row, slots, num_keys, SLOTS)
    group, place = _group_of(row, run, GROUP)
    at = group.to(tl.int64) * num_keys + key
    bit = tl.full([SLOTS], 1, tl.int32) << (place % 32)
    tl.atomic_or(record + at * WORDS + place // 32, bit, mask=key >= 0, sem="relaxed")


@triton.jit
def _ones(word):
    """How many bits of an int32 are set."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["groups", "num_keys"])
def _count_kernel(record, count, groups, num_keys, GROUPS: tl.constexpr, KEYS: tl.constexpr):
    """Write to each record how many rows of the run's earlier groups hold the key; count [1 + runs * S]: of all.

    groups: of a run, each of which has a column of the grid.
    """
    run = tl.program_id(1).to(tl.int64)
    record += run * groups * num_keys * WORDS
    count += run * num_keys
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    word = tl.arange(0, WORDS)[None, None, :]
    total = tl.zeros([KEYS], tl.int32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        at = record + (group.to(tl.int64)[:, None] * num_keys + key[None, :]) * WORDS
        real = (group < groups)[:, None] & (key < num_keys)[None, :]
        bits = tl.load(at[:, :, None] + word, mask=real[:, :, None], other=0)
        held = tl.sum(_ones(bits), 2)  # the last word is still 0
        tl.store(at + (WORDS - 1), total[None, :] + tl.cumsum(held, 0) - held, mask=real)
        total += tl.sum(held, 0)
    tl.store(count + 1 + key, total, mask=key < num_keys)


@triton.jit(
    do_not_specialize=["first_row", "run", "slots", "num_keys"],
    do_not_specialize_on_alignment=["index", "length"],
)
def _place_kernel(
    index,
    length,
    record,
    start,
    target,
    first_row,
    run,
    slots,
    num_keys,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
):
    """A slot's line: where its key begins in its run, and how many rows of the run before its own hold it.

    target: with LINES [R, K], to get each slot's line, -1 in empty ones; else [T * K], to get each line's slot.
    """
    row, slot, key = _slots_of_a_row(index, length, first_row, slots, num_keys, SLOTS)
    live = key >= 0
    group, place = _group_of(row, run, GROUP)
    word = tl.arange(0, WORDS)
    own = place // 32
    within = tl.where(word == own, ~(tl.full([WORDS], -1, tl.int32) << (place % 32)), 0)
    earlier = tl.where(word < own, -1, within)
    at = record + (group.to(tl.int64) * num_keys + key) * WORDS
    found = tl.load(at[:, None] + word[None, :], mask=live[:, None], other=0)
    rows = tl.where((word == WORDS - 1)[None, :], found, _ones(found & earlier[None, :]))
    start += (row // run).to(tl.int64) * num_keys
    line = tl.load(start + key, mask=live, other=0) + tl.sum(rows, 1)
    if LINES:
        line -= tl.load(start)
        tl.store(target + row.to(tl.int64) * slots + slot, tl.where(live, line, -1), mask=slot < slots)
    else:
        tl.store(target + line, (first_row + row) * slots + slot, mask=live)


@triton.jit(do_not_specialize=["first_slot", "stop_slot", "steps", "num_keys"])
def _bounds_kernel(slot, offset, bounds, first_slot, stop_slot, steps, num_keys, KEYS: tl.constexpr):
    """bounds [2, S]: the first of each key's places in `slot` [T * K] that is first_slot or more, then stop_slot."""
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    real = key < num_keys
    bound = tl.where(tl.program_id(1) == 0, first_slot, stop_slot)
    low = tl.load(offset + key, mask=real, other=0)
    high = tl.load(offset + 1 + key, mask=real, other=0)
    for _ in range(steps):
        middle = low + (high - low) // 2
        open_ = low < high
        before = open_ & (tl.load(slot + middle, mask=open_, other=0) < bound)
        high = tl.where(before, high, middle)
        low = tl.where(before, middle + 1, low)
    tl.store(bounds + tl.program_id(1) * num_keys + key, low, mask=real)
