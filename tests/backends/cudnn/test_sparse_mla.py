"""The backward on stand-ins of each generation, against the reference, with hostile rows."""

import pytest
import torch

from dsattn.backends import Call
from dsattn.backends.cudnn import sparse_mla
from dsattn.errors import BackendUnavailable
from dsattn.ops.first_use import compare
from dsattn.ops.sparse_mla import backward_reference, forward_reference

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)


def given(heads, width, slots, sink, scale=0.125):
    """Arguments whose shapes a small case is made from."""
    bf16, fp32 = torch.bfloat16, torch.float32
    q, out = torch.empty(3, heads, width, dtype=bf16), torch.empty(3, heads, 512, dtype=bf16)
    index = torch.empty(3, slots, dtype=torch.int32)
    sink = torch.empty(heads, dtype=fp32) if sink else None
    kv = torch.empty(5, width, dtype=bf16)
    return (out, q, kv, index, index[:, 0], sink, out, torch.empty(3, heads, dtype=fp32), scale, False, None)


@pytest.mark.parametrize("generation", ["1.29.1", "1.32.0", "1.33.0"])
@pytest.mark.parametrize(
    ("heads", "width", "slots", "sink"),
    [(5, 576, 70, True), (64, 512, 64, True), (64, 512, 64, False), (72, 512, 9, False)],
)
def test_is_the_reference(generation, heads, width, slots, sink, install, no_sync):
    seen = install(generation)
    operands = given(heads, width, slots, sink)

    def run(*case):
        with no_sync():
            results = sparse_mla.sparse_mla_backward(*case)
        assert all(x.is_contiguous() for x in results), "as the operation's fake says"
        return results

    for finding in compare("sparse_mla.backward", run, backward_reference, forward_reference, operands):
        assert finding.error <= finding.limit, finding
    assert seen.calls == [("sparse_attention_backward", {"heads": -(-heads // 64) * 64, "slots": -(-slots // 64) * 64})]


def test_a_wrong_kernel_would_be_seen(install):
    install("1.32.0")

    def without_a_head(*case):
        dq, dkv = sparse_mla.sparse_mla_backward(*case)
        return dq.index_fill(1, torch.tensor([2]), 0), dkv

    findings = compare(
        "sparse_mla.backward", without_a_head, backward_reference, forward_reference, given(5, 512, 9, 0)
    )
    assert findings[0].error > findings[0].limit


def test_nothing_to_do(install):
    seen = install("1.32.0")
    case = given(4, 576, 8, False)
    for empty in (0, 2):
        operands = [x[:0] if i == empty else x for i, x in enumerate(case)] if empty else list(case)
        if not empty:  # no rows
            operands = [x[:0] if isinstance(x, torch.Tensor) and i != 2 else x for i, x in enumerate(case)]
        operands = [x.nan_to_num(1.0) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in operands]
        dq, dkv = sparse_mla.sparse_mla_backward(*operands)
        assert dq.shape == operands[1].shape
        assert dkv.shape == operands[2].shape
        assert not dq.any()
        assert not dkv.any()
    assert seen.calls == []


def test_refuses_determinism_on_hopper(install):
    install("1.32.0")
    with pytest.raises(BackendUnavailable, match="does not repeat bit for bit on Hopper"):
        sparse_mla.sparse_mla_backward(*given(4, 576, 8, False)[:-2], True)
    install("1.33.0", major=10)
    with pytest.raises(BackendUnavailable, match="this cudnn frontend cannot repeat bits"):
        sparse_mla.sparse_mla_backward(*given(4, 576, 8, False)[:-2], True)


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({}, []),
        ({"deterministic": True}, ["gradients that need not repeat, on Hopper"]),
        ({"deterministic": True, "capability": 100}, []),
        ({"capability": 89}, ["a Hopper or Blackwell data-centre GPU"]),
        ({"value_width": 128}, ["width 512 or 576 with 512 values"]),
        ({"width": 512}, []),
        ({"dtype": "float32"}, ["bfloat16 operands, not float32"]),
    ],
)
def test_requirements(change, needs, install):
    install("1.29.1")
    assert sparse_mla.requirements(Call(**{**vars(CALL), **change})) == needs


@pytest.mark.parametrize("generation", ["1.25.0", "1.26.0"])
def test_generations_that_hang_on_empty_rows_are_refused(generation, install):
    install(generation)
    assert sparse_mla.requirements(CALL) == ["nvidia-cudnn-frontend 1.29 or newer"]
