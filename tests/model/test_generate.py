"""Decoding with caches against a full recompute of the whole prefix at every step."""

import dataclasses

import pytest
import torch

from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.model.generate import generate
from dsattn.nn.state import Pass

VOCAB, TOP_K, NEW = 40, 4, 14
MLA = MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def decoder(attention: MLAConfig | GQAConfig = MLA, every: int = 1, **options) -> Decoder:
    source = "hidden" if isinstance(attention, GQAConfig) else "q_latent"
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, query_from=source, rope_dim=4)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 3, "intermediate_size": 24, "init_std": 0.3}
    dsa = DSAConfig(indexer=indexer, share_every=every)
    return Decoder(ModelConfig(**{**sizes, "attention": attention, "dsa": dsa, **options}))


class Recorder:
    """Logits of every step of a generation."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch):
        self.logits: list[torch.Tensor] = []
        inner = model.logits

        def record(hidden):
            self.logits.append(inner(hidden))
            return self.logits[-1]

        monkeypatch.setattr(model, "logits", record)


@torch.no_grad()
def recomputed(model: Decoder, tokens: list[int], mode: str) -> torch.Tensor:
    out = model(torch.tensor(tokens), Layout.causal(len(tokens)), Pass(mode=mode, with_kl=False))
    return model.logits(out.hidden)[-1]


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every": 2},
        {"layer_types": ("dense", "dsa", "dsa")},
        {"attention": GQA},
        {"attention": dataclasses.replace(MLA, sink=True, output_gate="elementwise")},
    ],
)
def test_tokens_and_logits_are_those_of_a_full_recompute(monkeypatch, options, mode):
    model = decoder(**options)
    with monkeypatch.context() as patch:
        seen = Recorder(model, patch)
        new = list(generate(model, PROMPT, max_new_tokens=NEW, mode=mode))
    assert len(new) == len(seen.logits) == NEW
    assert len(set(new)) > 2, "a text of one token shows nothing"
    for step, logits in enumerate(seen.logits):
        whole = recomputed(model, PROMPT + new[:step], mode)
        torch.testing.assert_close(logits[0], whole, rtol=1e-5, atol=1e-5)
        assert int(whole.argmax()) == new[step]


def test_sparse_decoding_reads_fewer_keys_than_dense(monkeypatch):
    """Negative control: were the selection ignored, both modes would agree."""
    model = decoder()
    sparse, dense = ([], [])
    for mode, into in (("sparse", sparse), ("dense", dense)):
        with monkeypatch.context() as patch:
            seen = Recorder(model, patch)
            list(generate(model, PROMPT * 2, max_new_tokens=1, mode=mode))
            into.append(seen.logits[0])
    assert (sparse[0] - dense[0]).abs().max() > 1e-3


def test_training_state_and_gradients_are_left_alone():
    model = decoder().train()
    list(generate(model, PROMPT, max_new_tokens=3))
    assert model.training
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


def test_stop_ends_the_text_and_is_not_yielded():
    model = decoder()
    new = list(generate(model, PROMPT, max_new_tokens=NEW))
    stop = new[5]
    assert list(generate(model, PROMPT, max_new_tokens=NEW, stop=stop)) == new[: new.index(stop)]


def test_tokens_come_one_by_one(monkeypatch):
    model = decoder()
    seen = Recorder(model, monkeypatch)
    stream = generate(model, PROMPT, max_new_tokens=NEW)
    assert not seen.logits
    next(stream)
    assert len(seen.logits) == 1


def test_a_seed_repeats_a_draw_and_another_changes_it():
    model = decoder()

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return list(generate(model, PROMPT, max_new_tokens=NEW, temperature=2.0, generator=generator))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def draws(monkeypatch, probabilities: list[float], **options) -> torch.Tensor:
    """Shares [vocab] of 1000 draws from a model whose next token has these probabilities at temperature 1."""
    logits = torch.tensor(probabilities).log()
    monkeypatch.setattr("dsattn.model.generate._advance", lambda model, rows, caches, run: (logits, caches))
    drawn = list(generate(decoder(num_layers=1), PROMPT, max_new_tokens=1000, **options))
    return torch.bincount(torch.tensor(drawn), minlength=len(probabilities)) / len(drawn)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_by_the_models_own_distribution(monkeypatch, temperature):
    probabilities = [0.5, 0.3, 0.15, 0.05]
    share = draws(monkeypatch, probabilities, temperature=temperature)
    wanted = torch.tensor(probabilities) ** (1 / temperature)
    torch.testing.assert_close(share, wanted / wanted.sum(), rtol=0, atol=0.05)


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.69, 2), (0.95, 4), (1.0, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(monkeypatch, top_p, kept):
    share = draws(monkeypatch, [0.1, 0.2, 0.3, 0.4], temperature=1.0, top_p=top_p)
    wanted = torch.tensor([0.1, 0.2, 0.3, 0.4])
    wanted[: 4 - kept] = 0
    torch.testing.assert_close(share, wanted / wanted.sum(), rtol=0, atol=0.05)


def test_a_tiny_temperature_is_greedy_not_an_overflow():
    model = decoder()
    greedy = list(generate(model, PROMPT, max_new_tokens=4))
    assert list(generate(model, PROMPT, max_new_tokens=4, temperature=1e-300)) == greedy


def test_prompts_may_be_tensors_of_any_integer_type():
    model = decoder()
    expected = list(generate(model, PROMPT, max_new_tokens=2))
    assert list(generate(model, torch.tensor(PROMPT, dtype=torch.int32), max_new_tokens=2)) == expected
    assert list(generate(model, PROMPT, max_new_tokens=0)) == []


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "tokens is empty: .* give at least one token"),
        ([[1, 2]], {}, r"tokens must be \[T\] integers"),
        ([1.5], {}, r"tokens must be \[T\] integers"),
        ([1, VOCAB], {}, f"tokens holds {VOCAB}, which is not in the model's vocabulary of {VOCAB}"),
        ([-1], {}, "tokens holds -1"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([1], {"temperature": -0.1}, "temperature=-0.1"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ([1], {"mode": "warmup"}, "mode='warmup' must be 'sparse' or 'dense'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_token(tokens, options, message):
    with pytest.raises(InputError, match=message):
        generate(decoder(), tokens, **{"max_new_tokens": 1, **options})


def test_damaged_weights_are_said_not_sampled():
    model = decoder()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        next(generate(model, PROMPT, max_new_tokens=1))
