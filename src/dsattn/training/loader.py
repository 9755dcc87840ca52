"""What each rank gets of a step's packs: the same step whatever the ranks, dealt out and padded.

Every rank reads the same packs of one stream, so no text ever depends on the mesh, and keeps its own part:

    packs of a step    dealt to the ranks of `batch` by visible pairs of rows and keys: as many for each, the heaviest
                       first, each to the rank that has least so far
    micro-batches      of so many packs, in that order: those that run at one time weigh about the same
    documents          padded to a multiple of 2 * cp, each cut into 2 * cp chunks: rank r of cp has chunks r and
                       2 * cp - 1 - r, so that all have as many pairs
    rows               padded to a multiple of cp * tp; rank t of tp has every tp-th of its cp rank's rows, from t on
                       (sequence parallelism), or all of them

Padding stands behind documents and behind the last of them; it is never read and counts nowhere.
Letters: T rows of a rank, N depths of multi-token prediction.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from dsattn.accounting import visible_pairs
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.mtp import look_ahead
from dsattn.model.stage import MicroBatch
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training.data import IGNORED_LABEL, Pack, fold


def deal(packs: Sequence[Pack], ranks: int) -> list[list[Pack]]:
    """As many packs for each of `ranks`, balanced by visible pairs; one rank gets them in their order.

    Raises InputError where they do not come out even.
    """
    if len(packs) % ranks:
        raise InputError(f"{len(packs)} packs cannot be dealt to {ranks} ranks evenly; give a multiple")
    if ranks == 1:
        return [list(packs)]
    weigh = {id(pack): visible_pairs(pack.layout.lengths) for pack in packs}
    hands: list[list[Pack]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for pack in sorted(packs, key=lambda pack: -weigh[id(pack)]):
        rank = min((rank for rank in range(ranks) if len(hands[rank]) < len(packs) // ranks), key=loads.__getitem__)
        hands[rank].append(pack)
        loads[rank] += weigh[id(pack)]
    return hands


def micro_batches(packs: Sequence[Pack], mesh: ParallelMesh, size: int, depths: int = 0) -> list[MicroBatch]:
    """This rank's micro-batches of a global batch, on the host.

    packs: the whole global batch, the same on every rank. size: packs in one micro-batch, or all of a rank where it has
    fewer. depths: N; tokens and labels ahead are looked up here where a rank has a part of the rows.
    """
    mine = deal(packs, mesh.size("batch"))[mesh.rank("batch")]
    size = min(size, len(mine))
    parts = [mine[first : first + size] for first in range(0, len(mine), size)]
    cp, tp = mesh.size("cp"), mesh.size("tp")
    if cp == tp == 1:
        return [_whole(fold(part)) for part in parts]
    return [place(part, mesh, depths) for part in parts]


def place(packs: Sequence[Pack], mesh: ParallelMesh, depths: int = 0) -> MicroBatch:
    """This rank's rows of one micro-batch: its documents padded and cut for cp, its rows for tp."""
    cp, tp = mesh.size("cp"), mesh.size("tp")
    lengths = [length for pack in packs for length in pack.layout.lengths]
    slots = [_up(length, 2 * cp) if cp > 1 else length for length in lengths]
    total = max(_up(sum(slots), cp * tp), cp * tp)
    whole = Layout.packed(lengths, padded=slots, total=total)
    tokens, labels = torch.zeros(total, dtype=torch.int64), torch.full((total,), IGNORED_LABEL)
    tokens[whole.real_rows] = torch.cat([pack.tokens[pack.layout.real_rows] for pack in packs])
    labels[whole.real_rows] = torch.cat([pack.labels[pack.layout.real_rows] for pack in packs])
    layout = whole
    if cp > 1:
        layout = Layout.packed(lengths, padded=slots, total=total, cp_size=cp, cp_rank=mesh.rank("cp"))
    if tp > 1 and mesh.config.sequence_parallel:
        layout = layout.deal_rows(mesh.rank("tp"), tp)
    rows = layout.rows
    if not depths:
        return MicroBatch(tokens[rows], labels[rows], layout)
    tokens_ahead, labels_ahead = (look_ahead(values, whole, depths)[:, rows] for values in (tokens, labels))
    return MicroBatch(tokens[rows], labels[rows], layout, tokens_ahead, labels_ahead)


def to_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """A copy on `device`; does not wait for the transfer."""
    names = ("tokens", "labels", "tokens_ahead", "labels_ahead")
    moved = {name: value.to(device, non_blocking=True) for name in names if (value := getattr(micro, name)) is not None}
    return replace(micro, layout=micro.layout.to(device), **moved)


def _whole(pack: Pack) -> MicroBatch:
    return MicroBatch(pack.tokens, pack.labels, pack.layout)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
