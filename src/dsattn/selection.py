"""The keys that were kept for each query row, and the one rule by which they are ranked.

Letters: T query rows, S keys in global order, K kept keys, W columns of a block of scores.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsattn.errors import InputError

# T * K of a Selection that can be inverted: an inverse names slots by int32, and kernels look a little further.
MOST_SLOTS = 2**31 - 2**10


class Inverse(NamedTuple):
    """Which slots of a Selection hold each key: lets gradients be summed key by key in a fixed order.

    slot: [T * K] int32: flat slots `t * K + j`, sorted by the key they hold, then by slot; -1 behind the last of them.
    offset: [S + 1] int32: key s is held by `slot[offset[s] : offset[s + 1]]`.
    """

    slot: Tensor
    offset: Tensor


class _State(NamedTuple):
    """How often index and length were written to, and whether this happens while a CUDA graph is captured."""

    index_version: int
    length_version: int
    captured: bool


@dataclass(frozen=True)
class Selection:
    """For each query row the key rows it attends to.

    index: [T, K] int32, global key rows, distinct, ascending, then -1. K is the asked width, also with fewer keys.
    length: [T] int32, how many of them are keys.
    score: [T, K] fp32 (fp64 for fp64 inputs) aligned to `index`, -inf in the -1 slots; None unless asked for.
    every_row_has_a_key: the layout proved that each row's range holds a key. Says nothing of scores: a row whose scores
        are all NaN or -inf has length 0 all the same.
    inverse: of this index and length, see `with_inverse`; no other can be given. Copies, pickles and what
        `dataclasses.replace` makes are without it.
    """

    index: Tensor
    length: Tensor
    score: Tensor | None = None
    every_row_has_a_key: bool = False
    inverse: Inverse | None = field(default=None, init=False)
    _inverted: "_State | None" = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.index.dim() != 2 or self.index.dtype != torch.int32:
            raise InputError(f"Selection.index must be int32 [T, K], got {self.index.dtype} {list(self.index.shape)}")
        if self.length.shape != self.index.shape[:1] or self.length.dtype != torch.int32:
            raise InputError(
                f"Selection.length must be int32 [{self.index.shape[0]}], "
                f"got {self.length.dtype} {list(self.length.shape)}"
            )
        if self.score is not None and self.score.shape != self.index.shape:
            raise InputError(f"Selection.score must be {list(self.index.shape)}, got {list(self.score.shape)}")

    @classmethod
    def from_index(cls, index: Tensor, *, every_row_has_a_key: bool = False) -> "Selection":
        """A Selection from key rows [T, K] of any integer type and order, where negative entries are empty slots.

        Duplicates are not looked for: they break the contract. Attention counts them twice, but kernels that sum
        gradients key by key, as all do that are deterministic, count them once in the key's. Raises InputError for what
        is no integer [T, K] and, on the CPU, for rows that int32 cannot name.
        """
        if index.dim() != 2 or index.dtype.is_floating_point or index.dtype == torch.bool:
            raise InputError(f"index must be integer [T, K], got {index.dtype} {list(index.shape)}")
        last = torch.iinfo(torch.int32).max
        readable = index.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and index.numel() and (largest := int(index.max())) >= last:
            raise InputError(f"index holds key row {largest}, but key rows must be below {last}; split the keys")
        ordered = torch.where(index < 0, last, index.long()).to(torch.int32).sort(dim=1).values
        empty = ordered == last
        return cls(
            index=ordered.masked_fill(empty, -1),
            length=(~empty).sum(1, dtype=torch.int32),
            every_row_has_a_key=every_row_has_a_key,
        )

    @property
    def num_rows(self) -> int:
        """T."""
        return self.index.shape[0]

    @property
    def width(self) -> int:
        """K."""
        return self.index.shape[1]

    def with_inverse(self, num_keys: int) -> "Selection":
        """The same Selection carrying its key-to-slots index, made once for all who attend to the same keys.

        Backwards that sum by key take it instead of making their own, run of rows after run of rows: the same bits,
        sooner. It costs as many bytes as `index`, and 4 a key, for as long as somebody keeps the Selection. It is left
        out once index or length is written in place. Compiled functions and replays of CUDA graphs cannot see that:
        where they meet a Selection that is refreshed, call it inside of them.
        Raises InputError where T * K is above MOST_SLOTS.
        """
        if self._has_inverse(num_keys) and not self._is_outdated():
            return self
        if self.index.numel() > MOST_SLOTS:
            raise InputError(
                f"selection has {self.index.numel()} slots, but an inverse names at most {MOST_SLOTS}; split the rows"
            )
        made = replace(self)
        object.__setattr__(made, "inverse", Inverse(*inverted(self.index, self.length, num_keys)))
        object.__setattr__(made, "_inverted", self._state())
        return made

    def inverse_of(self, num_keys: int) -> Inverse | None:
        """The inverse that it carries, where that is of so many keys, and index and length are as they were.

        Raises InputError where a CUDA graph is being captured, and did not make it.
        """
        if not self._has_inverse(num_keys):
            return None
        if not self._is_outdated():
            return self.inverse
        if _is_captured(self.index):
            raise InputError(
                "selection.inverse was made outside of the CUDA graph that is being captured, and its replays may meet "
                "another index; call selection.with_inverse inside of the capture"
            )
        return None

    def _has_inverse(self, num_keys: int) -> bool:
        return self.inverse is not None and self.inverse.offset.shape[0] == num_keys + 1

    def _is_outdated(self) -> bool:
        """Whether the inverse is known to be of other values, or about to be."""
        made, now = self._inverted, self._state()
        return made is not None and now is not None and made != now

    def _state(self) -> "_State | None":
        """None while compiling, where nobody knows."""
        if torch.compiler.is_compiling():
            return None
        index, length = (0 if x.is_inference() else x._version for x in (self.index, self.length))
        return _State(index, length, _is_captured(self.index))

    def __reduce__(self) -> tuple[type["Selection"], tuple[Tensor, Tensor, Tensor | None, bool]]:
        """Without the inverse: a copy's tensors count their versions anew."""
        return Selection, (self.index, self.length, self.score, self.every_row_has_a_key)

    def mask(self, num_keys: int) -> Tensor:
        """[T, num_keys] bool, True where selected. For small sizes: tests and metrics."""
        column = torch.where(self.index < 0, num_keys, self.index).long()
        held = torch.zeros(self.num_rows, num_keys + 1, dtype=torch.bool, device=self.index.device)
        return held.scatter_(1, column, True)[:, :num_keys]

    def to(self, device: torch.device | str) -> "Selection":
        """A copy on `device`, without the inverse."""
        score = None if self.score is None else self.score.to(device)
        return replace(self, index=self.index.to(device), length=self.length.to(device), score=score)


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def invert(index: Tensor, length: Tensor, num_keys: int) -> Inverse:
    """The key-to-slots index of `index` [T, K], whose rows stop at `length` [T]. Fixed shapes, no device sync.

    Slots behind a row's length are empty, whatever they hold, as are those with -1 or a key that does not exist.
    """
    empty = (index < 0) | (index >= num_keys) | (torch.arange(index.shape[1], device=index.device) >= length[:, None])
    ordered, slot = torch.where(empty, num_keys, index).flatten().sort(stable=True)
    bounds = torch.arange(num_keys + 1, device=index.device, dtype=ordered.dtype)
    offset = torch.searchsorted(ordered, bounds, out_int32=True)
    return Inverse(slot.to(torch.int32).masked_fill_(ordered == num_keys, -1), offset)


@torch.library.custom_op("dsattn::invert", mutates_args=())
def inverted(index: Tensor, length: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """An operator, so that `dsattn.ops.invert` can serve it by kernels where there are some."""
    slot, offset = invert(index, length, num_keys)
    return slot, offset


@inverted.register_fake
def _(index, length, num_keys):
    return index.new_empty(index.shape[0] * index.shape[1]), index.new_empty(num_keys + 1)


def rank(scores: Tensor, columns: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ranking rule, on a block of rows.

    Finite scores and +inf rank by value (+0 equals -0); ties go to the smaller key; NaN and -inf are never selected.

    scores: [R, W], -inf where a row may not read the column. Not changed.
    columns: [R, W] (or broadcastable) int32: the key row of each column, ascending along W.
    Returns index [R, top_k] int32 (ascending, then -1), length [R] int32, score [R, top_k] (values as they were, then
    -inf). The K-th largest value is found first; what lies above it is taken, then the leftmost of what equals it.
    """
    width = scores.shape[1]
    comparable = torch.where(scores.isnan(), -torch.inf, scores)
    if width == 0:
        cutoff = comparable.new_zeros(len(scores), 1)
    else:
        cutoff = comparable.topk(min(top_k, width), dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    return take(comparable, columns, cutoff, top_k)


def take(scores: Tensor, columns: Tensor, cutoff: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `rank` gives, where each row's K-th largest score is known.

    scores: [R, W], -inf for what may not be selected, and without NaN. columns: as for `rank`. cutoff: [R, 1], -inf
    where a row has fewer than top_k scores above -inf.
    """
    rows, width = scores.shape
    above = scores > cutoff
    equal = (scores == cutoff) & (scores > -torch.inf)
    wanted = top_k - above.sum(1, keepdim=True, dtype=torch.int32)
    taken = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= wanted))
    place = taken.cumsum(1, dtype=torch.int32)
    # Column top_k collects what was not taken and is cut off.
    slot = torch.where(taken, place - 1, top_k).long()
    index = torch.full((rows, top_k + 1), -1, dtype=torch.int32, device=scores.device)
    index.scatter_(1, slot, columns.expand(rows, width))
    score = scores.new_full((rows, top_k + 1), -torch.inf).scatter_(1, slot, scores)
    return index[:, :top_k].contiguous(), taken.sum(1, dtype=torch.int32), score[:, :top_k].contiguous()


def selected_scores(q: Tensor, k: Tensor, w: Tensor, index: Tensor, relu: bool) -> Tensor:
    """[T, K] fp32 (fp64 for fp64 inputs): indexer scores of the keys in index [T, K], -inf where it holds -1.

    q: [T, H, D], k: [S, D], w: [T, H]. For what selects by other scores: of rounded operands, or of a vendor.
    """
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, w.dtype) else torch.float32
    score_TK = q.new_full(index.shape, -torch.inf, dtype=wide)
    k_SD = pad(k.to(wide), (0, 0, 0, 1))  # an empty slot reads a row of zeros, never a key
    row_bytes = wide.itemsize * index.shape[1] * (k.shape[1] + 2 * q.shape[1])
    step = max((2**24 if q.device.type == "cpu" else 2**30) // max(row_bytes, 1), 1)
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        empty_RK = index[part] < 0
        k_RKD = k_SD[torch.where(empty_RK, len(k), index[part]).long()]
        dot_RHK = q[part].to(wide) @ k_RKD.transpose(1, 2)
        found_RK = torch.einsum("rhk,rh->rk", dot_RHK.relu() if relu else dot_RHK, w[part].to(wide))
        score_TK[part] = found_RK.masked_fill(empty_RK, -torch.inf)
    return score_TK
