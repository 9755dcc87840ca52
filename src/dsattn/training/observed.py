"""The dense attention of observed layers, a block of rows at a time: what `health` and `overlap` measure against.

Letters: T rows, H heads, G key groups, C key width, R rows and W keys of a block.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsattn.config import DSAConfig
from dsattn.keys import KeyRange, Layout
from dsattn.nn.state import Observation
from dsattn.ops import select_keys
from dsattn.ops.blocks import row_blocks, span
from dsattn.selection import Selection

_MASKS_AND_MASSES = 6  # [R, W] temporaries beside the [R, H, W] logits and probabilities


class Block(NamedTuple):
    """Rows `part` of the measured rows, and the run of keys that any of them may read.

    p: [R, H, W] attention. ranges: of these rows. columns: [W], the keys.
    """

    part: slice
    run: slice
    p: Tensor
    ranges: KeyRange
    columns: Tensor

    def selected(self, selection: Selection) -> Tensor:
        """[R, W] bool: which keys of the run these rows selected. selection: of all measured rows."""
        chosen = Selection(selection.index[self.part], selection.length[self.part])
        return chosen.mask(self.run.stop)[:, self.run.start :]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in the mode it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def counted_rows(layout: Layout, top_k: int, most: int | None = None) -> Tensor:
    """[R] int64 on the host, ascending: rows that see more than `top_k` keys; at most `most`, evenly spread."""
    rows = (layout.keys.lengths() > top_k).cpu().nonzero().flatten()
    if most is not None and len(rows) > most:
        rows = rows[(2 * torch.arange(most) + 1) * len(rows) // (2 * most)]
    return rows


def ranges_of(seen: Observation, rows: Tensor) -> KeyRange:
    """The keys that `rows` may read."""
    return KeyRange(seen.layout.keys.start[rows], seen.layout.keys.stop[rows])


def selection_of(seen: Observation, rows: Tensor, keys: KeyRange, dsa: DSAConfig) -> Selection:
    """What the layer's indexer selects for `rows`; keys: their ranges."""
    assert seen.index is not None, "a probed layer runs the indexer it owns"
    indexer = (seen.index.q[rows], seen.index.k, seen.index.w[rows])
    options = {"relu": dsa.indexer.relu, "backend": dsa.backend}
    options |= {"precision": dsa.precision, "block_bytes": dsa.block_bytes}
    return select_keys(*indexer, keys, dsa.indexer.top_k, **options)


def attention_blocks(seen: Observation, rows: Tensor, keys: KeyRange) -> Iterator[Block]:
    """Dense attention of `rows`, in fp32 or wider, in blocks of bounded memory; keys: their ranges."""
    q_RHC = seen.q[rows]
    wide = torch.promote_types(q_RHC.dtype, torch.float32)
    start, stop = keys.start.cpu(), keys.stop.cpu()
    per_row = wide.itemsize * seen.kv.shape[0] * (2 * q_RHC.shape[1] + _MASKS_AND_MASSES)
    for part in row_blocks(len(rows), per_row, rows.device):
        ranges = keys.row_slice(part.start, part.stop)
        run = slice(*span(start[part], stop[part], seen.kv.shape[0]))
        columns = torch.arange(run.start, run.stop, device=rows.device)
        visible_RW = (columns >= ranges.start[:, None]) & (columns < ranges.stop[:, None])
        p_RHW = _attention(q_RHC[part].to(wide), seen.kv[run].to(wide), seen.scale, visible_RW)
        yield Block(part, run, p_RHW, ranges, columns)


def _attention(q_RHC: Tensor, kv: Tensor, scale: float, visible_RW: Tensor) -> Tensor:
    """[R, H, W] softmax over the visible keys; what the others hold, NaN too, is not met. kv: [W, C] or [W, G, C]."""
    k_WGC = kv.unsqueeze(1) if kv.dim() == 2 else kv
    q_RGJC = q_RHC.unflatten(1, (k_WGC.shape[1], -1))
    logits_RHW = torch.einsum("rgjc,wgc->rgjw", q_RGJC, k_WGC).flatten(1, 2).mul_(scale)
    return logits_RHW.masked_fill_(~visible_RW[:, None], -torch.inf).softmax(-1)
