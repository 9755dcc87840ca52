"""Whole runs under torchrun: a rank is killed, one is told to stop, one meets bad text; then another mesh goes on.

Started with arguments, this file is one rank of a run; the tests start torchrun on it.
"""

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dsattn.config import (
    DataConfig,
    DSAConfig,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    ParallelConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.parallel.mesh import processes
from dsattn.training import checkpoint, data
from dsattn.training.loop import train
from dsattn.training.metrics import read_metrics
from dsattn.training.runs import config_from_dict
from dsattn.training.text import BadDocument

SECONDS = 240  # of one launch, before it is killed
MODEL = ModelConfig(
    hidden_size=16,
    num_layers=2,
    intermediate_size=16,
    attention=MLAConfig(heads=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
    mtp=MTPConfig(depths=1),
)
STAGES = (
    StageConfig(mode="dense", steps=3),
    StageConfig(mode="warmup", steps=2),
    StageConfig(mode="sparse", steps=4, lr_final=1.0),
)


def config(folder: Path, name: str, parallel: ParallelConfig, **settings: Any) -> RunConfig:
    """A run of seconds over the text in `folder`."""
    given: dict[str, Any] = {"stages": STAGES, "packs_per_step": 4, "packs_per_micro_batch": 2, "save_every": 2}
    given |= {"log_every": 1, "eval_every": 100, "eval_packs": 3, "device": "cpu", "tensorboard": False} | settings
    text = DataConfig(source=str(folder / "text.jsonl"), pack_tokens=48, held_out=0.2, bad_documents="skip")
    return RunConfig(model=MODEL, data=text, train=TrainConfig(run_dir=str(folder / name), **given), parallel=parallel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    lines = [json.dumps({"text": f"document {n}: " + "all the letters of it " * (n % 5)}) for n in range(60)]
    (made / "text.jsonl").write_text("\n".join(lines))
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the run of one process."""
    train(config(folder, "alone", ParallelConfig()), console=False)
    return read_metrics(folder / "alone")


def launch(run: RunConfig, behaviour: str, restarts: int | None = None) -> "subprocess.Popen[str]":
    """torchrun with a rank for every process of the run's mesh; given `restarts`, its agent with forked ranks."""
    run_dir = Path(run.train.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "asked.json").write_text(json.dumps(dataclasses.asdict(run)))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={run.parallel.world_size}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", __file__]
    if restarts is not None:
        command = [sys.executable, __file__, "--agent", str(run.parallel.world_size), str(restarts)]
    command += [str(run_dir), behaviour]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(run: "subprocess.Popen[str]") -> str:
    """What it said, once it is over; it is killed where that takes too long."""
    try:
        return "".join(run.communicate(timeout=SECONDS))
    except subprocess.TimeoutExpired:
        run.terminate()
        raise AssertionError("hangs:\n" + "".join(run.communicate())[-4000:]) from None


def losses(records: list[dict[str, Any]], kind: str = "train") -> dict[int, list[float]]:
    """By step: every loss there is."""
    named = ("lm_loss", "kl", "grad_norm") if kind == "train" else ("lm_loss",)
    return {
        record["step"]: [record[name] for name in named if record[name] is not None]
        + list(record.get("mtp_losses") or [])
        for record in records
        if record["kind"] == kind
    }


def apart(a: dict[int, list[float]], b: dict[int, list[float]]) -> float:
    """The largest relative difference; infinite where other steps or losses are there."""
    if a.keys() != b.keys() or any(len(a[step]) != len(b[step]) for step in a):
        return float("inf")
    return max(abs(x - y) / max(abs(y), 0.1) for step in a for x, y in zip(a[step], b[step], strict=True))


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_end(folder: Path, alone: list[dict[str, Any]]) -> None:
    """dp_shard 2 x cp 2, kill -9 of one rank in step 5: the others end, all start again from the newest checkpoint.

    It is of step 4, or of step 3 where that of step 4 was still being written.
    """
    run = config(folder, "killed", ParallelConfig(dp_shard=2, cp=2), async_save=True)
    said = ended(launch(run, "kill", restarts=1))
    summary = json.loads((folder / "killed/summary.json").read_text())
    assert summary["finished"], said[-3000:]
    assert re.search(r"exitcode: -9.*local_rank: 1", said), said[-3000:]
    assert re.search(r"going on from \S+step-0000000[34]: step [34] of 9", said), said[-3000:]
    killed, again = ((folder / "killed" / name).stat().st_mtime for name in ("killed", "pid-1"))
    assert again - killed < 60
    records = read_metrics(folder / "killed")
    assert apart(losses(records), losses(alone)) < 1e-4
    assert apart(losses(records, "eval"), losses(alone, "eval")) < 1e-4
    assert summary["parameters"] == json.loads((folder / "alone/summary.json").read_text())["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp=4)], ids=["one", "tp 4"])
def test_another_mesh_goes_on_with_the_same_losses(
    folder: Path, alone: list[dict[str, Any]], parallel: ParallelConfig
) -> None:
    """Saved by dp_shard 2 x cp 2 in step 9: steps 10 and 11, on one process and on tp 4, are those of one."""
    name = f"moved-{parallel.tp}-{parallel.pp}"
    shutil.copytree(folder / "killed/checkpoints", folder / name / "checkpoints")
    run = config(folder, name, parallel, resume="must", packs_per_micro_batch=1, save_every=100)
    object.__setattr__(run.train, "stages", (*STAGES[:2], dataclasses.replace(STAGES[2], steps=6)))
    expected = config(folder, "longer", ParallelConfig(), stages=run.train.stages)
    if not (folder / "longer").exists():
        train(expected, console=False)
    if parallel.world_size == 1:
        train(run, console=False)
    else:
        said = ended(launch(run, "go on", restarts=0))
        assert (folder / name / "summary.json").exists(), said[-3000:]
    new = {step: values for step, values in losses(read_metrics(folder / "longer")).items() if step > 9}
    assert apart(losses(read_metrics(folder / name)), new) < 1e-4


@pytest.mark.slow
def test_bad_text_is_skipped_by_all_ranks_and_a_signal_to_one_stops_all(folder: Path) -> None:
    run = config(folder, "stopped", ParallelConfig(dp_replicate=2), stages=(StageConfig(mode="dense", steps=100_000),))
    going = launch(run, "bad")
    metrics, deadline = folder / "stopped/metrics.jsonl", time.monotonic() + SECONDS
    while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < deadline:
        assert going.poll() is None, ended(going)[-3000:]
        time.sleep(0.1)
    os.kill(int((folder / "stopped/pid-1").read_text()), signal.SIGTERM)
    said = ended(going)
    assert going.returncode == 0, said[-3000:]
    assert re.search(r"passed over: line \d+ is not for rank 1", said), said[-3000:]
    latest = checkpoint.latest(folder / "stopped")
    assert latest is not None
    assert checkpoint.verify(latest)["step"] == read_metrics(folder / "stopped")[-1]["step"]


@pytest.mark.slow
def test_text_that_one_rank_cannot_read_stops_all_by_name(folder: Path) -> None:
    run = config(folder, "refused", ParallelConfig(dp_shard=2))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, bad_documents="stop"))
    going = launch(run, "bad")
    said = ended(going)
    assert going.returncode == 1
    assert re.search(r"rank 1 of 2: line \d+ is not for rank 1", said), said[-3000:]


def agent(ranks: int, restarts: int, run_dir: Path, behaviour: str) -> None:
    """What torchrun does, but that the ranks are forked from a server: torch is imported twice, and not by each."""
    multiprocessing.set_forkserver_preload(["dsattn.training.loop", "torch._dynamo", "pytest"])
    settings = LaunchConfig(1, 1, ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="test")
    settings.max_restarts, settings.start_method = restarts, "forkserver"
    elastic_launch(settings, main)(run_dir, behaviour)


def main(run_dir: Path, behaviour: str) -> None:
    """One rank."""
    rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    if behaviour == "kill" and restart == 0 and rank == 1:
        take = data.PackStream.__next__
        seen = 0

        def counted(stream: data.PackStream) -> Any:
            nonlocal seen
            seen += 1
            if seen == 4 * 4 + 2:
                (run_dir / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return take(stream)

        data.PackStream.__next__ = counted
    if behaviour == "bad" and rank == 1:
        read = data.read_documents

        def unread(file: Any, field: str, skip: int, without: frozenset[int]) -> Iterator[Any]:
            for record, pieces in read(file, field, skip, without):
                if record % 7 == 3:
                    raise BadDocument(f"line {record} is not for rank 1", file.name, record)
                yield record, pieces

        data.read_documents = unread
    with processes("cpu"):
        train(config_from_dict(json.loads((run_dir / "asked.json").read_text())))


if __name__ == "__main__":
    if sys.argv[1] == "--agent":
        agent(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    else:
        main(Path(sys.argv[1]), sys.argv[2])
