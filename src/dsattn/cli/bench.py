"""`dsattn bench [OP]`, `dsattn bench plot FILE...`, `dsattn bench record RUN`, `dsattn bench select`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import tyro

from dsattn.bench import plots, records
from dsattn.bench.cases import Setting, shape_named
from dsattn.bench.patterns import Order, Pattern, measure
from dsattn.bench.records import Machine, Record
from dsattn.bench.run import BENCHMARKS, WHOLE_SEQUENCES, Refusal, bench, family, settings_of
from dsattn.cli import recall
from dsattn.cli.arguments import UsageError, parse, pick
from dsattn.cli.tables import amount, told_of_peers
from dsattn.errors import InputError
from dsattn.training.runs import pick_device

if TYPE_CHECKING:
    from dsattn.keys import KeyRange
    from dsattn.nn.state import Observation
    from dsattn.selection import Selection

PLOT = "kernels.svg"
_SECTIONS = ("all", "plot", "record", "select")


@dataclass(frozen=True)
class Options:
    """Check an operation against fp64, then time it, beside installed peers if asked to; one JSON line a result.

    OP is `all`, an operation such as sparse_mla.backward, or both of its directions: sparse_mla.
    `bench select` measures selection in low precision, `bench record RUN` the keys that a trained run selects, and
    `bench plot FILE` draws records again; each has a --help of its own.
    """

    op: tyro.conf.Positional[str] = "all"
    """What to benchmark."""
    shape: str | None = None
    """Model shape: glm, deepseek, hunyuan or small; None takes glm on a GPU, small on a CPU."""
    keys: tuple[int, ...] = ()
    """Numbers of keys; empty takes 4096 32768 131072 (dense: 4096 8192; dsa_layer: up to 32768), on a CPU 256."""
    rows: int = 4096
    """Query rows, the last of the sequence; no more than keys. Whole sequences have as many rows as keys."""
    top_k: int | None = None
    """Kept keys; None takes the shape's."""
    order: tuple[Order, ...] = ("ascending",)
    """Selected keys: uniform, ascending or in random order; more recent ones; or as `--pattern` recorded them."""
    pattern: Path | None = None
    """Recorded selections, for `--order recorded`: made by `dsattn bench record`."""
    lengths: bool = True
    """Tell kernels how many slots of a row are keys; --no-lengths has them walk through the empty ones too."""
    deterministic: Literal["no", "yes", "both"] = "both"
    """Gradients that repeat bit for bit, as fast as can be, or both in turn."""
    backend: str = "auto"
    """A backend by name; what it cannot serve is refused."""
    peers: bool = False
    """Time every installed peer on the same operands too."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""
    seconds: float = 1.0
    """About how long to repeat each call."""
    out: Path = Path("results")
    """Folder of kernels.jsonl, to which results are added, and kernels.svg, which is drawn again from all of it."""
    commit: str | None = None
    """Commit to write into the records; None asks git."""
    dirty: bool = False
    """The tree differs from --commit; git is asked where no commit is given."""


@dataclass(frozen=True)
class PlotOptions:
    """Draw records again."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Files of JSON lines."""
    out: Path = Path("results")
    """Folder of kernels.svg."""


@dataclass(frozen=True)
class RecordOptions:
    """Measure which keys a trained run selects, on its held-out text, as a pattern that can be replayed at any size."""

    run: tyro.conf.Positional[Path]
    """Folder of the run, or one checkpoint in it."""
    out: Path = Path("results/selection.npz")
    """File for the pattern."""
    packs: int = 2
    """Held-out packs to measure on."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""


def run(arguments: list[str]) -> int:
    """Benchmark; 1 where a result was wrong or could not be had."""
    if arguments and arguments[0] == "plot":
        return _plot(parse(PlotOptions, arguments[1:], prog="dsattn bench plot"))
    if arguments and arguments[0] == "record":
        return _record(parse(RecordOptions, arguments[1:], prog="dsattn bench record"))
    if arguments and arguments[0] == "select":
        return recall.run(arguments[1:])
    options = parse(Options, arguments, prog="dsattn bench")
    options = replace(options, device=str(pick_device(options.device)))
    names, machine = _names(options.op), None
    print(_line(["operation", "keys", "operands", "backend", "ms", "TFLOP/s", "GB/s", "memory", "error"]), flush=True)
    refused = 0
    for name, setting in _plan(names, options):
        machine = machine or Machine.here(setting.device, commit=options.commit, dirty=options.dirty)
        outcome = bench(name, setting, machine, peers=options.peers, seconds=options.seconds)
        if isinstance(outcome, Refusal):
            refused += 1
            print(f"dsattn: {outcome.op} at {outcome.keys} keys: {outcome.reason}", file=sys.stderr, flush=True)
            continue
        records.append(options.out / records.FILE, outcome)
        print("\n".join(_shown(outcome)), flush=True)
    if (options.out / records.FILE).exists():
        _draw([options.out / records.FILE], options.out)
    return 1 if refused else 0


def _names(op: str) -> list[str]:
    """The benchmarks that a command line's OP means."""
    families = list(dict.fromkeys(map(family, BENCHMARKS)))
    pick("operation", op, [*_SECTIONS, *BENCHMARKS, *families], "dsattn bench --help")
    return [name for name in BENCHMARKS if op in ("all", name, family(name))]


def _plan(names: list[str], options: Options) -> Iterator[tuple[str, Setting]]:
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    if device.index is not None:
        torch.cuda.set_device(device)
    shape = shape_named(options.shape or ("glm" if gpu else "small"), top_k=options.top_k)
    pattern = None if options.pattern is None else Pattern.load(options.pattern)
    kinds = {"no": (False,), "yes": (True,), "both": (False, True)}[options.deterministic]
    for name in names:
        whole = family(name) in WHOLE_SEQUENCES
        for keys in options.keys or (_usual_keys(name) if gpu else (256,)):
            base = Setting(
                shape=shape,
                rows=keys if whole else min(options.rows, keys),
                keys=keys,
                lengths=options.lengths,
                pattern=pattern,
                backend=options.backend,
                device=device,
                dtype=torch.bfloat16 if gpu else torch.float32,
            )
            for setting in settings_of(name, base, options.order, kinds):
                yield name, setting


def _usual_keys(name: str) -> tuple[int, ...]:
    if name == "dsa_layer":
        return 4096, 8192, 16384, 32768
    return (4096, 8192) if family(name) in WHOLE_SEQUENCES else (4096, 32768, 131072)


def _shown(record: Record) -> Iterator[str]:
    """The line of a record, and one of its peers."""
    shape = record.shape
    operands = [shape["order"] or "", "" if shape["lengths"] in (None, True) else "no lengths"]
    operands.append("deterministic" if record.deterministic else "")
    yield _line(
        [
            record.op if shape["K"] else f"{record.op} (dense)",
            str(shape["S"]),
            " ".join(filter(None, operands)),
            record.backend,
            f"{record.ms.median:.3f} ({record.ms.min:.3f}-{record.ms.max:.3f})",
            "-" if record.tflops is None else f"{record.tflops:.3g}",
            "-" if record.gbps is None else f"{record.gbps:.3g}",
            "-" if record.peak_bytes is None else amount(record.peak_bytes, "B"),
            f"{record.error.max:.2g}/{record.error.mean:.2g} of {record.error.limit:g}",
        ]
    )
    yield from told_of_peers(record)


def _line(cells: list[str]) -> str:
    widths = (28, 8, 24, 10, 28, 8, 7, 9, 0)
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _plot(options: PlotOptions) -> int:
    if not options.files:
        raise UsageError("no files given; dsattn bench plot results/kernels.jsonl")
    _draw(list(options.files), options.out)
    return 0


def _draw(files: list[Path], folder: Path) -> None:
    found = records.read(files)
    try:
        picture = plots.draw(found)
    except InputError as error:
        print(f"dsattn: no plot: {error}", file=sys.stderr)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLOT).write_bytes(picture)
    for title, lines in plots.panels(found).items():
        for label, line in lines.items() if plots.DENSE in lines else ():
            meets = plots.crossover(line, lines[plots.DENSE])
            if label != plots.DENSE:
                told = "never faster" if meets is None else f"faster from {meets:,.0f} tokens on"
                print(f"{title.replace(chr(10), ' ')}: {label} is {told} than dense attention".replace("  ", " "))
    print(f"drawn in {folder / PLOT}")


def _record(options: RecordOptions) -> int:
    def keep(found: "Observation") -> "tuple[Selection, KeyRange] | None":
        return found.selection and (found.selection.to("cpu"), found.layout.keys.to("cpu"))

    seen, _ = recall.observed(options.run, options.device, options.packs, keep)
    pattern = measure([one for _, one in seen if one is not None], str(options.run))
    pattern.save(options.out)
    print(f"{pattern.rows:,} rows; a key stays for {pattern.stay:.1f} rows; written to {options.out}")
    return 0
