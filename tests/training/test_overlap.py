"""Overlap, shared recall and the proposal, against loops over rows; the model is scripted."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.state import Observation
from dsattn.training.data import Pack
from dsattn.training.overlap import Overlap, overlap_picture, selection_overlap

TOP_K = 4
LAYOUT = Layout.packed([13, 3, 9], padded=[14, 3, 9])


class Scripted(nn.Module):
    """Layers 0, 2, 3 and 5 own an indexer, 1 shares, 4 is dense; each pass shows the observations it was given."""

    def __init__(self, seen: dict[int, Observation]):
        super().__init__()
        self.anything = nn.Parameter(torch.zeros(1))
        types = ("dsa", "dsa", "dsa", "dsa", "dense", "dsa")
        self.config = SimpleNamespace(dsa=DSAConfig(indexer=IndexerConfig(top_k=TOP_K)), types=types)
        self.model = SimpleNamespace(sources=[0, 0, 2, 3, None, 5])
        self.seen = seen

    def forward(self, tokens, layout, run):
        assert (run.mode, run.with_kl, self.training, torch.is_grad_enabled()) == ("warmup", False, False, False)
        for layer, seen in self.seen.items():
            run.probe(layer, seen)
        run.probe(1, None)  # a layer that shares is passed over


def observation(seed: int) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    rows = LAYOUT.rows.shape[0]
    q, kv, iq, ik, w = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((rows, 3, 6), (rows, 6), (rows, 2, 5), (rows, 5), (rows, 2))
    )
    for x in (q, kv, iq, ik, w):
        x[~LAYOUT.real_rows] = torch.nan
    return Observation(q, kv, torch.zeros(rows, 3), 0.7, IndexerOutput(iq, ik, w), None, LAYOUT)


def pack() -> Pack:
    rows = LAYOUT.rows.shape[0]
    return Pack(torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -100), LAYOUT, 0)


def by_hand(seen: dict[int, Observation]) -> tuple[int, dict[tuple[int, int], tuple[float, float]]]:
    """(rows, {(layer, earlier): (overlap, recall of the layer on the earlier one's keys)})."""
    ranges = list(zip(LAYOUT.keys.start.tolist(), LAYOUT.keys.stop.tolist(), strict=True))
    counted = [(t, a, b) for t, (a, b) in enumerate(ranges) if b - a > TOP_K and LAYOUT.real_rows[t]]
    chosen = {}
    for layer, one in seen.items():
        for t, a, b in counted:
            scores = (one.index.k[a:b] @ one.index.q[t].T).relu() @ one.index.w[t]
            chosen[layer, t] = set(sorted(range(b - a), key=lambda s, x=scores: (-x[s].item(), s))[:TOP_K])
    found = {}
    for layer, one in seen.items():
        for earlier in [number for number in seen if number <= layer]:
            same, caught = [], []
            for t, a, b in counted:
                mass = (0.7 * one.q[t] @ one.kv[a:b].T).softmax(-1).mean(0)
                same.append(len(chosen[layer, t] & chosen[earlier, t]) / TOP_K)
                caught.append(sum(mass[s].item() for s in chosen[earlier, t]))
            found[layer, earlier] = (sum(same) / len(same), sum(caught) / len(caught))
    return len(counted), found


def test_numbers_are_those_of_loops_and_the_proposal_is_greedy() -> None:
    seen = {layer: observation(layer) for layer in (0, 2, 3, 5)}
    seen[2] = dataclasses.replace(seen[2], index=seen[0].index)  # selects as layer 0 does: sharing costs nothing
    rows, wanted = by_hand(seen)
    model = Scripted(seen).train()
    found = selection_overlap(model, [pack(), pack()], reach=2, tolerance=0.0)
    assert model.training
    assert found.rows == 2 * rows
    assert [(one.layer, one.earlier) for one in found.layers] == [(0, []), (2, [0]), (3, [2, 0]), (5, [3, 2])]
    for one in found.layers:
        assert one.recall == pytest.approx(wanted[one.layer, one.layer][1])
        for place, earlier in enumerate(one.earlier):
            got = (one.overlap[place], one.shared_recall[place])
            assert got == pytest.approx(wanted[one.layer, earlier])
    assert found.layers[1].overlap == [1.0]
    fits = found.layers[2].recall - found.layers[2].shared_recall[1] <= 0  # against layer 0, the last full one
    assert found.indexer_types == ["full", "shared", "shared", "shared" if fits else "full", "full", "full"]
    everything = selection_overlap(model, [pack()], reach=2, tolerance=1.0)
    assert everything.indexer_types == ["full", "shared", "shared", "shared", "full", "full"]  # 5 cannot reach 0
    assert json.loads(json.dumps(found.to_dict()))["layers"][1]["shared_recall"] == found.layers[1].shared_recall
    picture = overlap_picture(found)
    assert picture.svg.startswith(b"<?xml")
    assert "2: 1.000" in picture.alt


def test_a_proposal_is_a_configuration() -> None:
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    model = ModelConfig(
        hidden_size=16,
        num_layers=3,
        intermediate_size=16,
        attention=MLAConfig(heads=2, **sizes),
        dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, rope_dim=4)),
    )
    found = selection_overlap(Decoder(model), [pack()], tolerance=1.0)
    assert found.indexer_types == ["full", "shared", "shared"]
    shared = dataclasses.replace(model, dsa=dataclasses.replace(model.dsa, indexer_types=tuple(found.indexer_types)))
    assert shared.selection_sources == (0, 0, 0)


def test_nothing_to_measure_is_said() -> None:
    model = Scripted({layer: observation(layer) for layer in (0, 2, 3, 5)})
    layout = Layout.packed([3])
    short = Pack(torch.zeros(3, dtype=torch.int64), torch.full((3,), -100), layout, 0)
    found = selection_overlap(model, [short])
    assert "no row sees more than top_k=4 keys" in found.note
    assert found.indexer_types is None
    assert overlap_picture(found) is None
    model.model.sources = [0, 0, 0, 0, None, 0]
    assert "fewer than two layers" in selection_overlap(model, [pack()]).note
    indexer = IndexerConfig(top_k=TOP_K, pool_size=2)
    model.model.sources, model.config.dsa = [0, 1], DSAConfig(indexer=indexer)
    assert selection_overlap(model, [pack()]) == Overlap(
        [], TOP_K, 0, 0.02, None, "whole pools are selected: recall of single keys is not measured"
    )


@pytest.mark.parametrize("options", [{"reach": 0}, {"max_rows_per_pack": 0}, {"tolerance": 1.5}])
def test_refuses(options) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        selection_overlap(Scripted({}), [], **options)
