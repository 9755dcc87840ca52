"""Lightning-indexer scores: I[t, s] = sum_h w[t, h] * act(q[t, h] . k[s]), act = relu or identity.

Source: DeepSeek-V3.2, arXiv 2512.02556, eq. 1. Both scale factors already sit in w.

A score is computed from its row and key alone, in tiles of one fixed shape (zero-padded, never ragged), because matrix
products change bits with their shape: so scores have the same bits whatever shares the batch or the block.

Letters: T query rows, S keys, H indexer heads, D indexer width.
"""

import torch
from torch import Tensor

from dsattn.backends import Call, choose
from dsattn.errors import InputError
from dsattn.keys import KeyRange
from dsattn.ops.operator import operator


def indexer_scores(q: Tensor, k: Tensor, w: Tensor, keys: KeyRange, *, relu: bool = True) -> Tensor:
    """The whole score matrix: for small sizes, as the oracle of everything that never builds it.

    q: [T, H, D], k: [S, D], w: [T, H] floating point, keys: KeyRange of T rows.
    Returns [T, S] fp32 (fp64 for fp64 inputs), -inf where the row may not read the key. Differentiable in q, k, w.
    Raises InputError on shapes that do not fit.
    """
    check_indexer(q, k, w, keys)
    return _scores(q, k, w, keys.start, keys.stop, relu)


def check_indexer(q: Tensor, k: Tensor, w: Tensor, keys: KeyRange, mark: str = "") -> None:
    """Raise InputError where indexer operands do not fit together. mark: the end of the names of q and k."""
    check_scored(q, k, w, mark)
    check_keys(keys, f"q{mark}", q)


def check_scored(q: Tensor, k: Tensor, w: Tensor, mark: str = "") -> None:
    """The same of what scores are made from, whatever rows read."""
    if q.dim() != 3:
        raise InputError(f"q{mark} must be [T, H_I, D], got {list(q.shape)}; fold a batch into T")
    rows, heads, width = q.shape
    if k.dim() != 2 or k.shape[1] != width:
        raise InputError(f"k{mark} must be [S, {width}] to meet q{mark} {list(q.shape)}, got {list(k.shape)}")
    if w.shape != (rows, heads):
        raise InputError(f"w must be [{rows}, {heads}] to meet q{mark} {list(q.shape)}, got {list(w.shape)}")
    check_floating(**{f"q{mark}": q, f"k{mark}": k, "w": w})


def check_floating(**operands: Tensor) -> None:
    """Raise InputError where an operand is not floating point: its products would be cut to integers."""
    for name, value in operands.items():
        if not value.is_floating_point():
            raise InputError(f"{name} must be floating point, got {value.dtype}")


def check_keys(keys: KeyRange, name: str, operand: Tensor) -> None:
    """Raise InputError where `keys` are no ranges, have not a row for each of the operand, or live elsewhere."""
    if not isinstance(keys, KeyRange):
        raise InputError(f"keys must be a KeyRange, got {type(keys).__name__}; that of a layout is layout.keys")
    if keys.num_rows != operand.shape[0]:
        raise InputError(f"keys has {keys.num_rows} rows, {name} has {operand.shape[0]}")
    if keys.start.device != operand.device:
        raise InputError(f"keys is on {keys.start.device}, {name} on {operand.device}; use layout.to({name}.device)")


def wide_dtype(*operands: Tensor) -> torch.dtype:
    """fp32, or fp64 where any operand is fp64."""
    return torch.float64 if any(x.dtype == torch.float64 for x in operands) else torch.float32


def tile_shape(device: torch.device) -> tuple[int, int]:
    """Rows and keys of the one tile shape on a device: cache-sized on CPU, large enough to fill a GPU."""
    return (128, 512) if device.type == "cpu" else (1024, 4096)


def score_block(q: Tensor, k: Tensor, w: Tensor, first_key: int, stop_key: int, relu: bool) -> Tensor:
    """Scores of rows [R] against keys first_key .. stop_key - 1, unmasked: [R, stop_key - first_key].

    Rows are tiled from 0, keys on the grid of the tile width, so `first_key` must lie on it.
    """
    tile_rows, tile_keys = tile_shape(q.device)
    wide = wide_dtype(q, k, w)
    rows, heads, width = q.shape
    scores = torch.empty(rows, stop_key - first_key, dtype=wide, device=q.device)
    for row in range(0, rows, tile_rows):
        count = min(tile_rows, rows - row)
        q_tile = q.new_zeros(heads, tile_rows, width, dtype=wide)
        q_tile[:, :count] = q[row : row + count].transpose(0, 1)
        w_tile = w.new_zeros(heads, tile_rows, 1, dtype=wide)
        w_tile[:, :count, 0] = w[row : row + count].t()
        for key in range(first_key, stop_key, tile_keys):
            keys = min(tile_keys, stop_key - key)
            k_tile = k.new_zeros(width, tile_keys, dtype=wide)
            k_tile[:, :keys] = k[key : key + keys].t()
            tile = _score_tile(q_tile, k_tile, w_tile, relu)
            scores[row : row + count, key - first_key : key - first_key + keys] = tile[:count, :keys]
    return scores


def _score_tile(q_HRD: Tensor, k_DS: Tensor, w_HR1: Tensor, relu: bool) -> Tensor:
    """One tile. Heads are added one after the other: elementwise, so a place in the tile cannot change its bits."""
    total_RS = q_HRD.new_zeros(q_HRD.shape[1], k_DS.shape[1])
    for q_RD, w_R1 in zip(q_HRD, w_HR1, strict=True):
        dot_RS = q_RD @ k_DS
        total_RS.addcmul_(dot_RS.relu_() if relu else dot_RS, w_R1)
    return total_RS


def shared_key_gradients(
    q_THD: Tensor, k_SD: Tensor, w_TH: Tensor, dot_HTS: Tensor, grad_TS: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dw) of scores whose rows share the keys, given dot = q . k and dL/dI. Overwrites dot."""
    active_HTS = dot_HTS.relu() if relu else dot_HTS
    dw_TH = torch.einsum("ts,hts->th", grad_TS, active_HTS)
    ddot_HTS = torch.where(dot_HTS > 0, grad_TS, 0.0) if relu else grad_TS.expand_as(dot_HTS)
    ddot_HTS = torch.mul(ddot_HTS, w_TH.t()[:, :, None], out=dot_HTS)
    dq_THD = torch.einsum("hts,sd->thd", ddot_HTS, k_SD)
    dk_SD = torch.einsum("hts,thd->sd", ddot_HTS, q_THD)
    return dq_THD, dk_SD, dw_TH


@operator("indexer_scores")
def _scores(q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, relu: bool) -> Tensor:
    choose("indexer_scores.forward", Call.of(q, k.shape[0], heads=q.shape[1], width=q.shape[2]))
    scores = score_block(q, k, w, 0, k.shape[0], relu)
    return scores.masked_fill_(~KeyRange(start, stop).mask(k.shape[0]), -torch.inf)


@_scores.register_fake
def _(q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, relu: bool) -> Tensor:
    return q.new_empty(q.shape[0], k.shape[0], dtype=wide_dtype(q, k, w))


@operator("indexer_scores_backward")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    choose("indexer_scores.backward", Call.of(q, k.shape[0], heads=q.shape[1], width=q.shape[2]))
    wide = wide_dtype(q, k, w)
    visible_TS = KeyRange(start, stop).mask(k.shape[0])
    # What no row reads, and rows that read nothing, may hold NaN: 0 * NaN must not be met.
    read_S1, reads_T1 = visible_TS.any(0)[:, None], visible_TS.any(1)[:, None]
    q_THD, w_TH = q.to(wide).masked_fill(~reads_T1[..., None], 0), w.to(wide).masked_fill(~reads_T1, 0)
    k_SD = k.to(wide).masked_fill(~read_S1, 0)
    dot_HTS = torch.einsum("thd,sd->hts", q_THD, k_SD)
    grads = shared_key_gradients(q_THD, k_SD, w_TH, dot_HTS, grad.to(wide).masked_fill(~visible_TS, 0), relu)
    dq, dk, dw = (g.to(x.dtype).contiguous() for g, x in zip(grads, (q, k, w), strict=True))
    return dq, dk, dw


@_backward.register_fake
def _(grad, q, k, w, start, stop, relu):
    dq, dk, dw = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, w))
    return dq, dk, dw


def _setup(ctx, inputs, output) -> None:
    *operands, ctx.relu = inputs
    ctx.save_for_backward(*operands)


def _autograd(ctx, grad):
    return *_backward(grad, *ctx.saved_tensors, ctx.relu), None, None, None


_scores.register_autograd(_autograd, setup_context=_setup)
