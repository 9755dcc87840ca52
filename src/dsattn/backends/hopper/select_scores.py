"""Indexer scores on Hopper: a program is a chunk of keys and as many query rows as fill 256 columns with their heads.

Three groups of four warps share q of the rows and a ring of key tiles:

    copies        q once, then tiles of 64 keys
    even, odd     every other tile: its product with all columns, relu, weights, and the sum over heads

While one group sums, the tensor cores work for the other. Heads are the low bits of a tile's columns and products are
not fused with sums (the compiler might fuse differently from place to place), so that every row is summed by the same
tree: a score's bits come from its row and key alone.
Letters: T query rows, S keys, H indexer heads, D indexer width.
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

from dsattn.backends.hopper.sparse_mla_tiles import KEYS, accumulator, barrier, copies

COLUMNS = gl.constexpr(256)
STAGES = gl.constexpr(4)
BAND = gl.constexpr(16)  # row tiles that read the same keys at about the same time

# Barriers: q is there; each tile of the ring is there, or has been read.
Q_FULL = gl.constexpr(0)
FULL = gl.constexpr(1)
FREE = gl.constexpr(5)

# Registers a thread of `odd` and `copies`; `even` gets what 504 leave.
REGISTERS = gl.constexpr([240, 24])


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
):
    """q [COLUMNS, D] and tiles of k [S, D]; what does not exist becomes zeros and is not read."""
    LAYOUT: gl.constexpr = copies()
    line = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)
    if begin < end:
        for c in gl.static_range(COLUMNS // KEYS):
            column = c * KEYS + line
            row, head = first_row + column // HEADS, column % HEADS
            place = (first + row).to(gl.int64) * q_row + head * q_head
            real = gl.expand_dims((row < rows) & (head < H), 1)
            for j in gl.static_range(D // 64):
                part = q_shared.index(0).slice(c * KEYS, KEYS, dim=0).slice(j * 64, 64, dim=1)
                pointers = q + (gl.expand_dims(place, 1) + (channel + j * 64))
                async_copy.async_copy_global_to_shared(part, pointers, mask=real)
        async_copy.mbarrier_arrive(bars.index(Q_FULL), increment_count=False)
    for n in range(begin, end):
        stage = (n - begin) % STAGES
        key = n * KEYS + line
        pointers = k + (gl.expand_dims(key.to(gl.int64) * k_row, 1) + channel)
        real = gl.expand_dims(key < keys, 1)
        mbarrier.wait(bars.index(FREE + stage), ((n - begin) // STAGES & 1) ^ 1)
        for j in gl.static_range(D // 64):
            part = k_shared.index(stage).slice(j * 64, 64, dim=1)
            async_copy.async_copy_global_to_shared(part, pointers + j * 64, mask=real)
        async_copy.mbarrier_arrive(bars.index(FULL + stage), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _scores(
    w,
    scores,
    first,
    rows,
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
    ODD: gl.constexpr,
):
    """Every other tile of keys against all columns."""
    TILE: gl.constexpr = accumulator(COLUMNS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, TILE)
    ROWS: gl.constexpr = COLUMNS // HEADS
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    column = gl.arange(0, COLUMNS, layout=COLUMN)
    head, row = column % HEADS, first_row + column // HEADS
    weight = gl.load(
        w + (first + row).to(gl.int64) * w_row + head * w_head, mask=(row < rows) & (head < H), other=0.0
    ).to(gl.float32)
    out_row = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT)), 0)
    out_key = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, OUT)), 1)
    place = scores + (out_row.to(gl.int64) * scores_stride * KEYS + out_key)
    dot = gl.zeros([KEYS, COLUMNS], gl.float32, TILE)
    if begin < end:
        mbarrier.wait(bars.index(Q_FULL), 0)
    for n in range(begin + ODD, end, 2):
        stage = (n - begin) % STAGES
        hidden = n * zero
        mbarrier.wait(bars.index(FULL + stage), (n - begin) // STAGES & 1)
        fence_async_shared()
        q = q_shared.index(hidden).permute((1, 0))
        dot = warpgroup_mma(k_shared.index(stage), q, dot, use_acc=False, is_async=True)
        dot = warpgroup_mma_wait(0, [dot])
        barrier()
        mbarrier.arrive(bars.index(FREE + stage), count=1)
        part = dot
        if RELU:
            part = gl.maximum(part, 0.0, propagate_nan=tl.PropagateNan.ALL)
        part = part * gl.expand_dims(weight, 0)
        if H < HEADS:  # 0 * inf, of a padded head and an infinite key, must not be met
            part = gl.where(gl.expand_dims(head < H, 0), part, 0.0)
        total = gl.sum(part.reshape(KEYS, ROWS, HEADS), 2)
        gl.store(place + n * KEYS, gl.convert_layout(total, OUT), mask=out_row < rows)


@gluon.jit(
    do_not_specialize=[
        *("first", "rows", "keys", "tiles", "chunks", "chunk_tiles", "scores_stride", "w_row", "w_head", "zero"),
    ],
    do_not_specialize_on_alignment=["w", "start", "stop"],
)
def scores_kernel(
    q,
    k,
    w,
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
    num_warps: gl.constexpr,
):
    """scores [rows, 64 * scores_stride] fp32 of the rows from `first` on, wherever one of a tile's rows may read.

    q: [T, H, D], k: [S, D], bf16, D a multiple of 64, strides multiples of 8. w: [T, H]. start, stop: [T] int32.
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
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [1, COLUMNS, D], SHARED)
    k_shared = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [9, 1], mbarrier.MBarrierLayout())
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
                w, scores, first, rows, first_row, begin, end, scores_stride, w_row, w_head, zero,
                q_shared, k_shared, bars, H, HEADS, RELU, 0,
            )),
            (_scores, (
                w, scores, first, rows, first_row, begin, end, scores_stride, w_row, w_head, zero,
                q_shared, k_shared, bars, H, HEADS, RELU, 1,
            )),
            (_copies, (
                q, k, first, rows, keys, first_row, begin, end, q_row, q_head, k_row, q_shared, k_shared, bars,
                H, D, HEADS,
            )),
        ],
        [4, 4],
        REGISTERS,
    )
    # fmt: on
