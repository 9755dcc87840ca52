"""What a user sets for the whole process, and what kernels ask of it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dsattn.errors import InputError


@dataclass(frozen=True)
class Settings:
    """strict: falling to the reference on a GPU is an error. deterministic: gradients repeat bit for bit.

    first_use_checks: every kernel is compared with the reference, on a small case, before it first runs.
    fp32_contributions: where a backward writes what each slot contributes to a key's gradient and sums it by key, these
        are fp32 instead of the operands' dtype: each contribution's rounding is gone, its bytes, written and read, are
        twice as many, and half as many rows fit into the scratch. Sparse MLA's backward then takes 1.6 times as long on
        an H200.
    scratch_bytes: what a kernel's scratch takes at most, a row at least: rows are taken in runs that fit. References
        and scores (`block_bytes`) have budgets of their own. Where gradients of keys are summed by key, each run adds
        its sum in fp32 to that of the runs before: bits repeat with the same number, and may differ with another.
    """

    strict: bool = False
    deterministic: bool = False
    first_use_checks: bool = True
    fp32_contributions: bool = False
    scratch_bytes: int = 2**31

    def __post_init__(self) -> None:
        size = self.scratch_bytes
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(
                f"scratch_bytes={size!r} must be positive and finite, a whole number of bytes; 2**31 is the default"
            )


_settings = Settings()


@contextlib.contextmanager
def settings(
    *,
    strict: bool | None = None,
    deterministic: bool | None = None,
    first_use_checks: bool | None = None,
    fp32_contributions: bool | None = None,
    scratch_bytes: int | None = None,
) -> Iterator[Settings]:
    """Change the process-wide settings inside a `with`; None leaves a setting as it is.

    Read when an operation is called: a backward keeps the determinism of its forward. `fp32_contributions` and
    `scratch_bytes` are read when a kernel runs: a backward must run inside of the `with`, too.
    Raises InputError where scratch_bytes is no whole number above 0.
    """
    global _settings
    before = _settings
    asked = {
        "strict": strict,
        "deterministic": deterministic,
        "first_use_checks": first_use_checks,
        "fp32_contributions": fp32_contributions,
        "scratch_bytes": scratch_bytes,
    }
    _settings = replace(before, **{name: value for name, value in asked.items() if value is not None})
    try:
        yield _settings
    finally:
        _settings = before


def current() -> Settings:
    """The settings that hold now."""
    return _settings


def resolve_deterministic(asked: bool | None) -> bool:
    """An operation's own argument, else `settings`, else torch's global switch."""
    if asked is not None:
        return asked
    return _settings.deterministic or torch.are_deterministic_algorithms_enabled()


def contribution_dtype(operands: torch.dtype) -> torch.dtype:
    """Of what a slot contributes to a key's gradient until it is summed by key."""
    return torch.float32 if _settings.fp32_contributions else operands


def scratch_bytes(most: int | None = None) -> int:
    """Bytes that a kernel's scratch may take. most: of a kernel that gains nothing from more."""
    allowed = _settings.scratch_bytes
    return allowed if most is None else min(most, allowed)
