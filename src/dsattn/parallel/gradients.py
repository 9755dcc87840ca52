"""Gradients that lie in parts on many ranks: their norm, clipping by it (the same number on every rank), adding up."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsattn.parallel.mesh import ParallelMesh


def clip(
    parameters: Iterable[tuple[str, nn.Parameter]], most: float, mesh: ParallelMesh, copies: frozenset[str]
) -> float:
    """Scale all gradients down together where their global 2-norm is above `most`; return the norm before.

    parameters: this rank's, by name. A gradient counts once whatever holds it: DTensors by their shards, others once on
    each pipeline rank. copies: names that another pipeline rank counts. A norm that is not finite is returned, and
    leaves NaN behind. Collective; waits for the device.
    """
    gradients = [(name, one.grad) for name, one in parameters if one.grad is not None]
    counted = {name: gradient for name, gradient in gradients if name not in copies}  # copies here have one name
    total = _squares(counted.values(), mesh).sqrt()
    scale = (most / (total + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        local(gradient).mul_(scale)
    return total.item()


@contextlib.contextmanager
def set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, these have no gradients; those from before are added to what they have behind it."""
    before = [(one, one.grad) for one in parameters if one.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    yield
    for parameter, gradient in before:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def local(value: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def _squares(gradients: Iterable[Tensor], mesh: ParallelMesh) -> Tensor:
    """Sum of squares over all ranks, fp32: an all-reduce for each way that gradients are cut, and one over pp."""
    total = torch.zeros((), dtype=torch.float32, device=mesh.device)
    for groups, parts in _by_groups(gradients):
        square = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    if (group := mesh.group("pp")) is not None:
        dist.all_reduce(total, group=group)
    return total


def _by_groups(gradients: Iterable[Tensor]) -> Iterator[tuple[tuple[dist.ProcessGroup, ...], list[Tensor]]]:
    """(process groups that a gradient is cut over, this rank's parts of such gradients)."""
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in gradients:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            # A strided shard, of what is split twice, does not call itself a shard.
            cut = [dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate()]
            groups = tuple(gradient.device_mesh.get_group(dim) for dim in cut)
        parts.setdefault(groups, []).append(local(gradient))
    yield from parts.items()
