"""A kernel is checked before its first use: a small case of the call's geometry, against the reference in fp64.

A compiler, a driver or a GPU that nobody tried may make a right kernel wrong. The check runs the compiled kernel that
the call is about to run, once per operation, backend, device and geometry (everything that a kernel is compiled for:
heads, widths, top-k, dtypes, flags, settings), on the few rows and keys of `first_use_cases`. Where a backend takes
another route for more keys, that route is not seen. Verdicts hold for the process; a refused kernel stays refused.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsattn.backends import Choice, current
from dsattn.errors import BackendUnavailable
from dsattn.ops.first_use_cases import Arguments, geometry, named_results, names_of, small_case, widened

_log = logging.getLogger("dsattn")

Run = Callable[..., Any]


class Finding(NamedTuple):
    """What a check found of one tensor that a kernel returns."""

    tensor: str
    error: float
    limit: float


# Largest error of a row against its norm, by the narrowest operand. Right kernels stay several times below; one that
# drops a key, a head or a channel, or multiplies fp32 in TF32, is above.
LIMITS = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-8}

_OFF = "dsattn.settings(first_use_checks=False)"
_WAY_OUT = f"use another backend (backend='reference' always serves), or turn the check off: {_OFF}"

_verdicts: dict[tuple[Any, ...], str | None] = {}
_lock = threading.Lock()


def serve(operation: str, choice: Choice, reference: Run, forward: Run | None = None) -> Run:
    """What runs: the chosen function, checked before its first use, or the reference where none was chosen.

    reference: of the same arguments. forward: for a backward, the reference of its forward, which makes what the
    backward is given of it. Raises BackendUnavailable, when called, where the check fails, and where it cannot run
    because a CUDA graph is being captured.
    """
    function = choice.function
    if function is None:
        return reference

    def run(*given: Any) -> Any:
        if current().first_use_checks:
            _check(operation, choice, (reference, forward), given)
        return function(*given)

    return run


def _check(operation: str, choice: Choice, references: tuple[Run, Run | None], given: Arguments) -> None:
    device = _device(given)
    geometry_of = geometry(names_of(references[0]), given)
    key = (operation, choice.name, choice.function, device, geometry_of, current().fp32_contributions)
    if key not in _verdicts:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise BackendUnavailable(
                f"{operation}: {choice.name} has not run yet, and its first-use check cannot be part of a CUDA graph; "
                f"run the call once before the capture, or turn the check off: {_OFF}"
            )
        with _lock:
            if key not in _verdicts:
                _verdicts[key] = _verdict(operation, choice, references, given)
    problem = _verdicts[key]
    if problem is not None:
        raise BackendUnavailable(problem)


def _verdict(operation: str, choice: Choice, references: tuple[Run, Run | None], given: Arguments) -> str | None:
    """What is wrong with the function, in words; None where it is right."""
    function = choice.function or references[0]
    try:
        findings = compare(operation, function, *references, given)
    except Exception as error:
        error.add_note(f"raised by {choice.name} in the first-use check of {operation}; {_WAY_OUT}")
        raise
    wrong = [finding for finding in findings if not finding.error <= finding.limit]  # NaN is wrong too
    if not wrong:
        told = ", ".join(f"{one.tensor} {one.error:.1e}" for one in findings)
        _log.info("%s: %s checked on %s, errors: %s", operation, choice.name, _device(given), told)
        return None
    told = ", ".join(f"{one.tensor} errs by {one.error:.1e}, limit {one.limit:.1e}" for one in wrong)
    return (
        f"{operation}: {choice.name} gives wrong results on {_device(given)}, where a small case was compared with the "
        f"reference: {told}; {_WAY_OUT}"
    )


@torch.no_grad()
def compare(operation: str, function: Run, reference: Run, forward: Run | None, given: Arguments) -> list[Finding]:
    """Errors of all that `function` returns on the small case that `given` leads to, against `reference` in fp64."""
    case = small_case(reference, forward, given)
    got = named_results(operation, function(*case.values()), case)
    exact = named_results(operation, reference(*widened(case).values()), case)
    dtypes = {one.dtype for one in case.values() if isinstance(one, Tensor)}
    limit = max((limit for dtype, limit in LIMITS.items() if dtype in dtypes), default=0)
    return [
        Finding(name, error_of(one, exact[name]), limit if one.is_floating_point() else 0) for name, one in got.items()
    ]


def error_of(got: Tensor, exact: Tensor) -> float:
    """Largest error of a row: against its norm, or the root mean square of all rows' norms where that is larger.

    Whole numbers: how many differ. inf where shapes differ, or where one of the two is not finite and the other is.
    """
    if got.shape != exact.shape:
        return torch.inf
    if not got.is_floating_point():
        return float((got != exact).sum())
    if not got.numel():
        return 0.0
    got, finite = got.double(), exact.isfinite()
    if not torch.where(finite, got.isfinite(), got == exact).all():
        return torch.inf
    rows = got.shape[0] if got.dim() else 1
    norm = torch.where(finite, exact, 0.0).reshape(rows, -1).norm(dim=1)
    error = torch.where(finite, got - exact, 0.0).reshape(rows, -1).norm(dim=1)
    return float((error / torch.maximum(norm, norm.square().mean().sqrt()).clamp(min=1e-30)).max())


def _device(given: Arguments) -> torch.device:
    return next(one.device for one in given if isinstance(one, Tensor))
