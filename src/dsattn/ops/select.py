"""Selection: the top-k keys of every query row, exactly, without a [T, S] buffer.

Scores as in `ops.indexer`; ranking as in `selection.rank`: by value, ties to the smaller key, never NaN or -inf.
A block of rows is scored and ranked; where even its columns are too many, they are ranked in runs whose best are
carried on, which changes nothing: the rule is a total order, so the best of the best are the best.

In low precision q and k are rounded first, by `quantize`, and nothing else changes:

    fp8     I[t, s] = k_scale[s] * sum_h (w[t, h] q_scale[t, h]) * act(q8[t, h] . k8[s])     scales are positive
    mxfp8   I[t, s] = sum_h w[t, h] * act(q[t, h] . k[s])                                    of dequantised q and k

Letters: T query rows, S keys, H indexer heads, D indexer width, K kept keys, R rows and W columns of a block.
"""

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from dsattn.backends import Call, choose
from dsattn.config import Precision
from dsattn.errors import InputError
from dsattn.keys import KeyRange
from dsattn.ops.blocks import span
from dsattn.ops.first_use import serve
from dsattn.ops.indexer import check_indexer, check_keys, score_block, tile_shape, wide_dtype
from dsattn.ops.operator import operator
from dsattn.quantize import BLOCK, from_mxfp8, to_e4m3, to_mxfp8
from dsattn.selection import Selection, rank, selected_scores

_BYTES_PER_SCORE = 32  # a score with what ranking it keeps beside it: a copy, masks, a running count, an int64 slot


def select_topk(scores: Tensor, keys: KeyRange, top_k: int, *, backend: str = "auto") -> Selection:
    """The ranking rule on given scores.

    scores: [T, S] floating point; only those inside `keys` are looked at. top_k: K >= 1.
    Returns a Selection of width K, also where fewer keys exist.
    Raises InputError on shapes that do not fit, BackendUnavailable where `backend` cannot serve.
    """
    if scores.dim() != 2 or not scores.is_floating_point():
        raise InputError(f"scores must be floating point [T, S], got {scores.dtype} {list(scores.shape)}")
    check_keys(keys, "scores", scores)
    _check_top_k(top_k)
    index, length = _topk(scores.detach(), keys.start, keys.stop, top_k, backend)
    return Selection(index, length, every_row_has_a_key=keys.every_row_has_a_key)


def select_keys(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    keys: KeyRange,
    top_k: int,
    *,
    relu: bool = True,
    precision: Precision = "bf16",
    return_scores: bool = False,
    block_bytes: int = 2**30,
    backend: str = "auto",
) -> Selection:
    """The K best keys of every row by indexer score.

    q: [T, H, D], k: [S, D], w: [T, H] floating point; keys: KeyRange of T rows; top_k: K >= 1.
    precision: `bf16` multiplies operands as they are given, fp32 accumulation (fp64 for fp64 inputs). `fp8` rounds q
        and k to E4M3 first, one fp32 scale a vector; `mxfp8` to E4M3 by a power of two for every 32 lanes, D a multiple
        of 32. It decides which keys are selected and nothing else.
    relu: ReLU between products and head weights, as in published models.
    return_scores: also give the selected scores, fp32 (fp64 for fp64 inputs), of the operands as given.
    block_bytes: most bytes of scores alive at once, with what ranking keeps beside them; one tile of `tile_shape` plus
    K candidates a row is the least. The same bits for any value, and whatever other rows share the call.
    Returns a Selection of width K, also where fewer keys exist; a row without keys selects nothing.
    Not differentiable: an index has no gradient, and the indexer learns from `indexer_kl` alone.
    Raises InputError on shapes that do not fit, BackendUnavailable where `backend` cannot have `precision`.
    """
    check_indexer(q, k, w, keys)
    _check_top_k(top_k)
    if precision not in get_args(Precision):
        raise InputError(f"precision={precision!r} must be one of {', '.join(get_args(Precision))}")
    if precision == "mxfp8" and k.shape[1] % BLOCK:
        raise InputError(f"precision='mxfp8' scales blocks of {BLOCK} lanes, but q and k have {k.shape[1]}; use 'fp8'")
    if not isinstance(block_bytes, int) or block_bytes < 1:
        raise InputError(f"block_bytes={block_bytes!r} must be an integer of at least 1, as 2**30")
    operands = (q.detach(), k.detach(), w.detach(), keys.start, keys.stop)
    index, length, score = _select(*operands, top_k, relu, return_scores, block_bytes, precision, backend)
    kept = score if return_scores else None
    return Selection(index, length, kept, every_row_has_a_key=keys.every_row_has_a_key)


def _check_top_k(top_k: int) -> None:
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise InputError(f"top_k={top_k!r} must be an integer of at least 1")


@operator("select_topk")
def _topk(scores: Tensor, start: Tensor, stop: Tensor, top_k: int, backend: str) -> tuple[Tensor, Tensor]:
    call = Call.of(scores, scores.shape[1], top_k=top_k)
    run = serve("select_topk", choose("select_topk", call, backend), topk_reference)
    return run(scores, start, stop, top_k)


@_topk.register_fake
def _(scores, start, stop, top_k, backend):
    rows = scores.shape[0]
    return scores.new_empty(rows, top_k, dtype=torch.int32), scores.new_empty(rows, dtype=torch.int32)


@operator("select_keys")
def _select(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    top_k: int,
    relu: bool,
    return_scores: bool,
    block_bytes: int,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rest = {"heads": q.shape[1], "width": q.shape[2], "top_k": top_k, "precision": precision}
    choice = choose("select_keys", Call.of((q, k), k.shape[0], (w,), **rest), backend)
    if precision == "bf16":
        run = serve("select_keys", choice, select_reference)
        return run(q, k, w, start, stop, top_k, relu, return_scores, block_bytes)
    run = serve("select_keys", choice, low_precision_reference)
    index, length, _ = run(q, k, w, start, stop, top_k, relu, False, block_bytes, precision)
    score = q.new_empty(q.shape[0], 0, dtype=wide_dtype(q, k, w))
    return index, length, selected_scores(q, k, w, index, relu) if return_scores else score


@_select.register_fake
def _(q, k, w, start, stop, top_k, relu, return_scores, block_bytes, precision, backend):
    rows = q.shape[0]
    score = q.new_empty(rows, top_k if return_scores else 0, dtype=wide_dtype(q, k, w))
    return q.new_empty(rows, top_k, dtype=torch.int32), q.new_empty(rows, dtype=torch.int32), score


def topk_reference(scores: Tensor, start: Tensor, stop: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(index, length), ranked in blocks of rows."""
    rows, keys = scores.shape
    index = torch.empty(rows, top_k, dtype=torch.int32, device=scores.device)
    length = torch.empty(rows, dtype=torch.int32, device=scores.device)
    columns = torch.arange(keys, dtype=torch.int32, device=scores.device)
    step = max(1, 2**28 // (_BYTES_PER_SCORE * max(keys, 1)))
    for first in range(0, rows, step):
        block = slice(first, first + step)
        hidden = ~KeyRange(start[block], stop[block]).mask(keys)
        index[block], length[block], _ = rank(scores[block].masked_fill(hidden, -torch.inf), columns, top_k)
    return index, length


class _Operands(NamedTuple):
    """Scores are `key_scale * sum_h w act(q . k)`. q [T, H, D], k [S, D], w [T, H], key_scale [S] or None for 1."""

    q: Tensor
    k: Tensor
    w: Tensor
    key_scale: Tensor | None = None

    def rows(self, part: slice) -> "_Operands":
        return self._replace(q=self.q[part], w=self.w[part])

    def scores(self, first: int, stop: int, relu: bool) -> Tensor:
        """[R, W] of keys first .. stop - 1; first lies on the grid of tiles."""
        scores_RW = score_block(self.q, self.k, self.w, first, stop, relu)
        return scores_RW if self.key_scale is None else scores_RW.mul_(self.key_scale[first:stop])


def select_reference(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    top_k: int,
    relu: bool,
    return_scores: bool,
    block_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(index, length, score), one row of tiles at a time."""
    return _select_tiles(_Operands(q, k, w), start, stop, top_k, relu, return_scores, block_bytes)


def low_precision_reference(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    top_k: int,
    relu: bool,
    return_scores: bool,
    block_bytes: int,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`select_reference` of operands rounded to `precision`, and the scores of these: the operator gives others."""
    wide = wide_dtype(q, k, w)
    if precision == "mxfp8":
        operands = _Operands(from_mxfp8(*to_mxfp8(q)), from_mxfp8(*to_mxfp8(k)), w.to(wide))
    else:
        (q8, q_scale), (k8, k_scale) = to_e4m3(q), to_e4m3(k)
        operands = _Operands(q8.float(), k8.float(), w.to(wide) * q_scale.to(wide), k_scale.to(wide))
    return _select_tiles(operands, start, stop, top_k, relu, return_scores, block_bytes)


def _select_tiles(
    operands: _Operands,
    start: Tensor,
    stop: Tensor,
    top_k: int,
    relu: bool,
    return_scores: bool,
    block_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, w, _ = operands
    wide, device, rows = wide_dtype(q, k, w), q.device, q.shape[0]
    index = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    length = torch.empty(rows, dtype=torch.int32, device=device)
    score = torch.empty(rows, top_k if return_scores else 0, dtype=wide, device=device)
    tile_rows, tile_keys = tile_shape(device)
    columns = block_bytes // (_BYTES_PER_SCORE * wide.itemsize // 4 * tile_rows) - top_k
    columns = max(columns // tile_keys, 1) * tile_keys
    host_start, host_stop = start.cpu(), stop.cpu()
    for block in range(0, rows, tile_rows):
        part = slice(block, block + tile_rows)
        ranges = KeyRange(start[part], stop[part])
        first_key, stop_key = span(host_start[part], host_stop[part], k.shape[0])
        first_key -= first_key % tile_keys
        runs = range(first_key, stop_key, columns)
        picked = _select_rows(operands.rows(part), ranges, runs, stop_key, top_k, relu)
        index[part], length[part] = picked[:2]
        if return_scores:
            score[part] = picked[2]
    return index, length, score


def _select_rows(
    operands: _Operands, ranges: KeyRange, runs: range, stop_key: int, top_k: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(index, length, score) of one block of rows; `runs` are the first columns of the runs that are ranked in turn."""
    q, k, w, _ = operands
    wide = wide_dtype(q, k, w)
    index = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    length = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    score = torch.full((q.shape[0], top_k), -torch.inf, dtype=wide, device=q.device)
    for first in runs:
        stop = min(first + runs.step, stop_key)
        scores_RW = operands.scores(first, stop, relu)
        columns_W = torch.arange(first, stop, dtype=torch.int32, device=q.device)
        hidden_RW = (columns_W < ranges.start[:, None]) | (columns_W >= ranges.stop[:, None])
        scores_RW.masked_fill_(hidden_RW, -torch.inf)
        columns_RW = columns_W.expand_as(scores_RW)
        if first != runs.start:  # what was kept so far stands left of the new columns: still ascending
            scores_RW = torch.cat([score, scores_RW], dim=1)
            columns_RW = torch.cat([index, columns_RW], dim=1)
        index, length, score = rank(scores_RW, columns_RW, top_k)
    return index, length, score
