"""`dsattn bench select`: what a precision of selection costs and saves."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from dsattn.bench.cases import Setting, shape_named
from dsattn.bench.recall import FILE, Inputs, append, drawn, measured
from dsattn.bench.records import Machine
from dsattn.cli.arguments import parse
from dsattn.errors import InputError

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
    device: str = "auto"
    """`auto` takes a GPU where there is one."""
    seconds: float = 1.0
    """About how long to repeat each call."""
    out: Path = Path("results")
    """Folder of recall.jsonl, to which lines are added."""


def run(arguments: list[str]) -> int:
    """Measure every input, print a line each."""
    options = parse(Options, arguments, prog="dsattn bench select")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if options.device == "auto" else options.device)
    machine = Machine.here(device, commit=None)
    of_run = () if options.run is None else tuple(_of_run(options.run, str(device)))  # a wrong run costs no measurement
    for inputs in itertools.chain(_drawn(options, device), of_run):
        found = measured(inputs, options.precision, torch.bfloat16, seconds=options.seconds)
        line = found.line(machine)
        append(options.out / FILE, line)
        print(line, flush=True)
    return 0


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
