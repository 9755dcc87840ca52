"""Fields and model types that are not known are refused by name, all at once."""

import importlib.metadata
from typing import Any

import pytest

from dsattn.errors import InputError
from dsattn.integrations.hf_fields import FAMILIES, REFUSED, bookkeeping, check_release, known_fields

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_filled_in(family: str) -> None:
    name, fields = known_fields({"model_type": family, "num_hidden_layers": 5})
    assert name == family
    assert fields["num_hidden_layers"] == 5
    assert fields["hidden_size"] == transformers.AutoConfig.for_model(family).hidden_size


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_are_not_expressed_say_why(name: str) -> None:
    with pytest.raises(InputError, match=f"model_type='{name}' is not expressed: it has {REFUSED[name]}"):
        known_fields({"model_type": name})


def test_unknown_model_type() -> None:
    for config in ({"model_type": "gpt2"}, {}):
        with pytest.raises(InputError, match="dsattn does not know it; there is deepseek_v32"):
            known_fields(config)


def test_all_problems_at_once() -> None:
    config = {"model_type": "llama", "attention_bias": True, "hidden_act": "gelu", "sqrt_of_heads": 4}
    with pytest.raises(InputError, match="3 problem") as error:
        known_fields(config)
    for name in ("attention_bias=True must be False", "hidden_act='gelu' must be 'silu'", "sqrt_of_heads=4 is unknown"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("deepseek_v32", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*blocks of 128 x 128"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' must be 'sigmoid'"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave=True is not what transformers"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not what transformers"),
        ("glm_moe_dsa", {"rope_interleave": False}, "rope_interleave=False is not what transformers"),
        ("glm_moe_dsa", {"index_topk_freq": 4, "mla_use_nope": True}, "mla_use_nope=True is unknown"),
        ("deepseek_v32", {"index_topk_freq": 4}, "index_topk_freq=4 is unknown for deepseek_v32"),
        ("llama", {"q_lora_rank": 4}, "q_lora_rank=4 is unknown for llama"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention_heads=128"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 61}, "every layer of deepseek_v32 is indexed_attention"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 45}, "dense MLPs must all come first"),
        (
            "glm_moe_dsa",
            {"index_share_for_mtp_iteration": True, "num_nextn_predict_layers": 3},
            "index_share_for_mtp_iteration=True with 3 MTP layers",
        ),
    ],
)
def test_values_that_are_not_expressed(family: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        known_fields({"model_type": family, **fields})


def test_what_transformers_refuses_is_an_error_of_ours() -> None:
    with pytest.raises(InputError, match="transformers does not read this llama config"):
        known_fields({"model_type": "llama", "hidden_size": "wide"})


@pytest.mark.parametrize("release", ["4.57.1", "5.22.0", "6.0.0"])
def test_unknown_releases_are_refused(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": release}.get)
    with pytest.raises(InputError, match=f"transformers {release} is not known"):
        known_fields({"model_type": "llama"})


@pytest.mark.parametrize("release", ["5.23.0", "5.24.0", "5.31.0.dev0"])
def test_known_releases_pass(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": release}.get)
    check_release()


def test_bookkeeping_leaves_geometry() -> None:
    assert bookkeeping({"eos_token_id": 1, "hidden_size": 2}) == {"eos_token_id": 1}
