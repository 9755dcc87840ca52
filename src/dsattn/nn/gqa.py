"""Grouped-query attention (arXiv 2305.13245) with the lightning indexer of DeepSeek Sparse Attention.

The indexer reads the hidden states; all heads of all groups attend to the one selection it makes.
Letters: T rows, S keys, M model width, H query heads, G key/value groups, d head width.
"""

import dataclasses

from torch import Tensor, nn

from dsattn.config import DSAConfig, GQAConfig
from dsattn.keys import Layout
from dsattn.nn.attention import Role, SelfAttention, without_padding
from dsattn.nn.norm import RMSNorm
from dsattn.nn.rope import rotary_table, rotate
from dsattn.nn.state import SPARSE, AttentionOutput, LayerCache, Pass
from dsattn.ops import dense_gqa, output_gate, sparse_gqa
from dsattn.selection import Selection


class GQASelfAttention(SelfAttention):
    """One attention layer. Parameter names are those of the Hugging Face models.

    hidden_size: M. dsa: how keys are selected, with `query_from="hidden"`; None makes a dense layer. role and
    layer_index: see SelfAttention.
    """

    config: GQAConfig

    def __init__(
        self,
        hidden_size: int,
        config: GQAConfig,
        dsa: DSAConfig | None = None,
        *,
        role: Role | None = None,
        layer_index: int = 0,
    ):
        super().__init__(hidden_size, None, config, dsa, role, layer_index)
        query_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.gate_proj = None
        if config.output_gate != "none":
            channels = query_width if config.output_gate == "elementwise" else config.heads
            self.gate_proj = nn.Linear(hidden_size, channels, bias=False)
        self.o_proj = nn.Linear(query_width, hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        run: Pass = SPARSE,
        *,
        selection: Selection | None = None,
        cache: LayerCache | None = None,
    ) -> AttentionOutput:
        """Attend and project; arguments and errors as for MLASelfAttention."""
        hidden = without_padding(hidden, layout)
        q, k, v = self.heads(hidden, layout.positions, run)
        attended = self.attend(q, (k, v), (hidden, None), layout, run, selection, cache)
        out = attended.hidden
        granularity = self.config.output_gate
        if self.gate_proj is not None and granularity != "none":
            cast = "after" if granularity == "elementwise" else "before"  # as models with gated GQA were trained
            gate = run.graph("gate", self.gate_proj, hidden)
            out = output_gate(out, gate, granularity=granularity, cast=cast)
        return dataclasses.replace(attended, hidden=self.o_proj(out.flatten(1)))

    def heads(self, hidden: Tensor, positions: Tensor, run: Pass = SPARSE) -> tuple[Tensor, Tensor, Tensor]:
        """(q [T, H, d], k [T, G, d], v [T, G, d]), normed where `qk_norm` asks for it, then rotated."""
        config = self.config
        q = run.graph("queries", self.q_proj, hidden).unflatten(-1, (config.heads, config.head_dim))
        k = run.graph("keys", self.k_proj, hidden).unflatten(-1, (config.kv_heads, config.head_dim))
        v = run.graph("values", self.v_proj, hidden).unflatten(-1, (config.kv_heads, config.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        table = rotary_table(positions, config.rope, config.rotated, dtype=hidden.dtype)
        q, k = (rotate(x, table, interleaved=config.rope_interleaved) for x in (q, k))
        return q, k, v

    def _dense(self, q: Tensor, entries: tuple[Tensor, ...], layout: Layout) -> tuple[Tensor, Tensor]:
        k, v = entries
        return dense_gqa(q, k, v, layout.keys, **self._options(q.dtype))

    def _sparse(self, q: Tensor, entries: tuple[Tensor, ...], selection: Selection) -> tuple[Tensor, Tensor]:
        k, v = entries
        return sparse_gqa(q, k, v, selection, **self._options(q.dtype))
