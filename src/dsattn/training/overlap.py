"""Which layers could share an index: what the selection of an earlier layer is worth in a later one.

    overlap       = share of a layer's selected keys that the earlier layer selected too
    shared recall = share of a layer's dense attention mass on the keys that the earlier layer selected

Where the shared recall is near the layer's own, its indexer could go (IndexShare, arXiv 2603.12201). Overlap is a
weaker hint: two layers may choose different keys of the same worth. Both are measured on rows that see more than K
keys, in one forward that attends densely. Only training or an evaluation shows what sharing costs.
Letters: R rows, W keys of a block, K kept keys.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsattn.config import DSAConfig
from dsattn.errors import InputError
from dsattn.model.decoder import Decoder
from dsattn.nn.state import Observation, Pass
from dsattn.selection import Selection
from dsattn.training.data import Pack
from dsattn.training.observed import attention_blocks, counted_rows, evaluating, ranges_of, selection_of
from dsattn.training.plots import COLOURS, Picture, draw_picture


@dataclass(frozen=True)
class LayerOverlap:
    """One layer that owns an indexer, against those before it, the nearest first.

    recall: with its own selection. earlier: layers. overlap, shared_recall: by `earlier`.
    """

    layer: int
    recall: float
    earlier: list[int]
    overlap: list[float]
    shared_recall: list[float]


@dataclass(frozen=True)
class Overlap:
    """Every layer that owns an indexer, and a proposal for sharing.

    rows: counted rows. tolerance: recall that a layer may lose by sharing. indexer_types: `full` or `shared` for each
    decoder layer, as `DSAConfig.indexer_types` takes them; a shared layer uses the selection of the last full one
    before it. None where nothing was measured. note: why, else empty.
    """

    layers: list[LayerOverlap]
    top_k: int
    rows: int
    tolerance: float
    indexer_types: list[str] | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return dataclasses.asdict(self)


def selection_overlap(
    model: Decoder,
    packs: Sequence[Pack],
    *,
    reach: int = 3,
    tolerance: float = 0.02,
    max_rows_per_pack: int | None = None,
) -> Overlap:
    """Measure every indexer of `model` against the selections of at most `reach` layers before it.

    packs: on any device. tolerance: recall that a layer may lose where sharing is proposed. max_rows_per_pack: counted
    rows that are measured in a pack, spread evenly; None takes all. Modes of the model's modules are put back.
    With KPool nothing is measured, as in `indexer_health`, and the note says so. Raises InputError for a reach or
    max_rows_per_pack below 1, or a tolerance outside of 0 to 1.
    """
    if reach < 1 or (max_rows_per_pack is not None and max_rows_per_pack < 1):
        raise InputError(f"reach={reach} and max_rows_per_pack={max_rows_per_pack} must be at least 1")
    if not 0 <= tolerance <= 1:
        raise InputError(f"tolerance={tolerance} must be in [0, 1]: it is a share of the attention mass")
    dsa = model.config.dsa
    owners = [layer for layer, source in enumerate(model.model.sources) if source == layer]
    counted = [counted_rows(pack.layout, dsa.indexer.top_k, max_rows_per_pack) for pack in packs]
    total = sum(len(rows) for rows in counted)
    note = "" if total else f"no row sees more than top_k={dsa.indexer.top_k} keys; measure on longer documents"
    if dsa.indexer.pool_size > 1:
        note = "whole pools are selected: recall of single keys is not measured"
    if len(owners) < 2:
        note = "fewer than two layers own an indexer"
    if note:
        return Overlap([], dsa.indexer.top_k, 0, tolerance, None, note)
    tally = _Tally(owners, reach, dsa, next(model.parameters()).device)
    with torch.no_grad(), evaluating(model):
        for pack, rows in zip(packs, counted, strict=True):
            if len(rows):
                tally.observe(model, pack, rows)
    layers = tally.finish(total)
    types = _proposal(model, layers, tolerance)
    return Overlap(layers, dsa.indexer.top_k, total, tolerance, types)


def overlap_picture(overlap: Overlap) -> Picture | None:
    """Overlap with the selection before it, and recall with its own and with earlier selections, by layer."""
    if not overlap.layers:
        return None
    layers = [layer.layer for layer in overlap.layers]
    reach = max(len(layer.earlier) for layer in overlap.layers)

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        pairs = [(layer.layer, layer.overlap[0]) for layer in overlap.layers if layer.overlap]
        left.bar(*zip(*pairs, strict=True), color=COLOURS[0], alpha=0.6)
        left.set_ylabel("overlap with the selection before")
        right.plot(layers, [layer.recall for layer in overlap.layers], color=COLOURS[0], marker="o", label="its own")
        for back, look in zip(range(reach), ("s", "D", "^", "v", "P", "X"), strict=False):
            points = [(one.layer, one.shared_recall[back]) for one in overlap.layers if len(one.earlier) > back]
            shown = {"linestyle": "none", "marker": look, "color": COLOURS[1 + back % 4], "label": f"{back + 1} before"}
            right.plot(*zip(*points, strict=True), **shown)
        right.set_ylabel(f"recall@{overlap.top_k}")
        right.legend(title="selection of", loc="center left", bbox_to_anchor=(1, 0.5))
        for axes in (left, right):
            axes.set_xlabel("layer")
            axes.set_ylim(0, 1.03)

    nearest = ", ".join(f"{one.layer}: {one.overlap[0]:.3f}" for one in overlap.layers if one.overlap)
    alt = f"Bars of the overlap with the selection before, by layer: {nearest}; recall with earlier selections beside."
    return draw_picture(draw, 3.2, alt)


class _Tally:
    """Sums over rows, in fp64, on the device that measures; by layer, and by how many owners back (0: itself)."""

    def __init__(self, owners: list[int], reach: int, dsa: DSAConfig, device: torch.device) -> None:
        self.owners, self.reach, self.dsa = owners, reach, dsa
        self.overlap = torch.zeros(len(owners), reach + 1, dtype=torch.float64, device=device)
        self.recall = torch.zeros_like(self.overlap)
        self.before: list[Selection] = []

    def observe(self, model: Decoder, pack: Pack, rows: Tensor) -> None:
        """One forward of one pack."""
        device = self.recall.device
        pack, rows, self.before = pack.to(device), rows.to(device), []

        def probe(layer: int, seen: Observation) -> None:
            if layer in self.owners:
                with torch.autocast(device.type, enabled=False):
                    self._add(self.owners.index(layer), seen, rows)

        model(pack.tokens, pack.layout, Pass(mode="warmup", with_kl=False, probe=probe))

    def _add(self, place: int, seen: Observation, rows: Tensor) -> None:
        keys = ranges_of(seen, rows)
        self.before = [selection_of(seen, rows, keys, self.dsa), *self.before[: self.reach]]
        for block in attention_blocks(seen, rows, keys):
            mass_RW = block.p.mean(1)
            own_RW = block.selected(self.before[0])
            for back, selection in enumerate(self.before):
                selected_RW = block.selected(selection)
                self.recall[place, back] += (mass_RW * selected_RW).sum(dtype=torch.float64)
                self.overlap[place, back] += (own_RW & selected_RW).sum(dtype=torch.float64)

    def finish(self, rows: int) -> list[LayerOverlap]:
        """The means, on the host."""
        recall, overlap = (self.recall / rows).tolist(), (self.overlap / (rows * self.dsa.indexer.top_k)).tolist()
        layers = []
        for place, layer in enumerate(self.owners):
            earlier = self.owners[max(place - self.reach, 0) : place][::-1]
            shown = slice(1, 1 + len(earlier))
            layers.append(LayerOverlap(layer, recall[place][0], earlier, overlap[place][shown], recall[place][shown]))
        return layers


def _proposal(model: Decoder, layers: list[LayerOverlap], tolerance: float) -> list[str]:
    """Greedy, first layer first: a layer shares where the last full layer's selection loses it `tolerance` at most."""
    source, shared = -1, set()
    for layer in layers:
        worth = dict(zip(layer.earlier, layer.shared_recall, strict=True)).get(source)
        if worth is not None and layer.recall - worth <= tolerance:
            shared.add(layer.layer)
        else:
            source = layer.layer
    keep = {layer.layer for layer in layers} - shared
    types = enumerate(model.config.types)
    return ["shared" if kind == "dsa" and index not in keep else "full" for index, kind in types]
