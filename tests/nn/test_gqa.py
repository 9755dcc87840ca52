import math

import pytest
import torch

from dsattn.config import DSAConfig, GQAConfig, IndexerConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn import GQASelfAttention
from dsattn.nn.state import LayerCache, Pass

MODEL, TOP_K = 32, 5


def attention(dsa: bool = True, **options) -> GQASelfAttention:
    config = GQAConfig(**{"heads": 4, "kv_heads": 2, "head_dim": 8, "rope_dim": 4, **options})
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, query_from="hidden", rope_dim=config.rotated)
    made = GQASelfAttention(MODEL, config, DSAConfig(indexer=indexer) if dsa else None)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return made


def by_the_textbook(module: GQASelfAttention, hidden: torch.Tensor, layout: Layout, allowed) -> torch.Tensor:
    """One head at a time, keys and values of its group, and a mask [T, S]."""
    c = module.config
    d, lanes = c.head_dim, c.rotated

    def head(weight, number, norm):
        x = hidden @ weight[number * d : (number + 1) * d].T
        if norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * norm.weight
        angle = layout.positions[:, None] * c.rope.base ** (-2.0 * torch.arange(lanes // 2) / lanes)
        spin = torch.polar(torch.ones_like(angle), angle)
        if c.rope_interleaved:
            pairs = torch.view_as_complex(x[:, :lanes].unflatten(-1, (-1, 2)).contiguous())
            turned = torch.view_as_real(pairs * spin).flatten(-2)
        else:
            both = torch.complex(*(half.contiguous() for half in x[:, :lanes].chunk(2, -1))) * spin
            turned = torch.cat((both.real, both.imag), -1)
        return torch.cat((turned, x[:, lanes:]), -1)

    outs = []
    for h in range(c.heads):
        group = h // (c.heads // c.kv_heads)
        q, k = head(module.q_proj.weight, h, module.q_norm), head(module.k_proj.weight, group, module.k_norm)
        v = hidden @ module.v_proj.weight[group * d : (group + 1) * d].T
        logits = (q @ k.T * c.scale).masked_fill(~allowed, -math.inf)
        if c.sink:
            logits = torch.cat((logits, module.sinks[h].expand(len(hidden), 1)), -1)
        out = logits.softmax(-1)[:, : len(hidden)] @ v
        if c.output_gate == "headwise":
            out = out * (hidden @ module.gate_proj.weight[h]).sigmoid()[:, None]
        if c.output_gate == "elementwise":
            out = out * (hidden @ module.gate_proj.weight[h * d : (h + 1) * d].T).sigmoid()
        outs.append(out)
    return torch.cat(outs, -1) @ module.o_proj.weight.T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_interleaved": True, "qk_norm": True, "rope_dim": None},
        {"output_gate": "headwise", "sink": True, "kv_heads": 4},
        {"output_gate": "elementwise", "kv_heads": 1, "softmax_scale": 0.7, "rope_dim": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_against_the_textbook(options, mode):
    module = attention(**options)
    layout = Layout.packed([7, 1, 16])
    hidden = torch.randn(24, MODEL, requires_grad=True)
    got = module(hidden, layout, Pass(mode=mode, with_kl=False))
    allowed = layout.keys.mask(24) if mode == "dense" else got.selection.mask(24)
    copy = hidden.detach().clone().requires_grad_()
    want = by_the_textbook(module, copy, layout, allowed)
    torch.testing.assert_close(got.hidden, want, rtol=1e-4, atol=1e-5)

    grad = torch.randn_like(want)
    trained = [p for name, p in module.named_parameters() if not name.startswith("indexer")]
    got_grads = torch.autograd.grad(got.hidden, [hidden, *trained], grad)
    want_grads = torch.autograd.grad(want, [copy, *trained], grad)
    for ours, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_decoding_equals_a_full_pass(mode):
    module = attention(qk_norm=True, sink=True).eval()
    hidden, run = torch.randn(20, MODEL), Pass(mode=mode)
    full = module(hidden, Layout.causal(20), run).hidden
    with torch.no_grad():
        out = module(hidden[:9], Layout.continuation(0, 9), run, cache=LayerCache())
        rows = [out.hidden]
        for row in range(9, 20):
            out = module(hidden[row : row + 1], Layout.continuation(row), run, cache=out.cache)
            rows.append(out.hidden)
    torch.testing.assert_close(torch.cat(rows), full, rtol=1e-5, atol=1e-5)
    assert [x.shape for x in out.cache.entries] == [(20, 2, 8)] * 2


def test_state_dict_has_the_usual_names():
    options = {"output_gate": "headwise", "sink": True, "qk_norm": True}
    names = {name.removesuffix(".weight") for name in attention(dsa=False, **options).state_dict()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "gate_proj", "sinks"}


def test_there_is_no_query_latent():
    with pytest.raises(InputError, match="no query latent"):
        GQASelfAttention(MODEL, GQAConfig(), DSAConfig())


def test_half_precision_layers_run():
    module, layout = attention(sink=True, qk_norm=True, output_gate="elementwise"), Layout.packed([9, 14], total=24)
    exact = module.eval()(x := torch.randn(24, MODEL), layout)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = module(x, layout, selection=exact.selection)
    pure = module.bfloat16()(x.bfloat16(), layout, selection=exact.selection)
    for got in (mixed, pure):
        assert got.hidden.dtype == torch.bfloat16
        assert (got.hidden.float() - exact.hidden).norm() / exact.hidden.norm() < 0.03
