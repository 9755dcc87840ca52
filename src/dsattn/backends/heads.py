"""The ranks whose heads make one target of the indexer's loss together, and how it is summed over them.

Under tensor parallelism a rank knows the probabilities of its own heads. Where each takes the loss of all rows, all
want the whole sum: an all-reduce. Where rows are dealt out, rank i of n takes rows i, i + n, i + 2 n and so on
(`Layout.deal_rows`) and wants the sum of those alone: a reduce-scatter from heads to rows.
Letters: T rows of the loss here, R = n T rows that heads read, W columns.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsattn.keys import dealt


@dataclass(frozen=True)
class HeadRanks:
    """group: name of the process group, "" where one rank has every head. shards: n, 1 for whole rows. shard: i."""

    group: str = ""
    shards: int = 1
    shard: int = 0

    @classmethod
    def of(cls, group: str, shard: int, q: Tensor, q_i: Tensor) -> "HeadRanks":
        """Rows are dealt out where attention's q [R, ...] has more of them than the indexer's q_i [T, ...]."""
        shards = q.shape[0] // max(q_i.shape[0], 1)
        return cls(group, shards, shard) if shards > 1 else cls(group)

    @property
    def tables(self) -> int:
        """How many times [T, W] is held while a target is summed: the part of every shard, and the sum."""
        return self.shards + (1 if self.group else 0)

    def own(self, x: Tensor) -> Tensor:
        """My T rows of x [R, ...], a view."""
        return x if self.shards == 1 else x[self.shard :: self.shards]

    def all_rows(self, block: slice) -> slice:
        """The rows of R that are dealt out to a block of T on every rank."""
        return slice(block.start * self.shards, block.stop * self.shards)

    def own_rows(self, block: slice) -> slice:
        """The inverse: `block` begins and ends at multiples of n."""
        return slice(block.start // self.shards, block.stop // self.shards)

    def deal(self, x: Tensor) -> Tensor:
        """x [R, W] with the rows of each shard together, shard by shard: what `total` takes."""
        return dealt(x, self.shards) if self.shards > 1 else x

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to sum x [R, W], shard by shard, over ranks; what is returned waits, and gives my [T, W] of the sum.

        Of x itself where one rank has every head. Else a collective: every rank of the group begins as many, in one
        order, and x stays as it is until then. What no row reads may be anything.
        """
        if not self.group:
            return lambda: x.unflatten(0, (self.shards, -1))[self.shard] if self.shards > 1 else x
        collectives = torch.ops._c10d_functional
        if self.shards == 1:
            begun = collectives.all_reduce(x.contiguous(), "sum", self.group)
        else:
            begun = collectives.reduce_scatter_tensor(x.contiguous(), "sum", self.shards, self.group)
        return lambda: collectives.wait_tensor(begun)

    def total(self, x: Tensor) -> Tensor:
        """My [T, W] of the sum over ranks of x [R, W], shard by shard."""
        return self.begin(x)()


ALONE = HeadRanks()
