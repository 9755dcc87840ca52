"""The fields of Hugging Face configurations: who reads what, what has one value only, what changes no number.

Facts are those of transformers 5.23 and 5.24. A field that no table here knows is refused by name: it may change the
function.
"""

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from dsattn.errors import InputError

Fields = dict[str, Any]

OLDEST, NEWEST_MAJOR = (5, 23), 5
"""Releases of transformers whose configurations are read: from the first, within this major version."""

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "deepseek_v3", "glm4_moe_lite", "llama", "qwen3")
WITH_INDEXER = ("deepseek_v32", "glm_moe_dsa")
MLA = (*WITH_INDEXER, "deepseek_v3", "glm4_moe_lite")

ARCHITECTURES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

REFUSED = {
    "axk2": "an output gate fused with the queries, and gated norms",
    "hy_v4": "hyper-connections: several residual streams",
    "mistral_large4": "keys shared between layers, layers without RoPE, and a learned scale of the queries",
    "mistral_large4_text": "keys shared between layers, layers without RoPE, and a learned scale of the queries",
    "dots3_note": "rescaled latents, a norm on rotated keys, and heads that differ by layer",
    "dots3_note_text": "rescaled latents, a norm on rotated keys, and heads that differ by layer",
    "glm5_next": "hyper-connections: several residual streams",
    "glm5_next_text": "hyper-connections: several residual streams",
    "minimax_m3_vl": "blocks of keys chosen for each group of heads",
    "minimax_m3_vl_text": "blocks of keys chosen for each group of heads",
    "qwen4_exp": "blocks of keys, and hyper-connections",
    "qwen4_exp_text": "blocks of keys, and hyper-connections",
    "deepseek_v4": "compressed keys beside a sliding window, and hyper-connections",
    "deepseek_v2": "experts chosen by softmax",
    "mixtral": "experts chosen by softmax",
    "qwen2": "biases of queries, keys and values",
    "qwen3_moe": "experts chosen by softmax",
}
"""Families that the decoder cannot express, and why."""

_SHARED = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "rope_parameters"),
}
_MLA = {
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group"),
    *("routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace", "mlp_layer_types"),
    *("num_nextn_predict_layers", "rope_interleave", "layer_types"),
}
_INDEXER = {"index_n_heads", "index_head_dim", "index_topk", "indexer_types"}
_GQA = {"head_dim", "layer_types", "sliding_window"}

_SAYS_NOTHING = {
    # bookkeeping and generation
    *("auto_map", "_attn_implementation", "torch_dtype", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("max_position_embeddings", "attention_dropout", "output_router_logits", "pretraining_tp", "ep_size", "seq_aux"),
    *("aux_loss_alpha", "router_aux_loss_coef", "dsattn_indexer_steps", "dsattn_tokenizer"),
    # said again by other fields, or derived from them
    *("qk_head_dim", "num_local_experts", "num_experts", "num_mtp_layers", "use_sliding_window", "max_window_layers"),
    *("rope_theta", "rope_scaling"),
}
_SAYS_NOTHING_OF_MLA = _SAYS_NOTHING | {"head_dim"}
_SAYS_NOTHING_OF_GLM = _SAYS_NOTHING_OF_MLA | {"index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"}

_ONE_VALUE: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "projections have no biases"),
    "mlp_bias": (False, "projections have no biases"),
    "hidden_act": ("silu", "MLPs are SwiGLU"),
    "scoring_func": ("sigmoid", "experts are chosen by sigmoid scores"),
    "topk_method": ("noaux_tc", "experts are chosen by score and bias"),
    "moe_layer_freq": (1, "experts stand in every layer behind the dense ones"),
}


def known_fields(config: Any) -> tuple[str, Fields]:
    """(model type, every field with a value, defaults filled in) of a Hugging Face config, or of a config.json's dict.

    Raises InputError where transformers is missing, for a release of it or a model type that is not known, and, all at
    once, for fields that are not, or have a value that the decoder cannot express.
    """
    try:
        from transformers import AutoConfig, PreTrainedConfig
    except ImportError as error:
        raise InputError("configurations of Hugging Face need transformers: pip install 'dsattn[hf]'") from error
    check_release()
    given = dict(config) if isinstance(config, Mapping) else config.to_dict()
    model_type = given.get("model_type") or ""
    if model_type not in FAMILIES:
        why = f"it has {REFUSED[model_type]}" if model_type in REFUSED else "dsattn does not know it"
        raise InputError(f"model_type={model_type!r} is not expressed: {why}; there is {', '.join(FAMILIES)}")
    if isinstance(config, Mapping):
        given.pop("model_type")
        try:
            given = AutoConfig.for_model(model_type, **given).to_dict()
        except Exception as error:
            raise InputError(f"transformers does not read this {model_type} config: {error}") from error
    problems = list(_problems(model_type, given, set(PreTrainedConfig().to_dict())))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise InputError(f"the {model_type} configuration has {len(problems)} problem(s):\n{listed}")
    return model_type, given


def check_release() -> None:
    """Raise InputError unless the installed transformers is one whose configurations are known."""
    version = importlib.metadata.version("transformers")
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < OLDEST or release[0] > NEWEST_MAJOR:
        raise InputError(
            f"transformers {version} is not known; configurations are read as of 5.23 and later 5.x: "
            "install one of those"
        )


def is_block_fp8(quantization: Any) -> bool:
    """Whether weights are float8 with a scale for each 128 x 128 block, as DeepSeek releases them."""
    return quantization["quant_method"] == "fp8" and list(quantization.get("weight_block_size") or ()) == [128, 128]


def bookkeeping(fields: Mapping[str, Any]) -> Fields:
    """Those of `fields` that change no number and may be carried over to another config: tokens, lengths, names."""
    kept = ("pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings", "use_cache", "id2label")
    kept += ("dsattn_tokenizer",)
    return {name: fields[name] for name in kept if name in fields}


def _problems(model_type: str, given: Fields, generic: set[str]) -> Iterator[str]:
    known = _SHARED | (_MLA if model_type in MLA else _GQA) | (_INDEXER if model_type in WITH_INDEXER else set())
    silent = _SAYS_NOTHING if model_type not in MLA else _SAYS_NOTHING_OF_MLA
    if model_type == "glm_moe_dsa":
        silent = _SAYS_NOTHING_OF_GLM
    for name, value in given.items():
        if name in _ONE_VALUE:
            only, why = _ONE_VALUE[name]
            if value != only:
                yield f"{name}={value!r} must be {only!r}: {why}"
        elif name == "quantization_config":
            if not is_block_fp8(value):
                yield f"{name}={value!r} must be fp8 in blocks of 128 x 128, or nothing: dequantise the weights first"
        elif name == "indexer_rope_interleave" and model_type in WITH_INDEXER:
            if value != (model_type == "glm_moe_dsa"):
                yield f"{name}={value!r} is not what transformers runs for {model_type}, whatever this field says"
        elif name == "index_share_for_mtp_iteration":
            if value and (given.get("num_nextn_predict_layers") or 0) > 1:
                yield f"{name}=True with {given['num_nextn_predict_layers']} MTP layers is not expressed"
        elif name not in known | silent | generic:
            yield f"{name}={value!r} is unknown for {model_type}; take it out of the config if it changes no number"
    if model_type in MLA:
        yield from _problems_of_mla(model_type, given)


def _problems_of_mla(model_type: str, given: Fields) -> Iterator[str]:
    heads, groups = given["num_attention_heads"], given["num_key_value_heads"]
    if groups != heads:
        yield f"num_key_value_heads={groups} must be num_attention_heads={heads}: MLA has a key a head"
    if model_type in WITH_INDEXER and given.get("rope_interleave") is False:
        yield f"rope_interleave=False is not what transformers runs for {model_type}: it always rotates neighbours"
    if not given["qk_rope_head_dim"]:
        yield f"qk_rope_head_dim=0 must be positive: transformers rotates in every {model_type} layer"
    if model_type in WITH_INDEXER:
        if given["q_lora_rank"] is None:
            yield "q_lora_rank=None must be a width: indexer queries are projected from the query latent"
        if odd := set(given.get("layer_types") or ()) - {"indexed_attention"}:
            yield f"layer_types has {sorted(odd)}, but every layer of {model_type} is indexed_attention"
    layers = given.get("mlp_layer_types")
    if layers and "sparse" in layers and "dense" in layers[layers.index("sparse") :]:
        yield "mlp_layer_types has a dense layer behind a sparse one; dense MLPs must all come first"
