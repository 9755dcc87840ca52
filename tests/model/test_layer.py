"""Layers of every type, alone and in one stack: what they read, what they hand on, what documents may not see."""

import dataclasses

import pytest
import torch

from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
)
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.model.layer import DecoderLayer, MTPLayer, decoder_layers
from dsattn.model.mlp import SwiGLU
from dsattn.model.moe import MoE
from dsattn.nn import GQASelfAttention, MLASelfAttention
from dsattn.nn.linear_attention import KDASelfAttention
from dsattn.nn.state import Pass
from dsattn.parallel.recompute import Checkpoints

VOCAB, WINDOW, TOP_K = 40, 3, 4
MLA = MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4, output_gate="elementwise")
MOE = MoEConfig(experts=8, experts_per_token=2, intermediate_size=8, groups=4, groups_per_token=2, first_dense_layers=1)
INDEXER = IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, rope_dim=4)
HYBRID = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=5,
    intermediate_size=24,
    attention=MLA,
    dense_attention=GQA,
    dsa=DSAConfig(indexer=INDEXER),
    moe=MOE,
    kda=KDAConfig(heads=2, head_dim=8),
    sliding_window=WINDOW,
    layer_types=("linear", "sliding", "dense", "dsa", "dsa"),
    mtp=MTPConfig(depths=2, repeated=True),
    init_std=0.3,
)
LENGTHS, PADDED, TOTAL = [9, 0, 12], [11, 1, 12], 26
LAYOUT = Layout.packed(LENGTHS, padded=PADDED, total=TOTAL)
REAL = LAYOUT.real_rows


def hybrid(**options) -> Decoder:
    return Decoder(dataclasses.replace(HYBRID, **options)).double().train()


def tokens(layout: Layout = LAYOUT) -> torch.Tensor:
    return torch.randint(0, VOCAB, layout.real_rows.shape).masked_fill(~layout.real_rows, -7)  # not even a token


def hidden(layout: Layout = LAYOUT) -> torch.Tensor:
    real = layout.real_rows
    return torch.randn(len(real), 16, dtype=torch.float64) * real[:, None]


def test_every_type_has_its_attention_and_its_mlp():
    layers = decoder_layers(HYBRID)
    kinds = [KDASelfAttention, GQASelfAttention, GQASelfAttention, MLASelfAttention, MLASelfAttention, MLASelfAttention]
    assert [type(layer.self_attn) for layer in layers] == kinds
    assert [type(layer.mlp) for layer in layers] == [SwiGLU, MoE, MoE, MoE, MoE, MoE]
    assert [type(layer) for layer in layers] == [DecoderLayer] * 5 + [MTPLayer]
    assert [layer.window for layer in layers] == [None, WINDOW, None, None, None, None]
    roles = [getattr(layer.self_attn, "role", None) for layer in layers]
    assert roles == [None, "dense", "dense", "selects", "selects", "selects"]


@pytest.mark.parametrize("window", [1, WINDOW, 100])
def test_a_sliding_layer_is_masked_attention(window):
    """Against one document after another, rows of which read the rows of the window alone."""
    config = dataclasses.replace(HYBRID, sliding_window=window)
    layer, x = decoder_layers(config)[1].double(), hidden()
    got = layer(x, LAYOUT).hidden
    normed = layer.input_layernorm(x)
    q, k, v = layer.self_attn.heads(normed, LAYOUT.positions)
    gate = layer.self_attn.gate_proj(normed).sigmoid()
    for row in REAL.nonzero().flatten().tolist():
        first = max(row - window + 1, row - int(LAYOUT.positions[row]))
        out = []
        for head in range(4):
            weights = (k[first : row + 1, head // 2] @ q[row, head] * 8**-0.5).softmax(0)
            out.append(weights @ v[first : row + 1, head // 2])
        after = x[row] + layer.self_attn.o_proj(gate[row] * torch.cat(out))
        mixed, _ = layer.mlp(layer.post_attention_layernorm(after[None]), Layout.causal(1), Pass())
        torch.testing.assert_close(got[row], after + mixed[0])


def test_a_window_of_everything_is_a_dense_layer():
    layers = decoder_layers(dataclasses.replace(HYBRID, sliding_window=TOTAL))
    layers[2].load_state_dict(layers[1].state_dict())
    x = hidden().float()
    assert torch.equal(layers[1](x, LAYOUT).hidden, layers[2](x, LAYOUT).hidden)
    layers[1].window = WINDOW
    assert not torch.equal(layers[1](x, LAYOUT).hidden, layers[2](x, LAYOUT).hidden)


def test_a_window_travels_with_the_ranges_of_a_context_parallel_rank():
    keys = Layout.packed([8, 16], cp_size=2, cp_rank=1).keys.last(WINDOW)
    whole = Layout.packed([8, 16])
    rows = Layout.packed([8, 16], cp_size=2, cp_rank=1).rows
    assert torch.equal(keys.start, whole.keys.last(WINDOW).start[rows])
    assert torch.equal(keys.stop, whole.keys.stop[rows])


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_packed_documents_equal_each_alone(mode):
    model, ids = hybrid(), tokens()
    labels = torch.randint(0, VOCAB, (TOTAL,)).masked_fill(~REAL, -100)
    run = Pass(mode=mode, kl_divisor=21, with_balance=True)
    learned = []
    out = model(ids, LAYOUT, run)
    assert torch.equal(out.hidden[~REAL], torch.zeros(5, 16).double())
    loss = [model.lm_loss(out.hidden, labels, 21), out.balance_sum, *([out.kl_sum] if out.kl else [])]
    loss += [model.mtp_losses(out.ahead, labels, LAYOUT, 21).sum()]
    learned.append(torch.autograd.grad(sum(loss), list(model.parameters()), allow_unused=True))
    total, loads = 0.0, {}
    for first, length in ((0, 9), (12, 12)):
        rows = slice(first, first + length)
        alone = model(ids[rows], Layout.causal(length), run)
        torch.testing.assert_close(out.hidden[rows], alone.hidden, rtol=1e-8, atol=1e-8)
        total = total + model.lm_loss(alone.hidden, labels[rows], 21) + alone.balance_sum
        total = total + (alone.kl_sum if alone.kl else 0)
        total = total + model.mtp_losses(alone.ahead, labels[rows], Layout.causal(length), 21).sum()
        for layer, routing in alone.routing.items():
            loads[layer] = loads.get(layer, 0) + routing.load
    learned.append(torch.autograd.grad(total, list(model.parameters()), allow_unused=True))
    assert {layer: routing.load.tolist() for layer, routing in out.routing.items()} == {
        layer: load.tolist() for layer, load in loads.items()
    }
    for packed, apart in zip(*learned, strict=True):
        assert (packed is None) == (apart is None)
        if packed is not None:
            torch.testing.assert_close(packed, apart, rtol=1e-7, atol=1e-8)


def test_routing_is_told_by_the_layer_that_owns_the_experts():
    out = hybrid()(tokens(), LAYOUT, Pass(with_balance=True))
    loads = {layer: int(routing.load.sum()) for layer, routing in out.routing.items()}
    assert loads == {1: 42, 2: 42, 3: 42, 4: 42, 5: 84}  # two experts a row; both depths run layer 5
    torch.testing.assert_close(out.balance_sum, sum(routing.balance for routing in out.routing.values()))
    assert hybrid()(tokens(), LAYOUT).balance_sum is None
    assert hybrid(moe=None)(tokens(), LAYOUT, Pass(with_balance=True)).routing == {}
    separate = hybrid(mtp=MTPConfig(depths=2))(tokens(), LAYOUT)
    assert list(separate.routing) == [1, 2, 3, 4, 5, 6]


def test_biases_move_where_the_loads_came_from():
    model = hybrid()
    out = model(tokens(), LAYOUT)
    before = [layer.mlp.gate.e_score_correction_bias.clone() for layer in model.model.layers[1:]]
    model.move_routing_biases({layer: routing.load for layer, routing in out.routing.items()}, 0.5)
    for layer, bias, old in zip(range(1, 6), model.model.layers[1:], before, strict=True):
        load = out.routing[layer].load
        wanted = 0.5 * (load.sum() - 8 * load).sign().double()
        torch.testing.assert_close(bias.mlp.gate.e_score_correction_bias - old, wanted)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_decoding_equals_a_full_pass(mode):
    model, ids, rows = hybrid().eval(), torch.randint(0, VOCAB, (20,)), 20
    with torch.no_grad():
        full = model(ids, Layout.causal(rows), Pass(mode=mode)).hidden
        caches, parts = model.empty_caches(), []
        for first, last in [(0, 7), *((row, row + 1) for row in range(7, rows))]:
            layout = Layout.continuation(caches[0].num_rows, last - first)
            out = model(ids[first:last], layout, Pass(mode=mode), caches=caches)
            caches = out.caches
            parts.append(out.hidden)
    torch.testing.assert_close(torch.cat(parts), full)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recompute_changes_no_bit(policy):
    model, ids = Decoder(dataclasses.replace(HYBRID, dsa=DSAConfig(indexer=INDEXER, deterministic=True))), tokens()
    labels = torch.randint(0, VOCAB, (TOTAL,)).masked_fill(~REAL, -100)
    learned = []
    for recompute in (None, Checkpoints(policy)):
        out = model(ids, LAYOUT, Pass(with_balance=True, recompute=recompute))
        loss = model.lm_loss(out.hidden, labels) + out.kl_sum + out.balance_sum
        loss = loss + model.mtp_losses(out.ahead, labels, LAYOUT).sum()
        learned.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for got, wanted in zip(*learned, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or torch.equal(got, wanted)


def test_fresh_weights_are_drawn_for_every_kind():
    config = dataclasses.replace(HYBRID, hidden_size=64, init_std=0.02)
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.constant_(p, torch.nan)
    model.reset_parameters(torch.Generator().manual_seed(3))
    assert all(p.isfinite().all() for p in model.parameters())
    experts = model.model.layers[1].mlp.experts
    assert experts.gate_up_proj.std().item() == pytest.approx(0.02, rel=0.1)
    assert experts.down_proj.std().item() == pytest.approx(0.02 / 10**0.5, rel=0.1)
    assert not model.model.layers[1].mlp.gate.e_score_correction_bias.any()
    again = Decoder(config)
    again.reset_parameters(torch.Generator().manual_seed(3))
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def test_a_shard_of_rows_is_refused_by_a_linear_layer():
    layout = Layout.causal(8).shard_rows(1, 2)
    with pytest.raises(InputError, match="a linear layer's state runs through all rows"):
        hybrid(mtp=MTPConfig())(torch.zeros(4, dtype=torch.long), layout)
