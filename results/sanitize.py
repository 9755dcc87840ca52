"""compute-sanitizer's memcheck and racecheck over small cases of our kernels on this GPU: a line of JSON each.

    python results/sanitize.py --commit "$(git rev-parse HEAD)" > results/sanitize.jsonl

The cases run once without a tool, which compiles the kernels and tells their names: the tools watch those and none of
torch's. Each tool has SECONDS, and what it had no time for is named in `left_out`. A control, a read beyond the keys or
a race in shared memory, must be seen, else a clean run would mean nothing.
compute-sanitizer is looked for on PATH, in /usr/local/cuda*/bin and in the installed wheels; where there is none, or it
may not run here, the lines say so. What racecheck says of Hopper's kernels is recorded as it is: they are synchronised
by mbarriers, fences and groups of four warps, for which it reported false hazards before 2025.4 and 2026.1 (its release
notes). Exits with 1 where a tool reported something.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import record_errors
import torch
import triton
import triton.language as tl

from dsattn import Layout, Selection, __version__, settings
from dsattn.backends.triton.launch import launch, recording
from dsattn.config import Precision
from dsattn.ops import select_keys, select_topk, sparse_mla
from dsattn.testing import SCORES, hostile_scores, make_case

TOOLS = ("memcheck", "racecheck")
OPERATIONS = tuple(name for name in record_errors.OPS if name != "output_gate")  # it has no kernels
CASES = ("hopper", "selection", "fp32", "bf16")
SECONDS = 90
SECONDS_TO_COMPILE = 300
LAST = 0.6  # of a tool's time: later no step begins

ODD = {"heads": 5, "groups": 5, "width": 33, "value_dim": 21, "index_heads": 3, "index_width": 33, "top_k": 19}
TILES = {"heads": 64, "groups": 8, "width": 128, "value_dim": 128, "index_heads": 8, "index_width": 64, "top_k": 64}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--cases", nargs="+", choices=CASES, help="all that this GPU can run, if not given")
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--run", choices=["cases", *TOOLS], help="what is watched; for this script's own use")
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_cases(options.cases, options.until) if options.run == "cases" else control(options.run)
        return 0
    machine = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit,
        "dirty": options.dirty,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    bad = False
    for found in outcomes(options.sanitizer or find_tool(), options.tools, options.cases):
        bad |= found["outcome"] == "errors"
        print(json.dumps({**found, **machine}), flush=True)
    return 1 if bad else 0


def find_tool() -> str | None:
    """Path of compute-sanitizer; None where it is not installed."""
    name = "compute-sanitizer"
    places = [Path(path) for path in sorted(Path("/usr/local").glob(f"cuda*/bin/{name}"))]
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    places += sorted(packages.rglob(name)) if packages.is_dir() else []
    files = [str(place) for place in places if place.is_file() and os.access(place, os.X_OK)]
    return shutil.which(name) or next(iter(files), None)


def outcomes(sanitizer: str | None, tools: list[str], cases: list[str] | None) -> Iterator[dict[str, Any]]:
    """A record for each tool, see `judged`; or not installed, or not run, where the machine or a case refuses."""
    if sanitizer is None or not torch.cuda.is_available():
        why = {"outcome": "not installed"} if sanitizer is None else {"outcome": "not run", "report": "no CUDA GPU"}
        yield from ({"op": tool, **why, "tool": sanitizer} for tool in tools)
        return
    cases = cases or [case for case in CASES if case != "hopper" or torch.cuda.get_device_capability() == (9, 0)]
    this = [sys.executable, __file__, "--cases", *cases, "--run"]
    plain = watch([*this, "cases"], SECONDS_TO_COMPILE)
    if "\nkernels " not in plain:
        yield from ({"op": tool, "outcome": "not run", "tool": sanitizer, "report": plain[-2000:]} for tool in tools)
        return
    kernels = re.findall(r'"(\w+)"', plain.rpartition("\nkernels ")[2].partition("\n")[0])
    only = [word for kernel in kernels for word in ("--kernel-name", f"kernel_name={kernel}")]
    version = re.search(r"Version (\S+)", watch([sanitizer, "--version"], 10))
    for tool in tools:
        began = time.monotonic()
        command = [sanitizer, "--tool", tool, "--show-backtrace", "no"]
        seen = watch([*command, *this, tool], SECONDS / 2, alone=tool == "memcheck")
        left = began + SECONDS - time.monotonic()
        watched = [*command, *only, *this, "cases", "--until", str(time.time() + LAST * left)]
        report = watch(watched, left, alone=tool == "memcheck")
        found = judged(tool, seen, report, steps_ran(plain))
        seconds = round(time.monotonic() - began)
        told = {"tool": sanitizer, "version": version[1] if version else None, "seconds": seconds, "kernels": kernels}
        yield {"op": tool, **found, **told}


def judged(tool: str, seen: str, report: str, planned: list[str]) -> dict[str, Any]:
    """What a tool's words about the control (`seen`) and about the cases (`report`) come to.

    outcome: clean; errors; cut short (no error, no time for all); blind (control not seen); not run (no step ended).
    errors: reports, of which `kernels_reported` are those that name a kernel; None where there is no summary. warnings:
    of the tool about itself.
    """
    ran = steps_ran(report)
    errors, by_kernel = count_errors(report), kernels_reported(report)
    warnings = sorted({line for line in report.splitlines() if re.match(r"=+ Warning: (?!Race)", line)})
    rest = {"errors": errors, "warnings": warnings, "left_out": [step for step in planned if step not in ran]}
    if errors or by_kernel:
        words = "\n".join(line for line in report.splitlines() if line.startswith("====="))
        return {"outcome": "errors", **rest, "kernels_reported": by_kernel, "report": words[:4000]}
    if not ran:
        return {"outcome": "not run", **rest, "report": report[-2000:]}
    if not count_errors(seen):
        return {"outcome": "blind", **rest, "report": seen[-2000:]}
    if errors is None:
        return {"outcome": "cut short", **rest, "report": report[-2000:]}
    return {"outcome": "cut short" if rest["left_out"] else "clean", **rest}


def steps_ran(report: str) -> list[str]:
    return re.findall(r"^ran (.+)$", report, re.MULTILINE)


def count_errors(report: str) -> int | None:
    """Of the tool's summary, racecheck's warnings among them; None where it came to none."""
    counts = re.findall(r"SUMMARY: (\d+) (?:error|hazard)", report)
    return max(map(int, counts)) if counts else None


def kernels_reported(report: str) -> dict[str, int]:
    """Kernel -> reports of the tool that name it."""
    reported = re.findall(
        r"^=+\s+(?:(?:Error|Warning): Race reported between \w+ access )?at (\w+)", report, re.MULTILINE
    )
    return dict(Counter(reported))


def watch(command: list[str], seconds: float, *, alone: bool = False) -> str:
    """What `command` prints, and the processes it starts, until it ends or is killed after `seconds`.

    alone: each tensor is an allocation of its own, so that every edge counts.
    """
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if alone else None
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        try:
            process.wait(timeout=seconds)
            ended = ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"\nkilled after {seconds:.0f} s"
        printed.seek(0)
        return printed.read() + ended


def run_cases(cases: list[str], until: float) -> None:
    """Run every step that begins before `until`, in seconds since the epoch, and tell of each that ended."""
    with settings(first_use_checks=False), recording() as kernels:
        for case in cases:
            for name, step in steps_of(case).items():
                if time.time() < until:
                    step()
                    torch.cuda.synchronize()
                    print(f"ran {case}: {name}", flush=True)
    print("kernels", json.dumps(sorted(kernels)))


def steps_of(case: str) -> dict[str, Callable[[], object]]:
    """Operation -> a call of it, forward and backward, in both modes.

    fp32: an odd geometry. bf16: whole tiles. hopper: what its kernels serve, several tiles of keys a row.
    """
    packed = Layout.packed([37, 0, 1, 90], total=131)
    if case == "selection":
        ranks = {f"select_topk {name}": partial(rank, name) for name in SCORES}
        return {**ranks, **{f"select_keys {name}": partial(select, "triton", name) for name in ("bf16", "fp8")}}
    if case == "hopper":
        selects = {f"select_keys {name}": partial(select, "hopper", name) for name in ("bf16", "fp8")}
        longer = Layout.packed([37, 0, 1, 200], total=240)
        attends = {
            name: partial(train, name, {"top_k": 192}, torch.bfloat16, longer)
            for name in ("sparse_mla", "dsa_attention")
        }
        return {**selects, **attends}
    sizes, dtype = (ODD, torch.float32) if case == "fp32" else (TILES, torch.bfloat16)
    return {name: partial(train, name, sizes, dtype, packed) for name in OPERATIONS}


def train(name: str, changes: dict[str, int], dtype: torch.dtype, layout: Layout) -> None:
    """Forward and backward of an operation of `record_errors`, in both modes."""
    sizes, leaves, run = record_errors.OPS[name]
    if sizes is record_errors.MLA:
        changes = {**changes, "groups": 1}
    record_errors.OPS["this"] = (replace(sizes, **changes), leaves, run)
    name = f"{layout.num_keys} keys"
    record_errors.LAYOUTS[name] = lambda: layout
    case, selection = record_errors.case_of("this", name, dtype, "cuda")
    for deterministic in (False, True):
        with settings(deterministic=deterministic):
            record_errors.results_of("this", run, case, selection)


def rank(name: str) -> None:
    """Rows that are searched in pieces, and what makes that hard."""
    keys = Layout.packed([5000]).keys.row_slice(4984, 4993)
    select_topk(hostile_scores(name, 9, 5000).to("cuda"), keys.to("cuda"), 700)


def select(backend: str, precision: Precision) -> None:
    """Keys enough to go round every ring of tiles."""
    case = make_case(Layout.continuation(1400, 40), replace(record_errors.MLA, top_k=64), device="cuda")
    q, k, w = (x.to(torch.bfloat16) for x in (case.q_i, case.k_i, case.w))
    select_keys(q, k, w, case.keys, 64, precision=precision, backend=backend)


def control(tool: str) -> None:
    """Keys that are not there; or a race."""
    if tool == "memcheck":
        q, kv = torch.zeros(4, 4, 24, device="cuda"), torch.zeros(8, 24, device="cuda")
        beyond = Selection.from_index(torch.full((4, 1), 2**24, device="cuda"))
        with settings(first_use_checks=False, strict=True):
            sparse_mla(q, kv, beyond, scale=1.0, value_dim=16)
    else:
        launch(racing_kernel, (1,), torch.zeros(128, dtype=torch.int32, device="cuda"), num_warps=4)
    torch.cuda.synchronize()


@triton.jit
def racing_kernel(out):
    """Each of 128 threads writes a word of shared memory and reads that of another warp, and nobody waits."""
    thread = tl.arange(0, 128)
    read = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b8 words[512];
        .reg .b32 base, mine, other;
        mov.u32 base, words;
        shl.b32 mine, $1, 2;
        xor.b32 other, mine, 256;
        add.u32 mine, mine, base;
        add.u32 other, other, base;
        st.volatile.shared.b32 [mine], $1;
        ld.volatile.shared.b32 $0, [other];
        }""",
        "=r,r",
        [thread],
        tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out + thread, read)


if __name__ == "__main__":
    sys.exit(main())
