"""The folders of a run's checkpoints: which are complete, and how they change their names. One process does this."""

import os
import re
import shutil
from pathlib import Path

from dsattn.errors import CheckpointError
from dsattn.training import manifest

_COMPLETE = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, ascending by step. Complete is not intact: `verify` reads every byte."""
    paths = Path(run_dir).glob("checkpoints/*")
    complete = (path for path in paths if _COMPLETE.fullmatch(path.name) and (path / manifest.NAME).is_file())
    # ".step-N.replaced" sorts before "step-N" and so gives way to it.
    by_step = {step_of(path): path for path in sorted(complete)}
    return [by_step[step] for step in sorted(by_step)]


def latest(run_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(run_dir)), None)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int("".join(filter(str.isdigit, path.name)))


def hidden(path: Path, kind: str) -> Path:
    """The name of a folder that is not to be read."""
    return path.with_name(f".{path.name}.{kind}")


def put_back(root: Path) -> None:
    """Undo a replacement that was cut short between its two renames."""
    for replaced in root.glob(".step-*.replaced"):
        final = replaced.with_name(replaced.stem[1:])
        if not final.exists():
            os.replace(replaced, final)
    manifest.sync(root)


def remove_leftovers(root: Path) -> None:
    """What crashes left behind."""
    for kind in ("partial", "removed", "replaced"):
        for folder in root.glob(f".step-*.{kind}"):
            shutil.rmtree(folder)


def prune(root: Path, step: int, keep: int) -> None:
    """Remove older checkpoints, each hidden by a rename first: a half-removed one must not look complete."""
    older = [path for path in list_checkpoints(root.parent) if step_of(path) < step]
    try:
        for path in older[: max(0, len(older) - (keep - 1))]:
            os.replace(path, hidden(path, "removed"))
        remove_leftovers(root)
    except OSError as error:
        raise CheckpointError(f"step {step} is saved, but older checkpoints cannot be removed: {error}") from error
