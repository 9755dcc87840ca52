"""Forward of sparse absorbed MLA on Hopper: a task is a query row and 64 heads, a tile 64 keys.

As many blocks of threads as there are processors take one task after another. Three groups of four warps share 230 KB
of shared memory: q of the task, two tiles of keys, P, and what the groups tell each other. The next task's keys and q
arrive while this one ends.

    gather       copies q of the task and the key rows of each tile
    even, odd    S = q k^T and the online softmax of every other tile of a row; out of all its tiles, 256 channels each

A group multiplies its own P from its registers, and the other group's from shared memory. One P there is enough: the
only reader of a tile's P is the next to write one.

    even    S(0) P(0) out(0) ............ out(1) | S(2) P(2) out(2) ...
    odd     S(1) ......... out(0) P(1) out(1) .. | S(3) ......... out(2) P(3) ...

Tops go from tile to tile in this order, and a row starts with `even`: no bit depends on who comes first. Sums over even
and odd tiles meet when the row ends.
Asked for what the indexer's loss needs, both groups also leave P and the tops that it is relative to; once a row's lse
is known, `dsa_attention` sums them over heads.
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

HALF = gl.constexpr(256)

# Barriers: the task's q is there, or has been read; P of `even` and of `odd` is there; that of `even` has been read;
# both sums of a row are there; each half of the two tiles of keys is there, or has been read: by S, and for out by the
# group whose channels they are.
Q_FULL = gl.constexpr(0)
Q_FREE = gl.constexpr(1)
P_FULL = gl.constexpr(2)
P_FREE = gl.constexpr(4)
TOTAL = gl.constexpr(5)
K_FULL = gl.constexpr(6)
K_FREE = gl.constexpr(10)
BARRIERS = gl.constexpr(14)

# What a group tells the other, [64] each: the top after its tile, how much that shrinks the sums so far, and its sums
# of a task and of the next.
TOP = gl.constexpr(0)
SHRINK = gl.constexpr(1)
SUMS = gl.constexpr(2)

# Registers a thread of `odd` and `gather`; `even` gets what 504 leave.
REGISTERS = gl.constexpr([232, 40])


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
            free = (tile >> 1 & 1) ^ 1
            k = k_shared.index(stage)
            for half in gl.static_range(2):
                mbarrier.wait(bars.index(K_FREE + 2 * stage + half), free)
                if half == 0 and C > V:
                    async_copy.async_copy_global_to_shared(k_rope.index(stage), rows + V, mask=live)
                for j in gl.static_range(4):
                    part = k.slice(half * HALF + j * 64, 64, dim=1)
                    async_copy.async_copy_global_to_shared(part, rows + (half * HALF + j * 64), mask=live)
                async_copy.mbarrier_arrive(bars.index(K_FULL + 2 * stage + half), increment_count=False)
            tile += 1
        count = next_count
    async_copy.wait_group(0)


@gluon.jit
def _attend(
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
    q_shared,
    q_rope,
    k_shared,
    k_rope,
    p_shared,
    my_vectors,
    other_vectors,
    bars,
    H: gl.constexpr,
    C: gl.constexpr,
    SINK: gl.constexpr,
    LEAVES: gl.constexpr,
    ODD: gl.constexpr,
):
    """S and P of a row's tiles ODD, ODD + 2, ..., and out of the 256 channels from ODD * 256 on, of all tiles.

    my_vectors, other_vectors: [4, 64] fp32, see TOP.
    """
    BLOCKS: gl.constexpr = (H + HEADS - 1) // HEADS
    TILE: gl.constexpr = accumulator(KEYS)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, TILE)
    WIDE: gl.constexpr = accumulator(HALF)
    WIDE_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    FIRST: gl.constexpr = ODD * HALF
    tiles = (slots + KEYS - 1) // KEYS
    scale2 = scale * LOG2_E
    s = gl.zeros([HEADS, KEYS], gl.float32, TILE)
    tile = 0  # of all tasks
    mine = 0  # tiles of this group
    others = 0  # tiles of the other
    parity = 0  # of the task's number
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        count = _count(length, task, slots, BLOCKS)
        row = (task // BLOCKS).to(gl.int64)
        top = gl.full([HEADS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([HEADS], gl.float32, ROW)
        acc = gl.zeros([HEADS, HALF], gl.float32, WIDE)
        mbarrier.wait(bars.index(Q_FULL), parity)
        for first in range(ODD * KEYS, count, 2 * KEYS):
            hidden = first * zero
            stage = (tile + ODD) & 1
            phase = (tile + ODD) >> 1 & 1
            k = k_shared.index(stage + hidden)
            s = _logits(s, q_shared, q_rope, k_shared, k_rope, bars, stage, phase, hidden, C)
            live = load_index(index + (row * slots + first), 0, count - first, COLUMN) >= 0
            s = warpgroup_mma_wait(0, [s])
            if ODD:
                # The tile before, of the other group: its out while the softmax of this one goes on.
                before = (stage ^ 1) + hidden
                mbarrier.wait(bars.index(P_FULL), others & 1)
                fence_async_shared()
                top = other_vectors.index(TOP).load(ROW)
                shrink = other_vectors.index(SHRINK).load(ROW)
                total = total * shrink
                acc = acc * gl.expand_dims(gl.convert_layout(shrink, WIDE_ROW), 1)
                acc = warpgroup_mma(
                    p_shared.index(hidden), k_shared.index(before).slice(FIRST, HALF, dim=1), acc, is_async=True
                )
                others += 1
            if first + 2 * KEYS >= count:
                barrier()
                mbarrier.arrive(bars.index(Q_FREE), count=1)
            logits = gl.where(gl.expand_dims(live, 0), s, float("-inf"))
            new_top = gl.maximum(top, gl.max(logits, 1) * scale2)
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = gl.exp2(top - shift)
            p = gl.exp2(logits * scale2 - gl.expand_dims(shift, 1))
            top = new_top
            p16 = p.to(gl.bfloat16)
            if ODD:
                acc = warpgroup_mma_wait(0, [acc])
                barrier()
                mbarrier.arrive(bars.index(K_FREE + 2 * (stage ^ 1) + 1), count=1)
                mbarrier.arrive(bars.index(P_FREE), count=1)
            else:
                mbarrier.wait(bars.index(P_FREE), (mine & 1) ^ 1)
            p_shared.index(hidden).store(p16)
            my_vectors.index(TOP).store(top)
            my_vectors.index(SHRINK).store(shrink)
            fence_async_shared()
            barrier()
            mbarrier.arrive(bars.index(P_FULL + ODD), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, WIDE_ROW), 1)
            own = gl.convert_layout(p16, gl.DotOperandLayout(0, WIDE, 2))
            acc = warpgroup_mma(own, k.slice(FIRST, HALF, dim=1), acc, is_async=True)
            total = total * shrink + gl.sum(p, 1)
            if LEAVES:
                _leave(p16, shift, p_left, top_left, task.to(gl.int64) * tiles + first // KEYS)
            acc = warpgroup_mma_wait(0, [acc])
            barrier()
            mbarrier.arrive(bars.index(K_FREE + 2 * stage + ODD), count=1)
            mine += 1
            if not ODD and first + KEYS < count:
                stage = (stage ^ 1) + hidden
                acc, top, total = _other(
                    acc, total, k_shared, p_shared, other_vectors, bars, hidden, stage, others, FIRST, ODD, TILE, WIDE
                )
                others += 1
            tile += 2
        used = (count + KEYS - 1) // KEYS
        if ODD:
            if used & 1 == 1:
                stage = tile & 1
                hidden = count * zero
                acc, top, total = _other(
                    acc, total, k_shared, p_shared, other_vectors, bars, hidden, stage, others, FIRST, ODD, TILE, WIDE
                )
                others += 1
            if count <= KEYS:
                mbarrier.arrive(bars.index(Q_FREE), count=1)
            tile += used & 1
        else:
            if count == 0:
                mbarrier.arrive(bars.index(Q_FREE), count=1)
            tile -= used & 1
        # Both groups' sums, in the same order.
        sums = SUMS + parity
        my_vectors.index(sums).store(total)
        barrier()
        mbarrier.arrive(bars.index(TOTAL), count=1)
        mbarrier.wait(bars.index(TOTAL), parity)
        total = total + other_vectors.index(sums).load(ROW)
        parity ^= 1
        _finish(acc, top, total, sink, out, lse, row, task % BLOCKS * HEADS, H, SINK, ODD, TILE, WIDE)


@gluon.jit
def _logits(s, q_shared, q_rope, k_shared, k_rope, bars, stage, phase, hidden, C: gl.constexpr):
    """S of the tile in `stage`, each half of its channels as soon as the keys have it."""
    q, k = q_shared.index(hidden), k_shared.index(stage + hidden)
    mbarrier.wait(bars.index(K_FULL + 2 * stage), phase)
    fence_async_shared()
    s = warpgroup_mma(q.slice(0, HALF, dim=1), k.slice(0, HALF, dim=1).permute((1, 0)), s, use_acc=False, is_async=True)
    if C > V:
        s = warpgroup_mma(q_rope.index(hidden), k_rope.index(stage + hidden).permute((1, 0)), s, is_async=True)
    mbarrier.wait(bars.index(K_FULL + 2 * stage + 1), phase)
    fence_async_shared()
    return warpgroup_mma(q.slice(HALF, HALF, dim=1), k.slice(HALF, HALF, dim=1).permute((1, 0)), s, is_async=True)


@gluon.jit
def _leave(p, top, p_left, top_left, at):
    """Write P [64, 64] of tile `at` in register order, and the tops [64] that it is relative to."""
    OUT: gl.constexpr = leaving(8)
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUT)), 1)
    place = head * KEYS + gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, OUT)), 0)
    ordered = p.reshape(HEADS, 2, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(HEADS, KEYS)
    gl.store(p_left + (at * (HEADS * KEYS) + place), gl.convert_layout(ordered, OUT))
    gl.store(top_left + (at * HEADS + gl.arange(0, HEADS, layout=top.type.layout)), top)


@gluon.jit
def _finish(
    acc,
    top,
    total,
    sink,
    out,
    lse,
    row,
    block,
    H: gl.constexpr,
    SINK: gl.constexpr,
    ODD: gl.constexpr,
    TILE: gl.constexpr,
    WIDE: gl.constexpr,
):
    """out [64, 256] of the row's heads from `block` on, over the softmax's denominator; `even` also writes lse."""
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    FIRST: gl.constexpr = ODD * HALF
    head = block + gl.arange(0, HEADS, layout=gl.SliceLayout(1, TILE))
    real = head < H
    # NaN where a logit is: such rows stay NaN.
    row_lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * LN_2)
    factor = gl.where(total == 0.0, 0.0, 1.0 / total)
    if SINK:
        sink_logit = gl.load(sink + head, mask=real, other=0.0).to(gl.float32)
        factor = gl.where(total == 0.0, 0.0, factor / (1.0 + gl.exp(sink_logit - row_lse)))
    if not ODD:
        gl.store(lse + row * H + head, row_lse, mask=real)
    acc = acc * gl.expand_dims(gl.convert_layout(factor, ROW), 1)
    wide_head = gl.expand_dims(gl.arange(0, HEADS, layout=ROW), 1)
    channel = gl.expand_dims(FIRST + gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE)), 0)
    pointers = out + (row * H + block) * V + (wide_head * V + channel)
    gl.store(pointers, acc.to(gl.bfloat16), mask=wide_head < H - block)


@gluon.jit
def _other(
    acc,
    total,
    k_shared,
    p_shared,
    other_vectors,
    bars,
    hidden,
    stage,
    others,
    FIRST: gl.constexpr,
    ODD: gl.constexpr,
    TILE: gl.constexpr,
    WIDE: gl.constexpr,
):
    """(out, top, sum) with a tile of the other group, whose keys are in `stage`."""
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    mbarrier.wait(bars.index(P_FULL + (1 - ODD)), others & 1)
    fence_async_shared()
    top = other_vectors.index(TOP).load(ROW)
    shrink = other_vectors.index(SHRINK).load(ROW)
    total = total * shrink
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, WIDE)), 1)
    acc = warpgroup_mma(p_shared.index(hidden), k_shared.index(stage).slice(FIRST, HALF, dim=1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    barrier()
    mbarrier.arrive(bars.index(K_FREE + 2 * stage + ODD), count=1)
    if ODD:
        mbarrier.arrive(bars.index(P_FREE), count=1)
    return acc, top, total


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
    even_vectors = gl.allocate_shared_memory(gl.float32, [4, HEADS], VECTOR)
    odd_vectors = gl.allocate_shared_memory(gl.float32, [4, HEADS], VECTOR)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(Q_FULL), count=128)
    mbarrier.init(bars.index(Q_FREE), count=2)
    mbarrier.init(bars.index(P_FULL), count=1)
    mbarrier.init(bars.index(P_FULL + 1), count=1)
    mbarrier.init(bars.index(P_FREE), count=1)
    mbarrier.init(bars.index(TOTAL), count=2)
    for part in gl.static_range(4):
        mbarrier.init(bars.index(K_FULL + part), count=128)
        mbarrier.init(bars.index(K_FREE + part), count=1)
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
            (_attend, (
                index, length, sink, out, lse, p_left, top_left, scale, zero, tasks, slots, q_shared, q_rope,
                k_shared, k_rope, p_shared, even_vectors, odd_vectors, bars, H, C, SINK, LEAVES, 0,
            )),
            (_attend, (
                index, length, sink, out, lse, p_left, top_left, scale, zero, tasks, slots, q_shared, q_rope,
                k_shared, k_rope, p_shared, odd_vectors, even_vectors, bars, H, C, SINK, LEAVES, 1,
            )),
            (_gather, (q, kv, index, length, tasks, slots, q_shared, q_rope, k_shared, k_rope, bars, H, C)),
        ],
        [4, 4],
        REGISTERS,
    )
    # fmt: on
