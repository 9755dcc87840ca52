"""FlashMLA's conventions, on a stand-in that keeps them: the package needs a GPU."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from dsattn.backends import Call, flash_mla
from dsattn.ops.sparse_mla import forward_reference
from dsattn.testing import Sizes, make_case, random_selection

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)


@pytest.fixture
def calls(monkeypatch):
    """What the stand-in was asked for; it checks what the package's own checks would refuse."""
    seen = []

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, use_legacy):
        assert q.shape[1] in (64, 128)
        assert kv.shape[1] == indices.shape[1] == 1
        assert indices.shape[2] % 128 == 0
        assert all(x.is_contiguous() for x in (q, kv, indices, topk_length))
        assert attn_sink is None or attn_sink.shape == (q.shape[1],)
        seen.append({"heads": q.shape[1], "legacy": use_legacy})
        out, lse = forward_reference(q, kv[:, 0], indices[:, 0], topk_length, attn_sink, sm_scale, d_v)
        return out, lse, lse.masked_fill(topk_length[:, None] == 0, torch.inf)

    module = ModuleType("flash_mla")
    module.__spec__ = ModuleSpec("flash_mla", None)
    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return seen


@pytest.mark.parametrize(("heads", "padded"), [(4, 64), (64, 64), (65, 128)])
@pytest.mark.parametrize("sink", [False, True])
def test_heads_and_slots_are_padded_and_cut_again(heads, padded, sink, calls):
    case = make_case("causal", Sizes(heads=heads))
    selection = random_selection(case.keys, case.layout.num_keys, 7)
    sink = case.sink if sink else None
    operands = (case.q, case.kv, selection.index, selection.length, sink, case.scale, 16)
    for got, exact in zip(flash_mla.sparse_mla_forward(*operands), forward_reference(*operands), strict=True):
        torch.testing.assert_close(got, exact)
    assert calls == [{"heads": padded, "legacy": True}]


def test_rows_without_keys_have_minus_infinity(calls):
    case = make_case("causal", Sizes(heads=2))
    selection = random_selection(case.keys, case.layout.num_keys, 7)
    empty = selection.length == 0
    assert empty.any()
    _, lse = flash_mla.sparse_mla_forward(*(case.q, case.kv, selection.index, selection.length, None, case.scale, 16))
    assert (lse[empty] == -torch.inf).all()
    assert lse[~empty].isfinite().all()


@pytest.mark.parametrize(
    ("change", "need"),
    [
        ({"dtype": "float32"}, "bfloat16"),
        ({"capability": 80}, "a Hopper or Blackwell data-centre GPU"),
        ({"width": 192}, "width 512 or 576 with 512 values"),
        ({"heads": 129}, "at most 128 heads"),
    ],
)
def test_requirements(change, need, calls):
    assert flash_mla.requirements(CALL) == []
    assert flash_mla.requirements(Call(**{**vars(CALL), **change})) == [need]


def test_requirements_without_the_package(monkeypatch):
    monkeypatch.setattr(flash_mla.importlib.util, "find_spec", lambda name: None)
    assert flash_mla.requirements(CALL) == ["the package flash_mla (sgl-flash-mla)"]
