import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsattn.config import (
    DataConfig,
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.state import Observation, Pass
from dsattn.ops import blocks
from dsattn.training.data import Pack
from dsattn.training.health import Health, indexer_health
from dsattn.training.loop import load_run, train
from dsattn.training.observed import evaluating
from dsattn.training.report import closing_table

TOP_K = 4


class Scripted(nn.Module):
    """Stands in for a Decoder with one indexer: its probe sees the observations it was given, one a forward."""

    def __init__(self, *observations: Observation, top_k: int = TOP_K, relu: bool = True):
        super().__init__()
        self.anything = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(
            dsa=DSAConfig(indexer=IndexerConfig(top_k=top_k, relu=relu)),
            attention=SimpleNamespace(heads=observations[0].q.shape[1]),
            num_layers=1,
            selection_sources=(0,),
        )
        self.observations = iter(observations)

    def forward(self, tokens, layout, run: Pass):
        assert (run.mode, run.with_kl, torch.is_grad_enabled()) == ("warmup", False, False)
        run.probe(0, next(self.observations))


def pack_of(layout: Layout, tokens: torch.Tensor | None = None) -> Pack:
    rows = layout.rows.shape[0]
    tokens = torch.zeros(rows, dtype=torch.int64) if tokens is None else tokens
    return Pack(tokens, torch.full((rows,), -100), layout, 0)


def observation(layout: Layout, *, groups: int | None = None, heads: int = 4, dtype=torch.float64) -> Observation:
    """Random, with NaN in every padding row."""
    rows, width = layout.rows.shape[0], 6
    kv_shape = (rows, width) if groups is None else (rows, groups, width)
    made = [
        torch.randn(shape, dtype=dtype) * 1.5
        for shape in ((rows, heads, width), kv_shape, (rows, 2, 5), (rows, 5), (rows, 2))
    ]
    for x in made:
        x[~layout.real_rows] = math.nan
    q, kv, *index = made
    return measured(q, kv, IndexerOutput(*index), layout, 0.7)


def measured(q, kv, index: IndexerOutput, layout: Layout, scale: float) -> Observation:
    """With the true log-sum-exp of dense attention."""
    lse = torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
    for t, (a, b) in enumerate(ranges(layout)):
        if b > a:
            lse[t] = (scale * logits(q[t], kv[a:b])).logsumexp(-1)
    return Observation(q, kv, lse, scale, index, None, layout)


def logits(q_HC: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """[H, W] by loops over heads."""
    groups = kv if kv.dim() == 3 else kv[:, None]
    share = q_HC.shape[0] // groups.shape[1]
    return torch.stack([groups[:, h // share] @ q for h, q in enumerate(q_HC)])


def ranges(layout: Layout) -> list[tuple[int, int]]:
    return list(zip(layout.keys.start.tolist(), layout.keys.stop.tolist(), strict=True))


def naive_rows(seen: Observation, top_k: int, relu: bool = True) -> list[dict]:
    """Everything about each counted row, a row at a time."""
    found = []
    for t, (a, b) in enumerate(ranges(seen.layout)):
        if b - a <= top_k or not seen.layout.real_rows[t]:
            continue
        p_HW = (seen.scale * logits(seen.q[t], seen.kv[a:b])).softmax(-1)
        mass = p_HW.mean(0)
        dots = seen.index.k[a:b] @ seen.index.q[t].T
        scores = (dots.relu() if relu else dots) @ seen.index.w[t]
        selected = sorted(range(b - a), key=lambda s, scores=scores: (-scores[s].item(), s))[:top_k]
        heaviest = sorted(range(b - a), key=lambda s, mass=mass: -mass[s].item())[:top_k]
        log_uniform = -math.log(b - a)
        found.append(
            {
                "position": int(seen.layout.positions[t]),
                "recall": mass[selected].sum().item(),
                "heads": p_HW[:, selected].sum(1),
                "random": top_k / (b - a),
                "recency": mass[-top_k:].sum().item(),
                "oracle": mass[heaviest].sum().item(),
                "top1": float(heaviest[0] in selected),
                "kl": (mass * (mass.log() - scores.log_softmax(0))).sum().item(),
                "kl_uniform": (mass * (mass.log() - log_uniform)).sum().item(),
                "distances": [t - a - s for s in selected],
                "oracle_distances": [t - a - s for s in heaviest],
            }
        )
    return found


def mean(rows: list[dict], name: str) -> float | None:
    return sum(row[name] for row in rows) / len(rows) if rows else None


def histogram(rows: list[dict], name: str) -> list[int]:
    bins = [distance.bit_length() for row in rows for distance in row[name]]
    return [bins.count(i) for i in range(max(bins) + 1)]


def assert_health_is(health: Health, rows: list[dict], layer: int = 0) -> None:
    """The layer's numbers are the naive ones."""
    found = next(one for one in health.layers if one.layer == layer)
    assert health.rows == found.rows == len(rows) > 0
    for name in ("recall", "random", "recency", "oracle", "top1", "kl", "kl_uniform"):
        assert getattr(found, name) == pytest.approx(mean(rows, name), rel=1e-6), name
    assert found.captured == pytest.approx(1 - mean(rows, "kl") / mean(rows, "kl_uniform"), rel=1e-6)
    assert found.worst_head == pytest.approx(torch.stack([row["heads"] for row in rows]).mean(0).min().item(), rel=1e-6)
    assert found.distances == histogram(rows, "distances")
    assert found.oracle_distances == histogram(rows, "oracle_distances")
    positions = sorted(row["position"] for row in rows)
    edges = [positions[len(rows) * i // 4] for i in (1, 2, 3)]
    assert health.quartile_positions == [positions[0], *edges, positions[-1]]
    for name in ("recall", "random", "recency"):
        for i, value in enumerate(getattr(found, f"{name}_quartiles")):
            inside = [row for row in rows if sum(edge <= row["position"] for edge in edges) == i]
            assert value == (pytest.approx(mean(inside, name), rel=1e-6) if inside else None), (name, i)


LAYOUTS = {
    "causal": Layout.causal(19),
    "one batch": Layout.causal(11, batch=2),
    "documents, some too short, and padding": Layout.packed([9, 3, 0, 1, 8], total=25),
    "padding to the left": Layout.packed([9, 7], padded=[12, 10], side="left"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("groups", [None, 1, 2, 4], ids=["mla", "mqa", "gqa", "mha"])
@pytest.mark.parametrize("relu", [True, False])
def test_every_number_is_the_naive_one(layout, groups, relu):
    seen = observation(layout, groups=groups)
    health = indexer_health(Scripted(seen, relu=relu), [pack_of(layout)])
    assert_health_is(health, naive_rows(seen, TOP_K, relu))
    assert health.note == ""


def test_packs_are_measured_together():
    layouts = [Layout.causal(9), Layout.causal(3), Layout.packed([14, 5], total=21)]
    seen = [observation(layout) for layout in layouts]
    health = indexer_health(Scripted(seen[0], seen[2]), [pack_of(layout) for layout in layouts])  # 3 rows: no forward
    assert_health_is(health, [row for one in seen for row in naive_rows(one, TOP_K)])


def test_blocks_change_nothing(monkeypatch):
    layout = Layout.packed([40, 3, 30], total=80)
    seen = observation(layout)
    whole = indexer_health(Scripted(seen), [pack_of(layout)])
    monkeypatch.setattr(blocks, "_CPU_BYTES", 1)
    by_row = indexer_health(Scripted(seen), [pack_of(layout)])
    assert_health_is(by_row, naive_rows(seen, TOP_K))
    assert by_row.layers[0].distances == whole.layers[0].distances


def test_a_row_of_k_keys_is_left_out_and_one_more_counts():
    for tokens, rows in ((TOP_K, 0), (TOP_K + 1, 1)):
        layout = Layout.causal(tokens)
        health = indexer_health(Scripted(observation(layout)), [pack_of(layout)])
        assert (health.rows, health.layers[0].rows) == (rows, rows)
        assert bool(health.note) == (rows == 0)
        assert (health.layers[0].recall is None) == (rows == 0)


def by_logits(layout: Layout, sign: float = 1.0) -> Observation:
    """One attention head, and an indexer whose scores are that head's logits."""
    q, kv = torch.randn(layout.num_keys, 1, 8), torch.randn(layout.num_keys, 8)
    return measured(q, kv, IndexerOutput(q, kv, torch.full(q.shape[:2], sign)), layout, 1.0)


def test_an_indexer_that_knows_reaches_the_oracle():
    layout = Layout.causal(60)
    health = indexer_health(Scripted(by_logits(layout), relu=False), [pack_of(layout)])
    one = health.layers[0]
    assert one.recall == pytest.approx(one.oracle, rel=1e-6)
    assert one.worst_head == pytest.approx(one.recall)
    assert one.top1 == 1
    assert one.kl == pytest.approx(0, abs=1e-5)
    assert one.captured == pytest.approx(1, abs=1e-5)
    assert one.distances == one.oracle_distances
    assert one.oracle > one.random + 0.3


def test_an_indexer_that_knows_and_lies_is_worse_than_chance():
    layout = Layout.causal(60)
    one = indexer_health(Scripted(by_logits(layout, -1.0), relu=False), [pack_of(layout)]).layers[0]
    assert one.recall < one.random / 2
    assert one.top1 == 0
    assert one.captured < 0


def test_an_indexer_that_prefers_late_keys_is_recency():
    layout = Layout.causal(40)
    seen = observation(layout)
    place = torch.arange(40.0, dtype=torch.float64)[:, None]
    index = IndexerOutput(torch.ones(40, 1, 1, dtype=place.dtype), place, torch.ones(40, 1, dtype=place.dtype))
    one = indexer_health(Scripted(measured(seen.q, seen.kv, index, layout, 0.7)), [pack_of(layout)]).layers[0]
    assert one.recall == pytest.approx(one.recency, rel=1e-12)
    assert one.recall_quartiles == pytest.approx(one.recency_quartiles, rel=1e-12)
    assert one.distances == [36, 36, 72]  # of the 36 rows that see more than 4 keys: 0, 1, and 2 with 3


def test_uniform_attention_cannot_tell_selectors_apart():
    layout = Layout.causal(30)
    seen = observation(layout)
    seen = measured(torch.zeros_like(seen.q), seen.kv, seen.index, layout, 0.7)
    one = indexer_health(Scripted(seen), [pack_of(layout)]).layers[0]
    expected = sum(TOP_K / visible for visible in range(5, 31)) / 26
    values = (one.recall, one.random, one.recency, one.oracle, one.worst_head)
    assert values == pytest.approx([expected] * 5, rel=1e-12)
    assert one.kl_uniform == pytest.approx(0, abs=1e-12)
    assert one.captured is None


def test_random_is_the_expectation_over_all_choices():
    layout = Layout.causal(7)
    seen = observation(layout)
    sums = []
    for t in range(TOP_K, 7):
        mass = (0.7 * logits(seen.q[t], seen.kv[: t + 1])).softmax(-1).mean(0)
        choices = [mass[list(kept)].sum().item() for kept in itertools.combinations(range(t + 1), TOP_K)]
        sums.append(sum(choices) / len(choices))
    one = indexer_health(Scripted(seen), [pack_of(layout)]).layers[0]
    assert one.random == pytest.approx(sum(sums) / len(sums), rel=1e-12)


def test_quartiles_of_one_document_are_equal_parts():
    layout = Layout.causal(20)
    health = indexer_health(Scripted(observation(layout)), [pack_of(layout)])
    assert health.quartile_positions == [4, 8, 12, 16, 19]
    expected = [sum(TOP_K / (p + 1) for p in range(4 * i, 4 * i + 4)) / 4 for i in (1, 2, 3, 4)]
    assert health.layers[0].random_quartiles == pytest.approx(expected)


def test_equal_positions_share_a_quartile():
    layout = Layout.packed([5] * 8)  # eight counted rows, all at position 4
    health = indexer_health(Scripted(observation(layout)), [pack_of(layout)])
    assert health.quartile_positions == [4] * 5
    assert health.layers[0].random_quartiles == [None, None, None, pytest.approx(4 / 5)]


def test_some_rows_stand_for_all():
    layout = Layout.causal(104)
    seen = observation(layout)
    health = indexer_health(Scripted(seen), [pack_of(layout)], max_rows_per_pack=10)
    rows = naive_rows(seen, TOP_K)
    assert_health_is(health, [rows[i] for i in range(5, 100, 10)])
    assert indexer_health(Scripted(seen), [pack_of(layout)], max_rows_per_pack=100).rows == 100
    with pytest.raises(InputError, match="max_rows_per_pack=0"):
        indexer_health(Scripted(seen), [pack_of(layout)], max_rows_per_pack=0)


def test_an_indexer_of_nan_is_told_in_valid_json():
    layout = Layout.causal(12)
    seen = observation(layout)
    index = seen.index._replace(w=torch.full_like(seen.index.w, math.nan))
    health = indexer_health(Scripted(measured(seen.q, seen.kv, index, layout, 0.7)), [pack_of(layout)])
    one = health.layers[0]
    assert (one.recall, one.top1, one.distances, one.kl, one.captured) == (0, 0, [], None, None)
    assert one.oracle > 0.4
    json.dumps(health.to_dict(), allow_nan=False)


def test_autocast_does_not_reach_the_measurement():
    layout = Layout.causal(50)
    seen = observation(layout, dtype=torch.float32)
    plain = indexer_health(Scripted(seen), [pack_of(layout)])
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = indexer_health(Scripted(seen), [pack_of(layout)])
        assert torch.mm(seen.kv, seen.kv.T).dtype == torch.bfloat16
    assert under_autocast == plain
    rows = naive_rows(seen, TOP_K)  # products rounded to bf16 would be off by 1e-3
    assert plain.layers[0].oracle == pytest.approx(mean(rows, "oracle"), rel=2e-6)
    assert plain.layers[0].kl_uniform == pytest.approx(mean(rows, "kl_uniform"), rel=2e-6)


def test_health_survives_json():
    layout = Layout.packed([5] * 8)
    health = indexer_health(Scripted(observation(layout)), [pack_of(layout)])
    assert Health.from_dict(json.loads(json.dumps(health.to_dict(), allow_nan=False))) == health


def test_means_pass_over_what_is_unknown():
    layers = [SimpleNamespace(kl=1.0), SimpleNamespace(kl=None), SimpleNamespace(kl=4.0)]
    assert Health(layers, 4, 1, []).mean("kl") == 2.5
    assert Health(layers[1:2], 4, 1, []).mean("kl") is None
    assert Health([], 4, 1, []).mean("kl") is None


# With the real model


def decoder(attention, every: int = 1, top_k: int = TOP_K, layer_types=None) -> Decoder:
    source = "hidden" if isinstance(attention, GQAConfig) else "q_latent"
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=top_k, query_from=source, rope_dim=4)
    dsa = DSAConfig(indexer=indexer, share_every=every)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_layers": 3, "intermediate_size": 24, "init_std": 0.3}
    return Decoder(ModelConfig(attention=attention, dsa=dsa, layer_types=layer_types, **sizes))


MLA = MLAConfig(
    heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, sink=True
)
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4, sink=True)


@pytest.mark.parametrize("attention", [MLA, GQA], ids=["mla", "gqa"])
def test_a_decoder_is_measured_layer_by_layer(attention):
    model = decoder(attention).double()
    layout = Layout.packed([16, 2, 9], total=30)
    pack = pack_of(layout, torch.randint(0, 40, (30,)))
    seen: dict[int, Observation] = {}
    with torch.no_grad():
        model(pack.tokens, layout, Pass(mode="warmup", probe=seen.__setitem__))
    health = indexer_health(model, [pack])
    assert [one.layer for one in health.layers] == [0, 1, 2]
    for layer, one in seen.items():
        assert_health_is(health, naive_rows(one, TOP_K), layer)


def test_measuring_leaves_no_trace():
    model = decoder(MLA).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    pack = pack_of(Layout.causal(12), torch.randint(0, 40, (12,)))
    drawn = torch.get_rng_state()
    assert indexer_health(model, [pack]) == indexer_health(model, [pack])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modes_come_back_after_an_error():
    model = decoder(MLA)

    def fail() -> None:
        with evaluating(model):
            assert not model.training
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(module.training for module in model.modules())


def test_layers_without_an_indexer_are_not_listed():
    pack = pack_of(Layout.causal(12), torch.randint(0, 40, (12,)))
    assert [one.layer for one in indexer_health(decoder(MLA, every=2), [pack]).layers] == [0, 2]
    mixed = decoder(MLA, layer_types=("dense", "dsa", "dense"))
    assert [one.layer for one in indexer_health(mixed, [pack]).layers] == [1]


def test_nothing_to_measure_is_said():
    pack = pack_of(Layout.causal(12), torch.randint(0, 40, (12,)))
    dense = indexer_health(decoder(MLA, layer_types=("dense",) * 3), [pack])
    assert (dense.layers, dense.rows, dense.quartile_positions) == ([], 0, [])
    assert "no layer owns an indexer" in dense.note
    wide = indexer_health(decoder(MLA, top_k=12), [pack])
    assert (len(wide.layers), wide.rows, wide.mean("recall")) == (3, 0, None)
    assert "no row sees more than top_k=12 keys" in wide.note
    assert wide.layers[0].recall_quartiles == [None] * 4
    json.dumps(wide.to_dict(), allow_nan=False)
    assert "no row" in indexer_health(decoder(MLA), []).note


def test_pools_are_not_measured_as_keys_and_it_is_said():
    model = decoder(MLA)
    indexer = dataclasses.replace(model.config.dsa.indexer, pool_size=2)
    pooled = Decoder(dataclasses.replace(model.config, dsa=DSAConfig(indexer=indexer)))
    pack = pack_of(Layout.causal(12), torch.randint(0, 40, (12,)))
    health = indexer_health(pooled, [pack])
    assert (health.layers, health.rows, health.mean("recall")) == ([], 0, None)
    assert health.note == "whole pools are selected: recall of single keys is not measured"
    assert Health.from_dict(json.loads(json.dumps(health.to_dict(), allow_nan=False))) == health
    with pytest.raises(InputError, match="max_rows_per_pack=0"):
        indexer_health(pooled, [pack], max_rows_per_pack=0)


def test_a_frozen_stage_with_pools_trains_evaluates_and_reports(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text(f"document {number}: " + "all the letters of it " * 3)
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=8, rope_dim=4, pool_size=4)
    model = ModelConfig(
        hidden_size=16, num_layers=2, intermediate_size=16, attention=MLA, dsa=DSAConfig(indexer=indexer)
    )
    config = RunConfig(
        model=model,
        data=DataConfig(source=str(text), pack_tokens=48, held_out=0.2),
        train=TrainConfig(
            stages=(StageConfig(mode="dense", steps=1), StageConfig(mode="frozen", steps=3)),
            packs_per_step=2,
            packs_per_micro_batch=1,
            run_dir=str(tmp_path / "run"),
            save_every=1,
            eval_packs=2,
            device="cpu",
            tensorboard=False,
        ),
    )
    summary = train(config, console=False)
    assert summary["finished"]
    dense, frozen = summary["stages"]
    assert dense["health"] is None
    assert frozen["held_out_loss"] > 0
    assert "whole pools are selected" in frozen["health"]["note"]
    assert "recall: whole pools are selected" in closing_table(summary)
    assert (tmp_path / "run/report.html").stat().st_size > 0
    at = [load_run(tmp_path / f"run/checkpoints/step-{step:08d}", "cpu")[0].state_dict() for step in (2, 4)]
    changed = {name for name, weight in at[0].items() if not torch.equal(weight, at[1][name])}
    assert changed == {name for name in at[0] if "indexer" not in name}


@pytest.mark.gpu
def test_a_gpu_measures_the_same():
    layout = Layout.packed([60, 3, 30], total=96)
    pack = pack_of(layout, torch.randint(0, 40, (96,)))
    model = decoder(GQA).double()
    here, there = indexer_health(model, [pack]), indexer_health(model.cuda(), [pack])
    for one, other in zip(here.layers, there.layers, strict=True):
        assert one.distances == other.distances
        for name in ("recall", "recency", "oracle", "worst_head", "top1", "kl", "kl_uniform", "captured"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9), name
