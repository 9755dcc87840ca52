import json
import shutil
import subprocess

import pytest
import torch

from dsattn import __version__
from dsattn.bench import records
from dsattn.bench.oracle import Error
from dsattn.bench.records import Machine, Record
from dsattn.bench.timing import Times
from dsattn.errors import DataError

FIELDS = {
    *("op", "backend", "passed_over", "shape", "ms", "tflops", "gbps", "peers", "ratio", "error", "peak_bytes"),
    *("gpu", "driver", "versions", "commit", "dirty", "date", "deterministic", "unavailable"),
}


def record(**changes) -> Record:
    fields = {
        "op": "sparse_mla.forward",
        "backend": "triton",
        "passed_over": {"hopper": "capability 90"},
        "shape": {"T": 4, "S": 8, "H": 1, "K": 2, "H_I": None, "D": None, "order": "ascending", "lengths": True},
        "deterministic": False,
        "ms": Times(2.0, 1.0, 3.0),
        "tflops": 1.5,
        "gbps": 2.5,
        "peers": {"cudnn": 4.0},
        "ratio": {"cudnn": 2.0},
        "error": Error(0.5, 0.4, 2.0),
        "peak_bytes": None,
        "machine": Machine.here(torch.device("cpu"), commit="abc", dirty=True),
    }
    return Record(**{**fields, **changes})


def test_a_record_has_the_fields_that_others_read(tmp_path):
    path = tmp_path / "new" / records.FILE
    records.append(path, record())
    records.append(path, record(op="select_keys"))
    first, second = records.read([path])
    assert set(first) == FIELDS
    assert first["ms"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert first["error"] == {"max": 0.5, "mean": 0.4, "limit": 2.0}
    assert (first["commit"], first["dirty"], first["gpu"], first["driver"]) == ("abc", True, None, None)
    assert first["versions"]["dsattn"] == __version__
    assert second["op"] == "select_keys"


def test_appending_keeps_what_is_there(tmp_path):
    path = tmp_path / records.FILE
    path.write_text(json.dumps({"op": "old", "shape": {}, "ms": {"median": 1.0}}) + "\n")
    records.append(path, record())
    assert [found["op"] for found in records.read([path, path])] == ["old", "sparse_mla.forward"] * 2


def test_a_number_that_is_not_finite_is_no_record(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        records.append(tmp_path / records.FILE, record(tflops=float("nan")))


@pytest.mark.parametrize("line", ["{", "[]", '{"op": 1}', '{"op": "x", "shape": {}, "ms": {}}'])
def test_damaged_lines_are_named(tmp_path, line):
    path = tmp_path / records.FILE
    records.append(path, record())
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match="line 2 is no record"):
        records.read([path])


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        records.read([tmp_path / "none"])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_says_commit_and_dirt(tmp_path, monkeypatch):
    """Of the checkout that the code is in, wherever it is called; an installed package may lie in another's."""
    code = tmp_path / "ours" / "code.py"
    code.parent.mkdir()
    code.write_text("1")

    def git(*arguments: str) -> bytes:
        names = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *names, *arguments], cwd=code.parent, check=True, capture_output=True).stdout

    git("init")
    git("commit", "--allow-empty", "-m", "x")
    monkeypatch.chdir(tmp_path)
    assert records._checkout(code) == (None, None)
    git("add", "code.py")
    git("commit", "-m", "y")
    commit = git("rev-parse", "HEAD").decode().strip()
    assert records._checkout(code) == (commit, False)
    code.write_text("2")
    assert records._checkout(code) == (commit, True)


def test_without_git_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(records.shutil, "which", lambda name: None)
    machine = Machine.here(torch.device("cpu"))
    assert (machine.commit, machine.dirty) == (None, None)
