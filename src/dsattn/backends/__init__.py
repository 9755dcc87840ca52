"""Who computes each operation, and why: the only dispatch code.

TABLE lists, for every operation, its implementations in order of preference. Each row says what a call must be like for
it to serve. `choose` takes the first row whose requirements are met and remembers what it passed over; a name given by
the user runs or raises. Forward and backward are separate rows, so one vendor's forward may meet another's backward.
A vendor's row that stands before ours is for `auto` only where a record says that it is faster (`vendors.FASTER`); some
rows are never for `auto`.
The row `reference` is the plain-torch implementation that lives beside the operation's formula in `dsattn.ops`;
`composed` runs an operation's parts, each by its own rows.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsattn.backends.call import Call as Call
from dsattn.backends.call import size_class as size_class
from dsattn.backends.call import unmet as unmet
from dsattn.backends.cuts import CUT_KEYS as CUT_KEYS
from dsattn.backends.cuts import CUT_ROWS as CUT_ROWS
from dsattn.backends.cuts import Cut as Cut
from dsattn.backends.cuts import row_cuts as row_cuts
from dsattn.backends.heads import ALONE as ALONE
from dsattn.backends.heads import HeadRanks as HeadRanks
from dsattn.backends.options import Settings as Settings
from dsattn.backends.options import contribution_dtype as contribution_dtype
from dsattn.backends.options import current as current
from dsattn.backends.options import resolve_deterministic as resolve_deterministic
from dsattn.backends.options import scratch_bytes as scratch_bytes
from dsattn.backends.options import settings as settings
from dsattn.backends.vendors import is_installed, lacks_record, recorded
from dsattn.errors import BackendUnavailable

_log = logging.getLogger("dsattn")


@dataclass(frozen=True)
class Row:
    """One implementation of one operation.

    module: submodule of `dsattn.backends` that holds a function named like the operation (`.` read as `_`);
        None for the reference. requirements: what a call lacks, in words; empty when it can be served.
    record: what `auto` wants besides, in words. by_name: why `auto` never takes the row, in words; empty where it may.
    merit: the record by which the row stands before ours, in words; empty where there is none.
    """

    name: str
    module: str | None
    requirements: Callable[[Call], list[str]]
    record: Callable[[Call], list[str]] = lambda _: []
    by_name: str = ""
    merit: Callable[[Call], str] = lambda _: ""


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


def _vendor(module: str, *packages: str, **rest: Any) -> Row:
    """A vendor's kernels, named by the first part of `module`: where a package is missing, nothing is imported."""

    def requirements(call: Call) -> list[str]:
        if call.device != "cuda":
            return ["a CUDA GPU"]
        if not is_installed(*packages):
            return [f"the package {' and '.join(packages)}"]
        return importlib.import_module(f"dsattn.backends.{module}").requirements(call)

    return Row(module.partition(".")[0], module, requirements, **rest)


def _recorded(operation: str, module: str, package: str) -> Row:
    """A vendor's row that stands before ours where a record says so. Named like its package."""
    return _vendor(module, package, record=lacks_record(operation, package), merit=recorded(operation, package))


def _kernels(folder: str, file: str) -> Row:
    """Our kernels in `backends/FOLDER/`, imported where there are a GPU and Triton. `untimed`: why `auto` waits."""

    def requirements(call: Call) -> list[str]:
        if call.device != "cuda":
            return ["a CUDA GPU"]
        if importlib.util.find_spec("triton") is None:
            return ["the package triton"]
        return importlib.import_module(f"dsattn.backends.{folder}.{file}").requirements(call)

    def record(call: Call) -> list[str]:
        untimed = getattr(importlib.import_module(f"dsattn.backends.{folder}.{file}"), "untimed", None)
        return untimed(call) if untimed else []

    return Row(folder, f"{folder}.{file}", requirements, record=record)


REFERENCE = Row("reference", None, _always)
COMPOSED = Row("composed", None, _always)
TILELANG = _vendor("tilelang", "tilelang", "megatron", by_name="for comparison: every record is behind ours")
CUDNN_KL = _vendor("cudnn.indexer_kl", "cudnn", by_name="no record with what it adds to the bare kernels")

OPERATIONS = (
    "indexer_scores.forward",
    "indexer_scores.backward",
    "select_topk",
    "select_keys",
    "invert",
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
    "select_topk": (
        _kernels("triton", "select"),
        _vendor("cudnn.select_topk", "cudnn", by_name="no record with its repair of NaN and signed zeros"),
        _vendor("deep_select", "deep_select", by_name="no record"),
        REFERENCE,
    ),
    "select_keys": (
        _kernels("hopper", "select"),
        _kernels("triton", "select"),
        _vendor("deep_gemm", "deep_gemm"),  # fp8 and mxfp8 alone
        _vendor("cudnn.select", "cudnn", by_name="nothing promises a score's bits in another block of rows"),
        TILELANG,
        REFERENCE,
    ),
    "invert": (_kernels("triton", "invert"), REFERENCE),
    "sparse_mla.forward": (
        _recorded("sparse_mla.forward", "flash_mla", "flash_mla"),
        _kernels("hopper", "sparse_mla"),
        _kernels("triton", "sparse_mla"),
        TILELANG,
        REFERENCE,
    ),
    "sparse_mla.backward": (
        _recorded("sparse_mla.backward", "cudnn.sparse_mla", "cudnn"),
        _kernels("hopper", "sparse_mla"),
        _kernels("triton", "sparse_mla"),
        TILELANG,
        REFERENCE,
    ),
    "sparse_gqa.forward": (_kernels("triton", "sparse_gqa"), REFERENCE),
    "sparse_gqa.backward": (_kernels("triton", "sparse_gqa"), REFERENCE),
    "dense_mla.forward": (_kernels("triton", "dense"), REFERENCE),
    "dense_mla.backward": (_kernels("triton", "dense"), REFERENCE),
    "dense_gqa.forward": (_kernels("triton", "dense"), REFERENCE),
    "dense_gqa.backward": (_kernels("triton", "dense"), REFERENCE),
    "indexer_kl.forward": (_kernels("triton", "indexer_kl"), CUDNN_KL, REFERENCE),
    "indexer_kl.backward": (_kernels("triton", "indexer_kl"), CUDNN_KL, REFERENCE),
    "kda": (Row("fla", "fla", _fla), REFERENCE),
    "dsa_attention.forward": (_kernels("hopper", "dsa_attention"), COMPOSED),
    "dsa_attention.backward": (COMPOSED,),
}


def choose(operation: str, call: Call, backend: str = "auto") -> Choice:
    """The implementation that serves `call`: the first of TABLE that can, or the one named.

    A name that has a row for another direction of the same operation only (a forward without a backward) leaves this
    direction to `auto`. Raises BackendUnavailable with each unmet requirement; under `strict` also where only the
    reference is left on a GPU.
    """
    choice = _choose(operation, call, backend)
    if current().strict and choice.name == "reference" != backend and call.device != "cpu":
        reasons = "; ".join(f"{name} needs {why}" for name, why in choice.passed_over) or "no kernel is listed for it"
        raise BackendUnavailable(f"{operation}: strict forbids the reference on {call.device}: {reasons}")
    return choice


@functools.lru_cache(maxsize=4096)
def _choose(operation: str, call: Call, backend: str) -> Choice:
    rows = TABLE[operation]
    served = tuple(row for row in rows if not row.by_name)
    if backend != "auto":
        named = [row for row in rows if row.name == backend]
        if not named and not _serves_other_direction(operation, backend):
            known = ", ".join(row.name for row in rows)
            raise BackendUnavailable(f"{operation}: no backend named {backend!r}; there is auto, {known}")
        served = tuple(named) or served
    passed_over = []
    for row in served:
        lacks = row.requirements(call) or (row.record(call) if row.name != backend else [])
        if not lacks:
            choice = Choice(row.name, _load(operation, row), tuple(passed_over))
            _log_once(f"{operation} in {call.dtype}: {choice}")
            return choice
        passed_over.append((row.name, ", ".join(lacks)))
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


def prepare(operation: str, call: Call, backend: str = "auto") -> None:
    """Let who would serve `call` do what is best done once, before anything runs: `prepare` of a row's package.

    Nothing else is imported. Raises BackendUnavailable where nobody serves, and what the vendor's import raises.
    """
    choice = choose(operation, call, backend)
    if choice.function is not None:
        package = importlib.import_module(f"dsattn.backends.{choice.name}")
        getattr(package, "prepare", lambda: None)()


def explain(call: Call) -> str:
    """The whole table for `call`: who serves each operation, and what every other row lacks."""
    lines = []
    for operation, rows in TABLE.items():
        able = [row for row in rows if not (row.by_name or row.requirements(call) or row.record(call))]
        lines += [f"{operation:24s} {row.name:12s} {standing(row, call, row in able[:1])}" for row in rows]
    return "\n".join(lines)


def standing(row: Row, call: Call, serves: bool) -> str:
    """`serves` or `can serve`, with the record by which a vendor is preferred; or what is in the way.

    That is `needs` with what the call lacks, or `can serve by name` with what keeps `auto` from it.
    """
    if not serves:
        if lacks := row.requirements(call):
            return f"needs {', '.join(lacks)}"
        if passed := [row.by_name] if row.by_name else row.record(call):
            return f"can serve by name ({', '.join(passed)})"
    merit = row.merit(call)
    return ("serves" if serves else "can serve") + (f" ({merit})" if merit else "")
