"""Sparse absorbed MLA in Triton.

Forward: one program a query row and block of heads; it gathers the row's keys tile by tile.
Backward: one program a query row and tile of keys computes what each slot gives to dkv and keeps ds; from ds a second
kernel sums dq, gathering like the forward. Only dkv is summed across programs, see `sparse_mla_backward`.

Everything that a kernel is compiled for comes from the model's geometry; token counts are its grid alone.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import Call, contribution_dtype, scratch_bytes, unmet
from dsattn.backends.triton.chunks import LN_2, LOG2_E, cut, meet, shared_bytes
from dsattn.backends.triton.invert import Held, slots_of_run
from dsattn.backends.triton.launch import launch, needs_of
from dsattn.selection import Inverse

# Up to this many keys dkv stays in the L2 cache, where adding to it beats writing contributions and summing them.
ATOMIC_KEYS = 8192

Cut = tuple[int, int, int]
# (heads a program, keys a step, stages), best first.
FORWARD_TILES = ((64, 64, 2), (64, 32, 3), (64, 32, 2), (32, 64, 2), (32, 32, 2), (16, 64, 2), (16, 32, 2), (16, 16, 2))
QUERY_TILES = ((64, 64, 2), (64, 32, 2), (32, 64, 2), (32, 32, 2), (16, 64, 2), (16, 32, 2), (16, 16, 2))
# (keys a program, stages), best first.
KEY_TILES = ((128, 3), (128, 2), (64, 3), (64, 2), (32, 2), (16, 2))


class Tiles(NamedTuple):
    """How one launch is cut. heads, keys: of one product; chunk: its channels; registers: at most, of a thread."""

    heads: int
    keys: int
    chunk: int
    num_warps: int
    num_stages: int
    registers: int | None = None


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here, forward or backward."""
    return unmet(needs_of(call) | {"a latent width of at most 1024": call.width <= 1024})


@triton.jit
def _load(base, rows, live, first, WIDTH: tl.constexpr, TOTAL: tl.constexpr, CUT: tl.constexpr):
    """[R, WIDTH] channels from `first` on of rows TOTAL apart; 0 where not `live` and, with CUT, past TOTAL."""
    channel = first + tl.arange(0, WIDTH)
    mask = live[:, None]
    if CUT:
        mask = mask & (channel < TOTAL)[None, :]
    return tl.load(base + rows[:, None] * TOTAL + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _load_chunks(base, rows, live, TOTAL: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr):
    """The first TOTAL channels of rows, as a tuple cut where C channels are cut."""
    parts = ()
    for i in tl.static_range(C // CHUNK):
        if i * CHUNK < TOTAL:
            parts = parts + (_load(base, rows, live, i * CHUNK, CHUNK, TOTAL, (i + 1) * CHUNK > TOTAL),)
    first: tl.constexpr = C // CHUNK * CHUNK
    if REST > 0 and first < TOTAL:
        parts = parts + (_load(base, rows, live, first, REST, TOTAL, first + REST > TOTAL),)
    return parts


@triton.jit
def _zeros(ROWS: tl.constexpr, TOTAL: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr):
    """[ROWS, TOTAL] fp32 zeros, cut like `_load_chunks`."""
    parts = ()
    for i in tl.static_range(C // CHUNK):
        if i * CHUNK < TOTAL:
            parts = parts + (tl.zeros([ROWS, CHUNK], tl.float32),)
    if REST > 0 and C // CHUNK * CHUNK < TOTAL:
        parts = parts + (tl.zeros([ROWS, REST], tl.float32),)
    return parts


@triton.jit
def _scaled(parts, factor):
    scaled = ()
    for i in tl.static_range(len(parts)):
        scaled = scaled + (parts[i] * factor[:, None],)
    return scaled


@triton.jit
def _accumulated(sums, a, parts):
    """sums + a @ parts."""
    grown = ()
    for i in tl.static_range(len(sums)):
        grown = grown + (tl.dot(a, parts[i], acc=sums[i], input_precision="ieee"),)
    return grown


@triton.jit
def _store_chunks(base, rows, live, parts, TOTAL: tl.constexpr, CHUNK: tl.constexpr):
    for i in tl.static_range(len(parts)):
        channel = i * CHUNK + tl.arange(0, parts[i].shape[1])
        pointers = base + rows[:, None] * TOTAL + channel[None, :]
        tl.store(pointers, parts[i].to(base.dtype.element_ty), mask=live[:, None] & (channel < TOTAL)[None, :])


@triton.jit
def _load_index(index, row, first, count, K: tl.constexpr, KEYS: tl.constexpr):
    """KEYS slots of the row from `first` on; -1 from `count` on."""
    slot = first + tl.arange(0, KEYS)
    return tl.load(index + row.to(tl.int64) * K + slot, mask=slot < count, other=-1)


@triton.jit
def _transposed(parts):
    turned = ()
    for i in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[i]),)
    return turned


@triton.jit
def _scaled_products(a, b, factor):
    """factor * sum_c a_c @ b_c: [heads, keys] fp32. Each product is scaled alone, so that none feeds another."""
    total = tl.dot(a[0], b[0], input_precision="ieee") * factor
    for i in tl.static_range(1, len(a)):
        total += tl.dot(a[i], b[i], input_precision="ieee") * factor
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
    STAGES: tl.constexpr,
):
    """Two conditions in the loop always hold; they decide how Triton arranges it.

    What consumes a loaded tile stands in one `if`: then the loads of the next tile are started before it, not after.
    S and the softmax stand in another: a product that feeds a later one in the same block gets all its warps along the
    heads, where 64 heads keep only half of them busy; across a block Triton does not look.
    """
    row = tl.program_id(0) // tl.cdiv(H, HEADS)
    head = tl.program_id(0) % tl.cdiv(H, HEADS) * HEADS + tl.arange(0, HEADS)
    real = head < H
    row_head = row.to(tl.int64) * H + head
    q_parts = _load_chunks(q, row_head, real, C, C, CHUNK, REST)
    count = tl.minimum(tl.load(length + row), K)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = _zeros(HEADS, V, C, CHUNK, REST)
    p = tl.zeros([HEADS, KEYS], kv.dtype.element_ty)
    shrink = tl.full([HEADS], 1.0, tl.float32)
    upcoming = _load_index(index, row, 0, count, K, KEYS)
    for first in tl.range(0, count, KEYS, num_stages=STAGES):
        key = upcoming
        upcoming = _load_index(index, row, first + KEYS, count, K, KEYS)  # a step ahead: its latency is hidden
        kv_parts = _load_chunks(kv, key.to(tl.int64), key >= 0, C, C, CHUNK, REST)
        transposed = _transposed(kv_parts)
        if first < count:
            if first >= 0:
                logits = _scaled_products(q_parts, transposed, scale * LOG2_E)
                live = _load_index(index, row, first, count, K, KEYS) >= 0  # again: `key` is laid out for the loads
                logits = tl.where(live[None, :], logits, float("-inf"))
                new_top = tl.maximum(top, tl.max(logits, 1))
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                weights = tl.exp2(logits - shift[:, None])
                shrink = tl.exp2(top - shift)
                total = total * shrink + tl.sum(weights, 1)
                top = new_top
                p = weights.to(kv.dtype.element_ty)
            sums = _accumulated(_scaled(sums, shrink), p, kv_parts)
    # `total` is NaN where a logit is: such rows stay NaN.
    row_lse = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN_2)
    factor = tl.where(total == 0, 0.0, 1.0 / total)
    if sink is not None:
        sink_logit = tl.load(sink + head, mask=real, other=0.0).to(tl.float32)
        factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp(sink_logit - row_lse)))
    _store_chunks(out, row_head, real, _scaled(sums, factor), V, CHUNK)
    tl.store(lse + row_head, row_lse, mask=real)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sink", "lse"])
def _terms_kernel(
    grad_out,
    out,
    sink,
    lse,
    delta,
    denominator,
    count,
    H: tl.constexpr,
    V: tl.constexpr,
    LINES: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
):
    """What the backward needs of LINES of the `count` rows and heads.

    delta: out . grad_out; 0 where out is 0, whatever arrives there. denominator: log2 of all of it, the sink's part
    included; 0 where there is nothing to divide.
    """
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    real = line < count
    out_parts = _load_chunks(out, line, real, V, V, CHUNK, REST)
    grad_parts = _load_chunks(grad_out, line, real, V, V, CHUNK, REST)
    dots = tl.zeros([LINES], tl.float32)
    for i in tl.static_range(len(out_parts)):
        o = out_parts[i].to(tl.float32)
        dots += tl.sum(tl.where(o == 0, 0.0, o * grad_parts[i].to(tl.float32)), 1)
    log = tl.load(lse + line, mask=real, other=0.0)
    if sink is not None:
        sink_logit = tl.load(sink + line % H, mask=real, other=0.0).to(tl.float32)
        high = tl.maximum(log, sink_logit)
        low = tl.minimum(log, sink_logit)
        # Two equal infinities differ by NaN.
        log = tl.where(high == low, high + LN_2, high + tl.log(1.0 + tl.exp(low - high)))
    tl.store(delta + line, dots, mask=real)
    tl.store(denominator + line, tl.where(log == float("-inf"), 0.0, log * LOG2_E), mask=real)


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["length"])
def _backward_keys_kernel(
    grad_out,
    q,
    kv,
    index,
    length,
    delta,
    denominator,
    ds,
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
    ATOMIC: tl.constexpr,
):
    """One tile of keys of one row. Keys are the rows of every product: what S and dP give is, as it lies in registers,
    the left operand of the products that follow.

    ds: [rows, blocks of heads, K, HEADS] to write. dkv: [S, C] fp32 to add to, or with ATOMIC off, contributions
    [rows, blocks of heads, K, C] to write. Slots of tiles that hold no key are left as they are.
    """
    line = tl.program_id(0) // tl.cdiv(K, KEYS)
    first = tl.program_id(0) % tl.cdiv(K, KEYS) * KEYS
    row = first_row + line // tl.cdiv(H, HEADS)
    count = tl.minimum(tl.load(length + row), K)
    if first >= count:
        return
    slot = first + tl.arange(0, KEYS)
    key = tl.load(index + row.to(tl.int64) * K + slot, mask=slot < count, other=-1).to(tl.int64)
    live = key >= 0
    head = line % tl.cdiv(H, HEADS) * HEADS + tl.arange(0, HEADS)
    real = head < H
    row_head = row.to(tl.int64) * H + head
    CUT: tl.constexpr = C % CHUNK != 0
    GRAD_CUT: tl.constexpr = V % CHUNK != 0 or V < C
    logits = tl.zeros([KEYS, HEADS], tl.float32)
    dp = tl.zeros([KEYS, HEADS], tl.float32)
    for channel in range(0, C, CHUNK):
        kv_part = _load(kv, key, live, channel, CHUNK, C, CUT)
        q_part = _load(q, row_head, real, channel, CHUNK, C, CUT)
        grad_part = _load(grad_out, row_head, real, channel, CHUNK, V, GRAD_CUT)
        logits = tl.dot(kv_part, tl.trans(q_part), acc=logits, input_precision="ieee")
        dp = tl.dot(kv_part, tl.trans(grad_part), acc=dp, input_precision="ieee")
    log = tl.load(denominator + row_head, mask=real, other=0.0)
    p = tl.exp2(logits * (scale * LOG2_E) - log[None, :])
    p = tl.where(live[:, None], p, 0.0)
    dots = tl.load(delta + row_head, mask=real, other=0.0)
    d = (p * ((dp - dots[None, :]) * scale)).to(kv.dtype.element_ty)
    p = p.to(kv.dtype.element_ty)
    place = line.to(tl.int64) * K + slot
    tl.store(ds + place[:, None] * HEADS + tl.arange(0, HEADS)[None, :], d, mask=(slot < K)[:, None])
    if ATOMIC:
        place = key
    for channel in range(0, C, CHUNK):
        q_part = _load(q, row_head, real, channel, CHUNK, C, CUT)
        grad_part = _load(grad_out, row_head, real, channel, CHUNK, V, GRAD_CUT)
        add = tl.dot(d, q_part, input_precision="ieee")
        add = tl.dot(p, grad_part, acc=add, input_precision="ieee")
        columns = channel + tl.arange(0, CHUNK)
        mask = live[:, None]
        if CUT:
            mask = mask & (columns < C)[None, :]
        pointers = dkv + place[:, None] * C + columns[None, :]
        if ATOMIC:
            tl.atomic_add(pointers, add, mask=mask, sem="relaxed")
        else:
            tl.store(pointers, add.to(dkv.dtype.element_ty), mask=mask, cache_modifier=".cs")  # kv stays in the L2


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["length"])
def _backward_queries_kernel(
    ds,
    kv,
    index,
    length,
    dq,
    first_row,
    H: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq of one row and block of HEADS heads, which divides the SPAN heads of a block of `_backward_keys_kernel`.

    The condition in the loop always holds, see `_forward_kernel`.
    """
    run_row = tl.program_id(0) // tl.cdiv(H, HEADS)
    row = first_row + run_row
    first_head = tl.program_id(0) % tl.cdiv(H, HEADS) * HEADS
    line = run_row.to(tl.int64) * tl.cdiv(H, SPAN) + first_head // SPAN
    column = first_head % SPAN + tl.arange(0, HEADS)
    count = tl.minimum(tl.load(length + row), K)
    sums = _zeros(HEADS, C, C, CHUNK, REST)
    upcoming = _load_index(index, row, 0, count, K, KEYS)
    for first in tl.range(0, count, KEYS, num_stages=STAGES):
        key = upcoming
        upcoming = _load_index(index, row, first + KEYS, count, K, KEYS)
        slot = first + tl.arange(0, KEYS)
        kv_parts = _load_chunks(kv, key.to(tl.int64), key >= 0, C, C, CHUNK, REST)
        pointers = ds + (line * K + slot)[:, None] * SPAN + column[None, :]
        d = tl.trans(tl.load(pointers, mask=(slot < count)[:, None], other=0.0))
        if first < count:
            sums = _accumulated(sums, d, kv_parts)
    head = first_head + tl.arange(0, HEADS)
    _store_chunks(dq, row.to(tl.int64) * H + head, head < H, sums, C, CHUNK)


@triton.jit
def _added(sums, parts):
    """sums + parts; one row of sums takes all rows of parts."""
    grown = ()
    for i in tl.static_range(len(sums)):
        part = parts[i].to(tl.float32)
        if sums[i].shape[0] < part.shape[0]:
            part = tl.sum(part, 0, keep_dims=True)
        grown = grown + (sums[i] + part,)
    return grown


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=["first", "stop"])
def _sum_kernel(
    contributions,
    slot,
    first,
    stop,
    base,
    dkv,
    C: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
):
    """Add to one key's dkv what its slots of a run of rows contributed, in an order that only the slots decide.

    contributions: [rows, BLOCKS, K, C]; slot, first, stop, base: which of the run's [rows, K] slots hold each key, see
    `Held`. SLOTS sums run side by side and meet at the end.
    """
    key = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + key)
    end = tl.load(stop + key)
    if begin < end:
        sums = _zeros(SLOTS, C, C, CHUNK, REST)
        lane = tl.arange(0, SLOTS)
        upcoming = tl.load(slot + begin + lane, mask=begin + lane < end, other=0)
        for at in range(begin, end, SLOTS):
            where = (upcoming - base).to(tl.int64)
            upcoming = tl.load(slot + at + SLOTS + lane, mask=at + SLOTS + lane < end, other=0)
            for block in tl.static_range(BLOCKS):
                line = (where // K * BLOCKS + block) * K + where % K
                parts = _load_chunks(contributions, line, at + lane < end, C, C, CHUNK, REST)
                sums = _added(sums, parts)
        one = key + tl.arange(0, 1)
        _store_chunks(dkv, one, one >= 0, _added(_load_chunks(dkv, one, one >= 0, C, C, CHUNK, REST), sums), C, CHUNK)


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
    q, kv = meet(q=q, kv=kv)
    sink = None if sink is None else sink.contiguous()
    tiles = forward_tiles(heads, width, q.dtype, shared_bytes(q.device))
    shape = {"H": heads, "C": width, "V": value_dim, "K": index.shape[1], "STAGES": tiles.num_stages}
    shape |= {"REST": cut(width, tiles.chunk)[1]} | _options(tiles)
    operands = (q, kv, index.contiguous(), length.contiguous(), sink, out, lse, scale)
    with torch.cuda.device_of(q):
        launch(_forward_kernel, (rows * triton.cdiv(heads, tiles.heads),), *operands, **shape)
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
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, dkv): probabilities come back from lse, dkv is summed in fp32.

    Run of rows after run of rows, each within the scratch. What a slot contributes to dkv is written, in the
    operands' dtype or as `settings` ask, and summed by key in an order that the slots decide: the same bits every time.
    Up to ATOMIC_KEYS keys it is added by atomics instead, in any order, unless `deterministic`.
    inverse: of index and length; where it is None, each run's is made. A row's keys are distinct.
    """
    rows, heads, width = q.shape
    slots, keys = index.shape[1], kv.shape[0]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    if 0 in (rows, heads, keys, slots):
        return dq.zero_(), dkv.to(kv.dtype)
    kv_dtype = kv.dtype
    q, kv = meet(q=q, kv=kv)
    grad_out, index, length = grad_out.to(q.dtype).contiguous(), index.contiguous(), length.contiguous()
    atomic = not deterministic and keys <= ATOMIC_KEYS
    shared = shared_bytes(q.device)
    key_tiles = backward_key_tiles(heads, width, q.dtype, shared)
    query_tiles = backward_query_tiles(heads, width, q.dtype, shared)
    blocks = triton.cdiv(heads, key_tiles.heads)
    dtype = contribution_dtype(q.dtype)
    line_bytes = slots * (key_tiles.heads * q.element_size() + (0 if atomic else width * dtype.itemsize))
    runs = triton.cdiv(rows, max(1, scratch_bytes() // (blocks * line_bytes)))
    run = triton.cdiv(rows, runs)
    ds = q.new_empty(run, blocks, slots, key_tiles.heads)
    contributions = dkv if atomic else q.new_empty(run, blocks, slots, width, dtype=dtype)
    shape = {"H": heads, "C": width, "K": slots}
    with torch.cuda.device_of(q):
        terms = _terms(grad_out, out.to(q.dtype).contiguous(), sink, lse.contiguous())
        for first in range(0, rows, run):
            count = min(run, rows - first)
            launch(
                _backward_keys_kernel,
                (count * blocks * triton.cdiv(slots, key_tiles.keys),),
                *(grad_out, q, kv, index, length, *terms, ds, contributions, scale, first),
                **shape | {"V": out.shape[-1], "ATOMIC": atomic} | _options(key_tiles),
            )
            launch(
                _backward_queries_kernel,
                (count * triton.cdiv(heads, query_tiles.heads),),
                *(ds, kv, index, length, dq, first),
                **shape | {"SPAN": key_tiles.heads, "REST": cut(width, query_tiles.chunk)[1]} | _options(query_tiles),
                STAGES=query_tiles.num_stages,
            )
            if not atomic:
                _add_by_key(contributions, slots_of_run(inverse, index, length, first, count, keys), dkv)
    return dq, dkv.to(kv_dtype)


def _terms(grad_out: Tensor, out: Tensor, sink: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(delta, denominator) [T, H] fp32, see `_terms_kernel`."""
    rows, heads, value_dim = out.shape
    delta, denominator = torch.empty_like(lse), torch.empty_like(lse)
    (chunk, rest), lines = cut(value_dim, 512), 16
    shape = {"H": heads, "V": value_dim, "LINES": lines, "CHUNK": chunk, "REST": rest}
    operands = (grad_out, out, None if sink is None else sink.contiguous(), lse, delta, denominator, rows * heads)
    launch(_terms_kernel, (triton.cdiv(rows * heads, lines),), *operands, **shape)
    return delta, denominator


def _add_by_key(contributions: Tensor, held: Held, dkv: Tensor) -> None:
    """Add contributions [rows, blocks, K, C] to dkv [S, C], key by key."""
    _, blocks, slots, width = contributions.shape
    chunk, rest = cut(width, 512)
    shape = {"C": width, "K": slots, "BLOCKS": blocks, "CHUNK": chunk, "REST": rest}
    launch(_sum_kernel, (dkv.shape[0],), contributions, *held, dkv, **shape, SLOTS=4, num_warps=2)


def forward_tiles(heads: int, width: int, dtype: torch.dtype, shared: int) -> Tiles:
    """The first of FORWARD_TILES that fits: q stays in shared memory beside the tiles of keys and one of weights."""
    return _first_fitting(FORWARD_TILES, width, lambda h, k, s: (h + s * k) * width + h * k, heads, dtype, shared)


def backward_query_tiles(heads: int, width: int, dtype: torch.dtype, shared: int) -> Tiles:
    """The first of QUERY_TILES that fits: tiles of keys and of ds, no more."""
    return _first_fitting(QUERY_TILES, width, lambda h, k, s: s * k * (width + h), heads, dtype, shared)


def _first_fitting(
    tiles: tuple[Cut, ...], width: int, needed: Callable[..., int], heads: int, dtype: torch.dtype, shared: int
) -> Tiles:
    """needed: elements that (heads, keys, stages) take in shared memory. The last of `tiles` where none fits."""
    if dtype == torch.float32:  # such products hold whole operands in registers: small tiles only
        return Tiles(16, 16, cut(width, 64)[0], 8 if width > 512 else 4, 1)
    # Without Hopper's instructions the sums of 64 heads do not fit the registers; nor has such a GPU its shared memory.
    most = _head_rows(heads if shared > 200_000 else min(heads, 32))
    fitting = [cut for cut in tiles if cut[0] <= most and needed(*cut) * dtype.itemsize <= shared]
    block, keys, stages = fitting[0] if fitting else tiles[-1]
    return Tiles(block, keys, cut(width, 512)[0], 8 if block * width > 8192 else 4, stages)


def backward_key_tiles(heads: int, width: int, dtype: torch.dtype, shared: int) -> Tiles:
    """The first of KEY_TILES that fits: a chunk of the keys, q and grad_out a stage. Up to 128 heads are one block."""
    if dtype == torch.float32:
        return Tiles(16, 32, cut(width, 32)[0], 4, 1)
    chunk = cut(width, 64)[0]
    block = min(128, _head_rows(heads))
    fitting = [pair for pair in KEY_TILES if pair[1] * (pair[0] + 2 * block) * chunk * dtype.itemsize <= shared]
    keys, stages = fitting[0] if fitting else KEY_TILES[-1]
    # Two programs of 8 warps share an SM if a thread keeps to 128 registers, which 64 heads just allow.
    return Tiles(block, keys, chunk, max(4, keys // 16), stages, 128 if block <= 64 else None)


def _head_rows(heads: int) -> int:
    return max(16, triton.next_power_of_2(heads))


def _options(tiles: Tiles) -> dict[str, int]:
    """Constants and launch options that `tiles` stands for."""
    options = {"HEADS": tiles.heads, "KEYS": tiles.keys, "CHUNK": tiles.chunk}
    options |= {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return options if tiles.registers is None else options | {"maxnreg": tiles.registers}
