"""One layer of the decoder: pre-norm residual attention and MLP; and the layer of multi-token prediction made of it.

    type       attention                                                 role
    dsa        `config.attention`, over keys that an indexer selects     selects or shares
    dense      `config.dense_attention`, over every visible key          dense
    sliding    `config.dense_attention`, over the last visible keys      dense
    linear     Kimi Delta Attention                                      dense

Letters: T rows, M model width.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsattn.config import GQAConfig, ModelConfig
from dsattn.keys import Layout
from dsattn.model.mlp import SwiGLU
from dsattn.model.moe import MoE, Routing
from dsattn.nn import GQASelfAttention, MLASelfAttention
from dsattn.nn.attention import Role, SelfAttention
from dsattn.nn.linear_attention import KDASelfAttention
from dsattn.nn.norm import RMSNorm
from dsattn.nn.state import SPARSE, AttentionOutput, LayerCache, Pass
from dsattn.selection import Selection


@dataclass(frozen=True)
class LayerOutput(AttentionOutput):
    """The attention's output with the new residual stream as `hidden`. routing: None in a layer without experts.

    entries: empty but in a depth of multi-token prediction that hands them on: else they would be held beside the MLP.
    """

    routing: Routing | None = None


class DecoderLayer(nn.Module):
    """Attention and MLP, each on normed input and added to the residual stream."""

    def __init__(self, config: ModelConfig, role: Role, layer_index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = _attention(config, role, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = (
            MoE(config.hidden_size, config.moe)
            if config.moe is not None and config.has_experts[layer_index]
            else SwiGLU(config.hidden_size, config.intermediate_size)
        )
        self.window = config.sliding_window if config.all_types[layer_index] == "sliding" else None
        self.hands_entries = layer_index >= config.num_layers and config.mtp.shares("latent_kv")

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        run: Pass = SPARSE,
        *,
        selection: Selection | None = None,
        cache: LayerCache | None = None,
    ) -> LayerOutput:
        """hidden [T, M] -> the new residual stream, with what the attention and the experts' router give."""
        return run.part("layer", self._both, hidden, layout, selection, cache)

    def _both(
        self, run: Pass, hidden: Tensor, layout: Layout, selection: Selection | None, cache: LayerCache | None
    ) -> LayerOutput:
        attended = run.part("attention", self._attend, hidden, layout, selection, cache)
        hidden = hidden + attended.hidden
        out, routing = run.part("mlp", self._feed_forward, hidden, layout)
        rest = (attended.selection, attended.kl, attended.cache, attended.index, attended.entries)
        return LayerOutput(hidden + out, *rest, routing)

    def _attend(
        self, run: Pass, hidden: Tensor, layout: Layout, selection: Selection | None, cache: LayerCache | None
    ) -> AttentionOutput:
        if self.window is not None:
            layout = layout.last(self.window)
        attended = self.self_attn(self.input_layernorm(hidden), layout, run, selection=selection, cache=cache)
        return attended if self.hands_entries else dataclasses.replace(attended, entries=())

    def _feed_forward(self, run: Pass, hidden: Tensor, layout: Layout) -> tuple[Tensor, Routing | None]:
        normed = self.post_attention_layernorm(hidden)
        if isinstance(self.mlp, MoE):
            return self.mlp(normed, layout, run)
        ranks = run.together
        return ranks.leave(self.mlp(ranks.enter(normed))), None


def _attention(config: ModelConfig, role: Role, layer_index: int) -> SelfAttention | KDASelfAttention:
    kind, dsa = config.all_types[layer_index], config.dsa
    if kind == "linear":
        assert config.kda is not None, "ModelConfig wants it where a layer is linear"
        return KDASelfAttention(config.hidden_size, config.kda, layer_index=layer_index)
    attention = config.attention_of(kind)
    if isinstance(attention, GQAConfig):
        return GQASelfAttention(config.hidden_size, attention, dsa, role=role, layer_index=layer_index)
    return MLASelfAttention(config.hidden_size, attention, dsa, role=role, layer_index=layer_index)


class MTPLayer(DecoderLayer):
    """A depth of multi-token prediction; see `model/mtp.py`.

    Parameter names are those of DeepSeek-V3's and GLM's checkpoints: enorm, hnorm, eh_proj, shared_head.norm.
    """

    def __init__(self, config: ModelConfig, role: Role, layer_index: int):
        super().__init__(config, role, layer_index)
        self.enorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.norm_eps)})

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden: Tensor,
        embedded: Tensor,
        layout: Layout,
        run: Pass = SPARSE,
        *,
        selection: Selection | None = None,
    ) -> LayerOutput:
        """hidden [T, M] of the depth before, embedded [T, M] of the tokens ahead -> this depth's, normed."""
        return run.part("layer", self._depth, hidden, embedded, layout, selection)

    def _depth(
        self, run: Pass, hidden: Tensor, embedded: Tensor, layout: Layout, selection: Selection | None
    ) -> LayerOutput:
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        out = self._both(run, joined, layout, selection, None)
        return dataclasses.replace(out, hidden=self.shared_head["norm"](out.hidden))


def decoder_layers(config: ModelConfig) -> list[DecoderLayer]:
    """The decoder's layers, then those of multi-token prediction: which is which follows from `config` alone.

    A pipeline stage keeps its own of them, so a stage of nothing but MTP has the layers that the whole model has.
    """
    return [
        (DecoderLayer if index < config.num_layers else MTPLayer)(
            config, "dense" if source is None else "selects" if source == index else "shares", index
        )
        for index, source in enumerate(config.selection_sources)
    ]
