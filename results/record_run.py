"""One line of JSON about a training run: what results/ keeps.

    python results/record_run.py runs/small --commit "$(git rev-parse HEAD)" >> results/training.jsonl

The commit is an argument because a GPU machine may hold a copy of the tree without its history.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from dsattn import __version__
from dsattn.backends import TABLE, Choice, choose
from dsattn.config import RunConfig
from dsattn.ops.dsa import choose_whole
from dsattn.plan import run_calls
from dsattn.training.metrics import Health, read_metrics
from dsattn.training.runs import config_from_dict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    options = parser.parse_args()
    print(json.dumps(record(options.run, options.commit, options.dirty)))


def record(run: Path, commit: str, dirty: bool) -> dict[str, Any]:
    """The record; step times are taken from steps 2 and on of each stage, as logged."""
    summary = json.loads((run / "summary.json").read_text())
    config = json.loads((run / "config.json").read_text())
    model, indexer = config["model"], config["model"]["dsa"]["indexer"]
    tokens = config["data"]["pack_tokens"] * config["train"]["packs_per_step"]
    events = [event for event in read_metrics(run) if event["kind"] == "train"]
    stages = []
    for index, stage in enumerate(config["train"]["stages"]):
        logged = [event for event in events if event["stage"] == index]
        if len(logged) < 2:
            raise SystemExit(f"{run}: stage {index} logged {len(logged)} steps, two are needed: --train.log-every 1")
        ms = [1000 * tokens / event["tokens_per_second"] for event in logged[1:]]
        stages.append(
            {
                "mode": stage["mode"],
                "steps": stage["steps"],
                "ms": {"median": statistics.median(ms), "min": min(ms), "max": max(ms)},
                "tokens_per_second": statistics.median(event["tokens_per_second"] for event in logged[1:]),
                "tflops": statistics.median(event["tflops"] for event in logged[1:]),
                "mfu": middle([event.get("mfu") for event in logged[1:]]),
                "lm_loss": [logged[0]["lm_loss"], logged[-1]["lm_loss"]],
                "kl": [logged[0]["kl"], logged[-1]["kl"]],
                "held_out_loss": summary["stages"][index]["held_out_loss"],
            }
        )
    choices = chosen(config_from_dict(config))
    return {
        "op": "train",
        "recipe": summary["recipe"],
        "backend": {operation: choice.name for operation, choice in choices.items()},
        "passed_over": {operation: dict(choice.passed_over) for operation, choice in choices.items()},
        "shape": {
            "T": config["data"]["pack_tokens"],
            "packs_per_step": config["train"]["packs_per_step"],
            "layers": model["num_layers"],
            "M": model["hidden_size"],
            "H": model["attention"]["heads"],
            "K": indexer["top_k"],
            "H_I": indexer["heads"],
            "D": indexer["head_dim"],
            "parameters": summary["parameters"],
            "dtype": config["train"]["dtype"],
        },
        "stages": stages,
        "recall": recall(summary["stages"][-1]["health"]),
        "peak_bytes": summary["peak_bytes"],
        "seconds": summary["seconds"],
        "gpu": summary["device"],
        "driver": driver(),
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def middle(values: list[float | None]) -> float | None:
    """Their median; None where one is missing: the device's peak is not known, or the run is an old one."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def chosen(config: RunConfig) -> dict[str, Choice]:
    """Who serves each operation of the run on this machine. An operation without the named backend is left to auto."""
    named, found = config.model.dsa.backend, {}
    for name, call in run_calls(config).items():
        operation, _, direction = name.partition(".")
        if operation == "dsa_attention":
            found[name] = choose_whole(direction, call, named)
        else:
            found[name] = choose(name, call, named if any(row.name == named for row in TABLE[name]) else "auto")
    return found


def recall(health: dict[str, Any] | None) -> dict[str, float | None] | None:
    """Means over layers at the end of the run."""
    if health is None:
        return None
    return {name: Health.from_dict(health).mean(name) for name in ("recall", "random", "recency", "oracle")}


def driver() -> str | None:
    """The NVIDIA driver's version, where there is one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
