"""The glue between trials and vendors, whose functions are replaced by ours: the packages need a GPU."""

import dataclasses

import pytest
import torch

from dsattn import KeyRange
from dsattn.backends import cudnn, deep_gemm, flash_mla, tilelang
from dsattn.bench import peers
from dsattn.bench.cases import SHAPES, Setting
from dsattn.bench.peers import PEERS, disagreement, peers_of
from dsattn.bench.run import BENCHMARKS
from dsattn.ops import indexer_kl, indexer_scores
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


def loss_of(indexer, attention, index, length, scale):
    return indexer_kl(*indexer, *attention, causal(64 - len(index), len(index)), Selection(index, length), scale=scale)


@pytest.fixture
def vendors(monkeypatch):
    """Every vendor's function, by our own; gradients of the loss by autograd, from what the forward returned."""
    for vendor in (flash_mla, tilelang):
        monkeypatch.setattr(vendor, "sparse_mla_forward", forward_reference)
    for vendor in (cudnn, tilelang):
        monkeypatch.setattr(vendor, "sparse_mla_backward", backward_reference)

    def scores(q, k, w, start, stop):
        return indexer_scores(q, k, w, KeyRange(start, stop))

    def cudnn_keys(q, k, w, first, top_k, *, ascending=False):
        index = select(indexer_scores(q, k, w, causal(first, len(q))), top_k)
        return Selection.from_index(index).index if ascending else index

    def forward(indexer, attention, index, length, scale):
        leaves = tuple(x.detach().requires_grad_() for x in indexer)
        kl = loss_of(leaves, attention, index, length, scale) * len(index)
        return kl.detach(), (kl, leaves), torch.ones(index.shape)

    class Target(tuple):
        def clone(self):
            return self

    def grads(indexer, index, target, share, divisor):
        kl, leaves = target
        return torch.autograd.grad(kl / divisor, leaves, retain_graph=True)

    def cudnn_forward(*operands):
        kl, target, share = forward(*operands)
        return kl, Target(target), share

    monkeypatch.setattr(cudnn, "select_topk", lambda s, stop, k: select(_below(s, stop), k))
    monkeypatch.setattr(cudnn, "select_keys", cudnn_keys)
    monkeypatch.setattr(cudnn, "indexer_kl_forward", cudnn_forward)
    monkeypatch.setattr(cudnn, "indexer_kl_backward", grads)
    monkeypatch.setattr(tilelang, "indexer_scores", scores)
    monkeypatch.setattr(tilelang, "select_keys", lambda q, k, w, a, b, top_k: select(scores(q, k, w, a, b), top_k))
    monkeypatch.setattr(
        deep_gemm, "indexer_scores", lambda fp8, a, b: scores(fp8.q.float(), fp8.k.float(), fp8.w, a, b)
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
    real = cudnn.select_topk
    monkeypatch.setattr(cudnn, "select_topk", lambda *given: ranked.append(1) or real(*given))
    PEERS["select_keys"]["deep_gemm"](trial, trial.sets[0])()
    assert bool(ranked) == installed


def test_torch_needs_whole_sequences():
    trial = BENCHMARKS["dense_gqa.forward"](SETTING)
    with pytest.raises(RuntimeError, match="needs T = S, got 40 and 64"):
        PEERS["dense_gqa.forward"]["torch"](trial, trial.sets[0])


def test_the_loss_over_every_key_has_no_peer():
    assert peers_of(BENCHMARKS["dense_kl.forward"](WHOLE)) == {}
    assert set(peers_of(BENCHMARKS["indexer_kl.forward"](WHOLE))) == {"cudnn", "tilelang"}
    assert PEERS.keys() <= BENCHMARKS.keys()


def test_other_results_are_seen():
    trial = BENCHMARKS["sparse_mla.forward"](SETTING)
    out, lse = trial.prepare(trial.sets[0])()
    assert "result 1 differs by 30.7% from ours" in disagreement(
        trial, "flash_mla", (out, lse), (out, lse / 0.693 * 0.906)
    )
    assert "result 0" in disagreement(trial, "flash_mla", (out, lse), (out * torch.nan, lse))
    chosen = BENCHMARKS["select_keys"](SETTING)
    index = chosen.prepare(chosen.sets[0])()
    other = index.roll(1, 0)
    assert "other keys" in disagreement(chosen, "cudnn", index, other)
    assert disagreement(chosen, "cudnn", index, index.flip(1)) == ""
