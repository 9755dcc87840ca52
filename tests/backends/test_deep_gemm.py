"""DeepGEMM's conventions, on a stand-in that keeps them: the package needs a GPU."""

import sys
from types import ModuleType

import pytest
import torch

from dsattn.backends import deep_gemm
from dsattn.ops import indexer_scores
from dsattn.testing import Sizes, make_case


@pytest.fixture
def padded_columns(monkeypatch):
    """A stand-in that writes more columns than there are keys, as the package does."""

    def fp8_mqa_logits(q, kv, weights, start, stop, clean_logits):
        k, scale = kv
        assert q.dtype == k.dtype == torch.float8_e4m3fn
        assert weights.dtype == scale.dtype == torch.float32
        assert clean_logits
        dot = torch.einsum("thd,sd->ths", q.float(), k.float()).relu()
        scores = torch.einsum("ths,th->ts", dot, weights) * scale
        column = torch.arange(k.shape[0])
        hidden = (column < start[:, None]) | (column >= stop[:, None])
        return torch.nn.functional.pad(scores.masked_fill(hidden, -torch.inf), (0, 3), value=torch.nan)

    module = ModuleType("deep_gemm")
    module.fp8_mqa_logits = fp8_mqa_logits
    monkeypatch.setitem(sys.modules, "deep_gemm", module)


def test_scores_are_those_of_the_operands_up_to_fp8(padded_columns):
    case = make_case("causal", Sizes(index_heads=32, index_width=32), poison=False)
    scores = deep_gemm.indexer_scores(deep_gemm.quantize(case.q_i, case.k_i, case.w), case.keys.start, case.keys.stop)
    exact = indexer_scores(case.q_i, case.k_i, case.w, case.keys)
    assert scores.shape == exact.shape
    visible = exact.isfinite()
    assert torch.equal(visible, scores.isfinite())
    assert (scores - exact)[visible].norm() < 0.05 * exact[visible].norm()


def test_large_and_zero_vectors_survive():
    q = torch.zeros(2, 1, 32)
    q[0] = 1e6
    fp8 = deep_gemm.quantize(q, torch.full((3, 32), 1e-6), torch.ones(2, 1))
    assert fp8.q.float().isfinite().all()
    torch.testing.assert_close(fp8.q[0].float() * fp8.w[0, 0], q[0])
    assert not fp8.q[1].float().any()
    torch.testing.assert_close(fp8.k.float() * fp8.k_scale[:, None], torch.full((3, 32), 1e-6))
