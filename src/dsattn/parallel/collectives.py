"""Collectives that autograd knows, on the first dimension of tensors that are as large on every rank.

    forward                  backward
    gather                   reduce-scatter
    scatter_sum              gather
    sum_forward              as it is
    sum_backward (as it is)  all-reduce

They are torch's functional collectives: begun in one place, waited for in another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_functional = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False)
class Axis:
    """A process group and my place in it."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Axis | None":
        """None for None."""
        return None if group is None else cls(group, group.size(), group.rank())

    @property
    def name(self) -> str:
        """By which functional collectives find the group."""
        return self.group.group_name


def begin_gather(parts: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Start to gather each [T, ...] to [size * T, ...], rank by rank, in one launch. Only `finish_gather` may read."""
    own = [part.detach().contiguous() for part in parts]
    if len(own) == 1:
        return [_functional.all_gather_into_tensor(own[0], axis.size, axis.name)]
    return _functional.all_gather_into_tensor_coalesced(own, axis.size, axis.name)


def finish_gather(x: Tensor, begun: Tensor, axis: Axis, order: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """What `begin_gather` made of x, attached to autograd. order: rows of the result and, for the backward, inverse."""
    return _Gather.apply(x, begun, axis, *(order or (None, None)))


def gather(x: Tensor, axis: Axis) -> Tensor:
    """x [T, ...] of every rank -> [size * T, ...], rank by rank."""
    (begun,) = begin_gather([x], axis)
    return finish_gather(x, begun, axis)


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """x [size * T, ...] -> my [T, ...] of the sum over ranks."""
    return _ScatterSum.apply(x, axis)


def sum_forward(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks, of which each x is a part; each rank's gradient of it is already that of the whole."""
    return _SumForward.apply(x, axis)


def sum_backward(x: Tensor, axis: Axis) -> Tensor:
    """x itself, the same on every rank, of which each rank goes on to make a part."""
    return _SumBackward.apply(x, axis)


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """x [size * T, ...], a run of T rows for each rank -> [size, T, ...], from each rank. No gradient."""
    rows = x.shape[0] // axis.size
    splits = [rows] * axis.size
    out = _functional.all_to_all_single(x.detach().contiguous(), splits, splits, axis.name)
    return _wait(out).view(axis.size, rows, *x.shape[1:])


def _wait(x: Tensor) -> Tensor:
    return _functional.wait_tensor(x)


def _reduce_scattered(x: Tensor, axis: Axis) -> Tensor:
    return _wait(_functional.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.name))


def _summed(x: Tensor, axis: Axis) -> Tensor:
    return _wait(_functional.all_reduce(x.contiguous(), "sum", axis.name))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, begun: Tensor, axis: Axis, order: Tensor | None, inverse: Tensor | None) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(inverse)
        whole = _wait(begun)
        return whole if order is None else whole[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (inverse,) = grads, ctx.saved_tensors
        return _reduce_scattered(grad if inverse is None else grad[inverse], ctx.axis), None, None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _reduce_scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _wait(begin_gather(grads, ctx.axis)[0]), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _summed(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grads[0], ctx.axis), None
