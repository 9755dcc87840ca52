"""Every record that one GPU can make, in one call: benchmarks, errors, sanitizer, recompute, Megatron, training, tests.

    python results/record_all.py --commit "$(git rev-parse HEAD)" --into /tmp/records --warm-up

Steps run one after the other, each in a process of its own with a limit of its own: one that fails or is late is told,
its output is in NAME.log, and the rest go on. `--only bench tests` takes the steps whose names begin so; `--list` shows
what they run. Records go to files of --into that are named as those beside this script, to be added to them: `cat
/tmp/records/kernels.jsonl >> results/kernels.jsonl`. Peers are timed where they are installed.
--warm-up first runs the chosen benchmarks all at once and drops what they find: kernels are compiled on many cores, and
found in the caches afterwards. Exits with 1 where a step failed or had no time.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent
TESTS = RESULTS.parent / "tests"

BENCHMARKS = {  # lines of one name share a process, so that peers compile their kernels once
    "select": (
        "select_keys --backend hopper",
        "select_keys --backend triton",
        "select_topk",
    ),
    "mla": (
        "sparse_mla --backend hopper",
        "sparse_mla --backend triton",
        "sparse_mla --backend hopper --shape deepseek",
        "sparse_mla --backend hopper --keys 32768 --order random recency --deterministic no",
        f"sparse_mla --backend hopper --keys 32768 --order recorded --pattern {RESULTS / 'selection.npz'}",
        "sparse_mla --backend hopper --keys 32768 --order random --no-lengths --deterministic no",
    ),
    "kl": ("indexer_kl", "dense_kl --keys 8192"),
    "layer": ("dsa_layer --keys 8192 16384 32768 65536 131072",),
    "rest": ("sparse_gqa --keys 4096 32768", "dense_gqa --keys 8192", "dense_mla --keys 4096"),
}
SMALL = (
    "train small --data.pack-tokens 32768 --train.packs-per-step 1 --train.stages.0.steps 6 --train.stages.1.steps 4 "
    "--train.stages.2.steps 6 --train.eval-packs 1 --train.log-every 1"
)
WARM_UP_SECONDS = 200


@dataclass(frozen=True)
class Step:
    """commands: each behind `python`, the next only if it succeeded. writes: the file the last one prints to."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float
    writes: str | None = None

    def __str__(self) -> str:
        told = " && ".join(shlex.join(("python", *command)) for command in self.commands)
        return f"{self.name} (at most {self.seconds:.0f} s): {told}{f' >> {self.writes}' if self.writes else ''}"


def steps(into: Path, commit: Sequence[str]) -> list[Step]:
    """All of them. One that reads a trained run comes behind the step that trains it."""

    def script(name: str, file: str, seconds: float, *more: str) -> Step:
        return Step(name, ((str(RESULTS / file), *commit, *more),), seconds, f"{name}.jsonl")

    def tests(name: str, place: str, seconds: float) -> Step:
        # That plugin warns beside others, and a warning is an error here.
        options = ("-q", "-m", "gpu", "-p", "no:benchmark")
        return Step(f"tests.{name}", (("-m", "pytest", *options, str(TESTS / place)),), seconds)

    def trained(backend: str) -> Step:
        run = str(into / f"small-{backend}")
        train = ("-m", "dsattn.cli", *SMALL.split(), "--model.dsa.backend", backend, "--train.run-dir", run)
        record = (str(RESULTS / "record_run.py"), run, *commit)
        return Step(f"training.{backend}", (train, record), 150, "training.jsonl")

    fp8 = ("-m", "dsattn.cli", "bench", "select", "--precision", "fp8", "--peers", "--out", str(into), *commit)
    return [
        *(Step(f"bench.{name}", (benchmark(name, into, commit),), 300) for name in BENCHMARKS),
        tests("vendors", "backends/test_vendors_on_gpu.py", 200),
        tests("hopper", "backends/hopper", 200),
        tests("kda", "ops/test_on_gpu_kda.py", 200),
        script("full_errors", "record_full_errors.py", 240, "--seconds", "200"),
        script("errors", "record_errors.py", 200),
        trained("auto"),
        trained("triton"),
        Step("recall", ((*fp8, "--run", str(into / "small-auto")),), 150),
        script("recompute", "record_recompute.py", 200),
        script("megatron", "record_megatron.py", 100),
        script("sanitize", "sanitize.py", 560),
    ]


def benchmark(name: str, into: Path, commit: Sequence[str]) -> tuple[str, ...]:
    return (__file__, "--benchmark", name, "--into", str(into), *commit)


def main() -> int:
    options = arguments()
    commit = ("--commit", options.commit, *(("--dirty",) if options.dirty else ()))
    if options.benchmark:
        return run_benchmark(
            options.benchmark, (*commit, "--out", str(options.into), "--seconds", str(options.seconds))
        )
    chosen = [step for step in steps(options.into, commit) if step.name.startswith(tuple(options.only))]
    if options.list:
        print("\n".join(map(str, chosen)))
        return 0
    end = time.monotonic() + 60 * options.minutes
    options.into.mkdir(parents=True, exist_ok=True)
    if options.warm_up:
        warm_up([step for step in chosen if step.name.startswith("bench.")], end)
    failed = [step.name for step in chosen if not done(step, options.into, end)]
    if failed:
        print(f"record_all: not done: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--into", type=Path, required=True, help="folder for records and logs")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="steps whose names begin so")
    parser.add_argument("--list", action="store_true", help="show the chosen steps, and run nothing")
    parser.add_argument("--warm-up", action="store_true", help="compile the benchmarks' kernels side by side first")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of all")
    parser.add_argument("--benchmark", choices=list(BENCHMARKS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_benchmark(name: str, more: Sequence[str]) -> int:
    """Its lines in this process; 1 where one of them failed."""
    from dsattn.cli.__main__ import main as dsattn

    codes = [dsattn(["bench", *line.split(), "--peers", *more]) for line in BENCHMARKS[name]]
    return int(any(codes))


def warm_up(benchmarks: Sequence[Step], end: float) -> None:
    """Run them all at the same time, with few repeats, and keep only what was compiled."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for step in benchmarks:
            into = Path(folder) / step.name
            into.mkdir()
            name = step.name.removeprefix("bench.")
            command = (*benchmark(name, into, ("--commit", "warm-up")), "--seconds", "0.01")
            started.append(start(command, into / "log"))
        for process in started:
            finish(process, min(WARM_UP_SECONDS, end - time.monotonic()))
    print(f"warm-up: {time.monotonic() - began:.0f} s", flush=True)


def done(step: Step, into: Path, end: float) -> bool:
    """Run a step and say how it went."""
    began = time.monotonic()
    limit = min(step.seconds, end - began)
    status: int | str = "no time"
    for number, command in enumerate(step.commands if limit > 0 else (), start=1):
        writes = into / step.writes if step.writes and number == len(step.commands) else None
        process = start(command, into / f"{step.name}.log", writes)
        status = finish(process, began + limit - time.monotonic())
        if status != 0:
            break
    print(f"{step.name}: {status if status else 'done'}, {time.monotonic() - began:.0f} s", flush=True)
    return status == 0


def start(command: Sequence[str], log: Path, writes: Path | None = None) -> subprocess.Popen[bytes]:
    """`python COMMAND`, a process group of its own. What it prints goes to the log, or is added to `writes`."""
    with log.open("ab") as said, (writes or log).open("ab") as printed:
        return subprocess.Popen([sys.executable, *command], stdout=printed, stderr=said, start_new_session=True)


def finish(process: subprocess.Popen[bytes], seconds: float) -> int | str:
    """The exit status; a process that is late is killed with its children."""
    try:
        return process.wait(max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "late"


if __name__ == "__main__":
    sys.exit(main())
