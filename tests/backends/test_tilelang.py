"""The conventions of TileLang's kernels, on stand-ins that keep them: the packages need a GPU."""

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from dsattn import KeyRange
from dsattn.backends import Call, tilelang
from dsattn.errors import BackendUnavailable
from dsattn.ops import indexer_scores
from dsattn.ops.first_use import compare
from dsattn.ops.select import select_reference
from dsattn.ops.sparse_mla import backward_reference, forward_reference
from dsattn.testing import Sizes, make_case, random_selection

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)
OPS = "megatron.core.transformer.experimental_attention_variant.ops"


def lengths(index):
    return (index >= 0).sum(1, dtype=torch.int32)


def forward(q, kv, indices, sm_scale, d_v):
    assert kv.shape[1] == indices.shape[1] == 1
    index = indices[:, 0]
    assert q.isfinite().all(), "every row is multiplied"
    out, lse = forward_reference(q, kv[:, 0], index, lengths(index), None, sm_scale, d_v)
    empty = lse == -torch.inf
    return out.masked_fill(empty[..., None], torch.nan), (lse / math.log(2)).masked_fill(empty, 0.0)


def backward(q, kv, o, do, indices, lse, sm_scale):
    index = indices[:, 0]
    assert all(x.isfinite().all() for x in (q, o, do)), "every row is multiplied"
    assert lse.isfinite().all(), "rows without keys have 0"
    natural = (lse * math.log(2)).masked_fill(lengths(index)[:, None] == 0, -torch.inf)
    dq, dkv = backward_reference(do, q, kv[:, 0], index, lengths(index), None, o, natural, sm_scale, False)
    return dq, dkv[:, None]


def scores(q, kv, weights, start, stop, clean_logits, use_relu):
    found = indexer_scores(q, kv, weights, KeyRange(start, stop), relu=use_relu)
    return found if clean_logits else found.masked_fill(found == -torch.inf, torch.nan)


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


def test_first_use_checks_pass(no_sync):
    q, index = torch.empty(2, 16, 576), torch.empty(2, 7, dtype=torch.int32)
    given = (q, q[:, 0], index, index[:, 0], None, 0.1, 512)
    for finding in compare("sparse_mla.forward", tilelang.sparse_mla_forward, forward_reference, None, given):
        assert finding.error <= finding.limit, finding
    out, lse = q[..., :512], q[..., 0]
    given = (out, *given[:5], out, lse, 0.1, False)
    functions = (tilelang.sparse_mla_backward, backward_reference, forward_reference)
    for finding in compare("sparse_mla.backward", *functions, given):
        assert finding.error <= finding.limit, finding
    q = torch.empty(2, 8, 16)
    for relu in (True, False):
        given = (q, q[:, 0], q[..., 0], index[:, 0], index[:, 0], 9, relu, True, 2**12)
        for finding in compare("select_keys", tilelang.select_keys, select_reference, None, given):
            assert finding.error <= finding.limit, finding


def test_megatrons_topk_leaves_slots_empty(case):
    index = tilelang.topk_of_megatron(case.q_i, case.k_i, case.w, case.keys.start, case.keys.stop, 7)
    assert index.dtype == torch.int32
    assert torch.equal((index >= 0).sum(1), case.keys.lengths().clamp(max=7).long())
    assert (index < case.keys.stop[:, None]).all()
    few = tilelang.topk_of_megatron(case.q_i, case.k_i, case.w, case.keys.start, case.keys.stop, 1000)
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
    with pytest.raises(BackendUnavailable, match="no sink"):
        tilelang.sparse_mla_forward(nothing, nothing, nothing, nothing, case.sink, 1.0, 16)
    with pytest.raises(BackendUnavailable, match="repeat bit for bit"):
        tilelang.sparse_mla_backward(*[nothing] * 5, None, nothing, nothing, 1.0, True)


@pytest.mark.parametrize(
    ("change", "need"),
    [
        ({"heads": 48}, "a power of two of at least 16 heads"),
        ({"heads": 8}, "a power of two of at least 16 heads"),
        ({"width": 512}, "width 576 with 512 values"),
        ({"deterministic": True}, "gradients that need not repeat"),
        ({"top_k": 100}, "slots in multiples of 64"),
        ({"dtype": "float16"}, "bfloat16 operands, not float16"),
        ({"value_width": 0, "heads": 12}, "at most 64 indexer heads, in multiples of 8"),
    ],
)
def test_requirements(change, need):
    assert tilelang.requirements(CALL) == []
    assert tilelang.requirements(Call(**{**vars(CALL), "width": 128, "value_width": 0})) == []
    assert tilelang.requirements(Call(**{**vars(CALL), **change})) == [need]
