"""Selection: the top-k keys of every query row, exactly, without a [T, S] buffer.

Scores as in `ops.indexer`; ranking as in `selection.rank`: by value, ties to the smaller key, never NaN or -inf.
A block of rows is scored and ranked; where even its columns are too many, they are ranked in runs whose best are
carried on, which changes nothing: the rule is a total order, so the best of the best are the best.

Letters: T query rows, S keys, H indexer heads, D indexer width, K kept keys, R rows and W columns of a block.
"""

from typing import Literal

import torch
from torch import Tensor

from dsattn.backends import Call, choose
from dsattn.errors import BackendUnavailable, InputError
from dsattn.keys import KeyRange
from dsattn.ops.blocks import span
from dsattn.ops.first_use import serve
from dsattn.ops.indexer import check_indexer, score_block, tile_shape, wide_dtype
from dsattn.ops.operator import operator
from dsattn.selection import Selection, rank

_BYTES_PER_SCORE = 32  # a score with what ranking it keeps beside it: a copy, masks, a running count, an int64 slot


def select_topk(scores: Tensor, keys: KeyRange, top_k: int, *, backend: str = "auto") -> Selection:
    """The ranking rule on given scores.

    scores: [T, S] floating point; only those inside `keys` are looked at. top_k: K >= 1.
    Returns a Selection of width K, also where fewer keys exist.
    Raises InputError on shapes that do not fit, BackendUnavailable where `backend` cannot serve.
    """
    if scores.dim() != 2 or not scores.is_floating_point():
        raise InputError(f"scores must be floating point [T, S], got {scores.dtype} {list(scores.shape)}")
    if keys.num_rows != scores.shape[0]:
        raise InputError(f"keys has {keys.num_rows} rows, scores has {scores.shape[0]}")
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
    precision: Literal["bf16"] = "bf16",
    return_scores: bool = False,
    block_bytes: int = 2**30,
    backend: str = "auto",
) -> Selection:
    """The K best keys of every row by indexer score.

    q: [T, H, D], k: [S, D], w: [T, H] floating point; keys: KeyRange of T rows; top_k: K >= 1.
    precision: `bf16` multiplies operands as they are given, fp32 accumulation (fp64 for fp64 inputs).
    return_scores: also give the selected scores, fp32 (fp64 for fp64 inputs).
    block_bytes: most bytes of scores alive at once, with what ranking keeps beside them; one tile of `tile_shape` plus
    K candidates a row is the least. The same bits for any value, and whatever other rows share the call.
    Not differentiable: an index has no gradient, and the indexer learns from `indexer_kl` alone.
    Raises InputError on shapes that do not fit, BackendUnavailable where `precision` or `backend` cannot be had.
    """
    check_indexer(q, k, w, keys)
    _check_top_k(top_k)
    if precision != "bf16":
        raise BackendUnavailable(f"select_keys: precision={precision!r} has no backend here; there is 'bf16'")
    if block_bytes < 1:
        raise InputError(f"block_bytes={block_bytes} must be positive")
    operands = (q.detach(), k.detach(), w.detach(), keys.start, keys.stop)
    index, length, score = _select(*operands, top_k, relu, return_scores, block_bytes, backend)
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    call = Call.of((q, k), k.shape[0], heads=q.shape[1], width=q.shape[2], top_k=top_k)
    run = serve("select_keys", choose("select_keys", call, backend), select_reference)
    return run(q, k, w, start, stop, top_k, relu, return_scores, block_bytes)


@_select.register_fake
def _(q, k, w, start, stop, top_k, relu, return_scores, block_bytes, backend):
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
        picked = _select_rows(q[part], k, w[part], ranges, range(first_key, stop_key, columns), stop_key, top_k, relu)
        index[part], length[part] = picked[:2]
        if return_scores:
            score[part] = picked[2]
    return index, length, score


def _select_rows(
    q: Tensor, k: Tensor, w: Tensor, ranges: KeyRange, runs: range, stop_key: int, top_k: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(index, length, score) of one block of rows; `runs` are the first columns of the runs that are ranked in turn."""
    wide = wide_dtype(q, k, w)
    index = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    length = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    score = torch.full((q.shape[0], top_k), -torch.inf, dtype=wide, device=q.device)
    for first in runs:
        stop = min(first + runs.step, stop_key)
        scores_RW = score_block(q, k, w, first, stop, relu)
        columns_W = torch.arange(first, stop, dtype=torch.int32, device=q.device)
        hidden_RW = (columns_W < ranges.start[:, None]) | (columns_W >= ranges.stop[:, None])
        scores_RW.masked_fill_(hidden_RW, -torch.inf)
        columns_RW = columns_W.expand_as(scores_RW)
        if first != runs.start:  # what was kept so far stands left of the new columns: still ascending
            scores_RW = torch.cat([score, scores_RW], dim=1)
            columns_RW = torch.cat([index, columns_RW], dim=1)
        index, length, score = rank(scores_RW, columns_RW, top_k)
    return index, length, score
