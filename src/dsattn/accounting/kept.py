"""The bytes of every tensor that one layer keeps of a token: what `memory.py` adds up.

Letters: M model width, I inner width, H heads, C key width, V value width, H_I / D indexer heads / width, K kept keys.
"""

from dataclasses import dataclass

from dsattn.accounting.weights import Layer
from dsattn.config import GQAConfig, MLAConfig, Mode, ModelConfig

FP32 = 4
_ROW = 4  # one fp32 or int32 number a row


def norm_bytes(width: int, fused: bool, read: int | None = None) -> int:
    """RMSNorm of `width` lanes: its fp32 input, of which `read` lanes are kept alive, and one number a row."""
    return FP32 * (width if read is None else read) + _ROW + (0 if fused else FP32 * width)


@dataclass(frozen=True)
class Kept:
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
    def runs_again(self) -> bool:
        """Whether any gradient goes back through this layer."""
        return self.backbone_learns or self.has_loss

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
        entered = self.stream * self.config.hidden_size if self.runs_again else 0
        parts = {"residual stream": entered, "selection": self.selection(), "indexer loss": self.loss_found()}
        if whole or not self.backbone_learns:
            return parts
        projected = self.itemsize * sum(self._from_hidden())
        return {**parts, "residual stream": 2 * entered, "attention projections": projected}

    def norms(self) -> int:
        """Of hidden states, latents, or query and key heads."""
        attention, fused = self.config.attention, self.fused_norms
        total = 2 * norm_bytes(self.config.hidden_size, fused)
        if isinstance(attention, GQAConfig):
            heads = attention.heads + attention.kv_heads if attention.qk_norm else 0
            return total + heads * norm_bytes(attention.head_dim, fused)
        if attention.q_lora_rank is not None:
            total += norm_bytes(attention.q_lora_rank, fused)
        if self.layer.own_keys:  # in fp32 it reads a part of the projection, all of which stays alive
            read = attention.latent_width if self.itemsize == FP32 else attention.kv_lora_rank
            total += norm_bytes(attention.kv_lora_rank, fused, read)
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
        return FP32 * rotated

    def mlp(self) -> int:
        """Inputs of gate and up, both outputs, silu(gate), and the product that down reads."""
        return self._hidden(2) + 4 * self.itemsize * self.config.intermediate_size

    def selection(self) -> int:
        """Indices and a length, where this layer selects."""
        if self.layer.role != "selects" or not self.sparse:
            return 0
        indexer = self.config.dsa.indexer
        slots = indexer.top_k + (indexer.pool_size - 1 if indexer.pool_size > 1 and indexer.pool_tail else 0)
        return _ROW * (slots + 1)

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
        return total + FP32 * indexer.head_dim + 2 * _ROW + FP32 * indexer.rope_dim + self.index()

    def index(self) -> int:
        """An indexer's q, k and w."""
        indexer = self.config.dsa.indexer
        return self.itemsize * ((indexer.heads + 1) * indexer.head_dim + indexer.heads)

    def loss(self) -> int:
        """What the KL knows of each row, its gradient for selected scores, and in the warm-up attention's q and k."""
        if not self.has_loss:
            return 0
        total = 1 + self.loss_found()
        if self.sparse:
            return total
        q, k, *_ = self.core()
        return total + (0 if self.backbone_learns else q + k + _ROW * self.config.attention.heads)

    def loss_found(self) -> int:
        """What the KL knows of each row, and its gradient for selected scores."""
        if not self.has_loss:
            return 0
        return 3 * _ROW + (FP32 * self.config.dsa.indexer.top_k if self.sparse else 0)

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
