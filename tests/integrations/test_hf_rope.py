"""The table and the scale that transformers computes, from the same parameters."""

from typing import Any

import pytest
import torch

from dsattn.errors import InputError
from dsattn.integrations.hf_config import from_hf
from dsattn.integrations.hf_rope import rope_facts, rope_from_hf, rope_to_hf
from dsattn.nn.rope import rotary_table

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 16.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("family", ["deepseek_v32", "llama"])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.5, "mscale_all_dim": 1.0},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.8},
        {"attention_factor": 1.0},
        {"attention_factor": 1.3, "mscale_all_dim": 0.8, "beta_fast": 20, "beta_slow": 2},
        {"rope_type": "default"},
    ],
)
def test_table_and_scale_are_those_of_transformers(family: str, own: dict[str, Any]) -> None:
    rope = {**YARN, **own}
    if rope["rope_type"] == "default":
        rope = {"rope_type": "default", "rope_theta": 50000.0}
    width = 32
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 8, "vocab_size": 8, "head_dim": width}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    if family != "llama":
        sizes |= {"qk_rope_head_dim": width, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
    config = transformers.AutoConfig.for_model(family, **sizes, **heads, rope_parameters=rope)
    theirs = transformers.AutoModel.from_config(config)
    positions = torch.arange(300)
    cos, sin = theirs.rotary_emb(torch.zeros(1), positions[None])
    attention = from_hf(config).attention
    table = rotary_table(positions, attention.rope, width, dtype=torch.float32)
    torch.testing.assert_close(table.cos, cos[0, :, : width // 2], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(table.sin, sin[0, :, : width // 2], atol=1e-4, rtol=1e-5)
    assert attention.scale == pytest.approx(theirs.layers[0].self_attn.scaling, rel=1e-12)
    back = rope_from_hf(family, {"rope_parameters": rope_to_hf(attention.rope), "max_position_embeddings": 2048})
    assert rope_facts(back) == rope_facts(attention.rope)


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"rope_type": "llama3", "rope_theta": 1.0}, "must have rope_type default, or yarn"),
        ({**YARN, "truncate": False}, "yarn with truncate"),
        ({**YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1"),
        ({**YARN, "attention_factor": 0.5}, "which no mscale of at least 0 gives"),
    ],
)
def test_other_kinds_are_refused(rope: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        rope_from_hf("llama", {"rope_parameters": rope, "max_position_embeddings": 2048})


def test_a_missing_factor_is_the_ratio_of_lengths() -> None:
    fields = {"rope_parameters": {**YARN, "factor": None}, "max_position_embeddings": 1024}
    assert rope_from_hf("llama", fields).factor == 8.0
