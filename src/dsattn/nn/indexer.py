"""The lightning indexer's projections (DeepSeek-V3.2, arXiv 2512.02556, eq. 1):

    I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])

The scores themselves are never whole: `ops.select_keys` and `ops.indexer_kl` make them from q, k and w in blocks.
Letters: T rows, M model width, H_I heads of width D.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsattn.config import IndexerConfig, RopeConfig
from dsattn.errors import InputError
from dsattn.nn.norm import LayerNorm, hadamard
from dsattn.nn.rope import rotary_table, rotate


class IndexerOutput(NamedTuple):
    """q [T, H_I, D], k [T, D] (one for all heads), w [T, H_I] with both scales inside."""

    q: Tensor
    k: Tensor
    w: Tensor


class LightningIndexer(nn.Module):
    """Queries, keys and head weights that score every visible key.

    hidden_size: M.
    query_size: width of what queries are projected from: the attention's q latent, or M with `query_from="hidden"`.
    Parameter names are those of the Hugging Face models: wq_b, wk, k_norm, weights_proj.
    """

    def __init__(self, hidden_size: int, query_size: int, config: IndexerConfig, rope: RopeConfig):
        super().__init__()
        self.config = config
        self.rope = rope
        self.wq_b = nn.Linear(query_size, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(hidden_size, config.head_dim, bias=False)
        self.k_norm = LayerNorm(config.head_dim, config.k_norm_eps, config.k_norm_fp32)
        self.weights_proj = nn.Linear(hidden_size, config.heads, bias=False)

    def forward(self, hidden: Tensor, q_latent: Tensor | None, positions: Tensor) -> IndexerOutput:
        """Project; inputs are detached here, so that the indexer never teaches what feeds it.

        hidden: [T, M], after the layer's input norm. q_latent: [T, query_size], after the query latent's norm; None
        where queries come from `hidden`. positions: [T] int64, restarting in every document.
        Raises InputError where q_latent is missing, or given although queries come from `hidden`.
        """
        config = self.config
        if (q_latent is None) != (config.query_from == "hidden"):
            given = "None" if q_latent is None else f"a tensor {list(q_latent.shape)}"
            raise InputError(
                f"q_latent is {given} but the indexer has query_from={config.query_from!r}; "
                "pass the normalised query latent for 'q_latent', None for 'hidden'"
            )
        hidden = hidden.detach()
        q = self.wq_b(hidden if q_latent is None else q_latent.detach()).unflatten(-1, (config.heads, config.head_dim))
        k = self.k_norm(self.wk(hidden))
        table = rotary_table(positions, self.rope, config.rope_dim, dtype=q.dtype)
        q, k = (
            rotate(x, table, interleaved=config.rope_interleaved, first=config.rope_first) for x in (q, k.to(q.dtype))
        )
        if config.hadamard:
            q, k = hadamard(q), hadamard(k)
        w = self.weights_proj(hidden) * config.heads**-0.5 * config.head_dim**-0.5
        return IndexerOutput(q, k, w)

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Fresh weights: normal with `std`; the key norm is the identity."""
        for linear in (self.wq_b, self.wk, self.weights_proj):
            nn.init.normal_(linear.weight, std=std, generator=generator)
        self.k_norm.reset_parameters()
