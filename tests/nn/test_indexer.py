import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, RopeConfig
from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.nn import LightningIndexer, MLASelfAttention
from dsattn.nn.state import LayerCache, Pass
from dsattn.ops import expand_pools, pool_keys, select_keys, select_topk
from dsattn.ops.pool import round_to_e4m3
from dsattn.selection import Selection

ROWS, MODEL, LATENT = 20, 24, 12


def indexer(**options) -> LightningIndexer:
    config = IndexerConfig(**{"heads": 4, "head_dim": 8, "top_k": 5, "rope_dim": 4, **options})
    torch.manual_seed(1)
    made = LightningIndexer(MODEL, MODEL if config.query_from == "hidden" else LATENT, config, RopeConfig()).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def turned(row: torch.Tensor, position: int, interleaved: bool) -> torch.Tensor:
    """One vector, rotated lane by lane."""
    lanes = len(row)
    out = row.clone()
    for j in range(lanes // 2):
        a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + lanes // 2)
        angle = position * 10_000.0 ** (-2 * j / lanes)
        out[a] = row[a] * math.cos(angle) - row[b] * math.sin(angle)
        out[b] = row[b] * math.cos(angle) + row[a] * math.sin(angle)
    return out


def scores_by_the_formula(module: LightningIndexer, hidden, latent, positions) -> torch.Tensor:
    """[T, T], one number at a time."""
    config = module.config
    r, d = config.rope_dim, config.head_dim

    def rotated(row: torch.Tensor, position: int) -> torch.Tensor:
        if config.rope_first:
            return torch.cat((turned(row[:r], position, config.rope_interleaved), row[r:]))
        return torch.cat((row[: d - r], turned(row[d - r :], position, config.rope_interleaved)))

    source = hidden if latent is None else latent
    raw = hidden @ module.wk.weight.T
    centred = raw - raw.mean(1, keepdim=True)
    k = centred / (centred.square().mean(1, keepdim=True) + config.k_norm_eps).sqrt()
    k = k * module.k_norm.weight + module.k_norm.bias
    out = torch.zeros(len(hidden), len(hidden), dtype=hidden.dtype)
    for t in range(len(hidden)):
        q = (module.wq_b.weight @ source[t]).reshape(config.heads, d)
        w = module.weights_proj.weight @ hidden[t] / math.sqrt(config.heads) / math.sqrt(d)
        for s in range(len(hidden)):
            for h in range(config.heads):
                dot = rotated(q[h], int(positions[t])) @ rotated(k[s], int(positions[s]))
                out[t, s] += w[h] * (max(dot, 0.0) if config.relu else dot)
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"query_from": "hidden", "rope_interleaved": True},
        {"rope_first": False, "k_norm_eps": 1e-2, "k_norm_fp32": True},
        {"hadamard": True, "relu": False},
        {"rope_dim": 0},
    ],
    ids=str,
)
def test_scores_and_selection_follow_the_formula(options):
    module = indexer(**options)
    hidden, latent = torch.randn(ROWS, MODEL).double(), torch.randn(ROWS, LATENT).double()
    positions = torch.cat((torch.arange(8), torch.arange(12)))
    given = None if module.config.query_from == "hidden" else latent
    q, k, w = module(hidden, given, positions)
    dot = torch.einsum("thd,sd->hts", q, k)
    got = torch.einsum("hts,th->ts", dot.relu() if module.config.relu else dot, w)
    want = scores_by_the_formula(module, hidden, given, positions)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)

    start, stop = torch.tensor([0] * 8 + [8] * 12), torch.arange(1, ROWS + 1)
    chosen = select_keys(q, k, w, KeyRange(start.int(), stop.int()), 5, relu=module.config.relu)
    for t in range(ROWS):
        visible = range(int(start[t]), int(stop[t]))
        best = sorted(sorted(visible, key=lambda s: (-want[t, s].item(), s))[:5])
        assert chosen.index[t, : len(best)].tolist() == best


def test_wrong_pairing_changes_the_scores():
    hidden, latent, positions = torch.randn(8, MODEL).double(), torch.randn(8, LATENT).double(), torch.arange(8)
    right, wrong = (indexer(rope_interleaved=x)(hidden, latent, positions) for x in (False, True))
    products = [torch.einsum("thd,sd->ths", x.q, x.k) for x in (right, wrong)]
    assert (products[0] - products[1]).abs().max() > 1e-2


def test_inputs_get_no_gradient():
    module = indexer()
    hidden = torch.randn(6, MODEL, dtype=torch.float64, requires_grad=True)
    latent = torch.randn(6, LATENT, dtype=torch.float64, requires_grad=True)
    sum(x.sum() for x in module(hidden, latent, torch.arange(6))).backward()
    assert hidden.grad is None
    assert latent.grad is None
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def test_state_dict_has_the_usual_names():
    assert set(indexer().state_dict()) == {
        "wq_b.weight",
        "wk.weight",
        "k_norm.weight",
        "k_norm.bias",
        "weights_proj.weight",
    }


@pytest.mark.parametrize("source", ["hidden", "q_latent"])
def test_a_wrong_query_source_is_an_error(source):
    latent = torch.zeros(3, LATENT).double() if source == "hidden" else None
    with pytest.raises(InputError, match=f"query_from='{source}'"):
        indexer(query_from=source)(torch.zeros(3, MODEL).double(), latent, torch.arange(3))


@pytest.mark.parametrize("k_norm_fp32", [False, True])
def test_dtypes(k_norm_fp32):
    module = indexer(k_norm_fp32=k_norm_fp32).float()
    hidden, latent, positions = torch.randn(6, MODEL), torch.randn(6, LATENT), torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, _ = module(hidden, latent, positions)
    assert (q.dtype, k.dtype) == (torch.bfloat16, torch.bfloat16)
    q, k, w = module.bfloat16()(hidden.bfloat16(), latent.bfloat16(), positions)
    assert {x.dtype for x in (q, k, w)} == {torch.bfloat16}


def test_reset_is_repeatable_and_complete():
    first, second = indexer(), indexer(rope_first=False)
    for module in (first, second):
        module.reset_parameters(0.1, torch.Generator().manual_seed(3))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert torch.equal(first.k_norm.bias, torch.zeros(8).double())
    assert F.mse_loss(first.wk.weight.std(), torch.tensor(0.1).double()) < 1e-3


POOL = {"pool_size": 4, "top_k": 8}


def kpool_attention(**options) -> MLASelfAttention:
    config = IndexerConfig(**{"heads": 4, "head_dim": 8, "rope_dim": 4, **POOL, **options})
    sizes = {"q_lora_rank": LATENT, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    made = MLASelfAttention(MODEL, MLAConfig(heads=2, **sizes), DSAConfig(indexer=config), layer_index=3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return made


def test_kpool_carries_gates_beside_keys():
    module, plain = indexer(**POOL), indexer(top_k=8)
    plain.load_state_dict(module.state_dict(), strict=False)
    hidden, latent, positions = torch.randn(9, MODEL).double(), torch.randn(9, LATENT).double(), torch.arange(9)
    got, expected = module(hidden, latent, positions), plain(hidden, latent, positions)
    assert got.k[:, :8].equal(expected.k)
    torch.testing.assert_close(got.k[:, 8:], hidden @ module.index_kpool_compress_gate.T)
    torch.testing.assert_close(got.w, expected.w)
    own = {"index_kpool_compress_ape": (4, 8), "index_kpool_compress_gate": (8, MODEL)}
    assert {name: tuple(module.state_dict()[name].shape) for name in own} == own
    assert {name for name, p in module.named_parameters() if not p.requires_grad} == set(own)
    assert module.state_dict().keys() - own.keys() == plain.state_dict().keys()
    module.reset_parameters()
    assert not any(module.state_dict()[name].any() for name in own)


@pytest.mark.parametrize("tail", [True, False])
def test_kpool_selects_as_its_operations(tail):
    module = indexer(**POOL, pool_tail=tail)
    layout = Layout.packed([11, 9])
    index = module(torch.randn(ROWS, MODEL).double(), torch.randn(ROWS, LATENT).double(), layout.positions)
    got = module.select_pools(index, layout, precision="bf16", block_bytes=2**20, backend="auto")
    k, gate = index.k[:, :8], index.k[:, 8:]
    pooled = pool_keys(k, gate, module.index_kpool_compress_ape, layout, 4)
    chosen = select_keys(index.q, pooled.keys, index.w, pooled.ranges, 2)
    expected = expand_pools(chosen, pooled, layout, tail=tail)
    assert got.index.equal(expected.index)
    assert got.every_row_has_a_key == tail
    ungated = pool_keys(k, torch.zeros_like(gate), module.index_kpool_compress_ape, layout, 4)
    assert not ungated.keys.equal(pooled.keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kpool_loads_and_selects_as_transformers(dtype):
    theirs_module = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next", reason="needs the hf extra")
    sizes = {"hidden_size": MODEL, "q_lora_rank": LATENT, "index_n_heads": 32, "index_head_dim": 16}
    pools = {"index_topk": 8, "index_kpool": 4, "index_kpool_always_select_tail": True, "qk_rope_head_dim": 0}
    theirs = theirs_module.Glm5NextTextIndexer(SimpleNamespace(**sizes, **pools), 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    config = IndexerConfig(heads=32, head_dim=16, rope_dim=0, pool_arithmetic="hf", **POOL)
    ours = LightningIndexer(MODEL, LATENT, config, RopeConfig())
    ours.load_state_dict(theirs.state_dict())
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    mask = torch.ones(3, 37, dtype=torch.bool)
    mask[0, :6], mask[1, 30:] = False, False
    hidden, latent = torch.randn(3, 37, MODEL).to(dtype), torch.randn(3, 37, LATENT).to(dtype)
    index = theirs(hidden, latent, mask, None)
    first = torch.arange(3, dtype=torch.int32)[:, None, None] * 37
    expected = Selection.from_index(torch.where(index >= 0, index + first, -1).flatten(0, 1))
    layout = Layout.from_attention_mask(mask)
    output = ours(hidden.flatten(0, 1), latent.flatten(0, 1), layout.positions)
    assert output.w.dtype == torch.float32
    got = ours.select_pools(output, layout, precision="bf16", block_bytes=2**20, backend="auto")
    assert int((got.index != expected.index).any(1).sum()) == 0


def test_kpool_e4m3_scores_rounded_operands():
    module = indexer(**POOL, pool_e4m3=True).float()
    layout = Layout.causal(200)
    index = module(torch.randn(200, MODEL), torch.randn(200, LATENT), layout.positions)
    got = module.select_pools(index, layout, precision="bf16", block_bytes=2**20, backend="auto")
    pooled = pool_keys(*index.k.chunk(2, -1), module.index_kpool_compress_ape, layout, 4)
    turn = torch.tensor([[(-1.0) ** (a & b).bit_count() for b in range(8)] for a in range(8)]) * 8**-0.5
    q, keys = (round_to_e4m3((x @ turn).bfloat16()).double() for x in (index.q, pooled.keys))
    scores = torch.einsum("thd,nd->thn", q, keys).relu().mul(index.w[:, :, None]).sum(1)
    expected = expand_pools(select_topk(scores, pooled.ranges, 2), pooled, layout)
    assert got.index.equal(expected.index)
    exact = indexer(**POOL).float().select_pools(index, layout, precision="bf16", block_bytes=2**20, backend="auto")
    assert not got.index.equal(exact.index)


@pytest.mark.parametrize("options", [{}, {"pool_tail": False}, {"pool_arithmetic": "hf"}, {"pool_e4m3": True}], ids=str)
def test_kpool_attends_to_whole_pools_and_decodes_alike(options):
    module = kpool_attention(**options)
    hidden, layout, frozen = torch.randn(30, MODEL), Layout.causal(30), Pass(mode="frozen")
    whole = module(hidden, layout, frozen, cache=LayerCache())
    assert whole.selection.width == 8 + 3 * module.dsa.indexer.pool_tail
    assert whole.cache.index_keys.shape == (30, 16)
    cache, steps, done = LayerCache(), [], 0
    for rows in (17, 1, 1, 5, 6):
        step = module(hidden[done : done + rows], Layout.continuation(done, rows), frozen, cache=cache)
        cache, done = step.cache, done + rows
        assert step.selection.index.equal(whole.selection.index[done - rows : done])
        steps.append(step.hidden)
    torch.testing.assert_close(torch.cat(steps), whole.hidden, rtol=1e-4, atol=1e-5)


def test_kpool_trains_the_backbone_alone():
    module = kpool_attention()
    module(torch.randn(30, MODEL), Layout.packed([13, 17]), Pass(mode="frozen")).hidden.square().sum().backward()
    with_gradient = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradient == {name for name, _ in module.named_parameters() if not name.startswith("indexer.")}


def test_kpool_has_no_loss_for_the_indexer():
    module, hidden, layout = kpool_attention(), torch.randn(30, MODEL), Layout.causal(30)
    for mode in ("warmup", "sparse"):
        with pytest.raises(InputError, match=rf"mode='{mode}'.*layer 3 selects pools of 4 keys.*Pass\(mode='frozen'\)"):
            module(hidden, layout, Pass(mode=mode))
        assert module(hidden, layout, Pass(mode=mode, with_kl=False)).kl is None
    module.eval()
    assert module(hidden, layout, Pass(mode="sparse")).kl is None
