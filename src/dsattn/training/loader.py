"""What each rank gets of a step's packs: the same step whatever the ranks, dealt out and padded.

Every rank reads the same packs of one stream, so no text ever depends on the mesh, and keeps its own part:

    packs of a step    dealt to the ranks of `batch` by visible pairs of rows and keys: as many for each, the heaviest
                       first, each to the rank that has least so far
    micro-batches      of so many packs, in that order: those that run at one time weigh about the same
    documents          padded to a multiple of 2 * cp, each cut into 2 * cp chunks: a rank of cp has chunks i and
                       2 * cp - 1 - i, so that all have as many pairs; which i, is such that all keep as many (first
                       rows of documents have few keys to keep), see `Layout.packed`; with `parallel.dynamic_cp` each
                       is cut over a group of cp ranks where smaller groups fit, see `spread`
    rows               padded to a multiple of cp * tp; rank t of tp has every tp-th of its cp rank's rows, from t on
                       (sequence parallelism), or all of them

Padding stands behind documents and behind the last of them; it is never read and counts nowhere.
Letters: T rows of a rank, N depths of multi-token prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsattn.accounting import visible_pairs
from dsattn.accounting.place import padded_rows
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.mtp import look_ahead
from dsattn.model.stage import MicroBatch
from dsattn.nn.ranks import Ranks
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training.data import IGNORED_LABEL, Pack, fold

Groups = Mapping[int, Ranks | None]
"""`Parallel.groups`."""
SKEW = 1.1
"""Visible pairs of the rank that has most, over their mean, up to which a micro-batch goes to groups."""


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


def micro_batches(
    packs: Sequence[Pack],
    mesh: ParallelMesh,
    size: int,
    depths: int = 0,
    groups: Groups | None = None,
    top_k: int | None = None,
) -> list[MicroBatch]:
    """This rank's micro-batches of a global batch, on the host.

    packs: the whole global batch, the same on every rank. size: packs in one micro-batch, or all of a rank where it has
    fewer. depths: N; tokens and labels ahead are looked up here where a rank has a part of the rows. groups, top_k: see
    `place`. Raises InputError without packs, and for a size below 1.
    """
    if not packs:
        raise InputError("packs is empty; a step needs at least one for each data-parallel rank")
    if size < 1:
        raise InputError(f"size={size} must be at least 1: packs in one micro-batch")
    mine = deal(packs, mesh.size("batch"))[mesh.rank("batch")]
    size = min(size, len(mine))
    parts = [mine[first : first + size] for first in range(0, len(mine), size)]
    cp, tp = mesh.size("cp"), mesh.size("tp")
    if cp == tp == 1:
        return [_whole(fold(part)) for part in parts]
    return [place(part, mesh, depths, groups, top_k) for part in parts]


def place(
    packs: Sequence[Pack],
    mesh: ParallelMesh,
    depths: int = 0,
    groups: Groups | None = None,
    top_k: int | None = None,
) -> MicroBatch:
    """This rank's rows of one micro-batch: its documents padded and cut for cp, its rows for tp.

    groups: `Pass.ranks` by number of cp ranks that may share a document, `cp` among them (`Parallel.groups`): what
    stands in the micro-batch. None: all of cp do, and the micro-batch says nothing of ranks. top_k: keys that a row
    keeps, by which chunks are dealt out; None: rank r has chunks r and 2 * cp - 1 - r.
    """
    groups = {mesh.size("cp"): None} if groups is None else groups
    tp, documents = mesh.size("tp"), _documents(packs)
    hands = spread([len(tokens) for tokens, _ in documents], mesh.size("cp"), tp, sorted(groups))
    size = mesh.size("cp") // len(hands)
    mine = [documents[index] for index in hands[mesh.rank("cp") // size]]
    lengths = [len(tokens) for tokens, _ in mine]
    slots, total = padded_rows(lengths, size, tp)
    whole = Layout.packed(lengths, padded=slots, total=total)
    tokens, labels = torch.zeros(total, dtype=torch.int64), torch.full((total,), IGNORED_LABEL)
    if mine:
        tokens[whole.real_rows], labels[whole.real_rows] = (torch.cat(parts) for parts in zip(*mine, strict=True))
    layout = whole
    if size > 1:
        rank = mesh.rank("cp") % size
        layout = Layout.packed(lengths, padded=slots, total=total, cp_size=size, cp_rank=rank, top_k=top_k)
    if tp > 1 and mesh.config.sequence_parallel:
        layout = layout.deal_rows(mesh.rank("tp"), tp)
    rows = layout.rows
    if not depths:
        return MicroBatch(tokens[rows], labels[rows], layout, ranks=groups[size])
    tokens_ahead, labels_ahead = (look_ahead(values, whole, depths)[:, rows] for values in (tokens, labels))
    return MicroBatch(tokens[rows], labels[rows], layout, tokens_ahead, labels_ahead, groups[size])


def spread(lengths: Sequence[int], cp: int, tp: int, sizes: Sequence[int]) -> list[list[int]]:
    """The documents, by index, of each group of neighbouring cp ranks; all groups have cp / their number of ranks.

    sizes: ranks that a group may have, ascending, the last one cp. The first one is taken by which no rank gets more
    rows than if all of cp shared every document, and none more than `SKEW` times the mean of visible pairs: small
    groups pad and gather less, and one that holds a long document alone would keep the others waiting.
    """
    most = padded_rows(lengths, cp, tp)[1] // cp
    for size in sizes[:-1]:
        hands, loads = _dealt(lengths, cp // size)
        rows = max(padded_rows([lengths[index] for index in hand], size, tp)[1] // size for hand in hands)
        if rows <= most and max(loads) * len(loads) <= SKEW * sum(loads):
            return hands
    return [list(range(len(lengths)))]


def _dealt(lengths: Sequence[int], groups: int) -> tuple[list[list[int]], list[int]]:
    """(documents of each group, in their order; its visible pairs): longest first, each to the least loaded."""
    hands: list[list[int]] = [[] for _ in range(groups)]
    loads = [0] * groups
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        group = loads.index(min(loads))
        hands[group].append(index)
        loads[group] += visible_pairs([lengths[index]])
    return [sorted(hand) for hand in hands], loads


def _documents(packs: Sequence[Pack]) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each."""
    found: list[tuple[Tensor, Tensor]] = []
    for pack in packs:
        real, lengths = pack.layout.real_rows, list(pack.layout.lengths)
        found += zip(pack.tokens[real].split(lengths), pack.labels[real].split(lengths), strict=True)
    return found


def to_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """A copy on `device`; does not wait for the transfer."""
    names = ("tokens", "labels", "tokens_ahead", "labels_ahead")
    moved = {name: value.to(device, non_blocking=True) for name in names if (value := getattr(micro, name)) is not None}
    return replace(micro, layout=micro.layout.to(device), **moved)


def _whole(pack: Pack) -> MicroBatch:
    return MicroBatch(pack.tokens, pack.labels, pack.layout)
