"""Sparse grouped-query attention: query head h attends to the selected keys of group h // (H / G).

    o[t, h] = sum_j a[t, h, j] v[i_tj, g],   a = softmax_j(scale * q[t, h] . k[i_tj, g]),   i_t = selection.index[t]

One selection a row serves all heads and groups. Source: GQA, arXiv 2305.13245; selection as in sparse_mla.
Letters: T query rows, S keys, H heads, G groups, J = H / G, D key width, V value width, K kept keys.
"""

import torch
from torch import Tensor

from dsattn.backends import Call, choose, resolve_deterministic
from dsattn.errors import InputError
from dsattn.ops import softmax
from dsattn.ops.first_use import serve
from dsattn.ops.gathered import attend, attend_backward, gather_index, used_slots
from dsattn.ops.indexer import check_floating, wide_dtype
from dsattn.ops.invert import fields, joined
from dsattn.ops.operator import operator
from dsattn.ops.sparse_mla import check_selection, check_sink
from dsattn.selection import Inverse, Selection


def sparse_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of grouped query heads to the selected keys.

    q: [T, H, D], k: [S, G, D], v: [S, G, V], floating point, G divides H; selection: T rows of key rows in 0 .. S-1.
    Returns out [T, H, V] in q's dtype and lse [T, H]. Everything else is as in `sparse_mla`; gradients reach q, k, v
    and sink.
    """
    check_gqa(q, k, v, sink)
    check_selection(q, selection)
    operands, inverse = (q, k, v, selection.index, selection.length, sink), fields(selection, k.shape[0])
    return _forward(*operands, scale, resolve_deterministic(deterministic), backend, *inverse)


def check_gqa(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> None:
    """Raise InputError where grouped attention's operands do not fit together."""
    if q.dim() != 3:
        raise InputError(f"q must be [T, H, D], got {list(q.shape)}; fold a batch into T")
    if k.dim() != 3 or k.shape[2] != q.shape[2]:
        raise InputError(f"k must be [S, G, {q.shape[2]}] to meet q {list(q.shape)}, got {list(k.shape)}")
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        raise InputError(f"v must be [{k.shape[0]}, {k.shape[1]}, V] to meet k {list(k.shape)}, got {list(v.shape)}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise InputError(f"q has {q.shape[1]} heads, not a multiple of the {k.shape[1]} groups of k")
    check_floating(q=q, k=k, v=v)
    check_sink(q, sink)


def _call(q: Tensor, k: Tensor, v: Tensor, index: Tensor, deterministic: bool) -> Call:
    rest = {"heads": q.shape[1], "width": q.shape[2], "value_width": v.shape[2], "top_k": index.shape[1]}
    return Call.of((q, k, v), k.shape[0], deterministic=deterministic, **rest)


@operator("sparse_gqa")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    scale: float,
    deterministic: bool,
    backend: str,
    slot: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    call = _call(q, k, v, index, deterministic)
    choose("sparse_gqa.backward", call, backend)  # a call that cannot go backward fails before it goes forward
    run = serve("sparse_gqa.forward", choose("sparse_gqa.forward", call, backend), forward_reference)
    return run(q, k, v, index, length, sink, scale)


@_forward.register_fake
def _(q, k, v, index, *rest):
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(*q.shape[:2], dtype=wide_dtype(q, k))


@operator("sparse_gqa_backward")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _call(q, k, v, index, deterministic)
    choice = choose("sparse_gqa.backward", call, backend)
    run = serve("sparse_gqa.backward", choice, backward_reference, forward_reference)
    dq, dk, dv = run(grad_out, q, k, v, index, length, sink, out, lse, scale, deterministic, joined(slot, offset))
    dsink = q.new_empty(0) if sink is None else softmax.sink_gradient(out, grad_out, lse, sink)
    return dq, dk, dv, dsink


@_backward.register_fake
def _(grad_out, q, k, v, index, length, sink, *rest):
    dq, dk, dv, dsink = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, sink))
    return dq, dk, dv, dsink


def _setup(ctx, inputs, output) -> None:
    *operands, ctx.scale, ctx.deterministic, ctx.backend, slot, offset = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*operands, *output, slot, offset)


def _autograd(ctx, grad_out, _):
    *saved, slot, offset = ctx.saved_tensors
    flags = (ctx.scale, ctx.deterministic, ctx.backend)
    dq, dk, dv, dsink = _backward(grad_out.contiguous(), *saved, *flags, slot, offset)
    return dq, dk, dv, None, None, dsink if ctx.needs_input_grad[5] else None, *(None,) * 5


_forward.register_autograd(_autograd, setup_context=_setup)


def forward_reference(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch: each (row, group) pair becomes a row of J heads that reads its group's keys."""
    groups = k.shape[1]
    q_RJD, index_RK = _by_group(q, groups), _group_index(index, k)
    sink_RJ = None if sink is None else _by_group(sink.expand(q.shape[:2]), groups)
    out, lse = attend(q_RJD, _stack_groups(k), _stack_groups(v), index_RK, sink_RJ, scale, v.shape[2])
    return out.view(*q.shape[:2], v.shape[2]), lse.view(q.shape[:2])


def backward_reference(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in plain torch; dk and dv are summed in fp32 (fp64 for fp64 inputs). inverse: as in `sparse_mla`."""
    groups = k.shape[1]
    grad_RJV, q_RJD, out_RJV, lse_RJ = (_by_group(x, groups) for x in (grad_out, q, out, lse))
    sink_RJ = None if sink is None else _by_group(sink.expand(q.shape[:2]), groups)
    keys_values_index = (_stack_groups(k), _stack_groups(v), _group_index(index, k))
    dq, dk, dv = attend_backward(grad_RJV, q_RJD, *keys_values_index, sink_RJ, out_RJV, lse_RJ, scale, deterministic)
    assert dv is not None
    return dq.reshape(q.shape).contiguous(), _unstack_groups(dk, groups), _unstack_groups(dv, groups)


def _by_group(x_TH: Tensor, groups: int) -> Tensor:
    """[T, H, ...] -> [T * G, J, ...]."""
    rows, heads, *rest = x_TH.shape
    return x_TH.reshape(rows * groups, heads // groups, *rest)


def _stack_groups(x_SGD: Tensor) -> Tensor:
    """[S, G, D] -> [G * S, D]: each group's keys in a stretch of its own."""
    return x_SGD.transpose(0, 1).flatten(0, 1)


def _unstack_groups(x_RD: Tensor, groups: int) -> Tensor:
    return x_RD.view(groups, -1, x_RD.shape[1]).transpose(0, 1).contiguous()


def _group_index(index_TK: Tensor, k_SGD: Tensor) -> Tensor:
    """[T, K] -> [T * G, K] int64: key row s of group g stands at g * S + s of the stacked keys. K is at most S then."""
    keys, groups = k_SGD.shape[:2]
    index_TK = used_slots(index_TK, keys)
    offset_G1 = torch.arange(groups, device=index_TK.device)[:, None] * keys
    slots_TK = gather_index(index_TK, keys)  # refuses rows that do not exist by the numbers that the caller gave
    moved_TGK = torch.where(index_TK[:, None] < 0, -1, slots_TK[:, None] + offset_G1)
    return moved_TGK.flatten(0, 1)
