"""Multi-latent attention with DeepSeek Sparse Attention (arXiv 2405.04434, 2512.02556). START HERE.

Absorbed form: instead of expanding the cached latent to a key and a value for each head, the key half of the
up-projection is folded into the queries and the value half is applied to the result, so that all heads read one row:

    q[h] = [ W_UK[h]^T q_nope[h] | RoPE(q_rope[h]) ]    [T, H, C]
    kv   = [ RMSNorm(latent)     | RoPE(k_rope)    ]    [S, C], the first V channels are the values
    out  = W_UV[h] softmax(scale q[h] . kv[selected]) kv[selected, :V]

Where every key is read anyway, and none is cached, the expanded form costs a third of that: a key and a value for each
head, 128 + 64 and 128 channels wide instead of 512 + 64 and 512. Both are the same function.

Letters: T my rows, R the rows that heads read, S keys, M model width, H heads here, C = V + rope latent width, V value
width; R is T, and H are all heads, but under tensor parallelism: see `nn/ranks.py`.
"""

import dataclasses

import torch
from torch import Tensor, nn

from dsattn.config import DSAConfig, MLAConfig
from dsattn.keys import Layout
from dsattn.nn.attention import Role, SelfAttention, without_padding
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.linear import Linear, local
from dsattn.nn.norm import RMSNorm
from dsattn.nn.rope import RotaryTable, rotary_table, rotate
from dsattn.nn.state import SPARSE, AttentionOutput, LayerCache, Pass, Turn
from dsattn.ops import dense_gqa, dense_mla, dsa_attention, output_gate, sparse_mla
from dsattn.ops.dsa import shares_work
from dsattn.selection import Selection


class MLASelfAttention(SelfAttention):
    """One attention layer. Parameter names are those of the Hugging Face models.

    hidden_size: M. dsa: how keys are selected; None makes a dense layer. role and layer_index: see SelfAttention.
    """

    config: MLAConfig

    def __init__(
        self,
        hidden_size: int,
        config: MLAConfig,
        dsa: DSAConfig | None = None,
        *,
        role: Role | None = None,
        layer_index: int = 0,
    ):
        super().__init__(hidden_size, config.q_lora_rank, config, dsa, role, layer_index)
        heads, latent, rope = config.heads, config.kv_lora_rank, config.qk_rope_head_dim
        query_width = heads * (config.qk_nope_head_dim + rope)
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden_size, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.norm_eps)
            self.q_b_proj = Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, latent + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, config.norm_eps)
        self.kv_b_proj = Linear(latent, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.gate_proj = None
        if config.output_gate != "none":
            channels = heads * (config.v_head_dim if config.output_gate == "elementwise" else 1)
            self.gate_proj = Linear(hidden_size, channels, bias=False)
        self.o_proj = Linear(heads * config.v_head_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        run: Pass = SPARSE,
        *,
        selection: Selection | None = None,
        cache: LayerCache | None = None,
    ) -> AttentionOutput:
        """Attend and project.

        hidden: [T, M], after the layer's input norm. selection: an earlier layer's, to be used instead of choosing.
        cache: the rows before these; then layout is `Layout.continuation(cache.num_rows, T)`.
        Padding rows are read as zeros and return zeros. Raises InputError where sizes or selection do not fit.
        """
        hidden = without_padding(hidden, layout)
        turn, ranks = self.begin(layout, run, selection, cache), run.together
        table = self._table(layout, hidden.dtype)
        handed = None if run.handed is None else run.handed.entries
        latents = () if handed is not None else (ranks.spread(torch.cat(self.latents(hidden, table, run), -1)),)
        # What other ranks wait for goes out first; what they send arrives while the queries are made.
        gathered = ranks.keys(layout, *latents, *self.index_keys(turn, hidden))

        rows_table = table if turn.rows is layout else self._table(turn.rows, hidden.dtype)
        q_latent, q_nope, q_rope = self.queries(hidden, rows_table, run)
        expand = cache is None and self.reads_every_key(run)
        w_uk, w_uv = self.up_projections()
        q = torch.cat((q_nope if expand else torch.einsum("thn,hnc->thc", q_nope, w_uk), q_rope), -1)
        keys = gathered()
        index = self.index(turn, hidden, q_latent, keys[len(latents) :])
        entries = keys[:1] if handed is None else handed
        if expand and handed is None:
            entries = self.expanded(*keys[0].split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1))
        del q_nope, q_rope  # what they are views of is not held while attention runs
        attended = self.attend(turn, q, entries, index)

        out = attended.hidden
        if len(entries) == 1:
            out = torch.einsum("thc,hvc->thv", out, w_uv)
        if self.gate_proj is not None and self.config.output_gate != "none":
            gate = run.graph("gate", self.gate_proj, ranks.enter(hidden))
            out = output_gate(out, gate, granularity=self.config.output_gate)
        return dataclasses.replace(attended, hidden=ranks.leave(self.o_proj(out.flatten(1))))

    def queries(self, hidden: Tensor, table: RotaryTable, run: Pass = SPARSE) -> tuple[Tensor | None, Tensor, Tensor]:
        """(normalised query latent [T, q_lora_rank] or None, plain channels [R, H, nope], rotated ones [R, H, rope]).

        table: of the R rows that heads read.
        """
        config, ranks = self.config, run.together
        if config.q_lora_rank is None:
            q_latent, q = None, run.graph("queries", self.q_proj, ranks.enter(hidden))
        else:
            q_latent = self.q_a_layernorm(run.graph("queries", self.q_a_proj, hidden))
            q = self.q_b_proj(ranks.enter(q_latent))
        q = q.unflatten(-1, (-1, config.qk_nope_head_dim + config.qk_rope_head_dim))
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        return q_latent, q_nope, rotate(q_rope, table, interleaved=config.rope_interleaved)

    def latents(self, hidden: Tensor, table: RotaryTable, run: Pass = SPARSE) -> tuple[Tensor, Tensor]:
        """(latent [T, V], rotated channels [T, rope]): what keys and values of all heads are made of."""
        latent, k_rope = run.graph("keys", self.kv_a_proj_with_mqa, hidden).split(
            [self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1
        )
        return self.kv_a_layernorm(latent), rotate(k_rope, table, interleaved=self.config.rope_interleaved)

    def expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """A key and a value for each head: ([S, H, nope + rope], [S, H, v_head_dim])."""
        config = self.config
        per_head = self.kv_b_proj(latent).unflatten(-1, (-1, config.qk_nope_head_dim + config.v_head_dim))
        k_nope, v = per_head.split([config.qk_nope_head_dim, config.v_head_dim], -1)
        return torch.cat((k_nope, k_rope[:, None].expand(-1, k_nope.shape[1], -1)), -1), v

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """(W_UK [H, nope, V], W_UV [H, v, V]): the rows of kv_b_proj, head by head."""
        config = self.config
        per_head = local(self.kv_b_proj.weight).unflatten(0, (-1, config.qk_nope_head_dim + config.v_head_dim))
        w_uk, w_uv = per_head.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        return w_uk, w_uv

    def _table(self, layout: Layout, dtype: torch.dtype) -> RotaryTable:
        return rotary_table(layout.positions, self.config.rope, self.config.qk_rope_head_dim, dtype=dtype)

    def _dense(self, q: Tensor, entries: tuple[Tensor, ...], layout: Layout) -> tuple[Tensor, Tensor]:
        if len(entries) == 2:
            return dense_gqa(q, *entries, layout.keys, **self._options(q.dtype))
        (kv,) = entries
        return dense_mla(q, kv, layout.keys, value_dim=self.config.kv_lora_rank, **self._options(q.dtype))

    def _sparse(self, q: Tensor, entries: tuple[Tensor, ...], selection: Selection) -> tuple[Tensor, Tensor]:
        (kv,) = entries
        return sparse_mla(q, kv, selection, value_dim=self.config.kv_lora_rank, **self._options(q.dtype))

    def _sparse_and_kl(
        self, index: IndexerOutput, q: Tensor, entries: tuple[Tensor, ...], selection: Selection, turn: Turn
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Two operations where the loss is kept while attention runs again.
        if not shares_work(self.dsa.deterministic) or turn.run.kept is not None:
            return super()._sparse_and_kl(index, q, entries, selection, turn)
        (kv,), (q_i, k_i, w) = entries, index
        return dsa_attention(
            q,
            kv,
            selection,
            q_i,
            k_i,
            w,
            turn.rows.keys,
            kl_weight=1.0,
            real_rows=turn.rows.real_rows,
            divisor=turn.kl_divisor,
            value_dim=self.config.kv_lora_rank,
            relu=self.dsa.indexer.relu,
            head_group=turn.run.together.head_group,
            **self._options(q.dtype),
        )
