"""Names and shapes of `Decoder`, split and joined."""

from typing import Any

import pytest
import torch

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from dsattn.errors import CheckpointError
from dsattn.integrations.hf_names import from_hf_names, holds_mtp, joined, shapes, to_hf_names
from dsattn.integrations.stored import Stored, stored
from dsattn.model import Decoder

MODEL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_layers": 2,
    "intermediate_size": 24,
    "attention": MLAConfig(
        heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
    ),
    "dsa": DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
}
EXPERTS = MoEConfig(experts=3, experts_per_token=2, intermediate_size=8, first_dense_layers=1)
FULL = ModelConfig(**MODEL, moe=EXPERTS, mtp=MTPConfig(depths=1))
TIED = ModelConfig(**MODEL, tie_embeddings=True, mtp=MTPConfig(depths=1))


def weights(config: ModelConfig) -> dict[str, Stored]:
    torch.manual_seed(0)
    return {name: stored(torch.randn(one.shape)) for name, one in Decoder(config).state_dict().items()}


def test_shapes_are_those_of_the_state_dict() -> None:
    assert shapes(FULL) == {name: tuple(one.shape) for name, one in Decoder(FULL).state_dict().items()}


@pytest.mark.parametrize("config", [FULL, TIED, ModelConfig(**MODEL)])
def test_there_and_back(config: ModelConfig) -> None:
    ours = weights(config)
    back = from_hf_names(to_hf_names(ours, config), config)
    assert back.keys() == ours.keys()
    for name, one in back.items():
        assert one.shape == ours[name].shape
        assert one.read().equal(ours[name].read()), name


def test_experts_are_split_in_halves_and_numbers() -> None:
    ours = weights(FULL)
    theirs = to_hf_names(ours, FULL)
    whole = ours["model.layers.1.mlp.experts.gate_up_proj"].read()
    assert theirs["model.layers.1.mlp.experts.2.gate_proj.weight"].read().equal(whole[2, :8])
    assert theirs["model.layers.1.mlp.experts.0.up_proj.weight"].read().equal(whole[0, 8:])
    assert not [name for name in theirs if name.endswith(("gate_up_proj", "experts.down_proj"))]


def test_experts_that_are_fused_already() -> None:
    ours = weights(FULL)
    read = from_hf_names({**ours, **{k: v for k, v in to_hf_names(ours, FULL).items() if ".experts." not in k}}, FULL)
    assert all(read[name].read().equal(ours[name].read()) for name in ours)


def test_copies_for_mtp_layers_are_those_of_the_model() -> None:
    for config, head in ((FULL, "lm_head.weight"), (TIED, "model.embed_tokens.weight")):
        ours = weights(config)
        theirs = to_hf_names(ours, config)
        copies = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
        assert theirs[copies[0]].read().equal(ours["model.embed_tokens.weight"].read())
        assert theirs[copies[1]].read().equal(ours[head].read())
        less = {name: one for name, one in theirs.items() if name not in copies}
        assert from_hf_names(less, config).keys() == ours.keys()


def test_a_tied_head_may_be_there_and_must_be_the_embedding() -> None:
    theirs = to_hf_names(weights(TIED), TIED)
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    from_hf_names(theirs, TIED)
    theirs["lm_head.weight"] = stored(theirs["model.embed_tokens.weight"].read() + 1)
    with pytest.raises(CheckpointError, match="differs from model"):
        from_hf_names(theirs, TIED)


def test_problems_are_listed_together() -> None:
    theirs = to_hf_names(weights(FULL), FULL)
    del theirs["model.layers.1.mlp.experts.1.down_proj.weight"]
    theirs["model.norm.weight"] = stored(torch.zeros(3))
    theirs["model.layers.0.self_attn.o_proj.weight"] = stored(torch.zeros(16, 8, dtype=torch.int8))
    theirs["model.layers.0.self_attn.q_a_proj.weight_scale_inv"] = stored(torch.zeros(1))
    with pytest.raises(CheckpointError, match="4 problem") as error:
        from_hf_names(theirs, FULL)
    for text in ("down_proj.weight is missing", "[3], must be [16]", "torch.int8, must be", "scale_inv belongs to"):
        assert text in str(error.value)


def test_half_precision_widens() -> None:
    theirs = {name: stored(one.read().half()) for name, one in to_hf_names(weights(FULL), FULL).items()}
    for name, one in from_hf_names(theirs, FULL).items():
        assert one.dtype == one.read().dtype == torch.float32, name


def test_holds_mtp() -> None:
    theirs = to_hf_names(weights(FULL), FULL)
    assert holds_mtp(theirs, FULL)
    assert not holds_mtp({name: one for name, one in theirs.items() if "layers.2." not in name}, FULL)
    assert not holds_mtp(theirs, ModelConfig(**MODEL))


def test_one_expert_alone_is_still_a_stack() -> None:
    assert joined((1, 2, 2), [stored(torch.ones(2, 2))]).read().shape == (1, 2, 2)
