"""Where the text comes from: files found by a source, split into train and held out, read document by document.

A text file is one document. A JSONL line or a Parquet row is one document; such a unit is called a record.
"""

import codecs
import contextlib
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from dsattn.errors import DataError

Split = Literal["train", "held_out"]
Kind = Literal["text", "jsonl", "parquet"]

_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_SNIFFED_BYTES = 8192
_PIECE_BYTES = 2**20
# Not every system ships the tests of the standard library, and what is installed beside it differs everywhere.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class TextFile:
    """One file of the source, or the part of it that belongs to a split.

    name: path relative to the source's root with forward slashes: the same on every machine. size: bytes.
    start, stop: the bytes of a text file that are read; a character that the edge cuts belongs to the part before it.
    records: (low, high): of a JSONL or Parquet file, the records whose `hash_fraction` lies in [low, high) are read.
    """

    path: Path
    name: str
    kind: Kind
    size: int
    start: int = 0
    stop: int | None = None
    records: tuple[float, float] = (0.0, 1.0)


class BadDocument(DataError):
    """One document cannot be learned from; the others of the source can. record: as `read_documents` numbers them."""

    def __init__(self, message: str, name: str = "", record: int = 0):
        super().__init__(message)
        self.name, self.record = name, record


@dataclass(frozen=True)
class FoundFiles:
    """Files of a source, by name; `passed_over` names what was met beside them: binary files, sockets, broken links."""

    files: tuple[TextFile, ...]
    passed_over: tuple[str, ...]


def find_files(source: str) -> FoundFiles:
    """Resolve `DataConfig.source`.

    `stdlib`: *.py of the running Python's standard library, without its tests and without installed packages.
    A folder: every file below it but names that start with a dot; links are followed, each folder is read once.
    A glob (`**` for any depth) or a file: what it names.
    .jsonl and .ndjson are read as JSON lines, .parquet as Parquet, anything else as text unless a NUL byte among its
    first 8192 bytes shows that it is binary.

    Raises DataError where there is nothing to read, or something cannot be read.
    """
    with _reading(source):
        root, paths = _resolve(source)
        named = sorted((Path(os.path.relpath(path, root)).as_posix(), path) for path in paths)
        files, passed_over = [], []
        for name, path in named:
            kind = _kind(path)
            if kind is None:
                passed_over.append(name)
            else:
                files.append(TextFile(path, name, kind, path.stat().st_size))
    if not files:
        met = f"; passed over as not text: {len(passed_over)}, such as {passed_over[0]!r}" if passed_over else ""
        raise DataError(f"data.source={source!r} holds no text{met}; name a folder, glob or file with text")
    return FoundFiles(tuple(files), tuple(passed_over))


def _resolve(source: str) -> tuple[Path, Iterable[Path]]:
    """The root that names are relative to, and the paths of all candidates."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return root, (path for path in _walk(root, _NOT_STDLIB) if path.suffix == ".py")
    path = Path(source).expanduser()
    if path.is_dir():
        return path, _walk(path)
    if path.exists():
        return path.parent, [path]
    fixed = list(takewhile(lambda part: not any(sign in part for sign in "*?["), path.parts))
    if len(fixed) == len(path.parts):
        raise DataError(f"data.source={source!r} does not exist; name a folder, a glob, a file, or 'stdlib'")
    return Path(*fixed), [Path(match) for match in glob.glob(str(path), recursive=True) if not Path(match).is_dir()]


def _walk(root: Path, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `root`; a folder that links reach again is not read again."""

    def fail(error: OSError) -> None:
        raise error

    met = set()
    for folder, below, names in os.walk(root, followlinks=True, onerror=fail):
        below[:] = sorted(name for name in below if name not in without and not name.startswith("."))
        if (real := os.path.realpath(folder)) in met:
            below.clear()
            continue
        met.add(real)
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _kind(path: Path) -> Kind | None:
    """How to read the file; None where it is not text."""
    if not path.is_file():
        return None
    if kind := _KINDS.get(path.suffix.lower()):
        return kind
    with path.open("rb") as stream:
        return None if b"\0" in stream.read(_SNIFFED_BYTES) else "text"


def hash_fraction(key: bytes) -> float:
    """A number in [0, 1) that depends on `key` alone: the first 53 bits of its SHA-256."""
    return (int.from_bytes(hashlib.sha256(key).digest()[:7]) >> 3) / 2**53


def split_files(files: Sequence[TextFile], held_out: float, split: Split) -> list[TextFile]:
    """The part of `files` that belongs to `split`; `held_out` is the share kept for evaluation, 0 keeps nothing.

    A file is held out as a whole where the `hash_fraction` of its name is below `held_out`; where that would leave a
    split empty, it gets the file that comes next. Two cases are split inside the files, because whole files are too
    few: JSONL and Parquet files of which less than one would be held out (`len(files) * held_out < 1`) are split by
    the hash of each record's text, so that duplicates stay on one side; a text file that is the whole source ends
    with the held-out text.
    """
    if not held_out:
        return list(files) if split == "train" else []
    if len(files) == 1 and files[0].kind == "text":
        cut = round(files[0].size * (1 - held_out))
        return [replace(files[0], stop=cut) if split == "train" else replace(files[0], start=cut)]
    whole = [file for file in files if file.kind == "text" or len(files) * held_out >= 1]
    ranked = sorted((hash_fraction(os.fsencode(file.name)), file.name) for file in whole)
    kept = sum(fraction < held_out for fraction, _ in ranked)
    if len(whole) == len(files) > 1:
        kept = min(max(kept, 1), len(files) - 1)
    names = {name for _, name in ranked[:kept]}
    every = {name for _, name in ranked}
    records = (held_out, 1.0) if split == "train" else (0.0, held_out)
    return [
        file if file.name in every else replace(file, records=records)
        for file in files
        if file.name not in every or (file.name in names) == (split == "held_out")
    ]


def read_documents(
    file: TextFile, text_field: str = "text", skip: int = 0, without: frozenset[int] = frozenset()
) -> Iterator[tuple[int, Iterator[str]]]:
    """Yield (record, pieces) for each document of the file, from record `skip` on; those of `without` are passed over.

    record: 0 for a text file, else the line or row counted from 0, blank lines included. pieces: strings that make up
    the document in order, always cut the same way; a text file is read as they are taken, about 1 MiB each. Bytes that
    are not UTF-8 become U+FFFD; JSON may bring lone surrogates, which stay.

    Raises BadDocument naming the file, and the line or row, for one that cannot be read as text, and DataError where
    the whole file cannot be read.
    """
    if file.kind == "text":
        if skip == 0 and 0 not in without:
            yield 0, _text_pieces(file)
        return
    low, high = file.records
    read = _json_lines if file.kind == "jsonl" else _parquet_rows
    for record, text in read(file, text_field, skip, without):
        if (low, high) == (0.0, 1.0) or low <= hash_fraction(text.encode("utf-8", "surrogatepass")) < high:
            yield record, iter((text,))


def _text_pieces(file: TextFile) -> Iterator[str]:
    """Pieces end with a line where lines are shorter than a piece."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    with _reading(file.path, file.name), file.path.open("rb") as stream:
        stop = file.size if file.stop is None else _character_edge(stream, file.stop)
        left = stop - stream.seek(_character_edge(stream, file.start))
        while left > 0 and (block := stream.read(min(_PIECE_BYTES, left))):
            left -= len(block)
            lines, newline, rest = (rest + decoder.decode(block)).rpartition("\n")
            if newline:
                yield lines + newline
            elif len(rest) >= _PIECE_BYTES // 4:  # characters have up to 4 bytes
                yield rest
                rest = ""
    yield rest + decoder.decode(b"", final=True)


def _character_edge(stream: Any, offset: int) -> int:
    """The first offset from `offset` on where a UTF-8 character starts."""
    if offset:
        stream.seek(offset)
        following = stream.read(3)
        offset += len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))
    return offset


def _json_lines(file: TextFile, text_field: str, skip: int, without: frozenset[int]) -> Iterator[tuple[int, str]]:
    with _reading(file.path), file.path.open("rb") as stream:
        for number, line in enumerate(stream):
            if number < skip or number in without or not line.strip():
                continue
            where, place = f"{file.path}, line {number + 1}", (file.name, number)
            if number == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                record = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError) as error:
                raise BadDocument(f"{where}: not valid JSON: {error}", *place) from error
            if not isinstance(record, dict):
                said = f"{where}: must be an object with the field {text_field!r}, got {_named(record)}"
                raise BadDocument(said, *place)
            if text_field not in record:
                fields = ", ".join(map(repr, record)) or "none"
                raise BadDocument(f"{where}: no field {text_field!r} among {fields}; set data.text_field", *place)
            yield number, _checked(record[text_field], where, text_field, place)


def _parquet_rows(file: TextFile, text_field: str, skip: int, without: frozenset[int]) -> Iterator[tuple[int, str]]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{file.path}: reading Parquet needs pyarrow: pip install 'dsattn[data]'") from error
    try:
        with ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise DataError(f"{file.path}: no column {text_field!r} among {', '.join(names)}; set data.text_field")
            row, group = 0, 0
            while group < table.num_row_groups and row + table.metadata.row_group(group).num_rows <= skip:
                row += table.metadata.row_group(group).num_rows
                group += 1
            groups = list(range(group, table.num_row_groups))
            for batch in table.iter_batches(batch_size=256, row_groups=groups, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    if row >= skip and row not in without:
                        yield row, _checked(value, f"{file.path}, row {row}", text_field, (file.name, row))
                    row += 1
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {file.path} as Parquet: {error}") from error


def _checked(value: object, where: str, text_field: str, place: tuple[str, int]) -> str:
    if not isinstance(value, str):
        said = f"{where}: {text_field!r} must be a string, got {_named(value)}; repair or drop the record"
        raise BadDocument(said, *place)
    return value


def _named(value: object) -> str:
    return "null" if value is None else type(value).__name__


@contextlib.contextmanager
def _reading(what: object, document: str | None = None) -> Iterator[None]:
    """document: the name of the file where it is one document."""
    try:
        yield
    except OSError as error:
        said = f"cannot read {what}: {error}"
        raise (DataError(said) if document is None else BadDocument(said, document)) from error
