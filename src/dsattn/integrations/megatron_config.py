"""Megatron Core's configuration under its own names: what an attention layer of ours honours, and what it refuses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dsattn.config import DSAConfig, ModelConfig, Precision, RopeConfig
from dsattn.errors import ConfigError, InputError
from dsattn.model.sharing import sharing_from_megatron

DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": False,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "init_method_std": 0.02,
    "rope_type": "yarn",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_rotate_activation": True,
    "moe_router_score_function": "softmax",
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "sequence_parallel": False,
}
"""Megatron Core 0.19's, of fields that `args` leaves out; others are None."""

ALIASES = {
    "layernorm_epsilon": "norm_epsilon",
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
"""Field of a config -> its name among Megatron's command-line arguments."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What Megatron's configuration has no field for.

    backend: of every operator, by name or `auto`; `attention_backend=unfused` makes `auto` the reference.
    rows: `real`: padding rows select nothing, return zeros and count nowhere, and without `calculate_per_token_loss`
        the indexer's loss is divided by the real rows of all context-parallel ranks. `megatron`: padding rows read what
        stands before them, and the divisor is Megatron's, the rows of this rank, for parity runs.
    reuse_selection: a recompute replay of a packed micro-batch takes the selection of its first pass.
    precision: of the indexer's scores, as in `DSAConfig`: decides which keys are selected and nothing else.
    block_bytes: most bytes of indexer scores alive at once.
    """

    backend: str = "auto"
    rows: Literal["real", "megatron"] = "real"
    reuse_selection: bool = True
    precision: Precision = "bf16"
    block_bytes: int = 2**30

    def __post_init__(self) -> None:
        if self.rows not in ("real", "megatron"):
            raise InputError(f"rows={self.rows!r} must be 'real' or 'megatron'")
        if self.precision not in get_args(Precision):
            raise InputError(f"precision={self.precision!r} must be one of {', '.join(get_args(Precision))}")


class Fields:
    """Attribute access to `args`, with aliases and Megatron's defaults."""

    def __init__(self, args: Any):
        self.held = dict(args) if isinstance(args, Mapping) else vars(args)

    def __getattr__(self, name: str) -> Any:
        held = self.held
        for one in (name, ALIASES.get(name, name)):
            if held.get(one) is not None:
                return held[one]
        no_latent = name == "q_lora_rank" and name in held  # None says so
        return None if no_latent else DEFAULTS.get(name)


def check_config(config: Any, *, whole: bool = False) -> None:
    """Raise ConfigError with every field of a Megatron config that a layer of ours cannot honour.

    whole: the self-attention around the core is ours, too.
    """
    fields = Fields(config)
    problems = list(layer_problems(fields))
    for name, (off, why) in _ONLY_OURS.items():
        if (value := getattr(fields, name) or off) != off:
            problems.append(f"{name}={value!r} is not supported in Megatron's layers; set {off!r}{why}")
    if not whole:
        for name, why in _WHOLE.items():
            if getattr(fields, name):
                problems.append(f"{name}={getattr(fields, name)!r} needs whole=True: {why}")
    problems += _graph_problems(fields)
    if problems:
        raise ConfigError(problems)


_ONLY_OURS = {
    "dsa_indexer_kpool": (1, ""),
    "dsa_indexer_precision": ("bf16", ". Options(precision=...) has ours"),
    "mtp_repeated_layer_shared_components": (None, ""),
}
"""Fields of versions after 0.19 that `from_megatron` reads, and no layer: the value that is off, and what to do."""

_READ = {
    *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq"),
    *("dsa_indexer_skip_topk_offset", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "dsa_kernel_backend"),
    *("dsa_indexer_rope_interleaved", "dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu"),
    *("dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32", "dsa_indexer_qk_proj_use_quantization"),
    *("dsa_indexer_kpool", "dsa_indexer_kpool_always_select_tail", "dsa_indexer_kpool_use_quantization"),
    *("dsa_indexer_precision", "dsa_indexer_reuse_checkpoint_topk"),
}
"""Of Megatron's `dsa_` fields those whose meaning is known here; any other one is refused where it is set."""

_WHOLE = {
    "attention_output_gate": "Megatron's absorbed MLA has no gate",
    "delay_wgrad_compute": "Megatron's backward_dw asks linear_kv_up_proj, which never ran, and no indexer",
}


def layer_problems(fields: Fields) -> Iterator[str]:
    """Yield a sentence for each field that no attention layer of ours honours."""
    if (variant := fields.experimental_attention_variant or "dsa") != "dsa":
        yield f"experimental_attention_variant={variant!r} must be 'dsa'"
    for name, value in fields.held.items():
        if name.startswith("dsa_") and name not in _READ and value not in (None, False):
            yield f"{name}={value!r} is not known here; leave it out, or set None or False"
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        if (getattr(fields, name) or 0) < 1:
            yield f"{name}={getattr(fields, name)} must be a positive number"
    width, rotated = fields.dsa_indexer_head_dim or 0, fields.qk_pos_emb_head_dim
    if rotated > width > 0:
        yield f"dsa_indexer_head_dim={width} must be at least qk_pos_emb_head_dim={rotated}: those lanes are rotated"
    if fields.dsa_indexer_rotate_activation and width & (width - 1):
        yield f"dsa_indexer_rotate_activation=True needs a power of two, not dsa_indexer_head_dim={width}; set it False"
    unwanted = {
        "add_bias_linear": "the projections have no biases",
        "apply_rope_fusion": "RoPE is rotated here",
        "rotary_interleaved": "MLA rotates neighbouring lanes in any case, the indexer by dsa_indexer_rope_interleaved",
        "cache_mla_latents": "it is for inference",
        "qk_l2_norm": "MLA has none",
        "qk_clip": "sparse attention reports no largest logit",
        "log_max_attention_logit": "sparse attention reports no largest logit",
        "no_rope_freq": "every layer rotates",
        "window_size": "attention is to selected keys",
        "mla_down_proj_fusion": "the indexer reads the normalised query latent between the two projections",
        "fp8_dot_product_attention": "attention multiplies in the activations' dtype",
        "fp8_multi_head_attention": "attention multiplies in the activations' dtype",
        "flash_decode": "it is for inference",
        "batch_invariant_mode": "it names FlashAttention's kernels; set deterministic_mode",
        "attention_dropout": "sparse attention drops nothing (Megatron's does not either, and says nothing)",
    }
    for name, why in unwanted.items():
        if getattr(fields, name):
            yield f"{name}={getattr(fields, name)!r} is not supported: {why}; turn it off"
    if (backend := fields.dsa_kernel_backend or "none") != "none":
        yield f"dsa_kernel_backend={backend!r} names Megatron's kernels; set 'none'. Options(backend=...) names ours"
    if fields.dsa_indexer_qk_proj_use_quantization is False and (fields.fp8 or fields.fp4):
        yield (
            "dsa_indexer_qk_proj_use_quantization=False is not supported with fp8 or fp4: the indexer's projections "
            "are Megatron's and follow the layer's recipe; set True, or leave both out"
        )
    if (fields.softmax_type or "vanilla") != "vanilla":
        yield f"softmax_type={fields.softmax_type!r} must be 'vanilla': Megatron's MLA has no sink"
    if fields.softmax_scale is not None:
        yield f"softmax_scale={fields.softmax_scale} is not read by Megatron's MLA; leave it out"
    types = fields.cp_comm_type if isinstance(fields.cp_comm_type, list | tuple) else [fields.cp_comm_type]
    if (fields.context_parallel_size or 1) > 1 and {str(one).replace("_", "").lower() for one in types} != {
        "allgather"
    }:
        yield f"cp_comm_type={fields.cp_comm_type!r} must be 'allgather': queries stay and all keys come to them"
    yield from _rope_problems(fields)


def _rope_problems(fields: Fields) -> Iterator[str]:
    if fields.rope_type not in ("rope", "yarn"):
        yield f"rope_type={fields.rope_type!r} must be 'rope' or 'yarn'"
    if fields.rope_type == "rope" and fields.rotary_percent != 1:
        yield f"rotary_percent={fields.rotary_percent} must be 1: set qk_pos_emb_head_dim to the lanes that turn"


def _graph_problems(fields: Fields) -> Iterator[str]:
    """Of graphs of single layers, whose modules are `cuda_graph_modules`, or `cuda_graph_scope` before 0.19."""
    old = fields.enable_cuda_graph or fields.external_cuda_graph
    if not old and fields.cuda_graph_impl not in ("local", "transformer_engine"):
        return
    given = fields.cuda_graph_modules or fields.cuda_graph_scope or ()
    given = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    scopes = [getattr(one, "name", one) for one in given]
    sharing = DSAConfig(**sharing_from_megatron(fields.held))
    yield from ModelConfig(num_layers=fields.num_layers, dsa=sharing).graph_problems([x for x in scopes if x != "full"])


def rope_of(args: Any) -> RopeConfig:
    """The frequencies of attention and indexer. For the softmax scale see `softmax_scale_of`."""
    fields = Fields(args)
    yarn = fields.rope_type == "yarn"
    return RopeConfig(
        base=float(fields.rotary_base),
        scaling="yarn" if yarn else "none",
        factor=float(fields.rotary_scaling_factor),
        original_max_position=fields.original_max_position_embeddings,
        beta_fast=float(fields.beta_fast),
        beta_slow=float(fields.beta_slow),
        mscale=float(fields.mscale),
        mscale_all_dim=float(fields.mscale_all_dim),
    )


def softmax_scale_of(args: Any) -> float:
    """m^2 / sqrt(qk_head_dim + qk_pos_emb_head_dim), with YaRN's m for rope_type 'rope' too, as Megatron runs it."""
    fields = Fields(args)
    yarn = RopeConfig(scaling="yarn", factor=float(fields.rotary_scaling_factor))
    m = yarn.concentration(float(fields.mscale_all_dim))
    return m * m * (fields.qk_head_dim + fields.qk_pos_emb_head_dim) ** -0.5
