"""Rows that count, and blocks of dense attention; test_health.py and test_overlap.py compare them with loops."""

import pytest
import torch

from dsattn.keys import Layout
from dsattn.nn.state import Observation
from dsattn.selection import Selection
from dsattn.training.data import Pack
from dsattn.training.observed import attention_blocks, counted_rows, ranges_of

LAYOUT = Layout.packed([7, 2, 9])


def test_counted_rows_are_spread_evenly() -> None:
    pack = Pack(torch.zeros(18, dtype=torch.int64), torch.full((18,), -100), LAYOUT, 0)
    assert counted_rows(pack.layout, 3).tolist() == [3, 4, 5, 6, 12, 13, 14, 15, 16, 17]
    assert counted_rows(pack.layout, 3, 2).tolist() == [5, 15]
    assert counted_rows(pack.layout, 9).tolist() == []


@pytest.mark.parametrize("rows_of_a_block", [1, 3, 100])
def test_blocks_are_rows_of_one_softmax(monkeypatch, rows_of_a_block) -> None:
    q, kv = torch.randn(18, 4, 6), torch.randn(18, 2, 6)  # two heads a key group
    seen = Observation(q, kv, torch.zeros(18, 4), 0.5, None, None, LAYOUT)
    rows = torch.tensor([3, 6, 8, 12, 17])
    monkeypatch.setattr(
        "dsattn.training.observed.row_blocks",
        lambda count, *_: (slice(i, min(i + rows_of_a_block, count)) for i in range(0, count, rows_of_a_block)),
    )
    index = torch.tensor([[0, 3], [6, -1], [7, 8], [9, 12], [10, 17]], dtype=torch.int32)
    selection = Selection(index, (index >= 0).sum(1, dtype=torch.int32))
    whole = torch.full((5, 4, 18), -torch.inf)
    for place, (t, (a, b)) in enumerate(zip(rows, [(0, 4), (0, 7), (7, 9), (9, 13), (9, 18)], strict=True)):
        for head in range(4):
            whole[place, head, a:b] = 0.5 * kv[a:b, head // 2] @ q[t, head]
    wanted, covered = whole.softmax(-1), 0
    for block in attention_blocks(seen, rows, ranges_of(seen, rows)):
        assert torch.allclose(block.p, wanted[block.part][:, :, block.run], atol=1e-6)
        assert torch.equal(block.columns, torch.arange(18)[block.run])
        assert torch.equal(block.selected(selection), selection.mask(18)[block.part][:, block.run])
        covered += len(block.p)
    assert covered == 5
