"""Recipes are sound, and the published shapes build on the meta device."""

import pytest
import torch

from dsattn.config import MLAConfig, ModelConfig
from dsattn.model.decoder import Decoder
from dsattn.training.recipes import RECIPES, small, tiny


def _parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(model).parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_made_and_says_what_it_is(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe() == recipe()
    assert recipe.__doc__
    assert recipe.__doc__.strip().endswith(".")
    assert recipe().train.run_dir == f"runs/{name}"


def test_tiny_keeps_the_promises_of_the_demo() -> None:
    config = tiny()
    indexer = config.model.dsa.indexer
    assert config.data.pack_tokens >= 1024
    assert indexer.top_k <= config.data.pack_tokens // 8
    assert config.model.num_layers >= 4
    assert [stage.mode for stage in config.train.stages] == ["dense", "warmup", "sparse"]


def test_small_has_about_a_third_of_a_billion_parameters() -> None:
    assert small().data.pack_tokens == 32768
    assert 0.28e9 < _parameters(small().model) < 0.36e9


@pytest.mark.parametrize(("name", "billions"), [("deepseek_v32", 671), ("glm_5_2", 744)])
def test_published_totals(name: str, billions: int) -> None:
    """DeepSeek-V3's report and GLM-5's card; without multi-token prediction, as both count."""
    assert _parameters(RECIPES[name]().model) == pytest.approx(billions * 1e9, rel=0.005)


@pytest.mark.parametrize(("name", "groups"), [("deepseek_v32", (8, 4)), ("glm_5_2", (1, 1))])
def test_published_experts(name: str, groups: tuple[int, int]) -> None:
    moe = RECIPES[name]().model.moe
    assert moe is not None
    assert (moe.experts, moe.experts_per_token, moe.shared_experts, moe.intermediate_size) == (256, 8, 1, 2048)
    assert (moe.groups, moe.groups_per_token) == groups
    assert (moe.first_dense_layers, moe.routed_scaling, moe.normalise) == (3, 2.5, True)


@pytest.mark.parametrize(
    ("name", "heads", "nope", "value", "q_rank", "index_heads", "interleaved", "selecting"),
    [
        ("deepseek_v32", 128, 128, 128, 1536, 64, False, 61),
        ("glm_5_2", 64, 192, 256, 2048, 32, True, 21),
    ],
)
def test_published_geometry(name, heads, nope, value, q_rank, index_heads, interleaved, selecting) -> None:
    model = RECIPES[name]().model
    attention, indexer = model.attention, model.dsa.indexer
    assert isinstance(attention, MLAConfig)
    assert (attention.heads, attention.qk_nope_head_dim, attention.v_head_dim) == (heads, nope, value)
    assert (attention.q_lora_rank, attention.kv_lora_rank, attention.qk_rope_head_dim) == (q_rank, 512, 64)
    assert (indexer.heads, indexer.head_dim, indexer.top_k) == (index_heads, 128, 2048)
    assert indexer.rope_interleaved is interleaved
    with torch.device("meta"):
        decoder = Decoder(model)
    assert len(decoder.indexers()) == selecting
    layer = dict(decoder.named_parameters())
    prefix = "model.layers.0.self_attn."
    hidden = model.hidden_size
    assert layer[f"{prefix}q_a_proj.weight"].shape == (q_rank, hidden)
    assert layer[f"{prefix}q_b_proj.weight"].shape == (heads * (nope + 64), q_rank)
    assert layer[f"{prefix}kv_a_proj_with_mqa.weight"].shape == (576, hidden)
    assert layer[f"{prefix}kv_b_proj.weight"].shape == (heads * (nope + value), 512)
    assert layer[f"{prefix}o_proj.weight"].shape == (hidden, heads * value)
    assert layer[f"{prefix}indexer.wq_b.weight"].shape == (index_heads * 128, q_rank)
    assert layer[f"{prefix}indexer.wk.weight"].shape == (128, hidden)
    assert layer[f"{prefix}indexer.weights_proj.weight"].shape == (index_heads, hidden)
