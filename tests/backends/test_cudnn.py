"""The conventions of cuDNN's DSA kernels, on stand-ins that keep them: the package needs a GPU."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dsattn import KeyRange
from dsattn.backends import Call, cudnn
from dsattn.ops import indexer_kl, indexer_scores, sparse_mla
from dsattn.ops.sparse_mla import backward_reference, forward_reference
from dsattn.selection import Selection
from dsattn.testing import Sizes, make_case, random_selection

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)


def attention_backward(q, kv, out, dout, lse, sink, index, softmax_scale, topk_length, deterministic):
    assert q.shape[1] % 64 == 0
    assert index.shape[1] % 64 == 0
    assert (sink == -torch.inf).all()
    rest = (q, kv, index, topk_length, None, out, lse, softmax_scale, deterministic)
    dq, dkv = backward_reference(dout, *rest)
    return {"dq": dq, "dkv": dkv}


def scores(q, k, w, ratio, sm_scale, q_causal_offsets):
    rows = torch.arange(q.shape[1], dtype=torch.int32) + q_causal_offsets
    keys = KeyRange(torch.zeros_like(rows), (rows + 1).clamp(max=k.shape[1]))
    return {"scores": indexer_scores(q[0], k[0, :, 0], w[0], keys)[None]}


def top_k(values, seq_lens, top_k, next_n, return_val, tie_break, deterministic):
    column = torch.arange(values.shape[1])
    best = values.masked_fill(column >= seq_lens[:, None], -torch.inf).topk(min(top_k, values.shape[1]), dim=1)
    index = best.indices.int().masked_fill(best.values == -torch.inf, -1)
    index = torch.nn.functional.pad(index, (0, top_k - index.shape[1]), value=-1)
    return {"indices": Selection.from_index(index).index if deterministic else index}


def target(q, k, lse, index, scale, qhead_per_kv_head, topk_length):
    q, k, lse, index = q[0], k[0], lse[0], index[0]
    assert q.shape[1] == qhead_per_kv_head
    assert q.shape[1] % 64 == 0
    logits = torch.einsum("thc,tnc->thn", q, k[index.clamp(min=0).long()]) * scale
    found = (logits - lse[..., None]).exp().sum(1)
    return {"target": found.masked_fill(index < 0, torch.nan)[None]}


def selected_scores(q, k, w, index):
    dot = torch.einsum("thd,tnd->thn", q, k[index.clamp(min=0).long()]).relu()
    return torch.einsum("thn,th->tn", dot, w).masked_fill(index < 0, -torch.inf)


def predict(q, k, w, index, qhead_per_kv_head, topk_length):
    share = selected_scores(q[0], k[0], w[0], index[0]).softmax(-1)
    return {"predict": share.masked_fill(index[0] < 0, torch.nan)[None]}


def loss_backward(q, w, k, attn_score, index_score, topk_indices, grad_loss, sm_scale, loss_coeff):
    assert q.shape[2] >= 64
    assert topk_indices.shape[2] % 128 == 0
    assert (topk_indices >= 0).all()
    q, w, k = (x[0].detach().requires_grad_() for x in (q, w, k))
    found = selected_scores(q, k, w, topk_indices[0])
    grad = torch.where(index_score[0] > 0, index_score[0] - attn_score[0], 0.0) * loss_coeff / q.shape[0]
    attn_score.fill_(torch.nan)
    grads = torch.autograd.grad(found, (q, w, k), grad * grad_loss)
    return dict(zip(("d_index_q", "d_weights", "d_index_k"), (x[None] for x in grads), strict=True))


@pytest.fixture(autouse=True)
def package(monkeypatch):
    module = ModuleType("cudnn")
    module.__spec__ = ModuleSpec("cudnn", None)
    module.DSA = SimpleNamespace(
        sparse_attention_backward_wrapper=attention_backward,
        indexer_forward_wrapper=scores,
        indexer_top_k_wrapper=top_k,
        sparse_attn_score_recompute_wrapper=target,
        sparse_indexer_score_recompute_wrapper=predict,
        indexer_backward_wrapper=loss_backward,
    )
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def case():
    return make_case("causal", Sizes(heads=5), poison=False)


@pytest.fixture
def selection(case):
    return random_selection(case.keys, case.layout.num_keys, 7, sparse_rows=False)


def test_backward_pads_heads_and_slots(case, selection):
    operands = (case.q, case.kv, selection.index, selection.length, None)
    saved = forward_reference(*operands, case.scale, 16)
    rest = (*operands, *saved, case.scale, False)
    grads = cudnn.sparse_mla_backward(case.grad_out, *rest), backward_reference(case.grad_out, *rest)
    for got, exact in zip(*grads, strict=True):
        torch.testing.assert_close(got, exact)


def test_backward_refuses_determinism_on_hopper(case):
    nothing = torch.empty(0)
    with pytest.raises(NotImplementedError, match="does not repeat bit for bit on Hopper"):
        cudnn.sparse_mla_backward(*[nothing] * 5, None, nothing, nothing, 1.0, True)


@pytest.mark.parametrize("block", [2**32, 4 * 97 * 10])
@pytest.mark.parametrize("first", [0, 40])
def test_select_keys_is_cut_into_rows(case, first, block, monkeypatch):
    monkeypatch.setattr(cudnn, "_SCORE_BYTES", block)
    rows = slice(first, None)
    index = cudnn.select_keys(case.q_i[rows], case.k_i, case.w[rows], first, 7, ascending=True)
    exact = indexer_scores(case.q_i, case.k_i, case.w, case.keys)[rows]
    best = exact.topk(7)
    right = Selection.from_index(best.indices.masked_fill(best.values == -torch.inf, -1))
    assert torch.equal(index, right.index)


def test_the_loss_and_its_gradients(case, selection):
    leaves = [x.clone().requires_grad_() for x in (case.q_i, case.k_i, case.w)]
    _, lse = sparse_mla(case.q, case.kv, selection, scale=case.scale, value_dim=16)
    exact = indexer_kl(*leaves, case.q, case.kv, lse, case.keys, selection, scale=case.scale)
    exact.backward()
    rows, indexer = len(case.q), (case.q_i, case.k_i, case.w)
    rest = (selection.index, selection.length, case.scale)
    kl, attention, share = cudnn.indexer_kl_forward(indexer, (case.q, case.kv, lse), *rest)
    torch.testing.assert_close(kl / rows, exact.detach())
    grads = cudnn.indexer_kl_backward(indexer, selection.index, attention, share, rows)
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize(
    ("change", "need"),
    [
        ({"deterministic": True}, "gradients that need not repeat, on Hopper"),
        ({"capability": 89}, "a Hopper or Blackwell data-centre GPU"),
        ({"value_width": 128}, "width 512 or 576 with 512 values"),
        ({"dtype": "float32"}, "bfloat16"),
    ],
)
def test_requirements(change, need):
    assert cudnn.requirements(CALL) == []
    assert cudnn.requirements(Call(**{**vars(CALL), **change})) == [need]
