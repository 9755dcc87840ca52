"""Runs beside each other: did a change keep the losses, and what did it do to the speed?"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dsattn.errors import InputError
from dsattn.training import plots
from dsattn.training.metrics import Events, read_metrics, stages_of

_SPEEDS = ("tokens_per_second", "tflops", "mfu")


def read_runs(folders: Sequence[Path]) -> dict[str, Events]:
    """Events of each run by its folder's name, or by its path where names are not distinct.

    Raises InputError for fewer than two runs, a folder that is none, or a run that has not trained a step.
    """
    if len(folders) < 2:
        raise InputError(f"runs={[str(folder) for folder in folders]} must name two or more folders to compare")
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs: dict[str, Events] = dict(zip(names, map(read_metrics, folders), strict=True))
    empty = [name for name, events in runs.items() if not _train(events)]
    if empty:
        raise InputError(f"runs={empty}: nothing was trained there yet; leave them out")
    return runs


def compare(runs: Mapping[str, Events]) -> list[dict[str, Any]]:
    """A row for each run and stage. Steps are compared with the first run's, where both logged them.

    Keys: run, stage, mode, tokens_per_second, tflops, mfu (medians without the stage's first logged step: it may hold
    compilation), lm_loss (last), difference (largest |difference| of lm_loss; None without common steps).
    """
    first = next(iter(runs.values()))
    rows = []
    for name, events in runs.items():
        for index, stage in enumerate(stages_of(events)):
            steps = [event for event in _train(events) if event["stage"] == index]
            if not steps:
                continue
            speeds = {key: _median(event.get(key) for event in steps[1:] or steps) for key in _SPEEDS}
            last = steps[-1]["lm_loss"]
            rows.append(
                {"run": name, "stage": index, "mode": stage.mode, **speeds, "lm_loss": last}
                | {"difference": _largest_difference(steps, first)}
            )
    return rows


def picture(runs: Mapping[str, Events]) -> plots.Picture:
    """Training losses and speeds of all runs over the same steps, on the first run's stages."""
    looks = itertools.product(("-", "--", ":", "-."), plots.COLOURS)
    styles = [
        {"linestyle": dash, "color": colour, "linewidth": 1.4} for (dash, colour), _ in zip(looks, runs, strict=False)
    ]

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 2)
        names = {"lm_loss": "LM loss (nats a token)", "tokens_per_second": "tokens a second"}
        for axes, (key, label) in zip(panels, names.items(), strict=True):
            plots.shade_stages(axes, stages_of(next(iter(runs.values()))))
            for (name, events), style in zip(runs.items(), itertools.cycle(styles), strict=False):
                plots.draw_line(axes, plots.series(events, "train", key), label=name, **style)
            axes.set_xlabel("step")
            axes.set_ylabel(label)
        panels[1].set_ylim(bottom=0)
        panels[0].legend(loc="upper right")

    return plots.draw_picture(draw, 3.4, f"Lines of loss and speed over steps for the runs {', '.join(runs)}.")


def _train(events: Events) -> list[Mapping[str, Any]]:
    return [event for event in events if event["kind"] == "train"]


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _largest_difference(steps: Events, first: Events) -> float | None:
    theirs = {event["step"]: event["lm_loss"] for event in _train(first)}
    pairs = ((event["lm_loss"], theirs.get(event["step"])) for event in steps)
    known = [abs(ours - other) for ours, other in pairs if ours is not None and other is not None]
    return max(known) if known else None
