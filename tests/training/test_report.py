import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dsattn.errors import DataError, InputError
from dsattn.training.health import Health, LayerHealth
from dsattn.training.report import Console, closing_table, write_report

SECTIONS = ["What ran", "Result", "Language-model loss", "Indexer loss", "Recall", "Recall by position"]
SECTIONS += ["Distance of selected keys", "Speed", "Every layer", "Configuration"]


def health(recall: float | None = 0.8, rows: int = 40, note: str = "") -> Health:
    shares = {"recall": recall, "random": 0.2, "recency": 0.5}
    quartiles = {f"{name}_quartiles": [value] * 4 for name, value in shares.items()}
    rest = {"oracle": 0.9, "worst_head": 0.7, "top1": 0.6, "kl": 0.3, "kl_uniform": 1.2, "captured": 0.75}
    counts = {"distances": [3, 1], "oracle_distances": [2, 2]}
    layers = [LayerHealth(**{"layer": i, "rows": rows, **shares, **quartiles, **rest, **counts}) for i in (0, 2)]
    return Health(layers, 64, rows, [64, 80, 90, 100, 127], note)


def summary(last: Health | None = None, **changes) -> dict:
    stages = [
        {"mode": "dense", "steps": 1200, "held_out_loss": 2.34567, "health": None, "seconds": 61.4},
        {"mode": "sparse", "steps": 30, "held_out_loss": 2.25, "health": last and last.to_dict(), "seconds": 93.0},
    ]
    facts = {"recipe": "tiny", "device": "cpu", "parameters": 1234567, "seconds": 93.0, "tokens": 7654321}
    paths = {"checkpoint": "runs/a/checkpoints/step-30", "report": "runs/a/report.html", "metrics": "runs/a/m.jsonl"}
    return {**facts, "stages": stages, **paths, "finished": True, **changes}


def make_run(run_dir: Path, **changes) -> None:
    events = []
    for step in (1, 2, 3, 4):
        head = {"step": step, "stage": step // 3, "mode": "sparse" if step > 2 else "dense", "seconds": step}
        train = {"kind": "train", "lm_loss": 5 / step, "kl": 0.4 if step > 2 else None, "kl_layers": None}
        events.append({**head, **train, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 800.0})
        measured = health().to_dict() if step > 2 else None
        events.append({**head, "kind": "eval", "lm_loss": 5.1 / step, "health": measured})
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run_dir / "summary.json").write_text(json.dumps(summary(health(), **changes)))
    (run_dir / "config.json").write_text(json.dumps({"data": {"source": "<b>&stdlib"}}))


class Page(HTMLParser):
    """Headings, images, every attribute, and whether each element is closed."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text: str):
        super().__init__()
        self.headings: list[str] = []
        self.images: list[dict] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def page(run_dir: Path) -> Page:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return Page(path.read_text(encoding="utf-8"))


# report.html


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """The report of a whole run, drawn once for all who only read it."""
    run_dir = tmp_path_factory.mktemp("whole")
    make_run(run_dir)
    return write_report(run_dir).read_text(encoding="utf-8")


def test_every_section_is_there_with_its_picture(whole):
    found = Page(whole)
    assert found.headings == SECTIONS
    assert len(found.images) == 6
    for image in found.images:
        kind, data = image["src"].split(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"</svg>" in base64.b64decode(data)
        assert len(image["alt"]) > 40
    assert "measured nothing" not in found.text
    assert "not finished" not in found.text


def test_it_needs_nothing_from_outside(whole):
    found = Page(whole)
    assert not re.search(r"https?:", whole)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    outside = [v for name, v in found.attributes if name in ("src", "href") and not v.startswith("data:")]
    assert outside == []
    assert "url(" not in whole
    assert "@import" not in whole


def test_the_numbers_are_in_it(whole):
    found = Page(whole).text
    stages = "dense (2 steps) → sparse (2 steps)"
    for text in ("1,234,567", "7,654,321", stages, "40 rows", "0.800", "2.3457"):
        assert text in found, text
    assert closing_table(summary(health())) in found


def test_text_is_escaped(tmp_path):
    make_run(tmp_path, recipe="<script>alert(1)</script>", device='"><img src=x>', checkpoint="a&b")
    (tmp_path / "metrics.jsonl").unlink()
    found = page(tmp_path)
    assert "script" not in found.tags
    assert found.images == []
    assert "<script>alert(1)</script>" in found.text
    assert "<b>&stdlib" in found.text


def test_an_interrupted_run_has_a_report_too(tmp_path):
    make_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "config.json").unlink()
    found = page(tmp_path)
    assert "has not finished" in found.text
    assert found.headings == [title for title in SECTIONS if title not in ("Result", "Configuration")]
    assert len(found.images) == 6


def test_a_run_that_stopped_early_says_so_and_a_missing_series_gives_a_sentence(tmp_path):
    make_run(tmp_path, finished=False)
    (tmp_path / "metrics.jsonl").unlink()
    found = page(tmp_path)
    assert "has not finished" in found.text
    assert found.headings == SECTIONS
    assert found.images == []
    assert found.text.count("this run has measured nothing of it") == 7


def test_a_run_without_a_step_is_reported_and_what_is_no_run_is_not(tmp_path):
    with pytest.raises(InputError, match=r"holds no metrics\.jsonl, .*give the folder of a run"):
        write_report(tmp_path)
    with pytest.raises(InputError, match="no folder"):
        write_report(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.json").write_text('{"data": {}}')
    assert "has not finished" in page(tmp_path).text


def test_a_summary_without_its_fields_is_named(tmp_path):
    make_run(tmp_path)
    (tmp_path / "summary.json").write_text('{"stages": []}')
    with pytest.raises(DataError, match=r"summary\.json is damaged: it has no finished, seconds"):
        write_report(tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "config.json", "metrics.jsonl"])
def test_a_damaged_file_is_named_and_the_old_report_stays(tmp_path, name):
    make_run(tmp_path)
    (tmp_path / "report.html").write_text("before")
    (tmp_path / name).write_text('{"a":\n')
    with pytest.raises(DataError, match=name):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "before"
    assert not list(tmp_path.glob("*.partial"))


# The closing table


def test_closing_table_says_what_was_reached():
    lines = closing_table(summary(health())).splitlines()
    assert lines[0].split() == ["stage", "steps", "held-out", "LM", "loss", "recall", "captured", "ends", "at"]
    assert lines[1].split() == ["1", "dense", "1,200", "2.3457", "-", "-", "61", "s"]
    assert lines[2].split() == ["2", "sparse", "30", "2.2500", "0.800", "0.750", "93", "s"]
    text = "\n".join(lines)
    assert "recall@64   indexer 0.800   random 0.200   recency 0.500   oracle 0.900" in text
    assert "mean of 2 layers, 40 held-out rows" in text
    assert "beats both baselines" in text
    for value in ("93 s", "7,654,321 tokens", "1,234,567 parameters", "runs/a/report.html", "checkpoints/step-30"):
        assert value in text
    assert "stopped early" not in text


@pytest.mark.parametrize(
    ("recall", "verdict"),
    [
        (0.51, "beats both baselines"),
        (0.5, "does not beat recency"),
        (0.3, "does not beat recency"),
        (0.2, "does not beat random and recency"),
        (None, "does not beat random and recency"),
    ],
)
def test_closing_table_tells_when_a_baseline_wins(recall, verdict):
    assert verdict in closing_table(summary(health(recall)))


def test_closing_table_of_a_run_that_measured_little():
    stages = [{"mode": "dense", "steps": 3, "held_out_loss": None, "health": None, "seconds": 1.0}]
    text = closing_table(summary(stages=stages, checkpoint=None, finished=False))
    assert "recall: not measured" in text
    assert "stopped early" in text
    assert re.search(r"checkpoint +none", text)
    assert "recall: no long rows" in closing_table(summary(health(rows=0, note="no long rows")))
    assert "stopped early" in closing_table(summary(stages=[], finished=False))


# The console


def test_the_bar_shows_steps_time_left_and_losses(capsys):
    console = Console(True, 10)
    console.say("hello")
    console.audit(["mode sparse", "  layers learn"])
    console.step(1, "dense", 5.4321, None, 1234.0)
    console.step(10, "sparse", 2.5, 0.125, 987.6)
    console.close()
    out, err = capsys.readouterr()
    assert out == "hello\nmode sparse\n  layers learn\n"
    assert "10/10" in err
    assert "sparse, lm 2.50, kl 0.125, 988 tok/s" in err
    assert re.search(r"\[\d\d:\d\d<", err)


def test_a_resumed_bar_begins_where_the_run_was(capsys):
    console = Console(True, 10)
    console.start_at(6)
    console.step(7, "sparse", None, None, 1.0)
    console.close()
    err = capsys.readouterr().err
    assert "6/10" in err
    assert "7/10" in err
    assert "0/10" not in err
    assert "lm" not in err


def test_a_silent_console_is_silent(capsys):
    console = Console(False, 10)
    console.say("hello")
    console.audit(["a"])
    console.start_at(2)
    console.step(3, "dense", 1.0, None, 1.0)
    console.close()
    assert capsys.readouterr() == ("", "")


def test_a_console_may_close_twice_and_unused(capsys):
    console = Console(True, 3)
    console.close()
    console.step(1, "dense", 1.0, None, 1.0)
    console.close()
    console.close()
    assert "1/3" in capsys.readouterr().err
