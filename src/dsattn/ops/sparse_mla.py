"""Sparse absorbed MLA: every head attends to the selected latents, whose first channels are the values too.

    o[t, h] = sum_j a[t, h, j] kv[i_tj, :V],   a = softmax_j(scale * q[t, h] . kv[i_tj]),   i_t = selection.index[t]

Source: DeepSeek-V2, arXiv 2405.04434 (absorption); DeepSeek-V3.2, arXiv 2512.02556 (selection).
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dsattn.backends import Call, choose, resolve_deterministic
from dsattn.errors import InputError
from dsattn.ops import softmax
from dsattn.ops.first_use import serve
from dsattn.ops.gathered import attend, attend_backward
from dsattn.ops.indexer import check_floating, wide_dtype
from dsattn.ops.invert import fields, joined
from dsattn.ops.operator import operator
from dsattn.selection import Inverse, Selection


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    selection: Selection,
    *,
    scale: float,
    value_dim: int = 512,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries to the selected latents.

    q: [T, H, C], kv: [S, C], floating point; selection: T rows of key rows in 0 .. S-1.
    scale: of the logits. value_dim: V <= C, the leading channels that are values. sink: [H], a logit per head in the
    denominator only.
    Returns out [T, H, V] in q's dtype and lse [T, H] fp32 (fp64 for fp64 inputs): natural log, scale included, keys
    only, not differentiable. A row without keys gives out 0, lse -inf, and neither takes nor gives gradient.
    Gradients reach q, kv and sink. -1 slots never read memory: NaN in rows nobody selected stays there.
    deterministic: gradients repeat bit for bit; None follows `dsattn.settings` and torch's switch. An inverse that the
    selection carries (`with_inverse`) saves the backward making its own; it changes no bit.
    Raises InputError on shapes that do not fit, IndexError (on the CPU) where the selection holds a key row that does
    not exist, BackendUnavailable where `backend` cannot serve.
    """
    check_mla(q, kv, value_dim, sink)
    check_selection(q, selection)
    operands, inverse = (q, kv, selection.index, selection.length, sink), fields(selection, kv.shape[0])
    return _forward(*operands, scale, value_dim, resolve_deterministic(deterministic), backend, *inverse)


def check_mla(q: Tensor, kv: Tensor, value_dim: int, sink: Tensor | None) -> None:
    """Raise InputError where absorbed attention's operands do not fit together."""
    if q.dim() != 3:
        raise InputError(f"q must be [T, H, C], got {list(q.shape)}; fold a batch into T")
    if kv.dim() != 2 or kv.shape[1] != q.shape[2]:
        raise InputError(f"kv must be [S, {q.shape[2]}] to meet q {list(q.shape)}, got {list(kv.shape)}")
    if not 1 <= value_dim <= q.shape[2]:
        raise InputError(f"value_dim={value_dim} must be between 1 and the latent width {q.shape[2]}")
    check_floating(q=q, kv=kv)
    check_sink(q, sink)


def check_sink(q: Tensor, sink: Tensor | None) -> None:
    """Raise InputError where a sink is not one logit a head."""
    if sink is not None and sink.shape != q.shape[1:2]:
        raise InputError(f"sink must be [{q.shape[1]}], one logit a head, got {list(sink.shape)}")


def check_selection(q: Tensor, selection: Selection) -> None:
    """Raise InputError where a selection is none, has another number of rows, or lives elsewhere."""
    if not isinstance(selection, Selection):
        raise InputError(f"selection must be a Selection, got {type(selection).__name__}; select_keys returns one")
    if selection.num_rows != q.shape[0]:
        raise InputError(f"selection has {selection.num_rows} rows, q has {q.shape[0]}")
    if selection.index.device != q.device:
        raise InputError(f"selection is on {selection.index.device}, q on {q.device}; use selection.to(q.device)")


def _call(q: Tensor, kv: Tensor, index: Tensor, value_dim: int, deterministic: bool) -> Call:
    rest = {"heads": q.shape[1], "width": q.shape[2], "value_width": value_dim, "top_k": index.shape[1]}
    return Call.of((q, kv), kv.shape[0], deterministic=deterministic, **rest)


def choose_forward(
    q: Tensor, kv: Tensor, index: Tensor, value_dim: int, deterministic: bool, backend: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Who serves the forward. A call that nobody can take backward fails here already."""
    call = _call(q, kv, index, value_dim, deterministic)
    choose("sparse_mla.backward", call, backend)
    return serve("sparse_mla.forward", choose("sparse_mla.forward", call, backend), forward_reference)


def choose_backward(
    q: Tensor, kv: Tensor, index: Tensor, value_dim: int, deterministic: bool, backend: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Who serves the backward."""
    call = _call(q, kv, index, value_dim, deterministic)
    choice = choose("sparse_mla.backward", call, backend)
    return serve("sparse_mla.backward", choice, backward_reference, forward_reference)


@operator("sparse_mla")
def _forward(
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    scale: float,
    value_dim: int,
    deterministic: bool,
    backend: str,
    slot: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    run = choose_forward(q, kv, index, value_dim, deterministic, backend)
    return run(q, kv, index, length, sink, scale, value_dim)


@_forward.register_fake
def _(q, kv, index, length, sink, scale, value_dim, *flags):
    return q.new_empty(*q.shape[:2], value_dim), q.new_empty(*q.shape[:2], dtype=wide_dtype(q, kv))


@operator("sparse_mla_backward")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
    backend: str,
    slot: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    run = choose_backward(q, kv, index, out.shape[-1], deterministic, backend)
    dq, dkv = run(grad_out, q, kv, index, length, sink, out, lse, scale, deterministic, joined(slot, offset))
    dsink = q.new_empty(0) if sink is None else softmax.sink_gradient(out, grad_out, lse, sink)
    return dq, dkv, dsink


@_backward.register_fake
def _(grad_out, q, kv, index, length, sink, *rest):
    dkv, dsink = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (kv, sink))
    return torch.empty_like(q), dkv, dsink


def _setup(ctx, inputs, output) -> None:
    *operands, ctx.scale, _, ctx.deterministic, ctx.backend, slot, offset = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*operands, *output, slot, offset)


def _autograd(ctx, grad_out, _):
    *saved, slot, offset = ctx.saved_tensors
    flags = (ctx.scale, ctx.deterministic, ctx.backend)
    dq, dkv, dsink = _backward(grad_out.contiguous(), *saved, *flags, slot, offset)
    return dq, dkv, None, None, dsink if ctx.needs_input_grad[4] else None, *(None,) * 6


_forward.register_autograd(_autograd, setup_context=_setup)


def forward_reference(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch. `length` is implied by the -1 slots; kernels use it to stop early."""
    return attend(q, kv, None, index, _a_row(sink, q), scale, value_dim)


def backward_reference(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, dkv) in plain torch; dkv is summed in fp32 (fp64 for fp64 inputs).

    inverse: of index and length, for kernels that sum key by key.
    """
    dq, dkv, _ = attend_backward(grad_out, q, kv, None, index, _a_row(sink, q), out, lse, scale, deterministic)
    return dq, dkv


def _a_row(sink: Tensor | None, q: Tensor) -> Tensor | None:
    return None if sink is None else sink.expand(q.shape[:2])
