"""The lightning indexer's projections (DeepSeek-V3.2, arXiv 2512.02556, eq. 1):

    I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])

The scores themselves are never whole: `ops.select_keys` and `ops.indexer_kl` make them from q, k and w in blocks.
With KPool (GLM-5.3-Flash) pools of keys are scored instead, see `ops/pool.py`: of the keys as they would have been
scored, after RoPE and rotation.
Letters: T rows, M model width, H_I heads of width D.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsattn.config import IndexerConfig, Precision, RopeConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn.draw import normal_
from dsattn.nn.norm import LayerNorm, hadamard
from dsattn.nn.rope import rotary_table, rotate
from dsattn.ops import expand_pools, pool_keys, select_keys
from dsattn.ops.pool import round_to_e4m3, select_pools_hf
from dsattn.selection import Selection


class IndexerOutput(NamedTuple):
    """q [T, H_I, D], k [T, D] (one for all heads), w [T, H_I] with both scales inside.

    With KPool k is [T, 2 D]: each key with its gates, so that what caches, gathers or reorders keys does so with both.
    With its arithmetic `hf`, w is fp32 and has only the heads' scale inside.
    """

    q: Tensor
    k: Tensor
    w: Tensor


class LightningIndexer(nn.Module):
    """Queries, keys and head weights that score every visible key.

    hidden_size: M.
    query_size: width of what queries are projected from: the attention's q latent, or M with `query_from="hidden"`.
    Parameter names are those of the Hugging Face models: wq_b, wk, k_norm, weights_proj, and with KPool
    index_kpool_compress_gate and index_kpool_compress_ape, which ask for no gradient: nothing could teach them.
    """

    def __init__(self, hidden_size: int, query_size: int, config: IndexerConfig, rope: RopeConfig):
        super().__init__()
        self.config = config
        self.rope = rope
        self.wq_b = nn.Linear(query_size, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(hidden_size, config.head_dim, bias=False)
        self.k_norm = LayerNorm(config.head_dim, config.k_norm_eps, config.k_norm_fp32)
        self.weights_proj = nn.Linear(hidden_size, config.heads, bias=False)
        if config.pool_size > 1:  # zeros: a pool is the mean of its keys
            ape, gate = torch.zeros(config.pool_size, config.head_dim), torch.zeros(config.head_dim, hidden_size)
            self.index_kpool_compress_ape = nn.Parameter(ape, requires_grad=False)
            self.index_kpool_compress_gate = nn.Parameter(gate, requires_grad=False)

    def forward(
        self, hidden: Tensor, q_latent: Tensor | None, positions: Tensor, keys: Tensor | None = None
    ) -> IndexerOutput:
        """Project; inputs are detached here, so that the indexer never teaches what feeds it.

        hidden: [T, M], after the layer's input norm. q_latent: [T, query_size], after the query latent's norm; None
        where queries come from `hidden`. positions: [T] int64, restarting in every document. keys: what `keys` gave, of
        these rows or of all ranks'; None makes these rows'.
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
        w = self.weights_proj(hidden)
        if config.pool_arithmetic == "hf":
            w = w.to(torch.promote_types(w.dtype, torch.float32)) * config.heads**-0.5
        else:
            w = w * config.heads**-0.5 * config.head_dim**-0.5
        return IndexerOutput(self._turned(q, positions), self.keys(hidden, positions) if keys is None else keys, w)

    def keys(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """k of `forward`, which other ranks may need before queries are there."""
        hidden = hidden.detach()
        k = self._turned(self.k_norm(self.wk(hidden)), positions)
        if self.config.pool_size > 1:
            k = torch.cat((k, F.linear(hidden, self.index_kpool_compress_gate).to(k.dtype)), -1)
        return k

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        config = self.config
        table = rotary_table(positions, self.rope, config.rope_dim, dtype=x.dtype)
        x = rotate(x, table, interleaved=config.rope_interleaved, first=config.rope_first)
        return hadamard(x) if config.hadamard else x

    def select_pools(
        self, index: IndexerOutput, layout: Layout, *, precision: Precision, block_bytes: int, backend: str
    ) -> Selection:
        """KPool's selection of keys: K / P pools by score, and the tail where the configuration has it.

        index: what `forward` gave, k of all the layout's keys in global order. The options are those of `select_keys`;
        arithmetic `hf` has none but the backends `auto` and `reference`.
        """
        config = self.config
        k, gate = index.k.chunk(2, -1)
        ape, size = self.index_kpool_compress_ape, config.pool_size
        pooled = pool_keys(k, gate, ape, layout, size, arithmetic=config.pool_arithmetic)
        if config.pool_arithmetic == "hf":
            chosen = select_pools_hf(index.q, pooled, index.w, config.top_k // size, backend=backend)
        else:
            q, keys = index.q, pooled.keys
            if config.pool_e4m3:
                q, keys = (round_to_e4m3(hadamard(x.float()).bfloat16()) for x in (q, keys))
            chosen = select_keys(
                q,
                keys,
                index.w,
                pooled.ranges,
                config.top_k // size,
                relu=config.relu,
                precision=precision,
                block_bytes=block_bytes,
                backend=backend,
            )
        return expand_pools(chosen, pooled, layout, tail=config.pool_tail)

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Fresh weights: normal with `std`; the key norm is the identity, and a pool the mean of its keys."""
        for linear in (self.wq_b, self.wk, self.weights_proj):
            normal_(linear.weight, std, generator)
        self.k_norm.reset_parameters()
        if self.config.pool_size > 1:
            nn.init.zeros_(self.index_kpool_compress_ape)
            nn.init.zeros_(self.index_kpool_compress_gate)
