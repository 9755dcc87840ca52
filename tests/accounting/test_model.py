"""Counts of layers and models against brute force loops and built models."""

import dataclasses

import pytest
import torch

from dsattn import accounting
from dsattn.accounting import Work
from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
)
from dsattn.model import Decoder
from dsattn.training.recipes import RECIPES

LENGTHS = (7, 0, 1, 12)
TOP_K = 5
INDEXER = IndexerConfig(heads=3, head_dim=8, top_k=TOP_K, rope_dim=4)
MLA = MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6)
SIZES = {"vocab_size": 300, "hidden_size": 16, "num_layers": 4, "intermediate_size": 24}
MODEL = ModelConfig(**SIZES, attention=MLA, dsa=DSAConfig(indexer=INDEXER))
POOLED = dataclasses.replace(INDEXER, top_k=6, pool_size=3)
HIDDEN = dataclasses.replace(INDEXER, query_from="hidden")
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4)


def gqa(**options) -> ModelConfig:
    return ModelConfig(**SIZES, attention=dataclasses.replace(GQA, **options), dsa=DSAConfig(indexer=HIDDEN))


def rows(lengths=LENGTHS) -> list[int]:
    """Visible keys of every row."""
    return [row + 1 for length in lengths for row in range(length)]


@pytest.mark.parametrize(
    "config",
    [
        MODEL,
        dataclasses.replace(MODEL, tie_embeddings=True, layer_types=("dense", "dsa", "dsa", "dense")),
        dataclasses.replace(MODEL, dsa=DSAConfig(indexer=INDEXER, share_every=2, share_offset=1)),
        dataclasses.replace(MODEL, attention=dataclasses.replace(MLA, output_gate="headwise", sink=True)),
        dataclasses.replace(MODEL, attention=dataclasses.replace(MLA, output_gate="elementwise")),
        dataclasses.replace(MODEL, dsa=DSAConfig(indexer=HIDDEN)),
        dataclasses.replace(MODEL, attention=dataclasses.replace(MLA, q_lora_rank=None), dsa=DSAConfig(indexer=HIDDEN)),
        gqa(),
        gqa(output_gate="headwise", qk_norm=True),
        gqa(output_gate="elementwise", sink=True),
        dataclasses.replace(MODEL, dsa=DSAConfig(indexer=POOLED)),
        dataclasses.replace(MODEL, dsa=DSAConfig(indexer=POOLED, share_every=3)),
        dataclasses.replace(MODEL, dsa=DSAConfig(indexer=INDEXER, indexer_types=("full", "full", "shared", "shared"))),
        dataclasses.replace(MODEL, dsa=DSAConfig(indexer=INDEXER, share_every=2, share_numbering="layers")),
        dataclasses.replace(MODEL, mtp=MTPConfig(depths=2)),
        dataclasses.replace(MODEL, mtp=MTPConfig(depths=3, repeated=True), tie_embeddings=True),
        dataclasses.replace(MODEL, mtp=MTPConfig(depths=1), dsa=DSAConfig(indexer=POOLED, share_every=4)),
        dataclasses.replace(MODEL, mtp=MTPConfig(depths=2), layer_types=("dsa", "dsa", "dsa", "dense")),
    ],
)
def test_parameters_are_those_of_the_built_model(config):
    counts = accounting.parameter_counts(config)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    indexers = sum(p.numel() for indexer in model.indexers() for p in indexer.parameters() if p.dim() == 2)
    assert counts["indexer"] == indexers
    joins = sum(p.numel() for name, p in model.named_parameters() if "eh_proj" in name)
    assert counts["mtp"] == joins


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_of_every_recipe(name):
    config = RECIPES[name]().model
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(accounting.parameter_counts(config).values()) == sum(p.numel() for p in model.parameters())


def brute_attention(mode, role="selects") -> tuple[int, int]:
    """(forward, backward) FLOPs of MODEL's attention, a row at a time: absorbed if sparse, else head by head."""
    sparse = mode in ("sparse", "frozen") and role != "dense"
    width, value_width = (12, 8) if sparse else (14, 6)
    forward = backward = 0
    for visible in rows():
        keys = min(TOP_K, visible) if sparse else visible
        for _ in range(MLA.heads):
            forward += 2 * keys * (width + value_width)
            backward += 2 * keys * (3 * width + 2 * value_width)
    return forward, 0 if mode == "warmup" else backward


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_one_layer_is_a_brute_force_count(mode):
    forward, backward = brute_attention(mode)
    tokens = sum(LENGTHS)
    backbone = 16 * 12 + 12 * 2 * 14 + 16 * 12 + 8 * 2 * (10 + 6) + 2 * 6 * 16 + 3 * 16 * 24
    forward += 2 * tokens * backbone
    backward += 0 if mode == "warmup" else 4 * tokens * backbone
    if mode != "dense":
        weights = 12 * 3 * 8 + 16 * 8 + 16 * 3
        forward += 2 * tokens * weights
        learns = mode != "frozen"
        backward += 2 * tokens * weights * learns
        scored = 2 * 3 * 8 * sum(rows())
        lost = 2 * 3 * 8 * sum(visible if mode == "warmup" else min(TOP_K, visible) for visible in rows())
        forward += (0 if mode == "warmup" else scored) + lost * learns
        forward += 2 * 2 * 14 * sum(rows()) * (mode == "warmup")
        backward += 3 * lost * learns
    parts = accounting.layer_parts(MODEL, "selects", LENGTHS, mode)
    assert sum(part.forward.flops for part in parts) == forward
    assert sum(part.backward.flops for part in parts) == backward
    assert accounting.layer_work(MODEL, "selects", LENGTHS, mode).flops == forward + backward


def test_gqa_attends_by_its_own_widths():
    parts = {part.name: part for part in accounting.layer_parts(gqa(), "selects", LENGTHS, "sparse")}
    kept = accounting.kept_pairs(LENGTHS, TOP_K)
    assert parts["sparse attention"].forward.flops == 2 * kept * 4 * (8 + 8)
    dense = {part.name: part for part in accounting.layer_parts(gqa(), "dense", LENGTHS, "sparse")}
    assert dense["dense attention"].forward.flops == 2 * sum(rows()) * 4 * (8 + 8)


@pytest.mark.parametrize("tail", [True, False])
def test_pools_are_scored_and_kept_whole(tail):
    """Against one layer without pools: what differs is counted a row at a time."""
    indexer = dataclasses.replace(POOLED, pool_tail=tail)
    config = dataclasses.replace(MODEL, dsa=DSAConfig(indexer=indexer))
    plain = dataclasses.replace(MODEL, dsa=DSAConfig(indexer=dataclasses.replace(INDEXER, top_k=6)))
    found, before = (
        {part.name: part for part in accounting.layer_parts(one, "selects", LENGTHS, "frozen")}
        for one in (config, plain)
    )
    assert found.keys() == before.keys()
    scored = sum(visible // 3 for visible in rows())
    kept = sum(3 * min(2, visible // 3) + (visible % 3 if tail else 0) for visible in rows())
    assert found["indexer selection"].forward.flops == 2 * scored * 3 * 8
    assert found["sparse attention"].forward.flops == 2 * kept * 2 * (12 + 8)
    gate = 2 * sum(LENGTHS) * 16 * 8
    assert found["indexer projections"].forward.flops == before["indexer projections"].forward.flops + gate
    assert found["indexer projections"].backward == Work()
    operands = 2 * (20 * 3 * 9 + 6 * 8) + 4 * 20 * 3  # q, w, 6 pools; 2 pools and a length a row
    pooling = 2 * (2 * 20 + 6) * 8 + 4 * 20 * 3 + 4 * 20 * (6 + 2 * tail + 1)
    assert found["indexer selection"].forward.bytes == operands + pooling


def test_roles_follow_every_way_to_share():
    def roles(**dsa):
        return accounting.layer_roles(dataclasses.replace(MODEL, dsa=DSAConfig(indexer=INDEXER, **dsa)))

    assert roles(indexer_types=("full", "shared", "full", "shared")) == ["selects", "shares", "selects", "shares"]
    assert roles(share_every=2, share_offset=2) == ["selects", "selects", "shares", "selects"]
    dense_first = dataclasses.replace(MODEL, layer_types=("dense", "dsa", "dsa", "dsa"))
    by_layer = DSAConfig(indexer=INDEXER, share_every=2, share_offset=2, share_numbering="layers")
    assert accounting.layer_roles(dataclasses.replace(dense_first, dsa=by_layer)) == [
        *("dense", "selects", "shares", "selects")
    ]
    by_dsa = dataclasses.replace(by_layer, share_numbering="dsa")
    assert accounting.layer_roles(dataclasses.replace(dense_first, dsa=by_dsa)) == [
        *("dense", "selects", "selects", "shares")
    ]


def test_a_layer_that_teaches_its_source_has_a_loss():
    taught = dataclasses.replace(MODEL, dsa=DSAConfig(indexer=INDEXER, share_every=2, multi_layer_teacher=True))
    for mode in ("dense", "warmup", "sparse", "frozen"):
        shares = {part.name: part for part in accounting.layer_parts(taught, "shares", LENGTHS, mode)}
        selects = {part.name: part for part in accounting.layer_parts(taught, "selects", LENGTHS, mode)}
        assert ("indexer loss" in shares) == (mode in ("warmup", "sparse"))
        assert shares.get("indexer loss") == selects.get("indexer loss")
        assert "indexer projections" not in shares


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_a_depth_is_a_layer_a_product_and_a_head(mode):
    ahead = dataclasses.replace(MODEL, mtp=MTPConfig(depths=3))
    times = 1 if mode == "warmup" else 3
    joined = times * 2 * sum(LENGTHS) * (2 * 16 * 16 + 16 * 300)
    layer = accounting.layer_work(MODEL, "selects", LENGTHS, mode).flops
    alone = accounting.model_work(MODEL, LENGTHS, mode).flops
    assert accounting.model_work(ahead, LENGTHS, mode).flops == alone + 3 * (layer + joined)
    repeated = dataclasses.replace(MODEL, mtp=MTPConfig(depths=3, repeated=True))
    assert accounting.model_work(repeated, LENGTHS, mode) == accounting.model_work(ahead, LENGTHS, mode)
    dense = dataclasses.replace(ahead, layer_types=("dsa", "dsa", "dsa", "dense"))
    last = accounting.layer_work(MODEL, "dense", LENGTHS, mode).flops - layer
    assert accounting.model_work(dense, LENGTHS, mode).flops == alone + last + 3 * (layer + last + joined)


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_depths_that_share_do_once_what_they_share(mode):
    def flops(*components: str) -> int:
        mtp = MTPConfig(depths=3, repeated=True, shared_components=components or None)
        return accounting.model_work(dataclasses.replace(MODEL, mtp=mtp), LENGTHS, mode).flops

    parts = {part.name: part.total.flops for part in accounting.layer_parts(MODEL, "selects", LENGTHS, mode)}
    indexer = sum(work for name, work in parts.items() if name.startswith("indexer"))
    assert flops() - flops("sparse_attention_index") == 2 * indexer
    weights = 16 * 12 + (0 if mode in ("sparse", "frozen") else 8 * 2 * (10 + 6))
    keys = (2 if mode == "warmup" else 6) * sum(LENGTHS) * weights
    assert flops() - flops("latent_kv") == 2 * keys
    assert flops() - flops("latent_kv", "sparse_attention_index") == 2 * (keys + indexer)


def test_a_model_is_its_layers_and_head():
    config = dataclasses.replace(
        MODEL, layer_types=("dense", "dsa", "dsa", "dsa"), dsa=DSAConfig(indexer=INDEXER, share_every=2)
    )
    assert accounting.layer_roles(config) == ["dense", "selects", "shares", "selects"]
    layers = [accounting.layer_work(config, role, LENGTHS, "sparse") for role in accounting.layer_roles(config)]
    head = 6 * sum(LENGTHS) * 16 * 300
    assert accounting.model_work(config, LENGTHS, "sparse").flops == sum(w.flops for w in layers) + head
    names = [part.name for part in accounting.model_parts(config, LENGTHS, "sparse")]
    assert len(names) == len(set(names))


def test_a_shared_selection_costs_no_indexer():
    shares = {part.name for part in accounting.layer_parts(MODEL, "shares", LENGTHS, "sparse")}
    selects = {part.name for part in accounting.layer_parts(MODEL, "selects", LENGTHS, "sparse")}
    assert selects - shares == {"indexer projections", "indexer selection", "indexer loss"}


def test_padding_and_document_edges_change_the_count():
    """Negative control: one document of the same number of rows is more work than several."""
    several = accounting.model_work(MODEL, LENGTHS, "dense").flops
    assert accounting.model_work(MODEL, (sum(LENGTHS),), "dense").flops > several
    assert accounting.model_work(MODEL, (*LENGTHS, 0), "dense").flops == several
    assert accounting.model_work(MODEL, (), "sparse").flops == 0


HYBRID = dataclasses.replace(
    MODEL,
    dense_attention=GQA,
    moe=MoEConfig(experts=8, experts_per_token=2, intermediate_size=8, first_dense_layers=1),
    kda=KDAConfig(heads=2, head_dim=4),
    sliding_window=3,
    layer_types=("linear", "sliding", "dense", "dsa"),
)


@pytest.mark.parametrize(("mode", "times"), [("sparse", 3), ("warmup", 1)])
def test_a_hybrid_stack_is_counted_layer_by_layer(mode, times):
    """Matrices by token, experts by the tokens sent to them, attention by the pairs that each type reads."""
    parts = {part.name: part.total.flops for part in accounting.model_parts(HYBRID, LENGTHS, mode)}
    tokens = sum(LENGTHS)
    swiglu = 3 * 16 * 24
    mixture = 16 * 8 + 3 * 3 * 16 * 8  # router, two experts, one shared
    assert parts["mlp projections"] == times * 2 * tokens * (swiglu + 3 * mixture)
    weights = sum(
        inputs * outputs for kind in HYBRID.types for _, inputs, outputs in accounting.attention_matrices(HYBRID, kind)
    )
    assert parts["attention projections"] == times * 2 * tokens * weights
    assert parts["linear attention"] == times * 6 * tokens * 2 * 4 * 4
    windowed, seen = sum(min(n, 3) for n in rows()), sum(rows())
    pairs = 4 * 2 * 2 * 8  # heads, multiply-add, logits and values, width
    width = MLA.qk_nope_head_dim + MLA.qk_rope_head_dim + MLA.v_head_dim
    dense = pairs * (windowed + seen) * (1 if mode == "warmup" else 3.5)
    assert parts["dense attention"] == dense + (2 * 2 * seen * width if mode == "warmup" else 0)
    assert accounting.model_work(HYBRID, LENGTHS, mode).flops == sum(parts.values())


def test_experts_move_every_weight_once_and_their_tokens():
    one = dataclasses.replace(HYBRID, layer_types=("dsa",) * 4, kda=None, sliding_window=None, dense_attention=None)
    few, many = (
        accounting.model_parts(dataclasses.replace(one, moe=dataclasses.replace(one.moe, experts=n)), [1000], "frozen")
        for n in (8, 16)
    )
    few, many = ({part.name: part.forward for part in parts}["mlp projections"] for parts in (few, many))
    assert many.flops - few.flops == 3 * 2 * 1000 * 16 * 8  # wider routers
    routers = 3 * 2 * (1000 * 8 + 16 * 8)
    assert many.bytes - few.bytes == routers + 3 * 2 * 8 * 3 * 16 * 8


def test_depths_have_the_experts_of_their_layer():
    ahead = dataclasses.replace(HYBRID, mtp=MTPConfig(depths=2, repeated=True))
    more = (
        accounting.model_work(ahead, LENGTHS, "sparse").flops - accounting.model_work(HYBRID, LENGTHS, "sparse").flops
    )
    plain = dataclasses.replace(ahead, moe=None)
    without = dataclasses.replace(plain, mtp=MTPConfig())
    less = (
        accounting.model_work(plain, LENGTHS, "sparse").flops - accounting.model_work(without, LENGTHS, "sparse").flops
    )
    mixture, swiglu = 16 * 8 + 3 * 3 * 16 * 8, 3 * 16 * 24
    assert more - less == 2 * 3 * 2 * sum(LENGTHS) * (mixture - swiglu)
