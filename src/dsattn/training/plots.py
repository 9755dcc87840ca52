"""The pictures of a run's report: SVG from events of metrics.jsonl, each with the sentence that stands in for it.

A function returns None where the run has nothing to show.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsattn.errors import InputError
from dsattn.training.health import Health, LayerHealth
from dsattn.training.metrics import Events, Stage, last_health, stages_of

# Okabe and Ito's colours: told apart by all readers; lines differ in dashes or markers too.
COLOURS = _BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#5A5A5A"
_STAGE_SHADES = {"dense": "#FFFFFF", "warmup": "#FBE9CF", "sparse": "#DDEBF6", "frozen": "#E6E6E6"}
_WIDTH = 9.6  # inches
_MOST_PANELS, _MOST_TICKS = 12, 30
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "dsattn",
}


@dataclass(frozen=True)
class Picture:
    """svg: a whole SVG file. alt: what it shows, for those who do not see it."""

    svg: bytes
    alt: str


def loss(events: Events) -> Picture | None:
    """Language-model loss, whole and from the end of the first stage on, where its scale would hide what follows."""
    train, held_out = series(events, "train", "lm_loss"), series(events, "eval", "lm_loss")
    stages = stages_of(events)
    if not train and not held_out:
        return None
    late = stages[0].last if len(stages) > 1 else stages[0].last // 2

    def draw(figure: Any) -> None:
        whole, zoomed = figure.subplots(1, 2, width_ratios=[3, 2])
        for axes, first in ((whole, 0), (zoomed, late)):
            shade_stages(axes, [stage for stage in stages if stage.last > first])
            near_train, near_held = ([(x, y) for x, y in points if x >= first] for points in (train, held_out))
            draw_line(axes, near_train, color=_GREY, label="train", linewidth=1, alpha=0.8)
            draw_line(axes, near_held, color=_BLUE, label="held out", marker="o", markersize=4)
            axes.set_xlabel("step")
        whole.set_ylabel("LM loss (nats a token)")
        whole.legend(loc="upper right")
        zoomed.set_title(f"from step {late} on")
        zoomed.set_xlim(left=late)

    ends = [f"{name} {points[-1][1]:.3f}" for name, points in (("train", train), ("held out", held_out)) if points]
    return draw_picture(
        draw, 3.4, f"Lines of the language-model loss over {stages[-1].last} steps. Last: {', '.join(ends)}."
    )


def distillation(events: Events) -> Picture | None:
    """The indexers' KL, and on held-out text the share of the attainable KL that they took away."""
    mean = series(events, "train", "kl")
    kl_layers = [(e["step"], e["kl_layers"]) for e in events if e.get("kl_layers")]
    healths = [(e["step"], Health.from_dict(e["health"])) for e in events if e.get("health")]
    captured = [(step, value) for step, health in healths if (value := health.mean("captured")) is not None]
    captured_layers = [(step, {layer.layer: layer.captured for layer in health.layers}) for step, health in healths]
    if not mean and not captured:
        return None

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for axes, layers, points in ((left, kl_layers, mean), (right, captured_layers, captured)):
            shade_stages(axes, [stage for stage in stages_of(events) if stage.mode != "dense"])
            _layer_lines(axes, layers)
            draw_line(axes, points, color=_BLUE, marker="o" if axes is right else "", markersize=4, label="mean")
            axes.set_xlabel("step")
        left.set_ylabel("train KL (nats a row)")
        left.set_ylim(bottom=0)
        if mean:
            left.legend(loc="upper right")
        right.set_ylabel("captured on held-out text")
        right.set_ylim(top=1)

    ends = [f"{name} {points[-1][1]:#.3g}" for name, points in (("KL", mean), ("captured", captured)) if points]
    alt = f"Lines of the indexers' KL and of the captured fraction over steps. Last: {', '.join(ends)}."
    return draw_picture(draw, 3.4, alt)


def recall(events: Events) -> Picture | None:
    """Recall of each layer at the end, beside the baselines."""
    health = last_health(events)
    if health is None:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places = range(len(health.layers))
        axes.bar(places, _values(health, "recall"), color=_BLUE, alpha=0.6, width=0.6, label="indexer")
        for name, look in _BASELINES.items():
            shown = {"linestyle": "none", "markersize": 8, "markeredgecolor": "white", "label": name}
            axes.plot(places, _values(health, name), **shown, **look)
        worst = {"marker": "_", "color": "black", "markeredgewidth": 2}
        axes.plot(places, _values(health, "worst_head"), linestyle="none", markersize=9, label="worst head", **worst)
        labelled = places[:: math.ceil(len(places) / _MOST_TICKS)]
        axes.set_xticks(labelled, [str(health.layers[place].layer) for place in labelled])
        axes.set_xlabel("layer")
        axes.set_ylabel(f"recall@{health.top_k}")
        axes.set_ylim(0, 1.03)
        axes.grid(visible=False, axis="x")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    means = [f"{name} {_number(health.mean(name))}" for name in ("recall", "random", "recency", "oracle")]
    return draw_picture(
        draw, 3.2, f"Bars of recall@{health.top_k} for {len(health.layers)} layers. Means: {', '.join(means)}."
    )


def recall_by_position(events: Events) -> Picture | None:
    """Recall in each quartile of the row's position, a panel a layer."""
    health = last_health(events)
    if health is None:
        return None
    edges = health.quartile_positions
    names = [f"{edges[i]:,}–{edges[i + 1] - (i < 3):,}" for i in range(4)]

    def draw_layer(axes: Any, layer: LayerHealth) -> None:
        looks = {"recall": {"marker": "o", "color": _BLUE}, **_BASELINES}
        for name in ("recall", "random", "recency"):
            values = [math.nan if value is None else value for value in getattr(layer, f"{name}_quartiles")]
            axes.plot(range(4), values, label="indexer" if name == "recall" else name, **looks[name])
        axes.set_xticks(range(4), names, rotation=30, ha="right", fontsize=8)
        axes.set_ylim(0, 1.03)

    means = [f"{name} {_quartile_means(health, name)}" for name in ("recall", "random", "recency")]
    alt = f"Recall by quartile of position ({', '.join(names)}), mean over layers: {'; '.join(means)}."
    return _panels(health, draw_layer, "position in the document", f"recall@{health.top_k}", alt)


def distances(events: Events) -> Picture | None:
    """How far back selected keys lie, beside the heaviest keys of the dense attention, a panel a layer."""
    health = last_health(events)
    if health is None:
        return None
    bins = max(len(counts) for layer in health.layers for counts in (layer.distances, layer.oracle_distances))
    names = [_bin_name(number) for number in range(bins)]

    def draw_layer(axes: Any, layer: LayerHealth) -> None:
        looks = {"selected": {"color": _BLUE, "marker": "o"}, "heaviest": {"color": _GREEN, "marker": "^"}}
        for (label, look), counts in zip(looks.items(), (layer.distances, layer.oracle_distances), strict=True):
            total = max(sum(counts), 1)
            shares = [count / total for count in counts] + [0.0] * (bins - len(counts))
            axes.plot(range(bins), shares, markersize=4, label=label, **look)
        axes.set_xticks(range(0, bins, 2), names[::2], rotation=30, ha="right", fontsize=8)

    total = [sum(layer.distances[i] for layer in health.layers if i < len(layer.distances)) for i in range(bins)]
    peak = names[total.index(max(total))]
    alt = f"Histograms of the distance from a row to its selected keys, a layer a panel; most lie {peak} rows back."
    return _panels(health, draw_layer, "rows back", "share of the keys", alt)


def speed(events: Events) -> Picture | None:
    """Tokens a second."""
    points = series(events, "train", "tokens_per_second")
    if not points:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        shade_stages(axes, stages_of(events))
        draw_line(axes, points, color=_BLUE)
        axes.set_xlabel("step")
        axes.set_ylabel("tokens a second")
        axes.set_ylim(0, 1.15 * max(value for _, value in points))  # room for the stages' names

    middle = sorted(value for _, value in points)[len(points) // 2]
    return draw_picture(draw, 2.6, f"Line of training speed over steps; the median is {middle:,.0f} tokens a second.")


_BASELINES = {
    "random": {"marker": "s", "color": _GREY},
    "recency": {"marker": "D", "color": _ORANGE},
    "oracle": {"marker": "^", "color": _GREEN},
}


def require() -> None:
    """Raise InputError where matplotlib is missing: better before a long run than behind it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("the report's plots need matplotlib: pip install 'dsattn[report]'") from error


def draw_picture(draw: Callable[[Any], None], height: float, alt: str) -> Picture:
    """Let `draw` fill a figure. Raises InputError where matplotlib is missing."""
    require()
    import matplotlib
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return Picture(file.getvalue(), alt)


def _panels(health: Health, draw_layer: Callable[[Any, LayerHealth], None], x: str, y: str, alt: str) -> Picture:
    """One panel a layer on shared axes; of many layers, evenly spread ones."""
    layers = health.layers
    if len(layers) > _MOST_PANELS:
        layers = [layers[i * (len(layers) - 1) // (_MOST_PANELS - 1)] for i in range(_MOST_PANELS)]
        x += f" ({_MOST_PANELS} of {len(health.layers)} layers shown)"
        alt += f" Shown: layers {', '.join(str(layer.layer) for layer in layers)}."
    columns = min(len(layers), 4)
    rows = math.ceil(len(layers) / columns)

    def draw(figure: Any) -> None:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, layer in zip(grid.flat, layers, strict=False):
            draw_layer(axes, layer)
            axes.set_title(f"layer {layer.layer}")
        for axes in grid.flat[len(layers) :]:
            axes.set_visible(False)
        figure.supxlabel(x, fontsize=10)
        figure.supylabel(y, fontsize=10)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))

    return draw_picture(draw, 1.2 + 1.9 * rows, alt)


def shade_stages(axes: Any, stages: Sequence[Stage]) -> None:
    """A tinted field with its name for each stage."""
    for stage in stages:
        axes.axvspan(stage.first - 1, stage.last, color=_STAGE_SHADES.get(stage.mode, "#F0F0F0"), linewidth=0)
        place = {"xy": (stage.first - 1, 1), "xycoords": ("data", "axes fraction")}
        axes.annotate(stage.mode, **place, xytext=(3, -11), textcoords="offset points", fontsize=8, color="#333333")
        if stage.first > 1:
            axes.axvline(stage.first - 1, color="#808080", linewidth=0.8, linestyle=":")


def draw_line(axes: Any, points: Sequence[tuple[int, float]], **look: Any) -> None:
    """Plot (step, value) where there are any."""
    if points:
        axes.plot(*zip(*points, strict=True), **look)


def _layer_lines(axes: Any, tables: Sequence[tuple[int, Mapping[Any, float | None]]]) -> None:
    """Thin lines from (step, value by layer)."""
    for layer in tables[-1][1] if tables else ():
        points = [(step, value) for step, values in tables if (value := values.get(layer)) is not None]
        first = layer == next(iter(tables[-1][1]))
        draw_line(axes, points, color=_GREY, linewidth=0.7, alpha=0.6, label="each layer" if first else None)


def series(events: Events, kind: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of every event of a kind that has this value."""
    return [(e["step"], e[name]) for e in events if e["kind"] == kind and e.get(name) is not None]


def _values(health: Health, name: str) -> list[float]:
    return [math.nan if (value := getattr(layer, name)) is None else value for layer in health.layers]


def _quartile_means(health: Health, name: str) -> str:
    columns = zip(*(getattr(layer, f"{name}_quartiles") for layer in health.layers), strict=True)
    known = ([value for value in column if value is not None] for column in columns)
    return ", ".join(_number(sum(values) / len(values) if values else None) for values in known)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _bin_name(number: int) -> str:
    """0, 1, 2–3, 4–7, ..., 1K–2K: what bin `number` of a distance histogram holds."""
    if number < 2:
        return str(number)
    low, high = 2 ** (number - 1), 2**number
    return f"{low // 1024}K–{high // 1024}K" if low >= 1024 else f"{low}–{high - 1}"
