"""Checkpoints: atomic, checked, bit for bit.

    run_dir/checkpoints/
      step-00000100/           complete: it gets this name by one rename, after everything in it is on disk
        .metadata __0_0.distcp   written by torch.distributed.checkpoint
        manifest.json            format, step, size and SHA-256 of every file, the caller's `meta`; written last
      .step-00000200.partial   being written, or left by a crash: never read, removed by the next save
      .step-00000100.replaced  former checkpoint of a step that is being saved again; counts while it is the only one
      .step-00000050.removed   being pruned

One job writes a run_dir at a time; any number may read it. With many processes `save`, `verify` and `load` are
collective, over a folder that all of them see: each writes and reads its own part of sharded tensors and looks at its
share of the files; rank 0 writes manifest and names. What was saved on one mesh loads on any other.
Reading unpickles: load only what you trust. The checksums guard against damage, not against malice.
"""

import contextlib
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dsattn.errors import CheckpointError, InputError
from dsattn.training import consensus, manifest
from dsattn.training.entries import Facts, as_json, differing, missing, slots_of
from dsattn.training.folders import hidden, latest, list_checkpoints, prune, put_back, remove_leftovers

__all__ = ["Saving", "begin_save", "contents", "latest", "list_checkpoints", "load", "load_meta", "save", "verify"]

_FINISHERS = ThreadPoolExecutor(1, thread_name_prefix="dsattn-checkpoint")


def save(run_dir: Path, step: int, state: dict[str, Any], *, keep: int, meta: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint so that, killed at any moment, it or everything before it is there and intact.

    Args:
        run_dir: folder of the run.
        step: optimiser steps done so far, >= 0. A step saved before is replaced atomically: a resumed run may save
            the step that it started from.
        state: nested dict with string keys. Tensors (any device and dtype, DTensor too) are stored one by one, a
            branch without tensors whole, by pickle, from rank 0. Tensors in lists, and modules, are refused.
        keep: checkpoints kept, >= 1: this one and the newest of lower steps. Older ones are removed once this one is
            durable; those of higher steps are not touched.
        meta: anything that JSON can say (tuples come back as lists), readable without the tensors: `load_meta`.

    Returns the checkpoint's folder. Raises InputError where an argument breaks a rule, before anything is written, and
    CheckpointError where writing fails (a full disk): earlier checkpoints are all there then, or the message says that
    the new one is complete.
    """
    return begin_save(run_dir, step, state, keep=keep, meta=meta, wait=True).result()


def begin_save(
    run_dir: Path,
    step: int,
    state: dict[str, Any],
    *,
    keep: int,
    meta: dict[str, Any] | None = None,
    wait: bool = False,
) -> "Saving":
    """As `save`, which may go on in the background: `state` may change as soon as this returns.

    wait: the folder is complete on return, as always with one process. Call `result` before the next save.
    """
    if step < 0 or keep < 1:
        raise InputError(f"step={step} must be at least 0 and keep={keep} at least 1")
    entries = {name: branch[key] for name, (branch, key) in slots_of(state).items()}
    target = _Target(Path(run_dir) / "checkpoints", step, keep, as_json(meta or {}))
    try:
        consensus.on_first(target.open)
        if wait or consensus.size() == 1:
            consensus.together(lambda: _write(target.partial, entries))
            consensus.on_first(target.close)
        else:
            group = dist.new_group(backend="gloo")  # its own: training's collectives must not meet those of saving
            assert isinstance(group, dist.ProcessGroup), "every rank is in it"
            writing = _write_later(target.partial, entries, group)
            return Saving(target, _FINISHERS.submit(target.finish, writing), group)
    except Exception as error:
        raise target.failed(error) from error
    target.prune()
    return Saving(target)


class Saving:
    """A checkpoint that may still be on its way."""

    def __init__(self, target: "_Target", end: "Future[None] | None" = None, group: dist.ProcessGroup | None = None):
        self._target, self._end, self._group = target, end, group

    def result(self) -> Path:
        """Wait until the checkpoint is complete, and return its folder. Collective. Raises as `save` does."""
        end, self._end = self._end, None
        if end is not None:
            try:
                consensus.together(end.result)
            except Exception as error:
                raise self._target.failed(error) from error
            finally:
                dist.destroy_process_group(self._group)
            self._target.prune()
        return self._target.final


class _Target:
    """The folder of one checkpoint, and the steps from nothing to its name."""

    def __init__(self, root: Path, step: int, keep: int, meta: dict[str, Any]):
        self.root, self.step, self.keep, self.meta = root, step, keep, meta
        self.final = root / f"step-{step:08d}"
        self.partial, self.replaced = hidden(self.final, "partial"), hidden(self.final, "replaced")

    def open(self) -> None:
        """An empty folder under a name that nobody reads."""
        self.root.mkdir(parents=True, exist_ok=True)
        put_back(self.root)
        remove_leftovers(self.root)
        self.partial.mkdir()

    def close(self) -> None:
        """Manifest and name, once every rank's files are there."""
        manifest.write(self.partial, self.step, self.meta)
        if self.final.exists():
            os.replace(self.final, self.replaced)
        os.replace(self.partial, self.final)
        manifest.sync(self.root)
        manifest.sync(self.root.parent)

    def finish(self, writing: "Future[Any]") -> None:
        """`close` behind a background write, which is done on all ranks when it is done on rank 0."""
        with _unwrapped():
            writing.result()
        if consensus.rank() == 0:
            self.close()

    def prune(self) -> None:
        """Remove older checkpoints."""
        if consensus.rank() == 0:
            prune(self.root, self.step, self.keep)

    def failed(self, error: Exception) -> CheckpointError:
        """Put everything back; the error to raise."""
        if consensus.rank() == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                put_back(self.root)
        newest = latest(self.root.parent)
        way_out = (
            f"Earlier checkpoints are untouched, the newest is {newest}; remove the cause and resume from there"
            if newest
            else "There is no earlier one; remove the cause and begin again"
        )
        return CheckpointError(
            f"the checkpoint of step {self.step} could not be written to {self.root}: {error}. {way_out}"
        )


def verify(path: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint and return its manifest (`format`, `step`, `files`, `meta`).

    Raises CheckpointError with every file that is missing, truncated or altered, and the newest other intact one.
    """
    path = Path(path)
    found = consensus.everyone(manifest.damage(path, (consensus.rank(), consensus.size())))
    problems = list(dict.fromkeys(problem for part in found for problem in part))
    if not problems:
        return manifest.read(path)
    raise _damaged(path, problems)


def _damaged(path: Path, problems: list[str]) -> CheckpointError:
    """What is wrong with a checkpoint, and the newest other intact one."""
    others = [other for other in list_checkpoints(path.parent.parent) if other.name != path.name]
    intact = next((other for other in reversed(others) if not manifest.damage(other)), None)
    way_out = (
        f"the newest other intact checkpoint is {intact}: move the damaged folder away to go on from there"
        if intact
        else f"{path.parent} holds no other intact checkpoint"
    )
    return CheckpointError(f"checkpoint {path} is damaged: {'; '.join(problems)}; {way_out}")


def load_meta(path: Path) -> dict[str, Any]:
    """The `meta` given to `save`. Checks the manifest alone; raises as `verify` where it is missing or altered."""
    path = Path(path)
    try:
        return manifest.read(path)["meta"]
    except CheckpointError as error:
        raise _damaged(path, [str(error)]) from error


def contents(path: Path) -> dict[str, Facts]:
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
        partial: leave entries of the checkpoint that `state` lacks on all ranks unread, as for weights alone.
        verified: `verify` was called just now; do not read every byte again.

    Raises CheckpointError, before anything is filled, for the damage that `verify` finds, and with every entry that is
    missing from the checkpoint, that `state` lacks, or that differs in shape or dtype.
    """
    path = Path(path)
    if not verified:
        verify(path)
    slots = slots_of(state)
    entries = {name: branch[key] for name, (branch, key) in slots.items()}
    saved = contents(path)
    everywhere = {name: None for names in consensus.everyone(list(entries)) for name in names}
    unheld = [] if partial else sorted(saved.keys() - everywhere.keys())
    here = [
        *missing(entries, saved),
        *(f"{name} is in the checkpoint, but nothing was given to hold it" for name in unheld),
        *differing(entries, saved),
    ]
    problems = list(dict.fromkeys(problem for part in consensus.everyone(here) for problem in part))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"checkpoint {path} does not fit, {len(problems)} problem(s):\n{listed}")
    # Flattening inside the planner would put the values that are not tensors into a copy of `entries`.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _unwrapped():
            state_dict_loader.load(entries, storage_reader=FileSystemReader(path), planner=planner)
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} is intact but cannot be read: {error}") from error
    for name, (branch, key) in slots.items():
        branch[key] = entries[name]
    return state


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Run torch.distributed.checkpoint, on one process too; raise what happened inside instead of its wrapper."""
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
    with _unwrapped():
        state_dict_saver.save(entries, storage_writer=FileSystemWriter(folder), planner=_planner())


def _write_later(folder: Path, entries: dict[str, Any], group: dist.ProcessGroup) -> "Future[Any]":
    """Copy to host memory, then write in a thread."""
    writer = FileSystemWriter(folder)
    begun = state_dict_saver.async_save(entries, storage_writer=writer, planner=_planner(), process_group=group)
    return begun if isinstance(begun, Future) else begun.upload_completion


def _planner() -> DefaultSavePlanner:
    # Either kind of flattening in the planner would drop empty containers.
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
