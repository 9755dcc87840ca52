"""Recall against sets of Python numbers, and what a measurement tells."""

from dataclasses import replace

import pytest
import torch

from dsattn.bench import records
from dsattn.bench.cases import SHAPES, Setting
from dsattn.bench.recall import Inputs, Options, drawn, measured, recall
from dsattn.bench.records import Machine
from dsattn.bench.run import Refusal
from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops import select_keys

SETTING = Setting(shape=SHAPES["small"], rows=40, keys=90)
MACHINE = Machine.here(torch.device("cpu"), commit="abc", dirty=False)
INPUTS = {inputs.name: inputs for inputs in drawn(SETTING)}


def test_recall_counts_common_keys():
    keys = Layout.packed([3, 40]).keys
    inputs = INPUTS["gaussian"]
    case = inputs.q.repeat(2, 1, 1)[:43], inputs.k[:43], inputs.w.repeat(2, 1)[:43]
    got, want = (select_keys(q, *case[1:], keys, 9).index for q in (case[0], case[0].flip(0)))
    shares = recall(got, want, keys)
    rows = [row for row in range(43) if keys.lengths()[row] > 9]
    assert len(rows) == 31
    right = [len(set(got[row].tolist()) & set(want[row].tolist())) / 9 for row in rows]
    torch.testing.assert_close(shares, torch.tensor(right))
    assert 0.1 < shares.mean() < 0.9
    assert recall(got, got, keys).eq(1).all()


def test_empty_slots_are_no_common_keys():
    keys = KeyRange(torch.tensor([0, 0]).int(), torch.tensor([9, 9]).int())
    got, want = torch.tensor([[1, 2, -1], [-1, -1, -1]]).int(), torch.tensor([[2, 7, -1], [0, 1, 2]]).int()
    assert recall(got, want, keys).tolist() == [0.5, 0.0]


def test_nothing_to_count_is_an_error():
    keys = Layout.causal(5).keys
    index = torch.zeros(5, 8, dtype=torch.int32)
    with pytest.raises(InputError, match="no row sees more keys than it keeps"):
        recall(index, index, keys)


def test_inputs_have_outliers_and_rotations_keep_products():
    assert list(INPUTS) == ["gaussian", "gaussian hadamard", "outliers", "outliers hadamard"]
    size = INPUTS["outliers"].k.abs().mean(0)
    assert size[:4].min() > 10 * size[4:].max()
    for name in ("gaussian", "outliers"):
        plain, rotated = INPUTS[name], INPUTS[f"{name} hadamard"]
        torch.testing.assert_close(rotated.q[:, 0] @ rotated.k.T, plain.q[:, 0] @ plain.k.T, rtol=1e-4, atol=1e-3)
        assert not torch.allclose(rotated.k, plain.k)


def wide(inputs: Inputs, width: int) -> Inputs:
    return Inputs(
        name="wide", q=torch.randn(40, 4, width), k=torch.randn(90, width), w=inputs.w, keys=inputs.keys, top_k=16
    )


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_a_measurement(precision, tmp_path):
    options = Options(precision=precision, peers=True, seconds=0.0)
    found = measured(wide(INPUTS["gaussian"], 32), options, MACHINE)
    assert set(found.recall) == set(found.least) == {"bf16", "fp32"}
    for name, mean in found.recall.items():
        assert 0.7 < mean < 0.999
        assert found.least[name] <= mean
    records.append(tmp_path / "recall.jsonl", found)
    (line,) = records.read([tmp_path / "recall.jsonl"])
    assert (line["op"], line["backend"], line["commit"], line["rows"]) == (
        "select_keys",
        "reference",
        "abc",
        found.rows,
    )
    assert (line["precision"], line["inputs"]) == (precision, "wide")
    assert line["recall"] == found.recall
    assert {name: line["shape"][name] for name in ("T", "S", "H_I", "D", "K")} == {
        "T": 40,
        "S": 90,
        "H_I": 4,
        "D": 32,
        "K": 16,
    }
    assert line["error"]["max"] <= line["error"]["limit"] == 5e-4
    assert line["ratio"].keys() == line["peers"].keys() == {"bf16"}
    assert all("not installed" in line["unavailable"][name] for name in ("deep_gemm", "deep_gemm_torch"))


def test_bf16_against_itself_loses_nothing():
    found = measured(INPUTS["gaussian"], Options(precision="bf16", dtype=torch.float32, seconds=0.0), MACHINE)
    assert found.recall == {"bf16": 1.0, "fp32": 1.0}


def test_ranges_and_activation_are_those_of_the_inputs():
    """Packed documents without relu, as a run's own inputs may be: held against the oracle of these."""
    keys = Layout.packed([50, 0, 40]).keys
    given = replace(wide(INPUTS["gaussian"], 32), q=torch.randn(90, 4, 32), w=torch.randn(90, 4), keys=keys, relu=False)
    found = measured(given, Options(precision="fp8", dtype=torch.float32, seconds=0.0), MACHINE)
    assert found.record.error.max <= 1e-6
    assert found.rows == (50 - 16) + (40 - 16)


def test_a_backend_that_cannot_is_refused():
    found = measured(INPUTS["gaussian"], Options(precision="fp8", backend="deep_gemm", seconds=0.0), MACHINE)
    assert isinstance(found, Refusal)
    assert "deep_gemm needs a CUDA GPU" in found.reason
