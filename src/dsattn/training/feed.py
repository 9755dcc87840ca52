"""A step's packs, read by all ranks alike: what one of them cannot read, all skip, or all stop at."""

import zlib
from collections.abc import Callable

from dsattn.config import DataConfig
from dsattn.errors import DataError
from dsattn.training import consensus
from dsattn.training.data import PackStream, held_out_packs
from dsattn.training.packs import Pack
from dsattn.training.text import BadDocument
from dsattn.training.tokenizers import Tokenizer


class Feed:
    """Takes packs from a stream that every rank has.

    skips: a document that a rank cannot learn from is passed over on all ranks, and `say` is told; else the run ends.
    """

    def __init__(self, stream: PackStream, *, skips: bool, say: Callable[[str], None]):
        self.stream, self.skips, self.say = stream, skips, say

    def take(self, count: int, *, stop: bool = False) -> list[Pack] | None:
        """The next `count` packs, the same on every rank; None, and nothing read, where any rank gives `stop`.

        One all-reduce of a few integers agrees on both, on rows and labels, and on the text itself. Raises DataError on
        every rank, with the rank that met it, where a file cannot be read, a bad document ends the run, or ranks read
        different text.
        """
        while True:
            before = self.stream.state_dict()
            packs: list[Pack] = []
            met: DataError | None = None
            try:
                packs = [next(self.stream) for _ in range(count)]
            except DataError as error:
                met = error
            read = _numbers(packs)
            stops, fails, *largest = consensus.most([stop, met is not None, *read, *(-one for one in read)])
            if stops:
                self.stream.load_state_dict(before)
                return None
            if fails:
                bad = self._all_bad(met)
                self.stream.pass_over(bad, before)
                continue
            if largest[: len(read)] != [-one for one in largest[len(read) :]]:  # the largest is not the smallest
                raise DataError(
                    f"ranks read different text from data.source={self.stream.config.source!r}; every rank must see "
                    "the same files with the same content"
                )
            return packs

    def _all_bad(self, met: DataError | None) -> list[tuple[str, int]]:
        """The documents to pass over, by name and record, of all ranks."""
        skipped = isinstance(met, BadDocument) and self.skips

        def ask() -> None:
            if met is not None and not skipped:
                raise met

        consensus.together(ask)
        mine = (met.name, met.record, str(met)) if isinstance(met, BadDocument) else None
        found = {one for one in consensus.everyone(mine) if one is not None}
        for *_, why in sorted(found):
            self.say(f"passed over: {why}")
        return [(name, record) for name, record, _ in found]


def held_out(config: DataConfig, tokenizer: Tokenizer, count: int) -> list[Pack]:
    """`held_out_packs`, the same on every rank: what one cannot read, all pass over, or stop at. Collective."""
    without: set[tuple[str, int]] = set()

    def read() -> list[Pack]:
        return held_out_packs(config, tokenizer, count, without)

    while True:
        packs = consensus.together(read)
        found = consensus.everyone((without, _numbers(packs)))
        every = set[tuple[str, int]]().union(*(one for one, _ in found))
        if all(one == every for one, _ in found):
            break
        without |= every
    if any(numbers != found[0][1] for _, numbers in found):
        raise DataError(f"ranks read different held-out text from data.source={config.source!r}; give all the same")
    return packs


def _numbers(packs: list[Pack]) -> list[int]:
    """Rows, labels, and a checksum of the tokens."""
    checksum = 0
    for pack in packs:
        checksum = zlib.crc32(pack.tokens.numpy().tobytes(), checksum)
    return [sum(pack.layout.num_real_rows for pack in packs), sum(pack.num_labels for pack in packs), checksum]
