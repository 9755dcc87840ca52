"""A record of one benchmark, the machine it was made on, and files of them: one JSON object a line."""

import datetime
import importlib.metadata
import json
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dsattn.bench.oracle import Error
from dsattn.bench.timing import Times
from dsattn.errors import DataError

FILE = "kernels.jsonl"
PACKAGES = (
    *("dsattn", "torch", "triton", "sgl-flash-mla", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "sgl-deep-gemm"),
    *("tilelang", "megatron-core"),
)
"""Distributions whose versions a record names, where they are installed."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where and from what a record was made.

    gpu, driver: None on a CPU. dirty: the tree differs from `commit`; both None where nobody said and git cannot tell.
    """

    gpu: str | None
    driver: str | None
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None
    date: str

    @classmethod
    def here(cls, device: torch.device, *, commit: str | None = None, dirty: bool | None = False) -> "Machine":
        """This machine, now. commit, dirty: both are asked of git where there is no commit."""
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        found = {name: version for name in PACKAGES if (version := _version(name))}
        if commit is None:
            commit, dirty = _checkout(Path(__file__))
        return cls(
            gpu=gpu,
            driver=_driver() if gpu else None,
            versions={**found, "cuda": torch.version.cuda or "none", "python": platform.python_version()},
            commit=commit,
            dirty=dirty,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """One operation, one shape, one backend.

    op: `sparse_mla.forward` and the like. backend: who served. passed_over: preferred rows of the table, and why not.
    shape: T, S, H, K, H_I, D, order, lengths, and C, V, G. ms: of one call. tflops, gbps: None where not counted.
    peers: name -> ms of the same work on the same operands. ratio: name -> peer ms / our ms, above 1 where we are
    faster. unavailable: name -> why a peer was not timed. error: see `oracle`. peak_bytes: GPU memory beside operands.
    """

    op: str
    backend: str
    passed_over: dict[str, str]
    shape: dict[str, Any]
    deterministic: bool
    ms: Times
    tflops: float | None
    gbps: float | None
    peers: dict[str, float]
    ratio: dict[str, float]
    error: Error
    peak_bytes: int | None
    machine: Machine
    unavailable: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the machine's fields stand beside the others."""
        tree = asdict(self)
        machine = tree.pop("machine")
        return {**tree, **machine}


class Line(Protocol):
    """What becomes a line of a file."""

    def to_dict(self) -> dict[str, Any]: ...


def append(path: Path, record: Line) -> None:
    """Add one line to a file, which is made where it is missing. The line is on its way to the disk on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Every record of the files, in order; of older formats too. Raises DataError where a file holds something else."""
    return [record for path in paths for record in _lines(path)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"records {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            assert isinstance(record["op"], str)
            assert isinstance(record["ms"]["median"], int | float)
            assert isinstance(record["shape"], dict)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise DataError(f"{path}: line {number} is no record of a benchmark; remove it to read the rest") from error
        yield record


def _checkout(file: Path) -> tuple[str | None, bool | None]:
    """Commit of the repository that holds a file, and whether it is dirty; (None, None) where git keeps no such file.

    Not of the working directory's: a run may start anywhere, and an installed package lies in others' repositories.
    """
    git = ["git", "-C", str(file.parent)]
    if not _output([*git, "ls-files", file.name]):
        return None, None
    commit, changed = _output([*git, "rev-parse", "HEAD"]), _output([*git, "status", "--porcelain", "-uno"])
    return commit, None if changed is None else bool(changed)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    found = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return found.partition("\n")[0] if found else None


def _output(command: list[str]) -> str | None:
    """What a command prints, stripped; None where there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
