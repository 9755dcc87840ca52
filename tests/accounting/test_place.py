"""What a rank holds, by hand; the sums over ranks are the model."""

import dataclasses

import pytest
import torch

from dsattn import Layout, accounting
from dsattn.config import DataConfig, GQAConfig, MoEConfig, MTPConfig, ParallelConfig, RunConfig
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training.loader import place
from dsattn.training.packs import Pack
from dsattn.training.recipes import RECIPES

TINY = RECIPES["tiny"]()
WIDE = dataclasses.replace(TINY.model, hidden_size=192, intermediate_size=768)
HIDDEN = dataclasses.replace(WIDE.dsa, indexer=dataclasses.replace(WIDE.dsa.indexer, query_from="hidden"))
MODELS = {
    "mla": WIDE,
    "gqa": dataclasses.replace(WIDE, attention=GQAConfig(heads=4, kv_heads=2, head_dim=32, rope_dim=16), dsa=HIDDEN),
    "experts": dataclasses.replace(
        WIDE, moe=MoEConfig(experts=8, experts_per_token=2, intermediate_size=128, first_dense_layers=1)
    ),
    "mtp": dataclasses.replace(WIDE, mtp=MTPConfig(depths=2)),
    "repeated": dataclasses.replace(WIDE, mtp=MTPConfig(depths=2, repeated=True)),
    "tied": dataclasses.replace(WIDE, tie_embeddings=True),
}


def of(model: str = "mla", **parallel: int | str) -> RunConfig:
    config = ParallelConfig(**parallel)
    train = dataclasses.replace(TINY.train, packs_per_step=8 * config.batch_ranks, packs_per_micro_batch=1)
    return RunConfig(model=MODELS[model], train=train, data=DataConfig(pack_tokens=4096), parallel=config)


def held(run: RunConfig) -> int:
    """Parameters of all pipeline stages."""
    return sum(accounting.memory_plan(run, "sparse", stage=i).standing["parameters"] for i in range(run.parallel.pp))


@pytest.mark.parametrize("model", MODELS)
def test_stages_hold_the_model_between_them(model):
    config = MODELS[model]
    whole = 4 * sum(accounting.parameter_counts(config).values())
    assert held(of(model)) == whole
    again = config.mtp.depths or config.tie_embeddings  # the last stage reads the embedding, too
    copies = 4 * config.vocab_size * config.hidden_size if again else 0
    assert held(of(model, pp=2)) == whole + copies
    assert held(of(model, pp=2, vpp=2, schedule="Interleaved1F1B")) == whole + copies
    assert held(of(model, dp_shard=2, cp=2)) == pytest.approx(whole / 4, rel=1e-3)
    assert held(of(model, dp_replicate=4)) == whole


def test_tp_splits_heads_and_widths_and_ep_experts():
    config = MODELS["experts"]
    latents = config.hidden_size * (64 + 64)
    layer = accounting.owning_layers(config)[0]
    one, two = (accounting.layer_weights(config, layer, ParallelConfig(tp=tp)) for tp in (1, 2))
    assert two.split * 2 == one.split == 192 * 3 * 768 + 64 * 4 * 48 + 48 * 4 * 64 + 4 * 32 * 192
    assert one.whole == two.whole == latents + one.indexer + 2 * 192 + 64 + 48
    mixture = accounting.layer_weights(config, accounting.owning_layers(config)[1], ParallelConfig(dp_shard=2, ep=2))
    assert mixture.experts == 4 * 3 * 192 * 128
    assert accounting.learning(one, "warmup").whole == one.indexer
    assert accounting.learning(one, "dense").whole == one.whole - one.indexer
    assert accounting.learning(one, "sparse") == one


def test_what_joins_a_depth_is_of_its_layer():
    """eh_proj and three norms, in the layer's FSDP unit; a depth of a repeated layer has the same weights."""
    here = accounting.place(of("mtp", dp_shard=2))
    joins = (2 * 192 + 3) * 192
    assert here.weights(4).whole == here.weights(3).whole + joins
    assert here.weights(4).split == here.weights(3).split
    assert here.around().whole == 2 * WIDE.vocab_size * 192 + 192
    for parallel, layers in (({}, (0, 1, 2, 3, 4)), ({"pp": 2, "pipeline_layout": "Etttt|mmL"}, (4,))):
        here = accounting.place(of("repeated", **parallel), stage=parallel.get("pp", 1) - 1)
        assert here.layers == layers
        assert [here.owner(number) for number in range(len(here.runs))] == [*layers, 4]


def test_what_a_rank_keeps_of_rows_and_keys():
    plain, context, tensor = (accounting.place(of(**parallel)) for parallel in ({}, {"cp": 4}, {"tp": 2}))
    assert (context.rows, context.keys, plain.rows) == (1024, 4096, 4096)
    one, four, two = (accounting.layers_kept(here, of(), "sparse")[0] for here in (plain, context, tensor))
    assert four.core()[1] == 4 * one.core()[1], "keys of all ranks stand beside a quarter of the rows"
    assert four.core()[0] == one.core()[0]
    assert two.core()[0] * 2 == one.core()[0]
    assert two.to_run_again(whole=True)["residual stream"] * 2 == one.to_run_again(whole=True)["residual stream"]
    alone = accounting.place(of(tp=2, sequence_parallel=False, split_indexer_rows=False))
    assert (alone.stream_shards, alone.indexer_shards) == (1, 1)


def test_a_schedule_keeps_its_micro_batches():
    run = of(pp=4)
    flights = [accounting.place(run, stage).in_flight for stage in range(4)]
    assert flights == [4, 3, 2, 1]
    assert [accounting.place(of(pp=2, vpp=2, schedule="Interleaved1F1B"), stage).in_flight for stage in (0, 1)] == [
        5,
        3,
    ]


@pytest.mark.parametrize("degrees", [{}, {"cp": 3}, {"cp": 5, "tp": 2}, {"tp": 4}])
def test_rows_are_the_loaders_of_one_document(degrees):
    run = dataclasses.replace(of(), parallel=ParallelConfig(**degrees), data=DataConfig(pack_tokens=4099))
    pack = Pack(*torch.zeros(2, 4099, dtype=torch.int64), Layout.packed([4099]), 4098)
    here, mesh = accounting.place(run), ParallelMesh(run.parallel)
    layout = place([pack], mesh).layout
    assert (here.keys, here.rows // here.stream_shards) == (layout.num_keys, layout.rows.shape[0])
