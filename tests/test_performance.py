"""docs/performance.md says what the records say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_from_the_records():
    page = runpy.run_path(str(ROOT / "results" / "performance.py"))["page"]()
    written = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert written == page, "run: python results/performance.py > docs/performance.md"
