"""Weights of hybrid stacks and experts against the models that are built."""

import dataclasses

import pytest
import torch

from dsattn import accounting
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
from dsattn.model.layer import decoder_layers

MOE = MoEConfig(experts=8, experts_per_token=2, intermediate_size=8, first_dense_layers=1)
HYBRID = ModelConfig(
    vocab_size=300,
    hidden_size=16,
    num_layers=4,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6),
    dense_attention=GQAConfig(heads=4, kv_heads=2, head_dim=8, qk_norm=True, sink=True, output_gate="elementwise"),
    dsa=DSAConfig(indexer=IndexerConfig(heads=3, head_dim=8, top_k=5, rope_dim=4)),
    moe=MOE,
    kda=KDAConfig(heads=2, head_dim=4),
    sliding_window=3,
    layer_types=("linear", "sliding", "dense", "dsa"),
)
CONFIGS = {
    "hybrid": HYBRID,
    "headwise": dataclasses.replace(HYBRID, kda=KDAConfig(heads=3, head_dim=4, conv_size=2, output_gate="headwise")),
    "no gate": dataclasses.replace(
        HYBRID, kda=KDAConfig(heads=3, head_dim=4, output_gate="none"), dense_attention=None
    ),
    "no shared experts": dataclasses.replace(HYBRID, moe=dataclasses.replace(MOE, shared_experts=0)),
    "two shared experts": dataclasses.replace(HYBRID, moe=dataclasses.replace(MOE, shared_experts=2)),
    "ahead": dataclasses.replace(HYBRID, mtp=MTPConfig(depths=2)),
    "repeated": dataclasses.replace(HYBRID, mtp=MTPConfig(depths=3, repeated=True), tie_embeddings=True),
    "linear at the end": dataclasses.replace(
        HYBRID, layer_types=("dsa", "dense", "sliding", "linear"), mtp=MTPConfig(depths=1)
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_those_of_the_built_model(config):
    counts = accounting.parameter_counts(config)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert counts["mlp"] == sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matrices_are_those_of_each_layer(config):
    with torch.device("meta"):
        built = decoder_layers(config)
    for layer, module in zip(accounting.decoder_layers(config), built, strict=False):
        matrices = sorted((outputs, inputs) for _, inputs, outputs in accounting.attention_matrices(config, layer.kind))
        linear = [m for name, m in module.self_attn.named_modules() if isinstance(m, torch.nn.Linear)]
        indexer = {m for name, m in module.self_attn.named_modules() if "indexer" in name}
        assert matrices == sorted(tuple(m.weight.shape) for m in linear if m not in indexer)


def test_layers_say_what_they_are():
    layers = accounting.decoder_layers(HYBRID)
    assert [layer.kind for layer in layers] == list(HYBRID.types)
    assert [layer.role for layer in layers] == ["dense", "dense", "dense", "selects"]
    assert [layer.experts for layer in layers] == [False, True, True, True]
    assert accounting.layer_roles(HYBRID) == [layer.role for layer in layers]


def test_one_expert_is_a_swiglu_of_its_width():
    assert [(inputs, outputs) for _, inputs, outputs in accounting.expert_matrices(HYBRID)] == [
        (16, 8),
        (16, 8),
        (8, 16),
    ]
