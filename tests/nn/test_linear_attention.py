"""KDA layers: Hugging Face's layer, documents that share nothing, states that carry on, gates."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F

from dsattn.config import KDAConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn.linear_attention import KDASelfAttention
from dsattn.nn.state import LayerCache, Pass
from dsattn.parallel.recompute import Checkpoints
from dsattn.selection import Selection

WIDTH = 12
CONFIG = KDAConfig(heads=2, head_dim=4)
CONFIGS = {
    "bounded": CONFIG,
    "softplus": dataclasses.replace(CONFIG, lower_bound=None),
    "headwise": dataclasses.replace(CONFIG, output_gate="headwise", conv_size=1),
    "no gate": dataclasses.replace(CONFIG, output_gate="none", conv_size=2),
}
LENGTHS, PADDED, TOTAL = [5, 0, 9, 1], [7, 1, 9, 2], 21
LAYOUT = Layout.packed(LENGTHS, padded=PADDED, total=TOTAL)


def attention(config: KDAConfig = CONFIG, dtype: torch.dtype = torch.float64) -> KDASelfAttention:
    made = KDASelfAttention(WIDTH, config)
    for name, p in made.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return made.to(dtype)


def rows(layout: Layout = LAYOUT, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """NaN in padding."""
    real = layout.real_rows
    return torch.randn(len(real), WIDTH, dtype=dtype).masked_fill(~real[:, None], torch.nan)


def parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    return list(module.parameters())


@pytest.mark.parametrize("bound", [-5.0, None])
def test_equals_hugging_face(bound):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = "transformers.models.glm5_next.modeling_glm5_next"
        modeling = pytest.importorskip(name, reason="needs hf with glm5_next")
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    theirs = modeling.Glm5NextTextLinearAttention(
        Glm5NextTextConfig(
            hidden_size=WIDTH,
            linear_num_heads=CONFIG.heads,
            linear_head_dim=CONFIG.head_dim,
            rms_norm_eps=CONFIG.norm_eps,
            num_hidden_layers=4,
        ),
        0,
    )
    theirs.forget_gate.safe_gate_lower_bound = bound  # a config without one has -5 in this version
    ours = attention(dataclasses.replace(CONFIG, lower_bound=bound), torch.float32)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    hidden = torch.randn(100, WIDTH)
    got = ours(hidden, Layout.causal(100)).hidden
    torch.testing.assert_close(got, theirs(hidden[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_documents_equal_each_alone(config):
    layer, hidden = attention(config), rows().requires_grad_()
    out = layer(hidden, LAYOUT).hidden
    assert torch.equal(out[~LAYOUT.real_rows], torch.zeros(TOTAL - sum(LENGTHS), WIDTH, dtype=torch.float64))
    grad = torch.randn_like(out)
    got = torch.autograd.grad((out * grad).sum(), [*parameters(layer), hidden])
    alone, first = 0.0, 0
    for length, padded in zip(LENGTHS, PADDED, strict=True):
        part = slice(first, first + length)
        one = layer(hidden[part], Layout.causal(length)).hidden
        torch.testing.assert_close(out[part], one)
        alone = alone + (one * grad[part]).sum()
        first += padded
    for ours, exact in zip(got, torch.autograd.grad(alone, [*parameters(layer), hidden]), strict=True):
        torch.testing.assert_close(ours, exact)


def test_a_neighbour_changes_nothing_and_an_earlier_row_does():
    layer, hidden = attention(), rows()
    out = layer(hidden, LAYOUT).hidden
    changed = hidden.clone()
    changed[4] += 1  # the last row of the first document
    other = layer(changed, LAYOUT).hidden
    assert torch.equal(other[7:], out[7:])
    assert torch.equal(other[:4], out[:4])
    one_document = Layout.causal(TOTAL)
    whole, moved = (layer(x.nan_to_num(0), one_document).hidden for x in (hidden, changed))
    assert (whole[7:] - moved[7:]).abs().max() > 1e-6


def test_the_convolution_is_torchs_in_one_document():
    layer, x = attention(), torch.randn(9, 24, dtype=torch.float64)
    got, seen = layer._convolve(x, torch.arange(9), None)
    exact = F.conv1d(F.pad(x.T[None], (3, 0)), layer.conv1d.weight, groups=24)[0].T
    torch.testing.assert_close(got, F.silu(exact))
    assert torch.equal(seen, x[-3:])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_cache_goes_on_where_it_stopped(config):
    layer, hidden = attention(config), rows(Layout.causal(11))
    whole = layer(hidden, Layout.causal(11)).hidden
    cache, parts = LayerCache(), []
    for first, last in ((0, 4), (4, 5), (5, 6), (6, 11)):
        out = layer(hidden[first:last], Layout.continuation(cache.num_rows, last - first), cache=cache)
        cache = out.cache
        assert cache.num_rows == last
        parts.append(out.hidden)
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_the_gate_multiplies_in_fp32_and_is_cast_after(granularity, cast):
    layer = attention(dataclasses.replace(CONFIG, output_gate=granularity), torch.float32)
    out, gate = torch.randn(7, 2, 4).to(cast), torch.randn(7, 8 if granularity == "elementwise" else 2).to(cast)
    wide = gate.float().view(7, 2, -1).sigmoid()
    normed = out.float() * torch.rsqrt(out.float().square().mean(-1, keepdim=True) + 1e-6) * layer.o_norm.weight
    got = layer.o_norm(out, gate)
    assert got.dtype == cast
    torch.testing.assert_close(got, (normed * wide).to(cast), rtol=1e-5 if cast == torch.float32 else 2**-8, atol=1e-6)


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_a_saturated_gate_still_learns(granularity):
    layer = attention(dataclasses.replace(CONFIG, output_gate=granularity), torch.bfloat16)
    gate = torch.full((7, 8 if granularity == "elementwise" else 2), 9.0, dtype=torch.bfloat16, requires_grad=True)
    out = torch.rand(7, 2, 4).bfloat16() + 0.5
    layer.o_norm(out, gate).sum().backward()
    assert (gate.grad > 0).all()


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_recompute_changes_no_bit(config, policy):
    layer, hidden = attention(config, torch.float32), rows(dtype=torch.float32).requires_grad_()
    wanted = torch.autograd.grad(layer(hidden, LAYOUT).hidden.square().sum(), [*parameters(layer), hidden])
    run = Pass(recompute=Checkpoints(policy))
    part = "attention" if policy == "selective" else "layer"
    out = run.part(part, lambda run, x: layer(x, LAYOUT, run), hidden)
    got = torch.autograd.grad(out.hidden.square().sum(), [*parameters(layer), hidden])
    assert all(map(torch.equal, got, wanted))


def test_every_mode_is_the_same_and_selects_nothing():
    layer, hidden = attention(), rows()
    plain = layer(hidden, LAYOUT)
    for mode in ("dense", "warmup", "frozen"):
        out = layer(hidden, LAYOUT, Pass(mode=mode))
        assert torch.equal(out.hidden, plain.hidden)
        assert (out.selection, out.kl, out.cache, out.index, out.entries) == (None, None, None, None, ())


@pytest.mark.parametrize("layout", [Layout.packed([], total=3), Layout.packed([0, 0])], ids=["all padding", "no rows"])
def test_no_real_rows(layout):
    layer = attention()
    out = layer(rows(layout), layout).hidden
    out.sum().backward()
    assert not out.any()
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())


def test_left_padding():
    layer, layout = attention(), Layout.packed([5, 3], padded=[8, 4], side="left")
    hidden = rows(layout)
    out = layer(hidden, layout).hidden
    torch.testing.assert_close(out[3:8], layer(hidden[3:8], Layout.causal(5)).hidden)
    torch.testing.assert_close(out[9:], layer(hidden[9:], Layout.causal(3)).hidden)


def test_inputs_that_do_not_fit_are_errors():
    layer, hidden = attention(), rows()
    with pytest.raises(InputError, match=r"hidden must be \[21, M\] to meet the layout, got \[1, 21, 12\]"):
        layer(hidden[None], LAYOUT)
    index = torch.zeros(21, 1, dtype=torch.int32)
    with pytest.raises(InputError, match="layer 0 is linear: it selects nothing; pass None"):
        layer(hidden, LAYOUT, selection=Selection(index, index[:, 0]))
    shard = Layout.causal(8, cp_size=2)
    with pytest.raises(InputError, match="layout has 8 keys for 4 rows and 0 cached ones, but a linear layer's state"):
        layer(rows(shard), shard)
    with pytest.raises(InputError, match="layout has 4 keys for 4 rows and 3 cached ones"):
        layer(hidden[:4], Layout.causal(4), cache=LayerCache(seen=3))


def test_fresh_decays_are_those_of_the_paper():
    layer = KDASelfAttention(WIDTH, KDAConfig(heads=64, head_dim=16))
    rate, step = layer.forget_gate.A_log.exp(), F.softplus(layer.forget_gate.dt_bias)
    assert rate.min() >= 1
    assert rate.max() <= 16
    assert step.min() * 1.001 >= 1e-3
    assert step.max() <= 0.1001
    assert rate.max() - rate.min() > 8


def test_the_bound_is_kept():
    layer = attention(dtype=torch.float32)
    decay = layer.forget_gate(100 * torch.randn(50, WIDTH))
    assert decay.dtype == torch.float32
    assert decay.min() >= -5
    assert decay.max() <= 0
    free = attention(CONFIGS["softplus"], torch.float32)
    assert free.forget_gate(100 * torch.randn(50, WIDTH)).min() < -5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_graph_would_hold_for_one_packing():
    layer, hidden = attention(dtype=torch.float32).cuda(), torch.randn(9, WIDTH, device="cuda")
    layout = Layout.causal(9).to("cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        hidden.sum()  # torch warns of a graph without work
        with pytest.raises(InputError, match="reads document lengths on the host"):
            layer(hidden, layout)
