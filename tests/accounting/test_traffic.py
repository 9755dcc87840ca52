"""Bytes by hand."""

import dataclasses

from dsattn import accounting
from dsattn.config import DataConfig, MoEConfig, MTPConfig, ParallelConfig, RunConfig
from dsattn.training.recipes import RECIPES

TINY = RECIPES["tiny"]()
MOE = MoEConfig(experts=8, experts_per_token=2, intermediate_size=128, first_dense_layers=1)


def traffic(
    layer: int = 1,
    mode: str = "sparse",
    recompute: str = "none",
    share_every: int = 1,
    reuse: bool = True,
    **parallel: int,
) -> dict[str, tuple]:
    """Name -> (group, forward, backward) of a layer of TINY with experts, over 1024 tokens in bfloat16."""
    config = ParallelConfig(**parallel)
    train = dataclasses.replace(
        TINY.train,
        dtype="bfloat16",
        recompute=recompute,
        recompute_reuse_selection=reuse,
        packs_per_step=config.batch_ranks * config.pp,
    )
    dsa = dataclasses.replace(TINY.model.dsa, share_every=share_every, deterministic=not reuse or None)
    model = dataclasses.replace(TINY.model, moe=MOE, dsa=dsa)
    run = RunConfig(model=model, train=train, data=DataConfig(pack_tokens=1024), parallel=config)
    here = accounting.place(run)
    kept = accounting.layers_kept(here, run, mode)[layer]
    return {one.what: one[1:2] + one[3:] for one in accounting.layer_traffic(here, layer, kept, run, mode)}


def test_one_process_moves_nothing():
    assert traffic() == {}


def test_context_parallel_gathers_keys():
    """C 64, D 32; three quarters of 1024 rows come from others."""
    rows = 1024 * 3 // 4
    found = traffic(cp=4)
    assert found["latents or keys"] == ("cp", 2 * 64 * rows, 2 * 64 * rows)
    assert found["indexer keys"] == ("cp", 2 * 32 * rows, 2 * 32 * rows)
    assert traffic(cp=4, mode="frozen")["indexer keys"] == ("cp", 2 * 32 * rows, 0)
    assert "indexer keys" not in traffic(cp=4, mode="dense")
    assert traffic(cp=4, mode="warmup")["latents or keys"] == ("cp", 2 * 64 * rows, 0)
    again = traffic(cp=4, recompute="full")
    assert again["latents or keys"] == ("cp", 2 * 64 * rows, 2 * 2 * 64 * rows), "a replay gathers again"
    fixed = {"mode": "warmup", "recompute": "full", "cp": 4, "share_every": 2}
    assert traffic(layer=0, **fixed)["latents or keys"] == ("cp", 2 * 64 * rows, 2 * 64 * rows)
    assert traffic(layer=1, **fixed)["latents or keys"] == ("cp", 2 * 64 * rows, 0), "teaches nothing, runs once"


def test_tensor_parallel_gathers_rows_or_sums_them():
    """M 128, query latent 64, K 64; half of 1024 rows."""
    found = traffic(layer=0, tp=2)
    assert found["into the heads"] == ("tp", 2 * 64 * 512, 2 * 64 * 512)
    assert found["out of the heads"] == found["into the MLP"] == ("tp", 2 * 128 * 512, 2 * 128 * 512)
    assert found["selected indices"] == ("tp", 4 * 65 * 512, 0)
    assert traffic(layer=0, tp=2, recompute="full")["selected indices"] == ("tp", 4 * 65 * 512, 0), "a replay has them"
    assert found["latents or keys"][0] == "cp x tp"
    assert "into the MLP" not in traffic(layer=1, tp=2), "experts work on their own rows"
    whole = traffic(layer=0, tp=2, sequence_parallel=False, split_indexer_rows=False)
    assert whole["out of the heads"] == ("tp", 2 * 2 * 128 * 512, 0)
    assert whole["into the heads"] == ("tp", 0, 2 * 2 * 64 * 512)
    assert "latents or keys" not in whole


def test_the_target_goes_from_heads_to_rows_or_to_all_of_them():
    """K 64; half of 1024 rows, or twice that. Over half of the keys on the mean, and then for the backward, too."""
    assert traffic(tp=2)["target of the loss"] == ("tp", 4 * 64 * 512, 0)
    assert traffic(tp=2, recompute="full")["target of the loss"] == ("tp", 4 * 64 * 512, 0), "a replay has the loss"
    assert traffic(tp=2, recompute="full", reuse=False)["target of the loss"] == ("tp", 4 * 64 * 512, 4 * 64 * 512)
    assert traffic(tp=2, mode="warmup")["target of the loss"] == ("tp", 4 * 512 * 512, 4 * 512 * 512)
    assert traffic(tp=4, cp=2)["target of the loss"] == ("tp", 4 * 64 * 512 * 3 // 4, 0)
    whole = traffic(tp=2, split_indexer_rows=False)
    assert whole["target of the loss"] == ("tp", 2 * 4 * 64 * 512, 0)
    assert "selected indices" not in whole
    assert "target of the loss" not in traffic(tp=2, mode="frozen")
    assert "target of the loss" not in traffic(cp=2)
    assert "target of the loss" not in traffic(layer=1, tp=2, share_every=2), "teaches nothing"


def test_rows_travel_to_experts_and_back():
    """Two experts a row, 512 rows a rank, half of what they choose is elsewhere."""
    moved = 2 * 512 * (2 * 2 * 128 + 4) // 2
    assert traffic(cp=2, ep=2)["rows to experts and back"] == ("ep", moved, moved)
    assert "rows to experts and back" not in traffic(layer=0, cp=2, ep=2)


def test_weights_are_gathered_twice_and_gradients_scattered_in_fp32():
    config = dataclasses.replace(TINY.model, moe=MOE)
    layer = accounting.owning_layers(config)[1]
    held = accounting.layer_weights(config, layer, ParallelConfig(dp_shard=4, ep=2))
    dense = held.split + held.whole
    found = traffic(dp_shard=4, ep=2)
    assert found["weights"] == ("fsdp", 2 * dense * 3 // 4, (2 + 4) * dense * 3 // 4)
    assert found["weights of experts"] == ("efsdp", 2 * held.experts // 2, (2 + 4) * held.experts // 2)
    warm = traffic(dp_shard=4, ep=2, mode="warmup")
    assert warm["weights"] == ("fsdp", 2 * dense * 3 // 4, 4 * held.indexer * 3 // 4), "that backward reads none"
    assert warm["weights of experts"] == ("efsdp", held.experts, 0)
    again = traffic(dp_shard=4, ep=2, mode="warmup", recompute="full")
    assert again["weights"] == ("fsdp", 2 * dense * 3 // 4, (2 * dense + 4 * held.indexer) * 3 // 4)
    assert again["weights of experts"] == ("efsdp", held.experts, 0), "experts stand behind the indexer's loss"


def test_a_boundary_of_the_pipeline_carries_the_stream():
    run = dataclasses.replace(
        TINY, parallel=ParallelConfig(pp=2), train=dataclasses.replace(TINY.train, packs_per_step=2)
    )
    assert accounting.stage_traffic(accounting.place(run)) == 4 * 128 * 1024
    assert accounting.stage_traffic(accounting.place(TINY)) == 0
    assert accounting.stage_traffic(accounting.place(run, stage=1)) == 0, "nothing leaves the last one"


def test_a_boundary_behind_depths_carries_the_decoders_hidden_states_and_theirs():
    run = dataclasses.replace(
        TINY,
        model=dataclasses.replace(TINY.model, mtp=MTPConfig(depths=2)),
        parallel=ParallelConfig(pp=4, pipeline_layout="Ett|ttm|m|L"),
        train=dataclasses.replace(TINY.train, packs_per_step=4),
    )
    states = [accounting.stage_traffic(accounting.place(run, stage)) / (4 * 128 * 1024) for stage in range(4)]
    assert states == [1, 2, 3, 0]
