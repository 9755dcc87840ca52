"""Values that enter and leave an attention layer. Nothing of a forward stays on a module.

Letters: T rows, S keys, M model width, H heads, C latent width, G kv groups, d head width, D indexer width.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from dsattn.config import Mode
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.ranks import ONE_RANK, Ranks
from dsattn.selection import Selection


@dataclass(frozen=True)
class Observation:
    """What a probe sees of one layer, detached. Enough to measure a selection against the attention it replaces.

    q: [T, H, C] and kv: [S, C]; or q [T, H, d] and keys [S, G, d], of GQA and of MLA that reads every key. Under tensor
    parallelism H and G are of this rank, T all rows that its heads read.
    lse: [T, H] over the keys that were read: every visible one in modes `dense` and `warmup`, the selected ones
    otherwise. scale: of the logits.
    index: the indexer's q, k and w; None in a layer without one and in mode `dense`. selection: None after dense
    attention.
    """

    q: Tensor
    kv: Tensor
    lse: Tensor
    scale: float
    index: IndexerOutput | None
    selection: Selection | None
    layout: Layout


Probe = Callable[[int, Observation], None]


@dataclass(frozen=True)
class Handed:
    """What other layers of the same forward hand to one layer, beside the selection.

    index: q, k and w of the indexer whose selection this layer shares: its attention teaches that indexer, too.
    entries: keys and values to attend to, as `AttentionOutput.entries` of a layer with the same weights; the layer then
    projects none of its own, and its gradient reaches those that did.
    """

    index: IndexerOutput | None = None
    entries: tuple[Tensor, ...] | None = None


R = TypeVar("R")
Part = Literal["layer", "attention", "mlp"]


class Recompute(Protocol):
    """Which parts of a layer run again in the backward, and how: `parallel.recompute.Checkpoints`."""

    def __call__(self, part: Part, function: Callable[..., R], run: "Pass", *operands: Any) -> R:
        """`function(run, *operands)`, with `run.kept` set where the part will run again."""
        ...


class Kept(Protocol):
    """What one checkpoint of one micro-batch keeps by value, from its first pass for its replay."""

    def keeps(self, name: str, /) -> bool:
        """Whether a replay will have `name` of the first pass."""
        ...

    def holds(self, name: str) -> bool:
        """Whether this is a replay, and the first pass kept `name`."""
        ...

    def value(self, name: str, make: Callable[..., R], *operands: Any) -> R:
        """`make(*operands)` of the first pass; a replay does not call it. For what has no gradient."""
        ...

    def graph(self, name: str, make: Callable[..., Tensor], *operands: Any) -> Tensor:
        """`make(*operands)`, whose replay builds its graph on the matrix products and losses of the first pass."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one forward of one micro-batch does; the same for every layer but for what the model hands to one.

    mode: see the table in `nn/attention.py`.
    kl_divisor: the KL is a sum over real rows over this: the real rows of the whole global batch. None takes the real
        rows of this layout.
    with_kl: whether modes `warmup` and `sparse` compute the KL; None does in training with gradients on.
    with_mtp: whether the layers of multi-token prediction run; None does in training.
    with_balance: whether layers with experts compute their sequence-wise balance loss, over `kl_divisor` too.
    probe: called by each layer with its index and an Observation. In mode `warmup` without gradients that is the
        indexer's recall against dense attention.
    handed: set by the model, for one layer.
    recompute: which parts of layers run again in the backward; None runs nothing again. kept: set by it, for one part.
    ranks: the ranks that hold this micro-batch's other rows, or the model's other heads; None for one process. Losses
        need their global divisors then: a rank knows its own counts only.
    """

    mode: Mode = "sparse"
    kl_divisor: int | float | Tensor | None = None
    with_kl: bool | None = None
    with_mtp: bool | None = None
    with_balance: bool = False
    probe: Probe | None = None
    handed: Handed | None = None
    recompute: Recompute | None = None
    kept: Kept | None = None
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise InputError(f"mode={self.mode!r} must be one of {', '.join(get_args(Mode))}")

    @property
    def together(self) -> Ranks:
        """`ranks`, or what stands for one process."""
        return ONE_RANK if self.ranks is None else self.ranks

    def holds(self, name: str) -> bool:
        """Whether a checkpoint runs this part of a layer again, with `name` kept from the first pass."""
        return self.kept is not None and self.kept.holds(name)

    def part(self, part: Part, function: Callable[..., R], *operands: Any) -> R:
        """`function(run, *operands)`, as `recompute` has it."""
        return function(self, *operands) if self.recompute is None else self.recompute(part, function, self, *operands)

    def value(self, name: str, make: Callable[..., R], *operands: Any) -> R:
        """`make(*operands)`, without gradient; a replay has that of the first pass."""
        return make(*operands) if self.kept is None else self.kept.value(name, make, *operands)

    def graph(self, name: str, make: Callable[..., Tensor], *operands: Any) -> Tensor:
        """`make(*operands)`; a replay repeats its graph, not its products."""
        return make(*operands) if self.kept is None else self.kept.graph(name, make, *operands)


SPARSE = Pass()


@dataclass(frozen=True)
class LayerCache:
    """What decoding keeps of the rows a layer has seen. `LayerCache()` has seen none.

    entries: (kv [S, C],) for MLA, (k [S, G, d], v [S, G, d]) for GQA; none in a linear layer.
    index_keys: [S, D], with KPool [S, 2 D] (key and gates); None in a layer without an indexer, and after mode `dense`.
    conv, state, seen: of a linear layer, the last rows that its convolution reads, its state, and S.
    """

    entries: tuple[Tensor, ...] = ()
    index_keys: Tensor | None = None
    conv: Tensor | None = None
    state: Tensor | None = None
    seen: int = 0

    @property
    def num_rows(self) -> int:
        """S."""
        return self.entries[0].shape[0] if self.entries else self.seen

    def extended(self, entries: tuple[Tensor, ...], index_keys: Tensor | None) -> "LayerCache":
        """The cache with further rows; this one stays as it is.

        Raises InputError where index keys come to rows that have none: they cannot be selected from.
        """
        if not self.entries:
            return LayerCache(entries, index_keys)
        if index_keys is not None:
            if self.index_keys is None:
                raise InputError(
                    f"cache holds {self.num_rows} rows without index keys: it was filled in mode 'dense' "
                    "or by a layer without an indexer; fill it in the mode that decodes"
                )
            index_keys = torch.cat((self.index_keys, index_keys))
        joined = tuple(torch.cat(pair) for pair in zip(self.entries, entries, strict=True))
        return LayerCache(joined, index_keys)


@dataclass(frozen=True)
class Turn:
    """One pass through one layer: what came in, and what it does.

    layout: of my rows. rows: of the rows that heads read. dense: every visible key is read. chooses: the indexer
    selects. learns: an indexer is taught, the own one or the one that is handed. scores: the own indexer runs.
    """

    layout: Layout
    rows: Layout
    run: Pass
    selection: Selection | None
    cache: LayerCache | None
    dense: bool
    chooses: bool
    learns: bool
    scores: bool

    @property
    def index_rows(self) -> Layout:
        """The layout of the rows that the indexer has queries of."""
        return self.layout if self.run.together.splits_indexer else self.rows

    @property
    def kl_divisor(self) -> int | float | Tensor | None:
        """That of the pass; ranks that repeat one loss take equal parts of it."""
        divisor, repeats = self.run.kl_divisor, self.run.together.kl_repeats
        return divisor if divisor is None or repeats == 1 else divisor * repeats

    def taught(self) -> contextlib.AbstractContextManager[Any]:
        """Autograd is on for the indexer where it learns."""
        return contextlib.nullcontext() if self.learns else torch.no_grad()


@dataclass(frozen=True)
class AttentionOutput:
    """hidden: [T, M]. selection: what was attended to, for the layers that share it; None after dense attention.

    kl: fp32 scalar, sum over real rows / divisor; None where the pass or the layer has none. In a layer that shares a
    selection it is that of the indexer it was handed.
    cache: the given cache with this pass's rows; None where none was given.
    index: the layer's own indexer's q, k and w, for layers that teach it; None where it did not run. Under tensor
    parallelism its queries may be those of this rank's rows only (`Ranks.splits_indexer`).
    entries: the keys and values that were read, attached to autograd: (kv [S, C],) of MLA that selects, else
    (k [S, G, d], v [S, G, d]).
    """

    hidden: Tensor
    selection: Selection | None
    kl: Tensor | None
    cache: LayerCache | None
    index: IndexerOutput | None
    entries: tuple[Tensor, ...]
