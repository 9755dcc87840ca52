"""What glm5_next alone has; test_transformers.py compares it with the unpatched model as it does every family."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from dsattn.errors import InputError
from dsattn.integrations import attention, glm5_next
from dsattn.integrations.glm5_next import packed_documents, select_pools
from dsattn.integrations.microbatch import layout_of
from dsattn.integrations.transformers import patch
from dsattn.keys import Layout

VOCAB, TOP_K = 97, 8
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 0,
    "v_head_dim": 8,
    "index_topk": TOP_K,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "index_kpool": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "mlp_layer_types": ["dense"] * 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "projection_intermediate_size": 16,
}
IDS = torch.randint(0, 80, (2, 3 * TOP_K + 3), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def build() -> Callable[..., Any]:
    """build(**text_config) -> the whole model, vision tower included, in eval mode; every weight is drawn anew."""
    pytest.importorskip("transformers")
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

    def make(**overrides: Any) -> Any:
        special = {f"{kind}_token_id": 90 + i for i, kind in enumerate(("image", "video", "video_start", "video_end"))}
        config = Glm5NextConfig(text_config={**TEXT, **overrides}, vision_config=VISION, **special)
        model = Glm5NextForConditionalGeneration(config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.add_(0.1 * noise) if "norm" in name else p.copy_(noise * p.shape[-1] ** -0.5)
        return model.eval()

    return make


@pytest.mark.parametrize(
    "options",
    [
        {"index_kpool_always_select_tail": False, "indexer_types": ["full", "full", "shared"]},
        {"index_kpool": 1, "indexer_types": ["full", "full", "shared"]},
    ],
    ids=["early rows read nothing", "a pool is a key"],
)
@torch.no_grad()
def test_shared_selections_and_other_pools_are_those_of_the_unpatched_model(build, options) -> None:
    model = build(**options)
    model.set_attn_implementation("sdpa")  # eager reads every key, later ones too, where nothing is selected
    before = model(IDS, use_cache=False).logits
    with patch(model):
        assert (model(IDS, use_cache=False).logits - before).abs().max() < 1e-4


def test_the_backbone_trains_and_the_indexers_stay(build, monkeypatch) -> None:
    """Gradients are those of the unpatched model; under checkpointing a replay keeps its selection."""
    model = build().train()
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    labels = IDS.masked_fill(mask == 0, -100)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        out = model(IDS, attention_mask=mask, labels=labels)
        out.loss.backward()
        assert "indexer_loss" not in out
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    before, calls = gradients(), []
    monkeypatch.setattr(attention, "select_pools", lambda *args: calls.append(1) or select_pools(*args))
    with patch(model) as patched:
        assert patched.mode == "sparse"
        assert patched.trainable[0] == 0 < patched.trainable[1]
        assert "2 with an indexer; 0 indexer parameters" in str(patched)
        assert "indexers are fixed: they select pools of keys" in str(patched)
        after = gradients()
        for layer in model.model.language_model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(
                torch.utils.checkpoint.checkpoint, use_reentrant=False
            )
        again = gradients()
    assert len(calls) == 2 * 2
    assert after.keys() == again.keys() == before.keys()
    assert not any(".indexer." in name for name in after)
    for name, gradient in before.items():
        assert torch.allclose(after[name], gradient, rtol=1e-3, atol=1e-5), name
        assert torch.equal(after[name], again[name]), name


def test_generation_and_calls_that_leave_the_cache_to_the_configuration(build) -> None:
    model = build()
    options: Any = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    with torch.no_grad(), patch(model):
        assert torch.equal(model.generate(IDS, **options), expected)
        assert model(IDS).logits.shape == (*IDS.shape, VOCAB)


def test_a_loss_of_the_indexers_is_refused(build) -> None:
    model = build()
    with pytest.raises(InputError, match=r"mode='warmup' asks for a loss of the indexers.*glm5_next_text select pools"):
        patch(model, mode="warmup")
    with pytest.raises(InputError, match=r"indexer_loss_coeff=1.0 asks for a loss of the indexers"):
        patch(model, indexer_loss_coeff=1.0)
    square = torch.ones(1, 1, 6, 6).tril().bool()
    with patch(model), pytest.raises(InputError, match="does not say what linear layers see"):
        model(IDS[:1, :6], attention_mask=square, use_cache=False)


def test_a_kernels_scores_select_the_same_pools(monkeypatch) -> None:
    """Random scores have no near ties, so scoring in fp32 in another order changes nothing."""
    torch.manual_seed(0)
    indexer = SimpleNamespace(index_kpool=4, n_heads=3, head_dim=8, index_topk=8, index_kpool_always_select_tail=True)
    indexer.wq_b, indexer.wk = torch.nn.Linear(6, 24), torch.nn.Linear(10, 8)
    indexer.k_norm, indexer.weights_proj = torch.nn.LayerNorm(8), torch.nn.Linear(10, 3)
    indexer.index_kpool_compress_gate, indexer.index_kpool_compress_ape = torch.randn(8, 10), torch.randn(4, 8)
    hidden, latent, layout = torch.randn(60, 10), torch.randn(60, 6), Layout.packed([31, 29])
    select = functools.partial(glm5_next.select_keys)
    monkeypatch.setattr(
        glm5_next, "select_keys", lambda *args, backend: select(*args, backend={"other": "reference"}[backend])
    )
    exact, other = (select_pools(indexer, hidden, latent, layout, backend) for backend in ("auto", "other"))
    assert torch.equal(exact.index, other.index)


def test_packed_documents_are_unfolded_in_groups_of_similar_lengths() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]])
    mask = torch.ones_like(positions)
    mask[0, 7] = 0
    first, second = packed_documents(layout_of(2, 8, mask, positions), 8)
    assert first.rows.tolist() == [[10, 11, 12, 13, 14, 15], [0, 1, 2, 3, 0, 0]]
    assert first.real.sum(1).tolist() == [6, 4]
    assert first.rows.flatten()[first.inside].tolist() == [10, 11, 12, 13, 14, 15, 0, 1, 2, 3]
    assert second.rows.tolist() == [[4, 5, 6], [8, 9, 8]]
    padded = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    assert packed_documents(layout_of(3, 4, padded), 4) == ()
