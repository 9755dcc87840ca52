"""FlashMLA's conventions, on stand-ins of each build: the package needs a GPU."""

import importlib.metadata
import inspect
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from dsattn import Layout
from dsattn.backends import Call, flash_mla, vendors
from dsattn.errors import BackendUnavailable
from dsattn.ops.first_use import compare
from dsattn.ops.sparse_mla import forward_reference
from dsattn.testing import Sizes, make_case, random_selection

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)


class Build:
    """One build. It checks what the package's own checks would refuse, and answers by the formula.

    base: of its log-sum-exp. seen: (heads, slots, options) of each call.
    """

    def __init__(self, base=math.e):
        self.base, self.seen = base, []

    def run(self, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, **options):
        rows, heads, width = q.shape
        assert heads in (64, 128)
        assert (d_v, kv.shape[1], indices.shape[1]) == (512, 1, 1)
        assert width in (512, 576)
        assert indices.shape[2] % 128 == 0
        assert indices.shape[2] > 0
        assert q.dtype == kv.dtype == torch.bfloat16
        assert indices.dtype == torch.int32
        assert rows > 0
        assert sm_scale > 0
        assert all(x.is_contiguous() for x in (q, kv, indices))
        if attn_sink is not None:
            assert (attn_sink.dtype, attn_sink.shape) == (torch.float32, (heads,))
            assert attn_sink.is_contiguous()
        self.seen.append((heads, indices.shape[2], options))
        slot = torch.arange(indices.shape[2])
        inside = (indices[:, 0] >= 0) & (indices[:, 0] < len(kv))
        if topk_length is not None:
            assert (topk_length.dtype, topk_length.shape) == (torch.int32, (rows,))
            assert topk_length.is_contiguous()
            inside &= slot < topk_length[:, None]
        q_ = q.float().masked_fill(~inside.any(1)[:, None, None], 0)
        key = kv[indices[:, 0].clamp(0, len(kv) - 1).long(), 0].float().masked_fill(~inside[..., None], 0)
        logits = torch.einsum("thc,tnc->thn", q_, key) * sm_scale
        logits = logits.masked_fill(~inside[:, None], -torch.inf)
        lse = logits.logsumexp(-1)
        whole = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.expand_as(lse))
        p = (logits - whole[..., None]).exp().masked_fill(~inside[:, None], 0)
        out = torch.einsum("thn,tnv->thv", p, key[..., :512]).to(q.dtype)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf) / math.log(self.base)
        return out, torch.full_like(lse, torch.nan), lse

    @property
    def sgl(self):
        def flash_mla_sparse_fwd(
            q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False, return_log2_lse=None
        ):
            if q.shape[2] == 576:
                assert use_legacy, "the current kernels are for width 512"
            return self.run(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, use_legacy=use_legacy)

        return flash_mla_sparse_fwd

    @property
    def tokenspeed(self):
        def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
            return self.run(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

        return flash_mla_sparse_fwd

    @property
    def first(self):
        def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
            return self.run(q, kv, indices, sm_scale, d_v, None, None)

        return flash_mla_sparse_fwd


@pytest.fixture
def install(monkeypatch):
    """Install a build: `install("sgl", base=2, major=9)` returns its stand-in."""

    def place(kind="sgl", base=math.e, major=9):
        build = Build(base)
        module = ModuleType("flash_mla")
        module.__spec__ = ModuleSpec("flash_mla", None)
        module.flash_mla_sparse_fwd = getattr(build, kind)
        monkeypatch.setitem(sys.modules, "flash_mla", module)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        return build

    return place


def given(heads, width, slots, sink, scale=0.1):
    q, index = torch.empty(2, heads, width, dtype=torch.bfloat16), torch.empty(2, slots, dtype=torch.int32)
    return (q, q[:, 0], index, index[:, 0], torch.empty(heads) if sink else None, scale, 512)


@pytest.mark.parametrize(
    ("kind", "major", "base", "heads", "width", "slots", "sink"),
    [
        ("sgl", 9, math.e, 5, 576, 7, True),
        ("sgl", 9, 2, 64, 512, 130, False),
        ("sgl", 9, math.e, 65, 512, 1, True),
        ("sgl", 10, math.e, 5, 512, 7, False),
        ("sgl", 10, math.e, 5, 576, 7, False),
        ("tokenspeed", 10, math.e, 5, 576, 7, True),
        ("first", 9, 2, 5, 512, 7, True),
    ],
)
def test_is_the_reference(kind, major, base, heads, width, slots, sink, install, no_sync):
    build = install(kind, base, major)
    operands = given(heads, width, slots, sink)

    def run(*case):
        with no_sync():
            results = flash_mla.sparse_mla_forward(*case)
        assert all(x.is_contiguous() for x in results), "as the operation's fake says"
        return results

    flash_mla.sparse_mla_forward(*make_operands(heads, width, slots))  # measures the base
    for finding in compare("sparse_mla.forward", run, forward_reference, None, operands):
        assert finding.error <= finding.limit, finding
    *padded, options = build.seen[-1]
    assert padded == [64 if heads <= 64 else 128, 256 if slots == 130 else 128]
    if kind == "sgl":
        assert options["use_legacy"] == (major == 9 or width == 576)


def make_operands(heads=4, width=576, slots=9, scale=0.1):
    case = make_case(Layout.packed([9, 0, 1, 14]), Sizes(heads=heads))
    selection = random_selection(case.keys, case.layout.num_keys, slots)
    q = torch.randn(case.layout.keys.num_rows, heads, width).bfloat16()
    kv = torch.randn(case.layout.num_keys, width).bfloat16()
    return (q, kv, selection.index, selection.length, None, scale, 512)


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_any_scale(scale, install):
    install()
    operands = make_operands(scale=scale)
    for got, exact in zip(flash_mla.sparse_mla_forward(*operands), forward_reference(*operands), strict=True):
        torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2)


def test_the_base_is_measured_once_a_device_and_a_lie_is_seen(install):
    build = install(base=2)
    operands = make_operands()
    for _ in range(3):
        _, lse = flash_mla.sparse_mla_forward(*operands)
    assert len(build.seen) == 4
    torch.testing.assert_close(lse, forward_reference(*operands)[1], rtol=1e-2, atol=1e-2)
    build = install(base=10)
    with pytest.raises(BackendUnavailable, match=r"gives 0\.30\d* as the log-sum-exp of two zeros"):
        flash_mla.sparse_mla_forward(*operands)


def test_nothing_is_measured_inside_a_graph(install, monkeypatch):
    install()
    monkeypatch.setattr(flash_mla, "is_capturing", lambda x: True)
    with pytest.raises(BackendUnavailable, match="run the call once before the capture"):
        flash_mla.sparse_mla_forward(*make_operands())


@pytest.mark.parametrize("empty", [0, 1])
def test_nothing_to_do(empty, install):
    build = install()
    operands = [
        x[:0] if isinstance(x, torch.Tensor) and i in ((0, 2, 3) if empty == 0 else (1,)) else x
        for i, x in enumerate(make_operands())
    ]
    out, lse = flash_mla.sparse_mla_forward(*operands)
    assert out.shape == (len(operands[0]), 4, 512)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert build.seen == []


@pytest.mark.parametrize(
    ("build", "change", "needs"),
    [
        ("sgl-flash-mla", {}, []),
        ("sgl-flash-mla", {"capability": 100}, []),
        ("sgl-flash-mla", {"dtype": "float32"}, ["bfloat16 operands, not float32"]),
        ("sgl-flash-mla", {"capability": 80}, ["compute capability 9.0 or 10.0 or 10.3 for sgl-flash-mla"]),
        ("tokenspeed-flashmla", {}, ["compute capability 10.0 or 10.3 for tokenspeed-flashmla"]),
        ("tokenspeed-flashmla", {"capability": 103}, []),
        ("", {}, []),
        ("sgl-flash-mla", {"width": 192}, ["width 512 or 576 with 512 values"]),
        ("sgl-flash-mla", {"value_width": 511}, ["width 512 or 576 with 512 values"]),
        ("sgl-flash-mla", {"heads": 128}, []),
        ("sgl-flash-mla", {"heads": 129}, ["at most 128 heads"]),
    ],
)
def test_requirements(build, change, needs, monkeypatch):
    def version(name):
        if name != build:
            raise importlib.metadata.PackageNotFoundError
        return "1.0.0.post20260924"

    monkeypatch.setattr(importlib.metadata, "version", version)
    vendors.version_of.cache_clear()
    try:
        assert flash_mla.requirements(Call(**{**vars(CALL), **change})) == needs
    finally:
        vendors.version_of.cache_clear()


def test_signatures_of_the_stand_ins_are_those_that_were_published():
    """What tells builds apart: sgl-flash-mla 1.0.0, tokenspeed-flashmla 20260924, flash-mla of 2025."""
    told = {"use_legacy", "topk_length", "attn_sink"}
    found = {
        kind: told & inspect.signature(getattr(Build(), kind)).parameters.keys()
        for kind in ("sgl", "tokenspeed", "first")
    }
    assert found == {"sgl": told, "tokenspeed": {"topk_length", "attn_sink"}, "first": set()}
