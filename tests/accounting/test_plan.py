"""The plan of one rank's memory against measured peaks, and against counts by hand."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dsattn import accounting
from dsattn.config import (
    DataConfig,
    GQAConfig,
    KDAConfig,
    Mode,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
    RunConfig,
    StageConfig,
)
from dsattn.errors import ConfigError, InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.nn.linear import local
from dsattn.parallel.apply import apply
from dsattn.parallel.gloo import one_thread_a_group
from dsattn.parallel.mesh import build_mesh
from dsattn.training.data import Pack
from dsattn.training.recipes import RECIPES
from dsattn.training.stages import make_optimizer, set_mode
from dsattn.training.step import accumulate_gradients

TINY = RECIPES["tiny"]()
WIDE = dataclasses.replace(TINY.model, hidden_size=192, intermediate_size=768)
INDEXER = dataclasses.replace(TINY.model.dsa.indexer, query_from="hidden")
MOE = MoEConfig(experts=8, experts_per_token=2, intermediate_size=128, first_dense_layers=1)
MODELS = {
    "mla": WIDE,
    "gqa": dataclasses.replace(
        WIDE,
        attention=GQAConfig(heads=4, kv_heads=2, head_dim=32, rope_dim=16),
        dsa=dataclasses.replace(WIDE.dsa, indexer=INDEXER),
    ),
    "experts": dataclasses.replace(WIDE, moe=MOE),
    "mtp": dataclasses.replace(WIDE, mtp=MTPConfig(depths=2)),
    "repeated": dataclasses.replace(WIDE, mtp=MTPConfig(depths=2, repeated=True)),
    "shared": dataclasses.replace(WIDE, dsa=dataclasses.replace(WIDE.dsa, share_every=2, deterministic=True)),
    "heads": dataclasses.replace(WIDE, attention=dataclasses.replace(TINY.model.attention, heads=32)),
}
PEAKS = [
    ("mla", "dense", "none", "float32"),
    ("mla", "dense", "full", "float32"),
    ("mla", "warmup", "none", "float32"),
    ("mla", "warmup", "full", "float32"),
    ("shared", "warmup", "none", "bfloat16"),
    ("mla", "sparse", "none", "bfloat16"),
    ("mla", "sparse", "selective", "float32"),
    ("mla", "frozen", "full", "float32"),
    ("gqa", "sparse", "none", "float32"),
    ("heads", "warmup", "none", "float32"),
    ("heads", "warmup", "full", "bfloat16"),
    ("experts", "sparse", "full", "float32"),
    ("mtp", "dense", "none", "float32"),
    ("mtp", "sparse", "full", "float32"),
    ("repeated", "sparse", "none", "bfloat16"),
    ("repeated", "sparse", "full", "float32"),
    ("shared", "sparse", "none", "float32"),
    ("shared", "frozen", "full", "float32"),
]
TOKENS = 768


def run_of(model: str, policy: str, dtype: str, tokens: int = TOKENS) -> RunConfig:
    train = dataclasses.replace(TINY.train, recompute=policy, dtype=dtype, packs_per_step=1, packs_per_micro_batch=1)
    return RunConfig(model=MODELS[model], train=train, data=DataConfig(pack_tokens=tokens))


def pack_of(tokens: int) -> Pack:
    text = torch.randint(250, (tokens,))
    return Pack(text, text.roll(-1), Layout.causal(tokens), tokens)


def step(run: RunConfig, mode: str, device: str) -> tuple[Decoder, torch.optim.Optimizer, Callable[[], object]]:
    """A model with gradients and optimiser state, and a further micro-batch to run."""
    model = Decoder(run.model).train().to(device)
    set_mode(model, mode)
    stage = StageConfig(mode=mode)
    optimizer = make_optimizer(model, run.train, stage)
    packs = [pack_of(run.data.pack_tokens)]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return model, optimizer, lambda: accumulate_gradients(model, packs, stage, run.train)


@contextmanager
def no_talk() -> Iterator[None]:
    """The profiler writes a line to stderr whenever it starts."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def peak_on_cpu(work: Callable[[], object]) -> int:
    """Most bytes that torch's allocator held at once beyond what it held before."""
    with no_talk(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mode", "policy", "dtype"), PEAKS)
def test_peaks_are_those_measured(model, mode, policy, dtype):
    run = run_of(model, policy, dtype)
    decoder, optimizer, again = step(run, mode, "cpu")
    plan = accounting.memory_plan(run, mode, device="cpu")
    standing = sum(p.nbytes + (0 if p.grad is None else p.grad.nbytes) for p in decoder.parameters())
    standing += sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.dim())
    assert standing == sum(plan.standing[name] for name in ("parameters", "gradients", "optimiser"))
    assert plan.peak == pytest.approx(standing + peak_on_cpu(again), rel=0.1), plan


MESHES = {
    "tp": ("mla", "sparse", "none", "float32", {"tp": 2}),
    "ep": ("experts", "dense", "none", "float32", {"cp": 2, "ep": 2}),
    "cp": ("mla", "sparse", "none", "bfloat16", {"cp": 2}),
    "cp, again": ("mla", "sparse", "full", "float32", {"cp": 2}),
    "cp, warm-up, again": ("mla", "warmup", "full", "bfloat16", {"cp": 2}),
}


@one_thread_a_group()
def on_two_ranks(rank: int, folder: Path) -> None:
    """Write (bytes that stand, bytes at the peak) of this rank, by mesh."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    seen = {}
    for name in MESHES:
        run, mode = on_mesh(name)
        torch.manual_seed(0)
        whole = apply(run.model, build_mesh(run.parallel, "cpu"), run.train)
        set_mode(whole.model, mode)
        packs, stage = [pack_of(run.data.pack_tokens)], StageConfig(mode=mode)
        accumulate_gradients(whole, packs, stage, run.train)
        held = [local(x) for p in whole.model.parameters() for x in (p, p.grad) if x is not None]
        standing = beside = sum(x.nbytes for x in held)
        if run.parallel.tp > 1:  # old gradients would be set aside, and held beside new ones
            whole.model.zero_grad()
            beside = sum(local(p).nbytes for p in whole.model.parameters())
        del held
        seen[name] = standing, beside + peak_on_cpu(lambda: accumulate_gradients(whole, packs, stage, run.train))  # noqa: B023
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def on_mesh(name: str) -> tuple[RunConfig, Mode]:
    model, mode, policy, dtype, parallel = MESHES[name]
    return dataclasses.replace(run_of(model, policy, dtype, 1536), parallel=ParallelConfig(**parallel)), mode


@pytest.mark.slow
def test_peaks_of_two_ranks_are_those_measured(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for rank in range(2):
        for name, (standing, peak) in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            run, mode = on_mesh(name)
            plan = accounting.memory_plan(run, mode, device="cpu")
            assert standing == pytest.approx(plan.standing["parameters"] + plan.standing["gradients"], rel=1e-3), name
            assert plan.peak - plan.standing["optimiser"] == pytest.approx(peak, rel=0.1), (name, plan)


RESULTS = Path(__file__).parents[2] / "results"


def recorded(name: str, op: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]
    return [one for one in records if one["op"] == op and one["peak_bytes"]]


def planned(record: dict[str, Any], *, stage: int = 0, **train: Any) -> int:
    """The peak of a record's recipe; its settings stand in `shape`, or beside the record's other facts."""
    facts, small = record | record.get("shape", {}), RECIPES[record.get("recipe", "small")]()
    layers = facts.get("layers", small.model.num_layers)
    dsa = dataclasses.replace(small.model.dsa, deterministic=True if record["op"] == "recompute" else None)
    settings = {"recompute": facts["recompute"], "dtype": facts["dtype"], "packs_per_micro_batch": 1, **train}
    run = RunConfig(
        model=dataclasses.replace(small.model, num_layers=layers, dsa=dsa),
        data=DataConfig(pack_tokens=facts["T"]),
        train=dataclasses.replace(small.train, **settings),
        parallel=ParallelConfig(**record.get("mesh", {})),
    )
    return accounting.memory_plan(run, record.get("mode", "sparse"), stage=stage).peak


def test_peaks_are_those_recorded_on_an_h200():
    """By recompute policy, with the first pass's selections and without."""
    records = recorded("recompute.jsonl", "recompute")
    assert {one["recompute"] for one in records} == {"none", "selective", "full"}
    assert {one["reuse_selection"] for one in records} == {True, False}
    for one in records:
        plan = planned(one, packs_per_step=1, recompute_reuse_selection=one["reuse_selection"])
        assert plan == pytest.approx(one["peak_bytes"], rel=0.1), one


def test_peaks_of_meshes_are_those_recorded_on_two_h200s():
    """The newest of each case and dtype: older ones held tensors that are let go since. No plan is of compiled MLPs."""
    records = [one for one in recorded("parallel.jsonl", "parallel") if not one["shape"].get("compile")]
    newest = {(one["case"], one["shape"]["dtype"]): one for one in records}
    assert len(newest) == 14
    for one in newest.values():
        for rank, peak in enumerate(one["peak_bytes"]):
            stage = rank if one["mesh"]["pp"] > 1 else 0
            plan = planned(one, stage=stage, packs_per_step=one["shape"]["packs_per_step"])
            assert plan == pytest.approx(peak, rel=0.1), one


Events = list[dict[str, Any]]


def alive_at_peak(events: Events) -> tuple[int, Counter[tuple[int, str]]]:
    """(most bytes that were alive at once, how many allocations of each size and place then), of an allocator's trace.

    A place is the last line of dsattn that led there: none in the backward of torch's own operations. What was
    allocated before the trace began counts nothing, and its end nothing either.
    """
    alive: dict[int, tuple[int, str]] = {}
    held = peak = 0
    fullest: Counter[tuple[int, str]] = Counter()
    for event in events:
        if event["action"] == "alloc":
            frames = [one for one in event.get("frames", ()) if "/dsattn/" in one["filename"]]
            place = "{filename}:{line} {name}".format(**frames[0]).rpartition("/dsattn/")[2] if frames else "torch"
            alive[event["addr"]] = event["size"], place
            held += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in alive:
            held -= alive.pop(event["addr"])[0]
        if held > peak:
            peak, fullest = held, Counter(alive.values())
    return peak, fullest


def test_a_trace_tells_what_was_alive():
    line = {"filename": "/x/src/dsattn/ops/dsa.py", "line": 7, "name": "run"}
    torch_line = {"filename": "/torch/nn.py", "line": 1, "name": "f"}
    trace = [
        {"action": "free_completed", "addr": 9, "size": 100},
        {"action": "alloc", "addr": 1, "size": 4, "frames": [torch_line, line]},
        {"action": "alloc", "addr": 2, "size": 5, "frames": [torch_line]},
        {"action": "free_requested", "addr": 2, "size": 5},
        {"action": "free_completed", "addr": 2, "size": 5},
        {"action": "alloc", "addr": 2, "size": 4, "frames": [line]},
        {"action": "alloc", "addr": 3, "size": 2},
        {"action": "free_completed", "addr": 1, "size": 4},
    ]
    assert alive_at_peak(trace) == (10, {(4, "ops/dsa.py:7 run"): 2, (2, "torch"): 1})


def breakdown(again: Callable[[], object]) -> str:
    """What is alive at the peak of one more micro-batch, by size and place, largest first."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=2**20, clear_history=True)
    try:
        again()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    peak, fullest = alive_at_peak(events)
    largest = sorted(fullest.items(), key=lambda item: -item[0][0] * item[1])[:12]
    lines = [f"{count * size / 2**20:9.1f} MiB, {count} of {size:,}: {place}" for (size, place), count in largest]
    return "\n".join([f"alive at the peak, beyond what stood before: {peak / 2**20:,.1f} MiB", *lines])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8192, 32768])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_peaks_on_a_gpu(tokens, policy, capsys):
    """Of a step's second micro-batch; whatever else the process holds is left out."""
    small = RECIPES["small"]()
    run = dataclasses.replace(
        small,
        data=dataclasses.replace(small.data, pack_tokens=tokens),
        train=dataclasses.replace(small.train, recompute=policy, packs_per_step=1),
    )
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    *kept, again = step(run, "sparse", "cuda")
    again()
    stands = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    again()
    measured, plan = torch.cuda.max_memory_allocated() - before, accounting.memory_plan(run, "sparse")
    ratio = plan.peak / measured
    said = f"small, {tokens} tokens, recompute {policy}: plan {plan.peak / 2**30:.2f} GiB, {plan.moment}"
    said += f"; measured {measured / 2**30:.2f} GiB, ratio {ratio:.3f}; the process held {before / 2**20:,.0f} MiB"
    if not 0.9 < ratio < 1.1:
        parts = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in plan.parts.items())
        said += f"\nMiB planned: {parts}\nMiB standing: {stands / 2**20:,.0f}\n{breakdown(again)}"
    del kept, again
    with capsys.disabled():
        sys.stdout.write(f"\n{said}\n")
    assert 0.9 < ratio < 1.1, said


def of(model: str = "mla", tokens: int = 4096, policy: str = "none", **parallel: int) -> RunConfig:
    run = run_of(model, policy, "bfloat16", tokens)
    packs = 4 * parallel.get("dp_shard", 1) * parallel.get("dp_replicate", 1)
    train = dataclasses.replace(run.train, packs_per_step=packs)
    return dataclasses.replace(run, parallel=ParallelConfig(**parallel), train=train)


def test_a_stricter_policy_plans_less_and_more_ranks_too():
    peaks = [accounting.memory_plan(of(policy=policy), "sparse").peak for policy in ("none", "selective", "full")]
    assert peaks == sorted(peaks, reverse=True)
    alone = accounting.memory_plan(of(), "sparse").peak
    for parallel in ({"cp": 2}, {"tp": 2}, {"pp": 2}):
        assert accounting.memory_plan(of(**parallel), "sparse").peak < alone


def test_scratch_counts_from_where_kernels_take_it():
    """Also that the parts are the whole."""
    small = RECIPES["small"]()
    short, long = (
        accounting.memory_plan(dataclasses.replace(small, data=DataConfig(pack_tokens=tokens)), "sparse")
        for tokens in (40959, 40960)
    )
    assert short.moment == "MLP of a layer that selects, backward"
    assert long.moment == "attention of a layer that selects, backward", "contributions are 2 GiB"
    assert long.at_work["scratch"] > 2**31
    assert sum(long.parts.values()) == long.peak
    assert all(long.parts.values())


def test_depths_plan_what_joins_them_and_repeated_weights_once():
    """Copies in bf16 of what stands; gathered units; what a depth makes again beside a layer: norms and the product."""
    joins = 2 * 192 * 192
    plain, two, same = (accounting.memory_plan(of(model), "sparse") for model in ("mla", "mtp", "repeated"))
    layer = plain.standing["weights in bf16"] // 4
    assert two.standing["weights in bf16"] == 6 * layer + 2 * 2 * joins
    assert same.standing["weights in bf16"] == 5 * layer + 2 * joins
    again = accounting.memory_plan(of("mtp", policy="selective"), "sparse")
    assert again.standing["weights in bf16"] == 2 * 2 * joins, "they are outside of what runs again"
    alone, ahead = (accounting.memory_plan(of(model, dp_shard=2), "sparse").standing for model in ("mla", "mtp"))
    unit = joins + 3 * 192
    assert ahead["gathered weights"] == alone["gathered weights"] + 2 * (2 + 1) * unit + 4 * unit
    full = accounting.memory_plan(of("mtp", policy="full"), "sparse", device="cpu")
    assert full.moment == "MLP of a depth that selects, backward"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("data", ["dp_shard", "dp_replicate"])
def test_a_stage_under_fsdp2_stays_whole_until_its_step_ends(data, dtype):
    """Torch's schedules free no unit behind a backward and reduce behind the last one: tests/parallel/test_fsdp.py."""
    run = of(pp=2, **{data: 2})
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, dtype=dtype))
    plan = accounting.memory_plan(run, "sparse").standing
    shards = 2 if data == "dp_shard" else 1
    whole = shards * plan["parameters"]  # fp32
    assert plan["gathered weights"] == pytest.approx(whole / (2 if dtype == "bfloat16" else 1), rel=1e-3)
    assert plan["gradients, whole"] == pytest.approx(whole - plan["gradients"], rel=1e-3, abs=1)


def test_what_cannot_be_planned_is_refused():
    linear = dataclasses.replace(WIDE, layer_types=("linear", "dsa", "dsa", "dsa"), kda=KDAConfig())
    with pytest.raises(InputError, match="kda is set"):
        accounting.memory_plan(RunConfig(model=linear, data=DataConfig(pack_tokens=64)), "sparse")
    shared = dataclasses.replace(WIDE, dsa=dataclasses.replace(WIDE.dsa, share_every=4))
    with pytest.raises(ConfigError, match="begins with layer"):
        accounting.memory_plan(dataclasses.replace(of(pp=2), model=shared), "sparse")


if __name__ == "__main__":
    on_two_ranks(int(sys.argv[2]), Path(sys.argv[1]))
