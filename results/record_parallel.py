"""Two GPUs beside one: losses, speed, memory and overlap of each kind of parallelism on the `small` recipe.

    python results/record_parallel.py --commit "$(git rev-parse HEAD)" >> results/parallel.jsonl

One line of JSON a case, written when it is done: one process, then two with dp_shard, cp, tp and pp 2, all with the
same packs and weights, in sparse training; one process and dp_shard 2 with `train.compile`, too; one process and tp 2
in the warm-up. First in bfloat16 on long packs, for
speed; then in fp32 on shorter packs and fewer layers.
Losses and gradient norms must be those of one process to 1e-5 in fp32, to 1e-2 in bfloat16, in every step.
Short runs side by side compile the kernels; then one `torchrun` goes through all cases. A case that fails, or takes
more than `--seconds`, is told on stderr with the last lines of each rank, and those behind it go on in another launch.
Exits with 1 where a case is missing or beside the bar.
On a CPU: --device cpu --recipe tiny --tokens 512 --fp32-tokens 256.
Communication is what NCCL's kernels take in one profiled step, of each rank: data moves while both ranks are in such
a kernel, before that one waits for the other. Covered is what of the moving other kernels of that rank cover.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import faulthandler
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record_run import driver

from dsattn import Layout, __version__
from dsattn.config import Mode, ParallelConfig, TrainConfig
from dsattn.parallel.apply import apply
from dsattn.parallel.mesh import ParallelMesh, build_mesh, processes
from dsattn.training import consensus
from dsattn.training.packs import IGNORED_LABEL, Pack
from dsattn.training.recipes import RECIPES
from dsattn.training.stages import learning_rate, make_optimizer, set_mode
from dsattn.training.step import accumulate_gradients

CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "one, compiled": {},
    "dp_shard 2": {"dp_shard": 2},
    "dp_shard 2, compiled": {"dp_shard": 2},
    "cp 2": {"cp": 2},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "one, warm-up": {},
    "tp 2, warm-up": {"tp": 2},
}
ALONE = ("one", "one, warm-up")  # to which the others of their mode are compared
WARM = ("one", "tp 2", "one, warm-up", "tp 2, warm-up")  # kernels of the others are compiled with those of these
BAR = {"float32": 1e-5, "bfloat16": 1e-2}
PACKS = 2
LINES = 20  # of what a rank said last


@dataclass(frozen=True)
class Job:
    """A case and its size. steps: the first is not timed. layers: None for the recipe's."""

    case: str
    recipe: str
    dtype: Any
    tokens: int
    layers: int | None
    steps: int
    profile: bool

    def __str__(self) -> str:
        return f"{self.case}, {self.dtype}"

    @property
    def mode(self) -> Mode:
        return "warmup" if "warm-up" in self.case else "sparse"


def main() -> int:
    options = arguments()
    if options.jobs:
        work(options, [Job(**one) for one in json.loads(options.jobs)])
        return 0
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = {"driver": driver(), "commit": options.commit, "dirty": options.dirty, "date": today}
    end = time.monotonic() + 60 * options.minutes
    jobs = planned(options)
    if not options.no_warm_up:
        warm_up(jobs, options, end)
    ones: dict[tuple[str, str], dict[str, Any]] = {}
    wrong = False
    while jobs and time.monotonic() < end:
        done = 0
        for record, job in zip(launched(jobs, options, options.seconds, end), jobs, strict=False):
            done += 1
            if job.case in ALONE:
                ones[job.dtype, job.mode] = record
            elif one := ones.get((job.dtype, job.mode)):
                record |= beside(record, one)
                wrong |= not all(apart <= BAR[job.dtype] for apart in record["apart"].values())
            print(json.dumps({"op": "parallel", "case": job.case, **record, **facts}), flush=True)
        wrong |= done < len(jobs)
        jobs = jobs[done + 1 :]  # the one behind those that are done has failed
    for job in jobs:
        tell(f"{job}: not started, {options.minutes} minutes were over")
    return int(wrong or bool(jobs))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), help="all without it; give `one` first")
    parser.add_argument("--dtypes", nargs="*", choices=list(BAR), default=["bfloat16", "float32"])
    parser.add_argument("--recipe", choices=list(RECIPES), default="small")
    parser.add_argument("--tokens", type=int, default=65536, help=f"of one pack in bfloat16; a step has {PACKS}")
    parser.add_argument("--layers", type=int, help="in bfloat16; the recipe's without it")
    parser.add_argument("--steps", type=int, default=3, help="in bfloat16; the first is left out of the speed")
    parser.add_argument("--fp32-tokens", type=int, default=8192)
    parser.add_argument("--fp32-layers", type=int, default=4)
    parser.add_argument("--fp32-steps", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=120, help="limit of a case, and of a launch's start")
    parser.add_argument("--warm-up-seconds", type=float, default=170, help="limit of the runs that compile")
    parser.add_argument("--no-warm-up", action="store_true")
    parser.add_argument("--minutes", type=float, default=9, help="limit of all")
    parser.add_argument("--jobs", help="for this script's own ranks: what to run")
    parser.add_argument("--folder", type=Path, help="for its ranks: where they write what they say")
    return parser.parse_args()


def planned(options: argparse.Namespace) -> list[Job]:
    sizes = {
        "bfloat16": (options.tokens, options.layers, options.steps, True),
        "float32": (options.fp32_tokens, options.fp32_layers, options.fp32_steps, False),
    }
    cases = options.cases or CASES
    return [Job(case, options.recipe, dtype, *sizes[dtype]) for dtype in options.dtypes for case in cases]


def warm_up(jobs: Sequence[Job], options: argparse.Namespace, end: float) -> None:
    """Compile the kernels into Triton's cache: each launch runs one step of one layer, all at the same time."""
    short = [dataclasses.replace(job, layers=1, steps=1, profile=False) for job in jobs if job.case in WARM]

    def run(job: Job) -> None:
        began = time.monotonic()
        list(launched([job], options, options.warm_up_seconds, end))
        tell(f"warm-up of {job}: {time.monotonic() - began:.0f} s")

    with concurrent.futures.ThreadPoolExecutor(max(len(short), 1)) as pool:
        list(pool.map(run, short))


def launched(jobs: Sequence[Job], options: argparse.Namespace, seconds: float, end: float) -> Iterator[dict[str, Any]]:
    """What rank 0 found in one job after the other, as it comes, until all are done or one has failed."""
    left = end - time.monotonic()
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=localhost:0", __file__, "--commit", options.commit, "--device", options.device]
        command += ["--seconds", str(seconds), "--minutes", str(left / 60), "--folder", folder]
        command += ["--jobs", json.dumps([dataclasses.asdict(job) for job in jobs])]
        with open(f"{folder}/torchrun", "w") as said:
            ranks = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        timer = threading.Timer(left + 30, ranks.kill)  # ranks end themselves before that
        timer.daemon = True
        timer.start()
        assert ranks.stdout is not None
        for line in ranks.stdout:
            if line.startswith("{"):
                found += 1
                yield json.loads(line)
        status = ranks.wait()
        timer.cancel()
        if found < len(jobs):
            tell(f"{jobs[found]}: failed, status {status}")
            for path in sorted(Path(folder).glob("rank *")) or [Path(folder, "torchrun")]:
                tell(f"--- {path.name}\n{last_words(path.read_text(errors='replace'))}")


def last_words(said: str) -> str:
    """The end of what a process said; of a thread that was late, its innermost calls, which come first."""
    lines, late = said.splitlines(), said.rfind("Timeout (")
    return "\n".join(lines[-LINES:] if late < 0 else said[late:].splitlines()[: 2 * LINES])


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def beside(record: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """The largest relative differences from one process, and the speed beside it. Losses near zero count as 0.1."""
    apart = {
        name: max(abs(a - b) / max(abs(b), 0.1) for a, b in zip(record[name], one[name], strict=True))
        for name in ("losses", "kl", "grad_norms")
    }
    return {"apart": apart, "speedup": record["tokens_per_second"] / one["tokens_per_second"]}


def work(options: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """One rank of a launch. What it says goes to a file; one that is late says where it is, and ends."""
    rank = os.environ["RANK"]
    os.dup2(os.open(options.folder / f"rank {rank}", os.O_WRONLY | os.O_CREAT), 2)
    end = time.monotonic() + 60 * options.minutes

    def limit() -> None:
        faulthandler.dump_traceback_later(max(min(options.seconds, end - time.monotonic()), 1.0), exit=True)

    limit()
    with processes(options.device):
        try:
            on_gpu = options.device != "cpu" and torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
            for job in jobs:
                limit()
                record = run(job, device)
                if consensus.rank() == 0:
                    print(json.dumps(record), flush=True)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # nothing may wait for ranks that are gone
    faulthandler.cancel_dump_traceback_later()


def run(job: Job, device: torch.device) -> dict[str, Any]:
    """What rank 0 found. Of one process, the other rank waits."""
    parallel = ParallelConfig(**CASES[job.case])
    alone = parallel.world_size == 1
    record: dict[str, Any] = {}
    if not alone or consensus.rank() == 0:
        record = measured(job, ParallelMesh(parallel, device) if alone else build_mesh(parallel, device))
    record["peak_bytes"] = [one for one in consensus.everyone(record.get("peak_bytes")) if one is not None]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return record


def measured(job: Job, mesh: ParallelMesh) -> dict[str, Any]:
    recipe, device = RECIPES[job.recipe](), mesh.device
    model = dataclasses.replace(recipe.model, num_layers=job.layers or recipe.model.num_layers)
    stage = next(one for one in recipe.train.stages if one.mode == job.mode)
    settings: dict[str, Any] = {"packs_per_step": PACKS, "packs_per_micro_batch": 1, "recompute": "selective"}
    train = TrainConfig(stages=(stage,), dtype=job.dtype, compile="compiled" in job.case, **settings)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    whole = apply(model, mesh, train)
    set_mode(whole.model, stage.mode)
    optimizer = make_optimizer(whole.model, train, stage)
    found: dict[str, list[float]] = {"losses": [], "kl": [], "grad_norms": [], "seconds": []}

    def step(number: int) -> None:
        given = packs(model.vocab_size, job.tokens, number)
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, number)
        optimizer.zero_grad(set_to_none=True)
        losses = accumulate_gradients(whole, given, stage, train)
        norm = whole.clip_gradients(train.grad_clip)
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        numbers = (losses.lm, losses.kl_mean or 0.0, norm, time.perf_counter() - began)
        for values, value in zip(found.values(), numbers, strict=True):
            values.append(value)

    for number in range(job.steps):
        step(number)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    found = {name: list(values) for name, values in found.items()}  # the profiled step is not among them
    timed = found["seconds"][1:] or found["seconds"]
    shape = {"T": job.tokens, "packs_per_step": PACKS, "layers": model.num_layers, "dtype": job.dtype}
    return {
        "mode": stage.mode,
        "mesh": {name: mesh.size(name) for name in ("dp_shard", "cp", "tp", "pp")},
        "shape": {
            **shape,
            "recompute": train.recompute,
            "compile": train.compile,
            "parameters": whole.count_parameters(),
        },
        **found,
        "tokens_per_second": PACKS * job.tokens * len(timed) / sum(timed),
        "peak_bytes": peak,
        "communication": profiled(lambda: step(job.steps), mesh.config.world_size) if job.profile and on_gpu else None,
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def packs(words: int, tokens: int, step: int) -> list[Pack]:
    """Random text in documents of a half, a quarter and two eighths of a pack."""
    generator = torch.Generator().manual_seed(step)
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens - tokens // 2 - tokens // 4 - tokens // 8]
    made = []
    for _ in range(PACKS):
        ids = torch.randint(0, words, (tokens,), generator=generator)
        labels = ids.roll(-1)
        labels[torch.tensor(lengths).cumsum(0) - 1] = IGNORED_LABEL
        made.append(Pack(ids, labels, Layout.packed(lengths), tokens - len(lengths)))
    return made


Span = tuple[float, float]


class Kernels(NamedTuple):
    """When they ran in a step of one rank, in milliseconds of the host's clock."""

    nccl: list[Span]
    others: list[Span]


def profiled(step: Callable[[], None], ranks: int) -> list[dict[str, float | None]]:
    """`traffic` of one step of each rank."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        mine = kernels(json.loads(path.read_text()))
    everyone = consensus.everyone(mine) if ranks > 1 else [mine]
    return [traffic(one, *everyone[:rank], *everyone[rank + 1 :]) for rank, one in enumerate(everyone)]


def kernels(trace: dict[str, Any]) -> Kernels:
    """Those of a profiler's trace. Its times are microseconds behind a base in nanoseconds."""
    base, found = trace.get("baseTimeNanoseconds", 0) / 1e6, Kernels([], [])
    for one in trace["traceEvents"]:
        if one.get("cat") == "kernel":
            start = base + one["ts"] / 1e3
            spans = found.nccl if "nccl" in one["name"].lower() else found.others
            spans.append((start, start + one["dur"] / 1e3))
    return found


def traffic(mine: Kernels, *others: Kernels) -> dict[str, float | None]:
    """Milliseconds of a rank's kernels: all, those that compute, NCCL's, and what of those waits or moves data.

    ends_apart_ms: the median time from the end of a kernel of NCCL here to that of its counterpart on the next rank,
    which is how far their clocks are apart; None where they have not as many.
    """
    moving = merged(mine.nccl)
    for other in others:
        moving = common(moving, merged(other.nccl))
    computing, talking = merged(mine.others), length(merged(mine.nccl))
    ends = [sorted(stop for _, stop in one.nccl) for one in (mine, *others[:1])]
    apart = [there - here for here, there in zip(ends[0], ends[-1], strict=False)]
    return {
        "kernel_ms": length(merged(mine.nccl + mine.others)),
        "compute_ms": length(computing),
        "nccl_ms": talking,
        "nccl_kernels": float(len(mine.nccl)),
        "waiting_ms": talking - length(moving) if others else 0.0,
        "moving_ms": length(moving),
        "moving_covered_ms": length(common(moving, computing)),
        "ends_apart_ms": statistics.median(apart) if apart and len(ends[0]) == len(ends[-1]) else None,
    }


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, in order, without overlaps."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What two unions of spans have in common."""
    found: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            found.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


if __name__ == "__main__":
    sys.exit(main())
