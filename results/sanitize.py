"""compute-sanitizer over small cases of every operation on this GPU: a line of JSON from memcheck, one from racecheck.

    python results/sanitize.py --commit "$(git rev-parse HEAD)" > results/sanitize.jsonl

The tool is looked for on PATH, in /usr/local/cuda*/bin and in the installed wheels. Where there is none, or it may not
run here, the line says so. A control that reads beyond its keys must be seen by memcheck, else a clean run would mean
nothing. racecheck watches shared memory; it has no control here, and what it knows of mbarriers and asynchronous copies
is the tool's matter: its words are in the line.
Exits with 1 where a tool found something in our kernels.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsattn import Selection, __version__, settings
from dsattn.ops import sparse_mla

TOOLS = ("memcheck", "racecheck")
DONE = "all cases ran"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--seconds", type=float, default=400, help="of a tool's run at most")
    parser.add_argument("--run", choices=["cases", "control"], help="what the tool watches; for this script's own use")
    options = parser.parse_args()
    if options.run:
        control() if options.run == "control" else cases()
        return 0
    machine = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit,
        "dirty": options.dirty,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    failed = 0
    for name in options.tools:
        found = outcome(find_tool(), name, options.seconds)
        print(json.dumps({"op": name, **found, **machine}), flush=True)
        failed |= found["outcome"] == "errors"
    return failed


def find_tool() -> str | None:
    """Path of compute-sanitizer; None where it is not installed."""
    name = "compute-sanitizer"
    places = [Path(path) for path in sorted(Path("/usr/local").glob(f"cuda*/bin/{name}"))]
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    places += sorted(packages.rglob(name)) if packages.is_dir() else []
    files = [str(place) for place in places if place.is_file() and os.access(place, os.X_OK)]
    return shutil.which(name) or next(iter(files), None)


def outcome(tool: str | None, name: str, seconds: float) -> dict[str, Any]:
    """outcome: clean, errors, not installed, not run (the tool or the machine refuses) or blind (control not seen)."""
    if tool is None:
        return {"outcome": "not installed", "tool": None}
    if not torch.cuda.is_available():
        return {"outcome": "not run", "tool": tool, "report": "no CUDA GPU"}
    control_seen = name != "memcheck" or count_errors(watch(tool, name, "control", seconds))
    report = watch(tool, name, "cases", seconds)
    errors = count_errors(report)
    if DONE not in report or errors is None:
        return {"outcome": "not run", "tool": tool, "report": report[-2000:]}
    if errors:
        return {"outcome": "errors", "tool": tool, "errors": errors, "report": report[:4000]}
    return {"outcome": "clean" if control_seen else "blind", "tool": tool, "errors": 0}


def watch(tool: str, name: str, what: str, seconds: float) -> str:
    """What the tool and the watched process print. Each tensor is an allocation of its own: every edge counts."""
    command = [tool, "--tool", name, sys.executable, __file__, "--run", what]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout + done.stderr


def count_errors(report: str) -> int | None:
    """Of the tool's summary, hazards of memory included; None where it came to none."""
    summary = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)", report)
    return int(summary[1]) if summary else None


def cases() -> None:
    """Every operation, forward and backward, in both modes.

    In fp32 with an odd geometry; in bf16 with one of whole tiles, and with the models' where Hopper has own kernels.
    """
    import record_errors

    odd = {"heads": 5, "width": 33, "value_dim": 21, "index_heads": 3, "index_width": 33, "top_k": 19}
    tiles = {"heads": 64, "width": 128, "value_dim": 128, "index_heads": 8, "index_width": 64, "top_k": 64}
    operations = {name: one for name, one in record_errors.OPS.items() if name != "output_gate"}  # it has no kernels
    record_errors.LAYOUTS["small"] = lambda: record_errors.Layout.packed([37, 0, 1, 90], total=131)
    models = {"top_k": 100}
    for changes, dtype in ((odd, torch.float32), (tiles, torch.bfloat16), (models, torch.bfloat16)):
        for name, (sizes, leaves, run) in operations.items():
            if changes is models and name not in ("sparse_mla", "dsa_attention"):
                continue
            groups = 1 if sizes is record_errors.MLA else 5 if changes is odd else 8
            record_errors.OPS[name] = (replace(sizes, **changes, groups=groups), leaves, run)
            case, selection = record_errors.case_of(name, "small", dtype, "cuda")
            for deterministic in (False, True):
                with settings(deterministic=deterministic, first_use_checks=False):
                    record_errors.results_of(name, run, case, selection)
    for operation in ("select_keys", "select_topk"):
        record_errors.wrong_selections(operation)
    torch.cuda.synchronize()
    print(DONE)


def control() -> None:
    """Keys that are not there."""
    q, kv = torch.zeros(4, 4, 24, device="cuda"), torch.zeros(8, 24, device="cuda")
    beyond = Selection.from_index(torch.full((4, 1), 2**24, device="cuda"))
    with settings(first_use_checks=False, strict=True):
        sparse_mla(q, kv, beyond, scale=1.0, value_dim=16)
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
