"""What an attention layer of ours honours of a Megatron config, and what it refuses by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from dsattn.errors import ConfigError, InputError
from dsattn.integrations.megatron_config import Fields, Options, check_config, rope_of, softmax_scale_of

DSA = {"dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048}


def problems(**fields: Any) -> list[str]:
    whole = fields.pop("whole", False)
    try:
        check_config(SimpleNamespace(**{**DSA, **fields}), whole=whole)
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dsa_indexer_qk_proj_use_quantization": True, "fp8": "e4m3"},
        {"dsa_indexer_qk_proj_use_quantization": False},
        {"fp4": "nvfp4"},
        {"context_parallel_size": 4, "cp_comm_type": ["all_gather", "allgather"]},
        {"cp_comm_type": "p2p"},
        {"rope_type": "yarn", "rotary_percent": 0.5},
        {"attention_output_gate": True, "delay_wgrad_compute": True, "whole": True},
        {"dsa_indexer_kpool": 1, "softmax_type": "vanilla", "attention_dropout": 0.0},
        {"dsa_indexer_kpool_always_select_tail": True, "dsa_indexer_precision": "bf16"},
        {"dsa_indexer_reuse_checkpoint_topk": True, "dsa_of_a_later_version": False},
        {"experimental_attention_variant": "dsa"},
    ],
)
def test_what_is_honoured(fields: dict[str, Any]) -> None:
    assert not problems(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"dsa_indexer_n_heads": None},
        {"dsa_indexer_topk": 0},
        {"dsa_indexer_head_dim": 32},
        {"dsa_indexer_head_dim": 96},
        {"add_bias_linear": True},
        {"apply_rope_fusion": True},
        {"attention_dropout": 0.1},
        {"batch_invariant_mode": True},
        {"cache_mla_latents": True},
        {"context_parallel_size": 2, "cp_comm_type": None},
        {"context_parallel_size": 2, "cp_comm_type": ["allgather", "p2p"]},
        {"dsa_kernel_backend": "tilelang"},
        {"dsa_indexer_kpool": 64},
        {"dsa_indexer_kpool_key_dtype_compression": True},
        {"dsa_indexer_hf_scoring": True},
        {"dsa_indexer_precision": "mxfp8"},
        {"dsa_of_a_later_version": 3},
        {"experimental_attention_variant": "gated_delta_net"},
        {"mtp_repeated_layer_shared_components": ["latent_kv"]},
        {"dsa_indexer_qk_proj_use_quantization": False, "fp8": "hybrid"},
        {"dsa_indexer_qk_proj_use_quantization": False, "fp4": "nvfp4"},
        {"flash_decode": True},
        {"fp8_dot_product_attention": True},
        {"fp8_multi_head_attention": True},
        {"log_max_attention_logit": True},
        {"mla_down_proj_fusion": True},
        {"no_rope_freq": [0, 1]},
        {"qk_clip": True},
        {"qk_l2_norm": True},
        {"rotary_interleaved": True},
        {"rope_type": "llama"},
        {"rope_type": "rope", "rotary_percent": 0.5},
        {"softmax_scale": 0.1},
        {"softmax_type": "learnable"},
        {"window_size": (128, 0)},
        {"attention_output_gate": True},
        {"delay_wgrad_compute": True},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()),
)
def test_what_is_refused_by_name(fields: dict[str, Any]) -> None:
    found = problems(**fields)
    assert len(found) == 1
    assert any(name in found[0] for name in fields)


SHARES = {"num_layers": 4, "dsa_indexer_topk_freq": 2}
LOCAL = {**SHARES, "cuda_graph_impl": "local"}


@pytest.mark.parametrize(
    "fields",
    [
        {**LOCAL, "cuda_graph_modules": []},
        {**LOCAL, "cuda_graph_modules": "full"},
        {**LOCAL, "cuda_graph_modules": [SimpleNamespace(name="attn"), SimpleNamespace(name="mlp")]},
        {**LOCAL, "cuda_graph_scope": "attn,moe_router"},
        {**SHARES, "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
        {**SHARES, "external_cuda_graph": True},
    ],
)
def test_graphs_that_would_freeze_a_shared_selection(fields: dict[str, Any]) -> None:
    (problem,) = problems(**fields)
    assert "would freeze the selection that layer 1 takes from layer 0" in problem


@pytest.mark.parametrize(
    "fields",
    [
        {**LOCAL, "cuda_graph_modules": ["moe_router", "moe_preprocess"]},
        {**LOCAL, "cuda_graph_modules": SimpleNamespace(name="mlp")},
        {**LOCAL, "cuda_graph_scope": "full_iteration"},
        {**LOCAL, "dsa_indexer_topk_freq": 1},
        {**SHARES, "cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
        {**SHARES, "cuda_graph_impl": "none", "cuda_graph_modules": "full"},
    ],
)
def test_graphs_that_freeze_nothing(fields: dict[str, Any]) -> None:
    assert not problems(**fields)


def test_all_problems_come_together() -> None:
    assert len(problems(dsa_indexer_topk=None, qk_clip=True, window_size=(1, 0))) == 3


def test_fields_have_aliases_and_megatrons_defaults() -> None:
    fields = Fields({"norm_epsilon": 1e-6, "num_experts": 8, "kv_lora_rank": None, "q_lora_rank": None})
    assert (fields.layernorm_epsilon, fields.num_moe_experts, fields.kv_lora_rank) == (1e-6, 8, 512)
    assert fields.q_lora_rank is None
    assert Fields({}).q_lora_rank == 512
    assert Fields(SimpleNamespace(layernorm_epsilon=0.5, norm_epsilon=1.0)).layernorm_epsilon == 0.5
    assert fields.nothing_of_the_kind is None


def test_frequencies_and_softmax_scale() -> None:
    """YaRN's m stands in the scale whatever the type: 0.135234 for 192 lanes, factor 40 and mscale_all_dim 1."""
    rope = rope_of({"rope_type": "rope", "rotary_base": 50000, "mscale_all_dim": 1.0})
    assert (rope.base, rope.scaling) == (50000, "none")
    assert rope_of({}).scaling == "yarn"
    assert softmax_scale_of({"rope_type": "rope", "mscale_all_dim": 1.0}) == pytest.approx(0.135234, abs=1e-6)
    assert softmax_scale_of({}) == pytest.approx(192**-0.5)
    assert softmax_scale_of({"rotary_scaling_factor": 1, "mscale_all_dim": 1.0}) == pytest.approx(192**-0.5)


def test_options_are_checked() -> None:
    with pytest.raises(InputError, match="rows='all' must be"):
        Options(rows="all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="precision='fp4' must be one of bf16"):
        Options(precision="fp4")  # pyright: ignore[reportArgumentType]
