"""The glue between trials and vendors, whose functions are replaced by ours: the packages need a GPU."""

import dataclasses

import pytest
import torch

from dsattn import KeyRange
from dsattn.backends import deep_gemm, flash_mla, tilelang
from dsattn.backends.cudnn import indexer_kl as cudnn_kl
from dsattn.backends.cudnn import select as cudnn_scores
from dsattn.backends.cudnn import select_topk as cudnn_topk
from dsattn.backends.cudnn import sparse_mla as cudnn_mla
from dsattn.bench import peers
from dsattn.bench.agreement import disagreement
from dsattn.bench.cases import SHAPES, Setting
from dsattn.bench.peers import LOW_PRECISION, PEERS, peers_of
from dsattn.bench.run import BENCHMARKS
from dsattn.ops import indexer_scores
from dsattn.ops.sparse_mla import backward_reference, forward_reference
from dsattn.selection import Selection, rank

SETTING = Setting(shape=SHAPES["small"], rows=40, keys=64)
WHOLE = dataclasses.replace(SETTING, rows=64)


def causal(first, rows):
    stop = torch.arange(first + 1, first + rows + 1, dtype=torch.int32)
    return KeyRange(torch.zeros_like(stop), stop)


def select(scores, top_k):
    """By the rule, in another order: with so few heads many scores are 0, and ties must not differ from ours."""
    index, _, _ = rank(scores, torch.arange(scores.shape[1], dtype=torch.int32), top_k)
    return index.flip(1)


def target_of(attention, index, scale):
    q, kv, lse = attention
    logits = torch.einsum("thc,tnc->thn", q, kv[index.clamp(min=0).long()]) * scale
    found = (logits - lse[..., None]).exp().sum(1).masked_fill(index < 0, 0.0)
    return found / found.sum(1, keepdim=True)


def scores_of(indexer, index):
    q, k, w = indexer
    dot = torch.einsum("thd,tnd->thn", q, k[index.clamp(min=0).long()]).relu()
    return torch.einsum("thn,th->tn", dot, w).masked_fill(index < 0, -torch.inf)


def grads_of(indexer, index, target, share, grad_loss):
    leaves = tuple(x.detach().requires_grad_() for x in indexer)
    grads = torch.autograd.grad(scores_of(leaves, index), leaves, (share - target) * grad_loss)
    target.fill_(torch.nan)
    return grads


@pytest.fixture
def vendors(monkeypatch):
    """Every vendor's function, by our own or by the formula."""

    def bare_backward(saved, q, kv, index, scale):
        grad_out, out, lse = saved
        return backward_reference(grad_out, q, kv, index, index, None, out, lse, scale, False)

    def bare_forward(q, kv, index, scale, value_dim):
        return forward_reference(q, kv, index, index, None, scale, value_dim)

    def scores(q, k, w, start, stop):
        return indexer_scores(q, k, w, KeyRange(start, stop))

    def topk(found, stop, top_k, *, ascending=False):
        index = select(_below(found, stop), top_k)
        return (Selection.from_index(index).index if ascending else index), None

    monkeypatch.setattr(flash_mla, "sparse_mla_forward", forward_reference)
    monkeypatch.setattr(cudnn_mla, "sparse_mla_backward", backward_reference)
    monkeypatch.setattr(tilelang, "bare_forward", bare_forward)
    monkeypatch.setattr(tilelang, "bare_backward", bare_backward)
    monkeypatch.setattr(cudnn_topk, "bare_topk", topk)
    monkeypatch.setattr(
        cudnn_scores, "indexer_scores", lambda q, k, w, first: indexer_scores(q, k, w, causal(first, len(q)))
    )
    monkeypatch.setattr(cudnn_kl, "shares_of_scores", lambda indexer, index, _: scores_of(indexer, index).softmax(1))
    monkeypatch.setattr(cudnn_kl, "shares_of_attention", lambda given, index, _, scale: target_of(given, index, scale))
    monkeypatch.setattr(cudnn_kl, "bare_backward", grads_of)
    monkeypatch.setattr(tilelang, "indexer_scores", scores)
    monkeypatch.setattr(tilelang, "topk_of_megatron", lambda q, k, w, a, b, top_k: select(scores(q, k, w, a, b), top_k))
    monkeypatch.setattr(
        deep_gemm,
        "indexer_scores",
        lambda fp8, a, b: scores(fp8.q.float(), fp8.k.float() * fp8.k_scale[:, None], fp8.w, a, b),
    )


def _below(scores, stop):
    return scores.masked_fill(torch.arange(scores.shape[1]) >= stop[:, None], -torch.inf)


CASES = [
    (name, peer, setting)
    for name, found in PEERS.items()
    for peer in found
    for setting in ((WHOLE,) if name.startswith(("dense", "dsa")) else (SETTING, WHOLE))
    if (name, peer) not in [("indexer_kl.forward", "tilelang"), ("indexer_kl.backward", "tilelang")]
]


@pytest.mark.parametrize(("name", "peer", "setting"), CASES)
def test_a_peer_does_the_same_work(name, peer, setting, vendors):
    trial = BENCHMARKS[name](setting)
    operands = trial.sets[0]
    ours, run = trial.prepare(operands)(), peers_of(trial)[peer](trial, operands)
    assert disagreement(trial, peer, ours, run()) == ""
    assert disagreement(trial, peer, ours, run()) == ""  # again: a run may not change its operands


def test_tilelang_is_given_the_selected_scores(vendors, monkeypatch):
    trial = BENCHMARKS["indexer_kl.backward"](SETTING)
    operands, seen = trial.sets[0], {}

    def forward(q, kv, index, score, scale):
        seen.update(score=score, index=index)
        return score.new_full((), 80.0), torch.full_like(score, 40.0)

    monkeypatch.setattr(tilelang, "indexer_kl_forward", forward)
    monkeypatch.setattr(tilelang, "indexer_kl_backward", lambda indexer, index, grad: grad)
    grad = PEERS["indexer_kl.backward"]["tilelang"](trial, operands)()
    exact = indexer_scores(operands.q_i, operands.k_i, operands.w, SETTING.ranges)
    index = operands.selection.index
    torch.testing.assert_close(seen["score"][index >= 0], exact.gather(1, index.clamp(min=0).long())[index >= 0])
    assert (seen["score"][index < 0] == -torch.inf).all()
    assert (grad == 1.0).all(), "a mean over 40 rows"
    assert PEERS["indexer_kl.forward"]["tilelang"](trial, operands)() == 2.0


@pytest.mark.parametrize("installed", [True, False])
def test_fp8_scores_are_ranked_by_who_is_there(installed, vendors, monkeypatch):
    trial = BENCHMARKS["select_keys"](SETTING)
    monkeypatch.setattr(peers, "find_spec", lambda name: object() if installed else None)
    ranked = []
    real = cudnn_topk.bare_topk
    monkeypatch.setattr(cudnn_topk, "bare_topk", lambda *given: ranked.append(1) or real(*given))
    PEERS["select_keys"]["deep_gemm"](trial, trial.sets[0])()
    assert bool(ranked) == installed


@pytest.mark.parametrize("peer", LOW_PRECISION)
def test_low_precision_has_peers_of_its_own(peer, vendors):
    trial = BENCHMARKS["select_keys"](dataclasses.replace(SETTING, precision="fp8"))
    assert peers_of(trial).keys() == LOW_PRECISION.keys()
    operands = trial.sets[0]
    run = peers_of(trial)[peer](trial, operands)
    assert disagreement(trial, peer, trial.prepare(operands)(), run()) == ""


def test_torch_needs_whole_sequences():
    trial = BENCHMARKS["dense_gqa.forward"](SETTING)
    with pytest.raises(RuntimeError, match="needs T = S, got 40 and 64"):
        PEERS["dense_gqa.forward"]["torch"](trial, trial.sets[0])


def test_the_loss_over_every_key_has_no_peer():
    assert peers_of(BENCHMARKS["dense_kl.forward"](WHOLE)) == {}
    assert set(peers_of(BENCHMARKS["indexer_kl.forward"](WHOLE))) == {"cudnn", "tilelang"}
    assert PEERS.keys() <= BENCHMARKS.keys()


def test_a_vendor_that_serves_is_no_peer_of_itself():
    trial = BENCHMARKS["sparse_mla.forward"](SETTING)
    served = dataclasses.replace(trial, choice=dataclasses.replace(trial.choice, name="flash_mla"))
    assert peers_of(trial).keys() - peers_of(served).keys() == {"flash_mla"}
