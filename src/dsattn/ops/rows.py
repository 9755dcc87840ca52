"""Rows of a table, as an embedding takes them, with a gradient that repeats bit for bit.

    out[t] = table[index[t]]        dtable[s] = sum of grad[t] over the t with index[t] = s, in the order of t

On a GPU torch's own gradient of an embedding adds in any order once a few thousand rows share a small vocabulary.
Letters: T rows, S rows of the table, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.backends import resolve_deterministic
from dsattn.errors import InputError
from dsattn.ops.blocks import add_rows_
from dsattn.ops.operator import operator


def take_rows(table: Tensor, index: Tensor, *, deterministic: bool | None = None) -> Tensor:
    """table [S, C], index [T] of integers in 0 .. S - 1 -> [T, C] in the table's dtype. Differentiable in table.

    deterministic: sum the gradient in a fixed order, in fp32 at least; False leaves it to torch, None asks
    `dsattn.settings` and torch's switch. Raises InputError on shapes that do not fit; an index out of range is torch's
    error.
    """
    if table.dim() != 2 or index.dim() != 1:
        raise InputError(f"table must be [S, C] and index [T], got {list(table.shape)} and {list(index.shape)}")
    return _forward(table, index) if resolve_deterministic(deterministic) else F.embedding(index, table)


@operator("take_rows")
def _forward(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index)


@_forward.register_fake
def _(table, index):
    return table.new_empty(index.shape[0], table.shape[1])


@operator("take_rows_backward")
def _backward(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    total = wide.new_zeros(num_rows, grad.shape[1])
    add_rows_(total, index, wide, deterministic=True)
    return total.to(grad.dtype)


@_backward.register_fake
def _(grad, index, num_rows):
    return grad.new_empty(num_rows, grad.shape[1])


def _setup(ctx, inputs, output) -> None:
    table, index = inputs
    ctx.save_for_backward(index)
    ctx.num_rows = table.shape[0]


def _autograd(ctx, grad):
    (index,) = ctx.saved_tensors
    return _backward(grad.contiguous(), index, ctx.num_rows), None


_forward.register_autograd(_autograd, setup_context=_setup)
