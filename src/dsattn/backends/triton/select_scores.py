"""Scores of a block of rows on any GPU that Triton serves, into a buffer.

A program multiplies one tile of keys with all heads of a few query rows and sums the heads in its registers. Head bits
are the low bits of a tile's columns, so every row is summed by the same tree, and products are not fused with sums (the
compiler might fuse differently from place to place): a score's bits come from its row and key alone.

In fp8 the operands are E4M3, a query's scale is in its weights, and a key's multiplies the finished score. Hopper adds
up products of E4M3 in about 14 bits.

Letters: R rows and H padded heads of a tile, C columns R x H, N keys, D padded width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import Call
from dsattn.backends.triton.launch import launch, needs_of

_BAND = tl.constexpr(16)  # row tiles that read the same keys at about the same time
_CHUNK = 4096  # keys of one program at most
_MOST_HEADS = 64
_MOST_WIDTH = 128


def indexer_needs(call: Call, *dtypes: str) -> dict[str, bool]:
    """What kernels of the indexer need: need in words -> whether it is met."""
    return needs_of(call, dtypes) | {
        f"at most {_MOST_HEADS} indexer heads": call.heads <= _MOST_HEADS,
        f"an indexer width of at most {_MOST_WIDTH}": call.width <= _MOST_WIDTH,
    }


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def score_rows(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    relu: bool,
    scores: Tensor,
    first: int = 0,
    key_scale: Tensor | None = None,
) -> None:
    """Fill `scores` [rows, whole tiles of keys] wherever a row may read; elsewhere anything may stand.

    key_scale: [S] fp32, contiguous; scores are multiplied by it.
    first: the row of q, w, start and stop that the first of `scores` belongs to. Parts of q would begin at addresses
    that are aligned here and not there, which compiles the kernel twice.
    """
    (_, heads, width), rows, keys = q.shape, scores.shape[0], k.shape[0]
    if not rows or not keys:
        return
    exact = q.dtype == torch.float32
    padded_width = max(triton.next_power_of_2(width), 32 // q.element_size(), 16)
    columns = 128 if exact else 256
    tile_heads = max(triton.next_power_of_2(heads), 4)
    tiles = triton.cdiv(rows, columns // tile_heads)
    chunk = _CHUNK
    while chunk > 256 and tiles * triton.cdiv(keys, chunk) < 8 * processors(q.device):
        chunk //= 2
    bands = triton.cdiv(tiles, _BAND.value)
    launch(
        _score_kernel,
        (bands * _BAND.value * triton.cdiv(keys, chunk),),
        q,
        k,
        w,
        start,
        stop,
        w if key_scale is None else key_scale,
        scores,
        first,
        rows,
        keys,
        tiles,
        triton.cdiv(keys, chunk),
        chunk // 64,
        scores.stride(0) // 64,
        *q.stride()[:2],
        k.stride(0),
        *w.stride(),
        start.stride(0),
        stop.stride(0),
        HEADS=heads,
        WIDTH=width,
        TILE_HEADS=tile_heads,
        TILE_ROWS=columns // tile_heads,
        TILE_KEYS=64,
        TILE_WIDTH=padded_width,
        STEP_WIDTH=16 if exact else padded_width,
        RELU=relu,
        KEY_SCALE=key_scale is not None,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=[
        *("first", "rows", "keys", "tiles", "chunks", "chunk_tiles", "scores_stride"),
        *("w_row", "w_head", "start_row", "stop_row"),
    ],
    # parts of tensors begin anywhere
    do_not_specialize_on_alignment=["w_ptr", "start_ptr", "stop_ptr", "key_scale_ptr"],
)
def _score_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    start_ptr,
    stop_ptr,
    key_scale_ptr,
    scores_ptr,
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
    start_row,
    stop_row,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    STEP_WIDTH: tl.constexpr,
    RELU: tl.constexpr,
    KEY_SCALE: tl.constexpr,
):
    """Scores of TILE_ROWS rows, from `first` on, against a chunk of keys.

    scores_stride and chunk_tiles count tiles of TILE_KEYS.
    """
    COLUMNS: tl.constexpr = TILE_ROWS * TILE_HEADS
    program = tl.program_id(0)
    band = program // (_BAND * chunks)
    chunk = (program // _BAND) % chunks
    tile = tiles - 1 - (band * _BAND + program % _BAND)  # the last rows first: causal rows are longest there
    if tile < 0:
        return
    first_row = tile.to(tl.int64) * TILE_ROWS
    row_R = first_row + tl.arange(0, TILE_ROWS)
    start_R = tl.load(start_ptr + (first + row_R) * start_row, mask=row_R < rows, other=0)
    stop_R = tl.minimum(tl.load(stop_ptr + (first + row_R) * stop_row, mask=row_R < rows, other=0), keys)
    begin = tl.min(tl.where(start_R < stop_R, tl.maximum(start_R, 0), keys))
    end = tl.max(tl.where(start_R < stop_R, stop_R, 0))
    begin = tl.maximum(begin // TILE_KEYS, chunk * chunk_tiles)
    end = tl.minimum(tl.cdiv(end, TILE_KEYS), (chunk + 1) * chunk_tiles)
    if begin >= end:
        return

    column_C = tl.arange(0, COLUMNS)
    row_C = first_row + column_C // TILE_HEADS
    head_C = column_C % TILE_HEADS
    live_C = (row_C < rows) & (head_C < HEADS)
    far_C = head_C.to(tl.int64)  # heads of a turned q are rows apart: offsets pass 2^31
    w_C = tl.load(w_ptr + (first + row_C) * w_row + far_C * w_head, mask=live_C, other=0.0).to(tl.float32)
    d_D = tl.arange(0, STEP_WIDTH)
    n_N = tl.arange(0, TILE_KEYS)
    q_base_C1 = (q_ptr + (first + row_C) * q_row + far_C * q_head)[:, None]
    q_CD = tl.load(q_base_C1 + d_D[None, :], mask=live_C[:, None] & (d_D < WIDTH)[None, :], other=0.0)
    wide_tile = tl.full((), TILE_KEYS, tl.int64)
    for n in range(begin, end):
        key_N = n * TILE_KEYS + n_N
        k_base_N1 = (k_ptr + wide_tile * n * k_row) + (n_N * k_row)[:, None]
        k_ND = tl.load(k_base_N1 + d_D[None, :], mask=(key_N < keys)[:, None] & (d_D < WIDTH)[None, :], other=0.0)
        dot_NC = tl.dot(k_ND, tl.trans(q_CD), input_precision="ieee")
        if STEP_WIDTH < TILE_WIDTH:  # fp32 products are unrolled by the compiler: in steps
            for d in range(STEP_WIDTH, TILE_WIDTH, STEP_WIDTH):
                more_D = d + d_D
                more_CD = tl.load(
                    q_base_C1 + more_D[None, :], mask=live_C[:, None] & (more_D < WIDTH)[None, :], other=0.0
                )
                mask_ND = (key_N < keys)[:, None] & (more_D < WIDTH)[None, :]
                more_ND = tl.load(k_base_N1 + more_D[None, :], mask=mask_ND, other=0.0)
                dot_NC = tl.dot(more_ND, tl.trans(more_CD), dot_NC, input_precision="ieee")
        if RELU:
            dot_NC = tl.maximum(dot_NC, 0.0, propagate_nan=tl.PropagateNan.ALL)
        part_NC = dot_NC * w_C[None, :]
        if HEADS < TILE_HEADS:  # 0 * inf, of a padded head and an infinite key, must not be met
            part_NC = tl.where((head_C < HEADS)[None, :], part_NC, 0.0)
        score_NR = tl.sum(tl.reshape(part_NC, (TILE_KEYS, TILE_ROWS, TILE_HEADS)), 2)
        if KEY_SCALE:
            score_NR *= tl.load(key_scale_ptr + key_N, mask=key_N < keys, other=0.0)[:, None]
        out_NR = scores_ptr + (row_R * scores_stride * TILE_KEYS)[None, :] + key_N[:, None]
        tl.store(out_NR, score_NR, mask=(row_R < rows)[None, :])
