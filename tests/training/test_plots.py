import math
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from dsattn.errors import InputError
from dsattn.training import plots
from dsattn.training.health import Health, LayerHealth

EVERY_PLOT = (plots.loss, plots.distillation, plots.recall, plots.recall_by_position, plots.distances, plots.speed)
OF_HEALTH = (plots.recall, plots.recall_by_position, plots.distances)


def layer_health(layer: int = 0, recall: float | None = 0.8, **changes) -> LayerHealth:
    shares = {"recall": recall, "random": 0.2, "recency": 0.5}
    quartiles = {f"{name}_quartiles": [value, value, None, value] for name, value in shares.items()}
    rest = {"oracle": 0.9, "worst_head": 0.7, "top1": 0.6, "kl": 0.3, "kl_uniform": 1.2, "captured": 0.75}
    counts = {"distances": [3, 1, 0, 20], "oracle_distances": [2, 2]}
    return LayerHealth(**{"layer": layer, "rows": 40, **shares, **quartiles, **rest, **counts, **changes})


def health(*layers: LayerHealth) -> dict:
    return Health(list(layers or [layer_health(0), layer_health(3)]), 4, 40, [4, 8, 12, 16, 1999]).to_dict()


def run(measured: dict | None = None) -> list[dict]:
    """A run of two stages, as read back from JSON."""
    events = []
    for step in range(1, 21):
        late = step > 10
        head = {"step": step, "stage": int(late), "mode": "sparse" if late else "dense", "seconds": step / 2}
        kl = {"kl": 1 / step, "kl_layers": {"0": 2 / step, "3": None}} if late else {"kl": None, "kl_layers": None}
        train = {"kind": "train", "lm_loss": 5.5 / step, "tokens_per_second": 900.0 + step, **kl}
        events.append({**head, **train, "lr": 1e-3, "grad_norm": 1.0})
        if step % 5 == 0:
            events.append({**head, "kind": "eval", "lm_loss": 6 / step, "health": measured if late else None})
    return events


def words(picture: plots.Picture | None) -> list[str]:
    """Texts of the SVG: matplotlib draws glyphs, and names each text in a comment."""
    assert picture is not None
    ET.fromstring(picture.svg)
    return [text.strip() for text in re.findall(r"<!-- (.*?) -->", picture.svg.decode())]


@pytest.mark.parametrize("plot", EVERY_PLOT)
def test_a_whole_run_is_drawn(plot):
    picture = plot(run(health()))
    assert words(picture)
    assert len(picture.alt) > 40
    assert "nan" not in picture.alt.lower()


@pytest.mark.parametrize("plot", EVERY_PLOT)
def test_nothing_measured_is_no_picture(plot):
    assert plot([]) is None
    assert plot([{"kind": "eval", "step": 3, "stage": 0, "mode": "dense", "lm_loss": None, "health": None}]) is None


@pytest.mark.parametrize("plot", OF_HEALTH)
def test_no_health_is_no_picture(plot):
    assert plot(run()) is None
    nothing = Health([], 4, 0, [], "no layer owns an indexer").to_dict()
    assert plot(run(nothing)) is None


@pytest.mark.parametrize("plot", EVERY_PLOT)
def test_unknown_values_leave_gaps(plot):
    unknown = dict.fromkeys(("kl", "kl_uniform", "captured", "top1", "worst_head", "oracle"))
    picture = plot(run(health(layer_health(0, None, **unknown, distances=[]), layer_health(1, 0.5))))
    assert words(picture)
    nothing_known = plot(run(health(layer_health(0, None, **unknown, distances=[], oracle_distances=[0]))))
    assert nothing_known is not None


@pytest.mark.parametrize("plot", EVERY_PLOT)
def test_one_event_is_enough(plot):
    events = run(health())[-2:]
    assert words(plot(events))


@pytest.mark.parametrize("plot", EVERY_PLOT)
def test_the_same_run_gives_the_same_bytes(plot):
    assert plot(run(health())) == plot(run(health()))


def test_stages_are_named_where_they_are():
    assert {"dense", "sparse"} <= set(words(plots.loss(run())))
    assert "dense" not in words(plots.distillation(run(health())))
    assert {"dense", "sparse"} <= set(words(plots.speed(run())))


def test_the_numbers_are_those_of_the_run():
    events = run(health(layer_health(0, 0.75), layer_health(3, 0.25)))
    assert "train 0.275, held out 0.300" in plots.loss(events).alt
    assert "KL 0.0500, captured 0.750" in plots.distillation(events).alt
    assert "recall 0.500, random 0.200, recency 0.500, oracle 0.900" in plots.recall(events).alt
    by_position = plots.recall_by_position(events)
    assert "recall 0.500, 0.500, unknown, 0.500" in by_position.alt
    assert {"4–7", "8–11", "12–15", "16–1,999", "layer 0", "layer 3"} <= set(words(by_position))
    assert "most lie 4–7 rows back" in plots.distances(events).alt
    assert "median is 911 tokens" in plots.speed(events).alt


def test_the_newest_health_is_drawn():
    events = run(health(layer_health(recall=0.1)))
    events[-1] = {**events[-1], "health": health(layer_health(recall=0.7))}
    assert "recall 0.700" in plots.recall(events).alt


def test_many_layers_are_thinned_out_and_that_is_said():
    many = [layer_health(i) for i in range(61)]
    picture = plots.recall_by_position(run(health(*many)))
    panels = [word for word in words(picture) if re.fullmatch(r"layer \d+", word)]
    assert (len(panels), panels[0], panels[-1]) == (12, "layer 0", "layer 60")
    assert any("12 of 61 layers shown" in word for word in words(picture))
    assert "Bars" in plots.recall(run(health(*many))).alt


def test_distance_bins_are_named():
    far = layer_health(distances=[0] * 12 + [5], oracle_distances=[1])
    shown = words(plots.distances(run(health(far))))
    assert {"0", "2–3", "512–1023", "2K–4K"} <= set(shown)


@pytest.mark.parametrize("plot", EVERY_PLOT)
def test_no_value_is_cut_off(plot, monkeypatch):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args, **kwargs) -> None:
        drawn.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    flat, peaked = layer_health(0, 1.0, distances=[1] * 9), layer_health(1, 0.0, distances=[0, 9], captured=-2.0)
    plot(run(health(flat, peaked)))
    seen = 0
    for axes in drawn[0].axes:
        bottom, top = axes.get_ylim()
        for line in axes.lines:
            if line.get_transform() == axes.transData:  # else it marks a stage, from edge to edge
                values = [y for y in line.get_ydata() if math.isfinite(y)]
                seen += len(values)
                assert all(bottom <= y <= top for y in values), (bottom, top, values)
    assert seen > 4


@pytest.mark.parametrize("plot", EVERY_PLOT)
def test_missing_matplotlib_is_named(plot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'dsattn\[report\]'"):
        plot(run(health()))


def test_plots_leave_matplotlib_as_it_was():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.loss(run())
    assert dict(matplotlib.rcParams) == before
