"""Whole runs: stages in a chain, resume bit for bit, real kills, a signal, a NaN, a full disk."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsattn.config import (
    DataConfig,
    DSAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.errors import CheckpointError, InputError, TrainingStopped
from dsattn.training import checkpoint, consensus, loop
from dsattn.training.loop import Trainer, load_run, train
from dsattn.training.metrics import read_metrics
from dsattn.training.step import Losses

MODEL = ModelConfig(
    hidden_size=16,
    num_layers=2,
    intermediate_size=16,
    attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
)
STAGES = (StageConfig(mode="dense", steps=4), StageConfig(mode="warmup", steps=3), StageConfig(mode="sparse", steps=5))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"document {number}: " + "all the letters of it " * (number % 4 + 1))
    return folder


def _config(run_dir: Path, text: Path, model: ModelConfig = MODEL, **train: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "stages": STAGES,
        "packs_per_step": 2,
        "packs_per_micro_batch": 1,
        "run_dir": str(run_dir),
        "log_every": 1,
        "eval_every": 4,
        "eval_packs": 2,
        "save_every": 2,
        "device": "cpu",
        "tensorboard": False,
        **train,
    }
    data = DataConfig(source=str(text), pack_tokens=48, held_out=0.2)
    return RunConfig(model=model, data=data, train=TrainConfig(**settings))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A finished run, with its report; only to be read."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert train(_config(run_dir, text), recipe="test", console=False)["finished"]
    return run_dir


@pytest.fixture(autouse=True)
def no_report(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are most of the time of runs this short; `whole` has them."""
    monkeypatch.setattr(loop, "write_report", lambda run_dir: None)


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(load_run(run_dir, "cpu")[0].state_dict())


def _records(run_dir: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second", "tflops", "mfu")
    return [{k: v for k, v in event.items() if k not in timed} for event in read_metrics(run_dir)]


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_stages_without_steps_are_left_out(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also at the ends of a run, and where it is resumed."""
    left, one = (StageConfig(mode="dense", steps=0), StageConfig(mode="frozen", steps=0)), StageConfig(steps=1)
    config = _config(tmp_path / "left", text, stages=(left[0], one, left[1]))
    for _ in range(2):
        summary = train(config, recipe="test")
        assert [stage["mode"] for stage in summary["stages"]] == ["sparse"]
    assert "frozen" not in capsys.readouterr().out
    train(_config(tmp_path / "alone", text, stages=(one,)), recipe="test", console=False)
    assert _same(_weights(tmp_path / "left"), _weights(tmp_path / "alone"))


def test_a_chain_of_stages_leaves_everything_behind(whole: Path) -> None:
    run_dir, summary = whole, json.loads((whole / "summary.json").read_text())
    assert summary["finished"]
    assert summary["tokens"] == 12 * 2 * 48
    assert [stage["mode"] for stage in summary["stages"]] == ["dense", "warmup", "sparse"]
    assert all(stage["held_out_loss"] > 0 for stage in summary["stages"])
    assert summary["stages"][0]["health"] is None
    assert len(summary["stages"][2]["health"]["layers"]) == 2
    for name in ("config.json", "metrics.jsonl", "summary.json", "report.html"):
        assert (run_dir / name).stat().st_size > 0
    assert [path.name for path in checkpoint.list_checkpoints(run_dir)] == [
        "step-00000008",
        "step-00000010",
        "step-00000012",
    ]
    events = read_metrics(run_dir)
    steps = [event["step"] for event in events if event["kind"] == "train"]
    assert steps == list(range(1, 13))
    assert [event["step"] for event in events if event["kind"] == "eval"] == [4, 7, 8, 12]
    assert checkpoint.load_meta(run_dir / "checkpoints/step-00000012")["indexer_steps"] == 8


def test_each_stage_changes_what_learns_and_nothing_else(tmp_path: Path, text: Path) -> None:
    config = _config(tmp_path / "run", text, save_every=1, keep_checkpoints=20)
    train(config, console=False)
    at = {step: _weights(tmp_path / f"run/checkpoints/step-{step:08d}") for step in (1, 4, 7, 12)}

    def changed(a: int, b: int) -> set[bool]:
        return {"indexer" in name for name in at[a] if not torch.equal(at[a][name], at[b][name])}

    assert changed(1, 4) == {False}
    assert changed(4, 7) == {True}
    assert changed(7, 12) == {False, True}


@pytest.mark.parametrize("stop", [1, 4, 5, 7, 9])
def test_a_run_that_is_stopped_and_resumed_is_the_same_run(tmp_path: Path, text: Path, whole: Path, stop: int) -> None:
    halves = _config(tmp_path / "halves", text)
    trainer = Trainer(halves, console=False)
    step = trainer._step

    def step_then_stop(*args: Any) -> Any:
        trainer.stop_asked = trainer.progress.step + 1 == stop
        return step(*args)

    trainer._step = step_then_stop
    first = trainer.run()
    assert not first["finished"]
    latest = checkpoint.latest(tmp_path / "halves")
    assert latest is not None
    assert latest.name == f"step-{stop:08d}"
    second = train(halves, console=False)
    assert second["finished"]
    assert _same(_weights(whole), _weights(tmp_path / "halves"))
    assert _records(whole) == _records(tmp_path / "halves")


def test_a_resume_that_forgets_the_data_position_is_noticed(
    tmp_path: Path, text: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the comparison above."""
    train(_config(tmp_path / "halves", text, stages=STAGES[:2]), console=False)
    monkeypatch.setattr(loop.PackStream, "load_state_dict", lambda self, state: None)
    train(_config(tmp_path / "halves", text), console=False)
    assert not _same(_weights(whole), _weights(tmp_path / "halves"))


def test_a_finished_run_is_finished(tmp_path: Path, text: Path) -> None:
    config = _config(tmp_path / "run", text, stages=STAGES[:1])
    first = train(config, console=False)
    again = train(config, console=False)
    assert again == first
    assert json.loads((tmp_path / "run/summary.json").read_text()) == again
    longer = dataclasses.replace(STAGES[0], steps=5)
    (stage,) = train(_config(tmp_path / "run", text, stages=(longer,)), console=False)["stages"]
    assert stage["steps"] == 5


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"train\.run_dir='.*/file/run' cannot take the run: .*name a folder"):
        train(_config(tmp_path / "file/run", text), console=False)

    def full(run_dir: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "write_report", full)
    with pytest.raises(CheckpointError, match=r"cannot take summary and report: .*No space left.*free the disk"):
        train(_config(tmp_path / "run", text, stages=STAGES[:1]), console=False)
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run/checkpoints/step-00000004"


def test_a_run_begins_from_weights_of_another(tmp_path: Path, text: Path) -> None:
    train(_config(tmp_path / "a", text, stages=STAGES[:1]), console=False)
    config = _config(tmp_path / "b", text, stages=(StageConfig(mode="warmup", steps=1),), init_from=str(tmp_path / "a"))
    train(config, console=False)
    a, b = _weights(tmp_path / "a"), _weights(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a if "indexer" not in name)


def test_a_loss_that_is_not_finite_stops_and_names_the_checkpoint(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path / "run", text)
    measured = loop.accumulate_gradients
    calls = []

    def poisoned(*args: Any) -> Any:
        calls.append(1)
        losses = measured(*args)
        return dataclasses.replace(losses, lm=float("nan")) if len(calls) == 4 else losses

    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate_gradients", poisoned)
        with pytest.raises(TrainingStopped, match=r"step 4: the language-model loss is nan.*step-00000002"):
            train(config, console=False)
    assert checkpoint.verify(tmp_path / "run/checkpoints/step-00000002")
    assert train(config, console=False)["finished"]


def test_ranks_with_the_same_rows_stop_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where rows are split the losses are sums over the ranks, so that all see what is not finite, and none asks."""
    fine, trainer = Losses(lm=1.0, kl={}, rows=1), SimpleNamespace(run_dir=tmp_path, progress=SimpleNamespace(step=0))
    monkeypatch.setattr(consensus, "most", lambda values: [1])
    trainer.config = SimpleNamespace(parallel=ParallelConfig(tp=2))
    Trainer._check_finite(trainer, fine, 1.0)
    trainer.config = SimpleNamespace(parallel=ParallelConfig(tp=2, sequence_parallel=False))
    with pytest.raises(TrainingStopped, match="step 1: a number of another tensor-parallel rank is not finite"):
        Trainer._check_finite(trainer, fine, 1.0)


def test_a_full_disk_loses_nothing(tmp_path: Path, text: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path / "run", text)
    write = checkpoint.manifest.write

    def full(folder: Path, step: int, meta: dict[str, Any]) -> None:
        if step >= 4:
            raise OSError(28, "No space left on device")
        write(folder, step, meta)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.manifest, "write", full)
        with pytest.raises(CheckpointError, match=r"step 4 could not be written.*No space left.*step-00000002"):
            train(config, console=False)
    train(config, console=False)
    assert _same(_weights(whole), _weights(tmp_path / "run"))


def test_a_damaged_checkpoint_is_an_error_that_names_the_intact_one(tmp_path: Path, text: Path, whole: Path) -> None:
    config = _config(tmp_path / "run", text)
    shutil.copytree(whole, tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    data = next(newest.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"truncated.*step-00000010|step-00000010.*truncated"):
        train(config, console=False)


def test_a_vocabulary_that_is_too_small_is_an_error(tmp_path: Path, text: Path) -> None:
    small = dataclasses.replace(MODEL, vocab_size=300)
    config = dataclasses.replace(_config(tmp_path / "run", text), model=small)
    assert Trainer(config, console=False)
    object.__setattr__(config.model, "vocab_size", 100)
    with pytest.raises(InputError, match="vocab_size=100 must be at least 259"):
        Trainer(config, console=False)


def test_text_without_a_held_out_part_trains_without_evaluations(tmp_path: Path, text: Path) -> None:
    config = _config(tmp_path / "run", text)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, held_out=0.0))
    summary = train(config, console=False)
    assert [stage["held_out_loss"] for stage in summary["stages"]] == [None] * 3


CHILD = """
import json, os, signal, sys
from pathlib import Path
from dsattn.training import checkpoint, consensus, loop
from dsattn.training.runs import config_from_dict
config = config_from_dict(json.loads(Path(sys.argv[1]).read_text()))
loop.write_report = lambda run_dir: None

def live(kill_at):
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and "checkpoints" in str(args[0]):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if kill_at:
        sys.addaudithook(hook)
    print(json.dumps(loop.train(config, console=False)["finished"]), flush=True)

def forked(kill_at):
    child = os.fork()
    if child == 0:
        live(kill_at)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for path in checkpoint.list_checkpoints(Path(config.train.run_dir)):
        checkpoint.verify(path)
    return status

if len(sys.argv) > 2:
    print(json.dumps([forked(int(kill_at)) for kill_at in sys.argv[2:]]))
else:
    live(0)
"""


def _spawn(config: RunConfig, tmp_path: Path, *kill_at: int) -> "subprocess.Popen[str]":
    """A run in a process of its own; with `kill_at`, one life after another, forked so that torch is imported once."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    command = [sys.executable, "-c", CHILD, str(path), *map(str, kill_at)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_killed_at_many_points_of_saves_a_run_ends_as_if_nothing_happened(
    tmp_path: Path, text: Path, whole: Path
) -> None:
    """kill -9 at spread file events of the run's saves; each life goes on from what the last one left."""
    out, err = _spawn(_config(tmp_path / "killed", text), tmp_path, 3, 9, 14, 21, 40, 52, 0).communicate()
    assert out, err
    *finished, statuses = map(json.loads, out.splitlines())
    *lives, last = statuses
    assert set(lives) <= {0, -signal.SIGKILL}, err
    assert lives.count(-signal.SIGKILL) >= 4
    assert last == 0, err
    assert finished[-1]
    assert _same(_weights(whole), _weights(tmp_path / "killed"))
    steps = [e["step"] for e in read_metrics(tmp_path / "killed") if e["kind"] == "train"]
    assert steps == list(range(1, 13))


@pytest.mark.slow
def test_sigterm_saves_and_exits_zero(tmp_path: Path, text: Path) -> None:
    stages = (StageConfig(mode="sparse", steps=100_000),)
    config = _config(tmp_path / "run", text, stages=stages, save_every=50_000, eval_every=50_000)
    child = _spawn(config, tmp_path)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < deadline:
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert json.loads(out) is False
    latest = checkpoint.latest(tmp_path / "run")
    assert latest is not None
    assert checkpoint.verify(latest)["step"] == read_metrics(tmp_path / "run")[-1]["step"]


def test_backends_are_prepared_before_there_is_a_model(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the heads of one rank."""
    order: list[Any] = []
    apply = loop.apply
    monkeypatch.setattr(loop, "prepare", lambda config, model: order.append((config, model)))
    monkeypatch.setattr(loop, "apply", lambda *given: order.append("model") or apply(*given))
    config = _config(tmp_path / "run", text)
    Trainer(config, console=False)
    assert order == [(config, config.model), "model"]


def test_the_share_of_the_peak_is_of_every_rank_s_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "size", lambda: 4)
    trainer: Any = SimpleNamespace(_peak_tflops=100.0)
    speed = Trainer._speed(trainer, 10, 2e14, 2.0)
    assert speed == {"tokens_per_second": 5.0, "tflops": 100.0, "mfu": 0.25}


def test_every_stage_begins_with_its_audit(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(_config(tmp_path / "run", text))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mode ")]
    assert [line.split(":")[0] for line in shown] == ["mode dense", "mode warmup", "mode sparse"]
    counts = [int(line.split()[2].replace(",", "")) for line in shown]
    assert counts[0] + counts[1] == counts[2]


HYBRID = dataclasses.replace(
    MODEL,
    num_layers=3,
    layer_types=("linear", "sliding", "dsa"),
    sliding_window=8,
    kda=KDAConfig(heads=2, head_dim=4),
    moe=MoEConfig(experts=4, experts_per_token=2, intermediate_size=8, first_dense_layers=1),
)


def _biases(run_dir: Path) -> torch.Tensor:
    return torch.stack([value for name, value in _weights(run_dir).items() if "e_score_correction_bias" in name])


def test_routing_biases_move_once_a_step_where_the_backbone_learns(tmp_path: Path, text: Path) -> None:
    rate = 2.0**-20  # too little to send any row elsewhere
    stages = tuple(StageConfig(mode=mode, steps=2, router_bias_rate=rate) for mode in ("dense", "warmup", "sparse"))
    train(_config(tmp_path / "run", text, HYBRID, stages=stages), console=False)
    moved = _biases(tmp_path / "run") / rate
    assert torch.equal(moved, moved.round())
    assert moved.abs().max() == 4  # of six steps the two of the warm-up move nothing
    records = [event for event in _records(tmp_path / "run") if event["kind"] == "train"]
    assert all(event["expert_max_violation"] >= 0 for event in records)
    assert all(event["balance_loss"] is None for event in records)
    fixed = tuple(dataclasses.replace(stage, router_bias_rate=0.0) for stage in stages)
    train(_config(tmp_path / "still", text, HYBRID, stages=fixed), console=False)
    assert not _biases(tmp_path / "still").any()


def test_a_hybrid_run_that_is_stopped_and_resumed_is_the_same_run(tmp_path: Path, text: Path) -> None:
    stages = (StageConfig(mode="sparse", steps=4, balance_weight=0.01),)
    whole, cut = (_config(tmp_path / name, text, HYBRID, stages=stages) for name in ("whole", "cut"))
    train(whole, console=False)
    trainer = Trainer(cut, console=False)
    step = trainer._step

    def stop_after_three(*given: Any) -> Any:
        trainer.stop_asked = trainer.progress.step == 2
        return step(*given)

    trainer._step = stop_after_three
    trainer.run()
    train(cut, console=False)
    assert _records(tmp_path / "cut") == _records(tmp_path / "whole")
    assert all(event["balance_loss"] > 0 for event in _records(tmp_path / "whole") if event["kind"] == "train")
    other = _weights(tmp_path / "cut")
    assert all(torch.equal(value, other[name]) for name, value in _weights(tmp_path / "whole").items())
