"""What stands after the backward kernel of sparse MLA on Hopper, in plain Triton: gradients of keys are put together.

By `gather_additions`, or by `add_contributions`: those of one key lie side by side, in the order of rows, where
`dsattn.backends.triton.invert.places_of_runs` told the kernel to put them.

Register order is the order in which the backward kernel leaves channels in memory. A tensor core product gives a thread
two neighbouring channels of every eight; four fp32 (eight bf16) of them are stored together:

    channel 16 g + 8 b + 2 q + x  is at  16 g + 4 q + 2 b + x   for fp32, b in 0..1, q in 0..3, x in 0..1
    channel 32 g + 8 b + 2 q + x  is at  32 g + 8 q + 2 b + x   for bf16, b in 0..3

Letters: S keys, C latent width.
"""

import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends.triton.launch import launch

# Of a key, summed at a time: more in flight, or fewer, is slower.
LINES = 4


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

    contributions: [lines, blocks of heads, C], bf16 or fp32, in register order; start: [S + 1] int32 of `Places`.
    total: [S, C] fp32 in register order: written by the first run, added to by others, untouched by a run that is both
    `first` and `last`. dkv: [S, C], written by the last.
    """
    _, blocks, width = contributions.shape
    constants = {"C": width, "BLOCKS": blocks, "FIRST": first, "LAST": last, "LINES": LINES, "num_warps": 2}
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

    Two warps share the 512 channels, 256 each, and meet at the end: neither waits for the other before.
    """
    key = tl.program_id(0).to(tl.int64)
    base = tl.load(start)
    first = (tl.load(start + key) - base).to(tl.int64) * BLOCKS
    stop = (tl.load(start + key + 1) - base).to(tl.int64) * BLOCKS
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
        for at in tl.range(first, stop, LINES, num_stages=3):
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
