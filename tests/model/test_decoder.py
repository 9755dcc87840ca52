import dataclasses
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F

from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MTPConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.nn.state import Pass

ROWS, TOP_K, VOCAB = 24, 5, 40
MLA = MLAConfig(
    heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, sink=True
)
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4, sink=True)


def config(attention: MLAConfig | GQAConfig = MLA, every: int = 1, **options) -> ModelConfig:
    source = "hidden" if isinstance(attention, GQAConfig) else "q_latent"
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, query_from=source, rope_dim=4)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 3, "intermediate_size": 24}
    dsa = DSAConfig(indexer=indexer, share_every=every)
    return ModelConfig(**{**sizes, "attention": attention, "dsa": dsa, "init_std": 0.2, **options})


def tokens(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows,))


def test_state_dict_has_the_usual_names():
    names = set(Decoder(config(every=2, layer_types=("dense", "dsa", "dsa"))).state_dict())
    assert {n for n in names if ".layers." not in n} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    layer = {n.removeprefix("model.layers.1.") for n in names if n.startswith("model.layers.1.")}
    assert {n for n in layer if "self_attn" not in n} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
    assert "self_attn.indexer.wq_b.weight" in layer
    assert not any("indexer" in n for n in names if not n.startswith("model.layers.1."))


def test_a_residual_stream_by_hand():
    """One dense layer, its attention trusted: the rest written out."""
    model = Decoder(config(num_layers=1, layer_types=("dense",)))
    ids, layout = tokens(), Layout.causal(ROWS)
    layer = model.model.layers[0]

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    h = model.model.embed_tokens.weight[ids]
    h = h + layer.self_attn(normed(h, layer.input_layernorm), layout).hidden
    x = normed(h, layer.post_attention_layernorm)
    gate, up = x @ layer.mlp.gate_proj.weight.T, x @ layer.mlp.up_proj.weight.T
    h = h + (gate * gate.sigmoid() * up) @ layer.mlp.down_proj.weight.T
    out = model(ids, layout)
    torch.testing.assert_close(out.hidden, normed(h, model.model.norm), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.logits(out.hidden), out.hidden @ model.lm_head.weight.T)
    assert (out.selections, out.kl, out.caches, out.kl_sum) == ({}, {}, None, None)


def test_a_tied_head_is_the_embedding():
    model = Decoder(config(tie_embeddings=True))
    assert "lm_head.weight" not in model.state_dict()
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.model.embed_tokens.weight.T)


@pytest.mark.parametrize("attention", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_modes_and_sharing(attention, mode):
    model = Decoder(config(attention, every=2, num_layers=4, layer_types=("dense", "dsa", "dsa", "dsa")))
    seen = {}
    run = Pass(mode=mode, probe=lambda index, what: seen.setdefault(index, what.selection))
    out = model(tokens(), Layout.causal(ROWS), run)
    assert list(seen) == [0, 1, 2, 3]
    assert seen[0] is None
    if mode in ("dense", "warmup"):
        assert out.selections == {}
        assert all(selection is None for selection in seen.values())
    else:
        assert list(out.selections) == [1, 3]
        assert seen[2] is seen[1] is out.selections[1]
        assert seen[3] is out.selections[3]
    assert list(out.kl) == ([1, 3] if mode in ("warmup", "sparse") else [])
    if out.kl:
        torch.testing.assert_close(out.kl_sum, out.kl[1] + out.kl[3])


@pytest.mark.parametrize("attention", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse"])
def test_what_no_later_layer_takes_is_gone_before_it_runs(attention, mode):
    """Keys and values before the MLP, an index before the next layer, in MTP too; without the garbage collector."""
    model = Decoder(config(attention, every=2, mtp=MTPConfig(depths=2)))
    entries, indices, held = [], [], []

    def alive(made):
        return sum(one() is not None for one in made)

    def attended(module, args, out):
        entries.extend(map(weakref.ref, out.entries))
        indices.extend(map(weakref.ref, out.index or ()))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: held.append(alive(entries) + alive(indices)))
        layer.self_attn.register_forward_hook(attended)
        layer.mlp.register_forward_pre_hook(lambda *_: held.append(alive(entries)))
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            model(tokens(), Layout.causal(ROWS), Pass(mode=mode, with_kl=mode == "warmup"))
    finally:
        gc.enable()
    assert len(entries) >= 5
    assert bool(indices) == (mode != "dense")
    assert held == [0] * 10


def test_the_two_losses_meet_nowhere():
    model, layout, ids = Decoder(config(every=2)), Layout.packed([9, 13], total=ROWS), tokens()
    learned = {}
    for what in ("lm", "kl"):
        model.zero_grad()
        out = model(ids, layout)
        (model.lm_loss(out.hidden, ids) if what == "lm" else out.kl_sum).backward()
        learned[what] = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    names = {name for name, _ in model.named_parameters()}
    indexer = {name for name in names if ".indexer." in name}
    assert learned["kl"] == indexer
    assert learned["lm"] == names - indexer


@pytest.mark.parametrize("attention", [MLA, GQA], ids=["mla", "gqa"])
def test_packed_documents_equal_each_alone(attention):
    model, lengths, padded = Decoder(config(attention)).double(), [9, 0, 12], [11, 1, 12]
    layout = Layout.packed(lengths, padded=padded, total=26)
    ids = tokens(26).masked_fill(~layout.real_rows, -7)  # not even a token
    labels = torch.randint(0, VOCAB, (26,)).masked_fill(~layout.real_rows, -100)
    out = model(ids, layout, Pass(kl_divisor=21))
    assert torch.equal(out.hidden[~layout.real_rows], torch.zeros(5, 16).double())
    (model.lm_loss(out.hidden, labels, 21) + out.kl_sum).backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for first, length in ((0, 9), (12, 12)):
        rows = slice(first, first + length)
        alone = model(ids[rows], Layout.causal(length), Pass(kl_divisor=21))
        torch.testing.assert_close(out.hidden[rows], alone.hidden, rtol=1e-8, atol=1e-8)
        (model.lm_loss(alone.hidden, labels[rows], 21) + alone.kl_sum).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("attention", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("mode", ["dense", "sparse", "frozen"])
def test_decoding_equals_a_full_pass(attention, mode):
    model = Decoder(config(attention, every=2, layer_types=("dsa", "dsa", "dense"))).eval()
    ids, run = tokens(), Pass(mode=mode)
    with torch.no_grad():
        full = model.logits(model(ids, Layout.causal(ROWS), run).hidden)
        caches, rows = model.empty_caches(), []
        for first, last in [(0, 7), *((row, row + 1) for row in range(7, ROWS))]:
            layout = Layout.continuation(caches[0].num_rows, last - first)
            out = model(ids[first:last], layout, run, caches=caches)
            caches = out.caches
            rows.append(model.logits(out.hidden))
    torch.testing.assert_close(torch.cat(rows), full, rtol=1e-5, atol=1e-5)


def test_lm_loss_is_cross_entropy_over_the_divisor():
    model, hidden = Decoder(config()), torch.randn(10, 16, requires_grad=True)
    labels = torch.tensor([1, 2, -100, 4, 5, -100, 7, 8, 9, 39])
    want = F.cross_entropy(hidden @ model.lm_head.weight.T, labels)  # the mean over 8
    wanted = torch.autograd.grad(want, [hidden, model.lm_head.weight])
    for chunk in (1, 3, 10, 4096):
        got = model.lm_loss(hidden, labels, chunk_rows=chunk)
        torch.testing.assert_close(got, want)
        for ours, theirs in zip(torch.autograd.grad(got, [hidden, model.lm_head.weight]), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.lm_loss(hidden, labels, 16), want / 2)
    torch.testing.assert_close(model.lm_loss(hidden, labels, torch.tensor(16)), want / 2)


def test_rows_without_a_label_may_hold_anything():
    model = Decoder(config())
    labels = torch.tensor([1, -100, 3])
    clean = torch.randn(3, 16)
    for value in (0.0, math.nan, math.inf):
        hidden = clean.clone()
        hidden[1] = value
        hidden.requires_grad_()
        model.zero_grad()
        loss = model.lm_loss(hidden, labels)
        loss.backward()
        torch.testing.assert_close(loss, F.cross_entropy(model.logits(clean), labels))
        assert torch.equal(hidden.grad[1], torch.zeros(16))
        assert model.lm_head.weight.grad.isfinite().all()


@pytest.mark.parametrize("rows", [0, 3])
def test_lm_loss_without_any_label_is_a_zero_that_can_be_backed_through(rows):
    model = Decoder(config())
    loss = model.lm_loss(torch.randn(rows, 16), torch.full((rows,), -100))
    loss.backward()
    assert loss == 0
    assert torch.equal(model.lm_head.weight.grad, torch.zeros(VOCAB, 16))


def test_lm_loss_keeps_no_whole_logits():
    model, kept = Decoder(config()), []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.lm_loss(torch.randn(64, 16, requires_grad=True), torch.zeros(64, dtype=torch.long), chunk_rows=8)
    assert kept
    assert not any(shape[-1:] == (VOCAB,) for shape in kept)

    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):  # what the plain loss would keep
        F.cross_entropy(model.logits(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long))
    assert (8, VOCAB) in kept


def test_bf16_losses_are_fp32():
    model = Decoder(config()).bfloat16()
    assert model.lm_loss(torch.randn(4, 16).bfloat16(), torch.tensor([1, 2, 3, 4])).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        autocast = Decoder(config())
        out = autocast(tokens(), Layout.causal(ROWS))
        loss = autocast.lm_loss(out.hidden, tokens())
    assert (loss.dtype, out.kl_sum.dtype) == (torch.float32, torch.float32)
    (loss + out.kl_sum).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in autocast.parameters())


def test_initialisation():
    made = Decoder(config(hidden_size=64, init_std=0.02, num_layers=8))
    for name, value in made.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones_like(value)), name
        elif name.endswith(("norm.bias", "sinks")):
            assert torch.equal(value, torch.zeros_like(value)), name
        else:
            std = 0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert value.std().item() == pytest.approx(std, rel=0.2), name


def test_a_seed_gives_the_same_weights_by_any_way():
    def weights(model: Decoder) -> dict[str, torch.Tensor]:
        return model.state_dict()

    torch.manual_seed(3)
    model = Decoder(config())
    model.reset_parameters(torch.Generator().manual_seed(7))
    with torch.device("meta"):
        late = Decoder(config())
    assert {p.device.type for p in late.parameters()} == {"meta"}
    late = late.to_empty(device="cpu")
    late.reset_parameters(torch.Generator().manual_seed(7))
    assert weights(model).keys() == weights(late).keys()
    assert all(torch.equal(value, weights(late)[name]) for name, value in weights(model).items())

    other = config(dsa=dataclasses.replace(config().dsa, indexer=dataclasses.replace(config().dsa.indexer, heads=3)))
    resized = Decoder(other)
    resized.reset_parameters(torch.Generator().manual_seed(7))
    assert all(
        torch.equal(value, weights(resized)[name]) for name, value in weights(model).items() if "indexer" not in name
    )


def test_fresh_indexers_touch_nothing_else():
    model = Decoder(config())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.reset_indexers(torch.Generator().manual_seed(1))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".indexer." in name and "k_norm" not in name}


@pytest.mark.parametrize("heads", [128, 64])
def test_a_published_geometry_on_the_meta_device(heads):
    """DeepSeek-V3.2's attention and, with 64 heads, one like GLM-5's: shapes only."""
    attention = MLAConfig(heads=heads)
    with torch.device("meta"):
        model = Decoder(ModelConfig(hidden_size=7168, num_layers=2, intermediate_size=18432, attention=attention))
    shapes = {name: tuple(p.shape) for name, p in model.model.layers[0].self_attn.named_parameters()}
    assert shapes["q_a_proj.weight"] == (1536, 7168)
    assert shapes["q_b_proj.weight"] == (heads * 192, 1536)
    assert shapes["kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes["kv_b_proj.weight"] == (heads * 256, 512)
    assert shapes["o_proj.weight"] == (7168, heads * 128)
    assert shapes["indexer.wq_b.weight"] == (64 * 128, 1536)
    assert shapes["indexer.weights_proj.weight"] == (64, 7168)


def test_inputs_that_do_not_fit_are_errors():
    model = Decoder(config())
    with pytest.raises(InputError, match=r"tokens must be \[24\] by the layout, got \[23\]"):
        model(tokens(23), Layout.causal(24))
    with pytest.raises(InputError, match="caches has 1 entries for 3 layers"):
        model(tokens(), Layout.causal(ROWS), caches=model.empty_caches()[:1])
    with pytest.raises(InputError, match=r"labels must be \[4\]"):
        model.lm_loss(torch.zeros(4, 16), torch.zeros(5, dtype=torch.long))
