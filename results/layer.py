"""results/layer.svg, from the records: a DSA layer beside dense attention and the vendors' parts added up.

    python results/layer.py > results/layer.svg

The picture carries the data that it shows as JSON; tests/test_performance.py compares it with the newest records.
"""

import io
import json
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from newest import latest, read

from dsattn.bench.plots import COLOURS, MARKERS, STYLE, Line, crossover

OURS, DENSE, VENDORS = "dsattn", "dense attention", "the vendors' parts"
PEERS = {DENSE: "torch", VENDORS: "cudnn"}


def main() -> None:
    sys.stdout.buffer.write(draw(layer_lines(latest(read("kernels.jsonl")))))


def layer_records(newest: Sequence[dict[str, Any]], *, deterministic: bool = False) -> list[dict[str, Any]]:
    """Those of one layer with 64 heads on Hopper, by tokens."""
    want = ("dsa_layer", "hopper", 64, deterministic)
    return [one for one in newest if (one["op"], one["backend"], one["shape"]["H"], one["deterministic"]) == want]


def layer_lines(newest: Sequence[dict[str, Any]]) -> dict[str, Line]:
    """Label -> (tokens, ms) of that layer, as fast as can be: ours, and what it is compared with."""
    lines: dict[str, Line] = {OURS: [], DENSE: [], VENDORS: []}
    for record in layer_records(newest):
        tokens, peers = record["shape"]["S"], record["peers"]
        lines[OURS].append((tokens, record["ms"]["median"]))
        for label, peer in PEERS.items():
            lines[label] += [(tokens, peers[peer])] if peer in peers else []
    return lines


def faster(lines: dict[str, Line], label: str) -> str:
    """Where our layer is faster than `label`, in words."""
    tokens = crossover(lines[OURS], lines[label])
    if tokens is None:
        return "not at the greatest length"
    if tokens <= 1.001 * lines[label][0][0]:  # through a logarithm and back
        return "at every length measured"
    return f"from {round(tokens, -2):,.0f} tokens on"


def crossed(lines: dict[str, Line]) -> str:
    """Both crossovers in a sentence."""
    told = [f"than {label} {faster(lines, label)}" for label in PEERS if lines[label]]
    return f"A DSA layer on Hopper is faster {', '.join(told)}."


def draw(lines: dict[str, Line]) -> bytes:
    """Milliseconds, and the times over ours with both crossovers. The description holds what is drawn, as JSON."""
    ours = dict(lines[OURS])
    drawn = {label: line for label, line in lines.items() if line}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        times, ratios = figure.subplots(1, 2)
        for (label, line), colour, marker in zip(drawn.items(), COLOURS, MARKERS, strict=False):
            look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2}
            times.plot(*zip(*line, strict=True), label=label, **look)
            ratios.plot(*zip(*((tokens, ms / ours[tokens]) for tokens, ms in line), strict=True), **look)
            if label != OURS and (tokens := crossover(lines[OURS], line)) is not None:
                ratios.axvline(tokens, color=colour, linestyle=":", linewidth=1)
        times.set_title("One layer, forward and backward: ms")
        told = [f"faster than {label} {faster(lines, label)}" for label in drawn if label != OURS]
        ratios.set_title("\n".join(["Times over ours", *told]))
        for axes, base in ((times, 10), (ratios, 2)):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=base)
            axes.set_xticks(list(ours), [f"{one // 1024}K" for one in ours])
            axes.set_xlabel("tokens, T = S")
        ratios.yaxis.set_major_formatter("{x:g}")
        times.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Description": json.dumps(lines)})
    return buffer.getvalue()


if __name__ == "__main__":
    main()
