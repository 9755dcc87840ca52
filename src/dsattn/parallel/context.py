"""Context parallel: rows stay, keys travel. Every rank gathers the keys of all and reads them in global order.

What travels is small: one latent of all heads (or the keys and values of the groups) and the indexer's keys, not hidden
states. Both go out in one launch before the queries are made, and are waited for where attention needs them. The
backward is a reduce-scatter; putting keys in order is a gather both ways (`Layout.key_order` and its inverse), never an
atomic addition. A recompute replay gathers again: keeping all keys of all layers would cost cp times the memory.

The same object carries tensor and sequence parallelism, for a layer needs both at once: see `nn/ranks.py`.
Losses are sums over this rank's rows over global counts, so gradients are summed over ranks, never averaged.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.errors import InputError
from dsattn.keys import Layout, dealt, dealt_back
from dsattn.nn.ranks import Gathered, Ranks
from dsattn.parallel.collectives import (
    Axis,
    begin_gather,
    exchange,
    finish_gather,
    gather,
    scatter_sum,
    sum_backward,
    sum_forward,
)
from dsattn.parallel.mesh import ParallelMesh, coordinates
from dsattn.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class RankGroups:
    """`nn.ranks.Ranks` over process groups: what one micro-batch's `Pass.ranks` is. See `ranks_of`.

    cp, tp: None where such a group would have one rank. both: the ranks of cp and tp together, cp major; needed with
    sequence parallelism alone. check: hold selections of a tp group against each other, which waits for the device.
    """

    cp: Axis | None = None
    tp: Axis | None = None
    both: Axis | None = None
    sequence_parallel: bool = True
    split_indexer_rows: bool = True
    check: bool = False

    @property
    def tp_size(self) -> int:
        """Ranks among which heads are split."""
        return 1 if self.tp is None else self.tp.size

    @property
    def shards(self) -> Axis | None:
        """The tp ranks, where they hold shards of the rows."""
        return self.tp if self.sequence_parallel else None

    @property
    def copies(self) -> Axis | None:
        """The tp ranks, where they hold the same rows."""
        return None if self.sequence_parallel else self.tp

    @property
    def splits_indexer(self) -> bool:
        """Whether each tp rank selects for its own shard of the rows only."""
        return self.shards is not None and self.split_indexer_rows

    @property
    def kl_repeats(self) -> int:
        """How many ranks compute the same indexer's loss as parts of one sum."""
        return 1 if self.shards is None or self.split_indexer_rows else self.shards.size

    @property
    def head_group(self) -> dist.ProcessGroup | None:
        """The tp group."""
        return None if self.tp is None else self.tp.group

    def head_rows(self, layout: Layout) -> Layout:
        """The layout of the rows that heads read. Raises InputError where it was not made for these ranks."""
        rows = layout
        if self.shards is not None:
            if layout.whole is None or layout.dealt != self.shards.size:
                raise InputError(
                    f"layout has {layout.rows.shape[0]} rows and is no shard of {self.shards.size}; with sequence "
                    f"parallelism give layout.deal_rows({self.shards.rank}, {self.shards.size}), and its tokens"
                )
            rows = layout.whole
        elif layout.whole is not None:
            raise InputError("layout is a shard of rows, but these ranks share none; give layout.whole and its tokens")
        count, rank = (1, 0) if self.cp is None else (self.cp.size, self.cp.rank)
        if rows.rows.shape[0] * count != rows.num_keys:
            raise InputError(
                f"layout has {rows.num_keys} keys for {rows.rows.shape[0]} rows on each of {count} context-parallel "
                f"rank(s); build it with cp_size={count}, cp_rank={rank}"
            )
        if self.check and not torch.equal(rows.key_order_inverse.view(count, rows.rows.shape[0])[rank], rows.rows):
            raise InputError(f"layout holds the rows of another rank; build it with cp_size={count}, cp_rank={rank}")
        return rows

    def rows(self, x: Tensor) -> Tensor:
        """x [T, ...] of every tp rank -> [R, ...]; the backward sums over them."""
        return x if self.shards is None else dealt_back(gather(x, self.shards), self.shards.size)

    def documents(self, layout: Layout, x: Tensor) -> tuple[Layout, Tensor]:
        """x [T, ...] of every tp rank, gathered in the order of documents, with their layout.

        Raises InputError under context parallelism, where no rank has whole documents.
        """
        rows = self.head_rows(layout)
        if self.cp is not None:
            raise InputError(
                f"layout spreads documents over {self.cp.size} context-parallel ranks, but a linear layer's state runs "
                "through whole ones, and is not passed from rank to rank yet: use cp=1"
            )
        return rows, self.rows(x)

    def own(self, x: Tensor) -> Tensor:
        """My T rows of x [R, ...]."""
        return x if self.shards is None else x[self.shards.rank :: self.shards.size].contiguous()

    def enter(self, x: Tensor) -> Tensor:
        """x [T, ...] -> [R, ...], for a product whose results are split over tp: in the product's dtype."""
        kind = x.device.type
        if self.tp is not None and x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # half of what travels, and the product would round it anyway
        return self.spread(self.rows(x))

    def leave(self, x: Tensor) -> Tensor:
        """x [R, M], this rank's part of a sum over tp -> the sum's [T, M]."""
        if self.tp is None:
            return x
        return scatter_sum(dealt(x, self.tp.size), self.tp) if self.sequence_parallel else sum_forward(x, self.tp)

    def spread(self, x: Tensor) -> Tensor:
        """x, whose gradient sums over tp where no gather's backward does that."""
        return x if self.copies is None else sum_backward(x, self.copies)

    def keys(self, layout: Layout, *own: Tensor) -> Gathered:
        """Begin to gather what is [T, ...] here, in `layout`'s rows, to [S, ...] in the order of keys."""
        axis = self.cp if layout.whole is None else self.both
        if axis is None or not own:
            return lambda: own
        order = (layout.key_order, layout.key_order_inverse)
        begun = begin_gather(own, axis)
        return lambda: tuple(finish_gather(x, raw, axis, order) for x, raw in zip(own, begun, strict=True))

    def selected(self, selection: Selection, layout: Layout) -> Selection:
        """The selection of all R rows, from that of the rows this rank selected for."""
        if self.splits_indexer:
            assert self.tp is not None
            parts = (selection.index, selection.length)
            gathered = map(finish_gather, parts, begin_gather(parts, self.tp), (self.tp, self.tp))
            index, length = (dealt_back(part, self.tp.size) for part in gathered)
            certified = selection.every_row_has_a_key and layout.every_row_has_a_key
            selection = Selection(index, length, every_row_has_a_key=certified)
        if self.check:
            self.check_equal(selection)
        return selection

    def all_heads(self, x: Tensor) -> Tensor:
        """x [R, H, ...] of heads here -> [T, tp * H, ...]: my rows, every head. No gradient."""
        if self.tp is None:
            return x
        return exchange(dealt(x.detach(), self.tp.size), self.tp).transpose(0, 1).flatten(1, 2)

    def all_groups(self, x: Tensor) -> Tensor:
        """x: keys [S, G, d] of groups here -> [S, tp * G, d]. No gradient."""
        if self.tp is None:
            return x
        return gather(x.detach(), self.tp).unflatten(0, (self.tp.size, x.shape[0])).transpose(0, 1).flatten(1, 2)

    def total(self, x: Tensor) -> Tensor:
        """x, summed over the ranks that hold the other rows of my documents. No gradient."""
        axis = self.cp if self.shards is None else self.both
        if axis is None:
            return x
        x = x.detach().clone()
        dist.all_reduce(x, group=axis.group)
        return x

    def check_equal(self, selection: Selection) -> None:
        """Raise InputError, on every rank of the tp group, where two of its ranks hold different selections."""
        if self.tp is None:
            return
        every = gather(selection.index, self.tp).unflatten(0, (self.tp.size, selection.num_rows))
        differs = (every != every[0]).any(2)
        if not differs.any():
            return
        rank, row = differs.nonzero()[0].tolist()
        raise InputError(
            f"tensor-parallel ranks selected different keys in {int(differs.any(0).sum())} row(s): row {row} on ranks "
            f"0 and {rank} first. Their indexers' weights or inputs differ: load the same weights on every rank, and "
            "sum replicated gradients with parallel.tensor.reduce_replicated"
        )


def ranks_of(mesh: ParallelMesh, *, check: bool = False) -> Ranks | None:
    """What `Pass.ranks` is on this mesh; None where neither rows nor heads are split. check: see RankGroups."""
    config = mesh.config
    cp, tp = Axis.of(mesh.group("cp")), Axis.of(mesh.group("tp"))
    if cp is None and tp is None:
        return None
    both = Axis.of(mesh.group("keys")) if config.sequence_parallel else cp
    return _groups(mesh, cp, both, check)


def dynamic_ranks(mesh: ParallelMesh, *, check: bool = False) -> dict[int, Ranks | None]:
    """`ranks_of` by number of context-parallel ranks, for every divisor of `cp`: dynamic context parallelism.

    A micro-batch of short documents need not be cut over all ranks. With `ranks = dynamic_ranks(mesh)[n]`, n ranks that
    are neighbours share one: its layout has cp_size=n and cp_rank=mesh.rank("cp") % n. Groups may change between
    micro-batches, as a pass holds its own. Every rank runs as many micro-batches, each over the same global counts.
    Collective: every process makes the same call, once.
    """
    full = ranks_of(mesh, check=check)
    found: dict[int, Ranks | None] = {mesh.size("cp"): full}
    for count in range(1, mesh.size("cp")):
        if mesh.size("cp") % count:
            continue
        cp = Axis.of(_neighbours(mesh, count, over_tp=False))
        both = Axis.of(_neighbours(mesh, count, over_tp=True)) if mesh.config.sequence_parallel else cp
        alone = cp is None and mesh.size("tp") == 1
        found[count] = None if alone else _groups(mesh, cp, both, check)
    return dict(sorted(found.items()))


def _groups(mesh: ParallelMesh, cp: Axis | None, both: Axis | None, check: bool) -> RankGroups:
    split = {"sequence_parallel": mesh.config.sequence_parallel, "split_indexer_rows": mesh.config.split_indexer_rows}
    return RankGroups(cp=cp, tp=Axis.of(mesh.group("tp")), both=both, check=check, **split)


def _neighbours(mesh: ParallelMesh, count: int, *, over_tp: bool) -> dist.ProcessGroup | None:
    """The group of `count` cp ranks that stand together, with all their tp ranks where asked; None for one rank."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.config.world_size):
        place = coordinates(mesh.config, rank)
        key = (place["pp"], place["batch"], place["cp"] // count, 0 if over_tp else place["tp"])
        members.setdefault(key, []).append(rank)
    groups = list(members.values())
    if len(groups[0]) == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    assert isinstance(mine, dist.ProcessGroup), "every rank is in one of the groups"
    return mine
