import json
from pathlib import Path

import pytest

from dsattn.errors import CheckpointError
from dsattn.training import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(b"0123456789")
    (tmp_path / "empty").touch()
    manifest.write(tmp_path, 7, {"stage": "warmup", "loss": 0.1})
    return tmp_path


def test_intact(folder: Path) -> None:
    found = manifest.read(folder)
    assert manifest.damage(folder) == []
    assert (found["format"], found["step"], found["meta"]) == (1, 7, {"stage": "warmup", "loss": 0.1})
    assert {name: facts["bytes"] for name, facts in found["files"].items()} == {"data": 10, "empty": 0}
    assert json.loads((folder / "manifest.json").read_text())["files"] == found["files"]


def test_files_of_others_are_no_damage(folder: Path) -> None:
    (folder / "notes.txt").touch()
    assert manifest.damage(folder) == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"01234", "data is truncated: 5 bytes instead of 10"),
        (b"01234567890", "data is altered: 11 bytes instead of 10"),
        (b"0123456788", "data is altered: its checksum differs"),
        (None, "data is missing"),
    ],
)
def test_damage(folder: Path, content: bytes | None, sentence: str) -> None:
    (folder / "data").unlink() if content is None else (folder / "data").write_bytes(content)
    (folder / "empty").write_bytes(b"x")
    assert manifest.damage(folder) == [sentence, "empty is altered: 1 bytes instead of 0"]


def test_file_that_cannot_be_read(folder: Path) -> None:
    (folder / "data").unlink()
    (folder / "data").symlink_to("data")
    assert "data cannot be read" in manifest.damage(folder)[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"sha256": 1}', "\xff"])
def test_text_that_is_no_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"manifest\.json is (truncated or )?altered"):
        manifest.read(folder)
    assert len(manifest.damage(folder)) == 1


def test_altered_meta_shows(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("warmup", "sparse"))
    with pytest.raises(CheckpointError, match="altered"):
        manifest.read(folder)


def test_other_formats_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="has format 1; this version of dsattn reads 2"):
        manifest.read(folder)


def test_missing(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        manifest.read(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        manifest.read(folder / "nowhere")
