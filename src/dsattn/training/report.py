"""What a run tells people: the progress bar, the closing table, and report.html.

The only file of the trainer that prints.
"""

import base64
import html
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from tqdm import tqdm

from dsattn.errors import DataError, InputError
from dsattn.training import plots
from dsattn.training.metrics import Events, Health, last_health, read_metrics, stages_of

_LOG_SECONDS = 30.0  # between two states of the bar where they pile up in a file

_PLOTS: tuple[tuple[str, str, Callable[[Events], plots.Picture | None]], ...] = (
    (
        "Language-model loss",
        "Cross entropy of the next token. The warm-up stage trains the indexer alone: there the held-out line is flat.",
        plots.loss,
    ),
    (
        "Indexer loss",
        "KL from the attention (summed over heads, normalised) to the softmax of the indexer's scores. Captured is "
        "1 − KL / KL of uniform weights, on held-out text over all visible keys: 1 is perfect, 0 knows nothing, below "
        "0 is worse than knowing nothing.",
        plots.distillation,
    ),
    (
        "Recall",
        "Share of the dense attention mass, measured without the indexer, that lies on the K selected keys of held-out "
        "rows. Rows that see at most K keys are left out. Random: K keys by chance. Recency: the last K keys. Oracle: "
        "the K heaviest keys, the most that any selection can reach. Worst head: the head that loses most.",
        plots.recall,
    ),
    (
        "Recall by position",
        "The same rows in four parts by their position in the document. The further in, the more keys compete for K "
        "places: what matters is the distance to the baselines.",
        plots.recall_by_position,
    ),
    (
        "Distance of selected keys",
        "How far back the selected keys lie, beside the K heaviest keys of the dense attention, in bins that double.",
        plots.distances,
    ),
    ("Speed", "Tokens of the optimiser's steps over their wall-clock time, evaluations left out.", plots.speed),
)

_SUMMARY = ("stages", "finished", "seconds", "tokens", "parameters", "device", "report", "checkpoint")
_COLUMNS = ("recall", "random", "recency", "oracle", "worst_head", "top1", "kl", "kl_uniform", "captured")

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<title>$title</title>
<style>
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: #fff; color: #1a1a1a;
       font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p { max-width: 46rem; } img { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #888; }
.facts td, .facts th { text-align: left; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem; }
.wide { overflow-x: auto; } .warn { background: #fff3d6; padding: .5rem .8rem; }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


class Console:
    """What a run says while it goes on: a bar with the time that is left over all stages, and lines above it.

    enabled: False says nothing at all. total_steps: over all stages.
    """

    def __init__(self, enabled: bool, total_steps: int):
        self.enabled = enabled
        self.total_steps = total_steps
        self._begun_at = 0
        self._bar: tqdm | None = None

    def start_at(self, step: int) -> None:
        """A resumed run has done `step` steps: the bar begins there, and its speed counts from there."""
        self._begun_at = step

    def step(self, step: int, mode: str, lm_loss: float | None, kl: float | None, tokens_per_second: float) -> None:
        """Move the bar to `step`; losses that are None are left out."""
        if not self.enabled:
            return
        if self._bar is None:
            pace: Any = {"mininterval": 0.2 if sys.stderr.isatty() else _LOG_SECONDS, "smoothing": 0.1}
            self._bar = tqdm(total=self.total_steps, initial=self._begun_at, unit="step", dynamic_ncols=True, **pace)
        losses = [f"{name} {value:#.3g}" for name, value in (("lm", lm_loss), ("kl", kl)) if value is not None]
        shown = [mode, *losses, f"{tokens_per_second:,.0f} tok/s"]
        self._bar.set_postfix_str(", ".join(shown), refresh=False)
        self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """Print above the bar."""
        if self.enabled:
            tqdm.write(text)

    def audit(self, lines: Iterable[str]) -> None:
        """Print which parameters learn."""
        self.say("\n".join(lines))

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def closing_table(summary: Mapping[str, Any]) -> str:
    """`summary.json` as the lines that end a run: losses by stage, recall against its baselines, cost, paths."""
    head = ["stage", "steps", "held-out LM loss", "recall", "captured", "ends at"]
    rows = []
    for number, stage in enumerate(summary["stages"], 1):
        health = Health.from_dict(stage["health"]) if stage["health"] else None
        measured = [_number(health.mean(name)) if health else "-" for name in ("recall", "captured")]
        loss = _number(stage["held_out_loss"], 4)
        rows.append([f"{number} {stage['mode']}", f"{stage['steps']:,}", loss, *measured, f"{stage['seconds']:,.0f} s"])
    if not summary["finished"]:
        rows.append(["stopped early", *[""] * 5])
    lines = [*_aligned([head, *rows]), "", *_verdict(_final_health(summary)), ""]
    cost = f"{summary['seconds']:,.0f} s, {summary['tokens']:,} tokens, {summary['parameters']:,} parameters"
    paths = {"cost": f"{cost}, {summary['device']}", "report": summary["report"], "checkpoint": summary["checkpoint"]}
    return "\n".join([*lines, *(f"{name:11s} {value or 'none'}" for name, value in paths.items())])


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from metrics.jsonl, summary.json and config.json; those that are missing are skipped.

    One file that needs no other. Raises InputError where the folder is none of a run or matplotlib is missing,
    DataError where a file is damaged.
    """
    events = read_metrics(run_dir)
    summary = _read_json(run_dir / "summary.json", _SUMMARY)
    config = _read_json(run_dir / "config.json")
    if not (events or summary or config):
        raise InputError(
            f"run_dir={str(run_dir)!r} holds no metrics.jsonl, summary.json or config.json; give the folder of a run"
        )
    sections = [("What ran", _what_ran(run_dir, events, summary))]
    if summary:
        sections.append(("Result", f"<pre>{html.escape(closing_table(summary))}</pre>"))
    for title, explanation, plot in _PLOTS:
        picture = plot(events)
        sections.append((title, f"<p>{html.escape(explanation)}</p>\n{_image(picture, title)}"))
    sections.append(("Every layer", _layer_table(last_health(events))))
    if config:
        shown = html.escape(json.dumps(config, indent=1))
        sections.append(("Configuration", f"<details><summary>config.json</summary><pre>{shown}</pre></details>"))
    body = "\n".join(f"<section>\n<h2>{html.escape(title)}</h2>\n{text}\n</section>" for title, text in sections)
    path, partial = run_dir / "report.html", run_dir / "report.html.partial"
    name = (summary or {}).get("recipe") or run_dir.resolve().name
    partial.write_text(_PAGE.substitute(title=html.escape(f"dsattn run: {name}"), body=body), encoding="utf-8")
    partial.replace(path)
    return path


def _what_ran(run_dir: Path, events: Events, summary: Mapping[str, Any] | None) -> str:
    facts: list[tuple[str, str]] = [("folder", str(run_dir.resolve()))]
    stages = stages_of(events)
    if stages:
        facts.append(("stages", " → ".join(f"{s.mode} ({s.last - s.first + 1:,} steps)" for s in stages)))
    for name in ("recipe", "device", "parameters", "tokens", "seconds", "checkpoint"):
        value = (summary or {}).get(name)
        if value is not None:
            facts.append((name, f"{value:,.0f}" if isinstance(value, int | float) else str(value)))
    table = "".join(f'<tr><th scope="row">{html.escape(k)}</th><td>{html.escape(v)}</td></tr>' for k, v in facts)
    finished = bool(summary and summary["finished"])
    warning = "" if finished else '<p class="warn">This run has not finished: what follows is what it has so far.</p>'
    return f'{warning}<table class="facts"><tbody>{table}</tbody></table>'


def _image(picture: plots.Picture | None, title: str) -> str:
    if picture is None:
        return f"<p><em>{html.escape(title)}: this run has measured nothing of it.</em></p>"
    data = base64.b64encode(picture.svg).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(picture.alt)}">'


def _layer_table(health: Health | None) -> str:
    if health is None:
        return "<p><em>Indexer health: this run has measured nothing of it.</em></p>"
    head = "".join(f'<th scope="col">{name.replace("_", " ")}</th>' for name in ("layer", *_COLUMNS))
    rows = [[str(layer.layer), *(_significant(getattr(layer, name)) for name in _COLUMNS)] for layer in health.layers]
    rows.append(["mean", *(_significant(health.mean(name)) for name in _COLUMNS)])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    about = f"<p>{health.rows:,} rows that see more than {health.top_k:,} keys, in held-out text; KL in nats a row.</p>"
    return f'{about}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _final_health(summary: Mapping[str, Any]) -> Health | None:
    found = [stage["health"] for stage in summary["stages"] if stage["health"]]
    return Health.from_dict(found[-1]) if found else None


def _verdict(health: Health | None) -> list[str]:
    """Recall beside its baselines, and whether the indexer beats them."""
    if health is None:
        return ["recall: not measured"]
    if not health.rows:
        return [f"recall: {health.note}"]
    means = {name: health.mean(name) for name in ("recall", "random", "recency", "oracle")}
    numbers = "   ".join(f"{'indexer' if name == 'recall' else name} {_number(v)}" for name, v in means.items())
    about = f"mean of {len(health.layers)} layers, {health.rows:,} held-out rows that see more keys"
    recall = means["recall"]
    lost = [name for name in ("random", "recency") if recall is None or recall <= (means[name] or 0)]
    verdict = f"does not beat {' and '.join(lost)}" if lost else "beats both baselines"
    return [f"recall@{health.top_k}   {numbers}", f"            ({about}; the indexer {verdict})"]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("   ".join(cells).rstrip())
    return lines


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _significant(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}"


def _read_json(path: Path, needed: Sequence[str] = ()) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if missing := [name for name in needed if name not in tree]:
            raise ValueError(f"it has no {', '.join(missing)}")
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; remove it to report on the rest") from error
    return tree
