"""What glm5_next alone has: an indexer that selects pools of keys, and layers of linear attention.

A pool's score teaches no single key, so its indexers have no loss and stay as they are. Linear attention is Hugging
Face's own code; what is added is that packed documents begin with an empty state.
Letters: B samples, S tokens, T = B * S rows, G documents of at most L rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.integrations.microbatch import MICROBATCH
from dsattn.keys import Layout
from dsattn.ops import expand_pools, pool_keys, select_keys
from dsattn.ops.pool import select_pools_hf
from dsattn.selection import Selection


@torch.no_grad()
def select_pools(indexer: Any, hidden: Tensor, q_latent: Tensor, layout: Layout, backend: str) -> Selection:
    """The keys of the selected pools, and each row's tail where the model always reads it.

    indexer: Hugging Face's module. hidden: [T, M]; q_latent: [T, Q]. backend: `auto` and `reference` round as Hugging
    Face does; any other scores in fp32 through `select_keys`.
    """
    size, heads, lanes = indexer.index_kpool, indexer.n_heads, indexer.head_dim
    q = indexer.wq_b(q_latent).unflatten(-1, (heads, lanes))
    k = indexer.k_norm(indexer.wk(hidden))
    gate = F.linear(hidden, indexer.index_kpool_compress_gate)
    w = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    w = w.to(torch.promote_types(w.dtype, torch.float32)) * heads**-0.5
    count, exact = indexer.index_topk // size, backend in ("auto", "reference")
    pooled = pool_keys(k, gate, indexer.index_kpool_compress_ape, layout, size, arithmetic="hf" if exact else "fp32")
    if exact:
        chosen = select_pools_hf(q, pooled, w, count, backend=backend)
    else:
        chosen = select_keys(q, pooled.keys, w * lanes**-0.5, pooled.ranges, count, backend=backend)
    return expand_pools(chosen, pooled, layout, tail=indexer.index_kpool_always_select_tail)


@dataclass(frozen=True)
class Documents:
    """Packed documents of similar lengths, unfolded to a padded batch.

    rows: [G, L] int64, rows of the folded microbatch; padding repeats a document's first. real: [G, L] bool.
    inside: [n] int64, the real places of the flattened batch.
    """

    rows: Tensor
    real: Tensor
    inside: Tensor

    def to(self, device: torch.device) -> "Documents":
        """The same on another device."""
        return Documents(self.rows.to(device), self.real.to(device), self.inside.to(device))


def packed_documents(layout: Layout, tokens: int) -> tuple[Documents, ...]:
    """The documents of a layout of samples of `tokens` rows, on the CPU; none where no sample holds two.

    The shortest of a group is longer than half of the longest, so that padding is less than half of the rows.
    """
    starts = layout.keys.start.cpu()[layout.real_rows.cpu()]
    firsts, lengths = (x.tolist() for x in torch.unique_consecutive(starts, return_counts=True))
    if len({first // tokens for first in firsts}) == len(firsts):
        return ()
    groups: list[list[tuple[int, int]]] = []
    for length, first in sorted(zip(lengths, firsts, strict=True), reverse=True):
        if not groups or 2 * length <= groups[-1][0][0]:
            groups.append([])
        groups[-1].append((length, first))
    return tuple(_unfolded(group) for group in groups)


def _unfolded(group: list[tuple[int, int]]) -> Documents:
    length, first = torch.tensor(group).unbind(1)
    place = torch.arange(group[0][0])
    real = place < length[:, None]
    rows = first[:, None] + torch.where(real, place, 0)
    return Documents(rows, real, real.flatten().nonzero().flatten())


def linear_attention_forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Hugging Face's forward, called on every packed document alone. hidden_states and the result: [B, S, M]."""
    microbatch = kwargs.pop(MICROBATCH, None)
    if microbatch is None or not microbatch.documents:
        return type(self).forward(self, hidden_states, **kwargs)
    folded = hidden_states.flatten(0, 1)
    places, parts = [], []
    for documents in microbatch.documents:
        here = documents.to(folded.device)
        out = type(self).forward(self, folded[here.rows], attention_mask=here.real)
        parts.append(out.flatten(0, 1)[here.inside])
        places.append(here.rows.flatten()[here.inside])
    out = torch.cat(parts)
    return out.new_zeros(len(folded), out.shape[1]).index_copy(0, torch.cat(places), out).view_as(hidden_states)
