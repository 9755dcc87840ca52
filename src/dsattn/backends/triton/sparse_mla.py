"""Sparse absorbed MLA in Triton: one program a query row and block of heads, gathering the row's keys tile by tile.

Latents are cut into chunks of CHUNK channels and a rest padded to a power of two, so that 512 + 64 costs no padding.
Everything that a kernel is compiled for comes from the model's geometry; token counts are its grid alone.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import Call
from dsattn.backends.triton.launch import launch
from dsattn.errors import BackendUnavailable

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Scratch of the deterministic backward: rows are taken in runs whose contributions to dkv fit.
SCRATCH_BYTES = 2**30
# What one block of a Hopper or Blackwell data centre GPU may use; assumed where torch does not tell.
SHARED_BYTES = 232448


# Heads a program and keys a step, best first. Fewer than 64 heads in the backward means tensor core instructions whose
# operands need a second copy in shared memory when a step has more than 32 keys.
FORWARD_TILES = ((64, 64), (64, 32), (32, 64), (32, 32), (16, 64), (16, 32), (16, 16))
BACKWARD_TILES = ((64, 64), (32, 32), (16, 32), (16, 16))


class Tiles(NamedTuple):
    """How one launch is cut. heads: a program; keys: a step; chunk: channels of one product."""

    heads: int
    keys: int
    chunk: int
    num_warps: int
    num_stages: int


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here, forward or backward."""
    unmet = []
    if call.device != "cuda":
        unmet.append("a GPU")
    if call.dtype not in ("bfloat16", "float16", "float32"):
        unmet.append("bfloat16, float16 or float32 operands")
    if call.width > 1024:
        unmet.append("a latent width of at most 1024")
    return unmet


@triton.jit
def _load(base, rows, live, FIRST: tl.constexpr, WIDTH: tl.constexpr, TOTAL: tl.constexpr):
    """[R, WIDTH] channels from FIRST on of rows that lie TOTAL apart; 0 past TOTAL and where not `live`."""
    channel = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * TOTAL + channel[None, :]
    if FIRST + WIDTH <= TOTAL:
        mask = live[:, None]
    else:
        mask = live[:, None] & (channel < TOTAL)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _load_chunks(base, rows, live, TOTAL: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr):
    """The first TOTAL channels of rows, as a tuple cut where C channels are cut."""
    parts = ()
    for i in tl.static_range(C // CHUNK):
        if i * CHUNK < TOTAL:
            parts = parts + (_load(base, rows, live, i * CHUNK, CHUNK, TOTAL),)
    if REST > 0:
        if C // CHUNK * CHUNK < TOTAL:
            parts = parts + (_load(base, rows, live, C // CHUNK * CHUNK, REST, TOTAL),)
    return parts


@triton.jit
def _zeros(like):
    parts = ()
    for i in tl.static_range(len(like)):
        parts = parts + (tl.zeros(like[i].shape, tl.float32),)
    return parts


@triton.jit
def _store_chunks(base, rows, live, parts, TOTAL: tl.constexpr, CHUNK: tl.constexpr):
    for i in tl.static_range(len(parts)):
        channel = i * CHUNK + tl.arange(0, parts[i].shape[1])
        mask = live[:, None] & (channel < TOTAL)[None, :]
        pointers = base + rows[:, None] * TOTAL + channel[None, :]
        tl.store(pointers, parts[i].to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_index(index, row, first, count, K: tl.constexpr, KEYS: tl.constexpr):
    """KEYS slots of the row from `first` on; -1 from `count` on."""
    slot = first + tl.arange(0, KEYS)
    return tl.load(index + row.to(tl.int64) * K + slot, mask=slot < count, other=-1)


@triton.jit
def _products(a, b):
    """sum_c a_c b_c^T over the chunks that both have: [heads, keys] fp32."""
    total = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    for i in tl.static_range(1, len(a)):
        total = tl.dot(a[i], tl.trans(b[i]), acc=total, input_precision="ieee")
    return total


# A slice of these may start anywhere; nothing is gained by compiling twice for it.
@triton.jit(do_not_specialize_on_alignment=["length", "sink", "lse"])
def _forward_kernel(
    q,
    kv,
    index,
    length,
    sink,
    out,
    lse,
    scale,
    H: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0) // tl.cdiv(H, HEADS)
    head = tl.program_id(0) % tl.cdiv(H, HEADS) * HEADS + tl.arange(0, HEADS)
    real = head < H
    row_head = row.to(tl.int64) * H + head
    q_parts = _load_chunks(q, row_head, real, C, C, CHUNK, REST)
    count = tl.minimum(tl.load(length + row), K)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = ()
    for i in tl.static_range(len(q_parts)):
        if i * CHUNK < V:
            sums = sums + (tl.zeros(q_parts[i].shape, tl.float32),)
    upcoming = _load_index(index, row, 0, count, K, KEYS)
    for first in range(0, count, KEYS):
        key = upcoming
        upcoming = _load_index(index, row, first + KEYS, count, K, KEYS)  # a step ahead: its latency is hidden
        live = key >= 0
        kv_parts = _load_chunks(kv, key.to(tl.int64), live, C, C, CHUNK, REST)
        logits = _products(q_parts, kv_parts) * (scale * LOG2_E)
        logits = tl.where(live[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logits - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        p = p.to(kv.dtype.element_ty)
        grown = ()
        for i in tl.static_range(len(sums)):
            grown = grown + (tl.dot(p, kv_parts[i], acc=sums[i] * shrink[:, None], input_precision="ieee"),)
        sums = grown
    # `total` is NaN where a logit is: such rows stay NaN.
    row_lse = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN_2)
    factor = tl.where(total == 0, 0.0, 1.0 / total)
    if sink is not None:
        sink_logit = tl.load(sink + head, mask=real, other=0.0).to(tl.float32)
        factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp(sink_logit - row_lse)))
    results = ()
    for i in tl.static_range(len(sums)):
        results = results + (sums[i] * factor[:, None],)
    _store_chunks(out, row_head, real, results, V, CHUNK)
    tl.store(lse + row_head, row_lse, mask=real)


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["length", "sink", "lse"])
def _backward_kernel(
    grad_out,
    q,
    kv,
    index,
    length,
    sink,
    out,
    lse,
    dq,
    dkv,
    scale,
    first_row,
    H: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """dkv: [S, C] fp32 to add to, or with ATOMIC off, contributions [rows, blocks of heads, K, C] to write."""
    run_row = tl.program_id(0) // tl.cdiv(H, HEADS)
    row = first_row + run_row
    head = tl.program_id(0) % tl.cdiv(H, HEADS) * HEADS + tl.arange(0, HEADS)
    real = head < H
    row_head = row.to(tl.int64) * H + head
    q_parts = _load_chunks(q, row_head, real, C, C, CHUNK, REST)
    grad_parts = _load_chunks(grad_out, row_head, real, V, C, CHUNK, REST)
    delta = _row_dots(out, grad_parts, row_head, real, V, C, CHUNK, REST)
    denominator = _denominator(lse, sink, row_head, head, real)
    count = tl.minimum(tl.load(length + row), K)
    sums = _zeros(q_parts)
    upcoming = _load_index(index, row, 0, count, K, KEYS)
    for first in range(0, count, KEYS):
        key = upcoming
        upcoming = _load_index(index, row, first + KEYS, count, K, KEYS)
        live = key >= 0
        kv_parts = _load_chunks(kv, key.to(tl.int64), live, C, C, CHUNK, REST)
        p = tl.exp2(_products(q_parts, kv_parts) * (scale * LOG2_E) - denominator[:, None])
        p = tl.where(live[None, :], p, 0.0)
        ds = (p * ((_products(grad_parts, kv_parts) - delta[:, None]) * scale)).to(kv.dtype.element_ty)
        p = p.to(kv.dtype.element_ty)
        grown = ()
        for i in tl.static_range(len(sums)):
            grown = grown + (tl.dot(ds, kv_parts[i], acc=sums[i], input_precision="ieee"),)
        sums = grown
        if ATOMIC:
            target = key.to(tl.int64)
        else:
            target = tl.program_id(0).to(tl.int64) * K + first + tl.arange(0, KEYS)
        p_t = tl.trans(p)
        ds_t = tl.trans(ds)
        for i in tl.static_range(len(q_parts)):
            add = tl.dot(ds_t, q_parts[i], input_precision="ieee")
            if i < len(grad_parts):
                add = tl.dot(p_t, grad_parts[i], acc=add, input_precision="ieee")
            channel = i * CHUNK + tl.arange(0, q_parts[i].shape[1])
            mask = live[:, None]
            if (i + 1) * CHUNK > C:
                mask = live[:, None] & (channel < C)[None, :]
            pointers = dkv + target[:, None] * C + channel[None, :]
            if ATOMIC:
                tl.atomic_add(pointers, add, mask=mask, sem="relaxed")
            else:
                tl.store(pointers, add.to(dkv.dtype.element_ty), mask=mask)
    _store_chunks(dq, row_head, real, sums, C, CHUNK)


@triton.jit
def _row_dots(
    out, grad_parts, row_head, real, V: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr
):
    """delta [heads]: out . grad_out; 0 where out is 0, whatever arrives there."""
    out_parts = _load_chunks(out, row_head, real, V, C, CHUNK, REST)
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


@triton.jit(do_not_specialize=["blocks"])
def _sum_kernel(
    contributions,
    slot,
    offset,
    dkv,
    blocks,
    C: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Add to one key's dkv what its slots of a run of rows contributed, in the order of the slots.

    contributions: [rows, blocks, K, C]; slot, offset: which of the run's [rows, K] slots hold each key, see `Inverse`.
    """
    key = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    first = tl.load(offset + key)
    stop = tl.load(offset + key + 1)
    if first < stop:
        total = tl.zeros([WIDTH], tl.float32)
        for at in range(first, stop, SLOTS):
            place = at + tl.arange(0, SLOTS)
            held = place < stop
            where = tl.load(slot + place, mask=held, other=0)
            for block in range(blocks):
                line = (where // K * blocks + block) * K + where % K
                mask = held[:, None] & (channel < C)[None, :]
                part = tl.load(contributions + line[:, None] * C + channel[None, :], mask=mask, other=0.0)
                total += tl.sum(part.to(tl.float32), 0)
        sums = dkv + key * C + channel
        tl.store(sums, tl.load(sums, mask=channel < C, other=0.0) + total, mask=channel < C)


def sparse_mla_forward(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] fp32) as `dsattn.ops.sparse_mla` promises them.

    Online softmax over tiles of gathered keys, fp32 sums; rows stop at `length`. Mixed dtypes meet in their promotion.
    """
    rows, heads, width = q.shape
    out = q.new_empty(rows, heads, value_dim)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if rows == 0 or heads == 0:
        return out, lse
    q, kv = _meet(q, kv)
    tiles = forward_tiles(heads, width, q.dtype, shared_bytes(q.device))
    with torch.cuda.device_of(q):
        launch(
            _forward_kernel,
            (rows * triton.cdiv(heads, tiles.heads),),
            *(q, kv, index.contiguous(), length.contiguous(), _contiguous(sink), out, lse, scale),
            **_geometry(q, index, value_dim, tiles),
        )
    return out, lse


def sparse_mla_backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(dq, dkv): probabilities come back from lse, dkv is summed in fp32.

    By atomics, in any order; or, `deterministic`, run of rows after run of rows: each writes what its slots contribute
    in the operands' dtype, and these are summed by key in the order of the slots.
    """
    rows, heads, width = q.shape
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    if 0 in (rows, heads, kv.shape[0], index.shape[1]):
        return dq.zero_(), dkv.to(kv.dtype)
    kv_dtype = kv.dtype
    q, kv = _meet(q, kv)
    tiles = backward_tiles(heads, width, q.dtype, shared_bytes(q.device))
    index, length, blocks = index.contiguous(), length.contiguous(), triton.cdiv(heads, tiles.heads)
    before = (grad_out.to(q.dtype).contiguous(), q, kv, index, length, _contiguous(sink))
    before = (*before, out.to(q.dtype).contiguous(), lse.contiguous(), dq)
    geometry = _geometry(q, index, out.shape[-1], tiles)
    with torch.cuda.device_of(q):
        if not deterministic:
            launch(_backward_kernel, (rows * blocks,), *before, dkv, scale, 0, ATOMIC=True, **geometry)
            return dq, dkv.to(kv_dtype)
        slots, keys = index.shape[1], kv.shape[0]
        run = min(rows, max(1, SCRATCH_BYTES // max(1, blocks * slots * width * q.element_size())))
        contributions = q.new_empty(run, blocks, slots, width)
        for first in range(0, rows, run):
            count = min(run, rows - first)
            rest = (contributions, scale, first)
            launch(_backward_kernel, (count * blocks,), *before, *rest, ATOMIC=False, **geometry)
            slot, offset = _invert(index[first : first + count], length[first : first + count], keys)
            columns = triton.next_power_of_2(width)
            sums = (contributions, slot, offset, dkv, blocks, width, slots, columns, 16)
            launch(_sum_kernel, (keys,), *sums, num_warps=4)
    return dq, dkv.to(kv_dtype)


def forward_tiles(heads: int, width: int, dtype: torch.dtype, shared: int) -> Tiles:
    """The first of FORWARD_TILES that fits: q stays in shared memory beside two tiles of keys."""
    if dtype == torch.float32:
        return _without_tensor_cores(width)
    pairs = [pair for pair in FORWARD_TILES if (pair[0] + 2 * pair[1]) * width * dtype.itemsize <= shared]
    return _tiles(pairs or FORWARD_TILES[-1:], heads, width, widest=512, num_stages=2)


def backward_tiles(heads: int, width: int, dtype: torch.dtype, shared: int) -> Tiles:
    """The first of BACKWARD_TILES that fits: q and grad_out stay in shared memory beside one tile of keys."""
    if dtype == torch.float32:
        return _without_tensor_cores(width)
    pairs = [pair for pair in BACKWARD_TILES if (2 * pair[0] + pair[1]) * width * dtype.itemsize <= shared]
    return _tiles(pairs or BACKWARD_TILES[-1:], heads, width, widest=64, num_stages=1)


def _tiles(pairs: Sequence[tuple[int, int]], heads: int, width: int, *, widest: int, num_stages: int) -> Tiles:
    needed = max(16, triton.next_power_of_2(heads))
    block, keys = next((pair for pair in pairs if pair[0] <= needed), pairs[-1])
    return Tiles(block, keys, _chunk(width, widest), 8 if block * width > 8192 else 4, num_stages)


def _without_tensor_cores(width: int) -> Tiles:
    """fp32 products hold whole operands in registers: small tiles only."""
    return Tiles(16, 16, _chunk(width, 64), 8 if width > 512 else 4, 1)


def _chunk(width: int, widest: int) -> int:
    """The largest power of two that `width` holds, between 16 and `widest`."""
    return min(widest, max(16, 1 << (width.bit_length() - 1)))


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may use."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES)


def _geometry(q: Tensor, index: Tensor, value_dim: int, tiles: Tiles) -> dict[str, int]:
    _, heads, width = q.shape
    rest = width % tiles.chunk
    return {
        "H": heads,
        "C": width,
        "V": value_dim,
        "K": index.shape[1],
        "HEADS": tiles.heads,
        "KEYS": tiles.keys,
        "CHUNK": tiles.chunk,
        "REST": max(16, triton.next_power_of_2(rest)) if rest else 0,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _meet(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    common = torch.promote_types(q.dtype, kv.dtype)
    if common == torch.float64:
        raise BackendUnavailable(f"triton computes in fp32, but q is {q.dtype} and kv {kv.dtype}; use the reference")
    return q.to(common).contiguous(), kv.to(common).contiguous()


def _contiguous(sink: Tensor | None) -> Tensor | None:
    return None if sink is None else sink.contiguous()


def _invert(index: Tensor, length: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The slots that the kernel writes, sorted by key and then by slot, and where each key's begin."""
    past = torch.arange(index.shape[1], device=index.device) >= length[:, None]
    ordered, slot = torch.where(past | (index < 0), keys, index).flatten().sort(stable=True)
    bounds = torch.arange(keys + 1, device=index.device, dtype=ordered.dtype)
    return slot, torch.searchsorted(ordered, bounds)
