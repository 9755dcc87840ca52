"""What adapters of vendors' packages share: versions, records in which a vendor is faster, steps that several take.

`auto` takes a vendor's row that stands before ours only for calls of which FASTER has a record. Elsewhere it passes the
row over with that reason, and the row can be had by name.
"""

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsattn.selection import rank

if TYPE_CHECKING:
    from dsattn.backends import Call

Version = tuple[int, ...]

# Import name -> the distributions that bring it, the one to install first.
DISTRIBUTIONS = {
    "flash_mla": ("sgl-flash-mla", "tokenspeed-flashmla", "flash-mla"),
    "cudnn": ("nvidia-cudnn-frontend",),
    "deep_gemm": ("sgl-deep-gemm",),
    "deep_select": ("tokenspeed-deepselect", "deep-select"),
    "tilelang": ("tilelang",),
}


@dataclass(frozen=True, kw_only=True)
class Faster:
    """A vendor's record beside our fastest kernel, which it stands before in TABLE.

    over: our row. distribution, version: the package of the record, and the oldest one it holds for. capability, heads,
    width, value_width, top_k: of the record's calls. deterministic: whether repeatable gradients were asked for; None
    where that changes nothing. ratio: size class of the keys -> the vendor's time over ours, below 1.
    """

    operation: str
    backend: str
    over: str
    distribution: str
    version: Version
    capability: int = 90
    dtype: str = "bfloat16"
    heads: int = 64
    width: int = 576
    value_width: int = 512
    top_k: int = 2048
    deterministic: bool | None = None
    ratio: Mapping[str, float]

    def lacks(self, call: "Call") -> list[str]:
        """What keeps the record from speaking for `call`, in words."""
        if version_of(self.distribution) < self.version:
            return [f"{self.distribution} {dotted(self.version)} or newer, which the record is of"]
        same = ("capability", "dtype", "heads", "width", "value_width", "top_k")
        other = [f"{name} {getattr(self, name)}" for name in same if getattr(call, name) != getattr(self, name)]
        if self.deterministic not in (None, call.deterministic):
            other.append(f"deterministic {self.deterministic}")
        if call.size_class not in self.ratio:
            other.append(f"keys of {' or '.join(self.ratio)}")
        return [f"a record in which it is faster (there is one for {', '.join(other)})"] if other else []


# results/kernels.jsonl of 2026-11-30, commit 8938fdc, one H200, 4096 rows, ascending keys with lengths;
# tests/backends/test_vendors.py compares.
_FLASH_MLA: dict[str, Any] = {"operation": "sparse_mla.forward", "backend": "flash_mla", "over": "hopper"}
_FLASH_MLA |= {"distribution": "sgl-flash-mla", "version": (1, 0)}
_CUDNN: dict[str, Any] = {"operation": "sparse_mla.backward", "backend": "cudnn", "over": "hopper"}
_CUDNN |= {"distribution": "nvidia-cudnn-frontend", "version": (1, 32), "deterministic": False}
FASTER = (
    Faster(**_FLASH_MLA, heads=64, ratio={"8K": 0.92, "64K": 0.94, "above": 0.91}),
    Faster(**_CUDNN, heads=64, ratio={"8K": 0.96, "64K": 0.90}),
    Faster(**_FLASH_MLA, heads=128, ratio={"8K": 0.90, "64K": 0.87, "above": 0.91}),
    Faster(**_CUDNN, heads=128, ratio={"8K": 0.95, "64K": 0.92}),
)


def lacks_record(operation: str, backend: str) -> Callable[["Call"], list[str]]:
    """A function from a call to why no record lets `auto` prefer this row, in words; empty where one does."""
    records = [record for record in FASTER if (record.operation, record.backend) == (operation, backend)]

    def lacks(call: "Call") -> list[str]:
        missing = [record.lacks(call) for record in records]
        return [] if [] in missing else [why for reasons in missing for why in reasons] or ["a record"]

    return lacks


def recorded(operation: str, backend: str) -> Callable[["Call"], str]:
    """A function from a call to the record by which `auto` prefers this row, in words; empty without one."""

    def told(call: "Call") -> str:
        for one in FASTER:
            if (one.operation, one.backend) == (operation, backend) and not one.lacks(call):
                return f"recorded at {one.ratio[call.size_class]:.2f} x the time of {one.over}"
        return ""

    return told


@functools.cache
def version_of(distribution: str) -> Version:
    """The leading numbers of an installed distribution's version; () where it is not installed."""
    try:
        found = re.match(r"\d+(\.\d+)*", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(map(int, found.group().split("."))) if found else ()


def dotted(version: Version) -> str:
    """`1.26` of (1, 26)."""
    return ".".join(map(str, version))


def is_installed(*packages: str) -> bool:
    """Whether every package can be found; none is imported."""
    return all(importlib.util.find_spec(name) is not None for name in packages)


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """(q, scale, sign) with a scale above 0, which running maxima need: the sign has gone into q."""
    if scale > 0:
        return q, scale, 1
    sign = -1 if scale < 0 else 0
    return q * sign, -scale or 1.0, sign


def rank_scores(scores: Tensor, start: Tensor, stop: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(index [T, K], length [T]) of a vendor's scores [T, S], by the ranking rule and whichever row serves best.

    Scores outside of the ranges may be anything.
    """
    from dsattn.backends import Call, choose

    choice = choose("select_topk", Call.of(scores, scores.shape[1], top_k=top_k))
    if choice.function is not None:
        return choice.function(scores, start, stop, top_k)
    column = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    hidden = (column < start[:, None]) | (column >= stop[:, None])
    index, length, _ = rank(scores.masked_fill(hidden, -torch.inf), column, top_k)
    return index, length


def select_in_blocks(
    score: Callable[[slice], Tensor], start: Tensor, stop: Tensor, top_k: int, rows_of_block: int
) -> tuple[Tensor, Tensor]:
    """(index [T, K], length [T]) where `score` makes the scores [rows, S] of a slice of rows."""
    rows = len(start)
    index = torch.full((rows, top_k), -1, dtype=torch.int32, device=start.device)
    length = torch.zeros(rows, dtype=torch.int32, device=start.device)
    for first in range(0, rows, rows_of_block):
        part = slice(first, min(first + rows_of_block, rows))
        index[part], length[part] = rank_scores(score(part), start[part], stop[part], top_k)
    return index, length
