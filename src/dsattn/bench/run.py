"""Check, then time, then compare: a trial becomes a record, or a refusal where its result is wrong."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dsattn.bench.agreement import disagreement
from dsattn.bench.cases import Setting
from dsattn.bench.layer import layer_trial
from dsattn.bench.oracle import Error
from dsattn.bench.patterns import Order
from dsattn.bench.peers import peers_of
from dsattn.bench.records import Machine, Record
from dsattn.bench.timing import measure, peak_bytes
from dsattn.bench.trials import (
    ATTENTION,
    Trial,
    attention_trial,
    kl_trial,
    select_keys_trial,
    select_topk_trial,
)
from dsattn.errors import BackendUnavailable

Build = Callable[[Setting], Trial]


def _pair(name: str, build: Callable[..., Trial], **rest: Any) -> dict[str, Build]:
    return {
        f"{name}.forward": partial(build, "forward", **rest),
        f"{name}.backward": partial(build, "backward", **rest),
    }


def _attention(name: str) -> dict[str, Build]:
    return {
        f"{name}.forward": partial(attention_trial, name, "forward"),
        f"{name}.backward": partial(attention_trial, name, "backward"),
    }


BENCHMARKS: dict[str, Build] = {
    "select_topk": select_topk_trial,
    "select_keys": select_keys_trial,
    **_attention("sparse_mla"),
    **_attention("sparse_gqa"),
    **_pair("indexer_kl", kl_trial),
    **_attention("dense_mla"),
    **_attention("dense_gqa"),
    **_pair("dense_kl", kl_trial, dense=True),
    "dsa_layer": layer_trial,
}
"""Name -> how to build its trial. `dense_kl` is `indexer_kl` over every visible key."""

WHOLE_SEQUENCES = ("dense_mla", "dense_gqa", "dense_kl", "dsa_layer")
"""Benchmarks whose rows are all the keys: T = S."""
_SELECTS = (*(name for name, (selects, _) in ATTENTION.items() if selects), "indexer_kl")


def family(name: str) -> str:
    """`sparse_mla` of `sparse_mla.forward`."""
    return name.partition(".")[0]


@dataclass(frozen=True)
class Refusal:
    """A trial that was not timed. reason: its result is wrong, or it cannot run."""

    op: str
    keys: int
    reason: str


def settings_of(name: str, base: Setting, orders: tuple[Order, ...], deterministic: tuple[bool, ...]) -> list[Setting]:
    """The settings of one benchmark: each order where it selects keys, each kind of gradient where it has any."""
    wanted = orders if family(name) in _SELECTS else orders[:1]
    kinds = deterministic if name.endswith(".backward") or name == "dsa_layer" else (False,)
    return [replace(base, order=order, deterministic=kind) for order in wanted for kind in kinds]


def bench(name: str, setting: Setting, machine: Machine, *, peers: bool, seconds: float = 1.0) -> Record | Refusal:
    """Run one benchmark. A wrong kernel is never timed; nor is what lacks memory or a backend that can serve."""
    return timed(name, lambda: BENCHMARKS[name](setting), setting, machine, peers=peers, seconds=seconds)


def timed(
    name: str, build: Callable[[], Trial], setting: Setting, machine: Machine, *, peers: bool, seconds: float
) -> Record | Refusal:
    """Check and time the trial of `setting` that `build` makes. name: for a refusal."""
    try:
        trial = build()
        error = trial.check()
        if error.wrong:
            return Refusal(trial.op, setting.keys, f"{trial.choice.name} is wrong: {error}")
        return _timed(trial, machine, error, peers, seconds)
    except torch.OutOfMemoryError as problem:
        return Refusal(name, setting.keys, f"out of memory: {first_line(problem)}")
    except BackendUnavailable as problem:
        return Refusal(name, setting.keys, str(problem))
    finally:
        _free(setting.device)


def _timed(trial: Trial, machine: Machine, error: Error, peers: bool, seconds: float) -> Record:
    device, op = trial.setting.device, trial.op
    runs = [trial.prepare(operands) for operands in trial.sets]
    result = runs[0]()
    peak = peak_bytes(runs[0], device)
    ms = measure(runs, device, seconds=seconds)
    written = 0 if op == "select_topk" else _bytes(result)
    runs.clear()
    found: dict[str, float] = {}
    unavailable: dict[str, str] = {}
    for name, outcome in _peer_times(trial, result, seconds) if peers else ():
        if isinstance(outcome, str):
            unavailable[name] = outcome
        else:
            found[name] = outcome
    return Record(
        op=op,
        backend=trial.choice.name,
        passed_over=dict(trial.choice.passed_over),
        shape=trial.shape,
        deterministic=trial.setting.deterministic,
        ms=ms,
        tflops=trial.flops / ms.median / 1e9 if trial.flops else None,
        gbps=(trial.reads + written) / ms.median / 1e6,
        peers=found,
        ratio={name: time / ms.median for name, time in found.items()},
        error=error,
        peak_bytes=peak,
        machine=machine,
        unavailable=unavailable,
    )


def _peer_times(trial: Trial, ours: Any, seconds: float) -> Iterator[tuple[str, float | str]]:
    """(name, milliseconds) of each peer, or (name, why there is no time). Another's failure must not end our run."""
    device = trial.setting.device
    for name, peer in peers_of(trial).items():
        try:
            runs = [peer(trial, operands) for operands in trial.sets]
            problem = disagreement(trial, name, ours, runs[0]())
            yield name, problem or measure(runs, device, seconds=seconds).median
        except ImportError as missing:
            yield name, f"not installed: {first_line(missing)}"
        except Exception as failure:
            yield name, f"{type(failure).__name__}: {first_line(failure)}"
        runs = []
        _free(device)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; its type where it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _bytes(result: Any) -> int:
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    return sum(x.numel() * x.element_size() for x in tensors)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        # A kernel that faulted makes every later call fail, this one too: what was measured before must not be lost.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
