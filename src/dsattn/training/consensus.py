"""Decisions that all ranks take together. They travel on the CPU: nobody waits for a device. One process decides alone.

Every function is collective over all processes: each makes the same calls in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dsattn.errors import DsattnError

T = TypeVar("T")


def size() -> int:
    """Processes that take part."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """My number among them; rank 0 writes and speaks for all."""
    return dist.get_rank() if size() > 1 else 0


def most(values: Sequence[int]) -> list[int]:
    """The largest of each over all ranks, in one all-reduce."""
    if size() == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def everyone(value: T) -> list[T]:
    """What each rank gives, by rank; it must pickle."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def together(make: Callable[[], T]) -> T:
    """`make()` on every rank. Where it raises on one, the first such error is raised on all, and named by its rank."""
    value: Any = None
    error: Exception | None = None
    try:
        value = make()
    except Exception as caught:
        error = caught
    if size() == 1:
        if error is not None:
            raise error
        return value
    if most([error is not None])[0]:
        _raise_first(error)
    return value


def on_first(make: Callable[[], T]) -> T:
    """`make()` of rank 0, on every rank. Where it raises there, the error is raised on all."""
    value = together(lambda: make() if rank() == 0 else None)
    if size() > 1:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        value = box[0]
    return value  # pyright: ignore[reportReturnType]


def _raise_first(mine: Exception | None) -> None:
    """Raise on every rank what the first rank with an error met; its own error is the cause there."""
    met = everyone(None if mine is None else (type(mine), str(mine)))
    number, (kind, said) = next((number, one) for number, one in enumerate(met) if one is not None)
    others = sum(one is not None for one in met) - 1
    where = f"rank {number} of {len(met)}" + (f" (and {others} more)" if others else "")
    try:
        raised = kind(f"{where}: {said}") if issubclass(kind, DsattnError) else RuntimeError(f"{where}: {said}")
    except TypeError:  # an error that is made of something else than a sentence
        raised = RuntimeError(f"{where}: {said}")
    raise raised from mine
