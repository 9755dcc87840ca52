"""Attention over a selection, the loss of the indexer that made it, and that loss's way into Megatron's backward.

Megatron adds auxiliary losses to no total: an identity on the layer's output sends their gradient into the graph, times
a scale that the schedule sets after the forward of every micro-batch. So does `attach_loss`, by Megatron's own tensor:

    schedule: scale = grad_scale_func(1) [* cp_size / num_microbatches, unless calculate_per_token_loss]
        -> config.experimental_attention_variant_loss_scale_func, or DSAIndexerLossAutoScaler.set_loss_scale
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.integrations.megatron_config import Options
from dsattn.integrations.megatron_layout import Groups, Rows
from dsattn.nn.indexer import IndexerOutput
from dsattn.ops import dense_gqa, dense_mla, dsa_attention, indexer_kl, sparse_gqa, sparse_mla
from dsattn.selection import Selection


@dataclass(frozen=True)
class Heads:
    """q [T, h, C] and kv [b * S, C] with up_v [h, v, V]; or k [b * S, G, d] in kv's place and v [b * S, G, V]."""

    q: Tensor
    kv: Tensor
    v: Tensor | None
    up_v: Tensor | None
    scale: float


@dataclass(frozen=True)
class Run:
    """One forward of one layer.

    mask: rows that count in the loss, in any of Megatron's shapes. flags: keyword arguments of every operator.
    """

    config: Any
    options: Options
    rows: Rows
    mask: Tensor | None
    groups: Groups
    flags: dict[str, Any]

    def attend(self, heads: Heads, index: IndexerOutput | None, selection: Selection) -> tuple[Tensor, Tensor | None]:
        """([T, h, v], the weighted loss of this rank's rows, or None without an index that learns)."""
        q, kv, scale = heads.q, heads.kv, heads.scale
        if heads.v is not None:
            out, lse = sparse_gqa(q, kv, heads.v, selection, scale=scale, **self.flags)
            if index is None:
                return out, None
            dense = not self.config.dsa_indexer_use_sparse_loss
            return out, self._kl(heads, index, None if dense else selection, lse)
        assert heads.up_v is not None, "absorbed queries have it"
        width = heads.up_v.shape[2]
        loss = None
        if index is not None and self.config.dsa_indexer_use_sparse_loss:
            weights = {"kl_weight": self.config.dsa_indexer_loss_coeff, "value_dim": width}
            keys, group = self.rows.keys, self._head_group()
            out, _, loss = dsa_attention(
                q, kv, selection, *index, keys, scale=scale, head_group=group, **weights, **self._loss(), **self.flags
            )
        else:
            out, lse = sparse_mla(q, kv, selection, scale=scale, value_dim=width, **self.flags)
            loss = None if index is None else self._kl(heads, index, None, lse)
        return torch.einsum("thc,hvc->thv", out, heads.up_v), loss

    def _kl(self, heads: Heads, index: IndexerOutput, selection: Selection | None, lse: Tensor) -> Tensor:
        """Over the selected keys, or over every visible one: then those are read once more, for their lse alone."""
        q, kv, keys = heads.q.detach(), heads.kv.detach(), self.rows.keys
        if selection is None:
            with torch.no_grad():
                if heads.v is None:
                    width = self.config.kv_lora_rank
                    _, lse = dense_mla(q, kv, keys, scale=heads.scale, value_dim=width, **self.flags)
                else:
                    _, lse = dense_gqa(q, kv, heads.v.detach(), keys, scale=heads.scale, **self.flags)
        given = {"scale": heads.scale, "head_group": self._head_group(), **self._loss(), **self.flags}
        return self.config.dsa_indexer_loss_coeff * indexer_kl(*index, q, kv, lse, keys, selection, **given)

    def _head_group(self) -> Any:
        return self.groups.tp if self.groups.tp_size > 1 else None

    def _loss(self) -> dict[str, Any]:
        """relu, the rows that count, and what their sum is divided by."""
        rows, real, total = self.rows, self.rows.real, self.rows.total
        if self.options.rows == "megatron":
            total = rows.positions.shape[0] * (real.shape[0] // rows.positions.shape[0])
        if self.mask is not None:
            given = _row_mask(self.mask, real)
            total = given.sum() if self.options.rows == "megatron" else _everywhere((given & real).sum(), self.groups)
            real = given & real
        if self.config.calculate_per_token_loss:
            total = 1
        divisor = total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
        return {"relu": self.config.dsa_indexer_scoring_relu, "real_rows": real, "divisor": divisor}


def _row_mask(mask: Tensor, real: Tensor) -> Tensor:
    """real_token_mask_q, [s], [1, s] or [b, s], as [b * s] bool."""
    batch = mask.reshape(-1, mask.shape[-1]).to(device=real.device, dtype=torch.bool)
    if real.shape[0] % batch.shape[1] or batch.shape[0] not in (1, real.shape[0] // batch.shape[1]):
        raise InputError(f"real_token_mask_q {list(mask.shape)} does not fit the {real.shape[0]} rows")
    return batch.expand(real.shape[0] // batch.shape[1], -1).flatten()


def _everywhere(count: Tensor, groups: Groups) -> Tensor:
    if groups.cp_size > 1:
        torch.distributed.all_reduce(count, group=groups.cp)
    return count


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (loss,) = ctx.saved_tensors
        scale = _scaler().main_loss_backward_scale
        return grad, torch.ones_like(loss) if scale is None else torch.ones_like(loss) * scale.to(loss.device)


def attach_loss(output: Tensor, loss: Tensor) -> Tensor:
    """`output`, whose backward also runs that of `loss` (0-d), times Megatron's scale at that time (at first 1)."""
    return _Attached.apply(output, loss)  # pyright: ignore[reportReturnType]


def set_loss_scale(scale: Tensor) -> None:
    """For `experimental_attention_variant_loss_scale_func`: what Megatron's schedule calls where the field is None.

    A hook of your own must call it, or the loss keeps the scale 1. Raises TypeError for anything but a tensor.
    """
    _scaler().set_loss_scale(scale)


def log_loss(layer: Any, loss: Tensor, groups: Groups) -> None:
    """Add to Megatron's tracker, which logs `indexer loss`: a sum over context-parallel ranks of their shares.

    With `rows="megatron"` and a mean over rows, ranks are averaged instead, as there. MTP layers have rows of their own
    behind the decoder's.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Tracker

    config = layer.config
    averages = layer.options.rows == "megatron" and not config.calculate_per_token_loss
    group = groups.cp if groups.cp_size > 1 else None
    chosen = {"avg_group": group} if averages else {"reduce_group": group}
    layers = config.num_layers + (config.mtp_num_layers or 0)
    held = Tracker.tracker.get("values")
    if held is not None and held.shape[0] < layers:  # a layer of Megatron's own made it
        Tracker.tracker["values"] = torch.cat((held, held.new_zeros(layers - held.shape[0])))
    Tracker.save_loss_to_tracker(loss, layer.layer_number, layers, **chosen)


def _scaler() -> Any:
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

    return DSAIndexerLossAutoScaler
