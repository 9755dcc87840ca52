"""Run folders: which device, which checkpoint to go on from, whose weights to begin with, how to load a run.

run_dir/  config.json  metrics.jsonl  summary.json  report.html  tensorboard/  checkpoints/step-00000100/
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dacite
import torch
from torch import nn

from dsattn.config import RunConfig, TrainConfig
from dsattn.errors import CheckpointError, InputError
from dsattn.model.decoder import Decoder
from dsattn.nn import LightningIndexer
from dsattn.parallel.apply import Stages
from dsattn.training import checkpoint
from dsattn.training.folders import step_of


def pick_device(name: str, option: str = "device") -> torch.device:
    """`auto` is the GPU where there is one. Raises InputError, which names the `option`, where `name` cannot be had."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"{option}={name!r} is no device; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{option}={name!r}, but torch sees no GPU; use 'auto' or 'cpu'")
    return device


def config_from_dict(tree: dict[str, Any]) -> RunConfig:
    """The configuration that `dataclasses.asdict` turned into plain values. Raises CheckpointError where it differs."""
    try:
        return dacite.from_dict(RunConfig, tree, dacite.Config(strict=True, cast=[tuple]))
    except dacite.DaciteError as error:
        raise CheckpointError(f"the saved configuration does not fit this version of dsattn: {error}") from error


def find_checkpoint(path: Path) -> Path | None:
    """`path` itself where it is a checkpoint, else the newest checkpoint of the run folder `path`, or None."""
    return path if (path / "manifest.json").is_file() else checkpoint.latest(path)


def load_run(path: Path, device: str = "auto") -> tuple[Decoder, RunConfig]:
    """Model (in eval mode) and configuration of a run folder's newest checkpoint, or of one checkpoint.

    Raises CheckpointError where there is none or it is damaged.
    """
    newest = _needed(Path(path), "")
    config = config_from_dict(checkpoint.load_meta(newest)["config"])
    with torch.device("meta"):
        model = Decoder(config.model)
    model = model.to_empty(device=pick_device(device))
    checkpoint.load(newest, {"model": model.state_dict()}, partial=True)
    return model.eval(), config


def checkpoint_to_resume(config: RunConfig) -> Path | None:
    """The checkpoint that `train.resume` asks to go on from, or None for a new run.

    Raises InputError where the folder is used and must not be, empty and must not be, or holds another run: its model,
    its data and the modes of the stages that it has entered must be this run's; or more steps of the last of these
    than it now has.
    """
    run_dir, resume = Path(config.train.run_dir), config.train.resume
    newest = checkpoint.latest(run_dir)
    if resume == "never" and newest is not None:
        raise InputError(
            f"train.resume='never', but train.run_dir={str(run_dir)!r} holds {newest.name}; name another folder, "
            "or let 'auto' go on there"
        )
    if resume == "must" and newest is None:
        raise InputError(
            f"train.resume='must', but train.run_dir={str(run_dir)!r} holds no checkpoint; name the folder of a run, "
            "or let 'auto' begin one"
        )
    if newest is None:
        return None
    meta = checkpoint.load_meta(newest)
    before = config_from_dict(meta["config"])
    changed = [name for name in ("model", "data") if getattr(before, name) != getattr(config, name)]
    entered = meta["stage"] + 1
    if _shape(before.train, entered) != _shape(config.train, entered):
        changed.append("train.stages")
    if changed:
        raise InputError(
            f"train.run_dir={str(run_dir)!r} holds a run of another {' and another '.join(changed)}; "
            "choose another run_dir, or give the settings of that run"
        )
    steps = [stage.steps for stage in config.train.stages[:entered]]
    done = step_of(newest) - sum(steps[:-1])
    if steps[-1] < done:
        raise InputError(
            f"train.stages.{entered - 1}.steps={steps[-1]}, but train.run_dir={str(run_dir)!r} has done {done} of that "
            "stage; give at least as many, or choose another run_dir"
        )
    return newest


def _shape(train: TrainConfig, entered: int) -> list[tuple[str, int]]:
    """Modes and steps that place a checkpoint; the last entered stage may get longer or shorter."""
    stages = [(stage.mode, stage.steps) for stage in train.stages[:entered]]
    return stages[:-1] + [(mode, 0) for mode, _ in stages[-1:]]


def begin_from(config: RunConfig, source: Path) -> RunConfig:
    """The run `config` on the model of a checkpoint: its shape, its tokenizer, its weights.

    source: a run folder, such as `dsattn convert` writes, or one checkpoint in it.
    Raises CheckpointError where it holds none.
    """
    if find_checkpoint(source) is None and (source / "config.json").is_file():
        raise CheckpointError(
            f"--init {source} holds no checkpoint of dsattn; if it is a Hugging Face folder, "
            f"`dsattn convert {source} RUN` makes one: give RUN"
        )
    before = config_from_dict(checkpoint.load_meta(_needed(source, "--init "))["config"])
    return dataclasses.replace(
        config,
        model=before.model,
        data=dataclasses.replace(config.data, tokenizer=before.data.tokenizer),
        train=dataclasses.replace(config.train, init_from=str(source)),
    )


def init_weights(model: nn.Module, train: TrainConfig) -> None:
    """Take the weights of `train.init_from`; its indexers too, unless `train.fresh_indexer` keeps the drawn ones.

    model: a decoder, or a rank's part of one. Collective.

    Raises InputError where that would throw away trained indexers, CheckpointError where the weights do not fit.
    """
    newest = _needed(Path(str(train.init_from)), "train.init_from=")
    trained = checkpoint.load_meta(newest)["indexer_steps"]
    if train.fresh_indexer and trained:
        raise InputError(
            f"train.fresh_indexer=True would throw away an indexer trained for {trained} steps in {newest}; "
            "leave it out, or start from a checkpoint of the dense stage"
        )
    state = model.state_dict()
    if train.fresh_indexer:
        own = [name for name, module in model.named_modules() if isinstance(module, LightningIndexer)]
        own = tuple(re.sub(r"^stages\.\d+\.", "", name) + "." for name in own)
        state = {name: value for name, value in state.items() if not name.startswith(own)}
    checkpoint.load(newest, {"model": state}, partial=True)
    if isinstance(model, Stages):  # of two with copies of a weight, only one is filled
        model.load_state_dict(state, strict=False)


def _needed(path: Path, name: str) -> Path:
    newest = find_checkpoint(path)
    if newest is None:
        raise CheckpointError(f"{name}{str(path)!r} holds no checkpoint; give a run folder, or a step-... folder in it")
    return newest


@contextlib.contextmanager
def writing(run_dir: Path, what: str) -> Iterator[None]:
    """Raise CheckpointError, with the way out, where the folder or the disk does not take `what`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"train.run_dir={str(run_dir)!r} cannot take {what}: {error}; free the disk or name a folder that can be "
            "written, then give the same command"
        ) from error


def write_json(path: Path, tree: Any) -> None:
    """Write atomically; dataclasses become objects."""
    plain = dataclasses.asdict(tree) if dataclasses.is_dataclass(tree) and not isinstance(tree, type) else tree
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(plain, indent=1) + "\n")
    partial.replace(path)
