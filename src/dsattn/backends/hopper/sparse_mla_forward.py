"""Forward of sparse absorbed MLA on Hopper: a task is a query row and 64 heads, a tile 64 keys.

As many blocks of threads as there are processors take one task after another. Four groups of four warps share 230 KB
of shared memory: q of the task, two tiles of keys, P. The next task's keys and q arrive while this one ends.

    gather   copies q of the task and the key rows of each tile
    scores   S = q k^T and its online softmax: P, how much the sums so far shrink, and at last the factor of the row
    left     out of the first 256 channels
    right    out of the other 256

Asked for what the indexer's loss needs, `scores` also leaves P and the tops that it is relative to; once a row's lse is
known, `sparse_mla_shares` sums them over heads.
Letters: T query rows, S keys, H heads, C = 512 or 576 latent width, V = 512 value width, K kept keys.
"""

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

# Barriers: the task's q, P with its factors, and each of the two tiles is there, or has been read by all.
Q_FULL = gl.constexpr(0)
Q_FREE = gl.constexpr(1)
P_FULL = gl.constexpr(2)
P_FREE = gl.constexpr(3)
K_FULL = gl.constexpr(4)
K_FREE = gl.constexpr(6)

# Registers a thread of `right`, `scores` and `gather`; `left` gets what 512 leave.
REGISTERS = gl.constexpr([168, 120, 40])


@gluon.jit
def _count(length, task, slots, BLOCKS: gl.constexpr):
    """Keys of the task's row."""
    return gl.minimum(gl.load(length + task // BLOCKS), slots)


@gluon.jit
def _gather(
    q, kv, index, length, tasks, slots, q_shared, q_rope, k_shared, k_rope, bars, H: gl.constexpr, C: gl.constexpr
):
    """q [64, C] of each task, and rows of kv [S, C] tile after tile; empty slots become zeros and read nothing."""
    BLOCKS: gl.constexpr = (H + HEADS - 1) // HEADS
    LAYOUT: gl.constexpr = copies()
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    channel = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)
    task = gl.program_id(0)
    count = _count(length, task, slots, BLOCKS)
    key = load_index(index + (task // BLOCKS).to(gl.int64) * slots, 0, count, ROWS)
    tile = 0
    phase = 1
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        # Past the last task the last is looked at again, to no effect.
        next_task = gl.minimum(task + gl.num_programs(0), tasks - 1)
        next_count = _count(length, next_task, slots, BLOCKS)
        row = (task // BLOCKS).to(gl.int64) * slots
        next_row = (next_task // BLOCKS).to(gl.int64) * slots
        block = task % BLOCKS * HEADS
        source = q + ((task // BLOCKS).to(gl.int64) * H + block) * C
        mbarrier.wait(bars.index(Q_FREE), phase)
        phase ^= 1
        copy_heads(q_shared.index(0), source, H - block, 0, V, C)
        if C > V:
            copy_heads(q_rope.index(0), source, H - block, V, C - V, C)
        async_copy.mbarrier_arrive(bars.index(Q_FULL), increment_count=False)
        if count == 0:
            key = load_index(index + next_row, 0, next_count, ROWS)
        for first in range(0, count, KEYS):
            rows = kv + (gl.expand_dims(key.to(gl.int64) * C, 1) + channel)
            live = gl.expand_dims(key >= 0, 1)
            more = first + KEYS < count
            ahead = gl.where(more, row + first + KEYS, next_row)
            key = load_index(index + ahead, 0, gl.where(more, count - first - KEYS, next_count), ROWS)
            stage = tile & 1
            mbarrier.wait(bars.index(K_FREE + stage), (tile >> 1 & 1) ^ 1)
            k = k_shared.index(stage)
            for j in gl.static_range(V // 64):
                async_copy.async_copy_global_to_shared(k.slice(j * 64, 64, dim=1), rows + j * 64, mask=live)
            if C > V:
                async_copy.async_copy_global_to_shared(k_rope.index(stage), rows + V, mask=live)
            async_copy.mbarrier_arrive(bars.index(K_FULL + stage), increment_count=False)
            tile += 1
        count = next_count
    async_copy.wait_group(0)


@gluon.jit
def _scores(
    index,
    length,
    sink,
    lse,
    p_left,
    top_left,
    scale,
    zero,
    tasks,
    slots,
    q_shared,
    q_rope,
    k_shared,
    k_rope,
    p_shared,
    shrink_shared,
    factor_shared,
    bars,
    H: gl.constexpr,
    C: gl.constexpr,
    SINK: gl.constexpr,
    LEAVES: gl.constexpr,
):
    """P of each tile relative to the row's top so far, and lse."""
    BLOCKS: gl.constexpr = (H + HEADS - 1) // HEADS
    TILE: gl.constexpr = accumulator(KEYS)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, TILE)
    if LEAVES:
        OUT: gl.constexpr = leaving(8)
        p_head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUT)), 1)
        place = p_head * KEYS + gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, OUT)), 0)
        tiles = (slots + KEYS - 1) // KEYS
    scale2 = scale * LOG2_E
    s = gl.zeros([HEADS, KEYS], gl.float32, TILE)
    tile = 0
    phase = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        count = _count(length, task, slots, BLOCKS)
        row = (task // BLOCKS).to(gl.int64)
        head = task % BLOCKS * HEADS + gl.arange(0, HEADS, layout=ROW)
        real = head < H
        top = gl.full([HEADS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([HEADS], gl.float32, ROW)
        row_lse = gl.full([HEADS], float("-inf"), gl.float32, ROW)
        if SINK:
            sink_logit = gl.load(sink + head, mask=real, other=0.0).to(gl.float32)
        mbarrier.wait(bars.index(Q_FULL), phase)
        phase ^= 1
        for first in range(0, count, KEYS):
            hidden = first * zero
            stage = tile & 1
            live = load_index(index + row * slots, first, count, COLUMN) >= 0
            mbarrier.wait(bars.index(K_FULL + stage), tile >> 1 & 1)
            fence_async_shared()
            k = k_shared.index(stage).permute((1, 0))
            s = warpgroup_mma(q_shared.index(hidden), k, s, use_acc=False, is_async=True)
            if C > V:
                s = warpgroup_mma(q_rope.index(hidden), k_rope.index(stage).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            last = first + KEYS >= count
            if last:
                barrier()
                mbarrier.arrive(bars.index(Q_FREE), count=1)
            logits = gl.where(gl.expand_dims(live, 0), s, float("-inf"))
            new_top = gl.maximum(top, gl.max(logits, 1) * scale2)
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = gl.exp2(top - shift)
            p = gl.exp2(logits * scale2 - gl.expand_dims(shift, 1))
            top = new_top
            mbarrier.wait(bars.index(P_FREE), tile & 1 ^ 1)
            p_shared.index(hidden).store(p.to(gl.bfloat16))
            shrink_shared.store(shrink)
            if last:
                # `total` is NaN where a logit is: such rows stay NaN.
                total = total * shrink + gl.sum(p, 1)
                row_lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * LN_2)
                factor = gl.where(total == 0.0, 0.0, 1.0 / total)
                if SINK:
                    factor = gl.where(total == 0.0, 0.0, factor / (1.0 + gl.exp(sink_logit - row_lse)))
                factor_shared.store(factor)
            fence_async_shared()
            barrier()
            mbarrier.arrive(bars.index(P_FULL), count=1)
            if LEAVES:
                at = task.to(gl.int64) * tiles + first // KEYS
                ordered = p.to(gl.bfloat16).reshape(HEADS, 2, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(HEADS, KEYS)
                gl.store(p_left + (at * (HEADS * KEYS) + place), gl.convert_layout(ordered, OUT))
                gl.store(top_left + (at * HEADS + gl.arange(0, HEADS, layout=ROW)), shift)
            if not last:  # the other groups are at work already
                total = total * shrink + gl.sum(p, 1)
            tile += 1
        if count == 0:
            barrier()
            mbarrier.arrive(bars.index(Q_FREE), count=1)
        gl.store(lse + row * H + head, row_lse, mask=real)


@gluon.jit
def _outputs(
    length,
    out,
    zero,
    tasks,
    slots,
    k_shared,
    p_shared,
    shrink_shared,
    factor_shared,
    bars,
    H: gl.constexpr,
    FIRST: gl.constexpr,
):
    """out of 256 channels from FIRST on, in two halves: with 16 warps no product of 256 columns finds its registers."""
    BLOCKS: gl.constexpr = (H + HEADS - 1) // HEADS
    WIDE: gl.constexpr = accumulator(128)
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    head = gl.expand_dims(gl.arange(0, HEADS, layout=ROW), 1)
    channel = gl.expand_dims(FIRST + gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE)), 0)
    tile = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        count = _count(length, task, slots, BLOCKS)
        near = gl.zeros([HEADS, 128], gl.float32, WIDE)
        far = gl.zeros([HEADS, 128], gl.float32, WIDE)
        factor = gl.zeros([HEADS], gl.float32, ROW)
        for first in range(0, count, KEYS):
            stage = tile & 1
            hidden = first * zero
            mbarrier.wait(bars.index(P_FULL), tile & 1)
            fence_async_shared()
            shrink = gl.expand_dims(shrink_shared.load(ROW), 1)
            near = near * shrink
            far = far * shrink
            p, k = p_shared.index(hidden), k_shared.index(stage)
            near = warpgroup_mma(p, k.slice(FIRST, 128, dim=1), near, is_async=True)
            far = warpgroup_mma(p, k.slice(FIRST + 128, 128, dim=1), far, is_async=True)
            factor = factor_shared.load(ROW)  # of use after the last tile
            near, far = warpgroup_mma_wait(0, [near, far])
            barrier()
            mbarrier.arrive(bars.index(K_FREE + stage), count=1)
            mbarrier.arrive(bars.index(P_FREE), count=1)
            tile += 1
        factor = gl.expand_dims(factor, 1)
        block = task % BLOCKS * HEADS
        pointers = out + ((task // BLOCKS).to(gl.int64) * H + block) * V + (head * V + channel)
        gl.store(pointers, (near * factor).to(gl.bfloat16), mask=head < H - block)
        gl.store(pointers + 128, (far * factor).to(gl.bfloat16), mask=head < H - block)


@gluon.jit(
    do_not_specialize=["zero", "tasks", "slots"],
    do_not_specialize_on_alignment=["index", "length", "sink", "lse"],
)
def forward_kernel(
    q,
    kv,
    index,
    length,
    sink,
    out,
    lse,
    p_left,
    top_left,
    scale,
    zero,
    tasks,
    slots,
    H: gl.constexpr,
    C: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Any number of blocks of threads, which share the `tasks` = T * blocks of 64 heads.

    q: [T, H, C], kv: [S, C], out: [T, H, V], bf16. index: [T, slots] int32, length: [T] int32, sink: [H] or None,
    lse: [T, H] fp32. scale: above 0. zero: 0, which the compiler must not know.
    p_left, top_left: None, or [tasks, tiles, 64 heads, 64 keys] bf16 and [tasks, tiles, 64 heads] fp32, which get
    exp2(scale' q . k - top) and top of every tile with keys; scale' is to the base 2, keys are in register order.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, V], SHARED)
    k_shared = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, V], SHARED)
    if C > V:
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, C - V], SHARED)
        k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, C - V], SHARED)
    else:
        q_rope = q_shared
        k_rope = k_shared
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, KEYS], SHARED)
    shrink_shared = gl.allocate_shared_memory(gl.float32, [HEADS], VECTOR)
    factor_shared = gl.allocate_shared_memory(gl.float32, [HEADS], VECTOR)
    bars = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(Q_FULL), count=128)
    mbarrier.init(bars.index(Q_FREE), count=1)
    mbarrier.init(bars.index(P_FULL), count=1)
    mbarrier.init(bars.index(P_FREE), count=2)
    for stage in gl.static_range(2):
        mbarrier.init(bars.index(K_FULL + stage), count=128)
        mbarrier.init(bars.index(K_FREE + stage), count=2)
    fence_async_shared()
    barrier()
    SINK: gl.constexpr = sink is not None
    if not SINK:
        sink = lse
    LEAVES: gl.constexpr = p_left is not None
    if not LEAVES:
        p_left = lse
        top_left = lse
    # fmt: off
    gl.warp_specialize(
        [
            (_outputs, (
                length, out, zero, tasks, slots, k_shared, p_shared, shrink_shared, factor_shared, bars, H, 0,
            )),
            (_outputs, (
                length, out, zero, tasks, slots, k_shared, p_shared, shrink_shared, factor_shared, bars, H, 256,
            )),
            (_scores, (
                index, length, sink, lse, p_left, top_left, scale, zero, tasks, slots,
                q_shared, q_rope, k_shared, k_rope, p_shared, shrink_shared, factor_shared, bars, H, C, SINK, LEAVES,
            )),
            (_gather, (q, kv, index, length, tasks, slots, q_shared, q_rope, k_shared, k_rope, bars, H, C)),
        ],
        [4, 4, 4],
        REGISTERS,
    )
    # fmt: on
