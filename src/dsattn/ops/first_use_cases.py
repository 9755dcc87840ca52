"""Small cases for the first-use checks: operands by the names that the references give their arguments.

A case has the geometry of the call that it stands for, few rows, a few more keys than top-k, long, short and empty
rows, and NaN in all that nobody may read. The numbers are always the same; torch's generators are left alone.
Letters: T query rows, S keys, H heads, G groups, C width, K kept keys.
"""

import functools
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import ALONE, HeadRanks
from dsattn.keys import KeyRange
from dsattn.selection import Inverse, invert

Arguments = tuple[Any, ...]

_GATHERED_ROWS, _RANGED_ROWS = 17, 161
_UNREAD = 13  # keys at the end, besides the first
_BEYOND = 54  # keys beyond top-k that a row may read
_OF_ROWS = ("q", "q_i", "w", "grad_out", "target")
_OF_LOSS_ROWS = ("q_i", "w")
_OF_KEYS = ("kv", "k", "v", "k_i")
# Arguments whose values and shapes say nothing of what a kernel is compiled for.
_FREE = ("scale", "block_bytes", "num_keys")
_TOKENS_ONLY = ("scores", "score_lse")

_ATTENTION, _LOSS = ("out", "lse"), ("loss", "score_lse", "mass", "dscore")
_RESULTS = {
    "select_topk": ("index", "length"),
    "select_keys": ("index", "length", "score"),
    "invert": ("slot", "offset"),
    "sparse_mla.forward": _ATTENTION,
    "sparse_mla.backward": ("dq", "dkv"),
    "sparse_gqa.forward": _ATTENTION,
    "sparse_gqa.backward": ("dq", "dk", "dv"),
    "dense_mla.forward": _ATTENTION,
    "dense_mla.backward": ("dq", "dkv"),
    "dense_gqa.forward": _ATTENTION,
    "dense_gqa.backward": ("dq", "dk", "dv"),
    "indexer_kl.forward": _LOSS,
    "indexer_kl.backward": ("dq_i", "dk_i", "dw"),
    "dsa_attention.forward": (*_ATTENTION, "shares"),
}


@functools.cache
def names_of(reference: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the reference's arguments: those of every backend's, in this order."""
    return tuple(inspect.signature(reference).parameters)


def geometry(names: tuple[str, ...], given: Arguments) -> Arguments:
    """What a kernel is compiled for: dtypes, shapes without token counts, flags."""
    return tuple(_geometry(name, one) for name, one in zip(names, given, strict=True) if name not in _FREE)


def _geometry(name: str, one: Any) -> Any:
    if isinstance(one, Tensor):
        return one.dtype, () if name in _TOKENS_ONLY else tuple(one.shape[1:])
    if isinstance(one, HeadRanks):
        return one.shards
    return type(one) if isinstance(one, KeyRange | Inverse) else one


def small_case(reference: Callable[..., Any], forward: Callable[..., Any] | None, given: Arguments) -> dict[str, Any]:
    """The arguments of `reference` by name, like those that are given. forward: see `first_use.serve`."""
    like = dict(zip(names_of(reference), given, strict=True))
    plan = _Plan.of(like)
    case = {name: plan.make(name, one) for name, one in like.items()}
    if forward is not None:
        results = forward(
            *(_widened(case[name] if name in case else plan.make(name, None)) for name in names_of(forward))
        )
        saved = zip(_LOSS if "score_lse" in like else _ATTENTION, results, strict=False)
        case |= {name: result.to(like[name].dtype) for name, result in saved if name in like}
    return case


def widened(case: dict[str, Any]) -> dict[str, Any]:
    """The same case in fp64."""
    return {name: _widened(one) for name, one in case.items()}


def _widened(one: Any) -> Any:
    return one.double() if isinstance(one, Tensor) and one.is_floating_point() else one


def named_results(operation: str, results: Arguments, case: dict[str, Any]) -> dict[str, Tensor]:
    """What an implementation returned, by name, as far as it is promised."""
    found = {name: one for name, one in zip(_RESULTS[operation], results, strict=False) if one is not None}
    if operation == "indexer_kl.forward":  # rows that do not count promise nothing
        real = case["ranks"].own(case["real"])
        found["score_lse"] = found["score_lse"].sum(0)  # two parts, cut anywhere
        for name in found.keys() - {"loss"}:
            found[name] = found[name][real]
    return found


@dataclass(frozen=True)
class _Plan:
    """Who reads what. like: the arguments that are stood for, by name.

    keys: S. start, stop: [T] int32. index: [T, K] int32 or None. real: [T] bool, rows that read, or count in the loss.
    """

    like: dict[str, Any]
    keys: int
    start: Tensor
    stop: Tensor
    index: Tensor | None
    real: Tensor
    ranks: HeadRanks

    @classmethod
    def of(cls, like: dict[str, Any]) -> "_Plan":
        index = like.get("index")
        top_k = like.get("top_k", 0) if index is None else index.shape[1]
        shards = like.get("ranks", ALONE).shards
        start, stop, keys = _ranges_beyond(top_k, shards) if top_k else _ranges_of_documents(shards)
        picked = None if index is None else _pick(start, stop, keys, top_k)
        reads = stop > start if picked is None else (picked >= 0).any(1)
        counted = torch.arange(len(start)) % 6 != 4
        counts = reads & counted if "real" in like else reads
        return cls(like, keys, start, stop, picked, counts, HeadRanks(shards=shards, shard=shards - 1))

    def make(self, name: str, one: Any) -> Any:
        """The argument of this name. one: the one that it stands for; None for what only a backward's forward takes."""
        device = self._device
        if name in ("start", "stop", "real"):
            return getattr(self, name).to(device)
        if name == "keys":
            return KeyRange(self.start.to(device), self.stop.to(device))
        if name in ("index", "length"):
            return None if self.index is None else self._selected(name).to(device)
        if name == "num_keys":
            return self.keys
        if name == "inverse":
            return None if one is None else invert(self.make("index", None), self.make("length", None), self.keys)
        if name == "scale":
            return 3 * self.like["q"].shape[-1] ** -0.5  # a few keys hold most of the mass, as in a trained model
        if name == "value_dim" and one is None:
            return self.like["out"].shape[-1]
        if name == "divisor":
            return torch.full((), 11.0, dtype=torch.float64 if one is None else one.dtype, device=device)
        if name == "lse" and "q_i" in self.like:
            return self._lse().to(one.dtype)
        if name == "ranks":
            return self.ranks
        return self._draw(name, one).to(device, one.dtype) if isinstance(one, Tensor) else one

    @property
    def _device(self) -> torch.device:
        return next(one.device for one in self.like.values() if isinstance(one, Tensor))

    def _selected(self, name: str) -> Tensor:
        assert self.index is not None
        return self.index if name == "index" else (self.index >= 0).sum(1, dtype=torch.int32)

    def _draw(self, name: str, one: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        rows, whole = len(self.start), "top_k" in self.like  # exact scores: the selection has one value
        lead = {**dict.fromkeys(_OF_ROWS, (rows,)), **dict.fromkeys(_OF_KEYS, (self.keys,)), "sink": ()}
        shape = (*lead[name], *(one.shape if name == "sink" else one.shape[1:])) if name in lead else (rows,)
        shape = (rows, self.keys) if name == "scores" else shape
        normal = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        if name == "row_scale":
            return self.ranks.own(torch.where(self.real, normal.abs() / rows, 0.0)).contiguous()
        if whole:
            normal = normal.round()
            if self.like.get("precision", "bf16") != "bf16" and name in ("q", "k"):
                normal = _whole_in_e4m3(normal)
        elif name == "w":
            normal *= 2 * (self.like["q_i"].shape[1] * self.like["q_i"].shape[2]) ** -0.5
        elif name == "target":
            assert self.index is not None
            normal = torch.where(self.index >= 0, normal.abs(), 0.0)
        normal = normal.masked_fill_(self._unread(name, normal), torch.nan)
        return self.ranks.own(normal).contiguous() if name in _OF_LOSS_ROWS else normal

    def _unread(self, name: str, x: Tensor) -> Tensor:
        """Where nobody may read: bool, of a shape that meets x."""
        if name in _OF_ROWS:
            return ~self.real.view(-1, *[1] * (x.dim() - 1))
        key = torch.arange(self.keys)
        if name in _OF_KEYS:
            return ((key == 0) | (key >= self.keys - _UNREAD)).view(-1, *[1] * (x.dim() - 1))
        if name == "scores":
            return (key < self.start[:, None]) | (key >= self.stop[:, None])
        return torch.zeros((), dtype=torch.bool)

    def _lse(self) -> Tensor:
        """[T, H]: the attention's log-sum-exp, which the loss takes, in fp64."""
        q, kv = (self.make(name, self.like[name]).double().nan_to_num(0.0) for name in ("q", "kv"))
        k = kv.view(self.keys, -1, q.shape[2])
        grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
        logits = torch.einsum("tgjc,sgc->tgjs", grouped, k) * self.make("scale", None)
        visible = self._visible().to(q.device)
        return logits.masked_fill(~visible[:, None, None], -torch.inf).logsumexp(-1).flatten(1)

    def _visible(self) -> Tensor:
        if self.index is None:
            return KeyRange(self.start, self.stop).mask(self.keys)
        column = torch.where(self.index < 0, self.keys, self.index).long()
        return torch.zeros(len(column), self.keys + 1, dtype=torch.bool).scatter_(1, column, True)[:, : self.keys]


def _whole_in_e4m3(x: Tensor) -> Tensor:
    """The signs of x at 7/4, 7/2 or 7, by the row: a power of two times 448, so nothing is rounded in low precision."""
    scale = 1.75 * 2.0 ** (torch.arange(len(x)) % 3)
    return x.sign() * scale.view(-1, *[1] * (x.dim() - 1))


def _ranges_beyond(top_k: int, shards: int) -> tuple[Tensor, Tensor, int]:
    """(start, stop, S) of rows that may read more keys than top-k, as many, fewer, one, or none. As many a shard."""
    row = torch.arange(_GATHERED_ROWS + -_GATHERED_ROWS % shards)
    lengths = torch.tensor([top_k + _BEYOND - 2, top_k, 1, 0, top_k - 1, top_k // 2 + 1, top_k + 3])[row % 7]
    start = 1 + row % 3
    return start.int(), (start + lengths).int(), 1 + top_k + _BEYOND + _UNREAD


def _ranges_of_documents(shards: int) -> tuple[Tensor, Tensor, int]:
    """(start, stop, S) of causal documents, one of a single row; some rows are empty. As many rows a shard."""
    row = torch.arange(_RANGED_ROWS + -_RANGED_ROWS % shards)
    first = torch.tensor([0, 60, 61, 130])
    start = 1 + first[torch.searchsorted(first, row, right=True) - 1]
    stop = torch.where(row % 19 == 5, start, row + 2)
    return start.int(), stop.int(), 1 + len(row) + _UNREAD


def _pick(start: Tensor, stop: Tensor, keys: int, top_k: int) -> Tensor:
    """[T, K] int32: random keys of each row's range, ascending, then -1."""
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(len(start), keys, generator=generator, device="cpu")
    order = order.masked_fill(~KeyRange(start, stop).mask(keys), -1).sort(dim=1, descending=True)
    key = torch.where(order.values >= 0, order.indices, keys)[:, :top_k].sort(dim=1).values
    return torch.where(key == keys, -1, key).int()
