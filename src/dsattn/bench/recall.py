"""What a precision of selection costs and saves: recall of the selected keys, and time, beside bf16 and fp32.

Recall of a row is the share of the keys that the better precision selects which the lower one selects too. Rows that
see no more keys than they keep lose nothing in any precision, and are left out.
Letters: T query rows, S keys, H indexer heads, D indexer width, K kept keys.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsattn.bench.cases import Operands, Setting, Shape
from dsattn.bench.records import Machine, Record
from dsattn.bench.run import Refusal, timed
from dsattn.bench.trials import select_keys_trial
from dsattn.config import Precision
from dsattn.errors import InputError
from dsattn.keys import KeyRange
from dsattn.nn.norm import hadamard
from dsattn.ops import select_keys

FILE = "recall.jsonl"
_OUTLIERS = 4  # channels of keys that are so much larger
_LARGER = 32.0


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

    record: as of any operation; its peers are ours in bf16 and DeepGEMM's scores in this precision, ranked by cuDNN or
    torch. inputs: where they come from. rows: that count for the recall. recall, least: mean and worst row, against
    `bf16`, operands as a model holds them, and `fp32`, operands before that rounding.
    """

    record: Record
    inputs: str
    precision: str
    rows: int
    recall: dict[str, float]
    least: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the record's fields stand beside the others."""
        tree = asdict(self)
        del tree["record"]
        return {**self.record.to_dict(), **tree}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to measure. dtype: what a model holds operands in. backend: of the precision, as `select_keys` takes it.

    peers: whether to time others too. seconds: about how long to repeat each call.
    """

    precision: Precision
    dtype: torch.dtype = torch.bfloat16
    backend: str = "auto"
    peers: bool = False
    seconds: float = 1.0


def measured(inputs: Inputs, options: Options, machine: Machine) -> Recall | Refusal:
    """Check, time and compare one precision on operands rounded to `dtype`."""
    held = replace(inputs, q=inputs.q.to(options.dtype), k=inputs.k.to(options.dtype), w=inputs.w.to(options.dtype))
    setting = _setting(held, options)

    def copy(_: int) -> Operands:
        return Operands(q_i=held.q.clone(), k_i=held.k.clone(), w=held.w.clone())

    rest: dict[str, Any] = {"peers": options.peers, "seconds": options.seconds}
    record = timed("select_keys", lambda: select_keys_trial(setting, copy), setting, machine, **rest)
    if isinstance(record, Refusal):
        return record
    index = _select(held, options.precision, options.backend)
    against = {"bf16": _select(held, "bf16"), "fp32": _select(_wide(inputs), "bf16")}
    shares = {name: recall(index, better, inputs.keys) for name, better in against.items()}
    return Recall(
        record=record,
        inputs=inputs.name,
        precision=options.precision,
        rows=len(shares["bf16"]),
        recall={name: float(share.mean()) for name, share in shares.items()},
        least={name: float(share.min()) for name, share in shares.items()},
    )


def _setting(inputs: Inputs, options: Options) -> Setting:
    rows, heads, width = inputs.q.shape
    return Setting(
        shape=Shape(index_heads=heads, index_width=width, top_k=inputs.top_k),
        rows=rows,
        keys=len(inputs.k),
        given=inputs.keys,
        relu=inputs.relu,
        precision=options.precision,
        backend=options.backend,
        device=inputs.q.device,
        dtype=options.dtype,
    )


def _wide(inputs: Inputs) -> Inputs:
    return replace(inputs, q=inputs.q.float(), k=inputs.k.float(), w=inputs.w.float())


def _select(inputs: Inputs, precision: Precision, backend: str = "auto") -> Tensor:
    options = {"relu": inputs.relu, "backend": backend}
    return select_keys(inputs.q, inputs.k, inputs.w, inputs.keys, inputs.top_k, precision=precision, **options).index
