"""Dense attention to a range of keys: the teacher of the indexer's warm-up, and the layers that do not select.

dense_mla: absorbed, keys and values share one latent.   dense_gqa: query head h attends to group h // (H / G).
    o[t, h] = sum_s a[t, h, s] v[s],   a = softmax over start[t] <= s < stop[t] of scale * q[t, h] . k[s]
Letters: T query rows, S keys, H heads, G groups, C latent width, D key width, V value width.
"""

import torch
from torch import Tensor

from dsattn.backends import Call, Choice, choose, resolve_deterministic
from dsattn.keys import KeyRange
from dsattn.ops import softmax
from dsattn.ops.first_use import serve
from dsattn.ops.indexer import check_keys, wide_dtype
from dsattn.ops.operator import operator
from dsattn.ops.ranged import backward_reference, forward_reference
from dsattn.ops.sparse_gqa import check_gqa
from dsattn.ops.sparse_mla import check_mla


def dense_mla(
    q: Tensor,
    kv: Tensor,
    keys: KeyRange,
    *,
    scale: float,
    value_dim: int = 512,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries to every key of their range.

    q: [T, H, C], kv: [S, C], keys: KeyRange of T rows. Everything else is as in `sparse_mla`: out [T, H, V] and
    lse [T, H]; rows without keys give 0 and -inf; NaN in keys that no row may read stays there.
    """
    check_mla(q, kv, value_dim, sink)
    check_keys(keys, "q", q)
    flags = (scale, value_dim, resolve_deterministic(deterministic), backend)
    return _forward(q, kv.unsqueeze(1), None, keys.start, keys.stop, sink, *flags)


def dense_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: KeyRange,
    *,
    scale: float,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of grouped query heads to every key of their range.

    q: [T, H, D], k: [S, G, D], v: [S, G, V], keys: KeyRange of T rows. Everything else is as in `sparse_gqa`.
    """
    check_gqa(q, k, v, sink)
    check_keys(keys, "q", q)
    flags = (scale, v.shape[2], resolve_deterministic(deterministic), backend)
    return _forward(q, k, v, keys.start, keys.stop, sink, *flags)


def _choose(
    direction: str, q: Tensor, k: Tensor, v: Tensor | None, value_dim: int, deterministic: bool, backend: str
) -> tuple[str, Choice]:
    operation = f"{'dense_mla' if v is None else 'dense_gqa'}.{direction}"
    rest = {"heads": q.shape[1], "width": q.shape[2], "value_width": value_dim}
    call = Call.of((q, k) if v is None else (q, k, v), k.shape[0], deterministic=deterministic, **rest)
    return operation, choose(operation, call, backend)


@operator("dense_attention")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    start: Tensor,
    stop: Tensor,
    sink: Tensor | None,
    scale: float,
    value_dim: int,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _choose("backward", q, k, v, value_dim, deterministic, backend)  # fails before the forward where it would after
    run = serve(*_choose("forward", q, k, v, value_dim, deterministic, backend), forward_reference)
    return run(q, k, v, KeyRange(start, stop), sink, scale, value_dim)


@_forward.register_fake
def _(q, k, v, start, stop, sink, scale, value_dim, deterministic, backend):
    return q.new_empty(*q.shape[:2], value_dim), q.new_empty(*q.shape[:2], dtype=wide_dtype(q, k))


@operator("dense_attention_backward")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    start: Tensor,
    stop: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    choice = _choose("backward", q, k, v, out.shape[-1], deterministic, backend)
    run = serve(*choice, backward_reference, forward_reference)
    dq, dk, dv = run(grad_out, q, k, v, KeyRange(start, stop), sink, out, lse, scale)
    nothing = q.new_empty(0)
    dsink = nothing if sink is None else softmax.sink_gradient(out, grad_out, lse, sink)
    return dq, dk, nothing.clone() if dv is None else dv, dsink


@_backward.register_fake
def _(grad_out, q, k, v, start, stop, sink, out, lse, scale, deterministic, backend):
    dk, dv, dsink = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (k, v, sink))
    return torch.empty_like(q), dk, dv, dsink


def _setup(ctx, inputs, output) -> None:
    *operands, ctx.scale, _, ctx.deterministic, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*operands, *output)


def _autograd(ctx, grad_out, _):
    dq, dk, dv, dsink = _backward(grad_out.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.deterministic, ctx.backend)
    wanted = ctx.needs_input_grad
    return dq, dk, dv if wanted[2] else None, None, None, dsink if wanted[5] else None, None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup)
