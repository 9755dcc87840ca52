"""results/record_parallel.py, which GPU time is too dear to try: a case that fails costs no other its record."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[1] / "results"
TINY = ("--device", "cpu", "--recipe", "tiny", "--layers", "1", "--steps", "1", "--tokens", "64", "--no-warm-up")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RESULTS))
    return importlib.import_module("record_parallel")


def test_cases_behind_one_that_fails_are_recorded() -> None:
    # No pack has 0 tokens: the first launch ends with the case in fp32.
    command = [sys.executable, str(RESULTS / "record_parallel.py"), "--commit", "abc", *TINY, "--cases", "cp 2"]
    command += ["--dtypes", "float32", "bfloat16", "--fp32-tokens", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    (record,) = map(json.loads, ended.stdout.splitlines())
    assert (record["case"], record["shape"]["dtype"], record["commit"]) == ("cp 2", "bfloat16", "abc")
    assert record["mesh"] == {"dp_shard": 1, "cp": 2, "tp": 1, "pp": 1}
    assert len(record["losses"]) == len(record["seconds"]) == 1
    assert "cp 2, float32: failed, status 1" in ended.stderr
    assert "--- rank 0" in ended.stderr
    assert "--- rank 1" in ended.stderr
    assert "IndexError" in ended.stderr  # of the rank that failed first; torchrun may end the other before it says why


def test_differences_are_relative_to_one_process(script: Any) -> None:
    one = {"losses": [2.0, 4.0], "kl": [0.01, 0.01], "grad_norms": [1.0, 1.0], "tokens_per_second": 10.0}
    other = {"losses": [2.0, 4.4], "kl": [0.01, 0.02], "grad_norms": [1.0, float("nan")], "tokens_per_second": 15.0}
    found = script.beside(other, one)
    assert found["apart"]["losses"] == pytest.approx(0.1)
    assert found["apart"]["kl"] == pytest.approx(0.1)
    assert found["speedup"] == 1.5


def test_data_moves_while_both_ranks_are_in_a_collective(script: Any) -> None:
    """Before, the rank that came first waits. Kernels that run at the same time count once."""
    gather, send = "ncclDevKernel_AllGather", "ncclDevKernel_Send"
    spans = [[(gather, 0, 4000), (send, 3000, 3000), ("gemm", 2000, 1000), ("gemm", 5500, 1500), ("sum", 2500, 1000)]]
    spans += [[("gemm", 0, 2900), (gather, 2900, 1100), (send, 5000, 1001)]]
    base = 10**15
    traces = [
        [{"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in rank] + [{"name": "a step"}]
        for rank in spans
    ]
    found = [script.kernels({"traceEvents": one, "baseTimeNanoseconds": base}) for one in traces]
    assert found[0].nccl[0] == pytest.approx((base / 1e6, base / 1e6 + 4), abs=1e-5)
    here = script.traffic(*found)
    wanted = {"kernel_ms": 7.0, "compute_ms": 3.0, "nccl_ms": 6.0, "nccl_kernels": 2, "waiting_ms": 6 - 1.1 - 1.0}
    wanted |= {"moving_ms": 2.1, "moving_covered_ms": 0.6 + 0.5, "ends_apart_ms": 0.0005}
    assert here == pytest.approx(wanted, abs=1e-5)
    there = script.traffic(*reversed(found))
    assert there["waiting_ms"] == pytest.approx(0.001, abs=1e-5)
    assert there["moving_covered_ms"] == 0
    alone = script.traffic(found[1])
    assert (alone["waiting_ms"], alone["moving_ms"]) == (0, pytest.approx(2.101, abs=1e-5))
    quiet = script.traffic(script.Kernels([], [(0.0, 1.0)]), found[0])
    assert (quiet["moving_ms"], quiet["kernel_ms"]) == (0, 1)
    assert quiet["ends_apart_ms"] is None


def test_what_a_late_rank_said_begins_with_its_innermost_call(script: Any) -> None:
    frames = [f'  File "{depth}.py", line 1 in call' for depth in range(60)]
    late = script.last_words("\n".join(["warned before", "Timeout (0:00:02)!", *frames]))
    assert late.splitlines()[:2] == ["Timeout (0:00:02)!", frames[0]]
    assert script.last_words("\n".join(frames)).splitlines() == frames[-20:]
