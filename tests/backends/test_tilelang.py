"""The conventions of TileLang's kernels, on stand-ins that keep them: the packages need a GPU."""

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from dsattn.backends import Call, tilelang
from dsattn.ops import indexer_scores
from dsattn.ops.sparse_mla import backward_reference, forward_reference
from dsattn.testing import Sizes, make_case, random_selection

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)
OPS = "megatron.core.transformer.experimental_attention_variant.ops"


def lengths(index):
    return (index >= 0).sum(1, dtype=torch.int32)


def forward(q, kv, indices, sm_scale, d_v):
    assert kv.shape[1] == indices.shape[1] == 1
    index = indices[:, 0]
    out, lse = forward_reference(q, kv[:, 0], index, lengths(index), None, sm_scale, d_v)
    return out, (lse / math.log(2)).masked_fill(lse == -torch.inf, 0.0)


def backward(q, kv, o, do, indices, lse, sm_scale):
    index = indices[:, 0]
    assert lse.isfinite().all(), "rows without keys have 0"
    natural = (lse * math.log(2)).masked_fill(lengths(index)[:, None] == 0, -torch.inf)
    dq, dkv = backward_reference(do, q, kv[:, 0], index, lengths(index), None, o, natural, sm_scale, False)
    return dq, dkv[:, None]


def scores(q, kv, weights, start, stop, clean_logits):
    from dsattn import KeyRange

    return indexer_scores(q, kv, weights, KeyRange(start, stop))


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    functions = {
        "tilelang_sparse_mla_fwd": {"sparse_mla_fwd_interface": forward},
        "tilelang_sparse_mla_bwd": {"sparse_mla_bwd": backward},
        "tilelang_indexer_fwd": {"indexer_fwd_interface": scores},
        "tilelang_indexer_bwd": {"indexer_bwd_interface": lambda q, w, k, index, grad: (q, w, k)},
        "tilelang_indexer_loss": {
            "sparse_indexer_target_interface": lambda q, k, index, scale: torch.ones(index.shape),
            "sparse_indexer_kl_interface": lambda target, score, valid: (target[valid].sum(), score * valid),
        },
    }
    for name in ("tilelang", "megatron", *(f"{OPS}.{file}" for file in functions)):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(functions.get(name.rpartition(".")[2], {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def case():
    return make_case("causal", Sizes(heads=16), poison=False)


def test_attention_has_a_natural_log_sum_exp(case):
    selection = random_selection(case.keys, case.layout.num_keys, 7)
    operands = (case.q, case.kv, selection.index, selection.length, None, case.scale, 16)
    out, lse = tilelang.sparse_mla_forward(*operands)
    exact = forward_reference(*operands)
    for got, right in zip((out, lse), exact, strict=True):
        torch.testing.assert_close(got, right)
    rest = (case.q, case.kv, selection.index, selection.length, None, *exact, case.scale, False)
    grads = tilelang.sparse_mla_backward(case.grad_out, *rest), backward_reference(case.grad_out, *rest)
    for got, right in zip(*grads, strict=True):
        torch.testing.assert_close(got, right)


def test_select_keys_leaves_slots_empty(case):
    index = tilelang.select_keys(case.q_i, case.k_i, case.w, case.keys.start, case.keys.stop, 7)
    assert index.dtype == torch.int32
    assert torch.equal((index >= 0).sum(1), case.keys.lengths().clamp(max=7).long())
    assert (index < case.keys.stop[:, None]).all()
    few = tilelang.select_keys(case.q_i, case.k_i, case.w, case.keys.start, case.keys.stop, 1000)
    assert few.shape[1] == case.layout.num_keys


def test_the_loss_masks_empty_slots_and_orders_its_gradients(case):
    index = random_selection(case.keys, case.layout.num_keys, 7).index
    kl, grad = tilelang.indexer_kl_forward(case.q, case.kv, index, torch.ones(index.shape), case.scale)
    assert kl == (index >= 0).sum()
    assert torch.equal(grad != 0, index >= 0)
    grads = tilelang.indexer_kl_backward((case.q_i, case.k_i, case.w), index, grad)
    assert [x.shape for x in grads] == [x.shape for x in (case.q_i, case.k_i, case.w)]


def test_refuses_what_the_kernels_lack(case):
    nothing = torch.empty(0)
    with pytest.raises(NotImplementedError, match="no sink"):
        tilelang.sparse_mla_forward(nothing, nothing, nothing, nothing, case.sink, 1.0, 16)
    with pytest.raises(NotImplementedError, match="repeat bit for bit"):
        tilelang.sparse_mla_backward(*[nothing] * 5, None, nothing, nothing, 1.0, True)


@pytest.mark.parametrize(
    ("change", "need"),
    [
        ({"heads": 48}, "a power of two of at least 16 heads"),
        ({"heads": 8}, "a power of two of at least 16 heads"),
        ({"width": 512}, "width 576 with 512 values"),
        ({"deterministic": True}, "gradients that need not repeat"),
        ({"dtype": "float16"}, "bfloat16"),
    ],
)
def test_requirements(change, need):
    assert tilelang.requirements(CALL) == []
    assert tilelang.requirements(Call(**{**vars(CALL), **change})) == [need]
