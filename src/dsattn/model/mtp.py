"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, eq. 21 to 25): depths that look further ahead, in a row.

    joined[k] = W [RMSNorm(embedding of token t + k) | RMSNorm(hidden[k - 1])]        k = 1 .. N
    hidden[k] = RMSNorm(layer[k](joined[k]))                  hidden[0]: the decoder's, behind its last norm
    logits[k] = head(hidden[k])                               predicts token t + k + 1

Depth k has index num_layers + k - 1 (from 0) in losses and selections, also where one layer is repeated.
A row whose token t + k lies behind the end of its document reads zeros there and has no label. Rows that have one never
see it, as a key, for it stands behind them.
Letters: T rows, M model width, N depths.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsattn.config import ModelConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.layer import LayerOutput
from dsattn.model.moe import Routing
from dsattn.model.sharing import Sharing
from dsattn.nn.state import Handed, Pass
from dsattn.selection import Selection

IGNORED_LABEL = -100
"""Label of rows that have no next token."""


class Depth(Protocol):
    """One layer of multi-token prediction: `model.layer.MTPLayer`."""

    def __call__(
        self, hidden: Tensor, embedded: Tensor, layout: Layout, run: Pass, *, selection: Selection | None
    ) -> LayerOutput:
        """hidden, embedded [T, M] -> the layer's output with the depth's normed hidden states as `hidden`."""
        ...


def look_ahead(values: Tensor, layout: Layout, depths: int) -> Tensor:
    """[depths, T]: row k - 1 holds `values[t + k]` for row t, -100 where its document has ended, and in padding.

    values: [T], tokens or labels. No device sync. Raises InputError where the layout holds a part of the rows only: the
    next token may stand on another rank, so the loader must shift the whole pack, and shard that.
    """
    rows = values.shape[0]
    if layout.num_keys != rows or layout.rows.shape[0] != rows:
        raise InputError(
            f"values has {rows} rows of the layout's {layout.num_keys}: the tokens ahead may be elsewhere; "
            "shift the whole pack where it is loaded, and give each rank its rows as tokens_ahead and labels_ahead"
        )
    step = torch.arange(1, depths + 1, device=values.device)[:, None]
    there = torch.arange(rows, device=values.device) + step
    inside = there < rows
    there = there.clamp(max=max(rows - 1, 0))
    real, positions = layout.real_rows, layout.positions
    same = inside & real & real[there] & (positions[there] == positions + step)
    return values[there].masked_fill(~same, IGNORED_LABEL)


def shifted(name: str, given: Tensor | None, values: Tensor, layout: Layout, depths: int) -> Tensor:
    """`given`, which must be [depths, T], or `look_ahead` where there is none. Raises InputError on other shapes."""
    if given is None:
        return look_ahead(values, layout, depths)
    if given.shape != (depths, *values.shape):
        raise InputError(f"{name} must be {[depths, *values.shape]}, got {list(given.shape)}")
    return given


def predict_ahead(
    layers: Sequence[Depth],
    config: ModelConfig,
    hidden: Tensor,
    embedded: Iterable[tuple[int, Tensor]],
    layout: Layout,
    run: Pass,
    sharing: Sharing,
    routing: dict[int, Routing],
) -> tuple[Tensor, ...]:
    """Hidden states [T, M] of each depth.

    layers: one a depth, or the one that is repeated. hidden: of the depth before, or the decoder's, normed.
    embedded: each depth that runs, from 0, with its [T, M]. sharing: what the decoder's layers handed on; gets the
    depths' selections and losses. routing: by layer, gets theirs, summed over depths where one layer is repeated.
    With `shared_components` the first depth is the source: later ones attend to its keys, by its selection, or both.
    Its keys stay attached to autograd, so every depth's gradient reaches the weights that made them. Where they share
    the selection, later depths run no indexer, add no loss, and are not probed: the first is charged for all.
    """
    mtp = config.mtp
    outputs: list[Tensor] = []
    first: LayerOutput | None = None
    for depth, ahead in embedded:
        at = config.num_layers + (0 if mtp.repeated else depth)
        selection, own = sharing.before(at, run)
        follows = first is not None and mtp.shares("sparse_attention_index")
        if first is not None and follows:
            selection, own = first.selection, dataclasses.replace(run, with_kl=False, probe=None)
        if first is not None and mtp.shares("latent_kv"):
            index = own.handed.index if own.handed is not None else None
            own = dataclasses.replace(own, handed=Handed(index, first.entries))
        out = layers[at - config.num_layers](hidden, ahead, layout, own, selection=selection)
        if not follows:
            sharing.after(at, out, key=config.num_layers + depth)
        if out.routing is not None:
            routing[at] = routing[at] + out.routing if at in routing else out.routing
        hidden = out.hidden
        outputs.append(hidden)
        if first is None and mtp.shared_components:
            first = out
        del out  # what later depths do not take goes before the next one runs
    return tuple(outputs)
