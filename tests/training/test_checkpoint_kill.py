"""Real processes killed by SIGKILL at every step of a save; the resumed run must end with the same bits.

Run as a script, this file is the harness: it forks one process a kill, so that torch is imported once.
"""

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dsattn.errors import CheckpointError
from dsattn.training import checkpoint, manifest, state
from dsattn.training.entries import slots_of
from dsattn.training.folders import step_of

STEPS = 7
Save = Callable[..., object]


def train(run_dir: Path, save: Save, until: int = STEPS) -> bytes:
    """A run with everything a resume must restore; saves every second step, and first of all what it resumed from."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = {"position": 0, "left_over": []}

    def save_now() -> None:
        rest = {"schedule": schedule.state_dict(), "rng": state.rng_state(), "data": data}
        save(run_dir, data["position"], {**state.capture(model, optimizer), **rest}, keep=2)

    newest = checkpoint.latest(run_dir)
    if newest:
        rest = state.restore(newest, model, optimizer, {"schedule": None, "rng": None, "data": None})
        schedule.load_state_dict(rest["schedule"])
        state.set_rng_state(rest["rng"])
        data = rest["data"]
        save_now()
    while data["position"] < until:
        data["position"] += 1
        noise = random.random() + np.random.rand()  # noqa: NPY002
        rows = torch.randn(3, 4) * noise + data["position"]
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        schedule.step()
        if data["position"] % 2 == 0:
            save_now()
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def naive_save(run_dir: Path, step: int, tensors: dict, *, keep: int) -> None:
    """The negative control: writes and removes in place."""
    root = run_dir / "checkpoints"
    folder = root / f"step-{step:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    checkpoint._write(folder, {name: branch[key] for name, (branch, key) in slots_of(tensors).items()})
    manifest.write(folder, step, {})
    for old in checkpoint.list_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Killer:
    """A save that kills its own process at its `at`-th event, counted over all saves of the process."""

    def __init__(self, save: Save, at: int, saved: Path, count_calls: bool):
        self.save, self.at, self.saved, self.count_calls = save, at, saved, count_calls
        self.armed = False
        sys.addaudithook(self.hook)

    def hook(self, event: str, _: object) -> None:
        if self.armed and not self.count_calls and event.startswith(("open", "os.", "shutil.")):
            self.count()

    def profile(self, _frame: object, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            self.count()

    def count(self) -> None:
        self.at -= 1
        if self.at < 0:
            self.armed = False  # os.kill is an audited event itself
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, run_dir: Path, step: int, tensors: dict, *, keep: int) -> None:
        self.armed = True
        if self.count_calls:
            sys.setprofile(self.profile)
        self.save(run_dir, step, tensors, keep=keep)
        sys.setprofile(None)
        self.armed = False
        self.saved.write_text(str(step))


def sweep(folder: Path, save: Save, start: int, points: list[int] | None) -> dict:
    """Kill at every event of the saves up to step `start + 2` (at the given calls, if `points`), resume, compare.

    Stops at the first thing that is wrong.
    """
    base, run, saved, end = (folder / name for name in ("base", "run", "saved", "end"))
    whole = train(folder / "whole", checkpoint.save)
    base.mkdir()
    train(base, checkpoint.save, until=start)
    report = {"kills": 0, "leftovers": [], "wrong": []}
    for at in points or range(10_000):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(base, run)
        saved.write_text(str(start))
        end.write_bytes(b"")
        killer = Killer(save, at, saved, count_calls=points is not None)
        status = forked(lambda killer=killer: train(run, killer))
        if status == 0 or int(saved.read_text()) >= start + 2:
            break
        report["kills"] += 1
        if status != -signal.SIGKILL:
            report["wrong"].append(f"{at}: exit status {status}")
        names = {path.suffix for path in (run / "checkpoints").glob(".step-*")} or {"none"}
        report["leftovers"] = sorted(names | set(report["leftovers"]))
        problems = [manifest.damage(path) for path in checkpoint.list_checkpoints(run)]
        newest = checkpoint.latest(run)
        if any(problems) or (step_of(newest) if newest else 0) < int(saved.read_text()):
            report["wrong"].append(f"{at}: {problems}, newest {newest}")
        elif forked(lambda: end.write_bytes(train(run, save))) or end.read_bytes() != whole:
            report["wrong"].append(f"{at}: the resumed run ends differently")
        elif [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]:
            report["wrong"].append(f"{at}: leftovers survive the next save")
        if report["wrong"]:
            break
    return report


def run_harness(folder: Path, save: str, start: int, points: list[int] | None = None) -> dict:
    command = [sys.executable, "-W", "error", __file__, str(folder), save, str(start), json.dumps(points)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 4], ids=["first saves", "replacing and pruning"])
def test_killed_at_every_file_event(tmp_path: Path, start: int) -> None:
    report = run_harness(tmp_path, "atomic", start)
    assert report["wrong"] == []
    assert report["kills"] > (40 if start else 15), "a first save has nothing to replace or prune"
    assert set(report["leftovers"]) >= {".partial", "none"}
    if start:
        assert set(report["leftovers"]) == {".partial", ".replaced", ".removed", "none"}


@pytest.mark.slow
def test_killed_between_calls(tmp_path: Path) -> None:
    """Also where no file is opened or renamed: half-way through a file, before a sync."""
    report = run_harness(tmp_path, "atomic", 4, list(range(100, 12_000, 397)))
    assert report["wrong"] == []
    assert report["kills"] >= 10


@pytest.mark.slow
def test_sweep_sees_a_save_in_place(tmp_path: Path) -> None:
    report = run_harness(tmp_path, "naive", 4)
    assert report["wrong"]


@pytest.mark.slow
def test_killed_from_outside(tmp_path: Path) -> None:
    """No fork, no hook: a parent kills its child as soon as a save is under way, then runs it to the end."""
    whole = train(tmp_path / "whole", checkpoint.save)
    with subprocess.Popen([sys.executable, __file__, str(tmp_path / "run")]) as child:
        while not list((tmp_path / "run").glob("checkpoints/*00000004*")):
            assert child.poll() is None, "died by itself"
            time.sleep(0.0005)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert checkpoint.latest(tmp_path / "run")
    assert train(tmp_path / "run", checkpoint.save) == whole


def test_forgotten_state_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bitwise comparison can fail: a resume without the random generators ends elsewhere."""
    whole = train(tmp_path / "whole", checkpoint.save)
    train(tmp_path / "run", checkpoint.save, until=4)
    monkeypatch.setattr(state, "set_rng_state", lambda _: None)
    assert train(tmp_path / "run", checkpoint.save) != whole
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        state.restore(tmp_path, nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # a killed process loses nothing of the page cache; syncing would only cost minutes
    if len(sys.argv) == 2:
        train(Path(sys.argv[1]), checkpoint.save)
        time.sleep(60)  # to be killed
    else:
        gc.freeze()  # a forked process would copy what it collects
        chosen = {"atomic": checkpoint.save, "naive": naive_save}[sys.argv[2]]
        json.dump(sweep(Path(sys.argv[1]), chosen, int(sys.argv[3]), json.loads(sys.argv[4])), sys.stdout)
