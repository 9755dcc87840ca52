"""Blocks of rows that read about the same keys: nothing that is read is left out, and little is read for nothing."""

import pytest

from dsattn.backends import CUT_KEYS, CUT_ROWS, HeadRanks
from dsattn.backends.cuts import Cut, row_cuts
from dsattn.keys import Layout

LAYOUTS = {
    "long and short": Layout.packed([4096, *[16] * 64], total=8192),
    "context parallel": Layout.packed([4096, 600], padded=[4096, 640], total=4736, cp_size=2, cp_rank=1),
    "padding": Layout.packed([0], total=600),
    "few rows": Layout.packed([5, 1]),
    "none": Layout.packed([]),
}


@pytest.mark.parametrize("most", [1, 128 * 512, 2**22, 2**40])
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_row_has_the_keys_that_it_reads(name: str, shards: int, most: int) -> None:
    layout = LAYOUTS[name]
    ranks, rows = HeadRanks("heads", shards, shards - 1), layout.keys.num_rows // shards
    line = -(-layout.num_keys // CUT_KEYS) * CUT_KEYS
    assert layout.keys.reach is not None
    found = row_cuts(rows, layout.keys.reach, line, shards, most)
    assert [row for cut in found for row in range(cut.rows.start, cut.rows.stop)] == list(range(rows))
    for cut in found:
        every = ranks.all_rows(cut.rows)
        keys = layout.keys.row_slice(every.start, every.stop)
        reads = keys.stop > keys.start
        assert 0 <= cut.first < cut.stop <= line
        assert (keys.start[reads] >= cut.first).all()
        assert (keys.stop[reads] <= cut.stop).all()
        assert cut.first % CUT_KEYS == cut.stop % CUT_KEYS == cut.rows.start % CUT_ROWS == 0
        assert cut.cells <= most or cut.rows.stop - cut.rows.start <= CUT_ROWS


def test_rows_join_where_they_read_the_same() -> None:
    """A long document is cut where its first rows read a part of it; short ones and padding join."""
    reach = LAYOUTS["long and short"].keys.reach
    assert reach is not None
    found = row_cuts(8192, reach, 8192, 1, 2**22)
    assert found[0] == Cut(slice(0, 640), 0, 640), "an eighth of what fits, and no row more"
    assert len(found) < 20
    assert sum(cut.cells for cut in found) < 1.5 * (4096 * (4096 + 128) / 2 + 1024 * 128 + 3072 * 64)
