"""Sources, splits and documents: every rule of the docstrings, on hostile files."""

import json
import os
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dsattn.errors import DataError
from dsattn.training import text
from dsattn.training.text import TextFile, find_files, hash_fraction, read_documents, split_files


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def names(source: object) -> list[str]:
    return [file.name for file in find_files(str(source)).files]


def only(source: object) -> TextFile:
    (file,) = find_files(str(source)).files
    return file


def texts(file: TextFile, field: str = "text", skip: int = 0) -> list[tuple[int, str]]:
    return [(record, "".join(pieces)) for record, pieces in read_documents(file, field, skip)]


def fake_files(count: int, kind: text.Kind = "text") -> list[TextFile]:
    return [TextFile(Path(f"/nowhere/{i}"), f"{i}", kind, 10) for i in range(count)]


def test_folder_is_read_to_any_depth_in_name_order(tmp_path: Path):
    write(tmp_path, {"b.txt": b"x", "a/z.md": b"x", "a/deep/er/y": b"", "c.JSONL": b"", "d.parquet": b"\0"})
    found = find_files(str(tmp_path))
    assert [(file.name, file.kind, file.size) for file in found.files] == [
        ("a/deep/er/y", "text", 0),
        ("a/z.md", "text", 1),
        ("b.txt", "text", 1),
        ("c.JSONL", "jsonl", 0),
        ("d.parquet", "parquet", 1),
    ]
    assert found.passed_over == ()


def test_folder_passes_over_binary_hidden_and_broken(tmp_path: Path):
    write(tmp_path, {"a.txt": b"x", "image.txt": b"PNG\0", ".git/config": b"x", ".hidden": b"x"})
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    found = find_files(str(tmp_path))
    assert [file.name for file in found.files] == ["a.txt"]
    assert found.passed_over == ("broken", "image.txt", "pipe")


def test_linked_folders_are_read_once_and_loops_end(tmp_path: Path):
    write(tmp_path, {"root/a.txt": b"x", "elsewhere/b.txt": b"x"})
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root")
    assert names(tmp_path / "root") == ["a.txt", "link/b.txt"]


def test_glob_names_are_relative_to_its_fixed_part(tmp_path: Path):
    write(tmp_path, {"a/x.txt": b"x", "a/b/y.txt": b"x", "a/b/z.md": b"x"})
    (tmp_path / "a" / "folder.txt").mkdir()
    assert names(f"{tmp_path}/a/**/*.txt") == ["b/y.txt", "x.txt"]
    assert names(f"{tmp_path}/*/*.txt") == ["a/x.txt"]


def test_glob_signs_in_an_existing_name_are_taken_literally(tmp_path: Path):
    write(tmp_path, {"[1].txt": b"x", "1.txt": b"y"})
    assert names(tmp_path / "[1].txt") == ["[1].txt"]


@pytest.mark.parametrize("source", ["nothing", "nothing/*.txt", "", "binary", "binary/*"])
def test_source_without_text_is_an_error_that_names_it(tmp_path: Path, source: str):
    write(tmp_path, {"binary/a.bin": b"\0"})
    (tmp_path / "empty").mkdir()
    where = f"{tmp_path}/{source}" if source else f"{tmp_path}/empty"
    with pytest.raises(DataError, match=r"data\.source='") as raised:
        find_files(where)
    assert where in str(raised.value)
    assert ("a.bin" in str(raised.value)) == source.startswith("binary")


def test_unreadable_source_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, {"a.txt": b"x"})

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "a.txt"))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*Permission denied.*a\.txt"):
        find_files(str(tmp_path))


def test_stdlib_is_the_running_python_without_tests_and_packages():
    found = {file.name: file for file in find_files("stdlib").files}
    assert {"argparse.py", "asyncio/tasks.py", "doctest.py"} <= found.keys()
    assert found["argparse.py"].path == Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    assert all(name.endswith(".py") for name in found)
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert sum(file.size for file in found.values()) > 5e6


def test_hash_fraction_is_the_same_everywhere():
    assert hash_fraction(b"argparse.py") == int("c93fa5724c1b9b", 16) // 8 / 2**53  # printf argparse.py | sha256sum
    drawn = [hash_fraction(str(i).encode()) for i in range(2000)]
    assert all(0 <= fraction < 1 for fraction in drawn)
    assert abs(sum(fraction < 0.05 for fraction in drawn) / 2000 - 0.05) < 0.02


def test_files_split_by_name_alone(tmp_path: Path):
    files = fake_files(400)
    train, held = split_files(files, 0.1, "train"), split_files(files, 0.1, "held_out")
    assert sorted([*train, *held], key=files.index) == files
    assert {file.name for file in held} == {file.name for file in files if hash_fraction(file.name.encode()) < 0.1}
    fewer = split_files(files[:300], 0.1, "held_out")
    assert fewer == [file for file in held if file in files[:300]], "other files must not change a file's side"
    moved = [TextFile(tmp_path / file.name, file.name, "text", 99) for file in files]
    assert [file.name for file in split_files(moved, 0.1, "held_out")] == [file.name for file in held]


@pytest.mark.parametrize(("count", "share"), [(2, 0.01), (3, 0.999), (2, 0.5)])
def test_neither_split_of_few_files_is_empty(count: int, share: float):
    files = fake_files(count)
    train, held = split_files(files, share, "train"), split_files(files, share, "held_out")
    assert train
    assert held
    assert len(train) + len(held) == count


def test_nothing_is_held_out_at_zero():
    files = fake_files(3)
    assert split_files(files, 0.0, "train") == files
    assert split_files(files, 0.0, "held_out") == []


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_one_text_file_ends_with_the_held_out_text(tmp_path: Path, share: float):
    content = "".join(f"ä€𝄞{i}" for i in range(200))
    file = only(write(tmp_path, {"a.txt": content.encode()}))
    (train,), (held,) = split_files([file], share, "train"), split_files([file], share, "held_out")
    (_, first), (_, last) = *texts(train), *texts(held)
    assert first + last == content
    assert abs(len(last.encode()) / file.size - share) < 0.01


def test_a_text_file_cut_at_any_byte_loses_nothing(tmp_path: Path):
    content = "a€𝄞ä\n"
    file = only(write(tmp_path, {"a.txt": content.encode()}))
    for cut in range(file.size + 1):
        parts = [
            TextFile(file.path, "a.txt", "text", file.size, start, stop) for start, stop in ((0, cut), (cut, None))
        ]
        assert "".join(whole for part in parts for _, whole in texts(part)) == content


def test_few_record_files_split_by_each_records_text(tmp_path: Path):
    every = [f"record {i}" for i in range(300)] * 2
    files = find_files(str(write(tmp_path, {"a.jsonl": lines(*({"text": t} for t in every)), "b.jsonl": b""}))).files
    sides = {}
    for split in ("train", "held_out"):
        sides[split] = [one for file in split_files(files, 0.2, split) for one in texts(file)]
    held = [(i, t) for i, t in enumerate(every) if hash_fraction(t.encode()) < 0.2]
    assert sides["held_out"] == held
    assert len(held) > 50
    assert sorted(sides["train"] + sides["held_out"]) == list(enumerate(every))


def test_many_record_files_split_by_name():
    files = fake_files(20, "jsonl")
    train, held = split_files(files, 0.1, "train"), split_files(files, 0.1, "held_out")
    assert {file.name for file in train}.isdisjoint(file.name for file in held)
    assert all(file.records == (0.0, 1.0) for file in [*train, *held])
    assert all(file.records != (0.0, 1.0) for file in split_files(files[:9], 0.1, "train"))


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 2**20])
@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\n", "naïve €\n\n𝄞 line\r\nlast".encode(), b"\xff\xfe broken \xe2\x82\nend\xe2\x82", b"long" * 100],
    ids=["empty", "one byte", "newline", "multibyte", "not utf-8", "no newline"],
)
def test_pieces_join_to_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, piece: int):
    monkeypatch.setattr(text, "_PIECE_BYTES", piece)
    file = only(write(tmp_path, {"a.txt": content}))
    assert texts(file) == [(0, content.decode("utf-8", "replace"))]
    assert texts(file, skip=1) == []
    for _, pieces in read_documents(file):
        assert all(len(one) <= max(2 * piece, 30) for one in pieces)


def test_text_that_grows_or_vanishes_after_it_was_found(tmp_path: Path):
    file = only(write(tmp_path, {"a.txt": b"first"}))
    file.path.write_bytes(b"first and more")
    assert texts(file) == [(0, "first")]
    file.path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt"):
        texts(file)


def test_json_lines_are_records(tmp_path: Path):
    content = b'\xef\xbb\xbf{"body": "one"}\r\n\n  \n{"id": 3, "body": ""}\n{"body": "\\ud83d\\ude00 \\n"}'
    file = only(write(tmp_path, {"a.jsonl": content}))
    assert texts(file, "body") == [(0, "one"), (3, ""), (4, "😀 \n")]
    assert texts(file, "body", skip=1) == [(3, ""), (4, "😀 \n")]
    assert texts(file, "body", skip=5) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{bad", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "must be an object with the field 'text', got list"),
        (b'{"body": "x", "n": 1}', "no field 'text' among 'body', 'n'; set data.text_field"),
        (b"{}", "no field 'text' among none"),
        (b'{"text": null}', "'text' must be a string, got null"),
        (b'{"text": ["x"]}', "'text' must be a string, got list"),
    ],
)
def test_bad_json_line_names_file_and_line(tmp_path: Path, line: bytes, message: str):
    file = only(write(tmp_path, {"a.jsonl": b'{"text": "fine"}\n\n' + line + b"\n"}))
    documents = read_documents(file)
    assert "".join(next(documents)[1]) == "fine"
    with pytest.raises(DataError, match=r"a\.jsonl, line 3") as raised:
        next(documents)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_rows_are_records(tmp_path: Path, kind: pa.DataType):
    every = [f"row {i % 700} é" if i else "" for i in range(1000)]
    table = pa.table({"id": range(1000), "body": pa.array(every).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    file = only(tmp_path)
    for skip in (0, 1, 299, 300, 301, 899, 999, 1000, 5000):
        assert texts(file, "body", skip) == list(enumerate(every))[skip:]


def test_bad_parquet_names_the_file(tmp_path: Path):
    pq.write_table(pa.table({"body": ["fine", None], "n": [1, 2]}), tmp_path / "a.parquet")
    file = only(tmp_path)
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text' among body, n; set data\.text_field"):
        texts(file)
    with pytest.raises(DataError, match=r"a\.parquet, row 1: 'body' must be a string, got null"):
        texts(file, "body")
    with pytest.raises(DataError, match=r"a\.parquet, row 0: 'n' must be a string, got int"):
        texts(file, "n")
    file.path.write_bytes(file.path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet as Parquet"):
        texts(file, "body")
    file.path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet"):
        texts(file, "body")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pyarrow: pip install 'dsattn\[data\]'"):
        texts(only(tmp_path))
