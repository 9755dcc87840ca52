"""Grouped-query attention (arXiv 2305.13245) with the lightning indexer of DeepSeek Sparse Attention.

The indexer reads the hidden states; all heads of all groups attend to the one selection it makes.
Letters: T my rows, R the rows that heads read, S keys, M model width, H query heads here, G key/value groups here, d
head width; R is T, and H and G are all, but under tensor parallelism: see `nn/ranks.py`.
"""

import dataclasses

from torch import Tensor

from dsattn.config import DSAConfig, GQAConfig
from dsattn.keys import Layout
from dsattn.nn.attention import Role, SelfAttention, without_padding
from dsattn.nn.linear import Linear
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
        self.q_proj = Linear(hidden_size, query_width, bias=False)
        self.k_proj = Linear(hidden_size, kv_width, bias=False)
        self.v_proj = Linear(hidden_size, kv_width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.gate_proj = None
        if config.output_gate != "none":
            channels = query_width if config.output_gate == "elementwise" else config.heads
            self.gate_proj = Linear(hidden_size, channels, bias=False)
        self.o_proj = Linear(query_width, hidden_size, bias=False)

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
        turn, ranks = self.begin(layout, run, selection, cache), run.together
        index_keys = ranks.keys(layout, *self.index_keys(turn, hidden))
        wide = ranks.enter(hidden)
        k, v = self.keys(wide, turn.rows.positions, run)
        # What other ranks wait for has gone out; what they send arrives while the queries are made.
        entries = ranks.keys(turn.rows, k, v)
        q = self.queries(wide, turn.rows.positions, run)
        index = self.index(turn, hidden, None, index_keys())
        attended = self.attend(turn, q, entries(), index)
        out = attended.hidden
        granularity = self.config.output_gate
        if self.gate_proj is not None and granularity != "none":
            cast = "after" if granularity == "elementwise" else "before"  # as models with gated GQA were trained
            gate = run.graph("gate", self.gate_proj, wide)
            out = output_gate(out, gate, granularity=granularity, cast=cast)
        return dataclasses.replace(attended, hidden=ranks.leave(self.o_proj(out.flatten(1))))

    def heads(self, hidden: Tensor, positions: Tensor, run: Pass = SPARSE) -> tuple[Tensor, Tensor, Tensor]:
        """(q [R, H, d], k [R, G, d], v [R, G, d]), normed where `qk_norm` asks for it, then rotated."""
        return self.queries(hidden, positions, run), *self.keys(hidden, positions, run)

    def queries(self, hidden: Tensor, positions: Tensor, run: Pass = SPARSE) -> Tensor:
        """q of `heads`."""
        q = run.graph("queries", self.q_proj, hidden).unflatten(-1, (-1, self.config.head_dim))
        return self._rotated(q if self.q_norm is None else self.q_norm(q), positions)

    def keys(self, hidden: Tensor, positions: Tensor, run: Pass = SPARSE) -> tuple[Tensor, Tensor]:
        """k and v of `heads`."""
        k = run.graph("keys", self.k_proj, hidden).unflatten(-1, (-1, self.config.head_dim))
        v = run.graph("values", self.v_proj, hidden).unflatten(-1, (-1, self.config.head_dim))
        return self._rotated(k if self.k_norm is None else self.k_norm(k), positions), v

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        table = rotary_table(positions, self.config.rope, self.config.rotated, dtype=x.dtype)
        return rotate(x, table, interleaved=self.config.rope_interleaved)

    def _dense(self, q: Tensor, entries: tuple[Tensor, ...], layout: Layout) -> tuple[Tensor, Tensor]:
        k, v = entries
        return dense_gqa(q, k, v, layout.keys, **self._options(q.dtype))

    def _sparse(self, q: Tensor, entries: tuple[Tensor, ...], selection: Selection) -> tuple[Tensor, Tensor]:
        k, v = entries
        return sparse_gqa(q, k, v, selection, **self._options(q.dtype))
