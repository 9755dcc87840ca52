"""results/record_full_errors.py, on small shapes of a CPU: its formulas are the operations', and a fault is seen."""

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
REFERENCE = (("reference", False),)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    module = importlib.import_module("record_full_errors")
    monkeypatch.setattr(module, "_BLOCK_BYTES", 400_000)  # several blocks of rows
    return module


@pytest.mark.parametrize("selection", ["uniform", "holes", "recorded"])
def test_the_reference_keeps_the_bar(script, selection):
    setting = script.setting_of("small", 90, selection, dtype=torch.bfloat16)
    lines = list(script.lines_of(setting, selection, (*REFERENCE, ("hopper", False))))
    served = [line for line in lines if line["passed"] is not None]
    assert [line["op"] for line in served] == ["sparse_mla", "dsa_attention"][: 1 if selection == "holes" else 2]
    for line in served:
        assert line["passed"], line
        assert line["shape"]["selection"] == selection
    assert set(served[0]["error"]) == {"out", "lse", "dq", "dk"}
    assert all("a CUDA GPU" in line["unavailable"] for line in lines if line["passed"] is None)
    json.dumps(lines, allow_nan=False)


def test_blocks_of_rows_add_up(script, monkeypatch):
    setting = script.setting_of("small", 90, "uniform", dtype=torch.float64)
    given = script.operands_of(setting, "uniform")
    many = script.exact(given, setting, torch.float64)
    monkeypatch.setattr(script, "_BLOCK_BYTES", 2**30)
    one = script.exact(given, setting, torch.float64)
    for name, whole in one.layer.items():
        torch.testing.assert_close(many.layer[name], whole)
    assert one.attention.keys() < one.layer.keys()


def test_holes_are_in_the_middle_of_rows_and_hold_nan(script):
    setting = script.setting_of("small", 90, "holes", dtype=torch.float32)
    given = script.operands_of(setting, "holes")
    index = given.selection.index
    inner = (index[:, :-1] < 0) & (index[:, 1:] >= 0)
    assert inner.any(1).float().mean() > 0.3
    assert given.k[script.HOLE :: script.EVERY].isnan().all()
    assert not given.k[index[index >= 0].long()].isnan().any()


@pytest.mark.parametrize("fault", ["dk", "dk_i", "out"])
def test_a_fault_in_one_key_is_seen(script, fault, monkeypatch):
    run = script.layer_results

    def wrong(given, setting):
        found = run(given, setting)
        found[fault][17] *= 1.5
        return found

    monkeypatch.setattr(script, "layer_results", wrong)
    setting = script.setting_of("small", 90, "uniform", dtype=torch.bfloat16)
    attention, layer = script.lines_of(setting, "uniform", REFERENCE)
    assert attention["passed"]
    assert not layer["passed"]
    assert [name for name, figures in layer["error"].items() if figures["problems"]] == [fault]


def test_selections_are_judged_row_by_row(script, monkeypatch):
    setting = script.setting_of("small", 150, "uniform", dtype=torch.float32)
    (good,) = script.selection_lines(setting, ["reference"])
    assert good["passed"]
    real = script.select_keys

    def wrong(*operands, **options):
        found = real(*operands, **options)
        found.index[77] = torch.arange(16)
        return found

    monkeypatch.setattr(script, "select_keys", wrong)
    (bad,) = script.selection_lines(setting, ["reference"])
    assert not bad["passed"]
