"""A dense model becomes one that selects, for real: a line of JSON for each point of the way.

    python results/record_conversion.py --commit COMMIT --folder build/conversion > results/conversion.jsonl

A small multi-latent-attention model learns Python's standard library with dense attention, is written as a Hugging Face
checkpoint (deepseek_v3), converted with fresh indexers, warmed up and trained sparsely, all by the commands that the
lines name, folders by their last names. Points: `dense`, the model before; `converted`, with fresh indexers; `warmup`
and `sparse`, after each stage. held_out: nats a byte on the same held-out text, attending densely and to the selected
keys. Minutes on two idle cores.

A line is printed, and kept in the folder, as soon as it is measured. A call with the folder of one that was stopped
prints the lines that it holds, with their own commit and date, trains on from the last checkpoint, and goes on.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import platform
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dsattn import __version__
from dsattn.cli.__main__ import main as dsattn
from dsattn.config import RunConfig
from dsattn.training import checkpoint
from dsattn.training.data import held_out_packs
from dsattn.training.loop import train
from dsattn.training.metrics import held_out_loss, indexer_health
from dsattn.training.recipes import tiny
from dsattn.training.runs import load_run
from dsattn.training.tokenizers import load_tokenizer

WARMUP, SPARSE = 150, 200
HEALTH = ("recall", "random", "recency", "oracle", "top1", "worst_head", "captured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--folder", type=Path, help="where the checkpoints stay; none throws them away")
    options = parser.parse_args()
    about = {
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "commit": options.commit,
        "dirty": options.dirty,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for point, make in POINTS.items():
            line = folder / f"{point}.json"
            if not line.exists():
                write(line, json.dumps(measured(point, *make(folder)) | about))
            print(line.read_text(encoding="utf-8"), flush=True)


def dense(folder: Path) -> tuple[Path, list[str]]:
    with contextlib.redirect_stdout(sys.stderr):
        train(dense_run(folder / "dense"))
    return folder / "dense", ["dsattn train tiny, its dense stage alone, every layer dense"]


def converted(folder: Path) -> tuple[Path, list[str]]:
    indexer = tiny().model.dsa.indexer
    commands = [
        f"convert {folder / 'dense'} {folder / 'hf'}",
        f"convert {folder / 'hf'} {folder / 'dsa'} --index-heads {indexer.heads} --index-head-dim {indexer.head_dim} "
        f"--index-top-k {indexer.top_k}",
    ]
    for name, command in zip(("hf", "dsa"), commands, strict=True):
        shutil.rmtree(folder / name, ignore_errors=True)  # what a call that was stopped left
        run(command)
    assert json.loads((folder / "hf/config.json").read_text())["model_type"] == "deepseek_v3"
    return folder / "dsa", commands


def warmed_up(folder: Path) -> tuple[Path, list[str]]:
    command = (
        f"train deepseek_v32 --init {folder / 'dsa'} --train.run-dir {folder / 'trained'} "
        "--data.tokenizer bytes --data.pack-tokens 1024 "
        "--train.packs-per-step 1 --train.dtype float32 --train.device cpu --train.keep-checkpoints 9 "
        "--train.eval-packs 4 --train.no-tensorboard "
        f"--train.stages.0.packs-per-step 1 --train.stages.0.steps {WARMUP} --train.stages.0.lr 5e-3 "
        "--train.stages.0.lr-warmup 10 --train.stages.0.lr-final 0.1 "
        f"--train.stages.1.packs-per-step 1 --train.stages.1.steps {SPARSE} --train.stages.1.lr 1e-3 "
        "--train.stages.1.lr-warmup 10 --train.stages.1.lr-final 0.1"
    )
    run(command)
    return after(folder, WARMUP), [command]


def trained(folder: Path) -> tuple[Path, list[str]]:
    return after(folder, WARMUP + SPARSE), []


POINTS = {"dense": dense, "converted": converted, "warmup": warmed_up, "sparse": trained}
"""Point -> what makes its checkpoint, from those before it, and names the commands."""


def after(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    names = {int(path.name.removeprefix("step-")): path for path in checkpoint.list_checkpoints(folder / "trained")}
    return names[step]


def write(path: Path, text: str) -> None:
    """The whole file or none."""
    half = path.with_suffix(".half")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def dense_run(folder: Path) -> RunConfig:
    """The tiny recipe's dense stage, on a model without indexers."""
    config = tiny()
    model = dataclasses.replace(config.model, layer_types=("dense",) * config.model.num_layers)
    stage = dataclasses.replace(config.train.stages[0], steps=2 * config.train.stages[0].steps)
    settings = dataclasses.replace(config.train, stages=(stage,), run_dir=str(folder), device="cpu", tensorboard=False)
    return dataclasses.replace(config, model=model, train=settings)


def run(command: str) -> None:
    """A dsattn command; what it prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        if code := dsattn(shlex.split(command)):
            raise SystemExit(f"dsattn {command}: exit code {code}")


def measured(point: str, path: Path, commands: list[str]) -> dict[str, Any]:
    """Held-out losses and health of one checkpoint, on the text that the dense run held out."""
    began = time.monotonic()
    model, config = load_run(path, "cpu")
    data = dataclasses.replace(tiny().data, tokenizer="bytes")
    packs = held_out_packs(data, load_tokenizer("bytes"), 16)
    losses = {"dense": held_out_loss(model, packs, "dense")}
    named = [re.sub(r"\S*/(?=(dense|hf|dsa|trained)\b)", "", command) for command in commands]
    line: dict[str, Any] = {"op": "conversion", "point": point, "commands": named, "held_out": losses}
    if model.indexers():
        losses["selected"] = held_out_loss(model, packs, "sparse")
        health = indexer_health(model, packs)
        line |= {"top_k": config.model.dsa.indexer.top_k, "rows": health.rows}
        line |= {name: health.mean(name) for name in HEALTH}
        line["recall_layers"] = [layer.recall for layer in health.layers]
        line["recall_last_quartile"] = [layer.recall_quartiles[-1] for layer in health.layers]
    return line | {"measuring_seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    main()
