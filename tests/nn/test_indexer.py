import math

import pytest
import torch
import torch.nn.functional as F

from dsattn.config import IndexerConfig, RopeConfig
from dsattn.errors import InputError
from dsattn.keys import KeyRange
from dsattn.nn import LightningIndexer
from dsattn.ops import select_keys

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
