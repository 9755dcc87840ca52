"""How our kernels start, and a record of what the compiler was asked for.

Triton compiles a kernel anew for other constants, for arguments that are 1 or divisible by 16 where they were not, and
for other dtypes. A training run must not: its token counts and packings change every step. `recording` notes what each
launch would be compiled for, with or without a GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import create_function_from_signature

from dsattn.backends import Call

# What a machine without a GPU records for: the rules of specialisation are the same for every NVIDIA GPU.
_WITHOUT_GPU = GPUTarget("cuda", 90, 32)

_DTYPES = ("bfloat16", "float16", "float32")

Recorded = dict[str, set[str]]

_recorded: Recorded | None = None
_start = True


def needs_of(call: Call, dtypes: tuple[str, ...] = _DTYPES) -> dict[str, bool]:
    """What every kernel in Triton needs: need in words -> whether it is met."""
    return {
        "a CUDA GPU of compute capability 8.0 or above": call.device == "cuda" and call.capability >= 80,
        f"{', '.join(dtypes[:-1])} or {dtypes[-1]} operands": call.dtype in dtypes,
    }


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start `kernel` on `grid`; an empty grid starts nothing. constants: its constexprs and Triton's launch options."""
    if 0 in grid:
        return
    if _recorded is not None:
        _recorded.setdefault(kernel.__name__, set()).add(specialization(kernel, *arguments, **constants))
    if _start:
        kernel[grid](*arguments, **constants)


@contextlib.contextmanager
def recording(*, start: bool = True) -> Iterator[Recorded]:
    """Kernel name -> what its launches inside the `with` are compiled for. start=False: note the launches only."""
    global _recorded, _start
    before = _recorded, _start
    _recorded, _start = {}, start
    try:
        yield _recorded
    finally:
        _recorded, _start = before


def specialization(kernel: Any, *arguments: Any, **constants: Any) -> str:
    """All that decides whether Triton compiles `kernel` again: dtypes, constants, divisibility, ones, options."""
    _, arguments_are, options = _binder(kernel)(*arguments, **constants)
    return f"{arguments_are} {sorted(options.items())}"


def compilations(kernel: Any) -> int:
    """How often this process compiled `kernel`, over all devices."""
    return sum(len(caches[0]) for caches in kernel.device_caches.values())


@functools.cache
def _binder(kernel: Any) -> Callable[..., Any]:
    target = driver.active.get_current_target() if torch.cuda.is_available() else _WITHOUT_GPU
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(target))
