"""What the indexer's loss does row by row, for selected keys and for ranges: target, loss, and the scores' gradient.

A row of a block has a line of columns in fp32 buffers: its slots where keys are selected, every key where they are not.
The columns from `begin` to `end` count; what stands elsewhere is never read. A tile of the target is one product of
keys with (rows x heads) columns, whose heads are summed in registers: nothing of size [rows, H, columns] exists.
Where ranks share rows out, the target is made of all ranks' rows, in the order in which a reduce-scatter takes them.
Letters: T query rows, H attention heads, G groups, C key width, K kept keys; tiles: N keys, R rows, A = R x heads.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import HeadRanks
from dsattn.backends.triton.chunks import LOG2_E, shared_bytes
from dsattn.backends.triton.launch import launch
from dsattn.keys import KeyRange


class Tiles(NamedTuple):
    """How the target is cut. keys, rows, heads: of a tile; chunk: channels of one step.

    band: row tiles that read the same keys at about the same time.
    """

    keys: int
    rows: int
    heads: int
    chunk: int
    band: int
    num_warps: int
    num_stages: int


class Lines(NamedTuple):
    """Which columns of each row count: begin, end [T] int32, begin None where it is 0.

    index: [T, K] key rows of the slots, -1 in holes; None where columns are keys. columns: of a line that can count.
    reach: of ranges, what is known of them on the host: see `KeyRange`.
    """

    begin: Tensor | None
    end: Tensor
    index: Tensor | None
    columns: int
    reach: Tensor | None = None

    def own(self, ranks: HeadRanks) -> "Lines":
        """Of my rows, these being all ranks'."""
        begin, index = (None if x is None else ranks.own(x).contiguous() for x in (self.begin, self.index))
        return Lines(begin, ranks.own(self.end).contiguous(), index, self.columns)

    def within(self, first: int, stop: int) -> "Lines":
        """Of the columns from `first` to `stop` alone, for rows that count no others of theirs."""
        assert self.begin is not None
        begin, end = (self.begin - first, self.end - first) if first else (self.begin, self.end)
        return Lines(begin, end, None, min(stop, self.columns) - first)


def lines_of(index: Tensor | None, length: Tensor | None, keys: KeyRange, real: Tensor, num_keys: int) -> Lines:
    """Rows that are not `real` count nothing; ranges are cut to the keys there are."""
    if index is None or length is None:
        end = torch.where(real, keys.stop.clamp(max=num_keys), 0)
        return Lines(keys.start.clamp(min=0).contiguous(), end, None, num_keys, keys.reach)
    return Lines(None, torch.where(real, length.clamp(max=index.shape[1]), 0), index.contiguous(), index.shape[1])


@triton.jit
def load_span(begin, end, row, valid):
    """(begin, end) of rows; nothing counts where not `valid`."""
    last = tl.load(end + row, mask=valid, other=0)
    first = tl.zeros_like(last)
    if begin is not None:
        first = tl.load(begin + row, mask=valid, other=0)
    return first, last


@triton.jit
def hull(begin_R, end_R):
    """(least begin, greatest end) of the rows that have columns; (0, 0) where none has."""
    some = begin_R < end_R
    end = tl.max(tl.where(some, end_R, 0), 0)
    return tl.minimum(tl.min(tl.where(some, begin_R, 0x7FFFFFFF), 0), end), end


@triton.jit(
    do_not_specialize=["first_row", "rows", "row_tiles", "line", "column_tiles"],
    do_not_specialize_on_alignment=["lse", "index", "begin", "end"],
)
def _target_kernel(
    q,
    kv,
    lse,
    index,
    begin,
    end,
    target,
    scale,
    first_row,
    rows,
    row_tiles,
    line,
    column_tiles,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BAND: tl.constexpr,
    SHARDS: tl.constexpr,
):
    """target[row, column] = sum_h exp(scale q_h . k - lse_h) of ROWS rows and KEYS columns; 0 in holes.

    first_row: of the block, whose first line is target's first; its rows are dealt to SHARDS runs of lines, in turn.
    With an index, ROWS is 1 and its line is K.
    """
    SHARE: tl.constexpr = H // G
    HEAD_TILES: tl.constexpr = (SHARE + HEADS - 1) // HEADS
    COLUMNS: tl.constexpr = ROWS * HEADS
    program = tl.program_id(0)
    band = program // (BAND * column_tiles)
    tile = row_tiles - 1 - (band * BAND + program % BAND)  # the last rows first: causal rows are longest there
    if tile < 0:
        return
    first_column = (program // BAND) % column_tiles * KEYS
    line_R = tile * ROWS + tl.arange(0, ROWS)
    begin_R, end_R = load_span(begin, end, first_row + line_R, line_R < rows)
    low, high = hull(begin_R, end_R)
    if (low >= first_column + KEYS) | (high <= first_column):
        return

    column_N = first_column + tl.arange(0, KEYS)
    if index is None:
        key_N = column_N
    else:
        row_line = (first_row + tile).to(tl.int64) * line
        key_N = tl.load(index + row_line + column_N, mask=column_N < high, other=-1)
    live_N = (key_N >= 0) & (column_N < high)
    column_A = tl.arange(0, COLUMNS)
    row_A = tile * ROWS + column_A // HEADS
    channel_X = tl.arange(0, CHUNK)
    total_NR = tl.zeros([KEYS, ROWS], tl.float32)
    for block in tl.range(0, G * HEAD_TILES, flatten=True):  # so that loads run ahead from block to block
        group = block // HEAD_TILES
        of_group_A = block % HEAD_TILES * HEADS + column_A % HEADS
        live_A = (row_A < rows) & (of_group_A < SHARE)
        row_head_A = (first_row + row_A).to(tl.int64) * H + group * SHARE + of_group_A
        q_A1 = q + row_head_A[:, None] * C
        k_N1 = kv + (key_N.to(tl.int64) * G + group)[:, None] * C
        dot_NA = tl.zeros([KEYS, COLUMNS], tl.float32)
        for first in range(0, C, CHUNK):
            x_1X = (first + channel_X)[None, :]
            if C % CHUNK == 0:
                k_NX = tl.load(k_N1 + x_1X, mask=live_N[:, None], other=0.0)
                q_AX = tl.load(q_A1 + x_1X, mask=live_A[:, None], other=0.0)
            else:
                k_NX = tl.load(k_N1 + x_1X, mask=live_N[:, None] & (x_1X < C), other=0.0)
                q_AX = tl.load(q_A1 + x_1X, mask=live_A[:, None] & (x_1X < C), other=0.0)
            dot_NA = tl.dot(k_NX, tl.trans(q_AX), dot_NA, input_precision="ieee")
        lse_A = tl.load(lse + row_head_A, mask=live_A, other=0.0).to(tl.float32)
        shift_A = tl.where(lse_A == float("-inf"), 0.0, lse_A)
        p_NA = tl.exp2((dot_NA * scale - shift_A[None, :]) * LOG2_E)
        if SHARE % HEADS > 0:  # what a padded head and an infinite key make must not be met
            p_NA = tl.where((of_group_A < SHARE)[None, :], p_NA, 0.0)
        if HEADS == 1:
            total_NR += p_NA
        else:
            total_NR += tl.sum(tl.reshape(p_NA, (KEYS, ROWS, HEADS)), 2)
    counts_NR = (column_N[:, None] >= begin_R[None, :]) & (column_N[:, None] < end_R[None, :])
    if SHARDS == 1:
        target += (tile * ROWS).to(tl.int64) * line
        place_R = tl.arange(0, ROWS)
    else:
        place_R = (line_R % SHARDS * (rows // SHARDS) + line_R // SHARDS).to(tl.int64)
    out_NR = target + (place_R * line)[None, :] + column_N[:, None]
    tl.store(out_NR, tl.where(live_N[:, None], total_NR, 0.0), mask=counts_NR)


@triton.jit(
    do_not_specialize=["first_row", "line"],
    do_not_specialize_on_alignment=["score", "target", "begin", "end", "loss", "peak", "rest", "mass"],
)
def _loss_kernel(score, target, begin, end, loss, peak, rest, mass, first_row, line, BLOCK: tl.constexpr):
    """KL of one row, and what its gradient needs: maximum of the scores, log of the sum below it, mass of the target.

    KL = sum T log T - sum T I + lse(I) with T = target / mass and I relative to its maximum, so that large scores
    cancel before they are rounded. A row without mass loses 0.
    """
    at = tl.program_id(0)
    row = first_row + at
    first, last = load_span(begin, end, row, row >= 0)
    score += at.to(tl.int64) * line
    target += at.to(tl.int64) * line
    first_block = first // BLOCK * BLOCK
    peak_B = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(first_block, last, BLOCK):
        column_B = block + tl.arange(0, BLOCK)
        counts_B = (column_B >= first) & (column_B < last)
        peak_B = tl.maximum(peak_B, tl.load(score + column_B, mask=counts_B, other=float("-inf")))
    top = tl.max(peak_B, 0)
    top = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    total_B = tl.zeros([BLOCK], tl.float32)
    mass_B = tl.zeros([BLOCK], tl.float32)
    gain_B = tl.zeros([BLOCK], tl.float32)
    for block in range(first_block, last, BLOCK):
        column_B = block + tl.arange(0, BLOCK)
        counts_B = (column_B >= first) & (column_B < last)
        below_B = tl.load(score + column_B, mask=counts_B, other=float("-inf")) - top
        target_B = tl.load(target + column_B, mask=counts_B, other=0.0)
        total_B += tl.exp(below_B)
        mass_B += target_B
        gain_B += tl.where(target_B > 0, target_B * (tl.log(tl.where(target_B > 0, target_B, 1.0)) - below_B), 0.0)
    row_mass = tl.sum(mass_B, 0)
    row_rest = tl.log(tl.sum(total_B, 0))
    kl = tl.sum(gain_B, 0) / row_mass - tl.log(row_mass) + row_rest
    tl.store(loss + row, tl.where(row_mass == 0, 0.0, kl))
    tl.store(peak + row, top)
    tl.store(rest + row, row_rest)
    tl.store(mass + row, row_mass)


@triton.jit(
    do_not_specialize=["first_row", "line", "columns", "blocks"],
    do_not_specialize_on_alignment=["score", "target", "begin", "end", "peak", "rest", "mass", "row_scale"],
)
def _dscore_kernel(
    score,
    target,
    begin,
    end,
    peak,
    rest,
    mass,
    row_scale,
    first_row,
    line,
    columns,
    blocks,
    BLOCK: tl.constexpr,
):
    """score becomes dKL/dI = softmax(I) - target / mass, times row_scale where given; 0 where no column counts."""
    at = tl.program_id(0) // blocks
    row = first_row + at
    first, last = load_span(begin, end, row, row >= 0)
    first_column = tl.program_id(0) % blocks * BLOCK
    if begin is not None:
        if (first >= first_column + BLOCK) | (last <= first_column):
            return
    column_B = first_column + tl.arange(0, BLOCK)
    counts_B = (column_B >= first) & (column_B < last)
    place_B = at.to(tl.int64) * line + column_B
    row_rest = tl.load(rest + row)
    row_mass = tl.load(mass + row)
    shift = tl.where(row_rest == float("-inf"), 0.0, row_rest)
    below_B = tl.load(score + place_B, mask=counts_B, other=float("-inf")) - tl.load(peak + row)
    share_B = tl.load(target + place_B, mask=counts_B, other=0.0) / row_mass
    dscore_B = tl.where(counts_B, tl.exp(below_B - shift) - share_B, 0.0)
    dscore_B = tl.where(row_mass == 0, 0.0, dscore_B)
    if row_scale is not None:
        factor = tl.load(row_scale + row)
        dscore_B = tl.where(factor == 0, 0.0, dscore_B * factor)
    tl.store(score + place_B, dscore_B, mask=column_B < columns)


def begin_target(
    q: Tensor, kv: Tensor, lse: Tensor, lines: Lines, scale: float, ranks: HeadRanks, block: slice, scratch: Tensor
) -> Callable[[], Tensor]:
    """Begin to make sum_h exp(scale q . k - lse) of a block of my rows, over the heads of every rank.

    What is returned waits for the ranks and gives it: [rows of block, line]. q: [R, H, C], R as in `HeadRanks`, and kv:
    [S, C] or [S, G, C] of one dtype, contiguous; lse: [R, H]; lines: of R. scratch: [rows of block on all ranks, line]
    fp32, in use until then.
    """
    (_, heads, width), every = q.shape, ranks.all_rows(block)
    rows = every.stop - every.start
    groups = 1 if kv.dim() == 2 else kv.shape[1]
    tiles = target_tiles(heads // groups, width, q.dtype, lines.index is not None, shared_bytes(q.device))
    row_tiles, column_tiles = triton.cdiv(rows, tiles.rows), triton.cdiv(lines.columns, tiles.keys)
    launch(
        _target_kernel,
        (triton.cdiv(row_tiles, tiles.band) * tiles.band * column_tiles,),
        *(q, kv, lse, lines.index, lines.begin, lines.end, scratch),
        *(scale, every.start, rows, row_tiles, scratch.shape[1], column_tiles),
        H=heads,
        G=groups,
        C=width,
        KEYS=tiles.keys,
        ROWS=tiles.rows,
        HEADS=tiles.heads,
        CHUNK=tiles.chunk,
        BAND=tiles.band,
        SHARDS=ranks.shards,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return ranks.begin(scratch)


def target_tiles(share: int, width: int, dtype: torch.dtype, selected: bool, shared: int) -> Tiles:
    """share: heads of a group. shared: bytes of shared memory that a block may use.

    Selected keys are each row's own: one row a tile, and as many keys as it can have.
    """
    heads = triton.next_power_of_2(share)
    if dtype == torch.float32:  # without tensor cores the compiler unrolls every product: small tiles
        heads = min(heads, 32)
        rows = 1 if selected else 32 // heads
        return Tiles(32, rows, max(heads, 16 // rows), 16, 1 if selected else 16, 4, 2)
    chunk = min(64, max(16, triton.next_power_of_2(width)))
    heads = min(heads, 128)
    if selected:
        keys, rows, band, warps, most_stages = (256, 1, 1, 8, 4) if heads <= 64 else (128, 1, 1, 4, 3)
        chunk = min(32, chunk) if heads <= 64 else chunk
    else:
        keys, rows, band, warps, most_stages = (64, 128, 16, 4, 4) if heads == 1 else (128, 256 // heads, 16, 8, 3)
    heads = max(heads, 16 // rows)
    step = (keys + rows * heads) * chunk * dtype.itemsize
    if 2 * step > shared:
        keys, step = keys // 2, step - keys // 2 * chunk * dtype.itemsize
    return Tiles(keys, rows, heads, chunk, band, warps, max(2, min(most_stages, shared // step)))


def fill_loss(score: Tensor, target: Tensor, lines: Lines, block: slice, row_values: Sequence[Tensor]) -> None:
    """row_values: loss [T], peak [T], rest [T], mass [T], filled for the rows of block."""
    launch(
        _loss_kernel,
        (block.stop - block.start,),
        *(score, target, lines.begin, lines.end, *row_values, block.start, score.shape[1]),
        BLOCK=2048,
        num_warps=8,
    )


def fill_dscore(
    score: Tensor,
    target: Tensor,
    lines: Lines,
    block: slice,
    score_lse: Tensor,
    mass: Tensor,
    row_scale: Tensor | None = None,
) -> None:
    """score [rows of block, line] becomes dKL/dI, times row_scale where given.

    Ranges get it where a row reads; slots get 0 where they are empty, too.
    """
    block_columns = 1024
    blocks = triton.cdiv(lines.columns, block_columns)
    launch(
        _dscore_kernel,
        ((block.stop - block.start) * blocks,),
        *(score, target, lines.begin, lines.end, score_lse[0], score_lse[1], mass, row_scale),
        *(block.start, score.shape[1], lines.columns, blocks),
        BLOCK=block_columns,
        num_warps=4,
    )


def row_blocks(rows: int, bytes_per_row: int, scratch: int, multiple: int = 1) -> list[slice]:
    """Slices of at most scratch / bytes_per_row rows, a multiple of `multiple` where that fits, at least one row."""
    step = max(1, scratch // bytes_per_row)
    if step > multiple:
        step -= step % multiple
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
