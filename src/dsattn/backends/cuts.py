"""How rows are cut into blocks that read about the same keys, where it is known on the host what they read.

Letters: T rows of the loss here, R = n T rows that heads read, S keys; a cell is a row of T and a key.
"""

from typing import NamedTuple

from torch import Tensor

from dsattn.keys import REACH_ROWS

CUT_ROWS = 128  # cuts begin at multiples of it: whole tiles of any kernel
CUT_KEYS = 64  # and so do their keys


class Cut(NamedTuple):
    """Rows of T, and the keys `first` .. `stop - 1` that hold all that these rows read, on every rank."""

    rows: slice
    first: int
    stop: int

    @property
    def cells(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.stop - self.first)

    def joined(self, other: "Cut") -> "Cut":
        """This and the one behind it."""
        rows = slice(self.rows.start, other.rows.stop)
        return Cut(rows, min(self.first, other.first), max(self.stop, other.stop))


def row_cuts(rows: int, reach: Tensor, line: int, shards: int, most: int) -> list[Cut]:
    """Cuts that cover `rows` rows of T, none without keys.

    reach: of the R rows, see `KeyRange`. line: S, rounded up to CUT_KEYS. shards: n. Neighbours join to no more than
    `most` cells, and where that adds at most a half to what they read, or makes few. One cut may have more than `most`.
    """
    runs = reach.tolist()
    found: list[Cut] = []
    read = 0  # cells that the parts of the last cut have
    for start in range(0, rows, CUT_ROWS):
        tile = slice(start, min(start + CUT_ROWS, rows))
        own = slice(tile.start * shards // REACH_ROWS, -(-tile.stop * shards // REACH_ROWS))
        met = [(a, b) for a, b in runs[own] if a < b] or [(0, 1)]
        first = min(a for a, _ in met) // CUT_KEYS * CUT_KEYS
        stop = min(-(-max(b for _, b in met) // CUT_KEYS) * CUT_KEYS, line)
        part = Cut(tile, first, stop)
        whole = found[-1].joined(part) if found else part
        if found and whole.cells <= most and (2 * whole.cells <= 3 * (read + part.cells) or whole.cells <= most // 8):
            found[-1], read = whole, read + part.cells
        else:
            found.append(part)
            read = part.cells
    return found
