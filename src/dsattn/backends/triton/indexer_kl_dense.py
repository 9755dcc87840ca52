"""The indexer's loss over ranges of keys, in blocks of rows whose targets and scores [rows, S] fit into SCRATCH_BYTES.

Where ranks sum the target and it is known on the host what rows read, a block has only the keys that its rows do, and
as many more rows: what is sent is what is read, and fewer blocks have more work each.

The backward makes both again, turns them into dKL/dI, and multiplies twice: a program of `_query_kernel` sums dq and dw
of a few rows over their keys, one of `_key_kernel` sums dk of a tile of keys over a share of the block's rows. No
atomics: sums have one order, and bits repeat.
Memory beside operands and results: SCRATCH_BYTES, and in the backward the block's q_i and w again and, with at most
_MOST_SHARES shares, 4 S D bytes for each.
Letters: T query rows, S keys, H_I / D indexer heads / width; tiles: N keys, R rows, P padded heads, A = R x P columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import HeadRanks, scratch_bytes
from dsattn.backends.triton.indexer_kl_rows import Lines, begin_target, fill_dscore, fill_loss, hull, row_blocks
from dsattn.backends.triton.launch import launch
from dsattn.backends.triton.select_scores import score_rows
from dsattn.keys import REACH_ROWS

SCRATCH_BYTES = 2**28  # or less, as settings allow
_MOST_SHARES = 16
_TILE_ROWS = 128  # blocks are cut at whole tiles of any kernel


class Tiles(NamedTuple):
    """columns: of a tile, rows x padded heads."""

    columns: int
    keys: int
    num_warps: int
    num_stages: int


QUERY_TILES = KEY_TILES = Tiles(64, 64, 4, 3)
EXACT_TILES = Tiles(16, 16, 4, 1)  # fp32 has no tensor cores: the compiler unrolls every product


class _Cut(NamedTuple):
    """A block of rows of the backward. q_i [rows, H_I, D] and w [rows, H_I] are 0 in rows that read nothing.

    dscore: [rows, line], where a row reads. begin, end: [rows].
    """

    q_i: Tensor
    w: Tensor
    dscore: Tensor
    begin: Tensor
    end: Tensor


class _Block(NamedTuple):
    """Some of my rows, and the keys from `first` to `stop`, at multiples of 64, which are all that they read.

    scores: [rows, stop - first]; targets: the same of every rank's rows. All blocks share their memory.
    """

    rows: slice
    first: int
    stop: int
    scores: Tensor
    targets: Tensor


def ranges_forward(
    indexer: tuple[Tensor, Tensor, Tensor],
    attention: tuple[Tensor, Tensor, Tensor],
    lines: Lines,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    row_values: tuple[Tensor, ...],
) -> None:
    """Fill row_values: loss [T], peak [T], rest [T], mass [T]. indexer: q_i, k_i, w; attention: q, kv, lse."""
    mine = lines.own(ranks)
    for block in _blocks(indexer[0].shape[0], lines, ranks):
        target, counts = _fill(indexer, attention, lines, mine, scale, relu, ranks, block)
        fill_loss(block.scores, target, counts, block.rows, row_values)


def ranges_backward(
    indexer: tuple[Tensor, Tensor, Tensor],
    attention: tuple[Tensor, Tensor, Tensor],
    lines: Lines,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    saved: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
) -> Tensor:
    """dk [S, D] in fp32; fills grads (dq, dw). saved: row_scale [T], score_lse [2, T], mass [T]."""
    q_i, k_i, w = indexer
    row_scale, score_lse, mass = saved
    dq, dw = grads
    mine = lines.own(ranks)
    tiles = EXACT_TILES if q_i.dtype == torch.float32 else KEY_TILES
    shares = _shares(triton.cdiv(k_i.shape[0], tiles.keys), k_i.device)
    dk = torch.zeros(shares, *k_i.shape, dtype=torch.float32, device=k_i.device)
    for block in _blocks(q_i.shape[0], lines, ranks):
        target, counts = _fill(indexer, attention, lines, mine, scale, relu, ranks, block)
        fill_dscore(block.scores, target, counts, block.rows, score_lse, mass, row_scale)
        assert counts.begin is not None
        rows, keys = block.rows, slice(block.first, block.stop)
        begin, end = counts.begin[rows], counts.end[rows]
        idle = begin >= end
        of_rows = (q_i[rows].masked_fill(idle[:, None, None], 0), w[rows].masked_fill(idle[:, None], 0))
        cut = _Cut(*of_rows, block.scores, begin, end)
        _fill_query_gradients(cut, k_i[keys], relu, dq[rows], dw[rows])
        _add_key_gradients(cut, k_i[keys], relu, tiles, dk[:, keys])
    return dk.sum(0)


def _blocks(rows: int, lines: Lines, ranks: HeadRanks) -> list[_Block]:
    """Blocks whose scores and targets fit into the scratch; where reach is known, of as many rows as read the same."""
    line, bytes_per_cell = triton.cdiv(lines.columns, 64) * 64, 4 * (1 + ranks.tables)
    most = scratch_bytes(SCRATCH_BYTES) // bytes_per_cell
    # A graph that is captured repeats its sizes for other ranges.
    known = lines.reach is not None and not (lines.end.is_cuda and torch.cuda.is_current_stream_capturing())
    cuts = (
        _cuts(rows, lines.reach.tolist(), line, ranks, most)
        if known and lines.reach is not None
        else [(0, rows, 0, line)]
    )
    parts = []
    for start, stop, first, last in cuts:
        for part in row_blocks(stop - start, bytes_per_cell * (last - first), most * bytes_per_cell, _TILE_ROWS):
            parts.append((slice(start + part.start, start + part.stop), first, last))
    cells = [(part.stop - part.start) * (last - first) for part, first, last in parts]
    whole = torch.empty((1 + ranks.shards) * max(cells), dtype=torch.float32, device=lines.end.device)
    found = []
    for (part, first, last), size in zip(parts, cells, strict=True):
        scores, targets = whole[:size], whole[size : (1 + ranks.shards) * size]
        found.append(_Block(part, first, last, scores.view(-1, last - first), targets.view(-1, last - first)))
    return found


def _cuts(rows: int, reach: list[list[int]], line: int, ranks: HeadRanks, most: int) -> list[tuple[int, int, int, int]]:
    """(first of my rows, one past the last, first key, one past the last): runs of rows that read about the same.

    Neighbours join to no more than `most` cells, and where that adds at most a half to what they read, or makes few.
    """
    found: list[tuple[int, int, int, int]] = []
    read = 0  # cells of the last run's parts
    for start in range(0, rows, _TILE_ROWS):
        stop = min(start + _TILE_ROWS, rows)
        every = ranks.all_rows(slice(start, stop))
        runs = [
            run for run in reach[every.start // REACH_ROWS : triton.cdiv(every.stop, REACH_ROWS)] if run[0] < run[1]
        ]
        first = min((run[0] for run in runs), default=0) // 64 * 64
        last = min(max(triton.cdiv(max((run[1] for run in runs), default=0), 64) * 64, first + 64), line)
        cells = (stop - start) * (last - first)
        if found:
            before, _, low, high = found[-1]
            low, high = min(low, first), max(high, last)
            joined = (stop - before) * (high - low)
            if joined <= most and (2 * joined <= 3 * (read + cells) or joined <= most // 8):
                found[-1] = (before, stop, low, high)
                read += cells
                continue
        found.append((start, stop, first, last))
        read = cells
    return found


def _fill(
    indexer: tuple[Tensor, Tensor, Tensor],
    attention: tuple[Tensor, Tensor, Tensor],
    lines: Lines,
    mine: Lines,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    block: _Block,
) -> tuple[Tensor, Lines]:
    """(the target of a block, its lines); its scores are made while ranks sum the target."""
    (q_i, k_i, w), (q, kv, lse), keys = indexer, attention, slice(block.first, block.stop)
    every, counts = (one.within(block.first, block.stop) for one in (lines, mine))
    wait = begin_target(q, kv[keys], lse, every, scale, ranks, block.rows, block.targets)
    assert counts.begin is not None
    score_rows(q_i, k_i[keys], w, counts.begin, counts.end, relu, block.scores, block.rows.start)
    return wait(), counts


def _geometry(q_i: Tensor, relu: bool, tiles: Tiles) -> dict[str, int]:
    _, heads, width = q_i.shape
    padded = triton.next_power_of_2(heads)
    return {
        "H": heads,
        "D": width,
        "ROWS": max(1, tiles.columns // padded),
        "HEADS": padded,
        "WIDTH": max(16, triton.next_power_of_2(width)),
        "KEYS": tiles.keys,
        "RELU": relu,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _fill_query_gradients(cut: _Cut, k_i: Tensor, relu: bool, dq: Tensor, dw: Tensor) -> None:
    geometry = _geometry(cut.q_i, relu, EXACT_TILES if cut.q_i.dtype == torch.float32 else QUERY_TILES)
    rows = len(cut.end)
    grid = (triton.cdiv(rows, geometry["ROWS"]),)
    launch(_query_kernel, grid, *cut, k_i, dq, dw, rows, cut.dscore.shape[1], **geometry)


@triton.jit
def _load_columns(
    q_i,
    w,
    tile,
    rows,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(q [A, WIDTH], w [A], their places row * H + head, which of them exist) of a tile's rows."""
    column_A = tl.arange(0, ROWS * HEADS)
    row_A = tile * ROWS + column_A // HEADS
    head_A = column_A % HEADS
    real_A = (row_A < rows) & (head_A < H)
    place_A = row_A.to(tl.int64) * H + head_A
    x_X = tl.arange(0, WIDTH)
    q_AX = tl.load(q_i + place_A[:, None] * D + x_X[None, :], mask=real_A[:, None] & (x_X < D)[None, :], other=0.0)
    return q_AX, tl.load(w + place_A, mask=real_A, other=0.0).to(tl.float32), place_A, real_A


@triton.jit(
    do_not_specialize=["rows", "line"], do_not_specialize_on_alignment=["w", "begin", "end", "dq", "dw", "dscore"]
)
def _query_kernel(
    q_i,
    w,
    dscore,
    begin,
    end,
    k_i,
    dq,
    dw,
    rows,
    line,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    RELU: tl.constexpr,
):
    """dq [rows, H, D] and dw [rows, H] of ROWS rows."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: causal rows are longest there
    row_R = tile * ROWS + tl.arange(0, ROWS)
    begin_R = tl.load(begin + row_R, mask=row_R < rows, other=0)
    end_R = tl.load(end + row_R, mask=row_R < rows, other=0)
    low, high = hull(begin_R, end_R)
    q_AX, w_A, place_A, real_A = _load_columns(q_i, w, tile, rows, H, D, ROWS, HEADS, WIDTH)
    x_X = tl.arange(0, WIDTH)
    dq_AX = tl.zeros([ROWS * HEADS, WIDTH], tl.float32)
    dw_A = tl.zeros([ROWS * HEADS], tl.float32)
    dscore += (tile * ROWS).to(tl.int64) * line
    for first in range(low // KEYS * KEYS, high, KEYS):
        key_N = first + tl.arange(0, KEYS)
        reads_RN = (key_N[None, :] >= begin_R[:, None]) & (key_N[None, :] < end_R[:, None])
        # A key that none of these rows reads may hold NaN, and 0 * NaN must not be met.
        read_N = tl.max(reads_RN.to(tl.int32), 0) > 0
        mask_NX = read_N[:, None] & (x_X < D)[None, :]
        k_NX = tl.load(k_i + key_N.to(tl.int64)[:, None] * D + x_X[None, :], mask=mask_NX, other=0.0)
        place_RN = (tl.arange(0, ROWS) * line)[:, None] + key_N[None, :]
        dscore_RN = tl.load(dscore + place_RN, mask=reads_RN, other=0.0)
        every_RPN = tl.broadcast_to(dscore_RN[:, None, :], (ROWS, HEADS, KEYS))
        dscore_AN = tl.reshape(every_RPN, (ROWS * HEADS, KEYS))
        dot_AN = tl.dot(q_AX, tl.trans(k_NX), input_precision="ieee")
        ddot_AN = dscore_AN * w_A[:, None]
        if RELU:
            ddot_AN = tl.where(dot_AN > 0, ddot_AN, 0.0)
            dot_AN = tl.maximum(dot_AN, 0.0, propagate_nan=tl.PropagateNan.ALL)
        dw_A += tl.sum(dscore_AN * dot_AN, 1)
        dq_AX = tl.dot(ddot_AN.to(k_NX.dtype), k_NX, dq_AX, input_precision="ieee")
    mask_AX = real_A[:, None] & (x_X < D)[None, :]
    tl.store(dq + place_A[:, None] * D + x_X[None, :], dq_AX.to(dq.dtype.element_ty), mask=mask_AX)
    tl.store(dw + place_A, dw_A.to(dw.dtype.element_ty), mask=real_A)


def _shares(key_tiles: int, device: torch.device) -> int:
    """Into how many parts a block's rows are cut for dk, so that all processors have work."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(triton.cdiv(4 * processors, key_tiles), _MOST_SHARES))


def _add_key_gradients(cut: _Cut, k_i: Tensor, relu: bool, tiles: Tiles, dk: Tensor) -> None:
    geometry = _geometry(cut.q_i, relu, tiles)
    rows, keys = len(cut.end), k_i.shape[0]
    key_tiles = triton.cdiv(keys, tiles.keys)
    share_tiles = triton.cdiv(triton.cdiv(rows, geometry["ROWS"]), len(dk))
    sizes = (rows, cut.dscore.shape[1], keys, key_tiles, share_tiles)
    launch(_key_kernel, (key_tiles * len(dk),), *cut, k_i, dk, *sizes, dk.stride(0), SCAN=1024, **geometry)


@triton.jit(
    do_not_specialize=["rows", "line", "keys", "key_tiles", "share_tiles", "stride"],
    do_not_specialize_on_alignment=["w", "begin", "end", "dscore"],
)
def _key_kernel(
    q_i,
    w,
    dscore,
    begin,
    end,
    k_i,
    dk,
    rows,
    line,
    keys,
    key_tiles,
    share_tiles,
    stride,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SCAN: tl.constexpr,
    RELU: tl.constexpr,
):
    """Add to dk [shares, S, D] what share_tiles tiles of rows give to KEYS keys. stride: from share to share."""
    share = tl.program_id(0) // key_tiles
    first_key = tl.program_id(0) % key_tiles * KEYS
    key_N = first_key + tl.arange(0, KEYS)
    first_row = share * share_tiles * ROWS
    last_row = tl.minimum(first_row + share_tiles * ROWS, rows)
    low, high = _reading_rows(begin, end, first_row, last_row, first_key, KEYS, SCAN)
    x_X = tl.arange(0, WIDTH)
    mask_NX = (key_N < keys)[:, None] & (x_X < D)[None, :]
    k_NX = tl.load(k_i + key_N.to(tl.int64)[:, None] * D + x_X[None, :], mask=mask_NX, other=0.0)
    dk_NX = tl.zeros([KEYS, WIDTH], tl.float32)
    for tile in range(low // ROWS, tl.cdiv(high, ROWS)):
        row_R = tile * ROWS + tl.arange(0, ROWS)
        begin_R = tl.load(begin + row_R, mask=row_R < rows, other=0)
        end_R = tl.load(end + row_R, mask=row_R < rows, other=0)
        reads_NR = (key_N[:, None] >= begin_R[None, :]) & (key_N[:, None] < end_R[None, :])
        q_AX, w_A, _, _ = _load_columns(q_i, w, tile, rows, H, D, ROWS, HEADS, WIDTH)
        place_NR = row_R.to(tl.int64)[None, :] * line + key_N[:, None]
        dscore_NR = tl.load(dscore + place_NR, mask=reads_NR, other=0.0)
        every_NRP = tl.broadcast_to(dscore_NR[:, :, None], (KEYS, ROWS, HEADS))
        dscore_NA = tl.reshape(every_NRP, (KEYS, ROWS * HEADS))
        ddot_NA = dscore_NA * w_A[None, :]
        if RELU:
            ddot_NA = tl.where(tl.dot(k_NX, tl.trans(q_AX), input_precision="ieee") > 0, ddot_NA, 0.0)
        dk_NX = tl.dot(ddot_NA.to(q_AX.dtype), q_AX, dk_NX, input_precision="ieee")
    place_NX = share.to(tl.int64) * stride + key_N[:, None] * D + x_X[None, :]
    if low < high:
        tl.store(dk + place_NX, tl.load(dk + place_NX, mask=mask_NX, other=0.0) + dk_NX, mask=mask_NX)


@triton.jit
def _reading_rows(begin, end, first, last, first_key, KEYS: tl.constexpr, SCAN: tl.constexpr):
    """(first row of first .. last - 1 that reads any of KEYS keys, one past the last such row)."""
    low_B = tl.full([SCAN], 0x7FFFFFFF, tl.int32)
    high_B = tl.zeros([SCAN], tl.int32)
    for at in range(first, last, SCAN):
        row_B = at + tl.arange(0, SCAN)
        begin_B = tl.load(begin + row_B, mask=row_B < last, other=0)
        end_B = tl.load(end + row_B, mask=row_B < last, other=0)
        reads_B = (begin_B < end_B) & (begin_B < first_key + KEYS) & (end_B > first_key)
        low_B = tl.minimum(low_B, tl.where(reads_B, row_B, 0x7FFFFFFF))
        high_B = tl.maximum(high_B, tl.where(reads_B, row_B + 1, 0))
    high = tl.max(high_B, 0)
    return tl.minimum(tl.min(low_B, 0), high), high
