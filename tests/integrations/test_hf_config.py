"""Every field under its own name, both ways; what cannot be said is refused by name."""

import dataclasses
from typing import Any

import pytest

from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig, RopeConfig
from dsattn.errors import InputError
from dsattn.integrations.hf_config import fresh_indexer, from_hf, to_hf, with_indexers
from dsattn.training.recipes import deepseek_v32, glm_5_2

pytest.importorskip("transformers")

RELEASED_V32: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "ep_size": 1,
    "num_nextn_predict_layers": 1,
}
RELEASED_GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "indexer_rope_interleave": True,
    "head_dim": 192,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
}


def test_released_deepseek_v32_is_the_recipe() -> None:
    model = from_hf(RELEASED_V32)
    assert model == dataclasses.replace(deepseek_v32().model, mtp=MTPConfig(depths=1))
    assert from_hf(to_hf(model)) == model


def test_released_glm_is_the_recipe() -> None:
    model, recipe = from_hf(RELEASED_GLM), glm_5_2().model
    assert model.selection_sources[:78] == recipe.selection_sources
    assert model.selection_sources[78] == 78  # the MTP layer has an indexer of its own
    assert sum(source == index for index, source in enumerate(model.selection_sources[:78])) == 21
    same = dataclasses.replace(model, mtp=MTPConfig(), dsa=dataclasses.replace(recipe.dsa))
    assert same == recipe
    assert model.dsa.indexer == recipe.dsa.indexer
    assert to_hf(model)["indexer_types"][:8] == ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]


def test_norm_of_latents_is_that_of_transformers_unless_asked() -> None:
    assert from_hf(RELEASED_GLM).attention.norm_eps == 1e-6
    model = from_hf(RELEASED_GLM, latent_norm_eps=1e-5)
    assert model.attention.norm_eps == model.norm_eps == 1e-5
    assert to_hf(model)["rms_norm_eps"] == 1e-5
    odd = dataclasses.replace(model, attention=dataclasses.replace(model.attention, norm_eps=1e-3))
    with pytest.raises(InputError, match=r"attention\.norm_eps=0\.001 would be read back as 1e-06"):
        to_hf(odd)


def test_an_object_and_its_dict_are_the_same() -> None:
    import transformers

    config = transformers.Qwen3Config(num_hidden_layers=3, tie_word_embeddings=True)
    assert from_hf(config) == from_hf(config.to_dict()) == from_hf({"model_type": "qwen3", **config.to_diff_dict()})


def test_gqa_families() -> None:
    llama = from_hf({"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "rms_norm_eps": 1e-5})
    assert isinstance(llama.attention, GQAConfig)
    assert (llama.attention.head_dim, llama.attention.kv_heads, llama.attention.qk_norm) == (64, 8, False)
    assert set(llama.types) == {"dense"}
    sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3}
    qwen = from_hf({"model_type": "qwen3", **sliding})
    assert qwen.types == ("dense", "sliding", "sliding")
    assert qwen.sliding_window == 9
    assert from_hf(to_hf(qwen)) == qwen
    assert with_indexers(qwen).types == ("dsa", "sliding", "sliding")


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "deepseek_v3", "glm4_moe_lite", "llama", "qwen3"])
def test_defaults_come_back(family: str) -> None:
    model = from_hf({"model_type": family})
    assert from_hf(to_hf(model, family)) == model


def test_bookkeeping_is_carried_over() -> None:
    like = {"eos_token_id": [7, 8], "max_position_embeddings": 99, "hidden_size": 1, "made_up": 5}
    fields = to_hf(from_hf({"model_type": "llama"}), like=like)
    assert (fields["eos_token_id"], fields["max_position_embeddings"], fields["hidden_size"]) == ([7, 8], 99, 4096)
    assert "made_up" not in fields


def model(**changes: Any) -> ModelConfig:
    attention = changes.pop("attention", {})
    indexer = changes.pop("indexer", {})
    return ModelConfig(
        attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, **attention),
        dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, rope_dim=4, **indexer), **changes.pop("dsa", {})),
        **changes,
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"attention": {"output_gate": "headwise"}}, r"attention\.output_gate='headwise' would be read back"),
        ({"attention": {"sink": True}}, r"attention\.sink=True would be read back"),
        ({"attention": {"softmax_scale": 0.3}}, r"attention\.softmax_scale=0\.3 would be read back"),
        ({"attention": {"rope_interleaved": False}}, r"attention\.rope_interleaved=False would be read back"),
        ({"indexer": {"relu": False}}, r"dsa\.indexer\.relu=False would be read back"),
        ({"indexer": {"rope_first": False}}, r"dsa\.indexer\.rope_first=False would be read back"),
        ({"indexer": {"query_from": "hidden"}}, r"dsa\.indexer\.query_from='hidden' would be read back"),
        ({"indexer": {"pool_size": 4}}, r"dsa\.indexer\.pool_size=4 would be read back"),
        ({"indexer": {"k_norm_eps": 1e-5}}, r"dsa\.indexer\.k_norm_eps=1e-05 would be read back"),
        ({"dsa": {"share_every": 2}}, r"dsa\.selection_sources=\(0, 0, 2, 2\) would be read back"),
        ({"layer_types": ("dsa", "dense", "dsa", "dsa")}, r"layer_types=.*would be read back"),
        ({"mtp": MTPConfig(depths=2, repeated=True)}, r"mtp\.repeated=True would be read back"),
    ],
)
def test_what_a_family_cannot_say_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        to_hf(model(**changed))


def test_what_changes_no_function_is_not_refused() -> None:
    dsa = {"block_bytes": 1, "backend": "reference", "deterministic": True}
    assert to_hf(model(dsa=dsa, indexer={"hadamard": True}))["model_type"] == "deepseek_v32"
    assert to_hf(model(moe=MoEConfig(experts=4, experts_per_token=2)))["n_routed_experts"] == 4


def test_family_must_fit() -> None:
    with pytest.raises(InputError, match="model_type='llama' does not have MLA layers"):
        to_hf(model(), "llama")
    with pytest.raises(InputError, match="model_type='gpt2' must be one of"):
        to_hf(model(), "gpt2")
    with pytest.raises(InputError, match=r"rope_interleaved=False would be read back as True"):
        to_hf(model(), "glm_moe_dsa")


def test_fresh_indexers_follow_the_attention() -> None:
    dense = from_hf({"model_type": "deepseek_v3", "qk_rope_head_dim": 32})
    assert fresh_indexer(dense) == IndexerConfig(rope_dim=32)
    assert fresh_indexer(dense, heads=8, rope_interleaved=True).heads == 8
    wide = from_hf({"model_type": "qwen3", "head_dim": 256})
    assert fresh_indexer(wide) == IndexerConfig(head_dim=256, rope_dim=256, query_from="hidden")
    chosen = with_indexers(dense)
    assert set(chosen.all_types) == {"dsa"}
    with pytest.raises(InputError, match="has indexers already"):
        with_indexers(chosen)


def test_yarn_of_another_scale_comes_back() -> None:
    rope = RopeConfig(scaling="yarn", factor=8.0, mscale=0.0, mscale_all_dim=0.5)
    assert from_hf(to_hf(model(attention={"rope": rope}))).attention.rope == rope
