"""What stands before and after the backward kernel of sparse MLA on Hopper, in plain Triton.

Before: `place`, where each selected slot's contribution to dkv goes, so that those of one key lie side by side, in the
order of rows. After: `gather_additions`, or `add_contributions`.

Register order is the order in which the backward kernel leaves channels in memory. A tensor core product gives a thread
two neighbouring channels of every eight; four fp32 (eight bf16) of them are stored together:

    channel 16 g + 8 b + 2 q + x  is at  16 g + 4 q + 2 b + x   for fp32, b in 0..1, q in 0..3, x in 0..1
    channel 32 g + 8 b + 2 q + x  is at  32 g + 8 q + 2 b + x   for bf16, b in 0..3

Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys, R rows of a run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends.triton.launch import launch

# Words of 32 rows that one step of counting takes.
WORDS = 16
# Below so many keys two warps sum the contributions of one.
FEW_KEYS = 32768


class Places(NamedTuple):
    """Where contributions of a run of rows go. line: [R, K] int32, -1 in empty slots. start: [S + 1] int32.

    Key s has the lines start[s] .. start[s + 1] - 1, one a row that selected it, in the order of rows.
    """

    line: Tensor
    start: Tensor


def place(index: Tensor, length: Tensor, first_row: int, rows: int, num_keys: int) -> Places:
    """Lines for the slots of `rows` rows from first_row on: a stable counting sort by key.

    index: [T, K] int32, length: [T] int32, contiguous. A row's keys are distinct, so a run of 32 rows holds a key in
    a word of 32 bits, and a slot's place is the number of bits before its own. Costs 8 num_keys rows / 32 bytes.
    """
    slots, words = index.shape[1], triton.cdiv(rows, 32)
    held = torch.zeros(words, num_keys, dtype=torch.int32, device=index.device)
    before = torch.empty_like(held)
    start = torch.zeros(num_keys + 1, dtype=torch.int32, device=index.device)
    line = torch.empty(rows, slots, dtype=torch.int32, device=index.device)
    block = min(1024, max(32, triton.next_power_of_2(slots)))
    grid = (rows * triton.cdiv(slots, block),)
    launch(_mark_kernel, grid, index, length, held, first_row, slots, num_keys, SLOTS=block, num_warps=4)
    grid = (triton.cdiv(num_keys, 64),)
    launch(_count_kernel, grid, held, before, start, words, num_keys, WORDS=WORDS, KEYS=64, num_warps=4)
    start = start.cumsum(0, dtype=torch.int32)
    operands = (index, length, held, before, start, line, first_row, slots, num_keys)
    grid = (rows * triton.cdiv(slots, block),)
    launch(_place_kernel, grid, *operands, SLOTS=block, num_warps=4)
    return Places(line, start)


@triton.jit
def _slots_of_a_row(index, length, first_row, slots, SLOTS: tl.constexpr):
    """(row of the run, slots, the keys in them, -1 from the row's length on) of a program."""
    blocks = tl.cdiv(slots, SLOTS)
    run_row = tl.program_id(0) // blocks
    slot = tl.program_id(0) % blocks * SLOTS + tl.arange(0, SLOTS)
    row = (first_row + run_row).to(tl.int64)
    count = tl.minimum(tl.load(length + row), slots)
    return run_row, slot, tl.load(index + row * slots + slot, mask=slot < count, other=-1)


@triton.jit(
    do_not_specialize=["first_row", "slots", "num_keys"], do_not_specialize_on_alignment=["index", "length", "held"]
)
def _mark_kernel(index, length, held, first_row, slots, num_keys, SLOTS: tl.constexpr):
    """held [words, S]: bit r of word w says that row 32 w + r of the run selected the key."""
    run_row, _, key = _slots_of_a_row(index, length, first_row, slots, SLOTS)
    word = held + (run_row // 32).to(tl.int64) * num_keys + key
    bit = tl.full([SLOTS], 1, tl.int32) << (run_row % 32)
    tl.atomic_or(word, bit, mask=key >= 0, sem="relaxed")


@triton.jit
def _ones(word):
    """How many bits of an int32 are set."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["words", "num_keys"], do_not_specialize_on_alignment=["held", "before", "start"])
def _count_kernel(held, before, start, words, num_keys, WORDS: tl.constexpr, KEYS: tl.constexpr):
    """before [words, S]: rows that selected the key in earlier words; start [1 + key]: in all words."""
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    total = tl.zeros([KEYS], tl.int32)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        at = word.to(tl.int64)[:, None] * num_keys + key[None, :]
        real = (word < words)[:, None] & (key < num_keys)[None, :]
        count = _ones(tl.load(held + at, mask=real, other=0))
        tl.store(before + at, total[None, :] + tl.cumsum(count, 0) - count, mask=real)
        total += tl.sum(count, 0)
    tl.store(start + 1 + key, total, mask=key < num_keys)


@triton.jit(
    do_not_specialize=["first_row", "slots", "num_keys"],
    do_not_specialize_on_alignment=["index", "length", "held", "before", "start", "line"],
)
def _place_kernel(index, length, held, before, start, line, first_row, slots, num_keys, SLOTS: tl.constexpr):
    run_row, slot, key = _slots_of_a_row(index, length, first_row, slots, SLOTS)
    live = key >= 0
    at = (run_row // 32).to(tl.int64) * num_keys + key
    earlier = ~(tl.full([SLOTS], -1, tl.int32) << (run_row % 32))
    place = tl.load(start + key, mask=live, other=0) + tl.load(before + at, mask=live, other=0)
    place += _ones(tl.load(held + at, mask=live, other=0) & earlier)
    tl.store(line + run_row.to(tl.int64) * slots + slot, tl.where(live, place, -1), mask=slot < slots)


def gather_additions(additions: Tensor, dkv: Tensor) -> None:
    """dkv [S, C] = additions [S, C] fp32 in register order."""
    block = 1024
    grid = (triton.cdiv(dkv.numel(), block),)
    launch(_additions_kernel, grid, additions, dkv, dkv.numel(), BLOCK=block, num_warps=4)


@triton.jit(do_not_specialize=["elements"])
def _additions_kernel(additions, dkv, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = at % 16
    source = at - within + within % 8 // 2 * 4 + within // 8 * 2 + within % 2
    tl.store(dkv + at, tl.load(additions + source, mask=at < elements).to(dkv.dtype.element_ty), mask=at < elements)


def add_contributions(
    contributions: Tensor, start: Tensor, total: Tensor, dkv: Tensor, first: bool, last: bool
) -> None:
    """Sum what a run of rows contributed to each key, in the order of its lines.

    contributions: [lines, blocks of heads, C], bf16 or fp32, in register order; start: [S + 1] int32 of `place`.
    total: [S, C] fp32 in register order: written by the first run, added to by others, untouched by a run that is both
    `first` and `last`. dkv: [S, C], written by the last.
    """
    _, blocks, width = contributions.shape
    # Few keys have many lines each, and one warp would be too slow for them.
    warps = 2 if dkv.shape[0] < FEW_KEYS else 1
    lines = 8 // contributions.element_size() * warps
    constants = {"C": width, "BLOCKS": blocks, "FIRST": first, "LAST": last, "LINES": lines, "num_warps": warps}
    launch(_contributions_kernel, (dkv.shape[0],), contributions, start, total, dkv, **constants)


@triton.jit(do_not_specialize_on_alignment=["start"])
def _contributions_kernel(
    contributions,
    start,
    total,
    dkv,
    C: tl.constexpr,
    BLOCKS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    LINES: tl.constexpr,
):
    """One key a program. C is 512, or 512 and a rest that is a power of two.

    A warp reads 4 KB at a time and waits for no other: two share the 512 channels, 256 each, and meet at the end.
    """
    key = tl.program_id(0).to(tl.int64)
    first = tl.load(start + key).to(tl.int64) * BLOCKS
    stop = tl.load(start + key + 1).to(tl.int64) * BLOCKS
    total += key * C
    dkv += key * C
    if FIRST or LAST or first < stop:
        channel = tl.arange(0, 512)
        sums = tl.zeros([512], tl.float32)
        if not FIRST:  # loaded here, it arrives with the first lines
            sums = tl.load(total + channel)
        if C > 512:
            rest = 512 + tl.arange(0, C - 512)
            rest_sums = tl.zeros([LINES, C - 512], tl.float32)
        for at in range(first, stop, LINES):
            line = at + tl.arange(0, LINES).to(tl.int64)
            held = (line < stop)[:, None]
            lines = contributions + line[:, None] * C
            part = tl.load(lines + channel[None, :], mask=held, other=0.0, eviction_policy="evict_first")
            if C > 512:
                more = tl.load(lines + rest[None, :], mask=held, other=0.0, eviction_policy="evict_first")
                rest_sums += more.to(tl.float32)
            sums += tl.sum(part.to(tl.float32), 0)
        BYTES: tl.constexpr = contributions.dtype.element_ty.primitive_bitwidth // 8
        _store_sums(sums, channel, total, dkv, LAST, BYTES)
        if C > 512:
            last_sums = tl.sum(rest_sums, 0)
            if not FIRST:
                last_sums += tl.load(total + rest)
            _store_sums(last_sums, rest, total, dkv, LAST, BYTES)


@triton.jit
def _store_sums(sums, channel, total, dkv, LAST: tl.constexpr, BYTES: tl.constexpr):
    """BYTES: of an element of the contributions, whose register order these sums are in."""
    if LAST:
        RUN: tl.constexpr = 16 // BYTES  # neighbours in a thread's registers
        within = channel % (4 * RUN)
        target = channel - within + within % RUN // 2 * 8 + within // RUN * 2 + within % 2
        tl.store(dkv + target, sums.to(dkv.dtype.element_ty))
    else:
        tl.store(total + channel, sums)
