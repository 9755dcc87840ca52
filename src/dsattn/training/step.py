"""One optimiser step: losses and gradients of a global batch, in micro-batches.

Losses are sums divided by counts of the whole global batch (real labels for the language model, real rows for the
indexers), so neither the split into micro-batches nor padding changes a gradient.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsattn.config import StageConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.nn.state import Pass
from dsattn.parallel.recompute import checkpoints
from dsattn.training.data import Pack, fold
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


@dataclass(frozen=True)
class _Share:
    """A micro-batch's share of the losses, on the device and detached. mtp: [N]."""

    lm: Tensor
    mtp: Tensor
    kl: dict[int, Tensor]
    balance: Tensor | None
    loads: dict[int, Tensor]


def compute(train: TrainConfig, device: torch.device) -> torch.autocast:
    """The arithmetic of `train.dtype` on `device`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=train.dtype == "bfloat16")


def accumulate_gradients(model: Decoder, packs: Sequence[Pack], stage: StageConfig, train: TrainConfig) -> Losses:
    """Add the gradients of one global batch to the parameters' `.grad`.

    packs: the whole global batch, on the host; `train.packs_per_micro_batch` of them go through the model at a time.
    """
    device = next(model.parameters()).device
    labels = max(sum(pack.num_labels for pack in packs), 1)
    rows = max(sum(pack.layout.num_real_rows for pack in packs), 1)
    shares: list[_Share] = []
    for first in range(0, len(packs), train.packs_per_micro_batch):
        micro = fold(packs[first : first + train.packs_per_micro_batch]).to(device)
        shares.append(_micro_batch(model, micro, stage, train, (labels, rows)))
    balance = [share.balance for share in shares if share.balance is not None]
    return Losses(
        lm=torch.stack([share.lm for share in shares]).sum().item(),
        kl={layer: total.item() for layer, total in _by_layer([share.kl for share in shares]).items()},
        rows=rows,
        mtp=tuple(torch.stack([share.mtp for share in shares]).sum(0).tolist()),
        balance=torch.stack(balance).sum().item() if balance else None,
        loads=_by_layer([share.loads for share in shares]),
    )


def _micro_batch(
    model: Decoder, micro: Pack, stage: StageConfig, train: TrainConfig, divisors: tuple[int, int]
) -> _Share:
    """Forward and backward."""
    labels, rows = divisors
    backbone_learns, _ = learns(stage.mode)
    with compute(train, micro.tokens.device):
        balances = backbone_learns and stage.balance_weight > 0
        run = Pass(mode=stage.mode, kl_divisor=rows, with_balance=balances, recompute=checkpoints(train))
        out = model(micro.tokens, micro.layout, run)
        with contextlib.nullcontext() if backbone_learns else torch.no_grad():
            lm_loss = model.lm_loss(out.hidden, micro.labels, labels)
            mtp = lm_loss.new_zeros(0)
            if out.ahead:
                mtp = model.mtp_losses(out.ahead, micro.labels, micro.layout, labels)
    losses = [lm_loss] if backbone_learns else []
    if backbone_learns and out.ahead:
        losses.append(stage.mtp_weight * mtp.mean())
    if out.kl_sum is not None:
        losses.append(stage.kl_weight * out.kl_sum)
    balance = out.balance_sum
    if balance is not None:
        losses.append(stage.balance_weight * balance)
    torch.stack(losses).sum().backward()
    return _Share(
        lm_loss.detach(),
        mtp.detach(),
        {layer: value.detach() for layer, value in out.kl.items()},
        None if balance is None else balance.detach(),
        {layer: routing.load for layer, routing in out.routing.items()},
    )


def _by_layer(parts: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Sums over micro-batches."""
    return {layer: torch.stack([part[layer] for part in parts]).sum(0) for layer in parts[0]}
