"""Backward of sparse absorbed MLA on Hopper: one block of threads a query row and 64 heads, tiles of 64 keys.

Three groups of four warps share 230 KB of shared memory: q and grad_out of the row, one tile of keys, P and dS.

    gather   copies the tile's key rows in two halves of 256 channels, each as soon as its last reader is done
    queries  S = q k^T, dP = grad_out v^T, P and dS to shared memory, dq of the first 256 channels
    keys     before the first tile, delta = out . grad_out of each head; dq of the other channels; then
             dk = P^T grad_out + dS^T q, 64 channels at a time, and its way out

Gradients of keys leave in one of two ways: fp32 additions to [S, C], in any order, or contributions in bf16 or fp32,
each written to the line that `triton.invert` assigned to it. Four fp32 or eight bf16 channels that are neighbours
in a thread's registers become neighbours in memory, so that they leave in 16 bytes: both buffers are in *register
order*, see there.

What the compiler needs, or it waits after every matrix product or spills: accumulators are carried through the loop and
overwritten by `use_acc=False`; shared memory is indexed by a zero that it cannot see through; pointers are one tile of
64 channels and constants beyond it.
Letters: T query rows, S keys, H heads, C = 512 or 576 latent width, V = 512 value width, K kept keys.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsattn.backends.hopper.sparse_mla_tiles import (
    HEADS,
    KEYS,
    LN_2,
    LOG2_E,
    V,
    accumulator,
    barrier,
    copies,
    copy_heads,
    leaving,
    load_index,
)

HALF = gl.constexpr(256)

# Barriers: a half of the keys has arrived or been read by all; P and dS are there or have been read; q and grad_out
# have arrived; delta is there.
LEFT_FULL = gl.constexpr(0)
RIGHT_FULL = gl.constexpr(1)
LEFT_FREE = gl.constexpr(2)
RIGHT_FREE = gl.constexpr(3)
READY = gl.constexpr(4)
DONE = gl.constexpr(5)
ROW_FULL = gl.constexpr(6)
DELTA_FULL = gl.constexpr(7)

# Registers a thread of `keys` and `gather`; `queries` gets what 504 leave.
REGISTERS = gl.constexpr([256, 24])


@gluon.jit
def store_heads(x, target, heads, FIRST: gl.constexpr, C: gl.constexpr):
    """Write x [64, W] fp32 as bf16 to the channels from FIRST on of `heads` heads at `target` [H, C]."""
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, x.type.layout)), 1)
    channel = FIRST + gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout)), 0)
    gl.store(target + head * C + channel, x.to(gl.bfloat16), mask=head < heads)


@gluon.jit
def _denominator(lse, sink, head, heads, SINK: gl.constexpr):
    """log2 of the softmax's denominator, the sink included; 0 without keys, infinity for heads that do not exist."""
    real = head < heads
    log = gl.load(lse + head, mask=real, other=float("inf"))
    if SINK:
        logit = gl.load(sink + head, mask=real, other=0.0).to(gl.float32)
        high = gl.maximum(log, logit, propagate_nan=tl.PropagateNan.ALL)
        low = gl.minimum(log, logit, propagate_nan=tl.PropagateNan.ALL)
        # Two equal infinities differ by NaN.
        log = gl.where(high == low, high + LN_2, high + gl.log(1.0 + gl.exp(low - high)))
    return gl.where(log == float("-inf"), 0.0, log * LOG2_E)


@gluon.jit
def _delta(out, grad, heads):
    """out . grad_out of 64 heads, from out [H, V] in memory and grad [64, V] in shared memory."""
    LAYOUT: gl.constexpr = copies()
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    channel = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, LAYOUT))
    for j in gl.static_range(V // 64):
        o = gl.load(out + head * V + (channel + j * 64), mask=head < heads, other=0.0).to(gl.float32)
        g = grad.slice(j * 64, 64, dim=1).load(LAYOUT).to(gl.float32)
        # A row without keys has out 0, and anything may arrive there.
        total += gl.sum(gl.where(o == 0.0, 0.0, o * g), 1)
    return total


@gluon.jit
def _gather(kv, index, count, k_left, k_right, k_rope, bars, C: gl.constexpr):
    """Rows of kv [S, C] to shared memory, tile after tile; empty slots become rows of zeros and read nothing."""
    LAYOUT: gl.constexpr = copies()
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    channel = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)
    left, right = k_left.index(0), k_right.index(0)
    key = load_index(index, 0, count, ROWS)
    for first in range(0, count, KEYS):
        rows = kv + (gl.expand_dims(key.to(gl.int64) * C, 1) + channel)
        live = gl.expand_dims(key >= 0, 1)
        key = load_index(index, first + KEYS, count, ROWS)
        phase = (first // KEYS & 1) ^ 1
        mbarrier.wait(bars.index(LEFT_FREE), phase)
        for j in gl.static_range(4):
            async_copy.async_copy_global_to_shared(left.slice(j * 64, 64, dim=1), rows + j * 64, mask=live)
        if C > V:
            async_copy.async_copy_global_to_shared(k_rope.index(0), rows + V, mask=live)
        async_copy.mbarrier_arrive(bars.index(LEFT_FULL), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE), phase)
        for j in gl.static_range(4):
            async_copy.async_copy_global_to_shared(right.slice(j * 64, 64, dim=1), rows + (HALF + j * 64), mask=live)
        async_copy.mbarrier_arrive(bars.index(RIGHT_FULL), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _queries(
    lse,
    sink,
    dq,
    scale,
    zero,
    heads,
    count,
    q_shared,
    q_rope,
    grad_shared,
    k_left,
    k_right,
    k_rope,
    p_shared,
    ds_shared,
    delta_shared,
    bars,
    C: gl.constexpr,
    SINK: gl.constexpr,
):
    """P and dS of each tile, and dq of the first 256 channels."""
    TILE: gl.constexpr = accumulator(KEYS)
    WIDE: gl.constexpr = accumulator(HALF)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    log = gl.expand_dims(_denominator(lse, sink, gl.arange(0, HEADS, layout=ROW), heads, SINK), 1)
    scale2 = scale * LOG2_E
    dq_left = gl.zeros([HEADS, HALF], gl.float32, WIDE)
    s = gl.zeros([HEADS, KEYS], gl.float32, TILE)
    dp = gl.zeros([HEADS, KEYS], gl.float32, TILE)
    mbarrier.wait(bars.index(ROW_FULL), 0)
    for first in range(0, count, KEYS):
        phase = first // KEYS & 1
        hidden = first * zero
        q, grad = q_shared.index(hidden), grad_shared.index(hidden)
        left, right = k_left.index(hidden), k_right.index(hidden)
        mbarrier.wait(bars.index(LEFT_FULL), phase)
        mbarrier.wait(bars.index(RIGHT_FULL), phase)
        fence_async_shared()
        s = warpgroup_mma(q.slice(0, HALF, dim=1), left.permute((1, 0)), s, use_acc=False, is_async=True)
        if C > V:
            s = warpgroup_mma(q_rope.index(hidden), k_rope.index(hidden).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q.slice(HALF, HALF, dim=1), right.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(grad.slice(0, HALF, dim=1), left.permute((1, 0)), dp, use_acc=False, is_async=True)
        dp = warpgroup_mma(grad.slice(HALF, HALF, dim=1), right.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(2, [s])
        # An empty slot has a key of zeros, and what it gives dk is dropped: P need only stay finite there, which the
        # bound sees to. No real exponent is above 0, but for rounding.
        p = gl.exp2(gl.minimum(s * scale2 - log, 1.0, propagate_nan=tl.PropagateNan.ALL))
        mbarrier.wait(bars.index(DONE), phase ^ 1)
        p_shared.index(hidden).store(p.to(gl.bfloat16))
        mbarrier.wait(bars.index(DELTA_FULL), 0)
        delta = gl.expand_dims(delta_shared.load(ROW), 1)
        dp = warpgroup_mma_wait(0, [dp])
        ds = (p * (dp - delta) * scale).to(gl.bfloat16)
        ds_shared.index(hidden).store(ds)
        fence_async_shared()
        barrier()
        mbarrier.arrive(bars.index(READY), count=1)
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, WIDE, 2))
        dq_left = warpgroup_mma(ds, left, dq_left, is_async=True)
        dq_left = warpgroup_mma_wait(0, [dq_left])
        barrier()
        mbarrier.arrive(bars.index(LEFT_FREE), count=1)
    store_heads(dq_left, dq, heads, 0, C)


@gluon.jit
def _keys(
    line,
    dq,
    dk,
    out,
    zero,
    heads,
    count,
    q_shared,
    q_rope,
    grad_shared,
    k_right,
    k_rope,
    p_shared,
    ds_shared,
    delta_shared,
    bars,
    C: gl.constexpr,
    STRIDE: gl.constexpr,
    ATOMIC: gl.constexpr,
):
    """delta; dq of the channels from 256 on; dk of each tile, 64 channels at a time.

    dk goes to the lines [K] of dk, STRIDE apart.
    """
    CHUNK: gl.constexpr = accumulator(64)
    WIDE: gl.constexpr = accumulator(HALF)
    TRANSPOSED: gl.constexpr = gl.DotOperandLayout(0, CHUNK, 2)
    OUT: gl.constexpr = leaving(128 // dk.dtype.element_ty.primitive_bitwidth)
    channel = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, OUT)), 0)
    mbarrier.wait(bars.index(ROW_FULL), 0)
    delta_shared.store(_delta(out, grad_shared.index(0), heads))
    barrier()
    mbarrier.arrive(bars.index(DELTA_FULL), count=1)
    dq_right = gl.zeros([HEADS, HALF], gl.float32, WIDE)
    add = gl.zeros([KEYS, 64], gl.float32, CHUNK)
    if C > V:
        dq_rope = gl.zeros([HEADS, 64], gl.float32, CHUNK)
    fence_async_shared()
    for first in range(0, count, KEYS):
        hidden = first * zero
        q, grad = q_shared.index(hidden), grad_shared.index(hidden)
        ds = ds_shared.index(hidden)
        target = load_index(line, first, count, gl.SliceLayout(1, OUT))
        pointers = dk + (gl.expand_dims(target.to(gl.int64) * STRIDE, 1) + channel)
        live = gl.expand_dims(target >= 0, 1)
        mbarrier.wait(bars.index(READY), first // KEYS & 1)
        dq_right = warpgroup_mma(ds, k_right.index(hidden), dq_right, is_async=True)
        if C > V:
            dq_rope = warpgroup_mma(ds, k_rope.index(hidden), dq_rope, is_async=True)
        ds_t = ds.permute((1, 0)).load(TRANSPOSED)
        p_t = p_shared.index(hidden).permute((1, 0)).load(TRANSPOSED)
        if C > V:
            dq_right, dq_rope = warpgroup_mma_wait(0, [dq_right, dq_rope])
        else:
            dq_right = warpgroup_mma_wait(0, [dq_right])
        barrier()
        mbarrier.arrive(bars.index(RIGHT_FREE), count=1)
        if C > V:
            mbarrier.arrive(bars.index(LEFT_FREE), count=1)
        mbarrier.arrive(bars.index(DONE), count=1)
        for j in gl.static_range(V // 64):
            add = warpgroup_mma(p_t, grad.slice(j * 64, 64, dim=1), add, use_acc=False, is_async=True)
            add = warpgroup_mma(ds_t, q.slice(j * 64, 64, dim=1), add, is_async=True)
            add = warpgroup_mma_wait(0, [add])
            _leave(add, pointers + j * 64, live, ATOMIC)
        if C > V:
            add = warpgroup_mma(ds_t, q_rope.index(hidden), add, use_acc=False, is_async=True)
            add = warpgroup_mma_wait(0, [add])
            _leave(add, pointers + V, live, ATOMIC)
    store_heads(dq_right, dq, heads, HALF, C)
    if C > V:
        store_heads(dq_rope, dq, heads, V, C)


@gluon.jit
def _leave(add, pointers, live, ATOMIC: gl.constexpr):
    """Send 64 channels of 64 keys on their way, in register order."""
    if pointers.dtype.element_ty == gl.float32:
        ordered = add.reshape(KEYS, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(KEYS, 64)
    else:
        ordered = add.to(gl.bfloat16).reshape(KEYS, 2, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(KEYS, 64)
    ordered = gl.convert_layout(ordered, pointers.type.layout)
    if ATOMIC:
        gl.atomic_add(pointers, ordered, mask=live, sem="relaxed")
    else:
        gl.store(pointers, ordered, mask=live, cache_modifier=".cs")  # read once, and not soon


@gluon.jit(
    do_not_specialize=["first_row", "zero", "slots"],
    do_not_specialize_on_alignment=["index", "length", "line", "lse", "sink"],
)
def backward_kernel(
    grad_out,
    q,
    kv,
    index,
    length,
    line,
    out,
    lse,
    sink,
    dq,
    dk,
    scale,
    first_row,
    zero,
    slots,
    H: gl.constexpr,
    C: gl.constexpr,
    ATOMIC: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One block of threads a row from first_row on and 64 heads.

    grad_out, out: [T, H, V], q, dq: [T, H, C], kv: [S, C], all bf16. index: [T, slots] int32, length: [T] int32,
    lse: [T, H] fp32, sink: [H] or None. zero: 0, which the compiler must not know.
    ATOMIC: dk is [S, C] fp32 to add to, line is index. Otherwise line is [rows of this launch, slots] int32, -1 in
    empty slots, and dk [lines, blocks of heads, C] bf16 or fp32 to write.
    """
    BLOCKS: gl.constexpr = (H + HEADS - 1) // HEADS
    block = gl.program_id(0) % BLOCKS
    run_row = gl.program_id(0) // BLOCKS
    row = (first_row + run_row).to(gl.int64)
    row_head = row * H + block * HEADS
    heads = H - block * HEADS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, V], SHARED)
    grad_shared = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, V], SHARED)
    k_left = gl.allocate_shared_memory(gl.bfloat16, [1, KEYS, HALF], SHARED)
    k_right = gl.allocate_shared_memory(gl.bfloat16, [1, KEYS, HALF], SHARED)
    if C > V:
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, C - V], SHARED)
        k_rope = gl.allocate_shared_memory(gl.bfloat16, [1, KEYS, C - V], SHARED)
    else:
        q_rope = q_shared
        k_rope = k_left
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, KEYS], SHARED)
    ds_shared = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, KEYS], SHARED)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    delta_shared = gl.allocate_shared_memory(gl.float32, [HEADS], VECTOR)
    SINK: gl.constexpr = sink is not None
    bars = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(LEFT_FULL), count=128)
    mbarrier.init(bars.index(RIGHT_FULL), count=128)
    mbarrier.init(bars.index(LEFT_FREE), count=2 if C > V else 1)
    mbarrier.init(bars.index(RIGHT_FREE), count=1)
    mbarrier.init(bars.index(READY), count=1)
    mbarrier.init(bars.index(DONE), count=1)
    mbarrier.init(bars.index(ROW_FULL), count=128)
    mbarrier.init(bars.index(DELTA_FULL), count=1)
    fence_async_shared()
    barrier()
    # On its way while the first keys are.
    copy_heads(q_shared.index(0), q + row_head * C, heads, 0, V, C)
    if C > V:
        copy_heads(q_rope.index(0), q + row_head * C, heads, V, C - V, C)
    copy_heads(grad_shared.index(0), grad_out + row_head * V, heads, 0, V, V)
    async_copy.mbarrier_arrive(bars.index(ROW_FULL), increment_count=False)
    count = gl.minimum(gl.load(length + row), slots)
    index += row * slots
    STRIDE: gl.constexpr = C if ATOMIC else C * BLOCKS
    if ATOMIC:
        line = index
    else:
        line += run_row.to(gl.int64) * slots
        dk += block * C
    if SINK:
        sink += block * HEADS
    else:
        sink = lse
    out += row_head * V
    lse += row_head
    dq += row_head * C
    # fmt: off
    gl.warp_specialize(
        [
            (_queries, (
                lse, sink, dq, scale, zero, heads, count,
                q_shared, q_rope, grad_shared, k_left, k_right, k_rope, p_shared, ds_shared, delta_shared, bars,
                C, SINK,
            )),
            (_keys, (
                line, dq, dk, out, zero, heads, count,
                q_shared, q_rope, grad_shared, k_right, k_rope, p_shared, ds_shared, delta_shared, bars,
                C, STRIDE, ATOMIC,
            )),
            (_gather, (kv, index, count, k_left, k_right, k_rope, bars, C)),
        ],
        [4, 4],
        REGISTERS,
    )
    # fmt: on
