"""Megatron's arguments as our configuration."""

from argparse import Namespace
from typing import Any

import pytest
from torch.nn.functional import gelu

from dsattn.errors import ConfigError, InputError
from dsattn.integrations.megatron_model import from_megatron, parallel_from_megatron

SMALL: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "padded_vocab_size": 1024,
    "swiglu": True,
    "qk_layernorm": True,
    "norm_epsilon": 1e-6,
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "moe_layer_freq": [0, 0, 1, 1, 1, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
}


def test_a_model_of_flags() -> None:
    more = {
        "rope_type": "rope",
        "mscale_all_dim": 1.0,
        "dsa_indexer_topk_freq": 2,
        "dsa_indexer_skip_topk_offset": 1,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_k_norm_epsilon": 1e-3,
        "mtp_num_layers": 2,
        "mtp_use_repeated_layer": True,
        "untie_embeddings_and_output_weights": False,
    }
    model = from_megatron(Namespace(**SMALL, **EXPERTS, **more))
    attention, indexer, moe = model.attention, model.dsa.indexer, model.moe
    assert (model.vocab_size, model.num_layers, model.norm_eps, model.tie_embeddings) == (1024, 6, 1e-6, True)
    assert (attention.heads, attention.norm_eps, attention.rope.scaling) == (8, 1e-6, "none")
    assert attention.scale == pytest.approx(0.135234, abs=1e-6)
    assert (indexer.heads, indexer.top_k, indexer.rope_interleaved, indexer.k_norm_eps) == (8, 64, True, 1e-3)
    assert indexer.hadamard
    assert model.selection_sources == (0, 0, 2, 2, 4, 4, 6)
    assert (model.mtp.depths, model.mtp.repeated) == (2, True)
    assert moe is not None
    assert (moe.experts, moe.shared_experts, moe.first_dense_layers, moe.routed_scaling) == (16, 2, 2, 2.5)
    assert (moe.groups, moe.groups_per_token) == (8, 4)


def test_fields_that_are_left_out_are_megatrons() -> None:
    model = from_megatron(SMALL)
    assert model.moe is None
    assert from_megatron({**SMALL, "vocab_size": 1000}).vocab_size == 1024, "a checkpoint has the padded rows"
    assert model.attention.rope.factor == 40
    assert (model.attention.q_lora_rank, model.dsa.indexer.query_from) == (512, "q_latent")
    assert from_megatron({**SMALL, "q_lora_rank": None}).dsa.indexer.query_from == "hidden"
    assert from_megatron({**SMALL, "attention_output_gate": True}).attention.output_gate == "elementwise"


def test_fields_of_later_versions() -> None:
    pools = {"dsa_indexer_kpool": 4, "dsa_indexer_kpool_always_select_tail": False}
    indexer = from_megatron({**SMALL, **pools, "dsa_indexer_kpool_use_quantization": True}).dsa.indexer
    assert (indexer.pool_size, indexer.pool_tail, indexer.pool_e4m3, indexer.hadamard) == (4, False, True, False)
    depths = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    shared = from_megatron({**SMALL, **depths, "mtp_repeated_layer_shared_components": ["latent_kv"]}).mtp
    assert shared.shared_components == ("latent_kv",)
    assert from_megatron({**SMALL, "dsa_indexer_precision": "mxfp8"}).dsa.precision == "mxfp8"
    plain = from_megatron(SMALL)
    assert (plain.dsa.indexer.pool_size, plain.dsa.indexer.pool_tail, plain.dsa.precision) == (1, True, "bf16")


def test_a_hybrid_pattern_counts_symbols() -> None:
    model = from_megatron({**SMALL, "dsa_indexer_topk_freq": 4}, hybrid=True)
    assert (model.num_layers, model.dsa.share_numbering) == (3, "pattern")


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"padded_vocab_size": None}, "vocab_size"),
        ({"swiglu": False}, "gated_linear_unit"),
        ({"qk_layernorm": False}, "qk_layernorm"),
        ({"normalization": "LayerNorm"}, "normalization"),
        ({"qk_clip": True}, "qk_clip"),
        ({"hidden_dropout": 0.1}, "hidden_dropout"),
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma"),
        ({"apply_layernorm_1p": True}, "layernorm_zero_centered_gamma"),
        ({"activation_func": gelu}, "activation_func=gelu"),
        ({"multi_latent_attention": False}, "multi_latent_attention"),
        ({"experimental_attention_variant": "gated_delta_net"}, "experimental_attention_variant"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"dsa_indexer_hf_scoring": True}, "dsa_indexer_hf_scoring"),
        ({**EXPERTS, "moe_latent_size": 32}, "moe_latent_size"),
        ({"attention_output_gate": True, "gated_attention_proj_granularity": "x"}, "gated_attention_proj_granularity"),
        ({**EXPERTS, "moe_router_score_function": "softmax"}, "moe_router_score_function"),
        ({**EXPERTS, "moe_router_group_topk": 2}, "moe_router_group_topk"),
        ({**EXPERTS, "moe_layer_freq": 2}, "moe_layer_freq"),
        ({**EXPERTS, "moe_layer_freq": [1, 0, 1, 1, 1, 1]}, "moe_layer_freq"),
        ({**EXPERTS, "moe_shared_expert_intermediate_size": 100}, "moe_shared_expert_intermediate_size"),
    ],
)
def test_what_the_model_does_not_have(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_megatron({**SMALL, **changed})
    assert len(error.value.problems) == 1
    assert name in error.value.problems[0]


def test_degrees_of_parallelism() -> None:
    degrees = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 4,
        "expert_model_parallel_size": 8,
        "virtual_pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_layout": "Et|t|t|tL",
    }
    parallel = parallel_from_megatron(degrees, processes=32)
    assert (parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.dp_shard) == (2, 2, 4, 8, 2)
    assert (parallel.vpp, parallel.schedule, parallel.sequence_parallel) == (2, "Interleaved1F1B", True)
    assert parallel.pipeline_layout == "Et|t|t|tL"
    assert parallel_from_megatron({}, processes=4).dp_shard == 4

    class Printed:  # as Megatron's config holds it, once it is made
        def __repr__(self) -> str:
            return "Et|t|t|tL"

    del degrees["virtual_pipeline_model_parallel_size"]
    assert parallel_from_megatron({**degrees, "pipeline_model_parallel_layout": Printed()}, processes=32) == parallel
    with pytest.raises(InputError, match="do not divide 12 processes"):
        parallel_from_megatron(degrees, processes=12)
