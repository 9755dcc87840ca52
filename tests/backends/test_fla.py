"""fla's conventions, on a stand-in that keeps them: the package needs a GPU."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from dsattn.backends import Call, fla
from dsattn.ops.kda import kda_reference

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=128, value_width=128)
LENGTHS = [5, 1, 9]


@pytest.fixture
def calls(monkeypatch):
    """What the stand-in was asked for; it checks what the package's own checks would refuse."""
    seen = []

    def chunk_kda(q, k, v, g, beta, **options):
        assert all(x.shape[0] == 1 and x.is_contiguous() for x in (q, k, v, g, beta))
        state, ends = options["initial_state"], options["cu_seqlens"]
        assert state is None or (state.dtype == torch.float32 and len(state) == len(ends) - 1)
        assert ends.dtype == torch.int64
        assert torch.equal(ends, options["cu_seqlens_cpu"])
        assert options["use_qk_l2norm_in_kernel"]
        assert options["output_final_state"]
        seen.append(options["safe_gate"])
        out, last = kda_reference(*(x[0] for x in (q, k, v, g, beta)), ends.diff().tolist(), state)
        return out[None], last

    package, ops, module = (ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.kda"))
    package.__spec__ = ModuleSpec("fla", None)
    module.chunk_kda = chunk_kda
    for one in (package, ops, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return seen


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_documents_become_one_batch(bounded, with_state, calls):
    q, k, v = torch.randn(3, 2, 15, 8).transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, -1, 4).unbind(0)
    q, k, v = (x.flatten(-2) for x in (q, k, v))
    decay, beta = -torch.rand(15, 2, 32), torch.rand(2, 15).T
    state = torch.randn(3, 2, 32, 32, dtype=torch.float64).transpose(2, 3) if with_state else None
    got = fla.kda(q, k, v, decay, beta, LENGTHS, state, bounded)
    wanted = kda_reference(q, k, v, decay, beta, LENGTHS, None if state is None else state.float())
    for one, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, exact)
    assert calls == [bounded]


@pytest.mark.parametrize(
    ("change", "need"),
    [
        ({"device": "cpu"}, "a CUDA GPU"),
        ({"capability": 75}, "Ampere or newer"),
        ({"dtype": "float64"}, "bfloat16, float16 or float32"),
        ({"width": 512}, "heads of at most 256"),
    ],
)
def test_requirements(change, need, calls):
    assert fla.requirements(CALL) == []
    assert fla.requirements(Call(**{**vars(CALL), **change})) == [need]


def test_requirements_without_the_package(monkeypatch):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert fla.requirements(CALL) == ["the package fla (fla-core)"]
