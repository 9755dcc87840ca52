"""docs/performance.md says what the records say."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "results")
    return runpy.run_path(str(ROOT / "results" / "performance.py"))


def test_the_page_is_made_from_the_records(script):
    written = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert written == script["page"](), "run: python results/performance.py > docs/performance.md"


def test_low_precision_and_full_errors_have_sections(script, monkeypatch, tmp_path):
    """Made records: what a session without such records would not see."""
    machine = {"gpu": "NVIDIA H200", "dirty": False, "commit": "0123456789", "date": "2026-11-30"}
    shape = {"T": 4096, "S": 32768, "H": 64, "H_I": 32, "K": 2048, "selection": "holes"}
    low = {"op": "select_keys", "backend": "triton", "inputs": "gaussian", "precision": "fp8", "shape": shape}
    low |= {"ms": {"median": 2.0}, "recall": {"bf16": 0.98, "fp32": 0.97}, "least": {"bf16": 0.9, "fp32": 0.8}}
    low |= {"error": {"max": 1e-4}, "peers": {"deep_gemm": 1.5}, "ratio": {"deep_gemm": 0.75}, "deterministic": False}
    bar = {"max": 1.0, "max_limit": 2.0, "mean": 1.0, "mean_limit": 4.0, "similarity": 0.9999, "problems": []}
    full = {"op": "sparse_mla", "backend": "hopper", "deterministic": True, "shape": shape, "passed": True}
    full |= {"error": {"out": bar, "dk": {**bar, "mean": 3.0}}}
    files = {
        "kernels.jsonl": [],
        "training.jsonl": [],
        "recall.jsonl": [low | machine, low | machine | {"dirty": True, "ms": {"median": 9.0}}],
        "full_errors.jsonl": [full | machine, full | machine | {"passed": None, "backend": "triton"}],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys.modules["newest"], "RESULTS", tmp_path)
    page = script["page"]()
    assert "| gaussian | 32,768 | T=4096, H=64, H_I=32, K=2048, fp8 | triton | 2.00 | 0.9800 (0.9000) |" in page
    assert "DeepGEMM (fp8) is ahead of `triton` in `select_keys` at S=32,768 (0.75 x)" in page
    assert "| operation | S | H | H_I | selection | hopper deterministic |" in page
    assert "| sparse_mla | 32,768 | 64 | 32 | holes | dk 0.50, 0.75; 1 - 0.0001 |" in page
    (tmp_path / "recall.jsonl").unlink()
    assert "low precision" not in script["page"]()
