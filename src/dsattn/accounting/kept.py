"""The bytes of every tensor that one layer keeps of a token: what `memory.py` adds up.

A rank of several counts by its own rows, those that its attention heads read. With sequence parallelism it holds a
share of them in the residual stream and in what works row by row; the keys of all rows stand beside its own.
Letters: M model width, I inner width, H heads, C key width, V value width, H_I / D indexer heads / width, K kept keys,
E experts.
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
    """One layer's bytes a row. itemsize, stream: bytes of a number in the arithmetic and in the residual stream.

    config: of what this rank holds: its heads, its part of the inner width. keys: rows of keys for each of its own.
    shards: 1 / the part of its rows in the stream. indexer_shards: 1 / the part that its indexer works on.
    moved: whether rows travel to their experts. reuse: whether a replay takes what the first pass selected.
    """

    config: ModelConfig
    layer: Layer
    mode: Mode
    itemsize: int
    stream: int
    fused_norms: bool
    keys: int = 1
    shards: int = 1
    indexer_shards: int = 1
    moved: bool = False
    reuse: bool = True

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

    @property
    def has_inverse(self) -> bool:
        """Whether the selection that it attends by carries its inverse: see `ops.invert.to_share`."""
        dsa = self.config.dsa
        return self.sparse and dsa.shares and dsa.deterministic is True and dsa.backend != "reference"

    def everything(self) -> dict[str, int]:
        """By part, without recompute."""
        parts = {"selection": self.selection(), "inverse": self.inverse()}
        parts |= {"indexer": self.indexer(), "indexer loss": self.loss()}
        return parts | self.of_joins() | self.of_attention() | self.of_mlp() if self.backbone_learns else parts

    def of_attention(self) -> dict[str, int]:
        """By part, what a backbone that learns keeps up to attention's output."""
        q, k, v, out = self.core()
        return {
            "attention norms": self.attention_norms(),
            "attention projections": self.projections(),
            "attention": q + k + v + out + _ROW * self.config.attention.heads + self.tables(),
        }

    def of_mlp(self) -> dict[str, int]:
        """By part, what it keeps behind that."""
        norm = self._shard(norm_bytes(self.config.hidden_size, self.fused_norms))
        return {"mlp norm": norm, "mlp": self.experts() if self.layer.experts else self.mlp()}

    def of_joins(self) -> dict[str, int]:
        """What a depth's norms keep of both inputs and of its result, and what the product reads that joins the two."""
        if not self.layer.ahead:
            return {}
        hidden = self.config.hidden_size
        inputs = self._shard(2 * norm_bytes(hidden, self.fused_norms) + self.itemsize * 2 * hidden)
        return {"joins": inputs + self.result_norm()}

    def result_norm(self) -> int:
        """What a depth's norm keeps of its result: the first to be given back."""
        return self._shard(norm_bytes(self.config.hidden_size, self.fused_norms)) if self.layer.ahead else 0

    def to_run_again(self, *, whole: bool) -> dict[str, int]:
        """By part, where the layer runs again: the whole of it, or all but the projections out of hidden states."""
        entered = self._shard(self.stream * self.config.hidden_size) if self.runs_again else 0
        embedded = self._shard(FP32 * self.config.hidden_size) if self.runs_again and self.layer.ahead else 0
        parts = {"residual stream": entered + (embedded if whole else 0)}
        if self.reuse or self.config.dsa.shares:  # layers that share it have it from here
            parts |= {"selection": self.selection(), "inverse": self.inverse()}
        if self.reuse:
            parts["indexer loss"] = self.loss_found()
        if self.layer.experts and self.backbone_learns and self.config.moe is not None:
            parts["experts"] = self._shard(4 * self.config.moe.experts_per_token)  # which ones
        if whole or not self.backbone_learns:
            return parts
        projected = self._around_hidden(self.itemsize * sum(self._from_hidden()))
        return {**parts, "residual stream": 2 * entered, "attention projections": projected} | self.of_joins()

    def attention_norms(self) -> int:
        """Of hidden states and latents, or query and key heads."""
        attention, fused = self.config.attention, self.fused_norms
        total = norm_bytes(self.config.hidden_size, fused)
        if isinstance(attention, GQAConfig):
            heads = attention.heads + attention.kv_heads if attention.qk_norm else 0
            return self._shard(total) + heads * norm_bytes(attention.head_dim, fused)
        if attention.q_lora_rank is not None:
            total += norm_bytes(attention.q_lora_rank, fused)
        if self.layer.own_keys:  # in fp32 it reads a part of the projection, all of which stays alive
            read = attention.latent_width if self.itemsize == FP32 else attention.kv_lora_rank
            total += norm_bytes(attention.kv_lora_rank, fused, read)
        return self._shard(total)

    def projections(self) -> int:
        """Inputs of attention's linear layers, and of the gate, that nobody else keeps."""
        attention, size = self.config.attention, self.itemsize
        total = self._around_hidden(self._hidden(len(self._from_hidden())))
        gate = sum(self._gate())
        if isinstance(attention, GQAConfig):
            return total + size * (gate + (attention.heads * attention.head_dim if gate else 0))
        width = attention.heads * attention.v_head_dim
        total += size * (attention.q_lora_rank or 0)
        if self.sparse:  # W_UK reads the queries' projection; o_proj or the gate what W_UV gave
            total += size * attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim) + size * width
        elif self.layer.own_keys:
            total += size * attention.latent_width * self.keys
        return total + size * (gate + (width if gate else 0))

    def core(self) -> tuple[int, int, int, int]:
        """The attention core's queries, keys, values and output; without keys of its own it keeps another's."""
        attention, size, own = self.config.attention, self.itemsize, self.layer.own_keys
        heads = attention.heads
        if isinstance(attention, GQAConfig):
            query, keys = size * heads * attention.head_dim, size * attention.kv_heads * attention.head_dim * self.keys
            return query, keys, keys, query
        own *= self.keys
        if self.sparse:
            keys = own * size * attention.latent_width
            return size * heads * attention.latent_width, keys, 0, size * heads * attention.kv_lora_rank
        query = size * heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        values = size * heads * (attention.qk_nope_head_dim + attention.v_head_dim)  # a part of kv_b_proj's output
        return query, own * query, own * values, size * heads * attention.v_head_dim

    def tables(self) -> int:
        """cos and sin of attention's RoPE; GQA makes them for queries and for keys."""
        attention = self.config.attention
        return FP32 * (2 * attention.rotated if isinstance(attention, GQAConfig) else attention.qk_rope_head_dim)

    def mlp(self) -> int:
        """Inputs of gate and up, both outputs, silu(gate), and the product that down reads."""
        return self._hidden(2) + 4 * self.itemsize * self.config.intermediate_size

    def experts(self) -> int:
        """What router, routed experts, each row K times over, and shared experts keep of the rows of a shard.

        Rows that travel are as many as stay, where loads are equal.
        """
        moe, size, hidden = self.config.moe, self.itemsize, self.config.hidden_size
        assert moe is not None, "only a layer with experts has them"
        slots, inner = moe.experts_per_token, moe.intermediate_size
        normed = self.stream * hidden  # the router's input, and of fp32 arithmetic everybody's
        chosen = slots * (8 + 1 + FP32) + FP32 + FP32 * moe.experts  # indices, holes, weights, their sum, scores
        order = 8 * slots * (4 if self.moved else 2)
        routed = slots * (size * (hidden + 5 * inner) + FP32)  # rows, gate and up, silu, their product, what down reads
        shared = moe.shared_experts * moe.intermediate_size
        casts = 2 * size * hidden if shared and self.stream > size else 0
        return self._shard(normed + chosen + order + routed + casts + 4 * size * shared)

    def selection(self) -> int:
        """Indices and a length, where this layer selects."""
        return _ROW * (self._slots() + 1) if self.layer.role == "selects" and self.sparse else 0

    def inverse(self) -> int:
        """Slots by key, and where each key begins, where this layer selects for others too."""
        return _ROW * (self._slots() + self.keys) if self.layer.role == "selects" and self.has_inverse else 0

    def _slots(self) -> int:
        indexer = self.config.dsa.indexer
        return indexer.top_k + (indexer.pool_size - 1 if indexer.pool_size > 1 and indexer.pool_tail else 0)

    def indexer(self) -> int:
        """Inputs of its linear layers that attention does not keep, its key norm, its RoPE, and its q, k and w."""
        if not self.indexer_learns:
            return 0
        indexer, size = self.config.dsa.indexer, self.itemsize
        from_hidden = indexer.query_from == "hidden"
        total = 0
        if size != self.stream or not self.backbone_learns:
            total += self._shard(self._hidden(2 + from_hidden))
        if isinstance(self.config.attention, MLAConfig) and not from_hidden and not self.backbone_learns:
            total += self._shard(size * (self.config.attention.q_lora_rank or 0))
        return total + self._shard(FP32 * indexer.head_dim + 2 * _ROW + 2 * FP32 * indexer.rope_dim) + self.index()

    def index(self) -> int:
        """An indexer's q, k and w."""
        indexer = self.config.dsa.indexer
        queries = self.itemsize * indexer.heads * (indexer.head_dim + 1)
        return self._indexer_shard(queries) + self.itemsize * indexer.head_dim * self.keys

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
        return self._indexer_shard(3 * _ROW + (FP32 * self.config.dsa.indexer.top_k if self.sparse else 0))

    def _around_hidden(self, size: int) -> int:
        """Latents are made of a shard of hidden states, heads and their gates of all rows."""
        latents = isinstance(self.config.attention, MLAConfig) and self.config.attention.q_lora_rank is not None
        return self._shard(size) if latents and not self._gate() else size

    def _shard(self, size: int) -> int:
        return -(-size // self.shards)

    def _indexer_shard(self, size: int) -> int:
        return -(-size // self.indexer_shards)

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
