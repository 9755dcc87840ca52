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


def test_communication_counts_once_where_kernels_overlap(script: Any) -> None:
    spans = [("ncclDevKernel_AllGather", 0, 4000), ("ncclDevKernel_Send", 3000, 3000), ("gemm", 2000, 1000)]
    spans += [("gemm", 5500, 1500), ("softmax", 2500, 1000)]
    found = script.traffic([{"name": name, "ts": ts, "dur": dur} for name, ts, dur in spans])
    assert (found["nccl_ms"], found["compute_ms"], found["kernel_ms"]) == (6.0, 3.0, 7.0)
    assert (found["nccl_overlapped_ms"], found["nccl_kernels"]) == (2.0, 2.0)
    assert found["overlapped_share"] == pytest.approx(1 / 3)


def test_what_a_late_rank_said_begins_with_its_innermost_call(script: Any) -> None:
    frames = [f'  File "{depth}.py", line 1 in call' for depth in range(60)]
    late = script.last_words("\n".join(["warned before", "Timeout (0:00:02)!", *frames]))
    assert late.splitlines()[:2] == ["Timeout (0:00:02)!", frames[0]]
    assert script.last_words("\n".join(frames)).splitlines() == frames[-20:]
