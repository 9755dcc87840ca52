"""One optimiser step: losses and gradients of a global batch, in micro-batches.

Losses are sums divided by counts of the whole global batch (real labels for the language model, real rows for the
indexers), so neither the split into micro-batches nor padding changes a gradient.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsattn.config import StageConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.nn.state import Pass
from dsattn.training.data import Pack, fold
from dsattn.training.stages import learns


@dataclass(frozen=True)
class Losses:
    """Of a whole global batch. lm: nats a label. kl: nats a row, by layer. rows: real rows.

    mtp: of each depth of multi-token prediction, over the labels of `lm`; depth k lacks the last k of each document.
    """

    lm: float
    kl: dict[int, float]
    rows: int
    mtp: tuple[float, ...] = ()

    @property
    def kl_mean(self) -> float | None:
        """Mean over the layers whose indexer learned."""
        return sum(self.kl.values()) / len(self.kl) if self.kl else None


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
    lm_parts: list[Tensor] = []
    mtp_parts: list[Tensor] = []
    kl_parts: dict[int, list[Tensor]] = {}
    for first in range(0, len(packs), train.packs_per_micro_batch):
        micro = fold(packs[first : first + train.packs_per_micro_batch]).to(device)
        lm_loss, mtp, kl = _micro_batch(model, micro, stage, train, (labels, rows))
        lm_parts.append(lm_loss)
        mtp_parts.append(mtp)
        for layer, value in kl.items():
            kl_parts.setdefault(layer, []).append(value)
    kl = {layer: torch.stack(values).sum().item() for layer, values in kl_parts.items()}
    mtp = tuple(torch.stack(mtp_parts).sum(0).tolist())
    return Losses(torch.stack(lm_parts).sum().item(), kl, rows, mtp)


def _micro_batch(
    model: Decoder, micro: Pack, stage: StageConfig, train: TrainConfig, divisors: tuple[int, int]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Forward and backward; returns the micro-batch's share of the losses: lm, mtp [N], kl by layer."""
    labels, rows = divisors
    backbone_learns, _ = learns(stage.mode)
    with compute(train, micro.tokens.device):
        out = model(micro.tokens, micro.layout, Pass(mode=stage.mode, kl_divisor=rows))
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
    torch.stack(losses).sum().backward()
    return lm_loss.detach(), mtp.detach(), {layer: value.detach() for layer, value in out.kl.items()}
