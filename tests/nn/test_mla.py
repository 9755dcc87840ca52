import dataclasses
import gc
import math
import sys
import weakref
from types import ModuleType

import pytest
import torch

from dsattn import backends, settings
from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, RopeConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn import MLASelfAttention
from dsattn.nn.state import LayerCache, Pass
from dsattn.ops import dsa
from dsattn.parallel.recompute import Checkpoints

MODEL, TOP_K = 32, 5
YARN = RopeConfig(scaling="yarn", factor=40.0, original_max_position=64, mscale_all_dim=0.5)


def attention(dsa: bool = True, **options) -> MLASelfAttention:
    sizes = {
        "heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    config = MLAConfig(**{**sizes, **options})
    source = "hidden" if config.q_lora_rank is None else "q_latent"
    rope_dim = config.qk_rope_head_dim
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, query_from=source, rope_dim=rope_dim)
    made = MLASelfAttention(MODEL, config, DSAConfig(indexer=indexer) if dsa else None)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return made


def by_expanding_every_head(module: MLASelfAttention, hidden: torch.Tensor, layout: Layout, allowed) -> torch.Tensor:
    """The textbook form: a key and a value for each head, and a mask [T, S]."""
    c = module.config

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * norm.weight

    def turned(x):  # [T, heads, R]
        lane = torch.arange(c.qk_rope_head_dim // 2)
        angle = layout.positions[:, None, None] * c.rope.base ** (-2.0 * lane / c.qk_rope_head_dim)
        if c.rope.scaling == "yarn":
            angle, gain = by_yarn(angle, lane, c), (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
        else:
            gain = 1.0
        spin = torch.polar(torch.full_like(angle, gain), angle)
        if c.rope_interleaved:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * spin).flatten(-2)
        a, b = x.chunk(2, -1)
        both = torch.complex(a.contiguous(), b.contiguous()) * spin
        return torch.cat((both.real, both.imag), -1)

    q = hidden @ module.q_proj.weight.T if c.q_lora_rank is None else None
    if q is None:
        q = normed(hidden @ module.q_a_proj.weight.T, module.q_a_layernorm) @ module.q_b_proj.weight.T
    q_nope, q_rope = q.view(len(q), c.heads, -1).split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
    down = hidden @ module.kv_a_proj_with_mqa.weight.T
    latent = normed(down[:, : c.kv_lora_rank], module.kv_a_layernorm)
    k_rope = turned(down[:, None, c.kv_lora_rank :]) if c.qk_rope_head_dim else down[:, None, c.kv_lora_rank :]
    up = (latent @ module.kv_b_proj.weight.T).view(len(hidden), c.heads, -1)
    k_nope, v = up.split([c.qk_nope_head_dim, c.v_head_dim], -1)
    q_rope = turned(q_rope) if c.qk_rope_head_dim else q_rope
    k = torch.cat((k_nope, k_rope.expand(-1, c.heads, -1)), -1)
    logits = torch.einsum("thd,shd->ths", torch.cat((q_nope, q_rope), -1), k) * c.scale
    logits = logits.masked_fill(~allowed[:, None], -math.inf)
    if c.sink:
        logits = torch.cat((logits, module.sinks[None, :, None].expand(len(hidden), -1, 1)), -1)
    out = torch.einsum("ths,shv->thv", logits.softmax(-1)[..., : len(hidden)], v)
    if module.gate_proj is not None:
        gate = (hidden @ module.gate_proj.weight.T).sigmoid()
        out = out * (gate.view(out.shape) if c.output_gate == "elementwise" else gate[..., None])
    return out.flatten(1) @ module.o_proj.weight.T


def by_yarn(angle, lane, c):
    """Rescale plain angles; the ramp is written out for this test's geometry."""

    def turning(times):
        turns = c.rope.original_max_position / (2 * math.pi * times)
        return c.qk_rope_head_dim * math.log(turns) / (2 * math.log(c.rope.base))

    low, high = max(math.floor(turning(32)), 0), min(math.ceil(turning(1)), c.qk_rope_head_dim - 1)
    share = ((lane - low) / (high - low)).clamp(0, 1)
    return angle * (1 - share) + angle / c.rope.factor * share


VARIANTS = [
    {},
    {"q_lora_rank": None, "rope_interleaved": False},
    {"output_gate": "headwise", "sink": True},
    {"output_gate": "elementwise", "rope": YARN},
    {"qk_rope_head_dim": 0, "softmax_scale": 0.7},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_absorbed_equals_expanded(options, mode):
    module = attention(**options)
    layout = Layout.packed([7, 1, 16])
    hidden = torch.randn(24, MODEL, requires_grad=True)
    got = module(hidden, layout, Pass(mode=mode, with_kl=False))
    allowed = layout.keys.mask(24) if mode == "dense" else got.selection.mask(24)
    copy = hidden.detach().clone().requires_grad_()
    want = by_expanding_every_head(module, copy, layout, allowed)
    torch.testing.assert_close(got.hidden, want, rtol=1e-4, atol=1e-5)

    grad = torch.randn_like(want)
    trained = [p for name, p in module.named_parameters() if not name.startswith("indexer")]
    got_grads = torch.autograd.grad(got.hidden, [hidden, *trained], grad)
    want_grads = torch.autograd.grad(want, [copy, *trained], grad)
    for ours, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_sparse_is_not_dense_here():
    module, hidden, layout = attention(), torch.randn(24, MODEL), Layout.causal(24)
    sparse, dense = (module(hidden, layout, Pass(mode=mode)).hidden for mode in ("sparse", "dense"))
    torch.testing.assert_close(sparse[:TOP_K], dense[:TOP_K], rtol=1e-4, atol=1e-5)
    assert (sparse[TOP_K:] - dense[TOP_K:]).abs().max() > 1e-2


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_projected_queries_are_gone_while_attention_runs(mode, monkeypatch):
    """But for what attention reads: by references alone, without the garbage collector."""
    module, made, held = attention(), [], []
    queries, attend = module.queries, module.attend

    def noting(*args):
        latent, *parts = queries(*args)
        made.extend(map(weakref.ref, parts))
        return latent, *parts

    def counting(*args):
        held.append(sum(one() is not None for one in made))
        return attend(*args)

    monkeypatch.setattr(module, "queries", noting)
    monkeypatch.setattr(module, "attend", counting)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            module(torch.randn(9, MODEL), Layout.causal(9), Pass(mode=mode))
    finally:
        gc.enable()
    assert len(made) == 2
    assert held == [0]


def test_scale_is_the_published_one():
    geometry = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    assert MLAConfig(**geometry).scale == pytest.approx(0.0721687836, abs=1e-9)
    yarn = RopeConfig(scaling="yarn", factor=40.0, mscale_all_dim=1.0)
    assert MLAConfig(**geometry, rope=yarn).scale == pytest.approx(0.1352337789, abs=1e-9)


def test_the_indexer_reads_the_normalised_latent():
    """With latent [3, 4] and norm weight [1, 2], the raw latent or one without the weight gives other queries."""
    module = attention(q_lora_rank=2, norm_eps=1e-12)
    with torch.no_grad():
        module.q_a_proj.weight.zero_()[:, 0] = torch.tensor([3.0, 4.0])
        module.q_a_layernorm.weight.copy_(torch.tensor([1.0, 2.0]))
    hidden = torch.nn.functional.one_hot(torch.zeros(1, dtype=torch.long), MODEL).float()
    seen = []
    module(hidden, Layout.causal(1), Pass(probe=lambda index, what: seen.append((index, what))))
    latent = torch.tensor([3.0, 4.0]) / 12.5**0.5 * torch.tensor([1.0, 2.0])
    torch.testing.assert_close(seen[0][1].index.q.flatten(), module.indexer.wq_b.weight @ latent)


def test_state_dict_has_the_usual_names():
    names = {name.removesuffix(".weight") for name in attention(output_gate="headwise", sink=True).state_dict()}
    assert {n for n in names if not n.startswith("indexer")} == {
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
        "gate_proj",
        "sinks",
    }
    names = {name.removesuffix(".weight") for name in attention(dsa=False, q_lora_rank=None).state_dict()}
    assert names == {"q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}


def test_a_latent_that_does_not_exist_is_an_error():
    with pytest.raises(InputError, match="set query_from='hidden'"):
        MLASelfAttention(MODEL, MLAConfig(q_lora_rank=None), DSAConfig())


@pytest.mark.parametrize("options", [{}, {"output_gate": "headwise", "sink": True, "rope": YARN}], ids=str)
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_decoding_equals_a_full_pass(options, mode):
    module = attention(**options).eval()
    hidden, run = torch.randn(24, MODEL), Pass(mode=mode)
    full = module(hidden, Layout.causal(24), run).hidden
    with torch.no_grad():
        out = module(hidden[:9], Layout.continuation(0, 9), run, cache=LayerCache())
        rows = [out.hidden]
        for row in range(9, 24):
            before = out.cache
            out = module(hidden[row : row + 1], Layout.continuation(row), run, cache=before)
            assert (before.num_rows, out.cache.num_rows) == (row, row + 1)
            rows.append(out.hidden)
    torch.testing.assert_close(torch.cat(rows), full, rtol=1e-5, atol=1e-5)
    assert (out.cache.index_keys is None) == (mode == "dense")


def test_a_cache_is_not_changed_by_its_use():
    module, hidden = attention().eval(), torch.randn(8, MODEL)
    with torch.no_grad():
        cache = module(hidden[:6], Layout.causal(6), cache=LayerCache()).cache
        first = module(hidden[6:7], Layout.continuation(6), cache=cache).hidden
        module(hidden[7:8], Layout.continuation(6), cache=cache)
        assert torch.equal(module(hidden[6:7], Layout.continuation(6), cache=cache).hidden, first)


def test_half_precision_layers_run():
    module, layout = attention(sink=True, output_gate="elementwise"), Layout.packed([9, 14], total=24)
    exact = module.eval()(x := torch.randn(24, MODEL), layout, Pass(with_kl=True))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = module(x, layout, Pass(with_kl=True), selection=exact.selection)
    pure = module.bfloat16()(x.bfloat16(), layout, Pass(with_kl=True), selection=exact.selection)
    for got in (mixed, pure):
        assert got.hidden.dtype == torch.bfloat16
        error = (got.hidden.float() - exact.hidden).norm() / exact.hidden.norm()
        assert error < 0.03


def test_double_precision_layers_run():
    module = attention(sink=True).double()
    out = module(torch.randn(24, MODEL).double(), Layout.causal(24))
    assert out.hidden.dtype == torch.float64
    assert out.kl.dtype == torch.float64


@pytest.fixture
def fused_calls(monkeypatch):
    """A fused forward is the first choice, and its loss has other bits than the parts'; the rows of each call."""
    calls = []

    def forward(q, *rest):
        calls.append(len(q))
        out, lse, shares = dsa.shares_reference(q, *rest)
        return out, lse, shares * (1 + 2**-8)

    module = ModuleType("dsattn.backends.made_up")
    module.dsa_attention_forward = forward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = (backends.Row("made_up", "made_up", lambda _: []), backends.COMPOSED)
    monkeypatch.setitem(backends.TABLE, "dsa_attention.forward", rows)
    backends._choose.cache_clear()
    with settings(first_use_checks=False):
        yield calls
    backends._choose.cache_clear()


@pytest.mark.parametrize("how", ["layer", "settings", "neither"])
def test_recompute_changes_no_bit_beside_a_fused_forward(how, fused_calls):
    """`neither` is the control: a layer that need not repeat takes the fused forward, and its loss differs."""
    module, hidden, layout = attention(), torch.randn(24, MODEL), Layout.packed([7, 1, 16])
    module.dsa = dataclasses.replace(module.dsa, deterministic=True if how == "layer" else None)

    def part(run, x):
        out = module(x, layout, run)
        return out.hidden, out.kl

    found = []
    with settings(deterministic=how == "settings"):
        for again in (False, True):
            x, run = hidden.clone().requires_grad_(), Pass(with_kl=True)
            out, kl = Checkpoints("selective")("attention", part, run, x) if again else part(run, x)
            grads = torch.autograd.grad(out.sum() + kl, [x, *module.parameters()])
            found.append([out.detach(), kl.detach(), *grads])
    same = [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    assert same[0]
    assert all(same) == (how != "neither")
    assert fused_calls == ([24] if how == "neither" else [])
