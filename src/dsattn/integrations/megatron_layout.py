"""Which keys Megatron's rows may read, from its own description of a micro-batch and without a device sync.

A `Layout` is built from host integers. Megatron's `cu_seqlens` live on the GPU, so the same tables are made here by a
few small kernels of fixed shape: nothing waits, and nothing is kept from layer to layer.
Letters: s query rows of one sample on this rank, S keys of one sample in global order, b samples, N documents,
T = b * s rows and b * S keys, samples one after the other.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.integrations.megatron_config import Options
from dsattn.keys import KeyRange


@dataclass(frozen=True)
class Groups:
    """Sizes, ranks and groups of one call. local: the queries are this tensor-parallel rank's rows alone."""

    cp: Any
    cp_size: int
    cp_rank: int
    tp: Any
    tp_size: int
    tp_rank: int
    sequence_parallel: bool
    local: bool
    query_rows: int

    @classmethod
    def of(cls, config: Any, collection: Any, micro_batch: Any, query_rows: int, rows: int) -> "Groups":
        """Of a call with `query_rows` query rows and `rows` rows of hidden states.

        collection: Megatron's process groups. micro_batch: its packed parameters, whose own context-parallel group,
        with `local_cp_size`, goes before the standing one; or None.
        """
        cp, tp = collection.cp, collection.tp
        own_size = getattr(micro_batch, "local_cp_size", None)
        if own_size is not None:
            if own_size > 1 and micro_batch.cp_group is None:
                raise InputError(f"packed_seq_params.local_cp_size={own_size} needs its cp_group")
            cp = micro_batch.cp_group if own_size > 1 else None
        cp_size, tp_size = 1 if cp is None else cp.size(), 1 if tp is None else tp.size()
        sequence_parallel = config.sequence_parallel and tp_size > 1
        if query_rows not in (rows, rows * tp_size if sequence_parallel else rows):
            raise InputError(
                f"there are {query_rows} query rows for {rows} of x on each of {tp_size} tensor-parallel ranks"
            )
        return cls(
            cp=cp,
            cp_size=cp_size,
            cp_rank=0 if cp is None else cp.rank(),
            tp=tp,
            tp_size=tp_size,
            tp_rank=0 if tp is None else tp.rank(),
            sequence_parallel=sequence_parallel,
            local=sequence_parallel and query_rows == rows,
            query_rows=query_rows,
        )

    @property
    def full_rows(self) -> int:
        """Rows of one sample on this context-parallel rank."""
        return self.query_rows * (self.tp_size if self.local else 1)

    @property
    def own_rows(self) -> slice:
        """Of the full rows, those of this tensor-parallel rank."""
        each = self.full_rows // self.tp_size
        return slice(self.tp_rank * each, (self.tp_rank + 1) * each)


@dataclass(frozen=True)
class Rows:
    """What a layer must know about its rows.

    keys: ranges of the T rows in keys of global order. positions: [s] int64, for RoPE, restarting in every document.
    real: [T] bool, False on padding.
    total: real rows of the micro-batch over all context-parallel ranks, a number or a 0-d tensor.
    order: [S] int64, what puts keys that were gathered rank by rank into global order; inverse: [S] int64, its inverse.
    Both are None without context parallelism.
    """

    keys: KeyRange
    positions: Tensor
    real: Tensor
    total: int | Tensor
    order: Tensor | None = None
    inverse: Tensor | None = None

    def own(self, groups: Groups) -> "Rows":
        """Where queries are a tensor-parallel rank's alone, of one sample: its rows. Keys and total stay whole."""
        if not groups.local:
            return self
        if self.real.shape != self.positions.shape:
            raise InputError(
                "a tensor-parallel rank's own query rows need a micro-batch of one sample; pack the samples"
            )
        mine = groups.own_rows
        keys = self.keys.row_slice(mine.start, mine.stop)
        return replace(self, keys=keys, positions=self.positions[mine], real=self.real[mine])


def rows_of(
    batch: int,
    device: torch.device,
    groups: Groups,
    micro_batch: Any,
    options: Options,
    position_ids: Tensor | None = None,
) -> Rows:
    """Of all rows of the context-parallel rank, also where the queries are a tensor-parallel rank's alone.

    position_ids are read where Megatron reads them: for samples split over context-parallel ranks, not packed.
    """
    cp = {"cp_size": groups.cp_size, "cp_rank": groups.cp_rank}
    if getattr(micro_batch, "qkv_format", None) != "thd":
        places = position_ids if groups.cp_size > 1 else None
        return causal_rows(groups.full_rows, batch, device, positions=places, **cp)
    lengths, slots = micro_batch.cu_seqlens_q, micro_batch.cu_seqlens_q_padded
    slots = lengths if slots is None else slots
    lengths = slots if lengths is None else lengths
    if lengths is None:
        raise InputError("packed_seq_params has neither cu_seqlens_q nor cu_seqlens_q_padded; give one")
    reads = options.rows == "megatron"
    return packed_rows(lengths.to(device), slots.to(device), groups.full_rows, padding_reads=reads, **cp)


def causal_rows(
    count: int,
    batch: int,
    device: torch.device,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
) -> Rows:
    """`batch` samples of cp_size * count tokens; each rank holds `count` of a sample, zigzag.

    positions: [count] or [batch, count], in place of the zigzag's; samples must agree, the first one is read.
    """
    if cp_size > 1 and count % 2:
        raise InputError(f"{count} rows on each of {cp_size} context-parallel ranks: zigzag needs an even number")
    if positions is None:
        place = _zigzag(count, cp_size, cp_rank, device)
    elif positions.shape[-1] != count:
        raise InputError(f"position_ids {list(positions.shape)} must end with the {count} rows of this rank")
    else:
        place = positions.reshape(-1, count)[0].to(device=device, dtype=torch.int64)
    first = torch.arange(batch, device=device)[:, None] * (count * cp_size)
    stop = (first + place + 1).flatten().int()
    keys = KeyRange(first.expand(-1, count).flatten().int(), stop, every_row_has_a_key=True)
    real = torch.ones(batch * count, dtype=torch.bool, device=device)
    order = inverse = None
    if cp_size > 1:
        inverse = torch.cat([_zigzag(count, cp_size, rank, device) for rank in range(cp_size)])
        order = inverse.argsort()
    return Rows(keys, place, real, batch * count * cp_size, order, inverse)


def packed_rows(
    lengths: Tensor,
    slots: Tensor,
    count: int,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    padding_reads: bool = False,
) -> Rows:
    """Documents laid end to end, zigzag over the ranks; rows past the last one are padding.

    lengths: [N + 1] cumulative real lengths (`cu_seqlens_q`). slots: [N + 1] cumulative rows that documents occupy
    (`cu_seqlens_q_padded`, or `lengths` again), multiples of 2 * cp_size under context parallelism. count: rows of this
    rank. padding_reads: padding counts as real and reads what stands before it in its slot, as in Megatron Core.
    Raises InputError where sizes do not fit; tensors on a GPU are not looked into.
    """
    if lengths.dim() != 1 or lengths.shape != slots.shape or lengths.shape[0] < 2:
        raise InputError(
            f"cu_seqlens {list(lengths.shape)} and cu_seqlens_padded {list(slots.shape)} must both be [documents + 1]"
        )
    lengths, slots = lengths.long(), slots.long()
    _check_on_host(slots, count, cp_size)
    row, document = _owned(slots, count, cp_size, cp_rank)
    first = slots[document]
    offset = row - first
    tail = document == slots.shape[0] - 1
    real = offset < _lengths(lengths)[document]
    if padding_reads:
        real, total = torch.ones_like(real), count * cp_size
    else:
        total = lengths[-1] - lengths[0]
    keys = KeyRange(first.int(), torch.where(real, row + 1, first).int(), every_row_has_a_key=padding_reads)
    order = inverse = None
    if cp_size > 1:
        inverse = torch.cat([_owned(slots, count, cp_size, rank)[0] for rank in range(cp_size)])
        order = inverse.argsort()
    return Rows(keys, torch.where(tail, 0, offset), real, total, order, inverse)


def _zigzag(count: int, cp_size: int, cp_rank: int, device: torch.device) -> Tensor:
    """[count]: the places that one rank owns of a sample: chunks cp_rank and 2 cp_size - 1 - cp_rank."""
    if cp_size == 1:
        return torch.arange(count, device=device)
    half = count // 2
    chunks = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return torch.cat([torch.arange(chunk * half, (chunk + 1) * half, device=device) for chunk in chunks])


def _owned(slots: Tensor, count: int, cp_size: int, cp_rank: int) -> tuple[Tensor, Tensor]:
    """(global row, document) of each of a rank's rows; the tail's document is N, and its rows go rank by rank."""
    local = slots // cp_size
    row = torch.arange(count, device=slots.device)
    document = torch.searchsorted(local[1:].contiguous(), row, right=True)
    into = row - local[document]
    if cp_size > 1:
        slot = _lengths(slots)[document]
        half = slot // (2 * cp_size)
        front, back = cp_rank * half + into, slot - (cp_rank + 2) * half + into
        inside = torch.where(into < half, front, back)
        into = torch.where(document == slots.shape[0] - 1, cp_rank * (count - local[-1]) + into, inside)
    return slots[document] + into, document


def _lengths(cumulative: Tensor) -> Tensor:
    """[N + 1]: of each document, and 0 for the tail."""
    return torch.cat((cumulative.diff(), cumulative.new_zeros(1)))


def _check_on_host(slots: Tensor, count: int, cp_size: int) -> None:
    if slots.device.type != "cpu":
        return
    if slots[-1] > count * cp_size:
        raise InputError(f"cu_seqlens end at {int(slots[-1])}, beyond the {count} rows of each of {cp_size} ranks")
    uneven = slots.diff() % (2 * cp_size) != 0
    if cp_size > 1 and uneven.any():
        size = int(slots.diff()[uneven][0])
        raise InputError(f"a document occupies {size} rows, not a multiple of 2 * cp_size = {2 * cp_size}; pad it")


class InOrder(torch.autograd.Function):
    """x[order]; the backward gathers by the inverse, where index_select's own would add atomically."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """x: [S, ...]; order and inverse: [S]."""
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of x."""
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def fold(x: Tensor) -> Tensor:
    """[s, b, ...] -> [b * s, ...]; a copy where there are several samples."""
    return x.transpose(0, 1).flatten(0, 1)


def unfold(x: Tensor, batch: int) -> Tensor:
    """[b * s, ...] -> [s, b, ...]."""
    return x.unflatten(0, (batch, -1)).transpose(0, 1)
