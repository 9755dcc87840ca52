"""How the loss's target is summed over the ranks that hold the heads; two of them meet in tests/ops/test_distill.py."""

import pytest
import torch

from dsattn.backends.heads import ALONE, HeadRanks
from dsattn.keys import Layout


def test_one_rank_sums_nothing() -> None:
    x = torch.randn(6, 3)
    assert ALONE.own(x) is ALONE.deal(x) is ALONE.total(x) is x
    assert ALONE.all_rows(slice(2, 5)) == ALONE.own_rows(slice(2, 5)) == slice(2, 5)
    assert ALONE.tables == 1


@pytest.mark.parametrize("shards", [2, 3])
def test_rows_are_those_of_the_layout(shards: int) -> None:
    layout = Layout.packed([7, 5])
    for shard in range(shards):
        ranks = HeadRanks("heads", shards, shard)
        assert torch.equal(ranks.own(layout.rows), layout.deal_rows(shard, shards).rows)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_blocks_of_all_rows_and_of_mine(shards: int) -> None:
    """Rows of a block of all, dealt, and then my run of them: my rows of that block."""
    x = torch.randn(12 * shards, 5)
    for shard in range(shards):
        ranks = HeadRanks("", shards, shard)
        block = slice(3, 8)
        every = ranks.all_rows(block)
        assert ranks.own_rows(every) == block
        assert torch.equal(ranks.total(ranks.deal(x[every])), ranks.own(x)[block])
        assert torch.equal(ranks.total(ranks.deal(x)), ranks.own(x))


def test_shards_are_told_by_rows() -> None:
    q, q_i = torch.empty(12, 2, 4), torch.empty(4, 3, 8)
    assert HeadRanks.of("heads", 2, q, q_i) == HeadRanks("heads", 3, 2)
    assert HeadRanks.of("heads", 2, q, torch.empty(12, 3, 8)) == HeadRanks("heads"), "whole rows: an all-reduce"
    assert HeadRanks.of("", 0, q[:0], q_i[:0]) == ALONE


@pytest.mark.parametrize(("ranks", "tables"), [(HeadRanks("heads"), 2), (HeadRanks("heads", 4, 1), 5)])
def test_tables_that_are_held(ranks: HeadRanks, tables: int) -> None:
    """The parts of the target, and their sum."""
    assert ranks.tables == tables
