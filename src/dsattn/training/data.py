"""Text as packs: documents laid end to end, each ended by eos, T tokens at a time.

    files -> documents -> tokens ... eos | tokens ... eos | tok    a pack is full: the document is cut there
                                                             ens ... eos | ...    its rest opens the next pack

No label and no attention crosses from one document, or from one part of a cut document, to the next.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from dsattn.config import DataConfig
from dsattn.errors import DataError, InputError
from dsattn.training.packs import IGNORED_LABEL, Pack, RawPack, finish, fold
from dsattn.training.text import BadDocument, Split, TextFile, find_files, read_documents, split_files
from dsattn.training.tokenizers import Tokenizer

__all__ = ["IGNORED_LABEL", "Pack", "PackStream", "fold", "held_out_packs"]

_HELD_OUT_SPREAD = 8
_ORDERING = ("text_field", "held_out", "min_document_tokens", "seed", "interleave", "long_documents")


class _Place(NamedTuple):
    """A point in the stream: pass over the files, place of the file in that pass, record, token of its document.

    learnable: whether that pass has brought something to learn from before here.
    """

    epoch: int = 0
    file: int = 0
    record: int = 0
    token: int = 0
    learnable: bool = False


class _Run(NamedTuple):
    """Consecutive tokens of one document: where the first stands, int32 [n] ids, and whether the document ends here."""

    place: _Place
    tokens: np.ndarray
    ends: bool


class PackStream(Iterator[Pack]):
    """The packs of one split, in one global order that depends on nothing but configuration, tokenizer and files.

    `train` never ends: each epoch reads every file, in an order drawn from (seed, epoch); records keep the order of
    their file. `interleave` files are read side by side and packs are taken from them in turn, lest one long file fill
    many steps. Every row is real. `held_out` reads once, one file after the other, whatever the seed, and pads its last
    pack.

    A document that cannot be read, or by `long_documents` must not be, raises BadDocument; `pass_over` goes on without
    it. An empty text is a document of one eos. A document with fewer than `min_document_tokens` tokens (its eos counts)
    is passed over. A document that does not fit is cut, and its rest is a new document of the lane's next pack:
    positions restart there, and the token before the cut has no label.

    Raises DataError where a file cannot be read, or where a whole pass brings nothing to learn from; the stream is
    broken then.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, split: Split = "train"):
        found = find_files(config.source)
        self.config = config
        self.tokenizer = tokenizer
        self.split = split
        self.passed_over = found.passed_over  # names of files that are not text
        self.files = split_files(found.files, config.held_out, split)
        if not self.files:
            raise DataError(f"data.held_out={config.held_out} leaves the {split} split without text; raise it")
        lanes = min(config.interleave, len(self.files)) if split == "train" else 1
        self._lanes = [_Lane(self, number, lanes) for number in range(lanes)]
        self._turn = 0
        self.without: set[tuple[str, int]] = set()
        self._made_from = self._describe()

    def __next__(self) -> Pack:
        return finish(self.next_raw(), self.config.pack_tokens, self.tokenizer.pad)

    def next_raw(self) -> RawPack:
        """The next pack of the lane whose turn it is; lanes that have run out are passed over."""
        for _ in self._lanes:
            lane = self._lanes[self._turn]
            self._turn = (self._turn + 1) % len(self._lanes)
            if (raw := next(lane.packs, None)) is not None:
                return raw
        if any(lane.learnable for lane in self._lanes):
            raise StopIteration
        raise DataError(
            f"the {self.split} split of data.source={self.config.source!r} has no document of two tokens or "
            f"more (data.min_document_tokens={self.config.min_document_tokens}); add text"
        )

    def pass_over(self, bad: Sequence[tuple[str, int]], since: Mapping[str, Any]) -> None:
        """Go on at `since`, a `state_dict`, without the documents `bad`: (name of the file, record) each, for good."""
        self.without.update(bad)
        self.load_state_dict({**since, "without": sorted(self.without)})

    @property
    def epoch(self) -> int:
        """The pass over the files, from 0, that the slowest lane is in."""
        return min(lane.place.epoch for lane in self._lanes)

    def state_dict(self) -> dict[str, Any]:
        """The point behind the last pack given out, and what the order of tokens hangs on; files by name and size."""
        places = [lane.place._asdict() for lane in self._lanes]
        without = sorted(self.without)
        return {"places": places, "turn": self._turn, "made_from": dict(self._made_from), "without": without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last pack given out when `state` was taken, with the same tokens to the last bit.

        The documents that were cut there are read again from their start; JSONL lines before them are passed over
        unparsed. Raises DataError naming what differs where the text or its reading has changed since; `pack_tokens`
        may change.
        """
        now, then = self._made_from, state["made_from"]
        names = [name for name in now if then.get(name, now[name]) != now[name]]
        changed = [f"{name}: {then[name]!r} then, {now[name]!r} now" for name in names]
        if changed:
            raise DataError(f"cannot resume: the training text has changed ({'; '.join(changed)}); start a new run")
        found = {(name, record) for name, record in state.get("without", ())}
        self.without.intersection_update(found)
        self.without.update(found)
        for lane, place in zip(self._lanes, state["places"], strict=True):
            lane.seek(_Place(**{"learnable": True, **place}))  # older states do not say; another pass will tell
        self._turn = state["turn"]

    def _describe(self) -> dict[str, Any]:
        listing = json.dumps([[file.name, file.size] for file in self.files])
        return {
            "split": self.split,
            "tokenizer": self.tokenizer.name,
            "files": f"{len(self.files)} files, {hashlib.sha256(listing.encode()).hexdigest()[:16]}",
            **{name: getattr(self.config, name) for name in _ORDERING},
        }


def _shuffled(files: Sequence[TextFile], draw: str) -> list[TextFile]:
    """Sorted by a hash: the same shuffle on every machine and under every version of every library."""
    return sorted(files, key=lambda file: hashlib.sha256(draw.encode() + os.fsencode(file.name)).digest())


class _Lane:
    """Packs of every `lanes`-th file from the `number`-th on, each epoch in another order.

    Ends where a whole pass brings nothing to learn from, and behind the only pass of `held_out`.
    """

    def __init__(self, stream: PackStream, number: int, lanes: int):
        self.stream = stream
        self.draw = f"{stream.config.seed} " if stream.split == "train" else "held out "
        self.files = _shuffled(stream.files, self.draw)[number::lanes]
        self.learnable = False
        self.seek(_Place())

    def seek(self, place: _Place) -> None:
        """Go on from `place`: the end of the last pack given out."""
        self.place = place
        self.packs = self._cut(self._runs(place))

    def _cut(self, runs: Iterator[_Run]) -> Iterator[RawPack]:
        """Cut runs of tokens into packs, moving `place` to the end of each before it is given out."""
        pack_tokens = self.stream.config.pack_tokens
        room = pack_tokens
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        length = 0
        for place, tokens, ends in runs:
            used = 0
            while used < len(tokens):
                part = tokens[used : used + room]
                used, room, length = used + len(part), room - len(part), length + len(part)
                parts.append(part)
                finished = ends and used == len(tokens)
                if finished or not room:
                    lengths.append(length)
                    length = 0
                if not room:
                    following = place._replace(record=place.record + 1, token=0)
                    here = following if finished else place._replace(token=place.token + used)
                    self.place = here._replace(learnable=self.learnable)
                    yield RawPack(np.concatenate(parts), lengths)
                    parts, lengths, room = [], [], pack_tokens
        if parts and self.learnable and self.stream.split == "held_out":
            yield RawPack(np.concatenate(parts), lengths)

    def _runs(self, start: _Place) -> Iterator[_Run]:
        """Every token from `start` on; behind the document, file and epoch that it names, everything from its start."""
        config = self.stream.config
        for epoch in count(start.epoch) if self.stream.split == "train" else [0]:
            self.learnable = start.learnable
            files = _shuffled(self.files, f"{self.draw}{epoch} ")
            for at in range(start.file, len(files)):
                name = files[at].name
                without = frozenset(record for file, record in self.stream.without if file == name)
                for record, pieces in read_documents(files[at], config.text_field, start.record, without):
                    token = 0
                    for tokens, ends in self._encoded(pieces, (name, record)):
                        self.learnable |= not ends
                        first = max(start.token - token, 0)
                        if first < len(tokens):
                            yield _Run(_Place(epoch, at, record, token + first), tokens[first:], ends)
                        token += len(tokens)
                    start = _Place(epoch)
                start = _Place(epoch)
            if not self.learnable:
                return
            start = _Place(epoch + 1)

    def _encoded(self, pieces: Iterator[str], place: tuple[str, int]) -> Iterator[tuple[np.ndarray, bool]]:
        """Token arrays of one document, none empty; the last holds eos alone and comes with True."""
        tokenizer, config = self.stream.tokenizer, self.stream.config
        least, most = config.min_document_tokens, config.pack_tokens if config.long_documents == "refuse" else None
        waiting: list[np.ndarray] = []
        seen = 0
        for piece in pieces:
            tokens = tokenizer.encode(piece)
            seen += len(tokens)
            waiting.append(tokens)
            if most is not None and seen + 1 > most:
                said = f"{place[0]}, document {place[1]}: more than data.pack_tokens={most} tokens"
                raise BadDocument(f"{said}; data.long_documents='cut' would cut it", *place)
            if most is None and seen + 1 >= least:
                yield from ((tokens, False) for tokens in waiting if len(tokens))
                waiting = []
        if seen + 1 >= least:
            yield from ((tokens, False) for tokens in waiting if len(tokens))
            yield np.array([tokenizer.eos], np.int32), True


def held_out_packs(
    config: DataConfig, tokenizer: Tokenizer, n: int, without: set[tuple[str, int]] | None = None
) -> list[Pack]:
    """The same `n` held-out packs every time, or all where there are fewer; the last of all may end in padding.

    They are spread evenly over the first 8 n packs, so that a few packs are not all from one long document.
    without: documents to pass over, (name of the file, record) each; gets the bad ones where these are skipped.
    Raises DataError where nothing is held out, InputError for n < 1.
    """
    if n < 1:
        raise InputError(f"n={n} must be at least 1")
    stream = PackStream(config, tokenizer, "held_out")
    stream.without = set() if without is None else without
    raw: list[RawPack] = []
    with contextlib.suppress(StopIteration):
        while len(raw) < _HELD_OUT_SPREAD * n:
            before = stream.state_dict()
            try:
                raw.append(stream.next_raw())
            except BadDocument as bad:
                if config.bad_documents == "stop":
                    raise
                stream.pass_over([(bad.name, bad.record)], before)
    chosen = raw if len(raw) <= n else [raw[i * len(raw) // n] for i in range(n)]
    return [finish(one, config.pack_tokens, tokenizer.pad) for one in chosen]
