"""Output gate: out * sigmoid(gate), with the sigmoid in fp32.

Source: gated attention, arXiv 2505.06708. A saturated gate still has a gradient: sigma(x) sigma(-x) is taken in fp32.
Letters: T rows, H heads, V value width.
"""

from typing import Literal

import torch
from torch import Tensor

from dsattn.backends import Call, choose
from dsattn.errors import InputError
from dsattn.ops.operator import operator


def output_gate(
    out: Tensor,
    gate: Tensor,
    *,
    granularity: Literal["elementwise", "headwise"] = "elementwise",
    cast: Literal["before", "after"] = "before",
) -> Tensor:
    """Gate the heads' outputs.

    out: [T, H, V]. gate: logits, [T, H, V] or [T, H * V] (elementwise), [T, H] (headwise).
    cast: `before` rounds the sigmoid to out's dtype and multiplies there (MLA); `after` multiplies in fp32 and rounds
    the product (plain GQA). Both names matter for bit parity with models trained one way.
    Returns [T, H, V] in out's dtype. Differentiable in both. Raises InputError on shapes and dtypes that do not fit.
    """
    if out.dim() != 3:
        raise InputError(f"out must be [T, H, V], got {list(out.shape)}")
    rows, heads, width = out.shape
    if granularity not in ("elementwise", "headwise"):
        raise InputError(f"granularity={granularity!r} must be 'elementwise' or 'headwise'")
    if cast not in ("before", "after"):
        raise InputError(f"cast={cast!r} must be 'before' or 'after'")
    shapes = [(rows, heads)] if granularity == "headwise" else [(rows, heads, width), (rows, heads * width)]
    if tuple(gate.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise InputError(f"gate must be {wanted} for {granularity} gating, got {list(gate.shape)}")
    for name, value in (("out", out), ("gate", gate)):
        if not value.is_floating_point():
            raise InputError(f"{name} must be floating point, got {value.dtype}")
    per_head = gate.reshape(rows, heads, 1 if granularity == "headwise" else width)
    return _forward(out, per_head, cast == "before")


@operator("output_gate")
def _forward(out: Tensor, gate: Tensor, cast_before: bool) -> Tensor:
    choose("output_gate.forward", _call(out))
    share = _sigmoid(gate)
    gated = out * share.to(out.dtype) if cast_before else (out.to(share.dtype) * share).to(out.dtype)
    return gated.contiguous()


@_forward.register_fake
def _(out, gate, cast_before):
    return torch.empty_like(out, memory_format=torch.contiguous_format)


@operator("output_gate_backward")
def _backward(grad: Tensor, out: Tensor, gate: Tensor, cast_before: bool) -> tuple[Tensor, Tensor]:
    choose("output_gate.backward", _call(out))
    share = _sigmoid(gate)
    dout = grad * share.to(grad.dtype) if cast_before else (grad.to(share.dtype) * share).to(grad.dtype)
    # sigmoid(-gate), not 1 - share, which is 0 from a logit of 17 on
    dgate = grad.to(share.dtype) * out.to(share.dtype) * share * _sigmoid(-gate)
    return dout, dgate.sum_to_size(gate.shape).to(gate.dtype)


@_backward.register_fake
def _(grad, out, gate, cast_before):
    return torch.empty_like(grad), torch.empty_like(gate, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output) -> None:
    out, gate, ctx.cast_before = inputs
    ctx.save_for_backward(out, gate)


def _autograd(ctx, grad):
    return *_backward(grad.contiguous(), *ctx.saved_tensors, ctx.cast_before), None


_forward.register_autograd(_autograd, setup_context=_setup)


def _call(out: Tensor) -> Call:
    return Call.of(out, out.shape[0], heads=out.shape[1], width=out.shape[2])


def _sigmoid(gate: Tensor) -> Tensor:
    return gate.to(torch.promote_types(gate.dtype, torch.float32)).sigmoid()
