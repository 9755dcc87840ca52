"""The manifest of a folder: size and SHA-256 of its files, so that damage is found before anything is read."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from dsattn.errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"


def write(folder: Path, step: int, meta: dict[str, Any]) -> None:
    """Describe the files of `folder`, which are on disk already; manifest and folder are on disk on return."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "step": step, "files": files, "meta": meta}
    with open(folder / NAME, "w", encoding="utf-8") as stream:
        json.dump({**manifest, "sha256": _digest(manifest)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync(folder)


def read(folder: Path) -> dict[str, Any]:
    """The manifest (`format`, `step`, `files`, `meta`). CheckpointError: missing, altered, another format."""
    try:
        manifest = json.loads((folder / NAME).read_text(encoding="utf-8"))
        found = manifest.pop("sha256")
    except FileNotFoundError as error:
        what = f"{NAME} is missing from it" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder} is not a checkpoint: {what}") from error
    except OSError as error:
        raise CheckpointError(f"{folder / NAME} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / NAME} is truncated or altered: it is no manifest ({error!r})") from error
    if found != _digest(manifest):
        raise CheckpointError(f"{folder / NAME} is altered: its checksum differs")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{folder / NAME} has format {manifest['format']}; this version of dsattn reads {FORMAT}")
    return manifest


def damage(folder: Path, part: tuple[int, int] = (0, 1)) -> list[str]:
    """A sentence for every file of `folder` that is missing, truncated or altered. Reads every byte.

    part: (i, n) looks at every n-th file from the i-th on, for n readers that share the work.
    """
    try:
        files = read(folder)["files"]
    except CheckpointError as error:
        return [str(error)]
    mine = list(files.items())[part[0] :: part[1]]
    problems = (_damage_of(folder / name, facts) for name, facts in mine)
    return [problem for problem in problems if problem]


def sync(folder: Path) -> None:
    """Make the names in `folder` durable: a rename is on disk only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damage_of(file: Path, facts: dict[str, Any]) -> str | None:
    try:
        size = file.stat().st_size
        if size != facts["bytes"]:
            what = "truncated" if size < facts["bytes"] else "altered"
            return f"{file.name} is {what}: {size} bytes instead of {facts['bytes']}"
        return None if _sha256(file) == facts["sha256"] else f"{file.name} is altered: its checksum differs"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error}"


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
