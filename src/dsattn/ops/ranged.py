"""Attention to ranges of shared keys: the plain-torch reference under dense_mla and dense_gqa.

Streams blocks of rows over runs of keys with a running softmax, so no [T, S] or [T, H, S] tensor exists.
Letters: T query rows, S keys, H heads, G groups, J = H / G, D key width, V value width, R rows of a block, W keys of a
run. Values are a tensor of their own, or the leading V channels of the keys (absorbed MLA, G = 1).

Numbers that are not finite, in a row or in a key, make NaN of what reads them and of nothing else, as if each row had
been computed alone. They enter through the logits, which are masked last; every product that mixes rows and keys after
that takes copies in which they are 0, since 0 * NaN would carry them over.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsattn.keys import KeyRange
from dsattn.ops import softmax
from dsattn.ops.blocks import key_runs, row_blocks, span
from dsattn.ops.indexer import wide_dtype


@dataclass(frozen=True)
class RangeBlock:
    """A block of rows. read_by_any, read_by_all: first key and one past the last, host integers."""

    rows: slice
    keys: KeyRange
    read_by_any: tuple[int, int]
    read_by_all: tuple[int, int]

    def runs(self) -> Iterator[tuple[slice, Tensor | None]]:
        """Runs of keys, each with who may read what: bool [R, W], or None where every row may read every key."""
        device, step = self.keys.start.device, key_runs(self.keys.start.device)
        for first in range(*self.read_by_any, step):
            run = slice(first, min(first + step, self.read_by_any[1]))
            if self.read_by_all[0] <= run.start and run.stop <= self.read_by_all[1]:
                yield run, None
            else:
                column_W = torch.arange(run.start, run.stop, device=device)
                yield run, (column_W >= self.keys.start[:, None]) & (column_W < self.keys.stop[:, None])


def range_blocks(keys: KeyRange, num_keys: int, bytes_per_pair: int, multiple: int = 1) -> Iterator[RangeBlock]:
    """Blocks of rows, ranges cut to the keys there are. One device sync. bytes_per_pair: of a row and a key.

    multiple: see `row_blocks`.
    """
    device = keys.start.device
    start, stop = keys.start.clamp(min=0), keys.stop.clamp(max=num_keys)
    on_host = torch.stack([start, stop]).cpu()
    bytes_per_row = bytes_per_pair * min(max(num_keys, 1), key_runs(device))
    for rows in row_blocks(keys.num_rows, bytes_per_row, device, multiple):
        start_R, stop_R = on_host[:, rows]
        common = (int(start_R.max()), int(stop_R.min()))
        yield RangeBlock(rows, KeyRange(start[rows], stop[rows]), span(start_R, stop_R, num_keys), common)


def forward_reference(
    q: Tensor, k: Tensor, v: Tensor | None, keys: KeyRange, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """q: [T, H, D], k: [S, G, D], v: [S, G, V] or None, sink: [H] or None.

    Returns out [T, H, V] in q's dtype and lse [T, H] fp32 (fp64 for fp64 inputs).
    """
    wide, groups = wide_dtype(q, k), k.shape[1]
    shared = _Keys.of(k, v, value_dim, wide)
    out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(*q.shape[:2], dtype=wide, device=q.device)
    for block in range_blocks(keys, k.shape[0], 3 * wide.itemsize * q.shape[1]):
        q_GRD = by_group(q[block.rows].to(wide), groups)
        peak_GR1 = q_GRD.new_full((*q_GRD.shape[:2], 1), -torch.inf)
        total_GR1 = torch.zeros_like(peak_GR1)
        out_GRV = q_GRD.new_zeros(*q_GRD.shape[:2], value_dim)
        for run, _, logits_GRW in _tiles(q_GRD, shared, block, scale):
            top_GR1 = torch.maximum(peak_GR1, logits_GRW.amax(-1, keepdim=True))
            kept_GR1 = softmax.probabilities(peak_GR1, top_GR1.squeeze(-1))
            p_GRW = softmax.probabilities(logits_GRW, top_GR1.squeeze(-1))
            total_GR1.mul_(kept_GR1).add_(p_GRW.sum(-1, keepdim=True))
            out_GRV.mul_(kept_GR1).baddbmm_(p_GRW, shared.v[:, run])
            peak_GR1 = top_GR1
        lse[block.rows] = lse_RH = from_group((peak_GR1 + total_GR1.log()).squeeze(-1), lse[block.rows])
        out_GRV /= torch.where(total_GR1 == 0, 1.0, total_GR1)
        if sink is not None:
            out_GRV *= by_group(softmax.keys_share(lse_RH, sink.to(wide)), groups).unsqueeze(-1)
        out[block.rows] = from_group(out_GRV, out[block.rows])
    return out, lse


def backward_reference(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keys: KeyRange,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv); dv is None where the values are the keys' leading channels: dk then holds both."""
    wide, groups, value_dim = lse.dtype, k.shape[1], out.shape[-1]
    shared = _Keys.of(k, v, value_dim, wide)
    dk_GSD = torch.zeros_like(shared.k)
    dv_GSV = dk_GSD[..., :value_dim] if v is None else torch.zeros_like(shared.v)
    denominator_TH = softmax.lse_with_sink(lse, sink)
    delta_TH = softmax.row_dot(out, grad_out, wide)
    dq = torch.empty_like(q)
    for block in range_blocks(keys, k.shape[0], 3 * wide.itemsize * q.shape[1]):
        per_row = (q, grad_out, denominator_TH, delta_TH)
        q_GRD, grad_GRV, denominator_GR, delta_GR = (by_group(x[block.rows].to(wide), groups) for x in per_row)
        sound_GR = _finite(q_GRD) & _finite(grad_GRV) & delta_GR.isfinite() & ~denominator_GR.isnan()
        sound_GR1 = sound_GR.unsqueeze(-1)
        logits_q_GRD = torch.where(sound_GR1, q_GRD, torch.nan)
        scaled_q_GRD, grad_GRV = (torch.where(sound_GR1, x, 0.0) for x in (q_GRD * scale, grad_GRV))
        denominator_GR, delta_GR = (torch.where(sound_GR, x, 0.0) for x in (denominator_GR, delta_GR))
        dq_GRD = torch.zeros_like(q_GRD)
        for run, read_RW, logits_GRW in _tiles(logits_q_GRD, shared, block, scale):
            p_GRW = softmax.probabilities(logits_GRW, denominator_GR)
            ds_GRW = torch.baddbmm(-delta_GR.unsqueeze(-1), grad_GRV, shared.v[:, run].transpose(1, 2)).mul_(p_GRW)
            _fill_unread_(ds_GRW, read_RW, 0.0)  # grad . v may overflow, and inf * 0 must not be kept
            dq_GRD.baddbmm_(ds_GRW, shared.k[:, run], alpha=scale)
            dk_GSD[:, run].baddbmm_(ds_GRW.transpose(1, 2), scaled_q_GRD)
            dv_GSV[:, run].baddbmm_(p_GRW.transpose(1, 2), grad_GRV)
        dq[block.rows] = from_group(dq_GRD, dq[block.rows])
    dk = dk_GSD.transpose(0, 1).to(k.dtype).contiguous()
    return dq, dk, None if v is None else dv_GSV.transpose(0, 1).to(v.dtype).contiguous()


def by_group(x_RH: Tensor, groups: int) -> Tensor:
    """[R, H, ...] -> [G, R * J, ...]."""
    rows, heads, *rest = x_RH.shape
    grouped = x_RH.reshape(rows, groups, heads // groups, *rest).transpose(0, 1)
    return grouped.reshape(groups, rows * (heads // groups), *rest)


def from_group(x_GR: Tensor, like_RH: Tensor) -> Tensor:
    """[G, R * J, ...] -> [R, H, ...]."""
    rows, heads, *rest = like_RH.shape
    groups = x_GR.shape[0]
    return x_GR.reshape(groups, rows, heads // groups, *rest).transpose(0, 1).reshape(rows, heads, *rest)


@dataclass(frozen=True)
class _Keys:
    """k: [G, S, D], v: [G, S, V], 0 where not finite. poison: [G, 1, S], NaN where any of a key or value was not."""

    k: Tensor
    v: Tensor
    poison: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor | None, value_dim: int, wide: torch.dtype) -> "_Keys":
        finite_SG = _finite(k) if v is None else _finite(k) & _finite(v)
        k_GSD = _zero_where_not_finite(k, wide)
        v_GSV = k_GSD[..., :value_dim] if v is None else _zero_where_not_finite(v, wide)
        return cls(k_GSD, v_GSV, torch.where(finite_SG.t(), 0.0, torch.nan).to(wide).unsqueeze(1))


def _finite(x: Tensor) -> Tensor:
    return x.isfinite().all(-1)


def _zero_where_not_finite(x_SGD: Tensor, wide: torch.dtype) -> Tensor:
    return x_SGD.transpose(0, 1).to(wide).nan_to_num(0.0, 0.0, 0.0).contiguous()


def _tiles(
    q_GRD: Tensor, shared: _Keys, block: RangeBlock, scale: float
) -> Iterator[tuple[slice, Tensor | None, Tensor]]:
    """Runs of keys with who may read what, and the logits [G, R * J, W], -inf where a row may not."""
    for run, read_RW in block.runs():
        k_GDW = shared.k[:, run].transpose(1, 2)
        logits_GRW = torch.baddbmm(shared.poison[..., run], q_GRD, k_GDW, alpha=scale)
        _fill_unread_(logits_GRW, read_RW, -torch.inf)
        yield run, read_RW, logits_GRW


def _fill_unread_(x_GRW: Tensor, read_RW: Tensor | None, value: float) -> None:
    if read_RW is not None:
        by_row_GRJW = x_GRW.view(x_GRW.shape[0], read_RW.shape[0], -1, read_RW.shape[1])
        by_row_GRJW.masked_fill_(~read_RW[:, None], value)
