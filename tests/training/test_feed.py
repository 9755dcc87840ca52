"""One process; many are in tests/parallel/test_failures.py."""

import json
from pathlib import Path

import pytest

from dsattn.config import DataConfig
from dsattn.errors import DataError
from dsattn.training import consensus
from dsattn.training.data import PackStream, held_out_packs
from dsattn.training.feed import Feed, held_out
from dsattn.training.text import BadDocument
from dsattn.training.tokenizers import load_tokenizer


def stream(folder: Path, lines: list[str], **settings) -> PackStream:
    (folder / "text.jsonl").write_text("\n".join(lines))
    given = {"source": str(folder / "text.jsonl"), "pack_tokens": 16, "held_out": 0.0, **settings}
    return PackStream(DataConfig(**given), load_tokenizer("bytes"))


GOOD = [json.dumps({"text": f"document {number}"}) for number in range(6)]
BAD = [*GOOD[:2], "{", GOOD[2], json.dumps({"text": 5}), *GOOD[3:]]


def tokens(feed: Feed, count: int) -> list[int]:
    packs = feed.take(count)
    assert packs is not None
    return [token for pack in packs for token in pack.tokens.tolist()]


def test_bad_documents_are_passed_over_and_told(tmp_path: Path) -> None:
    """The packs are those of the text without them, also behind a resume."""
    said: list[str] = []
    feed = Feed(stream(tmp_path, BAD), skips=True, say=said.append)
    found = tokens(feed, 3) + tokens(feed, 3)
    assert [one.partition(": ")[2].rpartition("/")[2].partition(":")[0] for one in said[:2]] == [
        "text.jsonl, line 3",
        "text.jsonl, line 5",
    ]
    assert len(said) == 2  # once, not in every epoch
    resumed = stream(tmp_path, BAD)
    resumed.load_state_dict(feed.stream.state_dict())
    rest = tokens(Feed(resumed, skips=True, say=said.append), 2)
    assert rest == tokens(feed, 2)
    assert len(said) == 2
    clean = Feed(stream(tmp_path, GOOD), skips=False, say=said.append)
    assert found == tokens(clean, 6)


def test_bad_documents_end_the_run_unless_skipped(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match=r"line 3: not valid JSON"):
        Feed(stream(tmp_path, BAD), skips=False, say=print).take(3)


def test_a_file_that_cannot_be_read_is_no_document(tmp_path: Path) -> None:
    broken = stream(tmp_path, GOOD)
    (tmp_path / "text.jsonl").unlink()
    with pytest.raises(DataError, match="cannot read"):
        Feed(broken, skips=True, say=print).take(1)


def test_a_stop_reads_nothing(tmp_path: Path) -> None:
    feed = Feed(stream(tmp_path, GOOD), skips=False, say=print)
    assert feed.take(2, stop=True) is None
    assert tokens(feed, 1) == tokens(Feed(stream(tmp_path, GOOD), skips=False, say=print), 1)


@pytest.mark.parametrize("change", [0, 1, -1])
def test_ranks_that_read_different_text_are_found_by_one_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    """Another rank's checksum is larger, or smaller, by `change`."""
    asked: list[int] = []

    def with_another(values: list[int]) -> list[int]:
        asked.append(len(values))
        another = [*values]
        another[4] += change  # the checksum, and the same negated
        another[7] -= change
        return [max(pair) for pair in zip(values, another, strict=True)]

    monkeypatch.setattr(consensus, "most", with_another)
    feed = Feed(stream(tmp_path, GOOD), skips=False, say=print)
    if change:
        with pytest.raises(DataError, match="ranks read different text"):
            feed.take(2)
    else:
        assert feed.take(2) is not None
    assert len(asked) == 1


@pytest.mark.parametrize("skips", [True, False])
def test_long_documents_are_refused_where_they_must_stay_whole(tmp_path: Path, skips: bool) -> None:
    lines = [*GOOD[:1], json.dumps({"text": "a" * 16}), json.dumps({"text": "b" * 15})]
    feed = Feed(stream(tmp_path, lines, long_documents="refuse"), skips=skips, say=lambda _: None)
    if not skips:
        with pytest.raises(BadDocument, match=r"document 1: more than data.pack_tokens=16 tokens"):
            feed.take(2)
        return
    assert ord("a") not in tokens(feed, 4)
    assert feed.stream.without == {("text.jsonl", 1)}


def test_held_out_text_passes_over_bad_documents_too(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("\n".join(BAD))
    config = DataConfig(source=str(tmp_path / "text.jsonl"), pack_tokens=16, held_out=0.99, bad_documents="skip")
    without: set[tuple[str, int]] = set()
    packs = held_out_packs(config, load_tokenizer("bytes"), 1, without)
    assert without <= {("text.jsonl", 2), ("text.jsonl", 4)}
    assert without
    (again,) = held_out(config, load_tokenizer("bytes"), 1)
    assert again.tokens.tolist() == packs[0].tokens.tolist()
