"""One optimiser step: losses and gradients of a global batch, in micro-batches, on one rank or many.

Losses are sums divided by counts of the whole global batch (real labels for the language model, real rows for the
indexers), so neither the split into micro-batches, nor that over ranks, nor padding changes a gradient.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.config import StageConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.model.stage import MicroBatch, Share
from dsattn.nn.state import Pass
from dsattn.parallel.apply import Parallel
from dsattn.parallel.fsdp import last_micro_batch
from dsattn.parallel.mesh import ParallelMesh
from dsattn.parallel.recompute import checkpoints
from dsattn.training.data import Pack
from dsattn.training.loader import micro_batches, to_device
from dsattn.training.stages import learns


@dataclass(frozen=True)
class Losses:
    """Of a whole global batch. lm: nats a label. kl: nats a row, by layer. rows: real rows.

    mtp: of each depth of multi-token prediction, over the labels of `lm`; depth k lacks the last k of each document.
    balance: the experts' sequence-wise loss, summed over layers; None where it was not asked for. loads: [E] on the
    device, tokens of each expert, by index of the layer that owns the experts.
    """

    lm: float
    kl: dict[int, float]
    rows: int
    mtp: tuple[float, ...] = ()
    balance: float | None = None
    loads: dict[int, Tensor] = field(default_factory=dict)

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
    depths = whole.model.config.mtp.depths
    micros = micro_batches(packs, mesh, train.packs_per_micro_batch, depths, whole.groups)
    if whole.pipeline is not None:
        ready = [to_device(micro, device) for micro in micros]
        share = whole.pipeline.step(ready, (labels, rows), stage, train)
    else:
        share = _total(_micro_batches(whole, micros, stage, train, (labels, rows)))
    whole.finish_gradients()
    share = _everywhere(share, mesh)
    return Losses(
        lm=0.0 if share.lm is None else share.lm.item(),
        kl={layer: value.item() for layer, value in share.kl.items()},
        rows=rows,
        mtp=() if share.mtp is None else tuple(share.mtp.tolist()),
        balance=None if share.balance is None else share.balance.item(),
        loads=dict(share.loads),
    )


def _alone(model: Decoder) -> Parallel:
    return Parallel(model, ParallelMesh(device=next(model.parameters()).device))


def _micro_batches(
    whole: Parallel, micros: Sequence[MicroBatch], stage: StageConfig, train: TrainConfig, divisors: tuple[int, int]
) -> Iterable[Share]:
    """Forward and backward of one after the other."""
    assert isinstance(whole.model, Decoder), "stages go through their pipeline"
    for number, micro in enumerate(micros, 1):
        last_micro_batch(whole.model, number == len(micros))
        yield _micro_batch(whole, to_device(micro, whole.mesh.device), stage, train, divisors)


def _micro_batch(
    whole: Parallel, micro: MicroBatch, stage: StageConfig, train: TrainConfig, divisors: tuple[int, int]
) -> Share:
    """Forward and backward."""
    labels, rows = divisors
    model = whole.model
    assert isinstance(model, Decoder), "stages go through their pipeline"
    backbone_learns, _ = learns(stage.mode)
    with compute(train, micro.tokens.device):
        balances = backbone_learns and stage.balance_weight > 0
        run = Pass(
            mode=stage.mode,
            kl_divisor=rows,
            with_balance=balances,
            recompute=checkpoints(train),
            ranks=micro.ranks,
        )
        out = model(micro.tokens, micro.layout, run, tokens_ahead=micro.tokens_ahead)
        with contextlib.nullcontext() if backbone_learns else torch.no_grad():
            lm_loss = model.lm_loss(out.hidden, micro.labels, labels)
            mtp = lm_loss.new_zeros(0)
            if out.ahead:
                ahead = (out.ahead, micro.labels, micro.layout, labels)
                mtp = model.mtp_losses(*ahead, labels_ahead=micro.labels_ahead)
    losses = [lm_loss] if backbone_learns else []
    if backbone_learns and out.ahead:
        losses.append(stage.mtp_weight * mtp.mean())
    if out.kl_sum is not None:
        losses.append(stage.kl_weight * out.kl_sum)
    balance = out.balance_sum
    if balance is not None:
        losses.append(stage.balance_weight * balance)
    torch.stack(losses).sum().backward()
    return Share(
        lm_loss.detach(),
        mtp.detach(),
        {layer: value.detach() for layer, value in out.kl.items()},
        None if balance is None else balance.detach(),
        {layer: routing.load for layer, routing in out.routing.items()},
    )


def _total(shares: Iterable[Share]) -> Share:
    """Of this rank's micro-batches."""
    given = list(shares)
    balance = [share.balance for share in given if share.balance is not None]
    return Share(
        lm=torch.stack([share.lm for share in given if share.lm is not None]).sum(),
        mtp=torch.stack([share.mtp for share in given if share.mtp is not None]).sum(0),
        kl=_by_layer([share.kl for share in given]),
        balance=torch.stack(balance).sum() if balance else None,
        loads=_by_layer([share.loads for share in given]),
    )


def _by_layer(parts: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Sums over micro-batches."""
    return {layer: torch.stack([part[layer] for part in parts]).sum(0) for layer in parts[0]}


def _everywhere(share: Share, mesh: ParallelMesh) -> Share:
    """The sum of all ranks' shares, on every rank. Pipeline ranks have the same share.

    Ranks of tp have parts of it where sequence parallelism splits rows; without, each has all of it.
    """
    over = [mesh.group("loss"), mesh.group("tp") if mesh.config.sequence_parallel else None]
    groups = [group for group in over if group is not None]
    single = {name: value for name in ("lm", "mtp", "balance") if (value := getattr(share, name)) is not None}
    return Share(**_summed(single, groups), kl=_summed(share.kl, groups), loads=_summed(share.loads, groups))


Name = TypeVar("Name", str, int)


def _summed(values: Mapping[Name, Tensor], groups: Sequence[dist.ProcessGroup]) -> dict[Name, Tensor]:
    """Each summed over the groups, by one all-reduce of each group; all ranks have the same names."""
    if not values or not groups:
        return dict(values)
    flat = torch.cat([value.double().flatten() for value in values.values()])
    for group in groups:
        dist.all_reduce(flat, group=group)
    pieces = flat.split([value.numel() for value in values.values()])
    return {
        name: piece.reshape(value.shape).to(value.dtype)
        for (name, value), piece in zip(values.items(), pieces, strict=True)
    }
