"""The indexer's loss in Triton. Over selected keys here: one program a query row, or a tile of its slots.

The forward leaves dKL/dI of every slot to the backward, which therefore meets the indexer's operands alone: it gathers
a row's keys tile by tile, sums dq and dw in registers, and scatters dk. By atomics, in any order; or, `deterministic`,
run of rows after run of rows, every slot's part of dk is written, in the operands' dtype or as `settings` ask, and all
are summed by key in the order of the slots.
Memory beside operands and results: the forward takes 4 T K bytes for dKL/dI, saved, and at most SCRATCH_BYTES for the
target, of all ranks' rows, and its sum; the backward 4 S D bytes for dk and, deterministic, at most SCRATCH_BYTES and,
without an inverse of the selection, what `invert` takes for a run and 4 bytes for each of its slots.
Letters: T query rows, S keys, H_I / D indexer heads / width, K kept keys; tiles: N slots, P padded heads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import Call, HeadRanks, contribution_dtype, scratch_bytes, unmet
from dsattn.backends.triton.chunks import meet
from dsattn.backends.triton.indexer_kl_dense import ranges_backward, ranges_forward
from dsattn.backends.triton.indexer_kl_rows import (
    Lines,
    begin_target,
    fill_dscore,
    fill_loss,
    lines_of,
    row_blocks,
)
from dsattn.backends.triton.invert import slots_of_run
from dsattn.backends.triton.launch import launch
from dsattn.backends.triton.select_scores import indexer_needs
from dsattn.errors import BackendUnavailable
from dsattn.keys import KeyRange
from dsattn.selection import Inverse

SCRATCH_BYTES = 2**30  # or less, as settings allow


class Tiles(NamedTuple):
    """slots: of a tile."""

    slots: int
    num_warps: int
    num_stages: int


SCORE_TILES = Tiles(128, 4, 1)
GRADIENT_TILES = Tiles(64, 4, 3)
# fp32 has no tensor cores: the compiler unrolls every product.
EXACT_SCORE_TILES = Tiles(32, 4, 1)
EXACT_GRADIENT_TILES = Tiles(16, 4, 1)


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here, forward or backward."""
    return unmet(indexer_needs(call, "bfloat16", "float32"))


def indexer_kl_forward(
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index: Tensor | None,
    length: Tensor | None,
    keys: KeyRange,
    real: Tensor,
    divisor: Tensor,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, score_lse [2, T], mass [T], dscore [T, K]) of `forward_reference`, in fp32; dscore is [T, 0] for ranges.

    target: [R, K] fp32, of selected keys and this rank's heads, where somebody has it already.
    Raises BackendUnavailable where any operand is fp64.
    """
    _refuse_fp64(q_i, k_i, w, q, kv, lse)
    rows = q_i.shape[0]
    loss, mass = (torch.zeros(rows, dtype=torch.float32, device=q.device) for _ in range(2))
    score_lse = mass.new_zeros(2, rows)
    score_lse[1] = -torch.inf  # of rows that read nothing, where there is nothing to launch
    dscore = mass.new_empty(rows, 0 if index is None else index.shape[1])
    row_values = (loss, score_lse[0], score_lse[1], mass)
    q_i, k_i = meet(q_i=q_i, k_i=k_i)
    q, kv = meet(q=q, kv=kv)
    lines = lines_of(index, length, keys, real, k_i.shape[0])
    if min(*q_i.shape, *q.shape, lines.columns, k_i.shape[0]) == 0:
        return loss.sum() / divisor, score_lse, mass, dscore.zero_()
    with torch.cuda.device_of(q):
        if index is None:
            ranges_forward((q_i, k_i, w), (q, kv, lse.contiguous()), lines, scale, relu, ranks, row_values)
        else:
            made_from = (q, kv, lse.contiguous(), lines, scale, ranks)
            _selected_forward((q_i, k_i, w.contiguous()), made_from, target, relu, dscore, score_lse, row_values)
    return loss.sum() / divisor, score_lse, mass, dscore


def indexer_kl_backward(
    row_scale: Tensor,
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index: Tensor | None,
    length: Tensor | None,
    keys: KeyRange,
    real: Tensor,
    score_lse: Tensor,
    mass: Tensor,
    dscore: Tensor,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    deterministic: bool,
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_i, dk_i, dw) of `backward_reference`, sums in fp32. inverse: of index and length."""
    _refuse_fp64(q_i, k_i, w, q, kv, lse)
    dq, dw = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_i, w))
    key_dtype = k_i.dtype
    q_i, k_i = meet(q_i=q_i, k_i=k_i)
    lines = lines_of(index, length, keys, real, k_i.shape[0])
    if min(*q_i.shape, *q.shape, lines.columns, k_i.shape[0]) == 0:
        return dq.zero_(), torch.zeros(k_i.shape, dtype=key_dtype, device=k_i.device), dw.zero_()
    row_scale = row_scale.float().contiguous()
    with torch.cuda.device_of(q):
        if lines.index is None:
            target = (*meet(q=q, kv=kv), lse.contiguous())
            saved = (row_scale, score_lse.contiguous(), mass.contiguous())
            dk = ranges_backward((q_i, k_i, w), target, lines, scale, relu, ranks, saved, (dq, dw))
        else:
            lines, length = lines.own(ranks), None if length is None else ranks.own(length)
            # A row that weighs nothing has no slots: it gives exact zeros, whatever it holds.
            teaches = (row_scale != 0) & (mass != 0)
            lines = lines._replace(end=torch.where(teaches, lines.end, 0))
            operands, saved = (q_i, k_i, w.contiguous()), (row_scale, dscore.contiguous())
            dk = _selected_backward(operands, lines, relu, saved, (dq, dw), deterministic, length, inverse)
    return dq, dk.to(key_dtype), dw


def _refuse_fp64(*operands: Tensor) -> None:
    if any(x.dtype == torch.float64 for x in operands):
        raise BackendUnavailable("indexer_kl: fp64 operands need backend='reference'; cast all operands alike")


def _selected_forward(
    indexer: tuple[Tensor, Tensor, Tensor],
    made_from: tuple[Tensor, Tensor, Tensor, Lines, float, HeadRanks],
    target: Tensor | None,
    relu: bool,
    dscore: Tensor,
    score_lse: Tensor,
    row_values: tuple[Tensor, ...],
) -> None:
    """Scores stand in dscore until they become it. made_from: what the target is made from, where none is given."""
    ranks, mine = made_from[-1], made_from[3].own(made_from[-1])
    rows, top_k = dscore.shape
    blocks = row_blocks(rows, 4 * top_k * ranks.tables, scratch_bytes(SCRATCH_BYTES))
    scratch = dscore.new_empty(ranks.all_rows(blocks[0]).stop if target is None else 0, top_k)
    for number, block in enumerate(blocks):
        every = ranks.all_rows(block)
        if target is None:
            wait = begin_target(*made_from, block, scratch[: every.stop - every.start])
        else:
            wait = ranks.begin(ranks.deal(target[every].contiguous()))
        if number == 0:  # of all rows, while the first part of the target is on its way
            _fill_scores(*indexer, mine, relu, dscore)
        part = wait()
        fill_loss(dscore[block], part, mine, block, row_values)
        fill_dscore(dscore[block], part, mine, block, score_lse, row_values[3])


def _fill_scores(q_i: Tensor, k_i: Tensor, w: Tensor, lines: Lines, relu: bool, score: Tensor) -> None:
    (rows, heads, width), slots = q_i.shape, score.shape[1]
    exact = q_i.dtype == torch.float32
    tiles = EXACT_SCORE_TILES if exact else SCORE_TILES
    padded = max(16, triton.next_power_of_2(width))
    row_tiles = triton.cdiv(slots, tiles.slots)
    launch(
        _slot_score_kernel,
        (rows * row_tiles,),
        *(q_i, k_i, w, lines.index, lines.end, score, row_tiles),
        H=heads,
        D=width,
        K=slots,
        HEADS=max(16, triton.next_power_of_2(heads)),
        SLOTS=tiles.slots,
        WIDTH=16 if exact else padded,
        RELU=relu,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["w", "index", "end", "score"])
def _slot_score_kernel(
    q_i,
    k_i,
    w,
    index,
    end,
    score,
    tiles,
    H: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RELU: tl.constexpr,
):
    """I of SLOTS slots of one row, -inf in holes. WIDTH: channels of one product."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    slot_N = tl.program_id(0) % tiles * SLOTS + tl.arange(0, SLOTS)
    count = tl.load(end + row)
    if tl.program_id(0) % tiles * SLOTS >= count:
        return
    key_N = tl.load(index + row * K + slot_N, mask=slot_N < count, other=-1)
    live_N = key_N >= 0
    head_P = tl.arange(0, HEADS)
    real_P = head_P < H
    w_P = tl.load(w + row * H + head_P, mask=real_P, other=0.0).to(tl.float32)
    q_P1 = q_i + (row * H + head_P)[:, None] * D
    k_N1 = k_i + key_N.to(tl.int64)[:, None] * D
    dot_NP = tl.zeros([SLOTS, HEADS], tl.float32)
    for first in range(0, D, WIDTH):
        x_1X = first + tl.arange(0, WIDTH)[None, :]
        k_NX = tl.load(k_N1 + x_1X, mask=live_N[:, None] & (x_1X < D), other=0.0)
        q_PX = tl.load(q_P1 + x_1X, mask=real_P[:, None] & (x_1X < D), other=0.0)
        dot_NP = tl.dot(k_NX, tl.trans(q_PX), dot_NP, input_precision="ieee")
    if RELU:
        dot_NP = tl.maximum(dot_NP, 0.0, propagate_nan=tl.PropagateNan.ALL)
    part_NP = dot_NP * w_P[None, :]
    if H < HEADS:  # 0 * inf, of a padded head and an infinite key, must not be met
        part_NP = tl.where(real_P[None, :], part_NP, 0.0)
    score_N = tl.where(live_N, tl.sum(part_NP, 1), float("-inf"))
    tl.store(score + row * K + slot_N, score_N, mask=slot_N < count)


def _selected_backward(
    indexer: tuple[Tensor, Tensor, Tensor],
    lines: Lines,
    relu: bool,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    deterministic: bool,
    length: Tensor | None,
    inverse: Inverse | None,
) -> Tensor:
    """dk [S, D] in fp32; fills grads (dq, dw). saved: row_scale, dscore. length, inverse: of the selection."""
    assert lines.index is not None
    assert length is not None
    q_i, k_i, w = indexer
    (rows, heads, width), (slots, keys) = q_i.shape, (saved[1].shape[1], k_i.shape[0])
    dk = torch.zeros(k_i.shape, dtype=torch.float32, device=k_i.device)
    tiles = EXACT_GRADIENT_TILES if q_i.dtype == torch.float32 else GRADIENT_TILES
    geometry = {
        "H": heads,
        "D": width,
        "K": slots,
        "HEADS": max(16, triton.next_power_of_2(heads)),
        "SLOTS": tiles.slots,
        "WIDTH": max(16, triton.next_power_of_2(width)),
        "RELU": relu,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    before = (q_i, k_i, w, lines.index, lines.end, *saved, *grads)
    if not deterministic:
        launch(_slot_gradient_kernel, (rows,), *before, dk, 0, ATOMIC=True, **geometry)
        return dk
    dtype = contribution_dtype(q_i.dtype)
    blocks = row_blocks(rows, slots * width * dtype.itemsize, scratch_bytes(SCRATCH_BYTES))
    parts = q_i.new_empty(blocks[0].stop, slots, width, dtype=dtype)
    for block in blocks:
        launch(
            _slot_gradient_kernel, (block.stop - block.start,), *before, parts, block.start, ATOMIC=False, **geometry
        )
        held = slots_of_run(inverse, lines.index, length, block.start, block.stop - block.start, keys)
        launch(
            _slot_sum_kernel,
            (keys,),
            *(parts, *held, lines.end[block], dk),
            D=width,
            K=slots,
            WIDTH=triton.next_power_of_2(width),
            SLOTS=16,
            num_warps=2,
        )
    return dk


@triton.jit(
    do_not_specialize=["first_row"],
    do_not_specialize_on_alignment=["w", "index", "end", "row_scale", "dscore", "dw"],
)
def _slot_gradient_kernel(
    q_i,
    k_i,
    w,
    index,
    end,
    row_scale,
    dscore,
    dq,
    dw,
    dk,
    first_row,
    H: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RELU: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """dq and dw of one row; dk: [S, D] fp32 to add to, or, with ATOMIC off, parts [rows of the run, K, D] to write."""
    run_row = tl.program_id(0).to(tl.int64)
    row = first_row + run_row
    factor = tl.load(row_scale + row).to(tl.float32)
    count = tl.load(end + row)
    head_P = tl.arange(0, HEADS)
    real_P = head_P < H
    x_X = tl.arange(0, WIDTH)
    w_P = tl.load(w + row * H + head_P, mask=real_P, other=0.0).to(tl.float32)
    place_PX = (row * H + head_P)[:, None] * D + x_X[None, :]
    q_PX = tl.load(q_i + place_PX, mask=real_P[:, None] & (x_X < D)[None, :], other=0.0)
    dq_XP = tl.zeros([WIDTH, HEADS], tl.float32)
    dw_NP = tl.zeros([SLOTS, HEADS], tl.float32)
    slot_N = tl.arange(0, SLOTS)
    upcoming_N = tl.load(index + row * K + slot_N, mask=slot_N < count, other=-1)
    for first in range(0, count, SLOTS):
        key_N = upcoming_N
        slot_N = first + tl.arange(0, SLOTS)
        ahead_N = slot_N + SLOTS  # a step ahead: its latency is hidden
        upcoming_N = tl.load(index + row * K + ahead_N, mask=ahead_N < count, other=-1)
        live_N = key_N >= 0
        place_N = key_N.to(tl.int64)
        mask_NX = live_N[:, None] & (x_X < D)[None, :]
        k_NX = tl.load(k_i + place_N[:, None] * D + x_X[None, :], mask=mask_NX, other=0.0)
        dscore_N = tl.load(dscore + row * K + slot_N, mask=slot_N < count, other=0.0) * factor
        dot_NP = tl.dot(k_NX, tl.trans(q_PX), input_precision="ieee")
        ddot_NP = dscore_N[:, None] * w_P[None, :]
        if RELU:
            ddot_NP = tl.where(dot_NP > 0, ddot_NP, 0.0)
            dot_NP = tl.maximum(dot_NP, 0.0, propagate_nan=tl.PropagateNan.ALL)
        dw_NP += dscore_N[:, None] * dot_NP
        ddot_NP = ddot_NP.to(k_NX.dtype)
        dq_XP = tl.dot(tl.trans(k_NX), ddot_NP, dq_XP, input_precision="ieee")
        dk_NX = tl.dot(ddot_NP, q_PX, input_precision="ieee")
        if ATOMIC:
            tl.atomic_add(dk + place_N[:, None] * D + x_X[None, :], dk_NX, mask=mask_NX, sem="relaxed")
        else:
            part_N = run_row * K + slot_N
            tl.store(dk + part_N[:, None] * D + x_X[None, :], dk_NX.to(dk.dtype.element_ty), mask=mask_NX)
    tl.store(dq + place_PX, tl.trans(dq_XP).to(dq.dtype.element_ty), mask=real_P[:, None] & (x_X < D)[None, :])
    tl.store(dw + row * H + head_P, tl.sum(dw_NP, 0).to(dw.dtype.element_ty), mask=real_P)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=["first", "stop", "end"])
def _slot_sum_kernel(
    parts,
    slot,
    first,
    stop,
    base,
    end,
    dk,
    D: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Add to one key's dk [D] the parts [rows, K, D] of its slots, in their order. slot, first, stop, base: see `Held`.

    end: of the run's rows; a slot from there on has no part.
    """
    key = tl.program_id(0).to(tl.int64)
    x_X = tl.arange(0, WIDTH)
    begin = tl.load(first + key)
    last = tl.load(stop + key)
    if begin < last:
        total_NX = tl.zeros([SLOTS, WIDTH], tl.float32)
        for at in range(begin, last, SLOTS):
            place_N = at + tl.arange(0, SLOTS)
            held_N = place_N < last
            slot_N = (tl.load(slot + place_N, mask=held_N, other=0) - base).to(tl.int64)
            held_N = held_N & (slot_N % K < tl.load(end + slot_N // K, mask=held_N, other=0))
            mask_NX = held_N[:, None] & (x_X < D)[None, :]
            total_NX += tl.load(parts + slot_N[:, None] * D + x_X[None, :], mask=mask_NX, other=0.0).to(tl.float32)
        sums_X = dk + key * D + x_X
        tl.store(sums_X, tl.load(sums_X, mask=x_X < D, other=0.0) + tl.sum(total_NX, 0), mask=x_X < D)
