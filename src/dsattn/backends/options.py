"""What a user sets for the whole process, and what kernels ask of it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Settings:
    """strict: falling to the reference on a GPU is an error. deterministic: gradients repeat bit for bit.

    first_use_checks: every kernel is compared with the reference, on a small case, before it first runs.
    fp32_contributions: where a backward writes what each slot contributes to a key's gradient and sums it by key, these
        are fp32 instead of the operands' dtype: each contribution's rounding is gone, its bytes, written and read, are
        twice as many, and as many rows fit into the scratch as half of them.
    """

    strict: bool = False
    deterministic: bool = False
    first_use_checks: bool = True
    fp32_contributions: bool = False


_settings = Settings()


@contextlib.contextmanager
def settings(
    *,
    strict: bool | None = None,
    deterministic: bool | None = None,
    first_use_checks: bool | None = None,
    fp32_contributions: bool | None = None,
) -> Iterator[Settings]:
    """Change the process-wide settings inside a `with`; None leaves a setting as it is.

    Read when an operation is called: a backward keeps the determinism of its forward. `fp32_contributions` is read when
    a backward runs: it must run inside of the `with`.
    """
    global _settings
    before = _settings
    asked = {
        "strict": strict,
        "deterministic": deterministic,
        "first_use_checks": first_use_checks,
        "fp32_contributions": fp32_contributions,
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
