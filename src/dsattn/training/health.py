"""Indexer health: what an indexer selects, against what dense attention reads in the same text.
One forward in mode `warmup` attends densely everywhere, so no indexer has a say in it; each layer's probe then has both
in hand:

    mass[t, s] = mean over heads of softmax_s(scale * q[t, h] . k[s])     the attention that selecting would replace
    recall[t]  = sum of mass[t, s] over the K selected keys s

Only rows that see more than K keys count: the others keep every key, and their recall is 1 by definition.
Letters: T rows, S keys, H heads, G key groups, C key width, K kept keys, R rows and W keys of a block.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.config import DSAConfig, ModelConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.nn.state import Observation, Pass, Probe
from dsattn.ops import indexer_kl
from dsattn.training.data import Pack
from dsattn.training.observed import attention_blocks, counted_rows, evaluating, ranges_of, selection_of

QUARTILES = 4
_PER_ROW = ("recall", "random", "recency", "oracle", "top1", "kl_uniform")
_BY_QUARTILE = ("recall", "random", "recency")
_DISTANCE_BINS = 33  # 0, 1, 2-3, 4-7, ...: all that int32 key rows can be apart
_UNIFORM_NATS = 1e-6  # attention this close to uniform has nothing to capture but rounding


@dataclass(frozen=True)
class LayerHealth:
    """Means over the counted rows of one layer; None where no row counts, or where a value is not finite.

    recall: share of the dense attention mass that lies on the selected keys. Beside it, for the same rows: `random`,
    the exact expectation for K random visible keys (K / visible); `recency`, the last K visible keys; `oracle`, the K
    heaviest keys: the most that any selection reaches. recall_quartiles and so on: by `Health.quartile_positions`.
    worst_head: recall in the mass of the head that loses most. top1: share of rows whose heaviest key is selected.
    kl, kl_uniform: nats from the mass to softmax(scores), and to uniform weights, over the visible keys.
    captured: 1 - kl / kl_uniform. distances, oracle_distances: how many selected (heaviest) keys lie t - s rows back,
    in bins 0, 1, 2-3, 4-7, 8-15, ...
    """

    layer: int
    rows: int
    recall: float | None
    recall_quartiles: list[float | None]
    random: float | None
    random_quartiles: list[float | None]
    recency: float | None
    recency_quartiles: list[float | None]
    oracle: float | None
    worst_head: float | None
    top1: float | None
    kl: float | None
    kl_uniform: float | None
    captured: float | None
    distances: list[int]
    oracle_distances: list[int]


@dataclass(frozen=True)
class Health:
    """Every layer that owns an indexer, measured on the same rows.

    rows: counted rows, those that see more than top_k keys. quartile_positions: of the counted rows' positions in their
    documents the first, three inner edges, and the last; quartile i holds positions from edge i up to below edge i + 1,
    the last one included. Empty without rows. note: why there is nothing to measure, else empty.
    """

    layers: list[LayerHealth]
    top_k: int
    rows: int
    quartile_positions: list[int]
    note: str = ""

    def mean(self, name: str) -> float | None:
        """Mean of a LayerHealth number over layers; None where no layer has it."""
        values = [value for layer in self.layers if (value := getattr(layer, name)) is not None]
        return sum(values) / len(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "Health":
        """What `to_dict` made."""
        return cls(**{**tree, "layers": [LayerHealth(**layer) for layer in tree["layers"]]})


def indexer_health(model: Decoder, packs: Sequence[Pack], *, max_rows_per_pack: int | None = None) -> Health:
    """Measure every indexer of `model` against dense attention on `packs`; see the head of this file.

    packs: on any device. max_rows_per_pack: counted rows that are measured in a pack, spread evenly; None takes all.
    Memory beside the forward: O(T K) and row blocks of [R, H, S]. Modes of the model's modules are put back.
    With KPool whole pools are selected, by scores that no single key has: nothing is measured, and the note says so.
    Raises InputError for max_rows_per_pack below 1.
    """
    if max_rows_per_pack is not None and max_rows_per_pack < 1:
        raise InputError(f"max_rows_per_pack={max_rows_per_pack} must be at least 1; None takes every row")
    top_k, device = model.config.dsa.indexer.top_k, next(model.parameters()).device
    counted = [counted_rows(pack.layout, top_k, max_rows_per_pack) for pack in packs]
    survey = Survey(model.config, packs, counted, device)
    if survey.finds:
        with torch.no_grad(), evaluating(model):
            for pack, rows in zip(packs, counted, strict=True):
                if len(rows):
                    there = pack.to(device)
                    probe = survey.probe([(there.layout, rows)])
                    model(there.tokens, there.layout, Pass(mode="warmup", with_kl=False, probe=probe))
    return survey.finish()


class Survey:
    """The tallies of every layer that owns an indexer, over the counted rows of `packs`.

    counted: of each pack. device: where layers are seen. finds: whether there is anything to measure.
    """

    def __init__(self, config: ModelConfig, packs: Sequence[Pack], counted: Sequence[Tensor], device: torch.device):
        self.dsa = config.dsa
        places = [pack.layout.positions.cpu()[rows] for pack, rows in zip(packs, counted, strict=True)]
        self.positions = torch.cat(places).sort().values if places else torch.empty(0, dtype=torch.int64)
        total, top_k = len(self.positions), self.dsa.indexer.top_k
        cuts = [total * part // QUARTILES for part in range(1, QUARTILES)]
        self.edges = self.positions[cuts] if total else self.positions
        sources = enumerate(config.selection_sources[: config.num_layers])
        pools = self.dsa.indexer.pool_size > 1
        owners = [] if pools else [layer for layer, source in sources if source == layer]
        self.tallies = {layer: _Tally(top_k, config.attention.heads, device) for layer in owners}
        self.finds, self.note = bool(owners) and total > 0, ""
        if pools:
            self.note = "whole pools are selected: recall of single keys is not measured"
        elif not owners:
            self.note = "no layer owns an indexer"
        elif not total:
            self.note = f"no row sees more than top_k={top_k} keys, so every key is kept; measure on longer documents"

    def probe(
        self, micros: Sequence[tuple[Layout, Tensor]], view: Callable[[Observation], Observation] | None = None
    ) -> Probe:
        """What measures every layer while it runs. Every layer sees the micro-batches in their order.

        micros: the layout of each, as `view` has it, and its counted rows. view: what is measured of an observation.
        """
        parts = [
            (rows.to(layout.positions.device), torch.bucketize(layout.positions.cpu()[rows], self.edges, right=True))
            for layout, rows in micros
        ]
        turns = {layer: iter(parts) for layer in self.tallies}

        def measure(layer: int, seen: Observation) -> None:
            if layer in turns:
                rows, quartile = next(turns[layer])
                seen = seen if view is None else view(seen)
                if len(rows):
                    self.tallies[layer].add(seen, rows, quartile.to(rows.device), self.dsa)

        return measure

    def sum_over(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Add what other ranks measured: other rows, heads or layers. Collective."""
        sums = [part for tally in self.tallies.values() for part in tally.sums()]
        flat = torch.cat([part.double().flatten() for part in sums])
        for group in groups:
            dist.all_reduce(flat, group=group)
        for part, total in zip(sums, flat.split([part.numel() for part in sums]), strict=True):
            part.copy_(total.view_as(part))

    def finish(self) -> Health:
        """The means, on the host."""
        layers = [tally.finish(layer) for layer, tally in self.tallies.items()]
        top_k, at = self.dsa.indexer.top_k, self.positions
        if not self.finds:
            return Health(layers, top_k, 0, [], self.note)
        return Health(layers, top_k, len(at), [int(at[0]), *self.edges.tolist(), int(at[-1])])


class _Tally:
    """Sums of one layer over rows, in fp64, kept on the device that measures."""

    def __init__(self, top_k: int, heads: int, device: torch.device) -> None:
        self.top_k = top_k
        sums = {"dtype": torch.float64, "device": device}
        self.rows = torch.zeros(QUARTILES, **sums)
        self.per_row = torch.zeros(QUARTILES, len(_PER_ROW), **sums)
        self.heads = torch.zeros(heads, **sums)
        self.kl = torch.zeros((), **sums)
        self.distances = torch.zeros(_DISTANCE_BINS, dtype=torch.int64, device=device)
        self.oracle_distances = torch.zeros_like(self.distances)

    def add(self, seen: Observation, rows: Tensor, quartile: Tensor, dsa: DSAConfig) -> None:
        """Measure `rows` [R] of what a layer was seen to do; quartile: [R], each row's."""
        with torch.autocast(rows.device.type, enabled=False):  # else products of fp32 scores would be rounded to bf16
            self._add(seen, rows, quartile, dsa)

    def _add(self, seen: Observation, rows: Tensor, quartile: Tensor, dsa: DSAConfig) -> None:
        assert seen.index is not None, "a probed layer runs the indexer it owns"
        keys = ranges_of(seen, rows)
        indexer = (seen.index.q[rows], seen.index.k, seen.index.w[rows])
        attention = (seen.q[rows], seen.kv, seen.lse[rows])
        options = {"relu": dsa.indexer.relu, "backend": dsa.backend}
        self.kl += indexer_kl(*indexer, *attention, keys, scale=seen.scale, divisor=1, **options)
        selection = selection_of(seen, rows, keys, dsa)
        here = seen.layout.rows[rows]
        self.distances += _distances(here, selection.index)
        for block in attention_blocks(seen, rows, keys):
            part, ranges = block.part, block.ranges
            recent_RW = block.columns >= ranges.stop[:, None] - self.top_k
            masks = (block.selected(selection), recent_RW)
            heaviest = self._add_block(block.p, *masks, ranges.lengths(), quartile[part])
            self.oracle_distances += _distances(here[part], heaviest + block.run.start)

    def _add_block(
        self, p_RHW: Tensor, selected_RW: Tensor, recent_RW: Tensor, visible_R: Tensor, quartile_R: Tensor
    ) -> Tensor:
        """Returns the columns [R, K] of the heaviest keys. p: attention; visible: how many keys a row sees."""
        mass_RW = p_RHW.mean(1)
        caught_RH = torch.einsum("rhw,rw->rh", p_RHW, selected_RW.to(p_RHW.dtype))
        heaviest = mass_RW.topk(self.top_k, dim=1)
        values = {
            "recall": caught_RH.mean(1),
            "random": self.top_k / visible_R.double(),
            "recency": (mass_RW * recent_RW).sum(1),
            "oracle": heaviest.values.sum(1),
            "top1": (mass_RW * selected_RW).amax(1) == mass_RW.amax(1),
            "kl_uniform": torch.xlogy(mass_RW, mass_RW).sum(1) + visible_R.double().log(),
        }
        values_RN = torch.stack([values[name].double() for name in _PER_ROW], dim=1)
        quartile_QR = torch.arange(QUARTILES, device=quartile_R.device)[:, None] == quartile_R
        self.per_row += quartile_QR.double() @ values_RN
        self.rows += quartile_QR.sum(1)
        self.heads += caught_RH.double().sum(0)
        return heaviest.indices

    def sums(self) -> tuple[Tensor, ...]:
        """What adds up over rows."""
        return self.rows, self.per_row, self.heads, self.kl, self.distances, self.oracle_distances

    def finish(self, layer: int) -> LayerHealth:
        """The means, on the host."""
        rows = self.rows.tolist()
        total = sum(rows)
        column = dict(zip(_PER_ROW, self.per_row.cpu().unbind(1), strict=True))
        means = {name: _ratio(value.sum().item(), total) for name, value in column.items()}
        quartiles = {
            f"{name}_quartiles": [
                _ratio(value, count) for value, count in zip(column[name].tolist(), rows, strict=True)
            ]
            for name in _BY_QUARTILE
        }
        kl, kl_uniform = _ratio(self.kl.item(), total), means["kl_uniform"]
        captured = None
        if kl is not None and kl_uniform is not None and kl_uniform > _UNIFORM_NATS:
            captured = 1 - kl / kl_uniform
        fields: dict[str, Any] = {**means, **quartiles}
        return LayerHealth(
            layer=layer,
            rows=int(total),
            worst_head=_ratio(self.heads.min().item(), total),
            kl=kl,
            captured=captured,
            distances=_without_tail(self.distances.tolist()),
            oracle_distances=_without_tail(self.oracle_distances.tolist()),
            **fields,
        )


def _distances(here_R: Tensor, index_RK: Tensor) -> Tensor:
    """[33] int64 counts of t - s in bins 0, 1, 2-3, 4-7, ...; negative entries of the index are empty slots."""
    back = (here_R[:, None] - index_RK)[index_RK >= 0]
    edges = 2 ** torch.arange(_DISTANCE_BINS - 1, device=back.device)
    return torch.bincount(torch.bucketize(back, edges, right=True), minlength=_DISTANCE_BINS)


def _ratio(total: float, count: float) -> float | None:
    return total / count if count and math.isfinite(total) else None


def _without_tail(counts: list[int]) -> list[int]:
    return counts[: max((bin_ + 1 for bin_, count in enumerate(counts) if count), default=0)]
