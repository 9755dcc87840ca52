"""What the self-attention decides by itself; that it is Megatron's function is the business of megatron_parity.py."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsattn.errors import InputError
from dsattn.integrations.megatron_mla import SelfAttention, _at_once


class Base:
    def __init__(self, config: Any, submodules: Any, layer_number: int):
        self.config = config


class Layer(SelfAttention, Base): ...


def layer(**fields: Any) -> Any:
    return Layer(SimpleNamespace(q_lora_rank=8, dsa_indexer_loss_coeff=0.5, rope_type="rope", **fields), None, 1)


@pytest.mark.parametrize(
    "name", ["key_value_states", "inference_context", "rotary_pos_emb", "rotary_pos_cos_sin", "attention_bias"]
)
def test_what_training_does_not_use_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be None"):
        layer().forward(torch.zeros(2, 1, 4), None, **{name: torch.zeros(1)})
    with pytest.raises(InputError, match="inference_params must be None"):
        layer().get_query_key_value_tensors(torch.zeros(2, 1, 4), inference_params=1)


def asked(one: Any, *, owns_indexer: bool) -> list[str]:
    """The layers whose deferred weight gradients `backward_dw` asks for."""
    calls: list[str] = []

    def linear(name: str) -> SimpleNamespace:
        return SimpleNamespace(backward_dw=lambda: calls.append(name))

    for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj", "gate"):
        setattr(one, f"linear_{name}", linear(name))
    indexer = SimpleNamespace(**{f"linear_{name}": linear(name) for name in ("wq_b", "wk", "weights_proj")})
    one.core_attention = SimpleNamespace(indexer=indexer if owns_indexer else None)
    one.backward_dw()
    return calls


def test_deferred_weight_gradients() -> None:
    always = ["kv_down_proj", "proj", "q_down_proj", "q_up_proj"]
    assert asked(layer(), owns_indexer=True) == [*always, "wq_b", "wk", "weights_proj"]
    assert asked(layer(), owns_indexer=False) == always
    frozen, direct, gated = layer(), layer(), layer()
    frozen.config.dsa_indexer_loss_coeff = None
    direct.config.q_lora_rank = None
    gated.granularity = "headwise"
    assert asked(frozen, owns_indexer=True) == always
    assert asked(direct, owns_indexer=False) == ["kv_down_proj", "proj", "q_proj"]
    assert asked(gated, owns_indexer=False) == [*always, "gate"]


def test_an_up_projection_whose_gradient_comes_at_once() -> None:
    class Linear:
        def __init__(self, size: int, *, config: Any):
            self.size, self.config = size, config

    config = SimpleNamespace(delay_wgrad_compute=True)
    made = _at_once(Linear)(3, config=config)
    assert isinstance(made, Linear)
    assert (made.size, made.config.delay_wgrad_compute, config.delay_wgrad_compute) == (3, False, True)


def test_a_gate_keeps_the_input_norms_output(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    engine = SimpleNamespace(set_save_original_input=kept.append)
    for name in ("megatron", "megatron.core", "megatron.core.extensions"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", engine)
    monkeypatch.setattr(
        Base, "set_for_recompute_input_layernorm", lambda self: kept.append("the others"), raising=False
    )
    one = layer()
    one.set_for_recompute_input_layernorm()
    assert kept == ["the others"]
    one.granularity, one.linear_gate = "headwise", "the gate"
    one.set_for_recompute_input_layernorm()
    assert kept[1:] == ["the others", "the gate"]


def test_a_gate_that_megatron_made_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "linear_gate", "Megatron's", raising=False)
    one = layer(attention_output_gate=True)
    assert (one.linear_gate, one.granularity) == ("Megatron's", "elementwise")
    assert layer(attention_output_gate=False).granularity is None
