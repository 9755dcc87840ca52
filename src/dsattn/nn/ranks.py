"""The ranks that work on one micro-batch together, as a layer uses them; layers themselves know no process groups.

Context parallel (cp): each rank owns some rows of every document and reads the keys of all.
Tensor parallel (tp): each rank owns some heads and reads all rows of its cp rank.
Sequence parallel: between the parts that are split by heads, a tp rank owns a shard of its cp rank's rows
(`Layout.deal_rows`), so nothing is done twice. Without it every tp rank has all rows there.

                        sequence parallel                       without
    residual stream     my shard of the rows                    all rows, the same on every tp rank
    keys                gathered over cp and tp                 gathered over cp
    into the heads      rows gathered; backward reduce-scatter  as it is; backward all-reduce
    out of the heads    reduce-scatter; backward gather         all-reduce; backward as it is
    losses, gradients   a part of a sum over tp                 complete on every tp rank

Letters: T my rows, R the rows that heads read, S keys, H heads here, G groups here.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from dsattn.keys import Layout
from dsattn.selection import Selection

Gathered = Callable[[], tuple[Tensor, ...]]
"""Waits for gathers that were begun."""


class Ranks(Protocol):
    """The groups of one micro-batch: `parallel.context.RankGroups`. Under dynamic cp they may differ between two."""

    @property
    def tp_size(self) -> int:
        """Ranks among which heads are split."""
        ...

    @property
    def splits_indexer(self) -> bool:
        """Whether each tp rank selects, and takes the indexer's loss, for its own shard of the rows only."""
        ...

    @property
    def kl_repeats(self) -> int:
        """How many ranks compute the same indexer's loss as parts of one sum."""
        ...

    @property
    def head_group(self) -> Any:
        """The process group whose ranks hold the other heads: the loss's target sums over it. None: there are none."""
        ...

    def head_rows(self, layout: Layout) -> Layout:
        """The layout of the R rows that heads read, given that of my rows. Raises InputError where it is no shard."""
        ...

    def rows(self, x: Tensor) -> Tensor:
        """x [T, ...] of every tp rank -> [R, ...]; the backward sums over them."""
        ...

    def documents(self, layout: Layout, x: Tensor) -> tuple[Layout, Tensor]:
        """x [T, ...] of every tp rank, gathered in the order of documents, with their layout: for what scans them."""
        ...

    def own(self, x: Tensor) -> Tensor:
        """My T rows of x [R, ...]."""
        ...

    def enter(self, x: Tensor) -> Tensor:
        """x [T, ...] -> [R, ...], for a product whose results are split over tp: the backward sums over tp."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """x [R, M], this rank's part of a sum over tp -> the sum's [T, M]."""
        ...

    def spread(self, x: Tensor) -> Tensor:
        """x, which goes through `keys` and is then read by heads split over tp: its gradient sums over tp."""
        ...

    def keys(self, layout: Layout, *own: Tensor) -> Gathered:
        """Begin to gather what is [T, ...] here, in `layout`'s rows, to [S, ...] in the order of keys.

        The backward sums over ranks. Raises InputError where the layout was made for other ranks.
        """
        ...

    def selected(self, selection: Selection, layout: Layout) -> Selection:
        """The selection of all R rows, from that of the rows this rank selected for. layout: of the R rows."""
        ...

    def all_heads(self, x: Tensor) -> Tensor:
        """x [R, H, ...] of heads here -> [T, tp * H, ...]: my rows, every head. No gradient."""
        ...

    def all_groups(self, x: Tensor) -> Tensor:
        """x: keys [S, G, d] of groups here -> [S, tp * G, d]. No gradient."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """x, summed over the ranks that hold the other rows of my documents. No gradient."""
        ...


class OneRank:
    """`Ranks` of a process that works alone."""

    tp_size = 1
    splits_indexer = False
    kl_repeats = 1
    head_group = None

    def head_rows(self, layout: Layout) -> Layout:
        return layout

    def rows(self, x: Tensor) -> Tensor:
        return x

    own = enter = leave = spread = all_heads = all_groups = total = rows

    def documents(self, layout: Layout, x: Tensor) -> tuple[Layout, Tensor]:
        return layout, x

    def keys(self, layout: Layout, *own: Tensor) -> Gathered:
        return lambda: own

    def selected(self, selection: Selection, layout: Layout) -> Selection:
        return selection


ONE_RANK = OneRank()
