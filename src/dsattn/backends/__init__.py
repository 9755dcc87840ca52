"""Who computes each operation, and why: the only dispatch code.

TABLE lists, for every operation, its implementations in order of preference. Each row says what a call must be like for
it to serve. `choose` takes the first row whose requirements are met and remembers what it passed over; a name given by
the user runs or raises. Forward and backward are separate rows, so one vendor's forward may meet another's backward.
The row `reference` is the plain-torch implementation that lives beside the operation's formula in `dsattn.ops`;
`composed` runs an operation's parts, each by its own rows.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsattn.errors import BackendUnavailable

_log = logging.getLogger("dsattn")


@dataclass(frozen=True, kw_only=True)
class Call:
    """What dispatch may know of a call: never a tensor, never an exact token count.

    device: `cpu` or `cuda`; capability: 90 for Hopper, 0 without a GPU; dtype: of the operands.
    heads, width, value_width: of the attention or indexer heads; top_k: kept keys, 0 where nothing is selected.
    size_class: of the number of keys, see `size_class`; deterministic: bitwise repeatable gradients are asked for.
    """

    device: str = "cpu"
    capability: int = 0
    dtype: str = "float32"
    heads: int = 1
    width: int = 1
    value_width: int = 0
    top_k: int = 0
    size_class: str = "8K"
    deterministic: bool = False

    @classmethod
    def of(cls, operands: Tensor | tuple[Tensor, ...], num_keys: int, **rest: Any) -> "Call":
        """The call with these operands, on one device: their dtypes meet in their promotion."""
        operands = operands if isinstance(operands, tuple) else (operands,)
        operand, capability = operands[0], 0
        if operand.is_cuda:
            major, minor = torch.cuda.get_device_capability(operand.device)
            capability = 10 * major + minor
        common = functools.reduce(torch.promote_types, (one.dtype for one in operands))
        dtype = str(common).removeprefix("torch.")
        device = operand.device.type
        return cls(device=device, capability=capability, dtype=dtype, size_class=size_class(num_keys), **rest)


def size_class(num_keys: int) -> str:
    """`8K`, `64K` (up to so many keys) or `above`."""
    return "8K" if num_keys <= 8192 else "64K" if num_keys <= 65536 else "above"


@dataclass(frozen=True)
class Row:
    """One implementation of one operation.

    module: submodule of `dsattn.backends` that holds a function named like the operation (`.` read as `_`);
        None for the reference. requirements: what a call lacks, in words; empty when it can be served.
    """

    name: str
    module: str | None
    requirements: Callable[[Call], list[str]]


@dataclass(frozen=True)
class Choice:
    """name: of the row that serves. function: its implementation, None for the reference.

    passed_over: why each preferred row does not serve.
    """

    name: str
    function: Callable[..., Any] | None
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        skipped = "; ".join(f"{name} needs {why}" for name, why in self.passed_over)
        return f"{self.name} (passed over: {skipped})" if skipped else self.name


def _always(_: Call) -> list[str]:
    return []


def _fla(call: Call) -> list[str]:
    return importlib.import_module("dsattn.backends.fla").requirements(call)


def _kernels(folder: str, file: str) -> Row:
    """Our kernels in `backends/FOLDER/`: nothing is imported before a call is on a GPU and Triton is there."""

    def requirements(call: Call) -> list[str]:
        if call.device != "cuda":
            return ["a CUDA GPU"]
        if importlib.util.find_spec("triton") is None:
            return ["the package triton"]
        return importlib.import_module(f"dsattn.backends.{folder}.{file}").requirements(call)

    return Row(folder, f"{folder}.{file}", requirements)


REFERENCE = Row("reference", None, _always)
COMPOSED = Row("composed", None, _always)

OPERATIONS = (
    "indexer_scores.forward",
    "indexer_scores.backward",
    "select_topk",
    "select_keys",
    "sparse_mla.forward",
    "sparse_mla.backward",
    "sparse_gqa.forward",
    "sparse_gqa.backward",
    "dense_mla.forward",
    "dense_mla.backward",
    "dense_gqa.forward",
    "dense_gqa.backward",
    "indexer_kl.forward",
    "indexer_kl.backward",
    "dsa_attention.forward",
    "dsa_attention.backward",
    "output_gate.forward",
    "output_gate.backward",
    "kda",
)

TABLE: dict[str, tuple[Row, ...]] = {
    **dict.fromkeys(OPERATIONS, (REFERENCE,)),
    "select_topk": (_kernels("triton", "select"), REFERENCE),
    "select_keys": (_kernels("triton", "select"), REFERENCE),
    "sparse_mla.forward": (_kernels("hopper", "sparse_mla"), _kernels("triton", "sparse_mla"), REFERENCE),
    "sparse_mla.backward": (_kernels("hopper", "sparse_mla"), _kernels("triton", "sparse_mla"), REFERENCE),
    "sparse_gqa.forward": (_kernels("triton", "sparse_gqa"), REFERENCE),
    "sparse_gqa.backward": (_kernels("triton", "sparse_gqa"), REFERENCE),
    "dense_mla.forward": (_kernels("triton", "dense"), REFERENCE),
    "dense_mla.backward": (_kernels("triton", "dense"), REFERENCE),
    "dense_gqa.forward": (_kernels("triton", "dense"), REFERENCE),
    "dense_gqa.backward": (_kernels("triton", "dense"), REFERENCE),
    "indexer_kl.forward": (_kernels("triton", "indexer_kl"), REFERENCE),
    "indexer_kl.backward": (_kernels("triton", "indexer_kl"), REFERENCE),
    "kda": (Row("fla", "fla", _fla), REFERENCE),
    "dsa_attention.forward": (COMPOSED,),
    "dsa_attention.backward": (COMPOSED,),
}


@dataclass(frozen=True)
class Settings:
    """strict: falling to the reference on a GPU is an error. deterministic: gradients repeat bit for bit.

    first_use_checks: every kernel is compared with the reference, on a small case, before it first runs.
    """

    strict: bool = False
    deterministic: bool = False
    first_use_checks: bool = True


_settings = Settings()


@contextlib.contextmanager
def settings(
    *, strict: bool | None = None, deterministic: bool | None = None, first_use_checks: bool | None = None
) -> Iterator[Settings]:
    """Change the process-wide settings inside a `with`; None leaves a setting as it is.

    Read when an operation is called: a backward keeps the determinism of its forward.
    """
    global _settings
    before = _settings
    asked = {"strict": strict, "deterministic": deterministic, "first_use_checks": first_use_checks}
    _settings = replace(before, **{name: value for name, value in asked.items() if value is not None})
    try:
        yield _settings
    finally:
        _settings = before


def checks_first_use() -> bool:
    """Whether `settings` ask for a check of every kernel before it first runs."""
    return _settings.first_use_checks


def resolve_deterministic(asked: bool | None) -> bool:
    """An operation's own argument, else `settings`, else torch's global switch."""
    if asked is not None:
        return asked
    return _settings.deterministic or torch.are_deterministic_algorithms_enabled()


def choose(operation: str, call: Call, backend: str = "auto") -> Choice:
    """The implementation that serves `call`: the first of TABLE that can, or the one named.

    A name that has a row for another direction of the same operation only (a forward without a backward) leaves this
    direction to `auto`. Raises BackendUnavailable with each unmet requirement; under `strict` also where only the
    reference is left on a GPU.
    """
    choice = _choose(operation, call, backend)
    if _settings.strict and choice.name == "reference" != backend and call.device != "cpu":
        reasons = "; ".join(f"{name} needs {why}" for name, why in choice.passed_over) or "no kernel is listed for it"
        raise BackendUnavailable(f"{operation}: strict forbids the reference on {call.device}: {reasons}")
    return choice


@functools.lru_cache(maxsize=4096)
def _choose(operation: str, call: Call, backend: str) -> Choice:
    rows = TABLE[operation]
    if backend != "auto":
        named = [row for row in rows if row.name == backend]
        if not named and not _serves_other_direction(operation, backend):
            known = ", ".join(row.name for row in rows)
            raise BackendUnavailable(f"{operation}: no backend named {backend!r}; there is auto, {known}")
        rows = tuple(named) or rows
    passed_over = []
    for row in rows:
        unmet = row.requirements(call)
        if not unmet:
            choice = Choice(row.name, _load(operation, row), tuple(passed_over))
            _log_once(f"{operation}: {choice}")
            return choice
        passed_over.append((row.name, ", ".join(unmet)))
    reasons = "; ".join(f"{name} needs {why}" for name, why in passed_over)
    raise BackendUnavailable(f"{operation}: {reasons}; got {call}")


@functools.cache
def _log_once(line: str) -> None:
    """Calls that differ in their sizes alone choose alike, for the same reasons: one line tells of all."""
    _log.info(line)


def _serves_other_direction(operation: str, backend: str) -> bool:
    family = operation.partition(".")[0] + "."
    return any(row.name == backend for name, rows in TABLE.items() if name.startswith(family) for row in rows)


def _load(operation: str, row: Row) -> Callable[..., Any] | None:
    if row.module is None:
        return None
    module = importlib.import_module(f"dsattn.backends.{row.module}")
    return getattr(module, operation.replace(".", "_"))


def explain(call: Call) -> str:
    """The whole table for `call`: who serves each operation, and what every other row lacks."""
    lines = []
    for operation, rows in TABLE.items():
        for row in rows:
            unmet = row.requirements(call)
            lines.append(f"{operation:24s} {row.name:12s} {'needs ' + ', '.join(unmet) if unmet else 'can serve'}")
        lines[-len(rows) :] = _mark_chosen(lines[-len(rows) :])
    return "\n".join(lines)


def _mark_chosen(lines: list[str]) -> list[str]:
    chosen = next((i for i, line in enumerate(lines) if line.endswith("can serve")), None)
    return [line.replace("can serve", "serves") if i == chosen else line for i, line in enumerate(lines)]
