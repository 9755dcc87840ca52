"""A whole training step as one CUDA graph: forward, backward and optimiser, replayed on other packs of one size.

    step = GraphedStep(train_step)              train_step(tokens, labels, layout, labels_in_batch, rows_in_batch)
    for pack in packs:
        losses = step(pack.tokens, pack.labels, pack.layout, count, rows)

A graph repeats addresses and numbers, not Python: what differs from step to step must be a tensor or a Layout, which
are refreshed in place. The step makes its own gradients (`zero_grad(set_to_none=True)`), its optimiser is `capturable`,
and nothing in it may wait for the GPU.
"""

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.parallel.recompute import tensors

R = TypeVar("R")


class GraphedStep(Generic[R]):
    """`step`, run as it is for the first `warmups` calls, then captured, then replayed. Every call is a step.

    Inputs: tensors on one GPU, Layouts, and plain values that never change. The result is the step's own, in memory
    that the next call writes again.
    Raises InputError where an input cannot be refreshed (another size, another plain value, a layout that lost its
    certificate) or the step cannot be captured.
    """

    def __init__(self, step: Callable[..., R], *, warmups: int = 2):
        if warmups < 1:
            raise InputError(f"warmups={warmups} must be at least 1: kernels are compiled and checked outside a graph")
        self._step, self._left = step, warmups
        self._static: tuple[Any, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self, *inputs: Any) -> R:
        """One step on `inputs`."""
        if self._static is None:
            self._static = copied(inputs)
        else:
            refresh(self._static, inputs)
        if self._left > 0:
            self._left -= 1
            return self._warm_up(self._static)
        if self._graph is None:
            self._graph = self._capture(self._static)
        self._graph.replay()
        return self._result

    def _warm_up(self, static: tuple[Any, ...]) -> R:
        """On a stream of its own, as capture will be."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self._step(*static)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _capture(self, static: tuple[Any, ...]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._result = self._step(*static)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise InputError(
                f"the step cannot be captured: {why}. Nothing in it may wait for the GPU (.item(), .cpu(), sizes "
                "taken from data) or compile a kernel; give numbers that change as 0-d tensors, and use "
                "AdamW(capturable=True)"
            ) from error
        return graph


def copied(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Static copies. Raises InputError unless every tensor is on a GPU, and there is one; and where one is inside."""
    tables = [x.positions if isinstance(x, Layout) else x for x in inputs if isinstance(x, Layout | Tensor)]
    for at, given in enumerate(inputs):
        if not isinstance(given, Layout | Tensor) and next(tensors(given), None) is not None:
            raise InputError(f"input {at} is a {type(given).__name__} with tensors inside; give each on its own")
    if not tables or not all(x.is_cuda for x in tables):
        where = ", ".join(str(x.device) for x in tables) or "none"
        raise InputError(f"CUDA graphs need tensors and layouts on a GPU, got {where}; move them there first")
    return copy.deepcopy(inputs)


def refresh(static: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
    """Write `inputs` into `static`, layouts first, as they may refuse. Raises InputError where one does not fit."""
    if len(static) != len(inputs):
        raise InputError(f"the step was captured with {len(static)} inputs, got {len(inputs)}")
    for at, (mine, given) in enumerate(zip(static, inputs, strict=True)):
        if isinstance(mine, Tensor) and isinstance(given, Tensor):
            if (mine.shape, mine.dtype) != (given.shape, given.dtype):
                raise InputError(
                    f"input {at} is {_called(given)}; the graph has room for {_called(mine)}: pad the pack, or make a "
                    "GraphedStep for each size"
                )
        elif isinstance(mine, Layout) and isinstance(given, Layout):
            continue
        elif isinstance(mine, Layout | Tensor) or isinstance(given, Layout | Tensor) or mine != given:
            raise InputError(
                f"input {at} is {_called(given)}, but the graph repeats {_called(mine)}: give what changes as a tensor "
                "or a Layout, in every call"
            )
    for mine, given in sorted(zip(static, inputs, strict=True), key=lambda pair: not isinstance(pair[0], Layout)):
        if isinstance(mine, Tensor | Layout):
            mine.copy_(given)


def _called(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return "a Layout" if isinstance(value, Layout) else repr(value)
