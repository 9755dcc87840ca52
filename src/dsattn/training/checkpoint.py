"""Checkpoints: atomic, checked, bit for bit.

    run_dir/checkpoints/
      step-00000100/           complete: it gets this name by one rename, after everything in it is on disk
        .metadata __0_0.distcp   written by torch.distributed.checkpoint
        manifest.json            format, step, size and SHA-256 of every file, the caller's `meta`; written last
      .step-00000200.partial   being written, or left by a crash: never read, removed by the next save
      .step-00000100.replaced  former checkpoint of a step that is being saved again; counts while it is the only one
      .step-00000050.removed   being pruned

One process writes a run_dir at a time; any number may read it. Reading unpickles: load only what you trust. The
checksums guard against damage, not against malice.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dsattn.errors import CheckpointError, InputError
from dsattn.training import manifest

_COMPLETE = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")


def save(run_dir: Path, step: int, state: dict[str, Any], *, keep: int, meta: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint so that, killed at any moment, it or everything before it is there and intact.

    Args:
        run_dir: folder of the run.
        step: optimiser steps done so far, >= 0. A step saved before is replaced atomically: a resumed run may save
            the step that it started from.
        state: nested dict with string keys. Tensors (any device and dtype, DTensor too) are stored one by one, a
            branch without tensors whole, by pickle. Tensors in lists, and modules, are refused.
        keep: checkpoints kept, >= 1: this one and the newest of lower steps. Older ones are removed once this one is
            durable; those of higher steps are not touched.
        meta: anything that JSON can say (tuples come back as lists), readable without the tensors: `load_meta`.

    Returns the checkpoint's folder. Raises InputError where an argument breaks a rule, before anything is written, and
    CheckpointError where writing fails (a full disk): earlier checkpoints are all there then, or the message says that
    the new one is complete.
    """
    if step < 0 or keep < 1:
        raise InputError(f"step={step} must be at least 0 and keep={keep} at least 1")
    entries = {name: branch[key] for name, (branch, key) in _slots(state).items()}
    meta = _as_json(meta or {})
    _refuse_many_ranks()
    root = Path(run_dir) / "checkpoints"
    final = root / f"step-{step:08d}"
    partial, replaced = _hidden(final, "partial"), _hidden(final, "replaced")
    try:
        root.mkdir(parents=True, exist_ok=True)
        _put_back(root)
        _remove_leftovers(root)
        _write(partial, entries)
        manifest.write(partial, step, meta)
        if final.exists():
            os.replace(final, replaced)
        os.replace(partial, final)
        manifest.sync(root)
        manifest.sync(root.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            _put_back(root)
        newest = latest(run_dir)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {root}: {error}. Earlier checkpoints are "
            f"untouched, the newest is {newest or 'none'}; remove the cause and resume from there"
        ) from error
    _prune(root, step, keep)
    return final


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, ascending by step. Complete is not intact: `verify` reads every byte."""
    paths = Path(run_dir).glob("checkpoints/*")
    complete = (path for path in paths if _COMPLETE.fullmatch(path.name) and (path / manifest.NAME).is_file())
    # ".step-N.replaced" sorts before "step-N" and so gives way to it.
    by_step = {_step(path): path for path in sorted(complete)}
    return [by_step[step] for step in sorted(by_step)]


def latest(run_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(run_dir)), None)


def verify(path: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint and return its manifest (`format`, `step`, `files`, `meta`).

    Raises CheckpointError with every file that is missing, truncated or altered, and the newest other intact one.
    """
    path = Path(path)
    problems = manifest.damage(path)
    if not problems:
        return manifest.read(path)
    others = [other for other in list_checkpoints(path.parent.parent) if other.name != path.name]
    intact = next((other for other in reversed(others) if not manifest.damage(other)), None)
    way_out = (
        f"the newest other intact checkpoint is {intact}: move the damaged folder away to go on from there"
        if intact
        else f"{path.parent} holds no other intact checkpoint"
    )
    raise CheckpointError(f"checkpoint {path} is damaged: {'; '.join(problems)}; {way_out}")


def load_meta(path: Path) -> dict[str, Any]:
    """The `meta` given to `save`. Checks the manifest alone: CheckpointError where it is missing or altered."""
    return manifest.read(Path(path))["meta"]


def contents(path: Path) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    """Dotted name -> shape and dtype of every tensor, None for other values. `verify` first: damage is not checked."""
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (facts.size, facts.properties.dtype) if isinstance(facts, TensorStorageMetadata) else None
        for name, facts in saved.items()
    }


def load(path: Path, state: dict[str, Any], *, partial: bool = False, verified: bool = False) -> dict[str, Any]:
    """Verify a checkpoint, then fill `state` from it and return `state`.

    Tensors are filled in place and keep their device, dtype and sharding. A branch without tensors is a placeholder
    (None will do) that is replaced by what was saved.

    Args:
        path: a checkpoint's folder.
        state: nested dict with string keys, shaped like the one that was saved.
        partial: leave entries of the checkpoint that `state` lacks unread, as for weights alone.
        verified: `verify` was called just now; do not read every byte again.

    Raises CheckpointError, before anything is filled, for the damage that `verify` finds, and with every entry that is
    missing from the checkpoint, that `state` lacks, or that differs in shape or dtype.
    """
    path = Path(path)
    if not verified:
        verify(path)
    _refuse_many_ranks()
    slots = _slots(state)
    entries = {name: branch[key] for name, (branch, key) in slots.items()}
    problems = list(_mismatches(entries, contents(path), partial))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"checkpoint {path} does not fit, {len(problems)} problem(s):\n{listed}")
    # Flattening inside the planner would put the values that are not tensors into a copy of `entries`.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _one_process():
            state_dict_loader.load(entries, storage_reader=FileSystemReader(path), planner=planner)
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} is intact but cannot be read: {error}") from error
    for name, (branch, key) in slots.items():
        branch[key] = entries[name]
    return state


def _slots(tree: dict[str, Any], prefix: str = "") -> dict[str, tuple[dict[str, Any], str]]:
    """Dotted name -> (dict, key) of every tensor and of every largest branch without tensors."""
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if not isinstance(key, str):
            raise InputError(f"state: key {name!r} must be a string; tensors are found by their dotted names")
        deeper = isinstance(value, dict) and _holds_tensor(value)
        for inner, slot in _slots(value, f"{name}.").items() if deeper else [(name, (tree, key))]:
            if slots.setdefault(inner, slot) is not slot:
                raise InputError(f"state: two entries are both named {inner!r}; rename one")
        if not (deeper or isinstance(value, Tensor)) and (_holds_tensor(value) or hasattr(value, "state_dict")):
            raise InputError(f"state: {name} is a {type(value).__name__}; give tensors in dicts, x.state_dict() for x")
    return slots


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset):
        return isinstance(value, Tensor)
    return any(_holds_tensor(item) for item in value)


def _as_json(meta: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(meta))
    except (TypeError, ValueError) as error:
        raise InputError(f"meta must be JSON-able: {error}; use numbers, strings, lists and dicts") from error


def _refuse_many_ranks() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError(f"checkpoints of {dist.get_world_size()} ranks are not supported; run one process")


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Run torch.distributed.checkpoint without a process group; raise what happened inside instead of its wrapper."""
    with warnings.catch_warnings():
        # It warns whenever no process group exists, which is meant here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        outer = sys.exception()
        try:
            yield
        except CheckpointException as error:  # a BaseException that wraps even KeyboardInterrupt
            failure, _ = next(iter(error.failures.values()))
            raise _underlying(failure, outer) from None


def _underlying(error: BaseException, outer: BaseException | None) -> BaseException:
    """The OSError or KeyboardInterrupt that broke `error`'s work off, since torch.save hides it when it cleans up."""
    cause: BaseException | None = error
    while cause is not None and cause is not outer:
        if isinstance(cause, OSError) or not isinstance(cause, Exception):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _write(folder: Path, entries: dict[str, Any]) -> None:
    folder.mkdir()
    # Either kind of flattening in the planner would drop empty containers.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _one_process():
        state_dict_saver.save(entries, storage_writer=FileSystemWriter(folder), planner=planner)


def _step(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)))


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _put_back(root: Path) -> None:
    """Undo a replacement that was cut short between its two renames."""
    for replaced in root.glob(".step-*.replaced"):
        final = replaced.with_name(replaced.stem[1:])
        if not final.exists():
            os.replace(replaced, final)
    manifest.sync(root)


def _remove_leftovers(root: Path) -> None:
    for kind in ("partial", "removed", "replaced"):
        for folder in root.glob(f".step-*.{kind}"):
            shutil.rmtree(folder)


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove older checkpoints, each hidden by a rename first: a half-removed one must not look complete."""
    older = [path for path in list_checkpoints(root.parent) if _step(path) < step]
    try:
        for path in older[: max(0, len(older) - (keep - 1))]:
            os.replace(path, _hidden(path, "removed"))
        _remove_leftovers(root)
    except OSError as error:
        raise CheckpointError(f"step {step} is saved, but older checkpoints cannot be removed: {error}") from error


def _mismatches(entries: dict[str, Any], saved: dict[str, Any], partial: bool) -> Iterator[str]:
    for name in sorted(entries.keys() - saved.keys()):
        yield f"{name} is missing from the checkpoint"
    if not partial:
        for name in sorted(saved.keys() - entries.keys()):
            yield f"{name} is in the checkpoint, but nothing was given to hold it"
    for name in sorted(entries.keys() & saved.keys()):
        given = _facts(entries[name])
        if given != saved[name]:
            yield f"{name} is {_describe(saved[name])} in the checkpoint, {_describe(given)} here"


def _facts(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _describe(facts: tuple[torch.Size, torch.dtype] | None) -> str:
    return f"{facts[1]} {list(facts[0])}" if facts else "not a tensor"
