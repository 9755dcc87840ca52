"""Packs, folding, the order of the stream, held-out packs, and resuming to the last bit."""

import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dsattn.config import DataConfig
from dsattn.errors import DataError, InputError
from dsattn.keys import Layout
from dsattn.training import text
from dsattn.training.data import IGNORED_LABEL, Pack, PackStream, fold, held_out_packs
from dsattn.training.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
EOS, PAD = TOKENIZER.eos, TOKENIZER.pad


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def config(source: object, pack_tokens: int = 16, held_out: float = 0.0, **rest: Any) -> DataConfig:
    rest = {"interleave": 1, **rest}
    return DataConfig(source=str(source), pack_tokens=pack_tokens, held_out=held_out, **rest)


def stream(source: object, pack_tokens: int = 16, held_out: float = 0.0, **rest: Any) -> PackStream:
    return PackStream(config(source, pack_tokens, held_out, **rest), TOKENIZER)


def take(packs: PackStream, n: int) -> list[Pack]:
    return list(islice(packs, n))


def all_tokens(packs: Sequence[Pack]) -> list[int]:
    return torch.cat([pack.tokens[pack.layout.real_rows] for pack in packs]).tolist()


def same(a: Pack, b: Pack) -> bool:
    return (
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.labels, b.labels)
        and a.layout.lengths == b.layout.lengths
        and torch.equal(a.layout.real_rows, b.layout.real_rows)
        and torch.equal(a.layout.keys.start, b.layout.keys.start)
        and torch.equal(a.layout.keys.stop, b.layout.keys.stop)
        and a.num_labels == b.num_labels
    )


def check_labels(pack: Pack) -> None:
    """A label is the next row's token exactly where that row's document starts at or before this row."""
    start, stop = pack.layout.keys.start.tolist(), pack.layout.keys.stop.tolist()
    tokens, labels, real = pack.tokens.tolist(), pack.labels.tolist(), pack.layout.real_rows.tolist()
    for row in range(len(tokens)):
        follows = row + 1 < len(tokens) and real[row] and real[row + 1] and start[row + 1] <= row
        assert labels[row] == (tokens[row + 1] if follows else IGNORED_LABEL)
        assert (tokens[row] == PAD) == (not real[row])
        assert stop[row] == (row + 1 if real[row] else start[row])
    assert pack.num_labels == sum(label != IGNORED_LABEL for label in labels)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Empty, one-byte, long, broken and record files together."""
    root = tmp_path / "mixed"
    write(
        root,
        {
            "empty.txt": b"",
            "one.txt": b"x",
            "long.txt": b"".join(b"%d\n" % i for i in range(30)),
            "broken.txt": b"\xff\xe2\x82",
        },
    )
    write(root, {"sub/naive.md": "é€𝄞\n".encode() * 3, "records.jsonl": b'{"text": ""}\n\n{"text": "two"}\n'})
    pq.write_table(pa.table({"text": ["row", "", "z" * 40]}), root / "rows.parquet", row_group_size=2)
    return root


def test_pack_of_known_documents(tmp_path: Path):
    records = b'{"text": "ab"}\n{"text": ""}\n{"text": "c"}\n{"text": "defghij"}\n'
    packs = stream(write(tmp_path, {"a.jsonl": records}), 10)
    first, second = take(packs, 2)
    a, no = ord("a"), IGNORED_LABEL
    assert first.tokens.tolist() == [a, a + 1, EOS, EOS, a + 2, EOS, a + 3, a + 4, a + 5, a + 6]
    assert first.labels.tolist() == [a + 1, EOS, no, no, EOS, no, a + 4, a + 5, a + 6, no]
    assert first.tokens.dtype == first.labels.dtype == torch.int64
    assert first.layout.lengths == (3, 1, 2, 4)
    assert first.layout.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 2, 3]
    assert first.num_labels == 6
    assert first.layout.every_row_has_a_key
    assert second.tokens.tolist() == [a + 7, a + 8, a + 9, EOS, a, a + 1, EOS, EOS, a + 2, EOS]
    assert second.layout.lengths == (4, 3, 1, 2), "the rest of a cut document is a document of its own"
    assert packs.epoch == 1


@pytest.mark.parametrize("pack_tokens", [2, 3, 7, 64, 1000])
def test_every_token_of_every_document_once_an_epoch(mixed: Path, pack_tokens: int):
    documents = [
        path.read_bytes().decode("utf-8", "replace") for path in mixed.rglob("*") if path.suffix in (".txt", ".md")
    ]
    documents += ["", "two", "row", "", "z" * 40]
    want = sorted((*text.encode(), EOS) for text in documents)
    total = sum(map(len, want))
    packs = take(stream(mixed, pack_tokens), -(-total // pack_tokens))
    got = all_tokens(packs)[:total]
    assert got[-1] == EOS
    ends = np.flatnonzero(np.array(got) == EOS) + 1
    assert sorted(tuple(part.tolist()) for part in np.split(np.array(got), ends)[:-1]) == want
    for pack in packs:
        check_labels(pack)


def test_pieces_of_a_text_are_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "_PIECE_BYTES", 5)
    content = b"one\ntwo three\nfour, no newline"
    (pack,) = take(stream(write(tmp_path, {"a.txt": content}), len(content) + 1), 1)
    assert pack.tokens.tolist() == [*content, EOS]
    assert pack.layout.lengths == (len(content) + 1,)


def test_short_documents_are_passed_over_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "_PIECE_BYTES", 2)
    root = write(tmp_path, {"a.txt": b"", "b.txt": b"123", "c.txt": b"1234", "d.txt": b"12\n45"})
    packs = take(stream(root, 11, min_document_tokens=5), 1)
    assert sorted(packs[0].layout.lengths) == [5, 6]
    assert sorted(take(stream(root, 16), 1)[0].layout.lengths) == [1, 4, 5, 6]


@pytest.mark.parametrize(
    ("files", "rest"),
    [
        ({"a.txt": b""}, {}),
        ({"a.jsonl": b"\n\n"}, {}),
        ({"a.txt": b"short", "b.txt": b"brief"}, {"min_document_tokens": 7}),
    ],
)
def test_nothing_to_learn_ends_in_an_error(tmp_path: Path, files: dict[str, bytes], rest: dict[str, Any]):
    with pytest.raises(DataError, match=r"the train split .* has no document of two tokens or more"):
        take(stream(write(tmp_path, files), 16, **rest), 10)


def test_shuffle_depends_on_seed_and_epoch(tmp_path: Path):
    root = write(tmp_path, {f"{i:02}.txt": b"%c" % (65 + i) for i in range(20)})

    def epochs(seed: int) -> list[tuple[int, ...]]:
        return [tuple(pack.tokens.tolist()) for pack in take(stream(root, 40, seed=seed), 3)]

    assert epochs(0) == epochs(0)
    assert len({*epochs(0), *epochs(1)}) == 6, "seed 0, epoch 1 must not repeat seed 1, epoch 0"
    assert {tuple(sorted(epoch)) for epoch in epochs(0)} == {tuple(sorted([*range(65, 85), *[EOS] * 20]))}


@pytest.mark.parametrize("pack_tokens", [3, 16, 100])
@pytest.mark.parametrize("piece", [4, 2**20])
def test_resume_is_bit_for_bit(mixed: Path, monkeypatch: pytest.MonkeyPatch, pack_tokens: int, piece: int):
    monkeypatch.setattr(text, "_PIECE_BYTES", piece)
    packs = stream(mixed, pack_tokens)
    states, given = [packs.state_dict()], []
    for pack in islice(packs, 3 * 200 // pack_tokens):  # into the third epoch
        given.append(pack)
        states.append(json.loads(json.dumps(packs.state_dict())))
    assert packs.epoch >= 2
    for done, state in enumerate(states[:-1]):
        again = stream(mixed, pack_tokens)
        again.load_state_dict(state)
        assert again.state_dict() == state
        resumed = take(again, min(3, len(given) - done))
        assert all(same(a, b) for a, b in zip(resumed, given[done:], strict=False))
        assert again.state_dict() == states[done + len(resumed)]
    again = stream(mixed, pack_tokens)
    again.load_state_dict(states[1])
    assert not same(next(again), given[0]), "a state that is off by one pack must show"


def test_files_are_read_side_by_side(tmp_path: Path):
    root = write(tmp_path, {f"{i}.txt": bytes([65 + i]) * 99 for i in range(6)})
    packs = take(stream(root, 10, interleave=3), 60)
    letters = ["".join(sorted(set(TOKENIZER.decode(pack.tokens.tolist())))) for pack in packs]
    assert all(len({*letters[i : i + 3]}) == 3 for i in range(0, 30, 3)), letters
    assert letters[:30] == letters[:3] * 10, "each lane stays with its file"
    assert sorted(set(letters)) == list("ABCDEF"), "two files a lane fill an epoch"
    alone = ["".join(sorted(set(TOKENIZER.decode(pack.tokens.tolist())))) for pack in take(stream(root, 10), 10)]
    assert len(set(alone)) == 1, "one lane stays with one file"


def test_lanes_read_every_token_once_an_epoch(tmp_path: Path):
    root = write(tmp_path, {f"{i}.txt": bytes([65 + i]) * (30 * i + 20) for i in range(5)})
    for lanes in (1, 2, 5, 9):
        packs = stream(root, 2, interleave=lanes)
        counted: dict[int, int] = {}
        while packs.epoch == 0:
            for token in next(packs).tokens.tolist():
                counted[token] = counted.get(token, 0) + 1
        for i in range(5):
            assert counted[65 + i] >= 30 * i + 20
        assert lanes > 1 or 405 <= sum(counted.values()) <= 408, "one lane reads nothing twice"


@pytest.mark.parametrize("lanes", [2, 3, 50])
def test_resume_of_lanes_is_bit_for_bit(mixed: Path, lanes: int):
    packs = stream(mixed, 11, interleave=lanes)
    states, given = [], []
    for _ in range(50):
        states.append(json.loads(json.dumps(packs.state_dict())))
        given.append(next(packs))
    for done in (0, 1, 2, 7, 20, 48):
        again = stream(mixed, 11, interleave=lanes)
        again.load_state_dict(states[done])
        assert all(same(a, b) for a, b in zip(take(again, 50 - done), given[done:], strict=True))
    with pytest.raises(DataError, match=r"the training text has changed \(interleave"):
        stream(mixed, 11, interleave=lanes + 1).load_state_dict(states[3])


def test_a_lane_without_text_is_passed_over(tmp_path: Path):
    root = write(tmp_path, {"a.txt": b"text to learn from", "b.txt": b"", "c.txt": b""})
    packs = take(stream(root, 7, interleave=3), 20)
    assert all(pack.num_labels > 0 for pack in packs[3:])


def test_a_lane_that_is_resumed_ends_with_the_same_pass(tmp_path: Path):
    """Empty documents alone: one pass tells that there is nothing to learn, wherever it was interrupted."""
    root = write(tmp_path, {"a.jsonl": b'{"text": "ab"}\n', "b.jsonl": b'{"text": ""}\n' * 8})
    packs = stream(root, 2, interleave=2)
    states, given = [], []
    for _ in range(16):
        states.append(json.loads(json.dumps(packs.state_dict())))
        given.append(next(packs))
    assert sum(pack.num_labels == 0 for pack in given) >= 4
    for done, state in enumerate(states):
        again = stream(root, 2, interleave=2)
        again.load_state_dict(state)
        assert all(same(a, b) for a, b in zip(take(again, 16 - done), given[done:], strict=True)), done
        for place in state["places"]:
            del place["learnable"]
        again.load_state_dict(state)
        assert len(take(again, 20)) == 20, "a state that does not say so goes on, too"


def test_resume_inside_records_of_a_split_file(tmp_path: Path):
    records = b"".join(b'{"text": "record %d"}\n' % i for i in range(50))
    root = write(tmp_path, {"a.jsonl": records})
    packs = stream(root, 13, held_out=0.3)
    take(packs, 7)
    again = stream(root, 13, held_out=0.3)
    again.load_state_dict(packs.state_dict())
    assert all(same(a, b) for a, b in zip(take(packs, 60), take(again, 60), strict=True))


def test_resume_with_another_pack_length_goes_on_at_the_same_token(mixed: Path):
    packs = stream(mixed, 16)
    begun = all_tokens(take(packs, 3))
    longer = stream(mixed, 50)
    longer.load_state_dict(packs.state_dict())
    assert begun + all_tokens(take(longer, 1)) == all_tokens(take(stream(mixed, 98), 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"text_field": "body"}, "text_field: 'text' then, 'body' now"),
        ({"min_document_tokens": 2}, "min_document_tokens: 0 then, 2 now"),
        ({"held_out": 0.5}, "files: "),
        ({}, "files: '7 files"),
    ],
)
def test_resume_on_other_text_is_refused(mixed: Path, change: dict[str, Any], named: str):
    packs = stream(mixed, 16)
    next(packs)
    state = packs.state_dict()
    if not change:
        (mixed / "one.txt").write_bytes(b"xy")
    again = stream(mixed, 16, **change)
    with pytest.raises(DataError, match="cannot resume: the training text has changed") as raised:
        again.load_state_dict(state)
    assert named in str(raised.value)


def test_held_out_packs_are_always_the_same_and_never_trained_on(tmp_path: Path):
    root = write(tmp_path, {f"{i}.txt": f"<{i}>".encode() * 40 for i in range(60)})
    held = held_out_packs(config(root, 64, 0.2), TOKENIZER, 4)
    other_seed = held_out_packs(config(root, 64, 0.2, seed=9), TOKENIZER, 4)
    assert len(held) == 4
    assert all(same(a, b) for a, b in zip(held, other_seed, strict=True))
    names = {file.name for file in PackStream(config(root, 64, 0.2), TOKENIZER, "held_out").files}
    assert 3 < len(names) < 25
    trained = stream(root, 64, held_out=0.2)
    words = TOKENIZER.decode(t for pack in take(trained, 200) for t in pack.tokens.tolist())
    assert trained.epoch >= 1
    for name in names:
        assert f"<{name.removesuffix('.txt')}>" not in words
    seen = TOKENIZER.decode(t for pack in held for t in pack.tokens.tolist())
    assert sum(f"<{name.removesuffix('.txt')}>" in seen for name in names) > 2, "not all from one long document"


def test_held_out_split_is_finite_and_padded(tmp_path: Path):
    root = write(tmp_path, {"a.txt": b"t" * 90 + b"held-out!!"})
    packs = list(PackStream(config(root, 8, 0.1), TOKENIZER, "held_out"))
    assert all_tokens(packs) == [*b"held-out!!", EOS]
    assert [pack.layout.num_real_rows for pack in packs] == [8, 3]
    assert packs[1].tokens.tolist()[3:] == [PAD] * 5
    assert packs[1].num_labels == 2
    assert not packs[1].layout.every_row_has_a_key
    for pack in packs:
        check_labels(pack)
    assert all(same(a, b) for a, b in zip(packs, held_out_packs(config(root, 8, 0.1), TOKENIZER, 99), strict=True))


def test_nothing_held_out_is_an_error(tmp_path: Path):
    root = write(tmp_path, {"a.txt": b"text"})
    with pytest.raises(DataError, match=r"data\.held_out=0\.0 leaves the held_out split without text"):
        held_out_packs(config(root), TOKENIZER, 1)
    with pytest.raises(DataError, match=r"the held_out split .* has no document of two tokens or more"):
        held_out_packs(config(root, held_out=0.01), TOKENIZER, 1)
    with pytest.raises(InputError, match="n=0 must be at least 1"):
        held_out_packs(config(root), TOKENIZER, 0)


def test_error_in_a_file_reaches_the_caller(tmp_path: Path):
    packs = stream(write(tmp_path, {"a.jsonl": b'{"text": "fine, and long enough"}\n{"no": 1}\n'}), 16)
    next(packs)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2"):
        next(packs)


def test_files_passed_over_are_named(tmp_path: Path):
    assert stream(write(tmp_path, {"a.txt": b"x", "b.bin": b"\0"})).passed_over == ("b.bin",)


def test_fold_keeps_documents_apart(mixed: Path):
    packs = take(stream(mixed, 16), 4)
    folded = fold(packs)
    assert same(fold(packs[:1]), packs[0])
    assert folded.tokens.tolist() == [t for pack in packs for t in pack.tokens.tolist()]
    assert folded.labels.tolist() == [t for pack in packs for t in pack.labels.tolist()]
    assert folded.num_labels == sum(pack.num_labels for pack in packs)
    assert folded.layout.lengths == sum((pack.layout.lengths for pack in packs), ())
    assert folded.layout.positions.tolist() == [p for pack in packs for p in pack.layout.positions.tolist()]
    mask = torch.block_diag(*(pack.layout.keys.mask(16) for pack in packs)).bool()
    assert torch.equal(folded.layout.keys.mask(64), mask)
    check_labels(folded)


def test_fold_keeps_padding_where_it_was(tmp_path: Path):
    padded = list(
        PackStream(config(write(tmp_path, {"a.txt": b"t" * 90 + b"held-out!!"}), 8, 0.1), TOKENIZER, "held_out")
    )
    blank = Pack(
        tokens=torch.full((4,), PAD), labels=torch.full((4,), -100), layout=Layout.packed([], total=4), num_labels=0
    )
    packs = [padded[1], padded[0], blank, padded[1]]
    folded = fold(packs)
    assert torch.equal(folded.layout.real_rows, torch.cat([pack.layout.real_rows for pack in packs]))
    assert folded.layout.num_real_rows == 14
    mask = torch.block_diag(*(pack.layout.keys.mask(pack.tokens.shape[0]) for pack in packs)).bool()
    assert torch.equal(folded.layout.keys.mask(28), mask)
    check_labels(folded)


def test_fold_of_nothing():
    with pytest.raises(InputError, match="packs is empty"):
        fold([])


def test_pack_moves_whole(mixed: Path):
    pack = next(stream(mixed)).to("meta")
    assert pack.tokens.device.type == pack.labels.device.type == pack.layout.keys.start.device.type == "meta"


def test_bytes_stream_fast(tmp_path: Path):
    size = 4_000_000
    packs = stream(write(tmp_path, {"a.txt": b"a line of forty characters, as code has\n" * (size // 40)}), 4096)
    begin = time.perf_counter()
    read = sum(len(raw.tokens) for raw in (packs.next_raw() for _ in range(size // 4096)))
    rate = read / (time.perf_counter() - begin) / 1e6
    assert rate > 5, f"{rate:.1f} MB/s"
