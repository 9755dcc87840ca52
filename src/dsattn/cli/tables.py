"""Text tables and amounts for the terminal."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsattn.bench.records import Record

_PREFIXES = ("", "K", "M", "G", "T", "P", "E", "Z")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> str:
    """Columns under their heads: the first one left-aligned, the others right-aligned, or left too where `words`."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column and not words else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def amount(value: float, unit: str) -> str:
    """Three digits and a decimal prefix: 12.3 TFLOP."""
    power = 0
    while value >= 999.5 and power + 1 < len(_PREFIXES):
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_PREFIXES[power]}{unit}"


def share(value: float | None) -> str:
    """A percentage, `-` where there is none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def told_of_peers(record: "Record") -> Iterator[str]:
    """A line a peer of a benchmark: its time, or why there is none."""
    for name, time in record.peers.items():
        yield f"    {name} {time:.3f} ms ({record.ratio[name]:.2f} x ours)"
    for name, reason in record.unavailable.items():
        yield f"    {name}: {reason}"
