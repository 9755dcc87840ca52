"""`dsattn bench select`: what a precision of selection costs and saves."""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from dsattn.bench import recall as measuring
from dsattn.bench import records
from dsattn.bench.cases import Setting, shape_named
from dsattn.bench.recall import Inputs, drawn
from dsattn.bench.records import Machine
from dsattn.bench.run import Refusal
from dsattn.cli.arguments import parse
from dsattn.cli.tables import told_of_peers
from dsattn.errors import InputError
from dsattn.training.runs import pick_device

if TYPE_CHECKING:
    from dsattn.config import RunConfig
    from dsattn.nn.state import Observation

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Options:
    """Recall and time of a precision, on Gaussian keys, on keys with outliers and on a trained run's; JSON lines."""

    precision: Literal["fp8", "mxfp8"] = "fp8"
    """What operands are rounded to."""
    run: Path | None = None
    """Folder of a trained run, or one checkpoint in it: its held-out text is an input too, layer by layer."""
    shape: str | None = None
    """Model shape: glm, deepseek, hunyuan or small; None takes glm on a GPU, small on a CPU."""
    keys: tuple[int, ...] = ()
    """Numbers of keys; empty takes 4096 32768 131072, on a CPU 256."""
    rows: int = 4096
    """Query rows, the last of the sequence."""
    top_k: int | None = None
    """Kept keys; None takes the shape's."""
    backend: str = "auto"
    """A backend of the precision by name."""
    peers: bool = False
    """Time ours in bf16, and DeepGEMM where it is installed, on the same operands too."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""
    seconds: float = 1.0
    """About how long to repeat each call."""
    out: Path = Path("results")
    """Folder of recall.jsonl, to which lines are added."""
    commit: str | None = None
    """Commit to write into the records; None asks git."""
    dirty: bool = False
    """The tree differs from --commit; git is asked where no commit is given."""


def run(arguments: list[str]) -> int:
    """Measure every input, print and keep a line each; 1 where a selection was wrong or could not be had."""
    options = parse(Options, arguments, prog="dsattn bench select")
    device = pick_device(options.device)
    machine = Machine.here(device, commit=options.commit, dirty=options.dirty)
    of_run = () if options.run is None else tuple(_of_run(options.run, str(device)))  # a wrong run costs no measurement
    how = measuring.Options(
        precision=options.precision, backend=options.backend, peers=options.peers, seconds=options.seconds
    )
    print(_line(["inputs", "keys", "backend", "ms", "recall of bf16", "of fp32", "error"]), flush=True)
    refused = 0
    for inputs in itertools.chain(_drawn(options, device), of_run):
        found = measuring.measured(inputs, how, machine)
        if isinstance(found, Refusal):
            refused += 1
            print(f"dsattn: {inputs.name} at {found.keys} keys: {found.reason}", file=sys.stderr, flush=True)
            continue
        records.append(options.out / measuring.FILE, found)
        print("\n".join(_shown(found)), flush=True)
    return 1 if refused else 0


def _shown(found: measuring.Recall) -> Iterator[str]:
    """The line of a measurement, and those of its peers. A recall is the mean, and the worst row's."""
    record = found.record
    shares = [f"{found.recall[name]:.4f} ({found.least[name]:.4f})" for name in ("bf16", "fp32")]
    error = f"{record.error.max:.2g} of {record.error.limit:g}"
    ms = f"{record.ms.median:.3f} ({record.ms.min:.3f}-{record.ms.max:.3f})"
    yield _line([found.inputs, str(record.shape["S"]), record.backend, ms, *shares, error])
    yield from told_of_peers(record)


def _line(cells: list[str]) -> str:
    widths = (28, 8, 10, 28, 18, 18, 0)
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _drawn(options: Options, device: torch.device) -> Iterator[Inputs]:
    gpu = device.type == "cuda"
    shape = shape_named(options.shape or ("glm" if gpu else "small"), top_k=options.top_k)
    for keys in options.keys or ((4096, 32768, 131072) if gpu else (256,)):
        yield from drawn(Setting(shape=shape, rows=min(options.rows, keys), keys=keys, device=device))


def _of_run(folder: Path, device: str) -> Iterator[Inputs]:
    """The indexers' operands in every selecting layer, on one held-out pack."""
    seen, config = observed(folder, device, 1, lambda found: (found.index, found.layout.keys))
    indexer = config.model.dsa.indexer
    if indexer.pool_size > 1:
        raise InputError(f"run={str(folder)!r} pools its keys, which nothing here measures; take one with pool_size=1")
    for layer, (index, keys) in seen:
        if index is not None:
            q, k, w = index
            name, rest = f"{folder.name} layer {layer}", {"top_k": indexer.top_k, "relu": indexer.relu}
            inputs = Inputs(name=name, q=q, k=k, w=w, keys=keys, **rest)
            yield inputs
            if not indexer.hadamard and indexer.head_dim.bit_count() == 1:
                yield inputs.rotated()


def observed(
    folder: Path, device: str, packs: int, keep: "Callable[[Observation], Kept]"
) -> "tuple[list[tuple[int, Kept]], RunConfig]":
    """(layer, what is kept of it) of a run's model on held-out packs, and the run's configuration."""
    from dsattn.nn.state import Pass
    from dsattn.training.data import held_out_packs
    from dsattn.training.runs import load_run
    from dsattn.training.step import compute
    from dsattn.training.tokenizers import load_tokenizer

    model, config = load_run(folder, device)
    place = next(model.parameters()).device
    seen: list[tuple[int, Kept]] = []

    def probe(layer: int, found: "Observation") -> None:
        seen.append((layer, keep(found)))

    text = held_out_packs(config.data, load_tokenizer(config.data.tokenizer), packs)
    with torch.no_grad(), compute(config.train, place):
        for pack in text:
            pack = pack.to(place)
            model(pack.tokens, pack.layout, Pass(mode="sparse", with_kl=False, probe=probe))
    return seen, config
