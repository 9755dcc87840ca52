"""Two GPUs beside one: losses, speed, memory and overlap of each kind of parallelism on the `small` recipe.

    python results/record_parallel.py --commit "$(git rev-parse HEAD)" >> results/parallel.jsonl
    python results/record_parallel.py --commit ... --dtype float32 --tokens 8192 --steps 2 >> results/parallel.jsonl

One line of JSON a case, the same packs and weights in each: one process, then `torchrun --nproc_per_node=2` with cp,
tp, dp_shard and pp 2. Every case has its own time limit; one that fails or hangs gives a line that says so, and a
failing case or a loss beside the bar ends the script with status 1. fp32 losses must agree to 1e-5, bfloat16 to 1e-2.
Communication is what NCCL's kernels take in one profiled step of rank 0; overlapped is what of it other kernels cover.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsattn import Layout, __version__
from dsattn.config import ModelConfig, ParallelConfig, StageConfig, TrainConfig
from dsattn.parallel.apply import apply
from dsattn.parallel.mesh import build_mesh, processes
from dsattn.training import consensus
from dsattn.training.packs import IGNORED_LABEL, Pack
from dsattn.training.recipes import small
from dsattn.training.stages import make_optimizer, set_mode
from dsattn.training.step import accumulate_gradients

CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "dp_shard 2": {"dp_shard": 2},
    "cp 2": {"cp": 2},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
}
BAR = {"float32": 1e-5, "bfloat16": 1e-2}
PACKS = 2


def main() -> int:
    options = arguments()
    if options.worker:
        work(options)
        return 0
    facts = {"commit": options.commit, "dirty": options.dirty, "date": datetime.datetime.now(datetime.UTC).date()}
    one: dict[str, Any] | None = None
    wrong = False
    for name in options.cases or CASES:
        record = run(name, options)
        one = record if name == "one" else one
        if one is not None and "losses" in record and "losses" in one:
            record["loss_apart"] = max(abs(a - b) / b for a, b in zip(record["losses"], one["losses"], strict=True))
            record["speedup"] = record["tokens_per_second"] / one["tokens_per_second"]
            wrong |= record["loss_apart"] > BAR[options.dtype]
        wrong |= "error" in record
        print(json.dumps({"op": "parallel", "case": name, **record, **facts}, default=str), flush=True)
    return int(wrong)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), help="all without it; give `one` first")
    parser.add_argument("--tokens", type=int, default=65536, help="of one pack; a step has two")
    parser.add_argument("--steps", type=int, default=4, help="the first is left out of the speed")
    parser.add_argument("--layers", type=int, default=None, help="fewer than the recipe's")
    parser.add_argument("--dtype", choices=list(BAR), default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=int, default=110, help="limit of a case")
    parser.add_argument("--worker", default=None, help="a case's name: this process is one rank of it")
    parser.add_argument("--out", default=None, help="where rank 0 of a case writes")
    return parser.parse_args()


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a case; what rank 0 wrote, or what went wrong."""
    ranks = ParallelConfig(**CASES[name]).world_size
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", __file__, *sys.argv[1:]]
        command += ["--worker", name, "--out", str(out)]
        ended = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, said = ended.communicate(timeout=options.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(ended.pid, signal.SIGTERM)
            try:
                _, said = ended.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(ended.pid, signal.SIGKILL)
                _, said = ended.communicate()
            return {"error": f"not done in {options.seconds} s", "said": said[-1500:]}
        if not out.exists():
            return {"error": f"exit status {ended.returncode}", "said": said[-3000:]}
        return json.loads(out.read_text())


def work(options: argparse.Namespace) -> None:
    """One rank of a case."""
    with processes(options.device):
        device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
        record = measure(options, ParallelConfig(**CASES[options.worker]), device)
        if consensus.rank() == 0:
            Path(options.out).write_text(json.dumps(record))


def measure(options: argparse.Namespace, parallel: ParallelConfig, device: torch.device) -> dict[str, Any]:
    recipe = small()
    model = dataclasses.replace(recipe.model, num_layers=options.layers or recipe.model.num_layers)
    stage = StageConfig(mode="sparse", lr=3e-4)
    train = TrainConfig(
        stages=(stage,), packs_per_step=PACKS, packs_per_micro_batch=1, dtype=options.dtype, recompute="selective"
    )
    torch.manual_seed(0)
    whole = apply(model, build_mesh(parallel, device), train)
    set_mode(whole.model, stage.mode)
    optimizer = make_optimizer(whole.model, train, stage)
    losses: list[float] = []
    norms: list[float] = []
    seconds: list[float] = []

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        found = accumulate_gradients(whole, packs(model, options.tokens, number), stage, train)
        norms.append(whole.clip_gradients(train.grad_clip))
        optimizer.step()
        losses.append(found.lm)

    for number in range(options.steps):
        began = time.perf_counter()
        step(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    traffic = profiled(lambda: step(options.steps)) if device.type == "cuda" else None
    parts = {name: getattr(parallel, name) for name in ("dp_shard", "cp", "tp", "pp")}
    shape = {"T": options.tokens, "packs_per_step": PACKS, "layers": model.num_layers, "dtype": options.dtype}
    return {
        "mesh": parts,
        "shape": {**shape, "recompute": train.recompute, "parameters": whole.count_parameters()},
        "losses": losses[: options.steps],
        "grad_norms": norms[: options.steps],
        "seconds": seconds,
        "tokens_per_second": PACKS * options.tokens / statistics.median(seconds[1:] or seconds),
        "peak_bytes": consensus.everyone(peak),
        "communication": traffic,
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def packs(model: ModelConfig, tokens: int, step: int) -> list[Pack]:
    """Random text in documents of a half, a quarter and two eighths of a pack."""
    generator = torch.Generator().manual_seed(step)
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens - tokens // 2 - tokens // 4 - tokens // 8]
    made = []
    for _ in range(PACKS):
        ids = torch.randint(0, model.vocab_size, (tokens,), generator=generator)
        labels = ids.roll(-1)
        labels[torch.tensor(lengths).cumsum(0) - 1] = IGNORED_LABEL
        made.append(Pack(ids, labels, Layout.packed(lengths), tokens - len(lengths)))
    return made


def profiled(step: Any) -> dict[str, float]:
    """Milliseconds of one step on this rank: its kernels, NCCL's among them, and what others cover of NCCL's."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [one for one in events if one.get("cat") == "kernel"]
    spans = {True: [], False: []}
    for one in kernels:
        spans["nccl" in one["name"].lower()].append((one["ts"], one["ts"] + one["dur"]))
    ours, theirs = list(merged(spans[True])), list(merged(spans[False]))
    covered = sum(overlap(span, theirs) for span in ours)
    moving = length(ours)
    return {
        "kernel_ms": length(list(merged(spans[True] + spans[False]))) / 1e3,
        "compute_ms": length(theirs) / 1e3,
        "nccl_ms": moving / 1e3,
        "nccl_overlapped_ms": covered / 1e3,
        "overlapped_share": covered / moving if moving else 0.0,
        "nccl_kernels": float(len(spans[True])),
    }


Span = tuple[float, float]


def merged(spans: list[Span]) -> Iterator[Span]:
    """The union of spans, in order, without overlaps."""
    current: Span | None = None
    for start, stop in sorted(spans):
        if current is None or start > current[1]:
            if current is not None:
                yield current
            current = (start, stop)
        else:
            current = (current[0], max(current[1], stop))
    if current is not None:
        yield current


def overlap(span: Span, others: list[Span]) -> float:
    return sum(max(0.0, min(span[1], stop) - max(span[0], start)) for start, stop in others)


def length(spans: list[Span]) -> float:
    return sum(stop - start for start, stop in spans)


if __name__ == "__main__":
    sys.exit(main())
