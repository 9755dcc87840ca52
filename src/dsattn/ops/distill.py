"""The indexer's only loss: KL(target || softmax(I)) over the keys a row reads, streamed, with its analytic gradient.

    target[t, s] = sum_h p[t, h, s] / sum_s sum_h p[t, h, s],   p[t, h] = exp(scale * q[t, h] . k[s] - lse[t, h])
    loss = sum_t real[t] KL_t / divisor,      dloss/dI[t, s] = real[t] (softmax(I)[t, s] - target[t, s]) / divisor

over all keys of the range (warm-up) or the selected ones. Source: DeepSeek-V3.2, arXiv 2512.02556, eq. 3 and 4.
Letters: T query rows, S keys, H attention heads, G key groups, C key width, H_I / D indexer heads / width, K kept keys;
R the rows that heads read: T, or those of every rank where ranks share them out.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.backends import ALONE, Call, Choice, HeadRanks, choose, resolve_deterministic
from dsattn.errors import InputError
from dsattn.keys import KeyRange
from dsattn.ops.distill_reference import backward_reference, forward_reference
from dsattn.ops.first_use import serve
from dsattn.ops.indexer import check_floating, check_keys, check_scored, wide_dtype
from dsattn.ops.invert import fields, joined
from dsattn.ops.operator import operator
from dsattn.ops.sparse_mla import check_selection
from dsattn.selection import Selection


def indexer_kl(
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    keys: KeyRange,
    selection: Selection | None = None,
    *,
    scale: float,
    real_rows: Tensor | None = None,
    divisor: float | Tensor | None = None,
    relu: bool = True,
    head_group: dist.ProcessGroup | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """KL between what attention reads and what the indexer expects it to read.

    q_i: [T, H_I, D], k_i: [S, D], w: [T, H_I]: the indexer's, as in `indexer_scores`.
    q: [R, H, C], kv: [S, C] or keys [S, G, C], lse: [R, H]: the attention's, over the same keys: dense attention's
    where `selection` is None, else sparse attention's over `selection`. Detached: nothing but q_i, k_i, w learns.
    keys, selection: of the R rows. R is T but where `head_group` shares rows out.
    real_rows: [R] bool; rows left out add nothing. divisor: real rows of the whole global batch (number or 0-d tensor);
    by default this call's own.
    head_group: process group whose n ranks hold the other heads; the target sums over it. With R = n T the rows are
    shared out: rank i takes the loss of rows i, i + n, ... (`Layout.deal_rows`), to which the target is
    reduce-scattered; loss and gradients are then parts of a sum over the group.
    Returns a 0-d fp32 tensor (fp64 for fp64 inputs). A row without keys adds 0 and takes no gradient.
    Raises InputError on shapes that do not fit, BackendUnavailable where `backend` cannot serve.
    """
    check_kl((q_i, k_i, w), (q, kv, lse), keys, selection, head_group)
    attention = (q.detach(), kv.detach(), lse.detach())
    ranks = head_ranks(q, q_i, head_group)
    weights = row_weights(keys, real_rows, divisor, wide_dtype(q_i, k_i, w, q, kv), ranks)
    rows = (*_index(selection), keys.start, keys.stop, *weights)
    flags = (scale, relu, ranks.group, ranks.shard, resolve_deterministic(deterministic), backend)
    inverse = (None, None) if ranks.shards > 1 else fields(selection, k_i.shape[0])  # it is of all R rows
    # What ranks send is cut to it. One rank cuts as a CUDA graph must, whose sizes stay: its bits are the same.
    reach = keys.reach if ranks.group and selection is None and not torch.compiler.is_compiling() else None
    return _forward(q_i, k_i, w, *attention, *rows, *flags, *inverse, reach)[0]


def head_ranks(q: Tensor, q_i: Tensor, head_group: dist.ProcessGroup | None) -> HeadRanks:
    """How the target is summed, from the operands' rows and the group."""
    if head_group is None:
        return ALONE
    return HeadRanks.of(head_group.group_name, head_group.rank(), q, q_i)


def check_kl(
    indexer: tuple[Tensor, Tensor, Tensor],
    attention: tuple[Tensor, Tensor, Tensor],
    keys: KeyRange,
    selection: Selection | None,
    head_group: dist.ProcessGroup | None,
) -> None:
    """Raise InputError where the loss's operands do not fit together. indexer: q_i, k_i, w. attention: q, kv, lse."""
    (q_i, k_i, w), (q, kv, lse) = indexer, attention
    check_scored(q_i, k_i, w, "_i")
    rows, ranks = q_i.shape[0], 1 if head_group is None else head_group.size()
    if q.dim() != 3 or q.shape[0] not in (rows, ranks * rows):
        dealt = f", or [{ranks * rows}, H, C] of rows dealt to {ranks} ranks of head_group," if ranks > 1 else ""
        raise InputError(f"q must be [{rows}, H, C]{dealt} to meet q_i {list(q_i.shape)}, got {list(q.shape)}")
    check_keys(keys, "q_i" if q.shape[0] == rows else "q", q)
    if kv.dim() not in (2, 3) or kv.shape[0] != k_i.shape[0] or kv.shape[-1] != q.shape[2]:
        wanted = f"[{k_i.shape[0]}, {q.shape[2]}] or [{k_i.shape[0]}, G, {q.shape[2]}]"
        raise InputError(
            f"kv must be {wanted} to meet k_i {list(k_i.shape)} and q {list(q.shape)}, got {list(kv.shape)}"
        )
    if kv.dim() == 3 and (kv.shape[1] == 0 or q.shape[1] % kv.shape[1]):
        raise InputError(f"q has {q.shape[1]} heads, not a multiple of the {kv.shape[1]} groups of kv")
    if lse.shape != q.shape[:2]:
        raise InputError(f"lse must be {list(q.shape[:2])}, got {list(lse.shape)}")
    check_floating(q=q, kv=kv, lse=lse)
    if selection is not None:
        check_selection(q, selection)


def row_weights(
    keys: KeyRange,
    real_rows: Tensor | None,
    divisor: float | Tensor | None,
    wide: torch.dtype,
    ranks: HeadRanks = ALONE,
) -> tuple[Tensor, Tensor]:
    """real [R] bool and divisor (0-d tensor), from what the caller gave. No device sync."""
    reads = keys.stop > keys.start
    if real_rows is not None:
        if real_rows.shape != reads.shape or real_rows.dtype != torch.bool:
            raise InputError(
                f"real_rows must be bool [{reads.shape[0]}], got {real_rows.dtype} {list(real_rows.shape)}"
            )
        reads = reads & real_rows
    if divisor is None:
        return reads, ranks.own(reads).sum().clamp(min=1).to(wide)
    if isinstance(divisor, int | float):
        if not divisor > 0:
            raise InputError(f"divisor={divisor} must be positive; a batch without real rows needs no loss")
        return reads, torch.full((), divisor, dtype=wide, device=reads.device)
    if not isinstance(divisor, Tensor) or divisor.dim() != 0:
        got = list(divisor.shape) if isinstance(divisor, Tensor) else repr(divisor)
        raise InputError(f"divisor must be a number or a 0-d tensor, got {got}")
    return reads, divisor.detach().to(device=reads.device, dtype=wide)


def _index(selection: Selection | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if selection is None else (selection.index, selection.length)


Run = Callable[..., tuple[Tensor, ...]]


def choose_forward(operands: tuple[Tensor, ...], index: Tensor | None, deterministic: bool, backend: str) -> Run:
    """Who serves the forward. A call that nobody can take backward fails here already. operands: q_i, k_i, others."""
    _choose("backward", operands, index, deterministic, backend)
    choice = _choose("forward", operands, index, deterministic, backend)
    return serve("indexer_kl.forward", choice, forward_reference)


def choose_backward(operands: tuple[Tensor, ...], index: Tensor | None, deterministic: bool, backend: str) -> Run:
    """Who serves the backward. operands: q_i, k_i, others."""
    choice = _choose("backward", operands, index, deterministic, backend)
    return serve("indexer_kl.backward", choice, backward_reference, forward_reference)


def _choose(
    direction: str, operands: tuple[Tensor, ...], index: Tensor | None, deterministic: bool, backend: str
) -> Choice:
    q_i, k_i, *others = operands
    top_k = 0 if index is None else index.shape[1]
    rest = {"heads": q_i.shape[1], "width": q_i.shape[2], "top_k": top_k, "deterministic": deterministic}
    return choose(f"indexer_kl.{direction}", Call.of((q_i, k_i), k_i.shape[0], tuple(others), **rest), backend)


@operator("indexer_kl")
def _forward(
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index: Tensor | None,
    length: Tensor | None,
    start: Tensor,
    stop: Tensor,
    real: Tensor,
    divisor: Tensor,
    scale: float,
    relu: bool,
    group: str,
    shard: int,
    deterministic: bool,
    backend: str,
    slot: Tensor | None = None,
    offset: Tensor | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = choose_forward((q_i, k_i, w, q, kv, lse), index, deterministic, backend)
    keys, ranks = KeyRange(start, stop).reaching(reach), HeadRanks.of(group, shard, q, q_i)
    loss, score_lse, mass, dscore = run(
        *(q_i, k_i, w, q, kv, lse, index, length, keys, real, divisor, scale, relu, ranks, None)
    )
    return loss, score_lse, mass, dscore


@_forward.register_fake
def _(q_i, k_i, w, q, kv, lse, index, *rest):
    wide, rows = wide_dtype(q_i, k_i, w, q, kv), q_i.shape[0]
    shapes = ((), (2, rows), (rows,), (rows, 0 if index is None else index.shape[1]))
    return tuple(q.new_empty(shape, dtype=wide) for shape in shapes)


@operator("indexer_kl_backward")
def _backward(
    grad: Tensor,
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index: Tensor | None,
    length: Tensor | None,
    start: Tensor,
    stop: Tensor,
    real: Tensor,
    divisor: Tensor,
    score_lse: Tensor,
    mass: Tensor,
    dscore: Tensor,
    scale: float,
    relu: bool,
    group: str,
    shard: int,
    deterministic: bool,
    backend: str,
    slot: Tensor | None = None,
    offset: Tensor | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    run = choose_backward((q_i, k_i, w, q, kv, lse), index, deterministic, backend)
    keys, ranks = KeyRange(start, stop).reaching(reach), HeadRanks.of(group, shard, q, q_i)
    row_scale = torch.where(ranks.own(real), grad / divisor, 0.0)
    operands = (q_i, k_i, w, q, kv, lse, index, length, keys, real)
    saved, flags = (score_lse, mass, dscore), (scale, relu, ranks, deterministic)
    dq, dk, dw = run(row_scale, *operands, *saved, *flags, joined(slot, offset))
    return dq, dk, dw


@_backward.register_fake
def _(grad, q_i, k_i, w, *rest):
    dq, dk, dw = (x.new_empty(x.shape) for x in (q_i, k_i, w))
    return dq, dk, dw


def _setup(ctx, inputs, output) -> None:
    *operands, scale, relu, group, shard, deterministic, backend, slot, offset, reach = inputs
    ctx.flags = (scale, relu, group, shard, deterministic, backend)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*operands, *output[1:], slot, offset, reach)


def _autograd(ctx, grad, *_):
    *saved, slot, offset, reach = ctx.saved_tensors
    return *_backward(grad, *saved, *ctx.flags, slot, offset, reach), *(None,) * 18


_forward.register_autograd(_autograd, setup_context=_setup)
