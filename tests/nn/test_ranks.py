"""What stands for one process does nothing at all, and has all that layers ask of ranks."""

import torch

from dsattn.keys import Layout
from dsattn.nn.ranks import ONE_RANK, Ranks
from dsattn.nn.state import Pass
from dsattn.parallel.context import RankGroups
from dsattn.selection import Selection

ASKED = {name for name in vars(Ranks) if not name.startswith("_")}


def test_one_rank_hands_everything_back():
    layout, x = Layout.causal(4), torch.randn(4, 2)
    selection = Selection.from_index(torch.zeros(4, 1, dtype=torch.int32))
    ranks = Pass().together
    assert ranks is ONE_RANK
    assert ranks.head_rows(layout) is layout
    for same in (ranks.rows, ranks.own, ranks.enter, ranks.leave, ranks.spread, ranks.all_heads, ranks.all_groups):
        assert same(x) is x
    assert ranks.keys(layout, x, x)() == (x, x)
    assert ranks.documents(layout, x) == (layout, x)
    assert ranks.selected(selection, layout) is selection
    assert (ranks.tp_size, ranks.kl_repeats, ranks.splits_indexer, ranks.head_group) == (1, 1, False, None)


def test_both_implementations_have_all_that_is_asked():
    assert {"keys", "enter", "leave"} <= ASKED
    for made in (ONE_RANK, RankGroups()):
        assert not [name for name in ASKED if not hasattr(made, name)]


def test_a_pass_holds_its_own_ranks():
    ranks = RankGroups()
    assert Pass(ranks=ranks).together is ranks
