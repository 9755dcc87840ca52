"""Pictures of records: a panel an operation, and the length at which a DSA layer overtakes dense attention."""

import io
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dsattn.errors import InputError

Records = Sequence[Mapping[str, Any]]
Line = list[tuple[int, float]]
"""(keys, milliseconds), keys ascending."""

DENSE = "dense attention (torch)"
# Okabe and Ito's colours: told apart by all readers; markers differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#5A5A5A", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "svg.fonttype": "none",
    "svg.hashsalt": "dsattn",
}


def panels(records: Records) -> dict[str, dict[str, Line]]:
    """Title -> label -> line. A title is an operation and its model shape; where a point was measured twice, the last
    record stands."""
    points: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        shape = record["shape"]
        lines, keys = points[_title(record)], shape["S"]
        lines[_label(record)][keys] = record["ms"]["median"]
        for name, time in record.get("peers", {}).items():
            lines[_peer_label(record, name)][keys] = time
    return {title: {label: sorted(line.items()) for label, line in lines.items()} for title, lines in points.items()}


def crossover(ours: Line, other: Line) -> float | None:
    """The number of keys from which on `ours` is faster, between lengths that both were measured at.

    Log-log interpolation. The shortest length where ours is always faster; None where it never is, or where the two
    share no length.
    """
    theirs = dict(other)
    ratios = [(math.log(keys), math.log(theirs[keys] / time)) for keys, time in ours if keys in theirs]
    if not ratios or ratios[-1][1] < 0:
        return None
    for (left, below), (right, above) in reversed(list(itertools.pairwise(ratios))):
        if below < 0:
            return math.exp(left + (right - left) * below / (below - above))
    return math.exp(ratios[0][0])


def draw(records: Records) -> bytes:
    """One SVG: milliseconds over keys, a panel an operation. Raises InputError without records or matplotlib."""
    if not records:
        raise InputError("records: there are none to draw")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("a plot needs matplotlib: pip install 'dsattn[report]'") from error
    found = panels(records)
    columns = min(3, len(found))
    rows = math.ceil(len(found) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
        every = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, (title, lines) in zip(every, found.items(), strict=False):
            _panel(axes, title, lines)
        for axes in every[len(found) :]:
            axes.set_axis_off()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _panel(axes: Any, title: str, lines: dict[str, Line]) -> None:
    for number, (label, line) in enumerate(sorted(lines.items())):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(*zip(*line, strict=True), label=label, color=colour, marker=marker, markersize=4, linewidth=1.2)
        meets = crossover(line, lines[DENSE]) if DENSE in lines and label != DENSE else None
        if meets is not None:
            axes.axvline(meets, color=colour, linestyle=":", linewidth=1)
            title = f"{title}\n{label} is faster from {meets:,.0f} tokens on"
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("keys S")
    axes.set_ylabel("ms")
    axes.legend()


def _title(record: Mapping[str, Any]) -> str:
    shape = record["shape"]
    letters = ("H", "G", "H_I", "K")
    sizes = ", ".join(f"{letter}={shape[letter]}" for letter in letters if shape.get(letter) is not None)
    return f"{record['op']}\n{sizes}"


def _label(record: Mapping[str, Any]) -> str:
    kind = " deterministic" if record.get("deterministic") else ""
    return f"dsattn {record['backend']}{kind}{_operands(record)}"


def _peer_label(record: Mapping[str, Any], name: str) -> str:
    return DENSE if (record["op"], name) == ("dsa_layer", "torch") else f"{name}{_operands(record)}"


def _operands(record: Mapping[str, Any]) -> str:
    shape = record["shape"]
    order = shape.get("order")
    said = [order] if order not in (None, "ascending") else []
    said += ["no lengths"] if shape.get("lengths") is False else []
    return f", {', '.join(said)}" if said else ""
