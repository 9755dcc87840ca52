"""Multi-latent attention with DeepSeek Sparse Attention (arXiv 2405.04434, 2512.02556). START HERE.

Absorbed form: instead of expanding the cached latent to a key and a value for each head, the key half of the
up-projection is folded into the queries and the value half is applied to the result, so that all heads read one row:

    q[h] = [ W_UK[h]^T q_nope[h] | RoPE(q_rope[h]) ]    [T, H, C]
    kv   = [ RMSNorm(latent)     | RoPE(k_rope)    ]    [S, C], the first V channels are the values
    out  = W_UV[h] softmax(scale q[h] . kv[selected]) kv[selected, :V]

Where every key is read anyway, and none is cached, the expanded form costs a third of that: a key and a value for each
head, 128 + 64 and 128 channels wide instead of 512 + 64 and 512. Both are the same function.

Letters: T rows, S keys, M model width, H heads, C = V + R latent width with R rotated lanes, V value width.
"""

import dataclasses

import torch
from torch import Tensor, nn

from dsattn.config import DSAConfig, MLAConfig
from dsattn.keys import Layout
from dsattn.nn.attention import Role, SelfAttention, without_padding
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.norm import RMSNorm
from dsattn.nn.rope import RotaryTable, rotary_table, rotate
from dsattn.nn.state import SPARSE, AttentionOutput, LayerCache, Pass
from dsattn.ops import dense_gqa, dense_mla, dsa_attention, output_gate, sparse_mla
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
            self.q_proj = nn.Linear(hidden_size, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, latent + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, config.norm_eps)
        self.kv_b_proj = nn.Linear(latent, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.gate_proj = None
        if config.output_gate != "none":
            channels = heads * (config.v_head_dim if config.output_gate == "elementwise" else 1)
            self.gate_proj = nn.Linear(hidden_size, channels, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden_size, bias=False)

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
        table = rotary_table(layout.positions, self.config.rope, self.config.qk_rope_head_dim, dtype=hidden.dtype)
        w_uk, w_uv = self.up_projections()
        q_latent, q_nope, q_rope = self.queries(hidden, table, run)
        expand = cache is None and self.reads_every_key(run)
        q = torch.cat((q_nope if expand else torch.einsum("thn,hnc->thc", q_nope, w_uk), q_rope), -1)
        entries = None if run.handed is None else run.handed.entries
        if entries is None:
            latent, k_rope = self.latents(hidden, table, run)
            entries = self.expanded(latent, k_rope) if expand else (torch.cat((latent, k_rope), -1),)
        attended = self.attend(q, entries, (hidden, q_latent), layout, run, selection, cache)
        out = attended.hidden
        if len(entries) == 1:
            out = torch.einsum("thc,hvc->thv", out, w_uv)
        if self.gate_proj is not None and self.config.output_gate != "none":
            gate = run.graph("gate", self.gate_proj, hidden)
            out = output_gate(out, gate, granularity=self.config.output_gate)
        return dataclasses.replace(attended, hidden=self.o_proj(out.flatten(1)))

    def queries(self, hidden: Tensor, table: RotaryTable, run: Pass = SPARSE) -> tuple[Tensor | None, Tensor, Tensor]:
        """(normalised query latent [T, q_lora_rank] or None, plain channels [T, H, nope], rotated ones [T, H, R])."""
        config = self.config
        if config.q_lora_rank is None:
            q_latent, q = None, run.graph("queries", self.q_proj, hidden)
        else:
            q_latent = self.q_a_layernorm(run.graph("queries", self.q_a_proj, hidden))
            q = self.q_b_proj(q_latent)
        q = q.unflatten(-1, (config.heads, config.qk_nope_head_dim + config.qk_rope_head_dim))
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        return q_latent, q_nope, rotate(q_rope, table, interleaved=config.rope_interleaved)

    def latents(self, hidden: Tensor, table: RotaryTable, run: Pass = SPARSE) -> tuple[Tensor, Tensor]:
        """(latent [T, V], rotated channels [T, R]): what keys and values of all heads are read from, and is cached."""
        latent, k_rope = run.graph("keys", self.kv_a_proj_with_mqa, hidden).split(
            [self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1
        )
        return self.kv_a_layernorm(latent), rotate(k_rope, table, interleaved=self.config.rope_interleaved)

    def expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """A key and a value for each head: ([S, H, nope + R], [S, H, v_head_dim])."""
        config = self.config
        per_head = self.kv_b_proj(latent).unflatten(-1, (config.heads, config.qk_nope_head_dim + config.v_head_dim))
        k_nope, v = per_head.split([config.qk_nope_head_dim, config.v_head_dim], -1)
        return torch.cat((k_nope, k_rope[:, None].expand(-1, config.heads, -1)), -1), v

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """(W_UK [H, nope, V], W_UV [H, v, V]): the rows of kv_b_proj, head by head."""
        config = self.config
        per_head = self.kv_b_proj.weight.unflatten(0, (config.heads, config.qk_nope_head_dim + config.v_head_dim))
        w_uk, w_uv = per_head.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        return w_uk, w_uv

    def _dense(self, q: Tensor, entries: tuple[Tensor, ...], layout: Layout) -> tuple[Tensor, Tensor]:
        if len(entries) == 2:
            return dense_gqa(q, *entries, layout.keys, **self._options(q.dtype))
        (kv,) = entries
        return dense_mla(q, kv, layout.keys, value_dim=self.config.kv_lora_rank, **self._options(q.dtype))

    def _sparse(self, q: Tensor, entries: tuple[Tensor, ...], selection: Selection) -> tuple[Tensor, Tensor]:
        (kv,) = entries
        return sparse_mla(q, kv, selection, value_dim=self.config.kv_lora_rank, **self._options(q.dtype))

    def _sparse_and_kl(
        self,
        index: IndexerOutput,
        q: Tensor,
        entries: tuple[Tensor, ...],
        selection: Selection,
        layout: Layout,
        run: Pass,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if run.kept is not None:  # the loss is kept and attention runs again: two operations, with the same results
            return super()._sparse_and_kl(index, q, entries, selection, layout, run)
        (kv,), (q_i, k_i, w) = entries, index
        return dsa_attention(
            q,
            kv,
            selection,
            q_i,
            k_i,
            w,
            layout.keys,
            kl_weight=1.0,
            real_rows=layout.real_rows,
            divisor=run.kl_divisor,
            value_dim=self.config.kv_lora_rank,
            relu=self.dsa.indexer.relu,
            **self._options(q.dtype),
        )
