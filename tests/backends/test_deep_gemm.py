"""DeepGEMM's conventions, on stand-ins of its generations: the package needs a GPU."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from dsattn import Layout
from dsattn.backends import Call, deep_gemm
from dsattn.errors import BackendUnavailable
from dsattn.ops import indexer_scores
from dsattn.ops.first_use import compare
from dsattn.ops.select import low_precision_reference, topk_reference
from dsattn.testing import Sizes, make_case

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=32, width=128, top_k=2048, precision="fp8")
KEYS = {"causal": Layout.causal(40), "packed": Layout.packed([7, 0, 33]), "zigzag": Layout.packed([40], cp_size=2)}


def dequantised(x, scale):
    """E4M3 by the packed powers of two of its blocks."""
    exponents = torch.stack([(scale >> (8 * i)) & 255 for i in range(4)], -1) - 127
    return (x.float().unflatten(-1, (4, 32)) * 2.0 ** exponents[..., None]).flatten(-2)


class Package:
    """The formula, in rows of padded columns; what nobody asked to clean holds NaN or huge numbers."""

    def __init__(self):
        self.seen = []

    def logits(self, q, kv, weights, start, stop, clean):
        k, k_scale = kv
        q, q_scale = q if isinstance(q, tuple) else (q, None)
        rows, heads, width = q.shape
        assert q.dtype == k.dtype == torch.float8_e4m3fn
        assert weights.dtype == torch.float32
        assert weights.shape == (rows, heads)
        assert start.dtype == stop.dtype == torch.int32
        assert all(x.is_contiguous() for x in (q, k, k_scale, weights, start, stop))
        with _disable_current_modes():  # the stand-in may look at values, the adapter may not
            assert (start >= 0).all()
            assert (stop >= start).all()
            assert (stop <= len(k)).all()
        self.seen.append(rows)
        if q_scale is None:
            assert k_scale.dtype == torch.float32
            assert heads in (32, 64)
            assert width in (32, 64, 128)
            dot = torch.einsum("thd,sd->ths", q.float(), k.float()).relu()
            scores = torch.einsum("ths,th->ts", dot, weights) * k_scale
        else:
            assert q_scale.dtype == k_scale.dtype == torch.int32
            assert q_scale.shape == (rows, heads)
            assert heads in (8, 16, 32, 64)
            assert width == 128
            dot = torch.einsum("thd,sd->ths", dequantised(q, q_scale), dequantised(k, k_scale)).relu()
            scores = torch.einsum("ths,th->ts", dot, weights)
        column = torch.arange(len(k))
        outside = torch.where(column % 2 == 0, torch.nan, 3e38)
        hidden = (column < start[:, None]) | (column >= stop[:, None])
        scores = torch.where(hidden, torch.full((), -torch.inf) if clean else outside, scores)
        return pad(scores, (0, 256), value=torch.inf)

    def first(self):
        def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=True):
            return self.logits(q, kv, weights, ks, ke, clean_logits)

        return {"fp8_mqa_logits": fp8_mqa_logits}

    def second(self):
        def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):
            assert max_seqlen_k == 0
            return self.logits(q, kv, weights, ks, ke, clean_logits)

        def fp8_fp4_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0, logits_dtype=torch.float):
            assert (max_seqlen_k, logits_dtype) == (0, torch.float)
            return self.logits(q, kv, weights, ks, ke, clean_logits)

        return {"fp8_mqa_logits": fp8_mqa_logits, "fp8_fp4_mqa_logits": fp8_fp4_mqa_logits}

    def third(self):
        def fp8_fp4_mqa_logits(q, kv, weights, ks, ke, max_seqlen_k, schedule_meta=None):
            assert max_seqlen_k == 0
            return self.logits(q, kv, weights, ks, ke, False)

        return {"fp8_fp4_mqa_logits": fp8_fp4_mqa_logits}


@pytest.fixture
def install(monkeypatch):
    def place(generation):
        package, module = Package(), ModuleType("deep_gemm")
        vars(module).update(getattr(package, generation)())
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        return package

    monkeypatch.setattr(deep_gemm, "_compiled", set())
    monkeypatch.setattr(deep_gemm, "_device", [])
    return place


def operands(keys, heads=32, width=128):
    """NaN in what no row reads."""
    num_keys = 40
    q, k, w = torch.randn(keys.num_rows, heads, width), torch.randn(num_keys, width), torch.randn(keys.num_rows, heads)
    q[keys.start >= keys.stop] = torch.nan
    k[~keys.mask(num_keys).any(0)] = torch.nan
    return q.bfloat16(), k.bfloat16(), w


@pytest.mark.parametrize(
    ("generation", "precision", "heads"),
    [
        *[(generation, "fp8", heads) for generation in ("first", "second", "third") for heads in (32, 64)],
        *[(generation, "mxfp8", heads) for generation in ("second", "third") for heads in (8, 16, 32, 64)],
    ],
)
@pytest.mark.parametrize("name", KEYS)
def test_selects_by_the_scores_of_rounded_operands(generation, precision, name, heads, install):
    package = install(generation)
    keys = KEYS[name].keys
    q, k, w = operands(keys, heads)
    held = deep_gemm.quantized(q, k, w, precision)
    if precision == "mxfp8":
        rounded = (dequantised(held.q, held.q_scale), dequantised(held.k, held.k_scale), held.w)
    else:
        rounded = (held.q.float(), held.k.float() * held.k_scale[:, None], held.w)
    scores = indexer_scores(*rounded, keys)
    exact = topk_reference(scores, keys.start, keys.stop, 7)
    for rows in (1, 64):
        got = deep_gemm.select_keys(q, k, w, keys.start, keys.stop, 7, True, True, 4 * 512 * rows, precision)
        for index, found in ((exact[0], scores), (got[0], scores)):  # equal but for sums in another order
            best = found.gather(1, index.clamp(min=0).long()).masked_fill(index < 0, 0)
            right = scores.gather(1, exact[0].clamp(min=0).long()).masked_fill(exact[0] < 0, 0)
            torch.testing.assert_close(best.sort(1).values, right.sort(1).values)
        assert torch.equal(got[1], exact[1])
        assert got[2].shape == (keys.num_rows, 0), "the operator makes the scores"
    assert package.seen == [1] * keys.num_rows + [keys.num_rows]


@pytest.mark.parametrize("generation", ["first", "second", "third"])
def test_scores_are_those_of_the_operands_up_to_fp8(generation, install):
    install(generation)
    case = make_case("causal", Sizes(index_heads=32, index_width=32), poison=False)
    scores = deep_gemm.indexer_scores(
        deep_gemm.quantized(case.q_i, case.k_i, case.w, "fp8"), case.keys.start, case.keys.stop
    )
    exact = indexer_scores(case.q_i, case.k_i, case.w, case.keys)
    assert scores.shape == exact.shape
    visible = exact.isfinite()
    assert torch.equal(visible, scores.isfinite())
    assert (scores - exact)[visible].norm() < 0.05 * exact[visible].norm()


def test_mxfp8_words_hold_the_exponents_of_a_vectors_blocks(install):
    k = torch.zeros(3, 128)
    k[0, :32], k[0, 32:64], k[1] = 448.0, 449.0, 3.5
    held = deep_gemm.quantized(k[:, None], k, torch.ones(3, 1), "mxfp8")
    exponents = torch.stack([(held.k_scale >> (8 * i)) & 255 for i in range(4)], -1) - 127
    assert exponents[0].tolist()[:2] == [0, 1]
    assert exponents[1].tolist() == [-7] * 4, "3.5 * 2^7 = 448"
    assert torch.equal(held.q_scale[:, 0], held.k_scale)
    torch.testing.assert_close(dequantised(held.k, held.k_scale), k, rtol=0.07, atol=0)


@pytest.mark.parametrize(("generation", "precision"), [("first", "fp8"), ("third", "fp8"), ("second", "mxfp8")])
def test_first_use_check_passes(generation, precision, install, no_sync):
    install(generation)
    q = torch.empty(2, 32, 128, dtype=torch.bfloat16)
    given = (q, q[:, 0], q[..., 0], torch.empty(2), torch.empty(2), 9, True, False, 2**20, precision)

    def run(*case):
        with no_sync():
            return deep_gemm.select_keys(*case)

    for finding in compare("select_keys", run, low_precision_reference, None, given):
        assert finding.error <= finding.limit, finding


def test_graphs_and_devices(install, monkeypatch):
    install("second")
    keys = KEYS["causal"].keys
    q, k, w = operands(keys)
    monkeypatch.setattr(deep_gemm, "is_capturing", lambda x: True)
    with pytest.raises(BackendUnavailable, match="has not run with 32 heads of 128 yet"):
        deep_gemm.select_keys(q, k, w, keys.start, keys.stop, 7, True, False, 2**20, "fp8")
    monkeypatch.setattr(deep_gemm, "is_capturing", lambda x: False)
    deep_gemm.select_keys(q, k, w, keys.start, keys.stop, 7, True, False, 2**20, "fp8")
    monkeypatch.setattr(deep_gemm, "is_capturing", lambda x: True)
    deep_gemm.select_keys(q, k, w, keys.start, keys.stop, 7, True, False, 2**20, "fp8")
    monkeypatch.setattr(deep_gemm, "_device", [torch.device("cuda", 1)])
    with pytest.raises(BackendUnavailable, match="one device of a process, cuda:1, not cpu"):
        deep_gemm.select_keys(q, k, w, keys.start, keys.stop, 7, True, False, 2**20, "fp8")


def test_what_failed_has_not_run(install, monkeypatch):
    """A graph must not find a kernel that was never made."""
    package = install("first")
    keys = KEYS["causal"].keys
    given = (*operands(keys), keys.start, keys.stop, 7, True, False, 2**20, "fp8")
    monkeypatch.setattr(package, "logits", None)
    with pytest.raises(TypeError):
        deep_gemm.select_keys(*given)
    monkeypatch.setattr(deep_gemm, "is_capturing", lambda x: True)
    with pytest.raises(BackendUnavailable, match="has not run with 32 heads of 128 yet"):
        deep_gemm.select_keys(*given)


def test_refuses(install):
    install("first")
    keys = KEYS["causal"].keys
    given = (*operands(keys), keys.start, keys.stop, 7)
    with pytest.raises(BackendUnavailable, match="scores have a relu"):
        deep_gemm.select_keys(*given, False, False, 2**20, "fp8")
    with pytest.raises(BackendUnavailable, match="this deep_gemm has no fp8_fp4_mqa_logits"):
        deep_gemm.select_keys(*given, True, False, 2**20, "mxfp8")


def test_nothing_to_select(install):
    package = install("second")
    q, k, w = operands(KEYS["causal"].keys)
    keys = KEYS["causal"].keys
    for given in ((q[:0], k, w[:0], keys.start[:0], keys.stop[:0]), (q, k[:0], w, keys.start, keys.stop)):
        index, length, score = deep_gemm.select_keys(*given, 7, True, True, 2**20, "fp8")
        assert (index.shape, score.shape) == ((len(given[0]), 7), (len(given[0]), 0))
        assert not length.any()
    assert package.seen == []


@pytest.mark.parametrize(
    ("keys", "block", "rows"),
    [(1, 2**20, 512), (256, 2**20, 512), (257, 2**20, 341), (2**20, 1, 1), (2**20, 2**50, 2047)],
)
def test_rows_of_a_call(keys, block, rows):
    assert deep_gemm.rows_per_call(keys, block) == rows


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({}, []),
        ({"precision": "bf16"}, ["precision 'fp8' or 'mxfp8'"]),
        ({"precision": "mxfp8"}, ["a Blackwell data-centre GPU for mxfp8"]),
        ({"precision": "mxfp8", "capability": 100}, []),
        ({"precision": "mxfp8", "capability": 100, "width": 64}, ["an indexer width of 128"]),
        ({"heads": 16}, ["32 or 64 indexer heads"]),
        ({"heads": 16, "capability": 103}, []),
        ({"width": 32}, []),
        ({"width": 96}, ["an indexer width of 32, 64 or 128"]),
        ({"capability": 80}, ["a Hopper or Blackwell data-centre GPU"]),
    ],
)
def test_requirements(change, needs):
    assert deep_gemm.requirements(Call(**{**vars(CALL), **change})) == needs
