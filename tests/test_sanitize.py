"""results/sanitize.py without a GPU: what the tools' words come to, and that nothing runs on without end."""

import importlib
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]
CLEAN = {"memcheck": "========= ERROR SUMMARY: 0 errors\n"}
CLEAN["racecheck"] = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
SEEN = {"memcheck": "========= ERROR SUMMARY: 4 errors\n"}
SEEN["racecheck"] = "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"
READ = """========= Invalid __global__ read of size 4 bytes
=========     at _forward_kernel+0x5b0 in sparse_mla.py:123
=========     by thread (3,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""
RACE = """========= Warning: Race reported between Write access at scores_kernel+0x90 in select_scores.py:141
=========     and Read access at scores_kernel+0x100 in select_scores.py:151 [508 hazards]
========= Error: Race reported between Read access at _rank_kernel+0x90 in select.py:41
=========     and Write access at _rank_kernel+0x100 in select.py:51 [8 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
BARRIERS = "========= Warning: Detected overflow of tracked cuda::barrier structures.\n"
RAN = "ran fp32: sparse_mla\nran fp32: dense_mla\n"
PLANNED = ["fp32: sparse_mla", "fp32: dense_mla"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return importlib.import_module("sanitize")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_what_a_run_comes_to(script, tool):
    clean, seen = CLEAN[tool], SEEN[tool]
    assert script.judged(tool, seen, RAN + clean, PLANNED)["outcome"] == "clean"
    assert script.judged(tool, clean, RAN + clean, PLANNED)["outcome"] == "blind"
    assert script.judged(tool, "no such file", RAN + clean, PLANNED)["outcome"] == "blind"
    assert script.judged(tool, seen, clean, PLANNED)["outcome"] == "not run"
    late = script.judged(tool, seen, "ran fp32: dense_mla\n" + clean, PLANNED)
    assert (late["outcome"], late["left_out"]) == ("cut short", ["fp32: sparse_mla"])
    killed = script.judged(tool, seen, RAN, PLANNED)
    assert (killed["outcome"], killed["errors"], killed["left_out"]) == ("cut short", None, [])
    warned = script.judged(tool, seen, RAN + BARRIERS + clean, PLANNED)
    assert (warned["outcome"], warned["warnings"]) == ("clean", [BARRIERS.strip()])


def test_errors_count_by_kernel_and_before_the_summary_too(script):
    found = script.judged("memcheck", SEEN["memcheck"], RAN + READ, PLANNED)
    assert (found["outcome"], found["errors"], found["kernels_reported"]) == ("errors", 1, {"_forward_kernel": 1})
    found = script.judged("racecheck", SEEN["racecheck"], RAN + RACE, PLANNED)
    assert (found["outcome"], found["errors"]) == ("errors", 2)
    assert found["kernels_reported"] == {"scores_kernel": 1, "_rank_kernel": 1}
    assert "508 hazards" in found["report"]
    assert "ran fp32" not in found["report"]
    killed = script.judged("racecheck", SEEN["racecheck"], RACE.rpartition("===== RACECHECK")[0], PLANNED)
    assert (killed["outcome"], killed["errors"], killed["left_out"]) == ("errors", None, PLANNED)


def test_what_does_not_end_is_killed_with_its_children(script):
    began = time.monotonic()
    code = "import subprocess; print('ran a', flush=True); subprocess.run(['sleep', '60'])"
    report = script.watch([sys.executable, "-c", code], 2)
    assert time.monotonic() - began < 20
    assert script.steps_ran(report) == ["a"]
    assert "killed after 2 s" in report
    assert "FileNotFoundError" in script.watch(["/nowhere/compute-sanitizer"], 2)


def test_every_case_has_steps_and_a_machine_without_the_tool_says_so(script):
    for case in script.CASES:
        assert script.steps_of(case)
    (one, other) = script.outcomes(None, ["memcheck", "racecheck"], None)
    assert (one["op"], one["outcome"], other["op"], other["outcome"]) == (
        *("memcheck", "not installed"),
        *("racecheck", "not installed"),
    )
