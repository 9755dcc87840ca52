"""Which keys each query row may read: the one value that says causal, packed, padded, zigzag and sharded.

Letters: T query rows on this rank, S keys in global order (all rows of all context-parallel ranks, padding included).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dsattn.errors import InputError

REACH_ROWS = 128


@dataclass(frozen=True)
class KeyRange:
    """Query row t may read key rows `start[t] .. stop[t] - 1`; a row with `stop <= start` reads nothing.

    start: [T] int32, first key row.
    stop: [T] int32, one past the last key row.
    every_row_has_a_key: whoever made the ranges proved, from integers, that none is empty. False promises nothing.
    reach: [ceil(T / REACH_ROWS), 2] int32 on the host, from integers too: of each run of REACH_ROWS rows the first key
        that any of them may read, and one past the last; equal where none reads. None where nobody knows, as in ranges
        that were not made by a Layout: `dataclasses.replace` leaves it out.
    Raises InputError on other shapes or dtypes. Values are not read: the tensors may live on a GPU.
    """

    start: Tensor
    stop: Tensor
    every_row_has_a_key: bool = False
    reach: Tensor | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("stop", self.stop)):
            if value.dim() != 1 or value.dtype != torch.int32:
                raise InputError(f"KeyRange.{name} must be int32 [T], got {value.dtype} {list(value.shape)}")
        if self.start.shape != self.stop.shape or self.start.device != self.stop.device:
            raise InputError(
                f"KeyRange.start and stop must agree, got {list(self.start.shape)} on {self.start.device} "
                f"and {list(self.stop.shape)} on {self.stop.device}"
            )

    @property
    def num_rows(self) -> int:
        """T."""
        return self.start.shape[0]

    def reaching(self, reach: Tensor | None) -> "KeyRange":
        """The same ranges, with what is known of them on the host: their `reach`, or more."""
        known = replace(self)
        object.__setattr__(known, "reach", reach)
        return known

    def row_slice(self, first: int, stop: int) -> "KeyRange":
        """The ranges of query rows `first .. stop - 1`."""
        return replace(self, start=self.start[first:stop], stop=self.stop[first:stop])

    def last(self, count: int) -> "KeyRange":
        """Each row's last `count` keys, or all where it has fewer: sliding-window attention, the row's own key counted.

        Raises InputError for a count below 1.
        """
        _require_int("count", count, 1)
        return replace(self, start=torch.maximum(self.start, self.stop - count)).reaching(self.reach)

    def mask(self, num_keys: int) -> Tensor:
        """[T, num_keys] bool, True where the row may read the key. For small sizes: tests and references."""
        column = torch.arange(num_keys, device=self.start.device, dtype=torch.int32)
        return (column >= self.start[:, None]) & (column < self.stop[:, None])

    def lengths(self) -> Tensor:
        """[T] int32: how many keys each row may read."""
        return (self.stop - self.start).clamp(min=0)

    def num_pairs(self) -> int:
        """Pairs of a row and a key it may read: what scores and dense attention cost. Waits for the device."""
        return int(self.lengths().sum(dtype=torch.int64))

    def to(self, device: torch.device | str) -> "KeyRange":
        """A copy on `device`; does not wait for a transfer to a GPU."""
        return replace(self, start=_send(self.start, device), stop=_send(self.stop, device)).reaching(self.reach)


@dataclass(frozen=True)
class Layout:
    """Everything a model must know about how one microbatch is laid out. Built on the host, from plain integers.

    keys: KeyRange of my T rows, in global key rows 0 .. S-1.
    positions: [T] int64, place in the document (for RoPE), 0 on padding.
    rows: [T] int64, global row of each of my rows.
    key_order: [S] int64: `gathered[key_order]` puts rows gathered rank by rank into global order.
    key_order_inverse: [S] int64: `global_[key_order_inverse]` undoes it; its rank-th part equals that rank's `rows`.
    real_rows: [T] bool, False on padding. num_real_rows: their count on this rank (host integer).
    num_keys: S. lengths: real length of each document of the whole layout (host integers).
    whole: of a shard of rows, the layout that it was cut from. dealt: the number of shards of `deal_rows`, else 1.
    """

    keys: KeyRange
    positions: Tensor
    rows: Tensor
    key_order: Tensor
    key_order_inverse: Tensor
    real_rows: Tensor
    num_real_rows: int
    num_keys: int
    lengths: tuple[int, ...]
    whole: "Layout | None" = None
    dealt: int = 1

    @property
    def every_row_has_a_key(self) -> bool:
        """Proved from integers: this rank holds no padding. False promises nothing."""
        return self.keys.every_row_has_a_key

    @classmethod
    def causal(cls, tokens: int, *, batch: int = 1, cp_size: int = 1, cp_rank: int = 0) -> "Layout":
        """`batch` sequences of `tokens` tokens each, folded end to end; row t sees its sequence up to itself.

        Under context parallelism each sequence is cut into 2 * cp_size chunks and rank r owns chunks r and
        2 * cp_size - 1 - r, so `tokens` must be a multiple of 2 * cp_size.
        """
        _require_int("tokens", tokens, 0)
        _require_int("batch", batch, 0)
        _require_int("cp_size", cp_size, 1)
        if cp_size > 1 and tokens % (2 * cp_size):
            raise InputError(f"tokens={tokens} must be a multiple of 2 * cp_size={2 * cp_size}; pad each sequence")
        return cls.packed([tokens] * batch, cp_size=cp_size, cp_rank=cp_rank)

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int],
        *,
        padded: Sequence[int] | None = None,
        total: int | None = None,
        side: Literal["right", "left"] = "right",
        cp_size: int = 1,
        cp_rank: int = 0,
        top_k: int | None = None,
    ) -> "Layout":
        """Documents laid end to end.

        lengths: real tokens of each document; 0 is fine.
        padded: rows each document occupies (default: its length; multiples of 2 * cp_size when cp_size > 1).
        total: rows of the whole buffer (default: sum of `padded`; a multiple of cp_size). Rows past the last document
            are padding, numbered rank by rank.
        side: where padding sits inside a document's rows.
        top_k: keys that attention keeps of those a row may read. None: rank r owns chunks r and 2 * cp_size - 1 - r of
            every document, so that the documents' first rows, which have few keys to keep, are all rank 0's. With it
            each such pair of chunks goes to the rank that keeps least so far. Give all ranks the same.
        """
        real = _integers("lengths", lengths)
        if top_k is not None:
            _require_int("top_k", top_k, 1)
        slots = real if padded is None else _integers("padded", padded)
        if side not in ("right", "left"):
            raise InputError(f"side={side!r} must be 'right' or 'left'")
        if len(slots) != len(real):
            raise InputError(f"padded has {len(slots)} entries for {len(real)} lengths; give one each")
        if (short := np.flatnonzero(slots < real)).size:
            i = int(short[0])
            raise InputError(f"padded[{i}]={slots[i]} is shorter than lengths[{i}]={real[i]}")
        offset = slots - real if side == "left" else np.zeros_like(real)
        return cls._build(real, slots, offset, total, cp_size, cp_rank, top_k)

    @classmethod
    def continuation(cls, cached: int, tokens: int = 1) -> "Layout":
        """`tokens` further rows of one document whose first `cached` keys are already there (decoding)."""
        _require_int("cached", cached, 0)
        _require_int("tokens", tokens, 0)
        whole = cls.packed([cached + tokens])
        return whole._take(slice(cached, cached + tokens))

    @classmethod
    def from_attention_mask(cls, mask: Tensor) -> "Layout":
        """A padded batch [B, S], folded: 1 or True marks real tokens. Reads the mask: one device sync.

        Each sample's real tokens must stand together; padding may sit left, right or both. Raises InputError for holes
        and for masks of more dimensions, which a KeyRange cannot say.
        """
        if mask.dim() != 2:
            raise InputError(f"mask must be [B, S], got {list(mask.shape)}: a KeyRange cannot say an arbitrary mask")
        host = mask.detach().cpu()
        if not ((host == 0) | (host == 1)).all():
            raise InputError("mask must hold only 0 and 1 (or booleans); additive masks cannot be read")
        kept = host.bool().numpy()
        batch, width = kept.shape
        real = kept.sum(1, dtype=np.int64)
        first = kept.argmax(1).astype(np.int64) if width else np.zeros(batch, np.int64)
        last = width - kept[:, ::-1].argmax(1) if width else first
        if (holes := np.flatnonzero((real > 0) & (last - first != real))).size:
            raise InputError(f"mask[{int(holes[0])}] has a hole between real tokens; a KeyRange cannot say that")
        return cls._build(real, np.full(batch, width, np.int64), first).to(mask.device)

    @classmethod
    def from_position_ids(cls, ids: Tensor) -> "Layout":
        """Packed documents from positions that restart at 0: ids [T] or [B, S]. Reads the ids: one device sync.

        Every row is taken as real. Raises InputError where positions jump without restarting at 0.
        """
        if ids.dim() not in (1, 2):
            raise InputError(f"ids must be [T] or [B, S], got {list(ids.shape)}")
        host = ids.detach().cpu().long().numpy().reshape(-1 if ids.dim() == 1 else ids.shape)
        flat = host.reshape(-1)
        starts = np.ones(host.shape, bool)
        starts[..., 1:] = host[..., 1:] != host[..., :-1] + 1
        where = np.flatnonzero(starts.reshape(-1))
        if (wrong := where[flat[where] != 0]).size:
            row = int(wrong[0])
            raise InputError(f"ids jump to {flat[row]} at row {row}; a document must start at position 0")
        real = np.diff(np.append(where, flat.size)).astype(np.int64)
        return cls._build(real, real, np.zeros_like(real)).to(ids.device)

    def shard_rows(self, rank: int, size: int) -> "Layout":
        """The rank-th of `size` equal runs of my rows (sequence parallelism); the keys stay whole.

        Later rows of a document read more, so runs are unequal work: see `deal_rows`.
        """
        _require_int("rank", rank, 0)
        step = self._run(size)
        if rank >= size:
            raise InputError(f"rank={rank} must be below size={size}")
        return self._take(slice(rank * step, (rank + 1) * step))

    def deal_rows(self, rank: int, size: int) -> "Layout":
        """Every size-th of my rows from the rank-th on: unlike runs, such shards read as much (sequence parallelism).

        It remembers this layout as `whole`: attention heads read all rows. Its key order is that of rows gathered shard
        by shard, over all ranks. Raises InputError where `size` does not divide the rows, and for a shard.
        """
        _require_int("rank", rank, 0)
        step = self._run(size)
        if rank >= size:
            raise InputError(f"rank={rank} must be below size={size}")
        if self.whole is not None:
            raise InputError("the layout is a shard of rows already; deal the rows of the layout that it was cut from")
        inverse = self.key_order_inverse.view(-1, max(step, 1), size).transpose(1, 2).reshape(-1)
        order = torch.empty_like(inverse)
        order[inverse] = torch.arange(len(inverse), device=inverse.device)
        part = self._take(slice(rank, None, size))
        return replace(part, key_order=order, key_order_inverse=inverse, whole=self, dealt=size)

    def last(self, count: int) -> "Layout":
        """The same rows, each reading its last `count` keys only: see `KeyRange.last`."""
        return replace(self, keys=self.keys.last(count), whole=self.whole and self.whole.last(count))

    def to(self, device: torch.device | str) -> "Layout":
        """A copy on `device`; does not wait for a transfer to a GPU."""
        moved = {name: _send(getattr(self, name), device) for name in _TENSORS}
        return replace(self, keys=self.keys.to(device), whole=self.whole and self.whole.to(device), **moved)

    def copy_(self, other: "Layout") -> "Layout":
        """Refresh every table in place from a layout of the same geometry, for static buffers under CUDA graphs.

        Legal only after the backward of every microbatch that read this layout: backwards read it again.
        Raises InputError where sizes differ, or where `other` lacks a certificate that this layout's graph relied on.
        """
        mine, theirs = (self.rows.shape[0], self.num_keys), (other.rows.shape[0], other.num_keys)
        if mine != theirs:
            raise InputError(f"other has {theirs[0]} rows and {theirs[1]} keys, this layout {mine[0]} and {mine[1]}")
        if self.dealt != other.dealt:
            raise InputError(f"other has dealt={other.dealt}, this layout {self.dealt}; make them alike")
        if self.every_row_has_a_key and not other.every_row_has_a_key:
            raise InputError("other.every_row_has_a_key is False; a graph captured with True must not read it")
        if self.whole is not None:
            if other.whole is None:
                raise InputError("other is no shard of rows, but this layout is one; give other.shard_rows(rank, size)")
            self.whole.copy_(other.whole)
        for name in _TENSORS:
            getattr(self, name).copy_(getattr(other, name))
        self.keys.start.copy_(other.keys.start)
        self.keys.stop.copy_(other.keys.stop)
        object.__setattr__(self.keys, "reach", other.keys.reach)
        for name in ("num_real_rows", "lengths"):
            object.__setattr__(self, name, getattr(other, name))
        return self

    def _run(self, size: int) -> int:
        """Rows in each of `size` equal runs."""
        _require_int("size", size, 1)
        count = self.rows.shape[0]
        if count % size:
            raise InputError(f"size={size} must divide the {count} rows; pad the pack to a multiple of it")
        return count // size

    def _take(self, part: slice) -> "Layout":
        """My rows `part`, keys unchanged. Rebuilds the host integers, so it needs the layout on the CPU."""
        real = self.real_rows[part].contiguous()
        count = int(real.sum())
        start, stop = self.keys.start[part].contiguous(), self.keys.stop[part].contiguous()
        return replace(
            self,
            keys=KeyRange(start, stop, count == real.shape[0]),
            positions=self.positions[part].contiguous(),
            rows=self.rows[part].contiguous(),
            real_rows=real,
            num_real_rows=count,
            whole=None,
            dealt=1,
        )

    @classmethod
    def _build(
        cls,
        real: np.ndarray,
        slots: np.ndarray,
        offset: np.ndarray,
        total: int | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        top_k: int | None = None,
    ) -> "Layout":
        """Documents of `real` tokens, `offset` rows into `slots` rows each, on rank `cp_rank` of `cp_size`."""
        slot_start = np.cumsum(slots) - slots
        covered = int(slots.sum())
        total = covered if total is None else total
        _check_sizes(slots, covered, total, cp_size, cp_rank)
        pairs = np.repeat(np.arange(cp_size)[:, None], len(slots), 1)
        if top_k is not None:
            pairs = _even_pairs(_kept_by_pair(real, slots, offset, cp_size, top_k))
        starts, counts = _zigzag_chunks(slot_start, slots, covered, total, pairs)

        document = np.concatenate([np.repeat(np.arange(len(real)), 2), [-1]])  # of each chunk; -1 is the tail
        document = np.repeat(document, counts[cp_rank])
        rows = _ranges(starts[cp_rank], counts[cp_rank])
        first = np.append(slot_start + offset, total)[document]  # the tail's "document" starts behind every row
        last = np.append(slot_start + offset + real, total)[document]
        is_real = (rows >= first) & (rows < last)

        flat_start, flat_count = starts.reshape(-1), counts.reshape(-1)
        by_row = np.argsort(flat_start, kind="stable")
        gathered = np.cumsum(flat_count) - flat_count
        key_order = _ranges(gathered[by_row], flat_count[by_row])
        inverse = _ranges(flat_start, flat_count)
        if not np.array_equal(key_order[inverse], np.arange(total)):
            raise AssertionError("the key order is not a bijection")
        start, stop = _int32(np.where(is_real, first, rows)), _int32(np.where(is_real, rows + 1, rows))
        return cls(
            keys=KeyRange(start, stop, every_row_has_a_key=bool(is_real.all())).reaching(_reach(start, stop)),
            positions=torch.from_numpy(np.where(is_real, rows - first, 0)),
            rows=torch.from_numpy(rows),
            key_order=torch.from_numpy(key_order),
            key_order_inverse=torch.from_numpy(inverse),
            real_rows=torch.from_numpy(is_real),
            num_real_rows=int(is_real.sum()),
            num_keys=total,
            lengths=tuple(real.tolist()),
        )


def dealt(x: Tensor, shards: int) -> Tensor:
    """x [R, ...] with the rows of each shard of `Layout.deal_rows` together, shard by shard."""
    return x.reshape(x.shape[0] // shards, shards, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def dealt_back(x: Tensor, shards: int) -> Tensor:
    """The inverse of `dealt`."""
    return x.view(shards, x.shape[0] // shards, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


_TENSORS = tuple(f.name for f in fields(Layout) if f.type is Tensor)


def _kept_by_pair(real: np.ndarray, slots: np.ndarray, offset: np.ndarray, cp_size: int, top_k: int) -> np.ndarray:
    """[N, cp_size]: keys that the rows of chunks i and 2 * cp_size - 1 - i keep, of each document and i."""
    edges = np.arange(2 * cp_size + 1) * (slots // (2 * cp_size))[:, None] - offset[:, None]
    rows = np.clip(edges, 0, real[:, None])  # real ones before each chunk's edge
    rising = np.minimum(rows, top_k)
    chunks = np.diff(rising * (rising + 1) // 2 + top_k * (rows - rising))
    return chunks[:, :cp_size] + chunks[:, : cp_size - 1 : -1]


def _even_pairs(kept: np.ndarray) -> np.ndarray:
    """[cp_size, N]: which pair of chunks each rank owns of each document, so that ranks keep about as much.

    Documents whose pairs differ most come first; of each, the heaviest pair goes to the rank that has least. Ties leave
    pair i with rank i.
    """
    size = kept.shape[1]
    pairs = np.repeat(np.arange(size)[:, None], len(kept), 1)
    loads = np.zeros(size, np.int64)
    spread = kept.max(1) - kept.min(1)
    for document in np.argsort(-spread, kind="stable")[: np.count_nonzero(spread)]:
        heaviest = size - 1 - np.argsort(-kept[document, ::-1], kind="stable")
        lightest = size - 1 - np.argsort(loads[::-1], kind="stable")
        pairs[lightest, document] = heaviest
        loads[lightest] += kept[document, heaviest]
    return pairs


def _zigzag_chunks(
    slot_start: np.ndarray, slots: np.ndarray, covered: int, total: int, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """First row and row count of each rank's chunks, both [cp_size, 2 N + 1]: front and back of each document, tail.

    pairs: [cp_size, N], i of chunks i and 2 * cp_size - 1 - i. One rank owns documents whole: its "back" chunks are
    empty, so odd lengths need no padding.
    """
    cp_size = len(pairs)
    half = slots // (2 * cp_size) if cp_size > 1 else slots
    front = slot_start + pairs * half
    back = slot_start + slots - (pairs + 1) * half if cp_size > 1 else front + slots
    tail = (total - covered) // cp_size
    starts = np.stack([front, back], axis=2).reshape(cp_size, -1)
    counts = np.stack([half, half if cp_size > 1 else np.zeros_like(half)], axis=1).reshape(-1)
    starts = np.concatenate([starts, covered + np.arange(cp_size)[:, None] * tail], axis=1)
    return starts, np.tile(np.append(counts, tail), (cp_size, 1))


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate `starts[i] .. starts[i] + counts[i] - 1`."""
    placed = np.cumsum(counts) - counts
    return np.repeat(starts - placed, counts) + np.arange(int(counts.sum()))


def _reach(start: Tensor, stop: Tensor) -> Tensor:
    """Of ranges on the host: see `KeyRange`."""
    first, last = start.numpy(), stop.numpy()
    reads, behind = last > first, -len(first) % REACH_ROWS
    first = np.pad(np.where(reads, first, 2**31 - 1), (0, behind), constant_values=2**31 - 1)
    last = np.pad(np.where(reads, last, 0), (0, behind))
    most = last.reshape(-1, REACH_ROWS).max(1, initial=0)
    least = np.minimum(first.reshape(-1, REACH_ROWS).min(1, initial=2**31 - 1), most)
    return _int32(np.stack([least, most], 1))


def _send(x: Tensor, device: torch.device | str) -> Tensor:
    return x.to(device, non_blocking=torch.device(device).type != "cpu")  # the host may read a copy at once


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _require_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{name}={value!r} must be an integer of at least {least}")


def _integers(name: str, values: Sequence[int]) -> np.ndarray:
    if isinstance(values, Tensor):
        raise InputError(f"{name} must be host integers, got a tensor: a layout is built without device syncs")
    for i, value in enumerate(values):
        _require_int(f"{name}[{i}]", value, 0)
    return np.asarray(values, dtype=np.int64).reshape(-1)


def _check_sizes(slots: np.ndarray, covered: int, total: int, cp_size: int, cp_rank: int) -> None:
    _require_int("cp_size", cp_size, 1)
    _require_int("cp_rank", cp_rank, 0)
    _require_int("total", total, 0)
    if cp_rank >= cp_size:
        raise InputError(f"cp_rank={cp_rank} must be below cp_size={cp_size}")
    if total < covered:
        raise InputError(f"total={total} is smaller than the {covered} rows of the documents")
    if total >= 2**31:
        raise InputError(f"total={total} does not fit int32 key rows; split the pack")
    if cp_size > 1 and (uneven := np.flatnonzero(slots % (2 * cp_size))).size:
        i = int(uneven[0])
        raise InputError(f"document {i} occupies {slots[i]} rows, not a multiple of 2*cp_size={2 * cp_size}; pad it")
    if total % cp_size:
        raise InputError(f"total={total} must be a multiple of cp_size={cp_size}; pad the pack")
