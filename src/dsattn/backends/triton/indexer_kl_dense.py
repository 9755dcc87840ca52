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

from dsattn.backends import CUT_KEYS, CUT_ROWS, Cut, HeadRanks, row_cuts, scratch_bytes
from dsattn.backends.triton.indexer_kl_rows import Lines, begin_target, fill_dscore, fill_loss, hull, row_blocks
from dsattn.backends.triton.launch import launch
from dsattn.backends.triton.select_scores import score_rows

SCRATCH_BYTES = 2**28  # or less, as settings allow
_MOST_SHARES = 16


class Tiles(NamedTuple):
    """columns: of a tile, rows x padded heads."""

    columns: int
    keys: int
    num_warps: int
    num_stages: int


QUERY_TILES = KEY_TILES = Tiles(64, 64, 4, 3)
EXACT_TILES = Tiles(16, 16, 4, 1)  # fp32 has no tensor cores: the compiler unrolls every product


class _Part(NamedTuple):
    """A block of rows of the backward. q_i [rows, H_I, D] and w [rows, H_I] are 0 in rows that read nothing.

    dscore: [rows, line], where a row reads. begin, end: [rows].
    """

    q_i: Tensor
    w: Tensor
    dscore: Tensor
    begin: Tensor
    end: Tensor


class _Block(NamedTuple):
    """Some of my rows and their keys, with its part of the memory that all blocks share.

    scores: [rows, keys of the cut]; targets: the same of every rank's rows.
    """

    cut: Cut
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
        fill_loss(block.scores, target, counts, block.cut.rows, row_values)


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
        fill_dscore(block.scores, target, counts, block.cut.rows, score_lse, mass, row_scale)
        assert counts.begin is not None
        rows, keys = block.cut.rows, slice(block.cut.first, block.cut.stop)
        begin, end = counts.begin[rows], counts.end[rows]
        idle = begin >= end
        of_rows = (q_i[rows].masked_fill(idle[:, None, None], 0), w[rows].masked_fill(idle[:, None], 0))
        part = _Part(*of_rows, block.scores, begin, end)
        _fill_query_gradients(part, k_i[keys], relu, dq[rows], dw[rows])
        _add_key_gradients(part, k_i[keys], relu, tiles, dk[:, keys])
    return dk.sum(0)


def _blocks(rows: int, lines: Lines, ranks: HeadRanks) -> list[_Block]:
    """Blocks whose scores and targets fit into the scratch; where reach is known, with the keys that are read."""
    line, bytes_per_cell = triton.cdiv(lines.columns, CUT_KEYS) * CUT_KEYS, 4 * (1 + ranks.tables)
    scratch = scratch_bytes(SCRATCH_BYTES)
    reach = lines.reach
    if lines.end.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph repeats its sizes for other ranges
        reach = None
    whole = [Cut(slice(0, rows), 0, line)]
    wide = whole if reach is None else row_cuts(rows, reach, line, ranks.shards, scratch // bytes_per_cell)
    parts = []
    for cut in wide:
        start, stop = cut.rows.start, cut.rows.stop
        for part in row_blocks(stop - start, bytes_per_cell * (cut.stop - cut.first), scratch, CUT_ROWS):
            parts.append(cut._replace(rows=slice(start + part.start, start + part.stop)))
    most = max(part.cells for part in parts)
    memory = torch.empty((1 + ranks.shards) * most, dtype=torch.float32, device=lines.end.device)
    found = []
    for part in parts:
        scores, targets = memory[: part.cells], memory[part.cells : (1 + ranks.shards) * part.cells]
        width = part.stop - part.first
        found.append(_Block(part, scores.view(-1, width), targets.view(-1, width)))
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
    (q_i, k_i, w), (q, kv, lse), (rows, first, stop) = indexer, attention, block.cut
    every, counts = lines.within(first, stop), mine.within(first, stop)
    wait = begin_target(q, kv[first:stop], lse, every, scale, ranks, rows, block.targets)
    assert counts.begin is not None
    score_rows(q_i, k_i[first:stop], w, counts.begin, counts.end, relu, block.scores, rows.start)
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


def _fill_query_gradients(part: _Part, k_i: Tensor, relu: bool, dq: Tensor, dw: Tensor) -> None:
    geometry = _geometry(part.q_i, relu, EXACT_TILES if part.q_i.dtype == torch.float32 else QUERY_TILES)
    rows = len(part.end)
    grid = (triton.cdiv(rows, geometry["ROWS"]),)
    launch(_query_kernel, grid, *part, k_i, dq, dw, rows, part.dscore.shape[1], **geometry)


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


def _add_key_gradients(part: _Part, k_i: Tensor, relu: bool, tiles: Tiles, dk: Tensor) -> None:
    geometry = _geometry(part.q_i, relu, tiles)
    rows, keys = len(part.end), k_i.shape[0]
    key_tiles = triton.cdiv(keys, tiles.keys)
    share_tiles = triton.cdiv(triton.cdiv(rows, geometry["ROWS"]), len(dk))
    sizes = (rows, part.dscore.shape[1], keys, key_tiles, share_tiles)
    launch(_key_kernel, (key_tiles * len(dk),), *part, k_i, dk, *sizes, dk.stride(0), SCAN=1024, **geometry)


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
