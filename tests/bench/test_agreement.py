"""A peer's other result is seen; another order of its keys, or a precision of its own, is not held against it."""

import dataclasses

import torch

from dsattn.bench.agreement import disagreement
from dsattn.bench.cases import SHAPES, Setting
from dsattn.bench.run import BENCHMARKS

SETTING = Setting(shape=SHAPES["small"], rows=40, keys=64)


def test_other_results_are_seen():
    trial = BENCHMARKS["sparse_mla.forward"](SETTING)
    out, lse = trial.prepare(trial.sets[0])()
    assert "result 1 differs by 30.7% from ours" in disagreement(
        trial, "flash_mla", (out, lse), (out, lse / 0.693 * 0.906)
    )
    assert "result 0" in disagreement(trial, "flash_mla", (out, lse), (out * torch.nan, lse))


def test_other_keys_are_seen():
    chosen = BENCHMARKS["select_keys"](SETTING)
    index = chosen.prepare(chosen.sets[0])()
    other = index.roll(1, 0)
    assert "other keys" in disagreement(chosen, "cudnn", index, other)
    assert disagreement(chosen, "cudnn", index, index.flip(1)) == ""


def test_how_far_keys_may_differ_is_a_matter_of_precision():
    """1 of 16 keys: too many between equals, few between bf16 and fp8."""
    index = torch.arange(16, dtype=torch.int32).repeat(40, 1)
    other = index.clone()
    other[:, -1] = 60
    same = BENCHMARKS["select_keys"](SETTING)
    low = BENCHMARKS["select_keys"](dataclasses.replace(SETTING, precision="fp8"))
    assert disagreement(same, "deep_gemm", index, other) == ""
    assert "6.2% other keys" in disagreement(same, "cudnn", index, other)
    assert "6.2% other keys" in disagreement(low, "deep_gemm", index, other)
    assert disagreement(low, "bf16", index, index.flip(0) + 40) == ""
