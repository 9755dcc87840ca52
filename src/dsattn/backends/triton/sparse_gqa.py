"""Sparse grouped-query attention in Triton: one program a query row and group, gathering the row's keys tile by tile.

Keys are the tall side of every product and the group's heads, at least 16, the short one: products are [keys, heads].
Everything that a kernel is compiled for comes from the model's geometry; token counts are its grid alone.
Letters: T query rows, S keys, H heads, G groups, J = H / G, C key width, V value width, K kept keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import Call, contribution_dtype, scratch_bytes, unmet
from dsattn.backends.triton.chunks import (
    LN_2,
    LOG2_E,
    contiguous,
    cut,
    load_chunks,
    meet,
    products,
    scaled,
    shared_bytes,
    store_chunks,
    zeros,
)
from dsattn.backends.triton.invert import Held, slots_of_run
from dsattn.backends.triton.launch import launch, needs_of
from dsattn.backends.triton.sparse_mla import ATOMIC_KEYS
from dsattn.selection import Inverse

# Most scratch of the deterministic backward: rows are taken in runs whose contributions to dk and dv fit.
SCRATCH_BYTES = 2**30
# Heads a program at most, fewer where they are wide. A larger group takes several programs a row.
MOST_HEADS = 64
# (keys a step, channels of one product at most, stages), best first; the first that fits in shared memory is taken.
# Never one stage on tensor cores: triton 3.6 then compiles the backward's gather to addresses outside of shared memory.
FORWARD_TILES = ((64, 256, 3), (64, 256, 2), (32, 256, 2), (16, 64, 2))
BACKWARD_TILES = ((64, 128, 2), (32, 64, 2), (16, 64, 2))


class Tiles(NamedTuple):
    """How one launch is cut. heads: a program; keys: a step; chunk: channels of one product at most."""

    heads: int
    keys: int
    chunk: int
    num_warps: int
    num_stages: int


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here, forward or backward."""
    return unmet(needs_of(call) | {"key and value widths of at most 512": max(call.width, call.value_width) <= 512})


@triton.jit
def _place(H: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr):
    """This program's row in the launch, its block among those of the row and group, group, heads, and which exist."""
    J: tl.constexpr = H // G
    BLOCKS: tl.constexpr = (J + HEADS - 1) // HEADS
    row = tl.program_id(0) // (G * BLOCKS)
    group = tl.program_id(0) // BLOCKS % G
    block = tl.program_id(0) % BLOCKS
    member = block * HEADS + tl.arange(0, HEADS)
    return row, block, group, group * J + member, member < J


@triton.jit
def _load_index(index, row, first, count, K: tl.constexpr, KEYS: tl.constexpr):
    """KEYS slots of the row from `first` on; -1 from `count` on."""
    slot = first + tl.arange(0, KEYS)
    return tl.load(index + row.to(tl.int64) * K + slot, mask=slot < count, other=-1)


@triton.jit
def _transposed_products(sums, a, b):
    """sums_c + a_c^T b, chunk after chunk: [channels, heads]."""
    grown = ()
    for i in tl.static_range(len(sums)):
        grown = grown + (tl.dot(tl.trans(a[i]), b, acc=sums[i], input_precision="ieee"),)
    return grown


@triton.jit
def _transposed(parts):
    turned = ()
    for i in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[i]),)
    return turned


# A slice of these may start anywhere; nothing is gained by compiling twice for it.
@triton.jit(do_not_specialize_on_alignment=["length", "sink", "lse"])
def _forward_kernel(
    q,
    k,
    v,
    index,
    length,
    sink,
    out,
    lse,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_REST: tl.constexpr,
):
    row, _, group, head, real = _place(H, G, HEADS)
    row_head = row.to(tl.int64) * H + head
    q_parts = load_chunks(q, row_head * C, real, C, C, CHUNK, REST)
    count = tl.minimum(tl.load(length + row), K)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    totals = tl.zeros([KEYS, HEADS], tl.float32)  # a sum a place of the tile: added up once, after all tiles
    sums = _transposed(zeros(HEADS, V, V, V_CHUNK, V_REST))
    upcoming = _load_index(index, row, 0, count, K, KEYS)
    for first in range(0, count, KEYS):
        key = upcoming
        upcoming = _load_index(index, row, first + KEYS, count, K, KEYS)  # a step ahead: its latency is hidden
        live = key >= 0
        from_key = key.to(tl.int64) * G + group
        k_parts = load_chunks(k, from_key * C, live, C, C, CHUNK, REST)
        v_parts = load_chunks(v, from_key * V, live, V, V, V_CHUNK, V_REST)
        logits = products(k_parts, q_parts, None) * (scale * LOG2_E)
        logits = tl.where(live[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logits - shift[None, :])
        shrink = tl.exp2(top - shift)[None, :]
        totals = totals * shrink + p
        top = new_top
        sums = _transposed_products(scaled(sums, shrink), v_parts, p.to(v.dtype.element_ty))
    total = tl.sum(totals, 0)
    # `total` is NaN where a logit is: such rows stay NaN.
    row_lse = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN_2)
    share = tl.where(total == 0, 0.0, 1.0 / total)
    if sink is not None:
        sink_logit = tl.load(sink + head, mask=real, other=0.0).to(tl.float32)
        share = tl.where(total == 0, 0.0, share / (1.0 + tl.exp(sink_logit - row_lse)))
    store_chunks(out, row_head * V, real, _transposed(scaled(sums, share[None, :])), V, V_CHUNK)
    tl.store(lse + row_head, row_lse, mask=real)


@triton.jit
def _delta(out, grad_parts, row_head, real, V: tl.constexpr, V_CHUNK: tl.constexpr, V_REST: tl.constexpr):
    """[heads]: out . grad_out; 0 where out is 0, whatever arrives there."""
    out_parts = load_chunks(out, row_head * V, real, V, V, V_CHUNK, V_REST)
    delta = tl.zeros([out_parts[0].shape[0]], tl.float32)
    for i in tl.static_range(len(out_parts)):
        o = out_parts[i].to(tl.float32)
        delta += tl.sum(tl.where(o == 0, 0.0, o * grad_parts[i].to(tl.float32)), 1)
    return delta


@triton.jit
def _denominator(lse, sink, row_head, head, real):
    """log2 of the whole denominator, the sink's part included; 0 where there is nothing to divide."""
    log = tl.load(lse + row_head, mask=real, other=0.0)
    if sink is not None:
        sink_logit = tl.load(sink + head, mask=real, other=0.0).to(tl.float32)
        high = tl.maximum(log, sink_logit)
        low = tl.minimum(log, sink_logit)
        # Two equal infinities differ by NaN.
        log = tl.where(high == low, high + LN_2, high + tl.log(1.0 + tl.exp(low - high)))
    return tl.where(log == float("-inf"), 0.0, log * LOG2_E)


@triton.jit
def _give(target, place, live, weights, rows, WIDTH: tl.constexpr, CHUNK: tl.constexpr, ATOMIC: tl.constexpr):
    """Add or write [keys, channels] = weights [keys, heads] @ rows [heads, channels] at the offsets `place`."""
    for i in tl.static_range(len(rows)):
        part = tl.dot(weights, rows[i], input_precision="ieee")
        channel = i * CHUNK + tl.arange(0, rows[i].shape[1])
        mask = live[:, None]
        if (i + 1) * CHUNK > WIDTH:
            mask = live[:, None] & (channel < WIDTH)[None, :]
        pointers = target + place[:, None] + channel[None, :]
        if ATOMIC:
            tl.atomic_add(pointers, part, mask=mask, sem="relaxed")
        else:
            tl.store(pointers, part.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["length", "sink", "lse"])
def _backward_kernel(
    grad_out,
    q,
    k,
    v,
    index,
    length,
    sink,
    out,
    lse,
    dq,
    dk,
    dv,
    scale,
    first_row,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_REST: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """dk, dv: [S, G, C or V] fp32 to add to, or with ATOMIC off contributions [rows, blocks, K, G, C or V] to write."""
    run_row, block, group, head, real = _place(H, G, HEADS)
    row = first_row + run_row
    row_head = row.to(tl.int64) * H + head
    q_parts = load_chunks(q, row_head * C, real, C, C, CHUNK, REST)
    grad_parts = load_chunks(grad_out, row_head * V, real, V, V, V_CHUNK, V_REST)
    delta = _delta(out, grad_parts, row_head, real, V, V_CHUNK, V_REST)
    denominator = _denominator(lse, sink, row_head, head, real)
    count = tl.minimum(tl.load(length + row), K)
    sums = _transposed(zeros(HEADS, C, C, CHUNK, REST))
    upcoming = _load_index(index, row, 0, count, K, KEYS)
    for first in range(0, count, KEYS):
        key = upcoming
        upcoming = _load_index(index, row, first + KEYS, count, K, KEYS)
        live = key >= 0
        from_key = key.to(tl.int64) * G + group
        k_parts = load_chunks(k, from_key * C, live, C, C, CHUNK, REST)
        v_parts = load_chunks(v, from_key * V, live, V, V, V_CHUNK, V_REST)
        p = tl.exp2(products(k_parts, q_parts, None) * (scale * LOG2_E) - denominator[None, :])
        ds = p * ((products(v_parts, grad_parts, None) - delta[None, :]) * scale)
        p = tl.where(live[:, None], p, 0.0).to(v.dtype.element_ty)
        ds = tl.where(live[:, None], ds, 0.0).to(k.dtype.element_ty)
        sums = _transposed_products(sums, k_parts, ds)
        place = from_key
        if not ATOMIC:
            BLOCKS: tl.constexpr = (H // G + HEADS - 1) // HEADS
            slot = (run_row.to(tl.int64) * BLOCKS + block) * K + first + tl.arange(0, KEYS)
            place = slot * G + group
        _give(dk, place * C, live, ds, q_parts, C, CHUNK, ATOMIC)
        _give(dv, place * V, live, p, grad_parts, V, V_CHUNK, ATOMIC)
    store_chunks(dq, row_head * C, real, _transposed(sums), C, CHUNK)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=["first", "stop"])
def _sum_kernel(
    contributions,
    slot,
    first,
    stop,
    base,
    total,
    W: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Add to some columns of one key's gradient what its slots contributed, in the order of the slots.

    contributions: [rows, BLOCKS, K, W], total: [S, W] fp32. slot, first, stop, base: which of the [rows, K] slots hold
    each key, see `Held`.
    """
    key = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    begin = tl.load(first + key)
    end = tl.load(stop + key)
    if begin < end:
        added = tl.zeros([WIDTH], tl.float32)
        for at in range(begin, end, SLOTS):
            place = at + tl.arange(0, SLOTS)
            held = place < end
            where = (tl.load(slot + place, mask=held, other=0) - base).to(tl.int64)
            for block in tl.static_range(BLOCKS):
                line = (where // K * BLOCKS + block) * K + where % K
                mask = held[:, None] & (column < W)[None, :]
                part = tl.load(contributions + line[:, None] * W + column[None, :], mask=mask, other=0.0)
                added += tl.sum(part.to(tl.float32), 0)
        pointers = total + key * W + column
        tl.store(pointers, tl.load(pointers, mask=column < W, other=0.0) + added, mask=column < W)


def sparse_gqa_forward(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] fp32) as `dsattn.ops.sparse_gqa` promises them.

    Online softmax over tiles of gathered keys, fp32 sums; rows stop at `length`. Mixed dtypes meet in their promotion.
    """
    rows, heads, width = q.shape
    groups, value_dim = k.shape[1], v.shape[2]
    out = q.new_empty(rows, heads, value_dim)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    q, k, v = meet(q=q, k=k, v=v)
    if heads == 0:
        return out, lse
    tiles = forward_tiles(heads // groups, width + value_dim, q.dtype, shared_bytes(q.device))
    with torch.cuda.device_of(q):
        launch(
            _forward_kernel,
            (rows * groups * _blocks(heads, groups, tiles),),
            *(q, k, v, index.contiguous(), length.contiguous(), contiguous(sink), out, lse, scale),
            **_geometry(heads, groups, width, value_dim, index.shape[1], tiles),
        )
    return out, lse


def sparse_gqa_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): probabilities come back from lse, dk and dv are summed in fp32.

    Up to ATOMIC_KEYS keys by atomics, in any order. Beyond, or `deterministic`, run of rows after run of rows: each
    writes what its slots contribute, in the operands' dtype or as `settings` ask, and these are summed by key in the
    order of the slots.
    inverse: of index and length; where it is None, each run's is made. A row's keys are distinct.
    """
    rows, heads, width = q.shape
    num_keys, groups, value_dim, slots = k.shape[0], k.shape[1], v.shape[2], index.shape[1]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dv = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    dtypes = k.dtype, v.dtype
    q, k, v = meet(q=q, k=k, v=v)
    if 0 in (rows, heads, num_keys, slots):
        return dq.zero_(), dk.to(dtypes[0]), dv.to(dtypes[1])
    dtype, shared = contribution_dtype(q.dtype), shared_bytes(q.device)
    if dtype != q.dtype:  # a tile of them passes through shared memory on its way out
        shared -= max(dtype.itemsize * keys * chunk for keys, chunk, _ in BACKWARD_TILES)
    tiles = backward_tiles(heads // groups, width + value_dim, q.dtype, shared)
    blocks = _blocks(heads, groups, tiles)
    index, length = index.contiguous(), length.contiguous()
    before = (grad_out.to(q.dtype).contiguous(), q, k, v, index, length, contiguous(sink))
    before = (*before, out.to(q.dtype).contiguous(), lse.contiguous(), dq)
    constants = _geometry(heads, groups, width, value_dim, slots, tiles)
    with torch.cuda.device_of(q):
        if not deterministic and num_keys <= ATOMIC_KEYS:
            launch(_backward_kernel, (rows * groups * blocks,), *before, dk, dv, scale, 0, ATOMIC=True, **constants)
            return dq, dk.to(dtypes[0]), dv.to(dtypes[1])
        row_bytes = blocks * slots * groups * (width + value_dim) * dtype.itemsize
        run = min(rows, max(1, scratch_bytes(SCRATCH_BYTES) // row_bytes))
        scratch = [q.new_empty(run, blocks, slots, groups * each, dtype=dtype) for each in (width, value_dim)]
        for first in range(0, rows, run):
            count = min(run, rows - first)
            rest = (*scratch, scale, first)
            launch(_backward_kernel, (count * groups * blocks,), *before, *rest, ATOMIC=False, **constants)
            held = slots_of_run(inverse, index, length, first, count, num_keys)
            for contributions, total in zip(scratch, (dk, dv), strict=True):
                _add_by_key(contributions, held, total, slots, blocks)
    return dq, dk.to(dtypes[0]), dv.to(dtypes[1])


def _add_by_key(contributions: Tensor, held: Held, total: Tensor, slots: int, blocks: int) -> None:
    columns = contributions.shape[-1]
    width = min(512, triton.next_power_of_2(columns))
    grid = (total.shape[0], triton.cdiv(columns, width))
    launch(_sum_kernel, grid, contributions, *held, total, columns, slots, blocks, width, 16)


def forward_tiles(heads: int, widths: int, dtype: torch.dtype, shared: int) -> Tiles:
    """heads: of a group; widths: of a key and its value together."""
    return _first_fitting(FORWARD_TILES, heads, widths, dtype, shared)


def backward_tiles(heads: int, widths: int, dtype: torch.dtype, shared: int) -> Tiles:
    """As forward_tiles."""
    return _first_fitting(BACKWARD_TILES, heads, widths, dtype, shared)


def _first_fitting(
    choices: tuple[tuple[int, int, int], ...], heads: int, widths: int, dtype: torch.dtype, shared: int
) -> Tiles:
    """The heads' rows stay in shared memory beside the tiles of keys and values in flight."""
    block = min(MOST_HEADS if widths <= 512 else 16, max(16, triton.next_power_of_2(heads)))
    if dtype == torch.float32:  # without tensor cores: whole operands of a product are held in registers
        return Tiles(16, 16, 64, 4, 1)
    fits = [one for one in choices if (block + one[0] * one[2]) * widths * dtype.itemsize <= shared]
    keys, chunk, num_stages = (fits or choices[-1:])[0]
    return Tiles(block, keys, chunk, 4, num_stages)


def _blocks(heads: int, groups: int, tiles: Tiles) -> int:
    return triton.cdiv(heads // groups, tiles.heads)


def _geometry(heads: int, groups: int, width: int, value_dim: int, slots: int, tiles: Tiles) -> dict[str, int]:
    chunk, rest = cut(width, tiles.chunk)
    v_chunk, v_rest = cut(value_dim, tiles.chunk)
    return {
        "H": heads,
        "G": groups,
        "C": width,
        "V": value_dim,
        "K": slots,
        "HEADS": tiles.heads,
        "KEYS": tiles.keys,
        "CHUNK": chunk,
        "REST": rest,
        "V_CHUNK": v_chunk,
        "V_REST": v_rest,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
