"""What a precision of selection costs and saves: recall of the selected keys, and time, beside bf16 and fp32.

Recall of a row is the share of the keys that the better precision selects which the lower one selects too. Rows that
see no more keys than they keep lose nothing in any precision, and are left out.
Letters: T query rows, S keys, H indexer heads, D indexer width, K kept keys.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsattn.bench.cases import Setting
from dsattn.bench.records import Machine
from dsattn.bench.timing import measure
from dsattn.config import Precision
from dsattn.errors import BackendUnavailable, InputError
from dsattn.keys import KeyRange
from dsattn.nn.norm import hadamard
from dsattn.ops import select_keys

FILE = "recall.jsonl"
_OUTLIERS = 4  # channels of keys that are so much larger
_LARGER = 32.0
_TIMED = ("auto", "deep_gemm")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """An indexer's operands. name: where they come from. q: [T, H, D], k: [S, D], w: [T, H]; keys: ranges of T rows."""

    name: str
    q: Tensor
    k: Tensor
    w: Tensor
    keys: KeyRange
    top_k: int
    relu: bool = True

    def rotated(self) -> "Inputs":
        """q and k by the Hadamard matrix: the same scores in exact arithmetic."""
        return replace(self, name=f"{self.name} hadamard", q=hadamard(self.q), k=hadamard(self.k))


def drawn(setting: Setting) -> Iterator[Inputs]:
    """fp32 operands: normal ones, and such with a few large channels of keys, as trained projections have them."""
    shape = setting.shape
    normal = replace(setting, dtype=torch.float32).normal(0)
    q = normal(setting.rows, shape.index_heads, shape.index_width)
    k = normal(setting.keys, shape.index_width)
    w = normal(setting.rows, shape.index_heads)
    plain = Inputs(name="gaussian", q=q, k=k, w=w, keys=setting.ranges, top_k=shape.top_k)
    large = k.clone()
    large[:, :_OUTLIERS] *= _LARGER
    for inputs in (plain, replace(plain, name="outliers", k=large)):
        yield inputs
        if shape.index_width.bit_count() == 1:
            yield inputs.rotated()


def recall(index: Tensor, better: Tensor, keys: KeyRange) -> Tensor:
    """[R] of the rows that see more than K keys. index, better: [T, K], ascending, then -1."""
    rows = (keys.lengths() > index.shape[1]).nonzero()[:, 0]
    if not len(rows):
        raise InputError("no row sees more keys than it keeps; take more keys, or a smaller top_k")
    got, want = index[rows].contiguous(), better[rows].contiguous()
    place = torch.searchsorted(got.masked_fill(got < 0, torch.iinfo(got.dtype).max), want).clamp(max=got.shape[1] - 1)
    found = (got.gather(1, place) == want) & (want >= 0)
    return found.sum(1) / (want >= 0).sum(1).clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class Recall:
    """A precision on one kind of input.

    shape: T, S, H_I, D, K. rows: that counted. recall, least: mean and worst row, against `bf16` and `fp32` operands.
    ms: name -> milliseconds of a call: of `bf16`, of `auto` in this precision, of `deep_gemm` in it, where they serve.
    unavailable: name -> why it does not.
    """

    inputs: str
    precision: str
    shape: dict[str, int]
    rows: int
    recall: dict[str, float]
    least: dict[str, float]
    ms: dict[str, float]
    unavailable: dict[str, str]

    def line(self, machine: Machine) -> str:
        """One line of JSON, with the machine's fields beside the others."""
        return json.dumps({**asdict(self), **asdict(machine)}, allow_nan=False)


def measured(inputs: Inputs, precision: Precision, dtype: torch.dtype, *, seconds: float = 1.0) -> Recall:
    """Recall and times of one precision, of operands rounded to `dtype` as a model would hold them."""
    device = inputs.q.device
    held = replace(inputs, q=inputs.q.to(dtype), k=inputs.k.to(dtype), w=inputs.w.to(dtype))
    index = _select(held, precision)
    against = {"bf16": _select(held, "bf16"), "fp32": _select(_wide(inputs), "bf16")}
    shares = {name: recall(index, better, inputs.keys) for name, better in against.items()}
    ms, unavailable = {"bf16": measure([lambda: _select(held, "bf16")], device, seconds=seconds).median}, {}
    for backend in _TIMED:
        try:
            ms[backend] = measure([lambda b=backend: _select(held, precision, b)], device, seconds=seconds).median
        except BackendUnavailable as reason:
            unavailable[backend] = str(reason)
    rows, heads, width = inputs.q.shape
    return Recall(
        inputs=inputs.name,
        precision=precision,
        shape={"T": rows, "S": len(inputs.k), "H_I": heads, "D": width, "K": inputs.top_k},
        rows=len(shares["bf16"]),
        recall={name: float(share.mean()) for name, share in shares.items()},
        least={name: float(share.min()) for name, share in shares.items()},
        ms=ms,
        unavailable=unavailable,
    )


def _wide(inputs: Inputs) -> Inputs:
    return replace(inputs, q=inputs.q.float(), k=inputs.k.float(), w=inputs.w.float())


def _select(inputs: Inputs, precision: Precision, backend: str = "auto") -> Tensor:
    options = {"relu": inputs.relu, "backend": backend}
    return select_keys(inputs.q, inputs.k, inputs.w, inputs.keys, inputs.top_k, precision=precision, **options).index


def append(path: Path, line: str) -> None:
    """Add a line to a file, which is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
