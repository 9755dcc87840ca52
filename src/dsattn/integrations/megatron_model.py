"""A Megatron model's configuration as ours, field by field under its own names.

`args` is whatever carries the names: a TransformerConfig, the Namespace of Megatron's own arguments, or a dict.
docs/guide.md has the table of flags.
"""

from collections.abc import Iterator
from typing import Any

from dsattn.config import (
    DSAConfig,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
    parse_pipeline_layout,
)
from dsattn.errors import ConfigError, InputError
from dsattn.integrations.megatron_config import Fields, layer_problems, rope_of, softmax_scale_of
from dsattn.model.sharing import sharing_from_megatron


def from_megatron(args: Any, *, hybrid: bool = False) -> ModelConfig:
    """The model that Megatron's arguments describe: GPT with multi-latent attention and DSA.

    hybrid: it is built from a pattern of `D-` pairs; `num_layers` then counts symbols.
    Raises ConfigError with every field that this model does not have, under Megatron's names.
    """
    fields = Fields(args)
    if problems := [*layer_problems(fields), *_model_problems(fields)]:
        raise ConfigError(problems)
    layers = fields.num_layers // 2 if hybrid else fields.num_layers
    return ModelConfig(
        vocab_size=fields.padded_vocab_size or fields.vocab_size,
        hidden_size=fields.hidden_size,
        num_layers=layers,
        intermediate_size=fields.ffn_hidden_size,
        attention=_attention(fields),
        dsa=DSAConfig(
            indexer=_indexer(fields),
            precision=fields.dsa_indexer_precision or "bf16",
            **sharing_from_megatron(fields.held, hybrid=hybrid),
        ),
        mtp=MTPConfig(
            depths=fields.mtp_num_layers or 0,
            repeated=bool(fields.mtp_use_repeated_layer),
            shared_components=tuple(fields.mtp_repeated_layer_shared_components or ()) or None,
        ),
        moe=_moe(fields, layers),
        norm_eps=fields.layernorm_epsilon,
        tie_embeddings=fields.untie_embeddings_and_output_weights is False,
        init_std=fields.init_method_std,
    )


def parallel_from_megatron(args: Any, processes: int) -> ParallelConfig:
    """The same degrees of parallelism on `processes` ranks; what is left of them shards parameters (`dp_shard`)."""
    fields = Fields(args)
    tp, pp, cp = (getattr(fields, f"{name}_parallel_size") or 1 for name in _DEGREES)
    if processes % (tp * pp * cp):
        raise InputError(
            f"tensor, pipeline and context parallel sizes {tp}, {pp}, {cp} do not divide {processes} processes"
        )
    layout, vpp = fields.pipeline_model_parallel_layout, fields.virtual_pipeline_model_parallel_size or 1
    if layout is not None:  # it says how many chunks a rank has; Megatron's own object prints what it was made of
        layout = str(layout)
        vpp = max(len(parse_pipeline_layout(layout)) // pp, 1)
    return ParallelConfig(
        dp_shard=processes // (tp * pp * cp),
        cp=cp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=fields.expert_model_parallel_size or 1,
        pipeline_layout=layout,
        schedule="Interleaved1F1B" if vpp > 1 else "1F1B",
        sequence_parallel=bool(fields.sequence_parallel),
    )


_DEGREES = ("tensor_model", "pipeline_model", "context")


def _model_problems(fields: Fields) -> Iterator[str]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"):
        if getattr(fields, name) is None:
            yield f"{name} is missing"
    if fields.padded_vocab_size is None and fields.vocab_size is None:
        yield "vocab_size is missing: give padded_vocab_size or vocab_size"
    for name, why in _UNKNOWN.items():
        if getattr(fields, name):
            yield f"{name}={getattr(fields, name)!r} is not supported: {why}; turn it off"
    if fields.multi_latent_attention is False:
        yield "multi_latent_attention=False must be True: other attention has no name in Megatron's DSA"
    if (activation := getattr(fields.activation_func, "__name__", "silu")) != "silu":
        yield f"activation_func={activation} must be silu (--swiglu)"
    if (places := fields.position_embedding_type or "rope") not in ("rope", "yarn", "none"):
        yield f"position_embedding_type={places!r} must be 'rope': MLA rotates, nothing is added to the embedding"
    if fields.normalization != "RMSNorm":
        yield f"normalization={fields.normalization!r} must be 'RMSNorm'"
    if not fields.gated_linear_unit:
        yield "gated_linear_unit=False must be True (--swiglu)"
    if not fields.qk_layernorm:
        yield "qk_layernorm=False must be True: both latents are normalised"
    if fields.attention_output_gate and (fields.gated_attention_proj_granularity or "elementwise") not in _GATES:
        yield f"gated_attention_proj_granularity={fields.gated_attention_proj_granularity!r} must be one of {_GATES}"
    if fields.num_moe_experts is None:
        return
    if fields.moe_router_score_function != "sigmoid":
        yield f"moe_router_score_function={fields.moe_router_score_function!r} must be 'sigmoid'"
    groups, best = fields.moe_router_num_groups, fields.moe_router_group_topk or 1
    if groups and groups > 1 and fields.moe_router_topk // best != 2:
        yield f"moe_router_group_topk={best} must be half of moe_router_topk={fields.moe_router_topk}: two rank a group"
    width, shared = (
        fields.moe_ffn_hidden_size or fields.ffn_hidden_size,
        fields.moe_shared_expert_intermediate_size or 0,
    )
    if width and shared % width:
        yield f"moe_shared_expert_intermediate_size={shared} must be a multiple of an expert's {width}"
    frequency = fields.moe_layer_freq
    if isinstance(frequency, list) and sorted(frequency) != frequency:
        yield f"moe_layer_freq={frequency} must be dense layers first, then experts in every layer"
    if isinstance(frequency, int) and frequency != 1:
        yield f"moe_layer_freq={frequency} must be 1, or a list with its dense layers first"


_GATES = ("elementwise", "headwise")
_UNKNOWN = {
    "hidden_dropout": "nothing is dropped",
    "layernorm_zero_centered_gamma": "norms multiply by their weight as it is",
    "apply_residual_connection_post_layernorm": "the residual stream is not normalised",
    "activation_func_clamp_value": "SwiGLU is not clamped",
    "glu_linear_offset": "SwiGLU has no offset",
    "use_mup": "widths scale nothing",
    "heterogeneous_block_specs": "layers differ in attention and experts alone",
    "mtp_detach_heads": "the depths teach the decoder, too",
    "mtp_hsm": "each depth has one loss",
    "mtp_hybrid_override_pattern": "a depth's layer is of the decoder's last type",
    "moe_shared_expert_gate": "shared experts have no gate",
    "moe_latent_size": "experts read the hidden states",
    "moe_expert_capacity_factor": "no token is dropped",
    "moe_apply_probs_on_input": "experts' outputs are weighted",
    "moe_input_jitter_eps": "the router reads the hidden states as they are",
}
"""Fields that make another model, each with what this one does."""


def _attention(fields: Fields) -> MLAConfig:
    return MLAConfig(
        heads=fields.num_attention_heads,
        q_lora_rank=fields.q_lora_rank,
        kv_lora_rank=fields.kv_lora_rank,
        qk_nope_head_dim=fields.qk_head_dim,
        qk_rope_head_dim=fields.qk_pos_emb_head_dim,
        v_head_dim=fields.v_head_dim,
        rope=rope_of(fields.held),
        softmax_scale=softmax_scale_of(fields.held),
        output_gate=(fields.gated_attention_proj_granularity or "elementwise")
        if fields.attention_output_gate
        else "none",
        norm_eps=fields.layernorm_epsilon,
    )


def _indexer(fields: Fields) -> IndexerConfig:
    epsilon = fields.dsa_indexer_k_norm_epsilon
    quantised = bool(fields.dsa_indexer_kpool_use_quantization)  # rotates by itself
    return IndexerConfig(
        heads=fields.dsa_indexer_n_heads,
        head_dim=fields.dsa_indexer_head_dim,
        top_k=fields.dsa_indexer_topk,
        query_from="hidden" if fields.q_lora_rank is None else "q_latent",
        rope_dim=fields.qk_pos_emb_head_dim,
        rope_interleaved=bool(fields.dsa_indexer_rope_interleaved),
        hadamard=bool(fields.dsa_indexer_rotate_activation) and not quantised,
        relu=bool(fields.dsa_indexer_scoring_relu),
        k_norm_eps=fields.layernorm_epsilon if epsilon is None else epsilon,
        k_norm_fp32=bool(fields.dsa_indexer_k_norm_fp32),
        pool_size=fields.dsa_indexer_kpool or 1,
        pool_tail=fields.dsa_indexer_kpool_always_select_tail is not False,
        pool_e4m3=quantised,
    )


def _moe(fields: Fields, layers: int) -> MoEConfig | None:
    if fields.num_moe_experts is None:
        return None
    frequency = fields.moe_layer_freq
    dense = frequency.count(0) if isinstance(frequency, list) else 0
    width = fields.moe_ffn_hidden_size or fields.ffn_hidden_size
    if dense >= layers:
        return None
    return MoEConfig(
        experts=fields.num_moe_experts,
        experts_per_token=fields.moe_router_topk,
        intermediate_size=width,
        shared_experts=(fields.moe_shared_expert_intermediate_size or 0) // width,
        groups=fields.moe_router_num_groups or 1,
        groups_per_token=fields.moe_router_group_topk or 1,
        routed_scaling=fields.moe_router_topk_scaling_factor or 1.0,
        first_dense_layers=dense,
    )
