"""README.md stays short and true: its examples run, the paths it names exist, its picture is the package's."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "dsattn"
MADE = ("runs/", ".venv/")  # by the commands that the README names
PATH = re.compile(
    r"""(?<![\w/.<*-])            # a name's beginning
        [\w.-]+(?:/[\w.-]+)*      # folders
        (?:\.(?:py|md|toml|jsonl?|png|svg|html)\b | /(?=[`)\s]))""",
    re.VERBOSE,
)


def read(name: str) -> str:
    path = ROOT / name
    assert path.exists(), f"{name} does not exist"
    return path.read_text(encoding="utf-8")


def missing_paths(text: str) -> list[str]:
    """Files and folders that `text` names and that are neither under the root nor under src/dsattn."""
    names = set(PATH.findall(re.sub(r"https?://\S+", "", text)))
    here = {name for name in names if (ROOT / name).exists() or (SRC / name).exists()}
    return sorted(name for name in names - here if not name.startswith(MADE))


def picture(text: str) -> str:
    found = re.search(r"^ *hidden states h \[T, M\].*?^ *keys\.py says[^\n]*", text, re.DOTALL | re.MULTILINE)
    assert found, "the picture is missing (from 'hidden states h [T, M]' to 'keys.py says ...')"
    return textwrap.dedent(found.group()).rstrip()


def test_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) < 120


def test_readme_examples_run(run_python: Callable[[str], None]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", read("README.md"), re.DOTALL | re.MULTILINE)
    assert examples, "README.md has no ```python block"
    for example in examples:
        run_python(example)


def test_readme_names_only_what_exists() -> None:
    missing = missing_paths(read("README.md"))
    assert not missing, f"README.md names {missing}"


def test_a_missing_path_is_seen() -> None:
    text = (
        "see `nn/mlaa.py`, [x](docs/nothing.md), `nowhere/`, https://example.org/y.py, `src/`, `config.py`, runs/a.html"
    )
    assert missing_paths(text) == ["docs/nothing.md", "nn/mlaa.py", "nowhere/"]


@pytest.mark.parametrize("name", ["README.md", "docs/flow.md"])
def test_picture_is_the_package_docstrings(name: str) -> None:
    assert picture(read(name)) == picture(read("src/dsattn/__init__.py"))


def test_a_changed_picture_is_seen() -> None:
    drawn = " hidden states h [T, M]\n   |--> q\n keys.py says which"
    assert picture(f"text\n{textwrap.indent(drawn, '  ')}\nmore") == picture(drawn)
    assert picture(drawn.replace("q", "k")) != picture(drawn)
