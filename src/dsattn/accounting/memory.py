"""What a layer keeps between its forward and its backward, in bytes a token, by part and by recompute policy.

    none        everything that a gradient is computed from
    selective   norms, MLA's up-projections, the attention core and the MLP run again: from the residual stream before
                and behind attention, and from what the projections out of the hidden states gave
    full        the layer runs again, from the residual stream that entered it

A replay never selects again: both keep the selection, and where the indexer learns its fp32 selected scores.
Under autocast to bf16 the decoder's residual stream and what norms read are fp32, and every linear layer keeps its own
bf16 copy of an fp32 input. The stream of a depth of multi-token prediction begins with a product, so it is bf16.
One tensor counts once, whoever keeps it. Left out: what belongs to the layout, and scalars.
Letters: M model width, I inner width, H heads, C key width, V value width, H_I / D indexer heads / width, K kept keys.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from dsattn.accounting.model import (
    Layer,
    Role,
    attention_matrices,
    depths,
    layer_roles,
    mlp_matrices,
)
from dsattn.config import GQAConfig, MLAConfig, Mode, ModelConfig
from dsattn.errors import InputError

Dtype = Literal["float32", "bfloat16"]
Recompute = Literal["none", "selective", "full"]

_FP32 = 4
_ROW = 4  # one fp32 or int32 number a row
_TOKEN = 8  # an int64 token or label
_LABELS = 1  # a bool: which rows have one


def layer_memory(
    config: ModelConfig,
    role: Role,
    mode: Mode,
    *,
    dtype: Dtype = "float32",
    recompute: Recompute = "none",
    fused_norms: bool = True,
) -> dict[str, int]:
    """Bytes a token that one decoder layer keeps for its backward, by part; parts that keep nothing are left out.

    dtype: that of the arithmetic; parameters are fp32. A layer that shares a selection is not charged for it.
    fused_norms: torch's RMSNorm is one kernel on a GPU; on a CPU it is several, which also keep x / rms(x).
    Raises InputError for another dtype or policy. Padding adds a byte a row and is left out.
    """
    size = _itemsize(dtype)
    return _layer_memory(_Kept(config, Layer(role), mode, size, _FP32, fused_norms), recompute)


def weight_copies(config: ModelConfig, mode: Mode, *, dtype: Dtype = "float32") -> int:
    """Bytes of the bf16 copies of one layer's weights that autocast keeps until the backward, whatever the tokens.

    The indexer's inputs want no gradient, so its weights are not among them. With recompute there are none.
    """
    if dtype == "float32" or mode == "warmup":
        return 0
    return 2 * sum(inputs * outputs for _, inputs, outputs in attention_matrices(config) + mlp_matrices(config))


def model_memory(
    config: ModelConfig,
    tokens: int,
    mode: Mode,
    *,
    dtype: Dtype = "float32",
    recompute: Recompute = "none",
    fused_norms: bool = True,
) -> int:
    """Bytes that one training forward over `tokens` rows keeps for the backward: layers, last norm, the losses' inputs.

    Logits are made again in the backward, see `Decoder.lm_loss`. Parameters, gradients and the optimiser are not in it.
    What joins a depth of multi-token prediction to the one before it is kept under every policy.
    """
    size, hidden, ahead = _itemsize(dtype), config.hidden_size, depths(config)
    kept = [_Kept(config, Layer(role), mode, size, _FP32, fused_norms) for role in layer_roles(config)]
    kept += [_Kept(config, depth, mode, size, size, fused_norms) for depth in ahead]
    a_token = sum(sum(_layer_memory(layer, recompute).values()) for layer in kept)
    if mode == "warmup":
        return tokens * a_token
    owners = config.num_layers + config.mtp.num_layers
    copies = owners * weight_copies(config, mode, dtype=dtype) if recompute == "none" else 0
    norm = _norm(hidden, fused_norms)
    a_token += norm + _FP32 * hidden + _LABELS + _TOKEN
    if ahead:  # norms of both inputs and of the result, what the product that joins them reads, the loss
        a_token += len(ahead) * (3 * norm + size * 2 * hidden + size * hidden + _LABELS + 2 * _TOKEN + 1)
        copies += config.mtp.num_layers * 2 * (2 * hidden * hidden) if dtype == "bfloat16" else 0
    return tokens * a_token + copies


def _layer_memory(kept: "_Kept", recompute: Recompute) -> dict[str, int]:
    if recompute not in get_args(Recompute):
        raise InputError(f"recompute={recompute!r} must be one of {', '.join(get_args(Recompute))}")
    parts = kept.everything() if recompute == "none" else kept.to_run_again(whole=recompute == "full")
    return {name: size for name, size in parts.items() if size}


def _itemsize(dtype: Dtype) -> int:
    if dtype not in get_args(Dtype):
        raise InputError(f"dtype={dtype!r} must be one of {', '.join(get_args(Dtype))}")
    return 2 if dtype == "bfloat16" else 4


def _norm(width: int, fused: bool, read: int | None = None) -> int:
    """RMSNorm of `width` lanes: its fp32 input, of which `read` lanes are kept alive, and one number a row."""
    return _FP32 * (width if read is None else read) + _ROW + (0 if fused else _FP32 * width)


@dataclass(frozen=True)
class _Kept:
    """One layer's bytes a token. itemsize, stream: bytes of a number in the arithmetic and in the residual stream."""

    config: ModelConfig
    layer: Layer
    mode: Mode
    itemsize: int
    stream: int
    fused_norms: bool

    @property
    def backbone_learns(self) -> bool:
        return self.mode != "warmup"

    @property
    def indexer_learns(self) -> bool:
        return self.layer.role == "selects" and self.mode in ("warmup", "sparse")

    @property
    def has_loss(self) -> bool:
        return self.layer.teaches(self.config) and self.mode in ("warmup", "sparse")

    @property
    def sparse(self) -> bool:
        return self.layer.role != "dense" and self.mode in ("sparse", "frozen")

    def everything(self) -> dict[str, int]:
        """By part, without recompute."""
        parts = {"selection": self.selection(), "indexer": self.indexer(), "indexer loss": self.loss()}
        if self.backbone_learns:
            q, k, v, out = self.core()
            attention = q + k + v + out + _ROW * self.config.attention.heads
            parts |= {
                "norms": self.norms(),
                "attention projections": self.projections(),
                "attention": attention + self.tables(),
                "mlp": self.mlp(),
            }
        return parts

    def to_run_again(self, *, whole: bool) -> dict[str, int]:
        """By part, where the layer runs again: the whole of it, or all but the projections out of hidden states."""
        entered = self.stream * self.config.hidden_size
        parts = {"residual stream": entered, "selection": self.selection(scores=True)}
        if whole or not self.backbone_learns:
            return parts
        projected = self.itemsize * sum(self._from_hidden())
        return {**parts, "residual stream": 2 * entered, "attention projections": projected}

    def norms(self) -> int:
        """Of hidden states, latents, or query and key heads."""
        attention, fused = self.config.attention, self.fused_norms
        total = 2 * _norm(self.config.hidden_size, fused)
        if isinstance(attention, GQAConfig):
            heads = attention.heads + attention.kv_heads if attention.qk_norm else 0
            return total + heads * _norm(attention.head_dim, fused)
        if attention.q_lora_rank is not None:
            total += _norm(attention.q_lora_rank, fused)
        if self.layer.own_keys:  # in fp32 it reads a part of the projection, all of which stays alive
            read = attention.latent_width if self.itemsize == _FP32 else attention.kv_lora_rank
            total += _norm(attention.kv_lora_rank, fused, read)
        return total

    def projections(self) -> int:
        """Inputs of attention's linear layers, and of the gate, that nobody else keeps."""
        attention, size = self.config.attention, self.itemsize
        total = self._hidden(len(self._from_hidden()))
        gate = sum(self._gate())
        if isinstance(attention, GQAConfig):
            return total + size * (gate + (attention.heads * attention.head_dim if gate else 0))
        width = attention.heads * attention.v_head_dim
        total += size * (attention.q_lora_rank or 0)
        if self.sparse:  # W_UK reads the queries' projection; o_proj or the gate what W_UV gave
            total += size * attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim) + size * width
        elif self.layer.own_keys:
            total += size * attention.kv_lora_rank
        return total + size * (gate + (width if gate else 0))

    def core(self) -> tuple[int, int, int, int]:
        """The attention core's queries, keys, values and output; without keys of its own it keeps another's."""
        attention, size, own = self.config.attention, self.itemsize, self.layer.own_keys
        heads = attention.heads
        if isinstance(attention, GQAConfig):
            query, keys = size * heads * attention.head_dim, size * attention.kv_heads * attention.head_dim
            return query, keys, keys, query
        if self.sparse:
            keys = own * size * attention.latent_width
            return size * heads * attention.latent_width, keys, 0, size * heads * attention.kv_lora_rank
        query = size * heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        values = size * heads * (attention.qk_nope_head_dim + attention.v_head_dim)  # a part of kv_b_proj's output
        return query, own * query, own * values, size * heads * attention.v_head_dim

    def tables(self) -> int:
        """cos and sin of attention's RoPE."""
        attention = self.config.attention
        rotated = attention.rotated if isinstance(attention, GQAConfig) else attention.qk_rope_head_dim
        return _FP32 * rotated

    def mlp(self) -> int:
        """Inputs of gate and up, both outputs, silu(gate), and the product that down reads."""
        return self._hidden(2) + 4 * self.itemsize * self.config.intermediate_size

    def selection(self, *, scores: bool = False) -> int:
        """Indices and a length, where this layer selects; and what a replay needs to know the scores."""
        if self.layer.role != "selects" or not self.sparse:
            return 0
        indexer = self.config.dsa.indexer
        slots = indexer.top_k + (indexer.pool_size - 1 if indexer.pool_size > 1 and indexer.pool_tail else 0)
        return _ROW * (slots + 1) + (_FP32 * indexer.top_k if scores and self.indexer_learns else 0)

    def indexer(self) -> int:
        """Inputs of its linear layers that attention does not keep, its key norm, its RoPE, and its q, k and w."""
        if not self.indexer_learns:
            return 0
        indexer, size = self.config.dsa.indexer, self.itemsize
        from_hidden = indexer.query_from == "hidden"
        total = 0
        if size != self.stream or not self.backbone_learns:
            total += self._hidden(2 + from_hidden)
        if isinstance(self.config.attention, MLAConfig) and not from_hidden and not self.backbone_learns:
            total += size * (self.config.attention.q_lora_rank or 0)
        total += _FP32 * indexer.head_dim + 2 * _ROW + _FP32 * indexer.rope_dim
        return total + size * ((indexer.heads + 1) * indexer.head_dim + indexer.heads)

    def loss(self) -> int:
        """What the KL knows of each row, its gradient for selected scores, and in the warm-up attention's q and k."""
        if not self.has_loss:
            return 0
        total = 1 + 3 * _ROW
        if self.sparse:
            return total + _FP32 * self.config.dsa.indexer.top_k
        q, k, *_ = self.core()
        return total + (0 if self.backbone_learns else q + k + _ROW * self.config.attention.heads)

    def _hidden(self, readers: int) -> int:
        """Normed hidden states that linear layers read: kept once, or a cast for each where the stream is wider."""
        return (readers if self.stream > self.itemsize else 1) * self.itemsize * self.config.hidden_size

    def _from_hidden(self) -> list[int]:
        """Output widths of attention's linear layers that read hidden states."""
        attention, gate = self.config.attention, self._gate()
        if isinstance(attention, GQAConfig):
            keys = attention.kv_heads * attention.head_dim
            return [attention.heads * attention.head_dim, keys, keys, *gate]
        queries = attention.q_lora_rank or attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        return [queries, *[attention.latent_width] * self.layer.own_keys, *gate]

    def _gate(self) -> list[int]:
        """Width of the gate's logits; nothing without one."""
        attention = self.config.attention
        if attention.output_gate == "none":
            return []
        channels = attention.head_dim if isinstance(attention, GQAConfig) else attention.v_head_dim
        return [attention.heads * (channels if attention.output_gate == "elementwise" else 1)]
