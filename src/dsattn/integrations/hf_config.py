"""Hugging Face configurations as `ModelConfig`, and back.

    model_type       attention   indexer                              layers are read as
    deepseek_v32     MLA         rotates halves                       dsa
    glm_moe_dsa      MLA         rotates neighbours, may be shared    dsa
    deepseek_v3      MLA         none                                 dense
    glm4_moe_lite    MLA         none                                 dense
    llama            GQA         none                                 dense
    qwen3            GQA         none                                 dense, sliding

`with_indexers` makes dense layers select. Other model types are refused with the reason, unknown fields by name.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    LayerType,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
)
from dsattn.errors import InputError
from dsattn.integrations.hf_fields import (
    ARCHITECTURES,
    FAMILIES,
    MLA,
    WITH_INDEXER,
    Fields,
    bookkeeping,
    known_fields,
)
from dsattn.integrations.hf_rope import rope_facts, rope_from_hf, rope_to_hf
from dsattn.model.sharing import sharing_from_hf

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms on MLA's latents in transformers, whatever rms_norm_eps says."""


def from_hf(config: Any, *, latent_norm_eps: float | None = None) -> ModelConfig:
    """The model that a Hugging Face config describes.

    config: a config object, or the dict of a config.json; fields that it leaves out have their family's defaults.
    latent_norm_eps: of MLA's norms on latents. None takes 1e-6, which transformers runs; GLM-5's own code, vLLM and
    SGLang take rms_norm_eps (1e-5).
    Raises InputError for model types and fields that the decoder does not express, by name; see `hf_fields`.
    """
    model_type, fields = known_fields(config)
    attention = _mla(model_type, fields, latent_norm_eps) if model_type in MLA else _gqa(model_type, fields)
    types: tuple[LayerType, ...] | None = None
    if model_type not in WITH_INDEXER:
        given = fields.get("layer_types") or ("full_attention",) * fields["num_hidden_layers"]
        types = tuple("sliding" if kind == "sliding_attention" else "dense" for kind in given)
    return ModelConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        num_layers=fields["num_hidden_layers"],
        intermediate_size=fields["intermediate_size"],
        attention=attention,
        dsa=_dsa(model_type, fields, attention),
        mtp=MTPConfig(depths=fields.get("num_nextn_predict_layers") or 0),
        moe=_moe(fields) if model_type in MLA else None,
        layer_types=types,
        sliding_window=fields.get("sliding_window") if types and "sliding" in types else None,
        norm_eps=fields["rms_norm_eps"],
        tie_embeddings=fields["tie_word_embeddings"],
        init_std=fields["initializer_range"],
    )


def to_hf(
    config: ModelConfig, model_type: str | None = None, *, like: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What stands in the config.json of this model.

    model_type: one of the table above; None takes the first that fits. like: another config.json, whose tokens, lengths
    and other bookkeeping are carried over.
    What is written is read again by `from_hf`. Raises InputError with every field that would come back different: what
    the family cannot say. Options of how it is computed (`block_bytes`, `backend`, `hadamard`, ...) are not part of the
    model. An MLA `norm_eps` that is neither 1e-6 nor `config.norm_eps` is refused; of those two transformers runs the
    first, other engines the second.
    """
    name = model_type or _family(config)
    if name not in FAMILIES:
        raise InputError(f"model_type={name!r} must be one of {', '.join(FAMILIES)}")
    attention = config.attention
    if isinstance(attention, MLAConfig) != (name in MLA):
        raise InputError(f"model_type={name!r} does not have {type(attention).__name__.removesuffix('Config')} layers")
    fields = {
        "model_type": name,
        "architectures": [ARCHITECTURES[name]],
        **_lengths(attention.rope),
        **bookkeeping(like or {}),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": attention.heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "rope_parameters": rope_to_hf(attention.rope),
        **(_mla_to_hf(name, config) if isinstance(attention, MLAConfig) else _gqa_to_hf(name, config)),
    }
    eps = attention.norm_eps if isinstance(attention, MLAConfig) and attention.norm_eps == config.norm_eps else None
    back = from_hf(fields, latent_norm_eps=eps)
    if problems := list(_differences(_said(config), _said(back))):
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise InputError(f"{name} cannot say {len(problems)} thing(s) about this model:\n{listed}")
    return fields


def fresh_indexer(config: ModelConfig, **fields: Any) -> IndexerConfig:
    """The indexer that a dense model gets: DeepSeek-V3.2's geometry on this attention, `fields` in place of its own."""
    return IndexerConfig(**{**_geometry(config.attention), **fields})


def with_indexers(config: ModelConfig, indexer: IndexerConfig | None = None) -> ModelConfig:
    """`config` with every dense layer made a dsa layer. indexer: None takes `fresh_indexer`. Sliding layers stay.

    Raises InputError where layers select already: a trained indexer is not replaced.
    """
    if "dsa" in config.types:
        raise InputError("the model has indexers already; with_indexers is for dense models")
    types: tuple[LayerType, ...] = tuple("dsa" if kind == "dense" else kind for kind in config.types)
    dsa = dataclasses.replace(config.dsa, indexer=indexer or fresh_indexer(config))
    return dataclasses.replace(config, dsa=dsa, layer_types=None if set(types) == {"dsa"} else types)


def _mla(model_type: str, fields: Fields, norm_eps: float | None) -> MLAConfig:
    return MLAConfig(
        heads=fields["num_attention_heads"],
        q_lora_rank=fields["q_lora_rank"],
        kv_lora_rank=fields["kv_lora_rank"],
        qk_nope_head_dim=fields["qk_nope_head_dim"],
        qk_rope_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        rope=rope_from_hf(model_type, fields),
        rope_interleaved=fields.get("rope_interleave") is not False,
        norm_eps=LATENT_NORM_EPS if norm_eps is None else norm_eps,
    )


def _gqa(model_type: str, fields: Fields) -> GQAConfig:
    rope = rope_from_hf(model_type, fields)
    return GQAConfig(
        heads=fields["num_attention_heads"],
        kv_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        rope=rope,
        softmax_scale=fields["head_dim"] ** -0.5 if rope.mscale_all_dim else None,
        qk_norm=model_type == "qwen3",
        norm_eps=fields["rms_norm_eps"],
    )


def _moe(fields: Fields) -> MoEConfig | None:
    layers, kinds = fields["num_hidden_layers"], fields.get("mlp_layer_types")
    first = (
        kinds.index("sparse") if kinds and "sparse" in kinds else layers if kinds else fields["first_k_dense_replace"]
    )
    if first >= layers:
        return None
    return MoEConfig(
        experts=fields["n_routed_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["moe_intermediate_size"],
        shared_experts=fields["n_shared_experts"] or 0,
        groups=fields["n_group"] or 1,
        groups_per_token=fields["topk_group"] or 1,
        routed_scaling=fields["routed_scaling_factor"],
        normalise=fields["norm_topk_prob"],
        first_dense_layers=first,
    )


def _dsa(model_type: str, fields: Fields, attention: MLAConfig | GQAConfig) -> DSAConfig:
    if model_type not in WITH_INDEXER:
        return DSAConfig(indexer=IndexerConfig(**_geometry(attention)))
    indexer = IndexerConfig(
        heads=fields["index_n_heads"],
        head_dim=fields["index_head_dim"],
        top_k=fields["index_topk"],
        rope_dim=fields["qk_rope_head_dim"],
        rope_interleaved=model_type == "glm_moe_dsa",
    )
    sharing = sharing_from_hf(fields) if "shared" in (fields.get("indexer_types") or ()) else {}
    return DSAConfig(indexer=indexer, **sharing)


def _geometry(attention: MLAConfig | GQAConfig) -> dict[str, Any]:
    """What an indexer takes from the attention beside it."""
    if isinstance(attention, GQAConfig):
        return {"head_dim": max(128, attention.rotated), "rope_dim": attention.rotated, "query_from": "hidden"}
    rotated, query_from = attention.qk_rope_head_dim, "hidden" if attention.q_lora_rank is None else "q_latent"
    return {"head_dim": max(128, rotated), "rope_dim": rotated, "query_from": query_from}


def _family(config: ModelConfig) -> str:
    attention = config.attention
    if "dsa" not in config.types:
        if isinstance(attention, MLAConfig):
            return "deepseek_v3"
        return "qwen3" if attention.qk_norm or "sliding" in config.types else "llama"
    if isinstance(attention, GQAConfig):
        raise InputError(
            "no family of transformers has an indexer beside grouped-query attention as this model has it; "
            "keep it as a dsattn checkpoint, or write its dense layers only"
        )
    return "glm_moe_dsa" if config.dsa.indexer.rope_interleaved else "deepseek_v32"


def _mla_to_hf(model_type: str, config: ModelConfig) -> Fields:
    attention, moe, indexer = config.attention, config.moe, config.dsa.indexer
    assert isinstance(attention, MLAConfig), "the caller looked"
    fields: Fields = {
        "num_key_value_heads": attention.heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "num_nextn_predict_layers": config.mtp.depths,
    }
    first = config.num_layers if moe is None else moe.first_dense_layers
    if model_type != "deepseek_v3":
        fields["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (config.num_layers - first)
    if model_type != "glm4_moe_lite":
        fields["first_k_dense_replace"] = first
    if moe is not None:
        fields |= {
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.intermediate_size,
            "n_shared_experts": moe.shared_experts,
            "n_group": moe.groups,
            "topk_group": moe.groups_per_token,
            "routed_scaling_factor": moe.routed_scaling,
            "norm_topk_prob": moe.normalise,
        }
    if model_type not in WITH_INDEXER:
        return fields | {"rope_interleave": attention.rope_interleaved}
    fields |= {"index_n_heads": indexer.heads, "index_head_dim": indexer.head_dim, "index_topk": indexer.top_k}
    if model_type == "glm_moe_dsa":
        sources = config.selection_sources[: config.num_layers]
        kinds = ["full" if source == index else "shared" for index, source in enumerate(sources)]
        fields |= {"indexer_types": kinds, "indexer_rope_interleave": True}
    return fields


def _lengths(rope: RopeConfig) -> Fields:
    """How long texts may be, as far as YaRN knows it."""
    return (
        {"max_position_embeddings": round(rope.factor * rope.original_max_position)} if rope.scaling == "yarn" else {}
    )


def _gqa_to_hf(model_type: str, config: ModelConfig) -> Fields:
    attention = config.attention
    assert isinstance(attention, GQAConfig), "the caller looked"
    fields: Fields = {"num_key_value_heads": attention.kv_heads, "head_dim": attention.head_dim}
    if model_type == "qwen3":
        names = {"sliding": "sliding_attention"}
        fields["layer_types"] = [names.get(kind, "full_attention") for kind in config.types]
        if "sliding" in config.types:
            fields |= {"use_sliding_window": True, "sliding_window": config.sliding_window}
    return fields


def _said(config: ModelConfig) -> dict[str, Any]:
    """Everything about the function that `config` computes, under dotted names."""
    attention, dsa, selects = config.attention, config.dsa, "dsa" in config.types
    said: dict[str, Any] = {"dsa.selection_sources": config.selection_sources}
    said |= {f"attention.{name}": value for name, value in vars(attention).items()}
    said |= {f"attention.rope.{name}": value for name, value in rope_facts(said.pop("attention.rope")).items()}
    said["attention.softmax_scale"] = round(attention.scale, 12)
    if isinstance(attention, GQAConfig):
        said["attention.rope_dim"] = attention.rotated
        said["attention.norm_eps"] = attention.norm_eps if attention.qk_norm else None
    if selects:
        said |= {f"dsa.indexer.{name}": value for name, value in vars(dsa.indexer).items() if name != "hadamard"}
    said |= {f"mtp.{name}": value for name, value in vars(config.mtp).items()}
    said |= {f"moe.{name}": value for name, value in vars(config.moe).items()} if config.moe else {"moe": None}
    rest = {name: value for name, value in vars(config).items() if name not in ("attention", "dsa", "mtp", "moe")}
    return said | rest | {"layer_types": config.types}


def _differences(wanted: Mapping[str, Any], back: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(wanted.keys() | back.keys()):
        if wanted.get(name) != back.get(name):
            yield f"{name}={wanted.get(name)!r} would be read back as {back.get(name)!r}"
