"""Sparse attention and the indexer's loss on the same selection, as one operation whose parts may share work.

Attention makes the probabilities whose head sum is the loss's target, so a fused forward hands it to `indexer_kl`,
which need not read the keys again. Where there is none, the row `composed` runs `sparse_mla` and `indexer_kl` one after
the other, each by whichever backend serves it; they are also a fused backend's oracle.
Letters: T query rows, S keys, H heads, C latent width, V value width, H_I / D indexer heads / width.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.backends import TABLE, Call, Choice, HeadRanks, choose, resolve_deterministic
from dsattn.keys import KeyRange
from dsattn.ops import softmax
from dsattn.ops.distill import check_kl, head_ranks, row_weights
from dsattn.ops.distill import choose_backward as kl_backward
from dsattn.ops.distill import choose_forward as kl_forward
from dsattn.ops.distill_reference import attention_shares
from dsattn.ops.first_use import serve
from dsattn.ops.indexer import wide_dtype
from dsattn.ops.invert import fields, joined
from dsattn.ops.operator import operator
from dsattn.ops.sparse_mla import check_mla, check_selection, forward_reference
from dsattn.ops.sparse_mla import choose_backward as attention_backward
from dsattn.ops.sparse_mla import choose_forward as attention_forward
from dsattn.selection import Inverse, Selection


def dsa_attention(
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    keys: KeyRange,
    *,
    scale: float,
    kl_weight: float,
    real_rows: Tensor | None = None,
    divisor: float | Tensor | None = None,
    value_dim: int = 512,
    sink: Tensor | None = None,
    relu: bool = True,
    head_group: dist.ProcessGroup | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_mla(q, kv, selection)` and `kl_weight * indexer_kl(..., selection)`.

    Shapes, padding, errors and defaults are those of the two, and so is what `head_group` means for rows. Returns
    (out, lse, kl): kl already carries its weight, so adding it to the loss trains the indexer. Gradients: out's reach
    q, kv and sink; kl's reach q_i, k_i and w.
    """
    check_mla(q, kv, value_dim, sink)
    check_selection(q, selection)
    check_kl((q_i, k_i, w), (q, kv, q[..., 0]), keys, selection, head_group)
    ranks = head_ranks(q, q_i, head_group)
    weights = row_weights(keys, real_rows, divisor, wide_dtype(q_i, k_i, w, q, kv), ranks)
    rows = (selection.index, selection.length, *weights)
    determined = resolve_deterministic(deterministic)
    flags = (scale, kl_weight, value_dim, relu, ranks.group, ranks.shard, determined, backend)
    inverse = fields(selection, kv.shape[0])
    return _forward(q, kv, sink, q_i, k_i, w, *rows, keys.start, keys.stop, *flags, *inverse)[:3]


def shares_work(deterministic: bool | None) -> bool:
    """Whether a layer may take this operation rather than its parts.

    A fused forward's loss has other bits than the parts', which a recomputed layer runs. A deterministic layer always
    runs the parts, so that recompute changes no bit.
    """
    return not resolve_deterministic(deterministic)


def _choose(
    direction: str, q: Tensor, kv: Tensor, index: Tensor, value_dim: int, deterministic: bool, backend: str
) -> Choice:
    rest = {"heads": q.shape[1], "width": q.shape[2], "value_width": value_dim, "top_k": index.shape[1]}
    return choose_whole(direction, Call.of((q, kv), kv.shape[0], deterministic=deterministic, **rest), backend)


def choose_whole(direction: str, call: Call, backend: str) -> Choice:
    """Who serves `dsa_attention` as one operation: `composed` for a name that is for its parts."""
    operation = f"dsa_attention.{direction}"
    own = backend == "auto" or any(row.name == backend for row in TABLE[operation])
    return choose(operation, call, backend if own else "composed")


def _of_part(operation: str, backend: str) -> str:
    """A name goes to the part that has a row of that name; one that no part has goes to both, which refuse it."""
    if backend == "composed":
        return "auto"
    here = any(row.name == backend for row in TABLE[f"{operation}.forward"] + TABLE[f"{operation}.backward"])
    return "auto" if not here and any(row.name == backend for row in TABLE["dsa_attention.forward"]) else backend


@operator("dsa_attention")
def _forward(
    q: Tensor,
    kv: Tensor,
    sink: Tensor | None,
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    index: Tensor,
    length: Tensor,
    real: Tensor,
    divisor: Tensor,
    start: Tensor,
    stop: Tensor,
    scale: float,
    kl_weight: float,
    value_dim: int,
    relu: bool,
    group: str,
    shard: int,
    deterministic: bool,
    backend: str,
    slot: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _choose("backward", q, kv, index, value_dim, deterministic, backend)
    choice = _choose("forward", q, kv, index, value_dim, deterministic, backend)
    part = _of_part("sparse_mla", backend)
    attend = attention_forward(q, kv, index, value_dim, deterministic, part)  # refuses what has no backward
    if choice.function is not None:
        attend = serve("dsa_attention.forward", choice, shares_reference)
    distill = kl_forward((q_i, k_i, w, q, kv), index, deterministic, _of_part("indexer_kl", backend))
    out, lse, *shares = attend(q, kv, index, length, sink, scale, value_dim)
    rows = (index, length, KeyRange(start, stop), real, divisor)
    ranks = HeadRanks.of(group, shard, q, q_i)
    kl, *saved = distill(q_i, k_i, w, q, kv, lse, *rows, scale, relu, ranks, shares[0] if shares else None)
    return out, lse, kl * kl_weight, saved[0], saved[1], saved[2]


@_forward.register_fake
def _(q, kv, sink, q_i, k_i, w, index, length, real, divisor, start, stop, scale, kl_weight, value_dim, *flags):
    wide, rows = wide_dtype(q_i, k_i, w, q, kv), q_i.shape[0]
    lse, kl = q.new_empty(q.shape[:2], dtype=wide_dtype(q, kv)), q.new_empty((), dtype=wide)
    out, loss = q.new_empty(*q.shape[:2], value_dim), (kl.new_empty(2, rows), kl.new_empty(rows))
    return out, lse, kl, *loss, kl.new_empty(rows, index.shape[1])


@operator("dsa_attention_backward")
def _backward(
    grad_out: Tensor,
    grad_kl: Tensor,
    q: Tensor,
    kv: Tensor,
    sink: Tensor | None,
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    index: Tensor,
    length: Tensor,
    real: Tensor,
    divisor: Tensor,
    start: Tensor,
    stop: Tensor,
    out: Tensor,
    lse: Tensor,
    score_lse: Tensor,
    mass: Tensor,
    dscore: Tensor,
    scale: float,
    kl_weight: float,
    relu: bool,
    group: str,
    shard: int,
    deterministic: bool,
    backend: str,
    slot: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    choice = _choose("backward", q, kv, index, out.shape[-1], deterministic, backend)
    run = choice.function or backward_composed
    indexer, rows = (q_i, k_i, w), (index, length, joined(slot, offset), real, divisor, start, stop)
    ranks, saved = HeadRanks.of(group, shard, q, q_i), (out, lse, score_lse, mass, dscore)
    flags = (scale, kl_weight, relu, ranks, deterministic, backend)
    grads = run((grad_out, grad_kl), q, kv, sink, indexer, rows, saved, flags)
    dq, dkv, dq_i, dk_i, dw = grads
    dsink = q.new_empty(0) if sink is None else softmax.sink_gradient(out, grad_out, lse, sink)
    return dq, dkv, dsink, dq_i, dk_i, dw


@_backward.register_fake
def _(grad_out, grad_kl, q, kv, sink, q_i, k_i, w, *rest):
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    dkv, dq_i, dk_i, dw = (x.new_empty(x.shape) for x in (kv, q_i, k_i, w))
    return torch.empty_like(q), dkv, dsink, dq_i, dk_i, dw


def _setup(ctx, inputs, output) -> None:
    *operands, scale, kl_weight, _, relu, group, shard, deterministic, backend, slot, offset = inputs
    out, lse, _, *of_loss = output
    ctx.flags = (scale, kl_weight, relu, group, shard, deterministic, backend)
    ctx.mark_non_differentiable(lse, *of_loss)
    ctx.save_for_backward(*operands, out, lse, *of_loss, slot, offset)


def _autograd(ctx, grad_out, _, grad_kl, *rest):
    *saved, slot, offset = ctx.saved_tensors
    dq, dkv, dsink, *indexer = _backward(grad_out.contiguous(), grad_kl, *saved, *ctx.flags, slot, offset)
    return dq, dkv, dsink if ctx.needs_input_grad[2] else None, *indexer, *(None,) * 16


_forward.register_autograd(_autograd, setup_context=_setup)


Flags = tuple[float, float, bool, HeadRanks, bool, str]  # scale, kl_weight, relu, ranks, deterministic, backend
# index, length, their inverse, real, divisor, start, stop
Rows = tuple[Tensor, Tensor, Inverse | None, Tensor, Tensor, Tensor, Tensor]


def shares_reference(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a fused forward returns: (out, lse) of `sparse_mla`, and shares [T, K], the target before it is normalised.

    shares: each selected key's probability among the keys, summed over this rank's heads; fp32 (fp64 for fp64 inputs),
    0 in empty slots. A sink's mass is ignored.
    """
    out, lse = forward_reference(q, kv, index, length, sink, scale, value_dim)
    return out, lse, attention_shares(q, kv, index, lse, scale)


def backward_composed(
    grads: tuple[Tensor, Tensor],
    q: Tensor,
    kv: Tensor,
    sink: Tensor | None,
    indexer: tuple[Tensor, ...],
    rows: Rows,
    saved: tuple[Tensor, ...],
    flags: Flags,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dkv, dq_i, dk_i, dw), given those of out and of the weighted kl."""
    grad_out, grad_kl = grads
    q_i, k_i, w = indexer
    index, length, inverse, real, divisor, start, stop = rows
    out, lse, *of_loss = saved
    scale, kl_weight, relu, ranks, deterministic, backend = flags
    attend = attention_backward(q, kv, index, out.shape[-1], deterministic, _of_part("sparse_mla", backend))
    distill = kl_backward((q_i, k_i, w, q, kv), index, deterministic, _of_part("indexer_kl", backend))
    dq, dkv = attend(grad_out, q, kv, index, length, sink, out, lse, scale, deterministic, inverse)
    row_scale, keys = torch.where(ranks.own(real), grad_kl * kl_weight / divisor, 0.0), KeyRange(start, stop)
    target = (q, kv, lse, index, length, keys, real, *of_loss)
    inverse = inverse if ranks.shards == 1 else None  # it is of all R rows
    dq_i, dk_i, dw = distill(row_scale, q_i, k_i, w, *target, scale, relu, ranks, deterministic, inverse)
    return dq, dkv, dq_i, dk_i, dw
