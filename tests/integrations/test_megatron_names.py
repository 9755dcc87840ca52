"""Megatron Core's names, against a list written by hand."""

import dataclasses
import re
from typing import Any

import pytest
import torch

from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from dsattn.errors import CheckpointError, InputError
from dsattn.integrations.megatron_names import from_megatron_names, to_megatron_names
from dsattn.integrations.stored import Stored, stored
from dsattn.model import Decoder

ATTENTION = MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=3)
INDEXER = IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)
MODEL = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    num_layers=2,
    intermediate_size=24,
    attention=ATTENTION,
    dsa=DSAConfig(indexer=INDEXER),
    moe=MoEConfig(experts=2, experts_per_token=1, intermediate_size=8, first_dense_layers=1),
    mtp=MTPConfig(depths=1),
)
DENSE = dataclasses.replace(MODEL, moe=None, mtp=MTPConfig())

LAYER = [
    "input_layernorm",
    "self_attention.linear_q_down_proj",
    "self_attention.q_layernorm",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.kv_layernorm",
    "self_attention.linear_kv_up_proj",
    "self_attention.linear_proj",
    "self_attention.core_attention.indexer.linear_wq_b",
    "self_attention.core_attention.indexer.linear_wk",
    "self_attention.core_attention.indexer.k_norm",
    "self_attention.core_attention.indexer.linear_weights_proj",
]
K_NORM_BIAS = "self_attention.core_attention.indexer.k_norm.bias"
MLP = {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp.linear_fc1.layer_norm_weight"}
MOE = {
    *("pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"),
    *("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"),
    *(f"mlp.experts.linear_fc{which}.weight{expert}" for which in (1, 2) for expert in (0, 1)),
}


def weights(config: ModelConfig) -> dict[str, Stored]:
    torch.manual_seed(0)
    return {name: stored(torch.randn(one.shape)) for name, one in Decoder(config).state_dict().items()}


def names(prefix: str, mlp: set[str], mlp_prefix: str | None = None) -> set[str]:
    attention = {f"{prefix}{name}.weight" for name in LAYER} | {prefix + K_NORM_BIAS}
    return attention | {(prefix if mlp_prefix is None else mlp_prefix) + name for name in mlp}


def test_names_are_megatrons() -> None:
    top = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    mtp = {f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
    layers = names("decoder.layers.0.", MLP) | names("decoder.layers.1.", MOE)
    assert to_megatron_names(weights(MODEL), MODEL).keys() == (
        top | mtp | layers | names("mtp.layers.0.mtp_model_layer.", MOE)
    )


def test_hybrid_numbers_attention_and_mlp_apart() -> None:
    found = to_megatron_names(weights(DENSE), DENSE, hybrid=True).keys()
    top = {"embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"}
    layers = names("decoder.layers.0.", MLP, "decoder.layers.1.") | names("decoder.layers.2.", MLP, "decoder.layers.3.")
    assert found == top | layers


@pytest.mark.parametrize(
    ("config", "hybrid"), [(MODEL, False), (DENSE, True), (dataclasses.replace(DENSE, tie_embeddings=True), False)]
)
def test_there_and_back(config: ModelConfig, hybrid: bool) -> None:
    ours = weights(config)
    theirs = to_megatron_names(ours, config, hybrid=hybrid)
    for name, one in theirs.items():
        assert tuple(one.read().shape) == one.shape, name
    theirs["decoder.layers.0.self_attention._extra_state"] = stored(torch.zeros(1))
    back = from_megatron_names(theirs, config)
    assert back.keys() == ours.keys()
    for name, one in back.items():
        assert one.read().equal(ours[name].read()), name


def test_gate_stands_over_up() -> None:
    ours = weights(MODEL)
    theirs = to_megatron_names(ours, MODEL)
    gate, up = (ours[f"model.layers.0.mlp.{half}_proj.weight"].read() for half in ("gate", "up"))
    assert theirs["decoder.layers.0.mlp.linear_fc1.weight"].read().equal(torch.cat((gate, up)))
    experts = ours["model.layers.1.mlp.experts.down_proj"].read()
    assert theirs["decoder.layers.1.mlp.experts.linear_fc2.weight1"].read().equal(experts[1])


def test_other_names_are_read() -> None:
    """Of sharded checkpoints, of experts whose products are not grouped, of norms that are not fused."""
    ours = weights(MODEL)
    theirs = {}
    for name, one in to_megatron_names(ours, MODEL).items():
        name = re.sub(r"mtp_model_layer", "transformer_layer", name)
        name = re.sub(r"experts\.(linear_fc\d)\.weight(\d)$", r"experts.local_experts.\2.\1.weight", name)
        theirs[name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")] = one
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in theirs
    assert "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight" in theirs
    back = from_megatron_names(theirs, MODEL)
    assert all(back[name].read().equal(ours[name].read()) for name in ours)


def test_split_up_projections_merge_head_by_head() -> None:
    ours = weights(DENSE)
    theirs = to_megatron_names(ours, DENSE)
    for layer in (0, 1):
        prefix = f"decoder.layers.{layer}.self_attention.linear_"
        keys, values = theirs.pop(f"{prefix}kv_up_proj.weight").read().unflatten(0, (2, 7)).split([4, 3], 1)
        theirs[f"{prefix}k_up_proj.weight"] = stored(keys.flatten(0, 1))
        theirs[f"{prefix}v_up_proj.weight"] = stored(values.flatten(0, 1))
    back = from_megatron_names(theirs, DENSE)
    assert all(back[name].read().equal(ours[name].read()) for name in ours)
    del theirs["decoder.layers.1.self_attention.linear_v_up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"linear_kv_up_proj\.weight is missing") as error:
        from_megatron_names(theirs, DENSE)
    assert "linear_k_up_proj.weight belongs to nothing" in str(error.value)


def test_problems_are_listed_together() -> None:
    theirs = to_megatron_names(weights(MODEL), MODEL)
    del theirs["decoder.layers.1.mlp.router.expert_bias"]
    theirs["output_layer.weight"] = stored(torch.zeros(3))
    theirs["decoder.layers.9.strange"] = stored(torch.zeros(3))
    with pytest.raises(CheckpointError, match="3 problem") as error:
        from_megatron_names(theirs, MODEL)
    for text in (
        "expert_bias is missing",
        "output_layer.weight is [3], must be [11, 16]",
        "strange belongs to nothing",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"layer_types": ("dsa", "dense")}, "must all be dsa"),
        ({"attention": dataclasses.replace(ATTENTION, rope_interleaved=False)}, "rope_interleaved=False must be True"),
        ({"attention": dataclasses.replace(ATTENTION, output_gate="headwise")}, "output_gate='headwise'"),
        (
            {
                "attention": GQAConfig(heads=2, kv_heads=1, head_dim=4),
                "dsa": DSAConfig(indexer=dataclasses.replace(INDEXER, query_from="hidden")),
            },
            "attention must be an MLAConfig",
        ),
        ({"dsa": DSAConfig(indexer=dataclasses.replace(INDEXER, pool_size=2))}, "pool_size=2 must be 1"),
    ],
)
def test_what_megatron_has_not_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        to_megatron_names({}, dataclasses.replace(DENSE, **changed))


def test_hybrid_with_mtp_is_refused() -> None:
    with pytest.raises(InputError, match="hybrid=True needs mtp"):
        to_megatron_names(weights(MODEL), MODEL, hybrid=True)
