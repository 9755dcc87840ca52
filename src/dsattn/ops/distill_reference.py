"""The plain-torch reference of the indexer's loss: one pass for the value, one for the gradient, block by block.

Nothing of size [T, S] or [T, H, S] is ever whole. Letters as in `ops.distill`, but R rows and W keys of a block. Where
ranks share rows out, attention's operands and what rows read are of all ranks' rows, and so are blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsattn.backends import HeadRanks
from dsattn.keys import KeyRange
from dsattn.ops import softmax
from dsattn.ops.blocks import add_rows_, row_blocks
from dsattn.ops.gathered import gather, gather_index, used_slots, with_zero_row
from dsattn.ops.indexer import shared_key_gradients, wide_dtype
from dsattn.ops.ranged import by_group, range_blocks
from dsattn.selection import Inverse


@dataclass(frozen=True)
class _Inputs:
    """What the value and the gradient are made from, named as in `indexer_kl`. ranks: who sums the target."""

    q_i: Tensor
    k_i: Tensor
    w: Tensor
    q: Tensor
    kv: Tensor
    lse: Tensor
    index: Tensor | None
    keys: KeyRange
    real: Tensor
    scale: float
    relu: bool
    ranks: HeadRanks
    target: Tensor | None = None

    @property
    def wide(self) -> torch.dtype:
        return wide_dtype(self.q_i, self.k_i, self.w, self.q, self.kv)


@dataclass(frozen=True)
class _Tile:
    """Some keys of a block of my rows.

    rows: the block. q: [R, H_I, D], w: [R, H_I], zero where a row is not live. dot: [H_I, R, W] products q . k.
    score: [R, W], -inf where not read. target: [R, W], summed over heads, not normalised, 0 where not read.
    keys: a slice of shared keys, or each row's own [R, W] key rows with S in empty slots. k: [W, D] or [R, W, D].
    """

    rows: slice
    q: Tensor
    w: Tensor
    dot: Tensor
    score: Tensor
    target: Tensor
    keys: slice | Tensor
    k: Tensor


def forward_reference(
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index: Tensor | None,
    length: Tensor | None,
    keys: KeyRange,
    real: Tensor,
    divisor: Tensor,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, log-sum-exp of the scores [2, T], mass of the target before normalisation [T], dKL/dI [T, K]).

    The last is softmax(I) - target of the selected keys, 0 in empty slots and in rows without mass; [T, 0] where all
    keys are read, which the backward meets again. target: the sum of the heads' probabilities over the selected keys, a
    row for each of attention's, where somebody has it already; q, kv and lse are not read then. Summed over ranks all
    the same.

    KL = sum T log T - sum T I + lse(I) with T = target / mass, accumulated over runs of keys with I taken relative to
    a running maximum, so that large scores cancel before they are rounded. For the same reason the log-sum-exp stays
    in two parts: the maximum, and the log of the sum of exponentials below it.
    """
    inputs = _Inputs(q_i, k_i, w, q, kv, lse, index, keys, real, scale, relu, ranks, target)
    total, mass, entropy, cross = (q_i.new_zeros(q_i.shape[0], dtype=inputs.wide) for _ in range(4))
    peak = torch.full_like(total, -torch.inf)
    dscore = total.new_zeros(len(total), 0 if index is None else index.shape[1])
    for tile in _tiles(inputs):
        part = tile.rows
        top = torch.maximum(peak[part], tile.score.amax(1))
        anchor = torch.where(top.isfinite(), top, 0.0)
        lifted = torch.where(peak[part].isfinite(), peak[part] - anchor, 0.0)
        relative = tile.score.sub_(anchor[:, None])
        cross[part] += lifted * mass[part] + torch.where(tile.target > 0, tile.target * relative, 0.0).sum(1)
        mass[part] += tile.target.sum(1)
        entropy[part] += torch.xlogy(tile.target, tile.target).sum(1)
        total[part] = total[part] * lifted.exp() + relative.exp().sum(1)
        peak[part] = top
        if isinstance(tile.keys, Tensor):  # such a tile is all that its rows read
            whole = _dscore(relative, total[part].log(), tile.target, mass[part])
            dscore[part, : whole.shape[1]] = whole.masked_fill_(tile.keys == len(k_i), 0)
    rest = total.log()
    kl = (entropy - cross) / mass - mass.log() + rest
    live = ranks.own(real) & (mass != 0)
    score_lse = torch.stack([torch.where(peak.isfinite(), peak, 0.0), rest])
    return torch.where(live, kl, 0.0).sum() / divisor, score_lse, mass, dscore


def attention_shares(q: Tensor, kv: Tensor, index: Tensor, lse: Tensor, scale: float) -> Tensor:
    """sum_h exp(scale q_h . k - lse_h) of the selected keys: [T, K], 0 in empty slots. kv: [S, C] or [S, G, C].

    fp32, or fp64 where an operand is.
    """
    wide = wide_dtype(q, kv)
    shares_TK = q.new_zeros(index.shape, dtype=wide)
    index = used_slots(index, len(kv))
    attention_SC = with_zero_row(kv.flatten(1), wide)
    per_key = attention_SC.shape[1] + 3 * q.shape[1]
    for rows in row_blocks(len(q), wide.itemsize * index.shape[1] * per_key, index.device):
        read_RK = index[rows] >= 0
        k_RKGC = gather(attention_SC, gather_index(index[rows], len(kv))).unflatten(-1, (-1, q.shape[2]))
        q_RHC = q[rows].to(wide).masked_fill(~read_RK.any(1)[:, None, None], 0)  # 0 * NaN must not be met
        target_RK = _target(q_RHC, k_RKGC, lse[rows].to(wide), scale, False)
        shares_TK[rows, : index.shape[1]] = target_RK.masked_fill(~read_RK, 0)
    return shares_TK


def backward_reference(
    row_scale: Tensor,
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index: Tensor | None,
    length: Tensor | None,
    keys: KeyRange,
    real: Tensor,
    score_lse: Tensor,
    mass: Tensor,
    dscore: Tensor,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    deterministic: bool,
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_i, dk_i, dw), given dL/dKL_t as row_scale [T]; dk_i is summed in fp32 (fp64 for fp64 inputs).

    Of selected keys the forward's dscore tells all; for ranges the target is made again. inverse: as in `sparse_mla`.
    """
    inputs = _Inputs(q_i, k_i, w, q, kv, lse, index, keys, real, scale, relu, ranks)
    wide = inputs.wide
    dq, dw = q_i.new_zeros(q_i.shape, dtype=wide), w.new_zeros(w.shape, dtype=wide)
    dk = k_i.new_zeros(k_i.shape[0] + 1, k_i.shape[1], dtype=wide)  # the last row collects empty slots' zeros
    row_scale = torch.where(mass != 0, row_scale, 0.0)[:, None]
    for tile in _tiles(inputs, with_target=index is None):
        part = tile.rows
        if index is None:
            relative_RW = tile.score.sub_(score_lse[0, part, None])
            dscore_RW = _dscore(relative_RW, score_lse[1, part], tile.target, mass[part])
        else:
            dscore_RW = dscore[part, : tile.score.shape[1]]
        dscore_RW = torch.where(row_scale[part] == 0, 0.0, dscore_RW * row_scale[part])
        if isinstance(tile.keys, slice):
            dq_tile, dk_tile, dw_tile = shared_key_gradients(tile.q, tile.k, tile.w, tile.dot, dscore_RW, relu)
            dk[tile.keys] += dk_tile
        else:
            dq_tile, dk_tile, dw_tile = _own_key_gradients(tile, dscore_RW, relu)
            add_rows_(dk, tile.keys, dk_tile, deterministic)
        dq[part] += dq_tile
        dw[part] += dw_tile
    return dq.to(q_i.dtype), dk[:-1].to(k_i.dtype), dw.to(w.dtype)


def _dscore(relative_RW: Tensor, rest_R: Tensor, target_RW: Tensor, mass_R: Tensor) -> Tensor:
    """dKL/dI = softmax(I) - target / mass, 0 in rows without mass. relative: I less its maximum, taken over.

    rest: log of the sum of exponentials of relative.
    """
    dscore_RW = softmax.probabilities(relative_RW, rest_R) - target_RW / mass_R[:, None]
    return dscore_RW.masked_fill_((mass_R == 0)[:, None], 0)


def _own_key_gradients(tile: _Tile, dscore_RK: Tensor, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [R, H_I, D], dk [R, K, D], dw [R, H_I]) where each row has keys of its own."""
    dot_RHK = tile.dot.transpose(0, 1)
    active_RHK = dot_RHK.relu() if relu else dot_RHK
    dw_RH = torch.einsum("rk,rhk->rh", dscore_RK, active_RHK)
    ddot_RHK = dscore_RK[:, None] * tile.w[:, :, None]
    if relu:
        ddot_RHK = torch.where(dot_RHK > 0, ddot_RHK, 0.0)
    return torch.bmm(ddot_RHK, tile.k), torch.bmm(ddot_RHK.transpose(1, 2), tile.q), dw_RH


def _tiles(x: _Inputs, *, with_target: bool = True) -> Iterator[_Tile]:
    """Blocks of my rows, each with its runs of shared keys, or with its own selected keys at once.

    with_target: selected keys only may do without; their target is 0 then.
    """
    cuts = _shared(x) if x.index is None else _selected(x, x.index, with_target and x.target is None)
    for rows, where, k_tile, k_attention, read in cuts:
        mine, read_RW = x.ranks.own_rows(rows), None if read is None else x.ranks.own(read)
        q_RHD, w_RH = x.q_i[mine].to(x.wide), x.w[mine].to(x.wide)
        if read_RW is not None:  # 0 * NaN must not be met
            live_R = read_RW.any(1)
            q_RHD, w_RH = q_RHD.masked_fill(~live_R[:, None, None], 0), w_RH.masked_fill(~live_R[:, None], 0)
        shared = isinstance(where, slice)
        dot_HRW = torch.einsum("rhd,wd->hrw" if shared else "rhd,rwd->hrw", q_RHD, k_tile)
        score_RW = torch.einsum("hrw,rh->rw", dot_HRW.relu() if x.relu else dot_HRW, w_RH)
        target_RW = torch.zeros_like(score_RW)
        if with_target:
            target_RW = _summed_target(x, rows, k_attention, read, score_RW.shape[1], shared)
        if read_RW is not None:
            score_RW.masked_fill_(~read_RW, -torch.inf)
        yield _Tile(mine, q_RHD, w_RH, dot_HRW, score_RW, target_RW, where, k_tile)


def _summed_target(
    x: _Inputs, rows: slice, k_attention: Tensor, read: Tensor | None, columns: int, shared: bool
) -> Tensor:
    """The target of my rows of a block, over the heads of every rank; 0 where not read."""
    if x.target is not None:
        target = x.target[rows, :columns].to(x.wide, copy=True)
    else:
        target = _target(x.q[rows].to(x.wide), k_attention, x.lse[rows].to(x.wide), x.scale, shared)
    if read is not None:
        target.masked_fill_(~read, 0)
    return x.ranks.total(x.ranks.deal(target))


# What _shared and _selected yield: rows, my rows' keys, the indexer's vectors of these, the attention's of all rows'
# keys, and which row reads what, None where every row reads every key. Rows that do not count read nothing: what they
# and the keys of their documents hold may be NaN.
_Cut = tuple[slice, slice | Tensor, Tensor, Tensor, Tensor | None]


def _shared(x: _Inputs) -> Iterator[_Cut]:
    """Runs of keys: k [W, D], attention keys [G, W, C], read [R, W]."""
    heads = x.q.shape[1] + 3 * x.q_i.shape[1]  # q . k once for attention; thrice, with its relu and gradient, here
    keys = KeyRange(x.keys.start, torch.where(x.real, x.keys.stop, x.keys.start))
    for block in range_blocks(keys, x.k_i.shape[0], x.wide.itemsize * heads, x.ranks.shards):
        for run, read_RW in block.runs():
            k_WD = x.k_i[run].to(x.wide)
            if read_RW is not None:
                k_WD = k_WD.masked_fill(~x.ranks.own(read_RW).any(0)[:, None], 0)
            k_WGC = x.kv[run].reshape(run.stop - run.start, -1, x.q.shape[2])
            yield block.rows, run, k_WD, k_WGC.transpose(0, 1).to(x.wide), read_RW


def _selected(x: _Inputs, index: Tensor, with_target: bool) -> Iterator[_Cut]:
    """Key rows of their own [R, K]: k [R, K, D], attention keys [R, K, G, C] (G = 0 without target), read [R, K]."""
    keys, width = x.k_i.shape[0], x.q.shape[2]
    index = used_slots(index, keys)
    if not index.shape[1]:  # nothing is read, and there is no maximum of nothing
        return
    index = index.masked_fill(~x.real[:, None], -1)
    attention = x.kv.flatten(1) if with_target else x.kv.flatten(1)[:, :0]
    k_SD, attention_SC = with_zero_row(x.k_i, x.wide), with_zero_row(attention, x.wide)
    per_key = 2 * k_SD.shape[1] + attention_SC.shape[1] + 3 * (x.q.shape[1] + x.q_i.shape[1])
    cost = x.wide.itemsize * index.shape[1] * per_key
    for rows in row_blocks(index.shape[0], cost, index.device, x.ranks.shards):
        where = gather_index(index[rows], keys)
        k_attention = gather(attention_SC, where)
        k_RKGC = k_attention.view(*where.shape, attention_SC.shape[1] // width, width)
        where_RK = x.ranks.own(where)
        yield rows, where_RK, gather(k_SD, where_RK), k_RKGC, index[rows] >= 0


def _target(q_RHC: Tensor, k: Tensor, lse_RH: Tensor, scale: float, shared: bool) -> Tensor:
    """sum_h exp(scale q . k - lse): [R, W]. k: [G, W, C] for shared keys, else [R, W, G, C]."""
    rows, heads, width = q_RHC.shape
    if shared:
        groups = k.shape[0]
        logits_GRW = torch.bmm(by_group(q_RHC, groups), k.transpose(1, 2)).mul_(scale)
        p_GRW = softmax.probabilities(logits_GRW, by_group(lse_RH, groups))
        return p_GRW.view(groups, rows, heads // groups, -1).sum((0, 2))
    q_RGJC = q_RHC.view(rows, k.shape[2], -1, width)
    logits_RGJW = torch.einsum("rgjc,rwgc->rgjw", q_RGJC, k).mul_(scale)
    return softmax.probabilities(logits_RGJW, lse_RH.view(logits_RGJW.shape[:3])).sum((1, 2))
