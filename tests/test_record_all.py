"""results/record_all.py: its steps can be started, and none of them costs another its turn."""

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from dsattn.bench.run import BENCHMARKS, family
from dsattn.cli import bench
from dsattn.cli.arguments import parse
from dsattn.cli.train import read_config

RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RESULTS))
    return importlib.import_module("record_all")


def test_its_benchmarks_are_understood_and_leave_none_out(script: Any) -> None:
    lines = [line.split() for lines in script.BENCHMARKS.values() for line in lines]
    for name, *options in lines:
        assert list(
            bench._plan(bench._names(name), parse(bench.Options, [name, *options, "--device", "cuda"], prog=""))
        )
    assert {family(name) for line in lines for name in bench._names(line[0])} == set(map(family, BENCHMARKS))


def test_its_steps_name_what_exists(script: Any, tmp_path: Path) -> None:
    for step in script.steps(tmp_path, ("--commit", "abc")):
        for command in step.commands:
            assert command[0] == "-m" or Path(command[0]).is_file(), step
            assert all(Path(word).exists() for word in command if "/tests/" in word), step
            assert command[1] in ("dsattn.cli", "pytest") or "abc" in command, step
            assert command[0] != "-m" or importlib.util.find_spec(f"{command[1]}.__main__"), "python -m can start it"


def test_its_training_logs_what_a_record_needs(script: Any) -> None:
    _, config = read_config(script.SMALL.split()[1:], processes=1)
    assert config.data.pack_tokens == 32768
    assert all(stage.steps >= 2 * config.train.log_every for stage in config.train.stages)


def test_one_that_fails_or_is_late_costs_no_other_its_turn(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say = ("-c", "import sys; print('{}'); print('told', file=sys.stderr)")
    steps = [
        script.Step("fails", (("-c", "raise SystemExit(3)"), say), 20.0, "a.jsonl"),
        script.Step("late", (("-c", "import time; time.sleep(60)"),), 0.5),
        script.Step("two", (("-c", "print('progress')"), say), 20.0, "b.jsonl"),
        script.Step("other", (("-c", "raise SystemExit(4)"),), 20.0),
    ]
    monkeypatch.setattr(script, "steps", lambda into, commit: steps)
    monkeypatch.setattr(sys, "argv", shlex.split(f"x --commit abc --into {tmp_path} --only fails late two"))
    assert script.main() == 1
    told = capsys.readouterr()
    assert [line.rpartition(",")[0] for line in told.out.splitlines()] == ["fails: 3", "late: late", "two: done"]
    assert told.err == "record_all: not done: fails, late\n"
    assert (tmp_path / "b.jsonl").read_text() == "{}\n"
    assert (tmp_path / "two.log").read_text() == "progress\ntold\n"
    assert not (tmp_path / "a.jsonl").exists()
