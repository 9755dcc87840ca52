"""Indexer scores on Hopper: a program is a chunk of keys and as many query rows as fill 256 columns with their heads.

Three groups of four warps share q of the rows and a ring of key tiles:

    copies        q once, then tiles of 64 keys
    even, odd     every other tile: its product with half of the columns at a time, relu, weights, the sum over heads

A group always has a product in flight while it sums another: the tensor cores wait for nobody's sums, whatever the two
groups' pace. Heads are the low bits of a tile's columns and every row is summed by the same tree of explicit
multiply-adds: a score's bits come from its row and key alone. Operands are bf16, or E4M3 with a scale for every key,
which multiplies the finished score; a query's scale is in its weights.
Letters: T query rows, S keys, H indexer heads, D indexer width, R rows of half the columns.
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

from dsattn.backends.hopper.sparse_mla_tiles import KEYS, barrier

COLUMNS = gl.constexpr(256)
HALF = gl.constexpr(128)
STAGES = gl.constexpr(8)
BAND = gl.constexpr(16)  # row tiles that read the same keys at about the same time
GROUPS = gl.constexpr(2)  # that multiply

# Barriers: q is there; each tile of the ring is there, or has been read.
Q_FULL = gl.constexpr(0)
FULL = gl.constexpr(1)
FREE = gl.constexpr(9)
BARRIERS = gl.constexpr(17)

# Registers a thread of `odd` and `copies`; `even` gets what 504 leave.
REGISTERS = gl.constexpr([240, 24])


def _exchange(lane):
    """Two lanes whose numbers differ by `lane` add what each has of two numbers: one gets the first sum, one the other.

    Both add the same two numbers, so either gets the same bits.
    """
    return f"""{{
        .reg .pred second;
        .reg .b32 place, gives, keeps, got;
        mov.u32 place, %laneid;
        and.b32 place, place, {lane};
        setp.ne.u32 second, place, 0;
        selp.b32 gives, $1, $2, second;
        selp.b32 keeps, $2, $1, second;
        shfl.sync.bfly.b32 got, gives, {lane}, 0x1f, 0xffffffff;
        add.rn.f32 $0, keeps, got;
    }}"""


EXCHANGE_1 = gl.constexpr(_exchange(1))
EXCHANGE_2 = gl.constexpr(_exchange(2))


@gluon.constexpr_function
def products(size):
    """Layout of [64, HALF] products of elements of `size` bytes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32 // size])


@gluon.constexpr_function
def leaving(rows):
    """Layout of [64, rows] scores: a warp has 16 neighbouring keys of two rows."""
    registers = [[0, 2**bit] for bit in range(1, rows.bit_length() - 1)]
    lanes = [[8, 0], [0, 1], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, rows])


@gluon.constexpr_function
def copies(width, size):
    """Layout of [64, width] tiles of elements of `size` bytes that are copied 16 bytes a thread."""
    row = width * size // 16
    return gl.BlockedLayout([1, 16 // size], [32 // row, row], [4, 1], [1, 0])


@gluon.jit
def _hull(start, stop, rows, keys, first, first_row, ROWS: gl.constexpr):
    """(least key, one past the last) that any of the tile's rows may read; (keys, 0) where none reads."""
    begin, end = keys, 0
    for r in gl.static_range(ROWS):
        real = first_row + r < rows
        low = gl.maximum(gl.load(start + first + first_row + r, mask=real, other=0), 0)
        high = gl.minimum(gl.load(stop + first + first_row + r, mask=real, other=0), keys)
        begin = gl.where(low < high, gl.minimum(begin, low), begin)
        end = gl.where(low < high, gl.maximum(end, high), end)
    return begin, end


@gluon.jit
def _copies(
    q,
    k,
    first,
    rows,
    keys,
    first_row,
    begin,
    end,
    q_row,
    q_head,
    k_row,
    q_shared,
    k_shared,
    bars,
    H: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
):
    """q [COLUMNS, D] and tiles of k [S, D]; what does not exist becomes zeros and is not read.

    Each group finds a tile behind its last, which it starts to multiply and leaves.
    """
    WIDTH: gl.constexpr = min(D, 128 // SIZE)
    LAYOUT: gl.constexpr = copies(WIDTH, SIZE)
    line = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
    if begin < end:
        for c in gl.static_range(COLUMNS // KEYS):
            column = c * KEYS + line
            row, head = first_row + column // HEADS, column % HEADS
            place = (first + row).to(gl.int64) * q_row + head * q_head
            real = gl.expand_dims((row < rows) & (head < H), 1)
            half = q_shared.index(c * KEYS // HALF).slice(c * KEYS % HALF, KEYS, dim=0)
            for j in gl.static_range(D // WIDTH):
                pointers = q + (gl.expand_dims(place, 1) + (channel + j * WIDTH))
                async_copy.async_copy_global_to_shared(half.slice(j * WIDTH, WIDTH, dim=1), pointers, mask=real)
        async_copy.mbarrier_arrive(bars.index(Q_FULL), increment_count=False)
        for n in range(begin, end + GROUPS):
            stage = (n - begin) % STAGES
            key = n * KEYS + line
            pointers = k + (gl.expand_dims(key.to(gl.int64) * k_row, 1) + channel)
            real = gl.expand_dims(key < keys, 1)
            mbarrier.wait(bars.index(FREE + stage), ((n - begin) // STAGES & 1) ^ 1)
            for j in gl.static_range(D // WIDTH):
                part = k_shared.index(stage).slice(j * WIDTH, WIDTH, dim=1)
                async_copy.async_copy_global_to_shared(part, pointers + j * WIDTH, mask=real)
            async_copy.mbarrier_arrive(bars.index(FULL + stage), increment_count=False)
        async_copy.wait_group(0)


@gluon.jit
def _weighed(part, weight, total, COUNT: gl.constexpr, FIRST: gl.constexpr):
    """total + the sum over the last axis of part * weight, in this order; without total where FIRST.

    [64, R, 4, COUNT], of which a thread has the last axis: nothing moves.
    """
    if COUNT == 1:
        total = part * weight if FIRST else gl.fma(part, weight, total)
    else:
        R: gl.constexpr = part.shape[1]
        if COUNT > 2:
            part = part.reshape(KEYS, R, 4, 2, COUNT // 2).permute(0, 1, 2, 4, 3)
            weight = weight.reshape(KEYS, R, 4, 2, COUNT // 2).permute(0, 1, 2, 4, 3)
        part_0, part_1 = gl.split(part)
        weight_0, weight_1 = gl.split(weight)
        total = _weighed(part_0, weight_0, total, COUNT // 2, FIRST)
        total = _weighed(part_1, weight_1, total, COUNT // 2, False)
    return total


@gluon.jit
def _by_lane(x, R: gl.constexpr, HEADS: gl.constexpr):
    """[64, R, 4, HEADS / 4] of [64, R * HEADS]: the last axis but one is in lanes, the last in registers."""
    return x.reshape(KEYS, R, HEADS // 8, 4, 2).permute(0, 1, 3, 2, 4).reshape(KEYS, R, 4, HEADS // 4)


@gluon.jit
def _sums(dot, weight, live, H: gl.constexpr, HEADS: gl.constexpr, RELU: gl.constexpr):
    """Scores [64, R], in the layout `leaving`, of products [64, R * HEADS]."""
    R: gl.constexpr = HALF // HEADS
    part = dot
    if RELU:
        part = gl.maximum(part, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if H < HEADS:  # 0 * inf, of a padded head and an infinite key, must not be met
        part = gl.where(gl.expand_dims(live, 0), part, 0.0)
    weights = gl.expand_dims(weight, 0).broadcast_to(KEYS, HALF)
    total = _weighed(_by_lane(part, R, HEADS), _by_lane(weights, R, HEADS), 0.0, HEADS // 4, True)
    # Four lanes have a part of every sum each. They add in pairs, and share out keys, then rows.
    low, high = gl.split(total.reshape(4, 2, 8, R, 4).permute(0, 2, 3, 4, 1))
    total = gl.inline_asm_elementwise(EXCHANGE_1, "=r,r,r", [low, high], gl.float32, is_pure=False, pack=1)
    even, odd = gl.split(total.reshape(4, 8, R // 2, 2, 4).permute(0, 1, 2, 4, 3))
    total = gl.inline_asm_elementwise(EXCHANGE_2, "=r,r,r", [even, odd], gl.float32, is_pure=False, pack=1)
    total = total.reshape(4, 8, R // 2, 2, 2).permute(0, 4, 1, 2, 3).reshape(KEYS, R)
    return gl.convert_layout(total, leaving(R), assert_trivial=True)


@gluon.jit
def _arrived(bars, number):
    """Wait for a tile of the ring, the `number`-th of this program."""
    mbarrier.wait(bars.index(FULL + number % STAGES), number // STAGES & 1)
    fence_async_shared()


@gluon.jit
def _multiplied(k_shared, q_shared, stage, half, dot):
    """Start k q^T of a tile and half of the columns, in the registers of `dot`."""
    q = q_shared.index(half).permute((1, 0))
    return warpgroup_mma(k_shared.index(stage), q, dot, use_acc=False, is_async=True)


@gluon.jit
def _weights(w, first, first_row, rows, w_row, w_head, H: gl.constexpr, HEADS: gl.constexpr, TILE: gl.constexpr):
    """(weights fp32 of half the columns, from row `first_row` on, and which of them are heads)."""
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, TILE))
    head, row = column % HEADS, first_row + column // HEADS
    place = w + (first + row).to(gl.int64) * w_row + head * w_head
    return gl.load(place, mask=(row < rows) & (head < H), other=0.0).to(gl.float32), head < H


@gluon.jit
def _scores(
    w,
    key_scale,
    scores,
    first,
    rows,
    keys,
    first_row,
    begin,
    end,
    scores_stride,
    w_row,
    w_head,
    zero,
    q_shared,
    k_shared,
    bars,
    H: gl.constexpr,
    HEADS: gl.constexpr,
    RELU: gl.constexpr,
    KEY_SCALE: gl.constexpr,
    SIZE: gl.constexpr,
    ODD: gl.constexpr,
):
    """Every other tile of keys against all columns."""
    R: gl.constexpr = HALF // HEADS
    TILE: gl.constexpr = products(SIZE)
    OUT: gl.constexpr = leaving(R)
    weight_0, live = _weights(w, first, first_row, rows, w_row, w_head, H, HEADS, TILE)
    weight_1, _ = _weights(w, first, first_row + R, rows, w_row, w_head, H, HEADS, TILE)
    row = gl.expand_dims(first_row + gl.arange(0, R, layout=gl.SliceLayout(0, OUT)), 0)
    line = gl.arange(0, KEYS, layout=gl.SliceLayout(1, OUT))
    place = scores + (row.to(gl.int64) * scores_stride * KEYS + gl.expand_dims(line, 1))
    below = scores_stride.to(gl.int64) * (R * KEYS)
    if begin < end:
        dot_0 = gl.zeros([KEYS, HALF], gl.float32, TILE)
        dot_1 = gl.zeros([KEYS, HALF], gl.float32, TILE)
        mbarrier.wait(bars.index(Q_FULL), 0)
        _arrived(bars, ODD)
        dot_0 = _multiplied(k_shared, q_shared, ODD, begin * zero, dot_0)
        for n in range(begin + ODD, end, GROUPS):
            number = n - begin
            stage = number % STAGES
            if KEY_SCALE:
                scale = gl.load(key_scale + n * KEYS + line, mask=n * KEYS + line < keys, other=0.0)
            dot_0 = warpgroup_mma_wait(0, [dot_0])
            dot_1 = _multiplied(k_shared, q_shared, stage, n * zero + 1, dot_1)
            sums = _sums(dot_0, weight_0, live, H, HEADS, RELU)
            if KEY_SCALE:
                sums *= gl.expand_dims(scale, 1)
            gl.store(place + n * KEYS, sums, mask=row < rows)
            _arrived(bars, number + GROUPS)
            dot_1 = warpgroup_mma_wait(0, [dot_1])
            dot_0 = _multiplied(k_shared, q_shared, (number + GROUPS) % STAGES, n * zero, dot_0)
            barrier()
            mbarrier.arrive(bars.index(FREE + stage), count=1)
            sums = _sums(dot_1, weight_1, live, H, HEADS, RELU)
            if KEY_SCALE:
                sums *= gl.expand_dims(scale, 1)
            gl.store(place + (below + n * KEYS), sums, mask=row + R < rows)
        warpgroup_mma_wait(0, [dot_0])


@gluon.jit(
    do_not_specialize=[
        *("first", "rows", "keys", "tiles", "chunks", "chunk_tiles", "scores_stride", "w_row", "w_head", "zero"),
    ],
    do_not_specialize_on_alignment=["w", "key_scale", "start", "stop"],
)
def scores_kernel(
    q,
    k,
    w,
    key_scale,
    start,
    stop,
    scores,
    first,
    rows,
    keys,
    tiles,
    chunks,
    chunk_tiles,
    scores_stride,
    q_row,
    q_head,
    k_row,
    w_row,
    w_head,
    zero,
    H: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    RELU: gl.constexpr,
    KEY_SCALE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """scores [rows, 64 * scores_stride] fp32 of the rows from `first` on, wherever one of a tile's rows may read.

    q: [T, H, D], k: [S, D], bf16 or E4M3, D a multiple of 64, strides multiples of 16 bytes. w: [T, H]. start, stop:
    [T] int32. key_scale: [S] fp32, with KEY_SCALE.
    tiles: of rows; chunks: of keys, chunk_tiles tiles of 64 each. HEADS: H padded to a power of two. zero: 0, which the
    compiler must not know.
    """
    ROWS: gl.constexpr = COLUMNS // HEADS
    program = gl.program_id(0)
    band = program // (BAND * chunks)
    chunk = (program // BAND) % chunks
    tile = tiles - 1 - (band * BAND + program % BAND)  # the last rows first: causal rows are longest there
    first_row = gl.maximum(tile, 0) * ROWS
    begin, end = _hull(start, stop, rows, keys, first, first_row, ROWS)
    begin = gl.maximum(begin // KEYS, chunk * chunk_tiles)
    end = gl.minimum((end + KEYS - 1) // KEYS, (chunk + 1) * chunk_tiles)
    end = gl.where(tile < 0, begin, end)
    SIZE: gl.constexpr = q.dtype.element_ty.primitive_bitwidth // 8
    SHARED: gl.constexpr = gl.NVMMASharedLayout(min(128, D * SIZE), 8 * SIZE, rank=2)
    q_shared = gl.allocate_shared_memory(q.dtype.element_ty, [COLUMNS // HALF, HALF, D], SHARED)
    k_shared = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, KEYS, D], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(Q_FULL), count=128)
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(FULL + stage), count=128)
        mbarrier.init(bars.index(FREE + stage), count=1)
    fence_async_shared()
    barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_scores, (
                w, key_scale, scores, first, rows, keys, first_row, begin, end, scores_stride, w_row, w_head, zero,
                q_shared, k_shared, bars, H, HEADS, RELU, KEY_SCALE, SIZE, 0,
            )),
            (_scores, (
                w, key_scale, scores, first, rows, keys, first_row, begin, end, scores_stride, w_row, w_head, zero,
                q_shared, k_shared, bars, H, HEADS, RELU, KEY_SCALE, SIZE, 1,
            )),
            (_copies, (
                q, k, first, rows, keys, first_row, begin, end, q_row, q_head, k_row, q_shared, k_shared, bars,
                H, D, HEADS, SIZE,
            )),
        ],
        [4, 4],
        REGISTERS,
    )
    # fmt: on
