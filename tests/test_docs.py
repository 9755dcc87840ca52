"""The documents stay true: tests and paths they name exist, their tables are those of the code, their examples run."""

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsattn import config, errors
from dsattn.cli.__main__ import COMMANDS
from dsattn.training.recipes import RECIPES

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "dsattn"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
]
DECISIONS = [name for name in PAGES if name.startswith("docs/decisions/")]
CONTRACTS = ("Rows", "Layout", "Selection", "Attention", "Loss", "Modes", "Opt-in numerics")

TEST_NAME = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
FILE_NAME = re.compile(r"(?<![\w/.<*-])[\w.-]+(?:/[\w.-]+)+\.(?:py|md)\b(?!::)")
# Made up by CONTRIBUTING.md's instructions, or not built yet.
NOT_YET = {"x/y.py", "x/test_y.py", "parallel/mesh.py"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def functions(path: str) -> set[str]:
    """Functions at the top of a file; none where there is no such file."""
    if not (ROOT / path).is_file():
        return set()
    return {node.name for node in ast.parse(read(path)).body if isinstance(node, ast.FunctionDef)}


def missing_tests(text: str) -> list[str]:
    """Tests that `text` names and that are no function of that file."""
    return sorted({f"{path}::{name}" for path, name in TEST_NAME.findall(text) if name not in functions(path)})


def missing_files(text: str) -> list[str]:
    """Files that `text` names by a path and that are neither under the root nor under src/dsattn nor under tests."""
    names = set(FILE_NAME.findall(re.sub(r"https?://\S+", "", text)))
    homes = (ROOT, SRC, ROOT / "tests")
    wanted = {name for name in names if not any(name == made or name.endswith(f"/{made}") for made in NOT_YET)}
    return sorted(name for name in wanted if not any((home / name).exists() for home in homes))


def sections(text: str, level: int) -> dict[str, str]:
    """Heading -> what stands under it, up to the next heading of this or a higher level."""
    parts = re.split(rf"^(#{{1,{level}}}) (.+)$", text, flags=re.MULTILINE)
    return {
        title: body for mark, title, body in zip(*(parts[i::3] for i in (1, 2, 3)), strict=True) if len(mark) == level
    }


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every row of every table, heads left out."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        head = number + 1 < len(lines) and lines[number + 1].startswith("|--")
        if line.startswith("|") and not line.startswith("|--") and not head:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def untested(text: str) -> list[str]:
    """Rows whose last cell names no test."""
    return [cells[0] for cells in rows(text) if not TEST_NAME.search(cells[-1])]


def shown(item: dataclasses.Field) -> str:
    """A field's default as the guide writes it."""
    value = item.default if item.default is not dataclasses.MISSING else item.default_factory()
    if isinstance(value, tuple):
        return f"({', '.join(f'{type(one).__name__}()' for one in value)},)"
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else str(value)


def options_of(kind: type) -> dict[str, str]:
    return {item.name: shown(item) for item in dataclasses.fields(kind)}


def options_told(text: str) -> dict[str, str]:
    return {cells[0].strip("` "): cells[1].strip("` ") for cells in rows(text)}


CONFIGS = {
    name: kind for name, kind in vars(config).items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


@pytest.mark.parametrize("name", PAGES)
def test_tests_that_are_named_exist(name: str) -> None:
    assert not missing_tests(read(name))


def test_a_missing_test_is_seen() -> None:
    text = (
        "tests/test_docs.py::test_a_missing_test_is_seen, tests/test_docs.py::missing_tests, "
        "tests/test_docs.py::test_of_nothing, `tests/nowhere.py::test_x`"
    )
    assert missing_tests(text) == ["tests/nowhere.py::test_x", "tests/test_docs.py::test_of_nothing"]


@pytest.mark.parametrize("name", PAGES)
def test_files_that_are_named_exist(name: str) -> None:
    assert not missing_files(read(name))


def test_a_missing_file_is_seen() -> None:
    text = "`ops/select.py`, docs/nothing.md, `src/x/y.py`, see https://example.org/a/b.md and `nn/mlaa.py`"
    assert missing_files(text) == ["docs/nothing.md", "nn/mlaa.py"]


def test_planned_files_are_still_planned() -> None:
    assert not [name for name in NOT_YET if (SRC / name).exists()], "built by now: take it out of NOT_YET"


def test_every_promise_names_a_test() -> None:
    found = sections(read("docs/contracts.md"), 2)
    assert found.keys() >= set(CONTRACTS)
    for title in CONTRACTS:
        assert len(list(rows(found[title]))) >= 5, title
    assert not untested(read("docs/contracts.md"))


def test_a_promise_without_a_test_is_seen() -> None:
    text = "| promise | tests |\n|---|---|\n| a | tests/test_docs.py::test_x |\n| b | by design |\n"
    assert untested(text) == ["b"]


@pytest.mark.parametrize("name", CONFIGS)
def test_guide_has_every_option_with_its_default(name: str) -> None:
    assert options_told(sections(read("docs/guide.md"), 3)[name]) == options_of(CONFIGS[name])


def test_a_changed_default_is_seen() -> None:
    told = options_told("| name | default | rule |\n|---|---|---|\n| `steps` | `100` | x |\n| `lr` | `0.1` | y |\n")
    assert told == {"steps": "100", "lr": "0.1"}
    assert options_of(config.StageConfig)["lr"] == "0.001"


def test_no_cell_of_the_guide_is_empty() -> None:
    for cells in rows(read("docs/guide.md")):
        assert all(cells), cells


def test_guide_knows_commands_and_recipes() -> None:
    guide = read("docs/guide.md")
    told = [cells[0] for cells in rows(sections(guide, 2)["Command line"]) if cells[0].startswith("`dsattn ")]
    assert [line.split()[1].strip("`") for line in told] == list(COMMANDS)
    assert [f"`{recipe}`" for recipe in RECIPES] == [
        cells[0] for cells in rows(sections(guide, 2)["Recipes and stages"]) if cells[0].strip("`") in RECIPES
    ]
    changes = read("CHANGELOG.md")
    assert not [
        command for command in COMMANDS if f"`{command}`" not in changes and f"`dsattn {command}`" not in changes
    ]


def test_errors_that_documents_name_exist() -> None:
    known = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    text = "\n".join(map(read, PAGES))
    named = set(re.findall(r"`(?:dsattn\.errors\.)?([A-Z]\w*(?:Error|Unavailable|Stopped))`", text))
    assert named
    assert not named - known - {"ValueError"}


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README.md" and "```python" in read(name)])
def test_examples_run(name: str, run_python: Callable[[str], None]) -> None:
    """Each block in a namespace of its own, all in one process."""
    examples = re.findall(r"^```python\n(.*?)^```", read(name), re.DOTALL | re.MULTILINE)
    run_python(
        f"for number, code in enumerate({examples!r}):\n    exec(compile(code, f'example {{number}}', 'exec'), {{}})"
    )


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_are_short_and_complete(name: str) -> None:
    text = read(name)
    assert len(text.splitlines()) <= 40
    parts = ["**Context.**", "**Decision.**", "**Consequence.**"]
    assert re.findall(r"^\*\*\w+\.\*\*", text, re.MULTILINE) == parts
    assert text.startswith(f"# {Path(name).name[:3]} ")


def test_decisions_are_numbered() -> None:
    assert [Path(name).name[:3] for name in DECISIONS] == [f"{number:03d}" for number in range(1, len(DECISIONS) + 1)]
