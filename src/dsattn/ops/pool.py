"""KPool: keys are pooled before they are scored, and a row selects whole pools.

    share[j, d] = softmax over j < P of gate[s + j, d] + ape[j, d]
    pooled[d]   = sum_j share[j, d] k[s + j, d]                        s: the pool's first key

A pool is P consecutive keys of one document, counted from its first real key, so padding on the left shifts nothing;
there are complete pools only. A row may select the pools whose last key it may read. The keys it may read beyond its
last complete pool, fewer than P, are its tail.

The pool that starts at key s stands in slot s // P. Pools do not overlap, so no two meet in one slot and the pools of a
document have consecutive slots: S // P slots hold any packing, and shapes never depend on it.

An index has no gradient, and a pool's score teaches no single key: nothing here is differentiable.
Source: glm5_next in Hugging Face transformers (GLM-5.3-Flash), whose padded batches this extends to packed documents.
Letters: T query rows, S keys, N = S // P pool slots, P keys of a pool, D indexer width, H indexer heads, K kept keys.
"""

import functools
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dsattn.backends import Call, choose
from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops.blocks import row_blocks
from dsattn.ops.indexer import check_indexer, wide_dtype
from dsattn.ops.operator import operator
from dsattn.quantize import from_e4m3, to_e4m3
from dsattn.selection import Selection, rank

Arithmetic = Literal["fp32", "hf"]
_TILE = (128, 512)  # rows and pools of the one shape in which scores of arithmetic "hf" are made


@dataclass(frozen=True)
class PooledKeys:
    """Pools as keys: what `select_keys` and `select_topk` need to select pools.

    keys: [N, D] in the dtype of the keys, zeros in slots that hold no pool of these rows.
    ranges: for each of T rows the slots of the pools it may select. Never certified: early rows see no complete pool.
    pool_size: P.
    """

    keys: Tensor
    ranges: KeyRange
    pool_size: int


def pool_keys(
    k: Tensor, gate: Tensor, ape: Tensor, layout: Layout, pool_size: int, *, arithmetic: Arithmetic = "fp32"
) -> PooledKeys:
    """One key for each complete pool of each document.

    k, gate: [S, D] floating point, in global key order: what is gathered over context-parallel ranks goes through
        `layout.key_order` first, the gates like the keys. ape: [P, D], added to the gates of a pool's P places.
    pool_size: P >= 1. With 1 a pool is a key.
    arithmetic: `fp32` pools in fp32 (fp64 for fp64 inputs), places one after the other, and rounds once, to k's dtype.
        `hf` rounds as Hugging Face's glm5_next: the softmax to k's dtype (NaN to 0), then the products, then the sum.
    A NaN in a pool makes its key NaN, so that it is never selected (but see `hf`).
    Raises InputError on shapes that do not fit; on the CPU also where ranges that share keys start at different keys
    (a sliding window): a document has one first key.
    """
    _check_pool_size(pool_size)
    if arithmetic not in get_args(Arithmetic):
        raise InputError(f"arithmetic={arithmetic!r} must be one of {', '.join(get_args(Arithmetic))}")
    if k.dim() != 2 or k.shape[0] != layout.num_keys:
        raise InputError(f"k must be [{layout.num_keys}, D] to meet the layout, got {list(k.shape)}")
    if gate.shape != k.shape:
        raise InputError(f"gate must be {list(k.shape)}, a logit for each number of k, got {list(gate.shape)}")
    if ape.shape != (pool_size, k.shape[1]):
        raise InputError(f"ape must be [{pool_size}, {k.shape[1]}] for pool_size={pool_size}, got {list(ape.shape)}")
    for name, value in (("k", k), ("gate", gate), ("ape", ape)):
        if not value.is_floating_point():
            raise InputError(f"{name} must be floating point, got {value.dtype}")
    operands = (k.detach(), gate.detach(), ape.detach(), layout.keys.start, layout.keys.stop)
    keys, start, stop = _pool(*operands, arithmetic == "hf")
    return PooledKeys(keys, KeyRange(start, stop), pool_size)


def select_pools_hf(q: Tensor, pooled: PooledKeys, w: Tensor, top_k: int, *, backend: str = "auto") -> Selection:
    """Select pools by scores in the arithmetic of Hugging Face's glm5_next: sum_h w[t, h] relu(D^-1/2 (q[t, h] . k)).

    Operands go to fp32 (fp64 for fp64 inputs) first, products are scaled before the ReLU, and a matrix product adds up
    the heads. That reference takes head weights to fp32 before it scales them: w is H^-1/2 weights_proj(x).float(),
    without D^-1/2. The ranking rule is ours: ties to the smaller pool, never NaN.
    q: [T, H, D], w: [T, H] floating point; top_k: pools to keep, at least 1. Scores of 128 rows are alive at once.
    Plain torch alone: raises BackendUnavailable for other backends, and under `strict` on a GPU.
    """
    check_indexer(q, pooled.keys, w, pooled.ranges)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise InputError(f"top_k={top_k!r} must be an integer of at least 1")
    operands = (q.detach(), pooled.keys, w.detach(), pooled.ranges.start, pooled.ranges.stop)
    index, length = _select_hf(*operands, top_k, backend)
    return Selection(index, length)


def expand_pools(selection: Selection, pooled: PooledKeys, layout: Layout, *, tail: bool = True) -> Selection:
    """The keys of selected pools, for attention to read.

    selection: of `pooled.keys` by `pooled.ranges`, K / P pools a row. layout: the one that was pooled.
    tail: add each row's tail. Then the layout's certificate holds: a row that may read anything reads something, unless
        its pools' scores are all NaN or -inf. Without a tail early rows read nothing, so there is no certificate.
    Returns a Selection of width K + P - 1 (K without the tail), ascending, then -1. It has no scores: keys have none.
    A row whose own key completes a pool has no tail, so it reads itself only where it selects that pool.
    Raises InputError where rows differ in number, IndexError (on the CPU) for pools that do not exist.
    """
    rows = layout.keys.num_rows
    if selection.num_rows != rows or pooled.ranges.num_rows != rows:
        raise InputError(
            f"selection has {selection.num_rows} rows, pooled {pooled.ranges.num_rows}, layout {rows}; "
            "expand with the layout that was pooled"
        )
    ranges = (layout.keys.start, layout.keys.stop)
    index, length = _expand(selection.index, selection.length, *ranges, layout.num_keys, pooled.pool_size, tail)
    return Selection(index, length, every_row_has_a_key=tail and layout.every_row_has_a_key)


def round_to_e4m3(x: Tensor) -> Tensor:
    """x [..., D] rounded to float8 E4M3 with one power-of-two scale a vector, returned as bf16, which holds it exactly.

    The scale is 2^ceil(log2(max(absmax, 1e-4) / 448)), so nothing overflows. Scores of such operands, products in fp32,
    are those of an fp8 kernel: a power of two moves through product and ReLU without rounding. A vector with a NaN or
    an infinity becomes NaN.
    """
    return from_e4m3(*to_e4m3(x, power_of_two=True)).to(torch.bfloat16)


def _check_pool_size(pool_size: int) -> None:
    if isinstance(pool_size, bool) or not isinstance(pool_size, int) or pool_size < 1:
        raise InputError(f"pool_size={pool_size!r} must be an integer of at least 1")


@operator("pool_keys")
def _pool(k: Tensor, gate: Tensor, ape: Tensor, start: Tensor, stop: Tensor, hf: bool) -> tuple[Tensor, Tensor, Tensor]:
    pool_size, num_keys = ape.shape[0], k.shape[0]
    start, stop = _real_ends(start, stop, num_keys)
    if start.device.type == "cpu":
        _check_one_start_a_document(start, stop, num_keys)
    first_slot, pools = start // pool_size, (stop - start) // pool_size
    first_key, readable = _slots(start % pool_size, first_slot, pools, pool_size, num_keys // pool_size)
    pooled = k.new_empty(num_keys // pool_size, k.shape[1])
    place = torch.arange(pool_size, device=k.device)
    wide = wide_dtype(k, gate, ape)
    for part in row_blocks(pooled.shape[0], 4 * pool_size * k.shape[1] * wide.itemsize, k.device):
        keys_NP = first_key[part, None] + place
        share_NPD = _softmax(gate[keys_NP].to(wide) + ape.to(wide))
        if hf:
            share_NPD = share_NPD.nan_to_num().to(k.dtype)
        weighted_NPD = share_NPD * k[keys_NP].to(share_NPD.dtype)
        pooled[part] = _sum(weighted_NPD.to(wide)).to(k.dtype)
    pooled.masked_fill_(~readable[:, None], 0)
    return pooled, first_slot.to(torch.int32), (first_slot + pools).to(torch.int32)


@_pool.register_fake
def _(k, gate, ape, start, stop, hf):
    pooled = k.new_empty(k.shape[0] // ape.shape[0], k.shape[1])
    return pooled, torch.empty_like(start), torch.empty_like(stop)


def _softmax(logits_NPD: Tensor) -> Tensor:
    """Over P. Torch's own changes bits with the shape and the number of threads."""
    weight_NPD = (logits_NPD - logits_NPD.amax(1, keepdim=True)).exp()
    return weight_NPD / _sum(weight_NPD)[:, None]


def _sum(x_NPD: Tensor) -> Tensor:
    """Over P, one place after the other."""
    return functools.reduce(torch.add, x_NPD.unbind(1))


def _real_ends(start: Tensor, stop: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Both as int64, cut to the keys there are, stop not below start."""
    start = start.long().clamp(0, num_keys)
    return start, torch.maximum(stop.long().clamp(max=num_keys), start)


def _check_one_start_a_document(start: Tensor, stop: Tensor, num_keys: int) -> None:
    reads = stop > start
    starts_before = torch.zeros(num_keys + 2, dtype=torch.int64)
    starts_before[start[reads] + 1] = 1
    starts_before = starts_before.cumsum(0)
    # Starts at keys start + 1 .. stop - 1: another row begins inside this row's range.
    inside = (starts_before[stop] - starts_before[(start + 1).clamp(max=num_keys)] > 0) & reads
    if inside.any():
        row = int(inside.nonzero()[0])
        raise InputError(
            f"layout.keys: row {row} reads keys {int(start[row])} .. {int(stop[row]) - 1} and another row starts among "
            "them; pools are counted from a document's first key, so rows that share keys must start together"
        )


def _slots(shift: Tensor, first_slot: Tensor, pools: Tensor, pool_size: int, slots: int) -> tuple[Tensor, Tensor]:
    """(first key [N] of each slot's pool, whether a row here may select it [N]).

    Each row knows its document's first slot, how far that pool is shifted in it, and the end of the pools it sees. The
    first slot gets the last of these ends, and both are carried on to the slots after it.
    """
    target = torch.where(pools > 0, first_slot, slots)  # rows without pools write past the end
    blank = torch.zeros(slots + 1, dtype=torch.int64, device=shift.device)
    end = blank.scatter_reduce(0, target, first_slot + pools, "amax")
    shift = blank.scatter_reduce(0, target, shift, "amax")
    slot = torch.arange(slots, device=shift.device)
    head = torch.where(end[:-1] > 0, slot, 0).cummax(0).values
    readable = slot < end[head]
    return torch.where(readable, slot * pool_size + shift[head], 0), readable


@operator("expand_pools")
def _expand(
    index: Tensor, length: Tensor, start: Tensor, stop: Tensor, num_keys: int, pool_size: int, tail: bool
) -> tuple[Tensor, Tensor]:
    rows, kept = index.shape
    slots = num_keys // pool_size
    if index.device.type == "cpu" and index.numel() and int(index.max()) >= slots:
        raise IndexError(f"selection.index holds pool {int(index.max())}, but there are {slots} slots of pools")
    start, stop = (end.to(torch.int32) for end in _real_ends(start, stop, num_keys))
    shift, rest = start % pool_size, (stop - start) % pool_size
    taken = length * pool_size
    out_length = taken + rest if tail else taken
    column = torch.arange(kept * pool_size + (pool_size - 1 if tail else 0), dtype=torch.int32, device=index.device)
    slot, place = column // pool_size, column % pool_size
    out = index.new_empty(rows, column.shape[0])
    for part in row_blocks(rows, 16 * column.shape[0], index.device):
        pools = torch.cat((index[part], index[part].new_zeros(index[part].shape[0], 1)), 1)
        from_pools = pools[:, slot.clamp(max=kept)] * pool_size + shift[part, None] + place
        from_tail = (stop - rest - taken)[part, None] + column
        keys = torch.where(column < taken[part, None], from_pools, from_tail)
        out[part] = keys.masked_fill_(column >= out_length[part, None], -1)
    return out, out_length


@_expand.register_fake
def _(index, length, start, stop, num_keys, pool_size, tail):
    width = index.shape[1] * pool_size + (pool_size - 1 if tail else 0)
    return index.new_empty(index.shape[0], width), torch.empty_like(length)


@operator("select_pools_hf")
def _select_hf(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, top_k: int, backend: str
) -> tuple[Tensor, Tensor]:
    choose("indexer_scores.forward", Call.of(q, k.shape[0], heads=q.shape[1], width=q.shape[2]), backend)
    index = torch.empty(q.shape[0], top_k, dtype=torch.int32, device=q.device)
    length = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
    column = torch.arange(k.shape[0], dtype=torch.int32, device=q.device)
    for first in range(0, q.shape[0], _TILE[0]):
        part = slice(first, first + _TILE[0])
        hidden = ~KeyRange(start[part], stop[part]).mask(k.shape[0])
        scores = _hf_scores(q[part], k, w[part]).masked_fill_(hidden, -torch.inf)
        index[part], length[part], _ = rank(scores, column, top_k)
    return index, length


@_select_hf.register_fake
def _(q, k, w, start, stop, top_k, backend):
    return q.new_empty(q.shape[0], top_k, dtype=torch.int32), q.new_empty(q.shape[0], dtype=torch.int32)


def _hf_scores(q_RHD: Tensor, k_ND: Tensor, w_RH: Tensor) -> Tensor:
    """[R, N] in zero-padded tiles of one shape: matrix products change bits with their shape. R is at most a tile's."""
    (rows, heads, width), wide = q_RHD.shape, wide_dtype(q_RHD, k_ND, w_RH)
    q_tile = q_RHD.new_zeros(_TILE[0], heads, width, dtype=wide)
    q_tile[:rows] = q_RHD
    w_tile = w_RH.new_zeros(_TILE[0], 1, heads, dtype=wide)
    w_tile[:rows, 0] = w_RH
    scores = q_RHD.new_empty(rows, k_ND.shape[0], dtype=wide)
    for first in range(0, k_ND.shape[0], _TILE[1]):
        part = k_ND[first : first + _TILE[1]]
        k_tile = k_ND.new_zeros(_TILE[1], width, dtype=wide)
        k_tile[: part.shape[0]] = part
        dot = (q_tile.flatten(0, 1) @ k_tile.t()).view(_TILE[0], heads, _TILE[1])
        tile = torch.bmm(w_tile, dot.mul_(width**-0.5).relu_())
        scores[:, first : first + _TILE[1]] = tile[:rows, 0, : part.shape[0]]
    return scores
