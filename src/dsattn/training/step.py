"""One optimiser step: losses and gradients of a global batch, in micro-batches, on one rank or many.

Losses are sums divided by counts of the whole global batch (real labels for the language model, real rows for the
indexers), so neither the split into micro-batches, nor that over ranks, nor padding changes a gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.config import StageConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.model.stage import MicroBatch, Share, losses_of
from dsattn.parallel.apply import Parallel
from dsattn.parallel.fsdp import last_micro_batch
from dsattn.parallel.mesh import ParallelMesh
from dsattn.parallel.recompute import learning_pass
from dsattn.training.data import Pack
from dsattn.training.loader import micro_batches, to_device


@dataclass(frozen=True)
class Losses:
    """Of a whole global batch. lm: nats a label. kl: nats a row, by layer. rows: real rows.

    mtp: of each depth of multi-token prediction, over the labels of `lm`; depth k lacks the last k of each document.
    balance: the experts' sequence-wise loss, summed over layers; None where it was not asked for. loads: [E] on the
    device, tokens of each expert, by index of the layer that owns the experts. pairs: (row, visible key) pairs of each
    rank that has rows of its own, of `dp_replicate`, `dp_shard` and `cp`; what scores and dense attention cost.
    """

    lm: float
    kl: dict[int, float]
    rows: int
    mtp: tuple[float, ...] = ()
    balance: float | None = None
    loads: dict[int, Tensor] = field(default_factory=dict)
    pairs: tuple[int, ...] = ()

    @property
    def rank_imbalance(self) -> float | None:
        """(most pairs of a rank - mean pairs) / mean pairs; None for one rank."""
        if len(self.pairs) < 2:
            return None
        mean = sum(self.pairs) / len(self.pairs)
        return max(self.pairs) / mean - 1 if mean else 0.0

    def named(self) -> dict[str, float]:
        """Each loss, by what it is called in a message."""
        values = {"the language-model loss": self.lm}
        values |= {f"the loss of MTP depth {depth}": value for depth, value in enumerate(self.mtp, 1)}
        values |= {} if self.balance is None else {"the experts' balance loss": self.balance}
        return values | {f"the KL of layer {layer}": value for layer, value in self.kl.items()}

    @property
    def kl_mean(self) -> float | None:
        """Mean over the layers whose indexer learned."""
        return sum(self.kl.values()) / len(self.kl) if self.kl else None

    @property
    def max_violation(self) -> float | None:
        """(largest load - mean load) / mean load of a layer's experts, the mean over layers (arXiv 2408.15664)."""
        if not self.loads:
            return None
        loads = torch.stack(tuple(self.loads.values())).double()
        return (loads.amax(1) / loads.mean(1).clamp(min=1e-30) - 1).mean().item()


def compute(train: TrainConfig, device: torch.device) -> torch.autocast:
    """The arithmetic of `train.dtype` on `device`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=train.dtype == "bfloat16")


def accumulate_gradients(
    model: Decoder | Parallel, packs: Sequence[Pack], stage: StageConfig, train: TrainConfig
) -> Losses:
    """Add the gradients of one global batch to the parameters' `.grad`.

    model: on this process alone, or as `apply` put it on a mesh. packs: the whole global batch, on the host, the same
    on every rank; `train.packs_per_micro_batch` of a rank's go through the model at a time. Losses are those of the
    global batch on every rank. Collective.
    """
    whole = model if isinstance(model, Parallel) else _alone(model)
    device, mesh = whole.mesh.device, whole.mesh
    labels = max(sum(pack.num_labels for pack in packs), 1)
    rows = max(sum(pack.layout.num_real_rows for pack in packs), 1)
    config = whole.model.config
    depths, top_k = config.mtp.depths, config.dsa.indexer.top_k
    micros = micro_batches(packs, mesh, train.packs_per_micro_batch, depths, whole.groups, top_k)
    with whole.backwards():
        if whole.pipeline is not None:
            ready = [to_device(micro, device) for micro in micros]
            share = whole.pipeline.step(ready, (labels, rows), stage, train)
        else:
            share = Share.total(_micro_batches(whole, micros, stage, train, (labels, rows)))
    share, pairs = _everywhere(share, sum(micro.layout.keys.num_pairs() for micro in micros), mesh)
    return Losses(
        lm=0.0 if share.lm is None else share.lm.item(),
        kl={layer: value.item() for layer, value in share.kl.items()},
        rows=rows,
        mtp=() if share.mtp is None else tuple(share.mtp.tolist()),
        balance=None if share.balance is None else share.balance.item(),
        loads=dict(share.loads),
        pairs=pairs,
    )


def _alone(model: Decoder) -> Parallel:
    return Parallel(model, ParallelMesh(device=next(model.parameters()).device))


def _micro_batches(
    whole: Parallel, micros: Sequence[MicroBatch], stage: StageConfig, train: TrainConfig, divisors: tuple[int, int]
) -> Iterator[Share]:
    """Forward and backward of one after the other."""
    for number, micro in enumerate(micros, 1):
        last_micro_batch(whole.model, number == len(micros))
        yield _micro_batch(whole, to_device(micro, whole.mesh.device), stage, train, divisors)


def _micro_batch(
    whole: Parallel, micro: MicroBatch, stage: StageConfig, train: TrainConfig, divisors: tuple[int, int]
) -> Share:
    """A function of its own, so that nothing of it is held while the next one runs."""
    model, (labels, rows) = whole.model, divisors
    assert isinstance(model, Decoder), "stages go through their pipeline"
    with compute(train, micro.tokens.device):
        run = learning_pass(stage, train, rows, micro.ranks)
        out = model(micro.tokens, micro.layout, run, tokens_ahead=micro.tokens_ahead)
        losses, share = losses_of(model, out, micro, stage, labels, head=True)
    torch.stack(losses).sum().backward()
    return share


def _everywhere(share: Share, pairs: int, mesh: ParallelMesh) -> tuple[Share, tuple[int, ...]]:
    """The sum of all ranks' shares, and each rank's pairs, on every rank, by one all-reduce over each way rows are cut.

    Pipeline ranks have the same share. Ranks of tp have parts of it where sequence parallelism splits rows; without,
    each has all of it.
    """
    over = [mesh.group("loss"), mesh.group("tp") if mesh.config.sequence_parallel else None]
    groups = [group for group in over if group is not None]
    if not groups:
        return share, (pairs,)
    mine = share.values()
    each = [pairs * (rank == mesh.rank("loss")) for rank in range(mesh.size("loss"))]
    flat = [value.double().flatten() for value in mine.values()]
    flat = torch.cat([*flat, torch.tensor(each, dtype=torch.float64, device=mesh.device)])
    for group in groups:
        dist.all_reduce(flat, group=group)
    *parts, found = flat.split([*(value.numel() for value in mine.values()), len(each)])
    everywhere = Share.of(
        {key: part.view_as(value).to(value.dtype) for (key, value), part in zip(mine.items(), parts, strict=True)}
    )
    return everywhere, tuple(int(one) for one in found.tolist())
