"""docs/megatron.md has the table of results/megatron.jsonl, which results/record_megatron.py makes (`--table`)."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CASE = {"backend": "tilelang", "lengths": [4, 2]}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return importlib.import_module("record_megatron")


def test_the_page_has_the_newest_records(script: Any) -> None:
    page = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    written = page.partition("<!-- records -->\n")[2].partition("\n<!-- end of records -->")[0]
    records = ROOT / "results" / "megatron.jsonl"
    if records.exists():
        lines = records.read_text(encoding="utf-8").splitlines()
        assert written == "\n".join(script.table([json.loads(line) for line in lines]))
    else:
        assert written == "None yet."


def test_a_table_has_the_newest_of_each_case(script: Any) -> None:
    errors = {"output": 1e-3, "weights": 2e-3, "indexer": 3e-3}
    times = {"megatron": {"median": 9.0}, "dsattn": {"median": 3.0}}
    good = CASE | {"ms": times, "error": {"megatron": errors, "dsattn": errors}}
    rows = script.table([CASE | {"failed": "no"}, good, {"backend": "cudnn", "lengths": [6], "refused": "no"}])[2:]
    assert rows == [
        "| `tilelang` | 4, 2 | 9.0 | 3.0 | 1.0e-03 / 1.0e-03 | 2.0e-03 / 2.0e-03 | 3.0e-03 / 3.0e-03 |",
        "| `cudnn` | 6 | refused | | | | |",
    ]
