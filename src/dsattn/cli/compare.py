"""`dsattn compare RUN RUN ...`."""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from dsattn.cli.arguments import parse
from dsattn.cli.tables import share, table


@dataclass(frozen=True)
class Options:
    """Lay runs over each other: losses, speeds, and the largest difference from the first run."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of two or more runs; the first is what the others are compared with."""
    plot: Path | None = None
    """SVG file of losses and speeds over steps."""
    json: bool = False
    """Print one JSON object a line instead of a table."""


def run(arguments: list[str]) -> int:
    """Print a row for each run and stage, and write the plot where one is asked for."""
    options = parse(Options, arguments, prog="dsattn compare")
    from dsattn.training.compare import compare, picture, read_runs

    runs = read_runs(options.runs)
    rows = compare(runs)
    if options.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        head = ("run", "stage", "tokens/s", "TFLOP/s", "MFU", "last loss", "largest difference")
        print(table(head, [_cells(row) for row in rows]))
    if options.plot is not None:
        options.plot.write_bytes(picture(runs).svg)
        print(f"plot: {options.plot}")
    return 0


def _cells(row: dict) -> list[str]:
    speed = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
    rate, loss, difference = (
        "-" if row[key] is None else format(row[key], digits)
        for key, digits in (("tflops", ".3g"), ("lm_loss", ".4f"), ("difference", ".1e"))
    )
    return [row["run"], f"{row['stage']} {row['mode']}", speed, rate, share(row["mfu"]), loss, difference]
