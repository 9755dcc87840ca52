"""Small files share one interpreter: starting it takes longer than their tests."""

import re
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
SMALL = {
    "test_chunks.py": 4,
    "test_dense_backward.py": 6,
    "test_indexer_kl_rows.py": 4,
    "test_launch.py": 1,
    "test_lines.py": 6,
    "test_quantize.py": 7,
    "test_select_scores.py": 6,
}


def test_small_files_in_the_interpreter(interpret: Callable[..., int]) -> None:
    assert interpret(*(str(HERE / name) for name in SMALL)) >= sum(SMALL.values())


def test_every_file_is_interpreted_once() -> None:
    """Here or by itself; the guarantees on a device are for a GPU only."""
    texts = {path.name: path.read_text() for path in HERE.glob("test_*.py") if path != Path(__file__)}
    needs = {name for name, text in texts.items() if re.search(r"def test_[^)]*device: str", text)}
    alone = {name for name, text in texts.items() if "def test_in_the_interpreter(" in text}
    assert not alone & SMALL.keys()
    assert needs - {"test_guarantees.py"} == alone | SMALL.keys()
