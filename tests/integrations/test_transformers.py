import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from dsattn.errors import InputError
from dsattn.integrations import attention, families, transformers
from dsattn.integrations.transformers import Patch, patch

TAUGHT = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note"]
FAMILIES = [*TAUGHT, "glm5_next"]
B, VOCAB, TOP_K = 2, 97, 8
MLA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 32,  # fewer heads make scores of exactly 0, where the two codes break ties differently
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", {"num_hidden_layers": 2, "first_k_dense_replace": 1}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {"num_hidden_layers": 3, "first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full"]},
    ),
    "axk2": ("AXK2", {"num_hidden_layers": 2, "gated_norm_rank": 4, "n_group": None, "topk_group": None}),
    "hy_v4": ("HYV4", {"num_hidden_layers": 4, "hc_mult": 2}),
    "mistral_large4": ("MistralLarge4Text", {"num_hidden_layers": 5, "kv_source_layers": [0, 1, 2, 3, 2]}),
    "dots3_note": (
        "Dots3NoteText",
        {
            "num_hidden_layers": 4,
            "head_dim": 20,
            "sliding_window": 5,
            "shared_experts_intermediate_size": 16,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 24,
            "swa_kv_lora_rank": 28,
            "swa_head_dim": 20,
            "swa_qk_nope_head_dim": 14,
            "swa_v_head_dim": 12,
        },
    ),
    "glm5_next": (
        "Glm5NextText",
        {
            "num_hidden_layers": 3,
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        },
    ),
}
HEADS = {
    "dots3_note": "Dots3NoteForCausalLM",
    "mistral_large4": "MistralLarge4TextModel",
    "glm5_next": "Glm5NextTextModel",
}
HEADLESS = ("mistral_large4", "glm5_next")


class BodyAndHead(nn.Module):
    """A projection on a body that has no class with a loss for text alone: what a user's own wrapper looks like."""

    def __init__(self, body: Any):
        super().__init__()
        self.model, self.config = body, body.config
        self.lm_head = nn.Linear(body.config.hidden_size, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
        out = self.model(input_ids=input_ids, **options)
        out["logits"], out["loss"] = self.lm_head(out.last_hidden_state), None
        if labels is not None:
            predicted, wanted = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            out["loss"] = nn.functional.cross_entropy(predicted, wanted) + out.get("indexer_loss", 0.0)
        return out


@pytest.fixture(scope="module")
def build() -> Callable[..., Any]:
    """build(family, **config) -> a tiny model in eval mode, every weight drawn anew: ones and zeros hide faults."""
    pytest.importorskip("transformers")

    def make(family: str, **overrides: Any) -> Any:
        prefix, own = OWN[family]
        folder = f"transformers.models.{family}"
        configuration = __import__(f"{folder}.configuration_{family}", fromlist=["x"])
        modeling = __import__(f"{folder}.modeling_{family}", fromlist=["x"])
        options = {**MLA, **own, **overrides}
        if family == "mistral_large4":
            del options["q_lora_rank"]
        torch.manual_seed(0)
        config = getattr(configuration, f"{prefix}Config")(**options)
        model = getattr(modeling, HEADS.get(family, f"{prefix}ForCausalLM"))(config)
        if family in HEADLESS:
            model = BodyAndHead(model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator)
                if "norm" in name and name.endswith("weight"):
                    p.add_(0.1 * noise)
                elif p.dim() >= 2:
                    p.copy_(noise * p.shape[-1] ** -0.5)
                else:
                    p.add_(0.3 * noise)
        return model.eval()

    return make


def tokens(count: int, batch: int = B, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def inputs(case: str, count: int) -> dict[str, torch.Tensor]:
    given = {"input_ids": tokens(count)}
    mask = torch.ones(B, count, dtype=torch.long)
    if case == "left":
        mask[0, :3] = 0
        return {**given, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    if case == "right":
        mask[1, -2:] = 0
        return {**given, "attention_mask": mask}
    if case == "packed":
        cuts = torch.cat([torch.arange(1), torch.arange(count // 3), torch.arange(count - 1 - count // 3)])
        return {**given, "position_ids": cuts.expand(B, -1)}
    return given


def alone(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The unpatched model's logits, each packed document in a call of its own: its linear attention knows no other."""
    starts = [0, *((given["position_ids"][0] == 0).nonzero().flatten().tolist()[1:]), given["input_ids"].shape[1]]
    documents = [given["input_ids"][:, first:stop] for first, stop in itertools.pairwise(starts)]
    return torch.cat([model(ids, use_cache=False).logits for ids in documents], 1)


def cache_of(out: Any) -> dict[str, Any]:
    """The cache that a call gives back, under the name by which the next one takes it: transformers changed it."""
    return next(({name: out[name]} for name in ("cache", "past_key_values") if name in out), {})


def real(given: dict[str, torch.Tensor]) -> torch.Tensor:
    return given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return got


def assert_same_gradients(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        assert torch.allclose(gradient, right[name], rtol=1e-4, atol=atol), name


def checkpointed(model: nn.Module, *, reentrant: bool) -> None:
    """What gradient_checkpointing_enable does, whose name is in flux."""
    run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
    for layer in model.model.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, run


@contextlib.contextmanager
def spied(monkeypatch: pytest.MonkeyPatch, name: str):
    calls: list[tuple[Any, Any]] = []
    genuine = getattr(attention, name)

    def spy(*args, **kwargs):
        result = genuine(*args, **kwargs)
        calls.append((args, result))
        return result

    with monkeypatch.context() as context:
        context.setattr(attention, name, spy)
        yield calls


@pytest.mark.parametrize("case", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("count", [TOP_K - 2, 3 * TOP_K + 5])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_the_unpatched_model(build, family, count, case) -> None:
    model, given = build(family), inputs(case, count)
    before = model(**given, use_cache=False).logits
    wanted = alone(model, given) if family == "glm5_next" and case == "packed" else before
    with patch(model):
        patched = model(**given, use_cache=False).logits
    keep = real(given)
    assert (patched - wanted)[keep].abs().max() < 1e-4
    assert torch.equal(model(**given, use_cache=False).logits, before)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_on_a_cache_goes_on_where_the_patched_forward_stands(build, family) -> None:
    model, ids = build(family), tokens(3 * TOP_K + 1)
    with patch(model):
        whole = model(ids, use_cache=False).logits
        out = model(ids[:, :-3], use_cache=True)
        steps = [out.logits]
        for column in range(ids.shape[1] - 3, ids.shape[1]):
            out = model(ids[:, column : column + 1], use_cache=True, **cache_of(out))
            steps.append(out.logits)
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_selections_are_those_of_the_unpatched_model(build, monkeypatch, family) -> None:
    """Hugging Face fills rows of few keys with invisible ones, so only what a row may see is compared."""
    model, count = build(family), 3 * TOP_K + 5
    given, seen = inputs("right", count), []
    indexers = [m for name, m in model.named_modules() if name.endswith(".indexer")]
    hooks = [m.register_forward_hook(lambda _, __, out: seen.append(out)) for m in indexers]
    model(**given, use_cache=False)
    for hook in hooks:
        hook.remove()
    with patch(model), spied(monkeypatch, "select_pools" if family == "glm5_next" else "select_keys") as calls:
        model(**given, use_cache=False)
    assert len(calls) == len(seen) > 0
    for (_, ours), theirs in zip(calls, seen, strict=True):
        for sample, row in real(given).nonzero().tolist():
            t = sample * count + row
            mine = {s - sample * count for s in ours.index[t].tolist() if s >= 0}
            assert mine == {s for s in theirs[sample, row].tolist() if 0 <= s <= row}


@pytest.mark.parametrize(
    ("family", "attribute", "value"),
    [
        ("deepseek_v32", "index_interleaved", True),
        ("glm_moe_dsa", "index_interleaved", False),
        ("axk2", "index_interleaved", True),
        ("hy_v4", "index_first", True),
        ("hy_v4", "interleaved", True),
        ("hy_v4", "gate", "none"),
        ("dots3_note", "gate", "none"),
        ("mistral_large4", "index_interleaved", False),
    ],
)
@torch.no_grad()
def test_each_trap_of_a_family_shows_in_the_logits(build, monkeypatch, family, attribute, value) -> None:
    model, given = build(family), inputs("plain", 3 * TOP_K + 5)
    before = model(**given, use_cache=False).logits
    key = family if family in families.FAMILIES else f"{family}_text"
    wrong = copy.copy(families.FAMILIES[key])
    object.__setattr__(wrong, attribute, value)
    monkeypatch.setitem(families.FAMILIES, key, wrong)
    with patch(model):
        assert (model(**given, use_cache=False).logits - before).abs().max() > 1e-3


@pytest.mark.parametrize("family", TAUGHT)
def test_backbone_gradients_are_those_of_the_unpatched_model(build, family) -> None:
    model, given = build(family).train(), inputs("packed", 2 * TOP_K + 3)
    model(**given, labels=given["input_ids"], use_cache=False).loss.backward()
    before = gradients(model)
    with patch(model, mode="frozen"):
        model(**given, labels=given["input_ids"]).loss.backward()
        assert_same_gradients(gradients(model), before)
    with patch(model):
        model(**given, labels=given["input_ids"]).loss.backward()
        after = gradients(model)
    indexer = {name for name in after if ".indexer." in name}
    assert indexer == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert all(after[name].abs().max() > 0 for name in indexer if not name.endswith("k_norm.bias"))
    assert_same_gradients({n: g for n, g in after.items() if n not in indexer}, before)


def test_loss_is_the_kl_to_attention_as_the_model_computes_it(build, monkeypatch) -> None:
    model, given = build("deepseek_v32", num_hidden_layers=1), inputs("plain", 2 * TOP_K)
    model.set_attn_implementation("eager")
    weights = model(**given, use_cache=False, output_attentions=True).attentions[0].sum(1).flatten(0, 1)
    target = weights / weights.sum(-1, keepdim=True)
    model.train()
    with patch(model, indexer_loss_coeff=0.5), spied(monkeypatch, "select_keys") as calls:
        out = model(**given, labels=given["input_ids"])
    (q, k, w, keys, *_), selection = calls[0]
    scores = torch.einsum("thd,sd->ths", q, k).relu().mul(w[..., None]).sum(1)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for t, row in enumerate(selection.index.tolist()):
        kept[t, [s for s in row if s >= 0]] = True
    predicted = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
    count = 2 * TOP_K
    wanted = torch.block_diag(target[:count], target[count:])
    loss = torch.where(kept, wanted * (wanted.clamp(min=1e-30).log() - predicted), 0.0).sum(-1).mean()
    assert keys.mask(2 * count).sum() > kept.sum()
    assert torch.allclose(out.indexer_loss, 0.5 * loss, rtol=1e-4)
    assert torch.allclose(out.loss, out.lm_loss + out.indexer_loss)
    assert not out.indexer_loss.requires_grad


def test_warmup_is_dense_and_teaches_the_indexers_alone(build) -> None:
    wide = build("glm_moe_dsa", index_topk=64)
    model, given = build("glm_moe_dsa"), inputs("left", 3 * TOP_K)
    with torch.no_grad(), patch(model, mode="warmup"):
        assert torch.allclose(
            model(**given, use_cache=False).logits[real(given)],
            wide(**given, use_cache=False).logits[real(given)],
            atol=1e-4,
        )
    learned = {name: p.requires_grad for name, p in model.named_parameters()}
    with patch(model.train(), mode="warmup") as patched:
        out = model(**given, labels=given["input_ids"])
        out.loss.backward()
        assert torch.equal(out.loss, out.indexer_loss)
        assert all(".indexer." in name for name in gradients(model))
        assert patched.trainable[1] == 0 < patched.trainable[0]
    assert learned == {name: p.requires_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "mistral_large4"])
def test_gradient_checkpointing_changes_nothing_and_never_selects_again(build, monkeypatch, family, mode) -> None:
    model, given = build(family).train(), inputs("right", 2 * TOP_K + 3)
    labels = given["input_ids"]
    with patch(model, mode=mode), spied(monkeypatch, "select_keys") as calls:
        out = model(**given, labels=labels)
        loss = out.loss if mode == "sparse" or family != "mistral_large4" else out.indexer_loss
        loss.backward()
        plain, once = gradients(model), len(calls)
        checkpointed(model, reentrant=False)
        out = model(**given, labels=labels)
        again = out.loss if mode == "sparse" or family != "mistral_large4" else out.indexer_loss
        again.backward()
    assert torch.equal(loss, again)
    assert len(calls) == 2 * once
    assert_same_gradients(gradients(model), plain, atol=0.0)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deepseek_v32"])  # in test_recompute.py
def test_recompute_changes_no_bit_and_never_selects_again(build, monkeypatch, family) -> None:
    model, given = build(family).train(), inputs("packed", 2 * TOP_K + 3)
    name, seen = "select_pools" if family == "glm5_next" else "select_keys", {}
    for policy in ("none", "selective", "full"):
        with patch(model, recompute=policy, deterministic=True), spied(monkeypatch, name) as calls:
            loss = model(**given, labels=given["input_ids"]).loss
            loss.backward()
        seen[policy] = loss.detach(), gradients(model), len(calls)
    loss, plain, once = seen.pop("none")
    for again, replayed, selected in seen.values():
        assert torch.equal(again, loss)
        assert selected == once > 0
        assert replayed.keys() == plain.keys()
        assert [name for name, gradient in replayed.items() if not torch.equal(gradient, plain[name])] == []


def test_reentrant_checkpointing_is_refused(build) -> None:
    model, given = build("deepseek_v32").train(), inputs("plain", 9)
    checkpointed(model, reentrant=True)
    with patch(model), pytest.raises(InputError, match="'use_reentrant': False"):
        model(**given, labels=given["input_ids"])


def test_accumulation_with_num_items_in_batch_is_one_batch(build) -> None:
    model, ids = build("deepseek_v32").train(), tokens(2 * TOP_K + 3, batch=4)
    items = torch.tensor(ids[:, 1:].numel())
    with patch(model):
        whole = model(ids, labels=ids, num_items_in_batch=items)
        whole.loss.backward()
        once = gradients(model)
        losses = []
        for part in (ids[:1], ids[1:]):
            losses.append(model(part, labels=part, num_items_in_batch=items).loss)
            losses[-1].backward()
    assert torch.allclose(sum(losses), whole.loss)
    assert_same_gradients(gradients(model), once)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_generation_is_the_unpatched_models(build, family) -> None:
    model, ids = build(family), tokens(2 * TOP_K + 1)
    if family in HEADLESS:
        expected = model(ids, use_cache=True)
        with patch(model):
            assert torch.equal(model(ids, use_cache=True).logits, expected.logits)
        return
    options: Any = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    with patch(model):
        assert torch.equal(model.generate(ids, **options), expected)
        assert torch.equal(model.train().generate(ids, **options), expected)


def test_a_cache_in_training_is_refused_and_none_is_made_unasked(build) -> None:
    model, ids = build("deepseek_v32").train(), tokens(9)
    with patch(model):
        with pytest.raises(InputError, match="use_cache=False"):
            model(ids, labels=ids, use_cache=True)
        assert not cache_of(model(ids, labels=ids))
        with pytest.raises(InputError, match=r"call the model itself"):
            model.model.forward(ids, use_cache=False)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm5_next"])
@torch.no_grad()
def test_packed_documents_stay_apart_where_nobody_speaks_of_a_cache(build, family) -> None:
    """With a cache, which configurations ask for by default, transformers takes a sample for one document."""
    model, given = build(family), inputs("packed", 20)
    edges = torch.tensor([0, *(given["position_ids"][0] == 0).nonzero().flatten().tolist()[1:], 20])
    with patch(model):
        expected = model(**given, use_cache=False).logits
        out = model(**given)
        assert torch.equal(out.logits, expected)
        assert not cache_of(out)
        packed = model(given["input_ids"][:1], cu_seq_lens_q=edges).logits
        assert torch.allclose(packed, expected[:1], atol=1e-4)
        with pytest.raises(InputError, match="use_cache=True with several documents"):
            model(**given, use_cache=True)
        for case in ("plain", "left", "right"):
            assert cache_of(model(**inputs(case, 20)))


def test_documents_may_come_as_cu_seq_lens_or_as_a_4d_mask(build) -> None:
    model, ids = build("deepseek_v32"), tokens(20, batch=1)
    positions = torch.cat([torch.arange(7), torch.arange(13)])[None]
    edges = torch.tensor([0, 7, 20], dtype=torch.int32)
    square = torch.block_diag(torch.ones(7, 7), torch.ones(13, 13)).tril().bool()[None, None]
    additive = torch.zeros(square.shape).masked_fill(~square, torch.finfo(torch.float32).min)
    with torch.no_grad(), patch(model):
        expected = model(ids, position_ids=positions, use_cache=False).logits
        for given in (
            {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges},
            {"attention_mask": square},
            {"attention_mask": additive},
        ):
            logits = model(ids, position_ids=positions, use_cache=False, **given).logits
            assert torch.equal(logits, expected)
        assert not torch.allclose(model(ids, use_cache=False).logits, expected, atol=1e-3)


def test_padding_of_nan_reaches_no_real_row_and_no_attention_weight(build) -> None:
    model, given = build("deepseek_v32", first_k_dense_replace=2).train(), inputs("left", 2 * TOP_K + 3)
    keep = real(given)
    with patch(model):
        embedded = model.get_input_embeddings()(given.pop("input_ids")).detach()
        expected = model(inputs_embeds=embedded, **given).logits
        out = model(inputs_embeds=embedded.masked_fill(~keep[..., None], torch.nan), **given)
        assert torch.equal(out.logits[keep], expected[keep])
        (out.logits[keep].sum() + out.indexer_loss).backward()
    for name, gradient in gradients(model).items():
        if "self_attn" in name:
            assert gradient.isfinite().all(), name


def test_norm_eps_of_the_configuration(build) -> None:
    model, given = build("glm_moe_dsa", rms_norm_eps=1e-2), inputs("plain", 12)
    with torch.no_grad():
        before = model(**given, use_cache=False).logits
        with patch(model, norm_eps="config"):
            assert not torch.allclose(model(**given, use_cache=False).logits, before, atol=1e-3)
        assert torch.equal(model(**given, use_cache=False).logits, before)


def test_names_stay_and_undo_leaves_no_trace(build) -> None:
    model = build("glm_moe_dsa")
    names = list(model.state_dict())
    patched = patch(model)
    assert list(model.state_dict()) == names
    assert patched.layers == tuple(f"model.layers.{i}.self_attn" for i in range(3))
    assert patched.selecting == (patched.layers[0], patched.layers[2])
    assert "3 attention layers, 2 with an indexer" in str(patched)
    with pytest.raises(InputError, match=r"layers.0.self_attn has a forward of its own"):
        patch(model)
    patched.undo()
    patched.undo()
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_copy_of_a_patched_model_runs_on_its_own_weights(build) -> None:
    model, given = build("deepseek_v32"), inputs("plain", 12)
    with torch.no_grad(), patch(model):
        twin = copy.deepcopy(model)
        expected = model(**given, use_cache=False).logits
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        assert torch.equal(twin(**given, use_cache=False).logits, expected)


class WithDelta(nn.Module):
    """What LoRA does to a projection."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.delta = nn.Parameter(torch.randn(base.weight.shape) * 0.3)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.delta.T


def test_a_wrapped_projection_counts_with_its_delta(build) -> None:
    model, given = build("deepseek_v32"), inputs("plain", 2 * TOP_K + 1)
    for layer in model.model.layers:
        for name in ("q_b_proj", "kv_b_proj", "o_proj"):
            setattr(layer.self_attn, name, WithDelta(getattr(layer.self_attn, name)))
    with torch.no_grad():
        before = model(**given, use_cache=False).logits
    with patch(model.train()):
        out = model(**given, labels=given["input_ids"])
        assert torch.allclose(out.logits, before, atol=1e-4)
        out.loss.backward()
        assert all(grad.abs().max() > 0 for name, grad in gradients(model).items() if name.endswith("delta"))


@pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")  # peft's own calls
def test_peft_lora(build) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_b_proj", "kv_b_proj", "o_proj"], r=2, init_lora_weights=False)
    model, given = peft.get_peft_model(build("deepseek_v32"), config), inputs("plain", 2 * TOP_K + 1)
    with torch.no_grad():
        before = model(**given, use_cache=False).logits
    with patch(model.train()):
        out = model(**given, labels=given["input_ids"])
        assert torch.allclose(out.logits, before, atol=1e-4)
        out.loss.backward()
        learned = gradients(model)
    assert all("lora_" in name or ".indexer." in name for name in learned)
    assert any("kv_b_proj.lora_A" in name for name in learned)
    assert any(".indexer." in name for name in learned)


def test_frozen_indexers_cannot_be_taught(build) -> None:
    model, ids = build("deepseek_v32").train(), tokens(9)
    with patch(model):
        model.requires_grad_(False)
        with pytest.raises(InputError, match="none of their parameters asks for a gradient"):
            model(ids, labels=ids)


def test_bf16(build) -> None:
    model, ids = build("hy_v4").bfloat16().train(), tokens(2 * TOP_K + 3)
    with patch(model):
        model(ids, labels=ids).loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_tuples_and_calls_without_labels(build) -> None:
    model, ids = build("deepseek_v32").train(), tokens(12)
    with patch(model):
        loss = model(ids, labels=ids).loss
        assert torch.equal(model(ids, labels=ids, return_dict=False)[0], loss)
        assert model(ids).indexer_loss.requires_grad
        with pytest.raises(InputError, match="return_dict=False without labels"):
            model(ids, return_dict=False)
        with pytest.raises(InputError, match="output_attentions"):
            model(ids, output_attentions=True)


def test_refuses(build, monkeypatch) -> None:
    model = build("deepseek_v32")
    for options, match in (
        ({"mode": "dense"}, "mode='dense'"),
        ({"norm_eps": 1e-5}, "norm_eps=1e-05"),
        ({"mode": "frozen", "indexer_loss_coeff": 1.0}, "no use in mode='frozen'"),
        ({"indexer_loss_coeff": 0.0}, "above 0"),
    ):
        with pytest.raises(InputError, match=match):
            patch(model, **options)
    with pytest.raises(InputError, match=r"attention_dropout=0\.1"):
        patch(build("deepseek_v32", attention_dropout=0.1))
    monkeypatch.setattr(transformers, "fingerprint", lambda *_: "0123")
    with pytest.raises(InputError, match=r"deepseek_v32 of transformers [\d.]+ is another.*0123.*5\.23\.0 or 5"):
        patch(model)
    patch(model, check_source=False).undo()


def test_apply_by_model_type(build) -> None:
    for family in FAMILIES:
        apply = getattr(transformers, f"apply_dsattn_to_{family}")
        patched = apply(build(family), mode="frozen")
        assert isinstance(patched, Patch)
        patched.undo()
    with pytest.raises(InputError, match="model is a dots3_note_text, not a glm_moe_dsa"):
        transformers.apply_dsattn_to_glm_moe_dsa(build("dots3_note"))
