"""Kimi Delta Attention (KDA, arXiv 2510.26692): linear attention whose state forgets channel by channel.

    q, k, v = SiLU(conv(projections of h))       causal, `conv_size` taps a channel
    g       = lower_bound sigmoid(exp(A) (F h + dt))      log decay of each key channel, in fp32
    beta    = sigmoid(B h)                                one number a head
    out     = W_o (RMSNorm(kda(q, k, v, g, beta)) * sigmoid(G h))       see `ops/kda.py`

No positions, no keys to select: a row reads the state that the rows before it in its document left.
Letters: T rows, M model width, H heads, d head width, W taps.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsattn.config import KDAConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn.draw import normal_, uniform_
from dsattn.nn.linear import local
from dsattn.nn.state import SPARSE, AttentionOutput, LayerCache, Pass
from dsattn.ops import output_gate
from dsattn.ops.kda import kimi_delta_attention
from dsattn.selection import Selection


class ForgetGate(nn.Module):
    """Log decays. Parameter names are those of the Hugging Face models."""

    def __init__(self, hidden_size: int, config: KDAConfig):
        super().__init__()
        self.config = config
        self.f_a_proj = nn.Linear(hidden_size, config.head_dim, bias=False)
        self.f_b_proj = nn.Linear(config.head_dim, config.width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(config.width, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(config.heads, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, M] -> [T, H, d], negative, in fp32 (fp64 for fp64)."""
        config, projected = self.config, self.f_b_proj(self.f_a_proj(hidden))
        wide = torch.promote_types(projected.dtype, torch.float32)
        x = (projected.to(wide) + self.dt_bias.to(wide)).unflatten(-1, (config.heads, config.head_dim))
        rate = self.A_log.to(wide).exp()[:, None]
        if config.lower_bound is None:
            return -rate * F.softplus(x)
        return config.lower_bound * (rate * x).sigmoid()


class GatedNorm(nn.Module):
    """RMSNorm of each head in fp32, then the output gate, then the cast back."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, out: Tensor, gate: Tensor | None) -> Tensor:
        """out [T, H, d], gate logits [T, H * d] or [T, H], None for no gate -> [T, H, d] in out's dtype."""
        wide = torch.promote_types(out.dtype, torch.float32)
        normed = F.rms_norm(out.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        if gate is not None:
            granularity = "headwise" if gate.shape[-1] == out.shape[1] else "elementwise"
            normed = output_gate(normed, gate, granularity=granularity, cast="after")
        return normed.to(out.dtype)


class KDASelfAttention(nn.Module):
    """One linear attention layer; it stands where MLASelfAttention or GQASelfAttention does.

    hidden_size: M. Parameter names are those of the Hugging Face models; the convolution holds queries, keys and values
    behind each other.
    """

    def __init__(self, hidden_size: int, config: KDAConfig, *, layer_index: int = 0):
        super().__init__()
        self.config, self.layer_index = config, layer_index
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, config.width, bias=False) for _ in range(3))
        channels = 3 * config.width
        self.conv1d = nn.Conv1d(channels, channels, config.conv_size, groups=channels, bias=False)
        self.forget_gate = ForgetGate(hidden_size, config)
        self.b_proj = nn.Linear(hidden_size, config.heads, bias=False)
        if config.output_gate != "none":
            gates = config.width if config.output_gate == "elementwise" else config.heads
            self.g_a_proj = nn.Linear(hidden_size, config.head_dim, bias=False)
            self.g_b_proj = nn.Linear(config.head_dim, gates, bias=False)
        self.o_norm = GatedNorm(config.head_dim, config.norm_eps)
        self.o_proj = nn.Linear(config.width, hidden_size, bias=False)
        if not self.conv1d.weight.is_meta:
            self.reset_parameters(0.02)

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        run: Pass = SPARSE,
        *,
        selection: Selection | None = None,
        cache: LayerCache | None = None,
    ) -> AttentionOutput:
        """Attend within each document and project; the same in every mode. Padding rows are not read and come out zero.

        hidden: [T, M]. cache: the state of one document's earlier rows. Raises InputError where a selection is given,
        where hidden does not meet the layout, where this rank holds a part of the rows under context parallelism: a
        state runs through all, and inside a CUDA graph. Tensor-parallel ranks all run all rows.
        """
        ranks = run.together
        layout, hidden = ranks.documents(layout, hidden)
        self._check(hidden, layout, selection, cache)
        whole = layout.every_row_has_a_key
        rows = None if whole else _real_first(layout.real_rows)[: layout.num_real_rows]
        x = hidden if rows is None else hidden[rows]
        positions = layout.positions if rows is None else layout.positions[rows]
        before, state = (None, None) if cache is None else (cache.conv, cache.state)
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        mixed, conv = self._convolve(mixed, positions, before)
        q, k, v = (one.unflatten(-1, (self.config.heads, -1)) for one in mixed.chunk(3, -1))
        beta = self.b_proj(x).to(torch.promote_types(x.dtype, torch.float32)).sigmoid()
        lengths = [length for length in layout.lengths if length] if cache is None else [len(x)]
        options = {"backend": self.config.backend, "bounded": (self.config.lower_bound or -math.inf) >= -5}
        out, state = kimi_delta_attention(q, k, v, self.forget_gate(x), beta, lengths, state=state, **options)
        gate = None if self.config.output_gate == "none" else self.g_b_proj(self.g_a_proj(x))
        out = self.o_proj(self.o_norm(out, gate).flatten(1))
        if rows is not None:
            out = out.new_zeros(hidden.shape).index_copy(0, rows, out)
        grown = None if cache is None else LayerCache(conv=conv, state=state, seen=cache.num_rows + len(x))
        return AttentionOutput(ranks.own(out), None, None, grown, None, ())

    def _convolve(self, x: Tensor, positions: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """(SiLU of the causal convolution of x [T, 3 H d] within each document, the last W - 1 rows that it saw)."""
        taps, rows = self.config.conv_size, x.shape[0]
        if before is None:
            before = x.new_zeros(taps - 1, x.shape[1])
        seen = torch.cat((before, x))
        weight = self.conv1d.weight[:, 0]
        wide = torch.promote_types(x.dtype, weight.dtype)
        out = x.to(wide) * weight[:, -1].to(wide)
        for back in range(1, taps):
            earlier = seen[taps - 1 - back : taps - 1 - back + rows]
            earlier = earlier.masked_fill((positions < back)[:, None], 0)  # of another document
            out = out + earlier.to(wide) * weight[:, -1 - back].to(wide)
        return F.silu(out).to(x.dtype), seen[rows:]

    def _check(self, hidden: Tensor, layout: Layout, selection: Selection | None, cache: LayerCache | None) -> None:
        rows = layout.real_rows.shape[0]
        if hidden.dim() != 2 or hidden.shape[0] != rows:
            raise InputError(f"hidden must be [{rows}, M] to meet the layout, got {list(hidden.shape)}")
        if selection is not None:
            raise InputError(
                f"selection is given, but layer {self.layer_index} is linear: it selects nothing; pass None"
            )
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"layer {self.layer_index} is linear and reads document lengths on the host, so a CUDA graph would "
                "hold for one packing; run this step without a graph"
            )
        cached = 0 if cache is None else cache.num_rows
        if layout.num_keys != cached + rows:
            raise InputError(
                f"layout has {layout.num_keys} keys for {rows} rows and {cached} cached ones, but a linear layer's "
                "state runs through all rows of a document; give each rank whole documents, a cache its continuation"
            )

    @torch.no_grad()
    def reset_parameters(self, std: float, generator: torch.Generator | None = None) -> None:
        """Fresh decays and convolution: A uniform in 1 .. 16, dt log-uniform in 1e-3 .. 0.1, taps normal with `std`."""
        gate = self.forget_gate
        uniform_(gate.A_log, 1, 16, generator)
        local(gate.A_log).log_()
        uniform_(gate.dt_bias, math.log(1e-3), math.log(0.1), generator)
        step = local(gate.dt_bias).exp_()
        step.add_(torch.log(-torch.expm1(-step)))  # softplus gives the step back
        normal_(self.conv1d.weight, std, generator)
        nn.init.ones_(self.o_norm.weight)


def _real_first(real_rows: Tensor) -> Tensor:
    """Rows in their order, real ones first: where they are without asking the device how many."""
    return (~real_rows).to(torch.uint8).argsort(stable=True)
