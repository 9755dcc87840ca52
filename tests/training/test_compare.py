import json

import pytest

from dsattn.errors import InputError
from dsattn.training.compare import compare, picture, read_runs


def write(folder, losses, speed, stages=(0, 0, 1, 1)):
    folder.mkdir(parents=True)
    events = [
        {
            "kind": "train",
            "step": step + 1,
            "stage": stage,
            "mode": ("dense", "sparse")[stage],
            "lm_loss": loss,
            "tokens_per_second": speed * (step + 1),
            "tflops": None,
            "mfu": 0.25,
        }
        for step, (loss, stage) in enumerate(zip(losses, stages, strict=True))
    ]
    events.append({"kind": "eval", "step": 4, "stage": 1, "mode": "sparse", "lm_loss": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.fixture
def runs(tmp_path):
    return [write(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], 10), write(tmp_path / "b", [4.0, 3.5, 2.0, None], 20)]


def test_rows(runs):
    rows = compare(read_runs(runs))
    assert [(row["run"], row["mode"]) for row in rows] == [
        ("a", "dense"),
        ("a", "sparse"),
        ("b", "dense"),
        ("b", "sparse"),
    ]
    assert [row["tokens_per_second"] for row in rows] == [20, 40, 40, 80]  # the first logged step is left out
    assert [row["difference"] for row in rows] == [0, 0, 0.5, 0]
    assert [row["lm_loss"] for row in rows] == [3.0, 1.0, 3.5, None]
    assert [row["tflops"] for row in rows] == [None] * 4
    assert {row["mfu"] for row in rows} == {0.25}


def test_runs_without_common_steps_have_no_difference(runs):
    events = read_runs(runs)
    late = {"a": events["a"], "b": [{**event, "step": event["step"] + 100} for event in events["b"]]}
    assert {row["difference"] for row in compare(late) if row["run"] == "b"} == {None}


def test_equal_names_become_paths(tmp_path):
    pair = [write(tmp_path / name / "run", [1.0] * 4, 1) for name in ("x", "y")]
    assert list(read_runs(pair)) == [str(path) for path in pair]


def test_refuses(runs, tmp_path):
    with pytest.raises(InputError, match="must name two or more"):
        read_runs(runs[:1])
    with pytest.raises(InputError, match="is no folder"):
        read_runs([runs[0], tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"\['empty'\]: nothing was trained"):
        read_runs([runs[0], tmp_path / "empty"])


def test_picture_names_every_run(runs):
    drawn = picture(read_runs(runs))
    assert b"</svg>" in drawn.svg
    assert all(name in drawn.alt for name in ("a", "b"))
