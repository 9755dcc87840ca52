"""The documents stay true: tests and paths they name exist, their tables are those of the code, their examples run."""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsattn import config, errors
from dsattn.backends import deep_select, flash_mla, vendors
from dsattn.backends.cudnn import frontend, select, select_topk, sparse_mla
from dsattn.cli import doctor, train
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
# Made up by CONTRIBUTING.md's instructions.
NOT_YET = {"x/y.py", "x/test_y.py"}


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
    """Files that `text` names by a path and that are under none of the root, src/dsattn, tests and docs."""
    names = set(FILE_NAME.findall(re.sub(r"https?://\S+", "", text)))
    homes = (ROOT, SRC, ROOT / "tests", ROOT / "docs")
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


def meanings_of(kind: type) -> dict[str, str]:
    """The sentence of each field, which `--help` shows, without what stands in brackets."""
    (body,) = (one.body for one in CONFIG_SOURCE if isinstance(one, ast.ClassDef) and one.name == kind.__name__)
    return {
        item.target.id: plain(about.value.value)
        for item, about in itertools.pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(about, ast.Expr)
    }


def plain(sentence: str) -> str:
    """On one line, without what stands in brackets: links in the guide, bars that would cut a table in the code."""
    return re.sub(r" \([^)]*\)+", "", " ".join(sentence.split()))


def options_told(text: str) -> dict[str, str]:
    return {cells[0].strip("` "): cells[1].strip("` ") for cells in rows(text)}


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def broken_links(name: str, text: str) -> list[str]:
    """Links of the page `name` to pages that do not exist, or to headings that they do not have."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        page, _, heading = link.partition("#")
        target = (ROOT / name).parent / page
        if link.startswith("http"):
            continue
        there = text if not page else target.read_text(encoding="utf-8") if target.is_file() else ""
        if (page and not target.exists()) or (heading and heading not in anchors(there)):
            broken.append(link)
    return broken


CONFIG_SOURCE = ast.parse(read("src/dsattn/config.py")).body
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


@pytest.mark.parametrize("name", CONFIGS)
def test_guide_and_help_say_the_same_of_every_option(name: str) -> None:
    text = sections(read("docs/guide.md"), 3)[name]
    assert {cells[0].strip("` "): plain(cells[2]) for cells in rows(text)} == meanings_of(CONFIGS[name])
    assert plain(text).startswith(plain(inspect.getdoc(CONFIGS[name]).partition("\n\n")[0]))


def test_a_changed_default_is_seen() -> None:
    told = options_told("| name | default | rule |\n|---|---|---|\n| `steps` | `100` | x |\n| `lr` | `0.1` | y |\n")
    assert told == {"steps": "100", "lr": "0.1"}
    assert options_of(config.StageConfig)["lr"] == "0.001"


def test_every_configuration_is_in_the_guide() -> None:
    """RunConfig leads to every other: nothing that the command line reaches is left out."""
    reached, waiting = set(), [config.RunConfig]
    while waiting:
        kind = waiting.pop()
        reached.add(kind)
        named = " ".join(str(one.type) for one in dataclasses.fields(kind))
        waiting += [one for name, one in CONFIGS.items() if re.search(rf"\b{name}\b", named) and one not in reached]
    assert reached == set(CONFIGS.values())
    assert len(reached) > 10


@pytest.mark.parametrize("section", ["Features", "From Hugging Face", "From Megatron"])
def test_options_that_tables_name_exist(section: str) -> None:
    text = sections(read("docs/guide.md"), 2)[section]
    named = re.findall(r"`(\w+Config)\.(\w+)(?:=([^`]*))?`", text)
    assert len(named) > 30
    for kind, name, default in named:
        if name != "graph_problems" and name != "selection_sources":
            told = options_of(CONFIGS[kind])[name]
            assert default in ("", told), f"{kind}.{name}={default}, but it is {told}"


def test_every_key_of_hugging_face_is_in_the_guide() -> None:
    from dsattn.integrations import hf_fields

    known = hf_fields._SHARED | hf_fields._MLA | hf_fields._INDEXER | hf_fields._GQA
    told = {cells[0].strip("`") for cells in rows(sections(read("docs/guide.md"), 2)["From Hugging Face"])}
    assert not (known | set(hf_fields._ONE_VALUE)) - told
    assert "index_no_such_key" not in told


def test_dependencies_are_those_of_the_code() -> None:
    told = list(rows(sections(read("docs/guide.md"), 2)["Dependencies"]))
    names = {name for cells in told for name in re.findall(r"[\w-]+", cells[0])}
    extras = {name for packages in doctor.EXTRAS.values() for name in packages}
    assert not (extras | set(flash_mla.BUILDS) | set(deep_select.BUILDS)) - names
    assert not {record.distribution for record in vendors.FASTER} - names
    versions = {cells[1].partition(";")[0] for cells in told if cells[0] == frontend.DISTRIBUTION}
    asked = (frontend.GLOBAL_IDS, sparse_mla.SAFE_EMPTY_ROWS, select_topk.TIE_BREAK, select.FP32_WEIGHTS)
    assert {vendors.dotted(version) for version in asked} <= versions
    assert {vendors.dotted(one.version) for one in vendors.FASTER if one.backend == "cudnn"} <= versions
    # Read, not imported: that needs Triton.
    hopper = re.search(r"^TRITON = (.*)$", read("src/dsattn/backends/hopper/sparse_mla.py"), re.MULTILINE)
    (triton,) = (cells[1] for cells in told if cells[0] == "triton")
    assert f"Hopper kernels: {' or '.join(ast.literal_eval(hopper[1]))}" in triton


def test_features_have_all_that_a_reader_asks() -> None:
    features = list(rows(sections(read("docs/guide.md"), 2)["Features"]))
    assert len(features) > 20
    assert all(len(cells) == 5 and cells[0].startswith("[") for cells in features)


def test_troubleshooting_tells_cause_check_and_cure() -> None:
    symptoms = list(rows(sections(read("docs/guide.md"), 2)["Troubleshooting"]))
    assert len(symptoms) >= 15
    assert {len(cells) for cells in symptoms} == {4}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert not broken_links(name, read(name))


def test_a_broken_link_is_seen() -> None:
    text = "# A title, x\n[a](#a-title-x) [b](#b) [c](docs/guide.md#install) [d](docs/guide.md#no) [e](none.md)"
    assert broken_links("README.md", text) == ["#b", "docs/guide.md#no", "none.md"]


def test_the_site_has_every_page() -> None:
    nav = read("mkdocs.yml").partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", nav)) == sorted(name[5:] for name in PAGES if name.startswith("docs/"))


def test_no_cell_of_the_guide_is_empty() -> None:
    for cells in rows(read("docs/guide.md")):
        assert all(cells), cells


def test_guide_knows_commands_and_recipes() -> None:
    guide = read("docs/guide.md")
    told = [cells[0] for cells in rows(sections(guide, 2)["Command line"]) if cells[0].startswith("`dsattn ")]
    assert list(dict.fromkeys(line.split()[1].strip("`") for line in told)) == list(COMMANDS)
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
    assert not named - known - {"ValueError", "IndexError"}


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README.md" and "```python" in read(name)])
def test_examples_run(name: str, run_python: Callable[[str], None]) -> None:
    """Each block in a namespace of its own, all in one process."""
    examples = re.findall(r"^```python\n(.*?)^```", read(name), re.DOTALL | re.MULTILINE)
    run_python(
        f"for number, code in enumerate({examples!r}):\n    exec(compile(code, f'example {{number}}', 'exec'), {{}})"
    )


def commands(text: str) -> list[list[str]]:
    """Arguments of every `dsattn train` and `dsattn doctor` of a shell example, from the recipe on."""
    examples = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(examples).replace("\\\n", " ").splitlines()
    found = [re.search(r"dsattn(?:\.cli)? (?:train|doctor) (\w+ +--[^#|]*)", line) for line in lines]
    return [one[1].split() for one in found if one]


@pytest.mark.parametrize("name", [name for name in PAGES if commands(read(name))])
def test_commands_are_read(name: str) -> None:
    for arguments in commands(read(name)):
        if "--init" not in arguments:  # that would read the model, too
            train.read_config(arguments)


def test_a_wrong_command_is_seen() -> None:
    (arguments,) = commands("```sh\ndsattn train tiny \\\n  --model.num-layers 3  # a note\n```\n")
    assert arguments == ["tiny", "--model.num-layers", "3"]
    with pytest.raises(SystemExit):
        train.read_config(["tiny", "--model.no-such-field", "3"])


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_are_short_and_complete(name: str) -> None:
    text = read(name)
    assert len(text.splitlines()) <= 40
    parts = ["**Context.**", "**Decision.**", "**Consequence.**"]
    assert re.findall(r"^\*\*\w+\.\*\*", text, re.MULTILINE) == parts
    assert text.startswith(f"# {Path(name).name[:3]} ")


def test_decisions_are_numbered() -> None:
    assert [Path(name).name[:3] for name in DECISIONS] == [f"{number:03d}" for number in range(1, len(DECISIONS) + 1)]
