"""How many parameters a model has and how much work a training step of it does, by layer and by part.

Structure decides: a layer that shares a selection runs no indexer, KPool scores pools and keeps whole ones, a depth of
multi-token prediction is one more layer, one more product of head and embedding, and one more pass of the head.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from dsattn.accounting.work import (
    Part,
    Work,
    attention_work,
    dense_kv_bytes,
    indexer_kl_work,
    kept_pairs,
    linear_work,
    pool_keys_work,
    select_keys_work,
    sparse_kv_bytes,
    visible_pairs,
    visible_pools,
)
from dsattn.config import GQAConfig, MLAConfig, Mode, ModelConfig

Role = Literal["selects", "shares", "dense"]


class Matrix(NamedTuple):
    """One weight: `part` of the model that it belongs to, input and output width."""

    part: str
    inputs: int
    outputs: int


class Layer(NamedTuple):
    """What a layer does. own_keys, own_selection: False where a depth of MTP takes them from the first depth."""

    role: Role
    own_keys: bool = True
    own_selection: bool = True

    def teaches(self, config: ModelConfig) -> bool:
        """Whether an indexer learns from its attention: its own, or with a multi-layer teacher that of its source."""
        shares = self.role == "shares" and self.own_selection
        return self.role == "selects" or (shares and config.dsa.multi_layer_teacher)


def attention_matrices(config: ModelConfig) -> list[Matrix]:
    """Weights of one attention layer without its indexer. In absorbed MLA kv_b works on queries and outputs."""
    hidden, attention = config.hidden_size, config.attention
    value_width = attention.head_dim if isinstance(attention, GQAConfig) else attention.v_head_dim
    gate = {"none": 0, "headwise": 1, "elementwise": value_width}[attention.output_gate]
    gates = [Matrix("attention", hidden, attention.heads * gate)] if gate else []
    if isinstance(attention, GQAConfig):
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        return [Matrix("attention", *shape) for shape in shapes] + gates
    queries = attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    rank = attention.q_lora_rank
    shapes = [(hidden, queries)] if rank is None else [(hidden, rank), (rank, queries)]
    shapes += [
        (hidden, attention.latent_width),
        (attention.kv_lora_rank, attention.heads * (attention.qk_nope_head_dim + attention.v_head_dim)),
        (attention.heads * attention.v_head_dim, hidden),
    ]
    return [Matrix("attention", *shape) for shape in shapes] + gates


def indexer_matrices(config: ModelConfig) -> list[Matrix]:
    """Weights of one indexer: queries, key, head weights, and with KPool the keys' gates."""
    indexer, hidden = config.dsa.indexer, config.hidden_size
    latent = config.attention.q_lora_rank if isinstance(config.attention, MLAConfig) else None
    source = latent if indexer.query_from == "q_latent" and latent is not None else hidden
    shapes = [(source, indexer.heads * indexer.head_dim), (hidden, indexer.head_dim), (hidden, indexer.heads)]
    shapes += [(hidden, indexer.head_dim)] if indexer.pool_size > 1 else []
    return [Matrix("indexer", *shape) for shape in shapes]


def mlp_matrices(config: ModelConfig) -> list[Matrix]:
    """Weights of one SwiGLU."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return [Matrix("mlp", hidden, inner), Matrix("mlp", hidden, inner), Matrix("mlp", inner, hidden)]


def layer_roles(config: ModelConfig) -> list[Role]:
    """What each decoder layer does: `selects` owns an indexer, `shares` reuses a selection, `dense` reads every key."""
    return _roles(config)[: config.num_layers]


def depths(config: ModelConfig) -> list[Layer]:
    """One entry a depth of multi-token prediction."""
    mtp, roles = config.mtp, _roles(config)
    found = []
    for depth in range(mtp.depths):
        role, later = roles[config.num_layers + (0 if mtp.repeated else depth)], depth > 0
        follows = later and mtp.shares("sparse_attention_index")
        role = "shares" if follows and role == "selects" else role
        found.append(Layer(role, not (later and mtp.shares("latent_kv")), not follows))
    return found


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part of the model: embedding, attention, indexer, mlp, mtp, norms (biases and sinks too), head.

    Layers of multi-token prediction count with the others; `mtp` is what joins them to the hidden states before them.
    """
    roles, hidden, attention = _roles(config), config.hidden_size, config.attention
    vectors = 2 * hidden + (attention.heads if attention.sink else 0)
    if isinstance(attention, GQAConfig):
        vectors += 2 * attention.head_dim if attention.qk_norm else 0
    else:
        vectors += attention.kv_lora_rank + (attention.q_lora_rank or 0)
    indexer, ahead = config.dsa.indexer, config.mtp.num_layers
    places = indexer.pool_size * indexer.head_dim if indexer.pool_size > 1 else 0  # KPool's position embedding
    indexers, layers = roles.count("selects"), len(roles)
    return {
        "embedding": config.vocab_size * hidden,
        "attention": layers * _size(attention_matrices(config)),
        "indexer": indexers * (_size(indexer_matrices(config)) + places),
        "mlp": layers * _size(mlp_matrices(config)),
        "mtp": ahead * 2 * hidden * hidden,
        "norms": layers * vectors + (1 + 3 * ahead) * hidden + indexers * 2 * indexer.head_dim,
        "head": 0 if config.tie_embeddings else config.vocab_size * hidden,
    }


def layer_parts(config: ModelConfig, role: Role, lengths: Sequence[int], mode: Mode) -> list[Part]:
    """One layer over a pack of documents of `lengths` tokens each; padding rows are no work."""
    return _layer_parts(config, Layer(role), lengths, mode)


def layer_work(config: ModelConfig, role: Role, lengths: Sequence[int], mode: Mode) -> Work:
    """Forward and backward of `layer_parts` together."""
    return sum((part.total for part in layer_parts(config, role, lengths, mode)), Work())


def model_parts(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> list[Part]:
    """One training step over one pack, summed over layers by name, and the head.

    Mode `warmup`: the backbone and the head (whose loss is reported) run forward only. Evaluations are left out.
    """
    hidden, learns = config.hidden_size, mode != "warmup"
    head = [Matrix("head", hidden, config.vocab_size)]
    parts = [part for role in layer_roles(config) for part in layer_parts(config, role, lengths, mode)]
    for depth in depths(config):
        parts += _layer_parts(config, depth, lengths, mode)
        parts += _linear_parts([Matrix("mtp", 2 * hidden, hidden), *head], sum(lengths), learns=learns)
    return _by_name([*parts, *_linear_parts(head, sum(lengths), learns=learns)])


def model_work(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> Work:
    """Forward and backward of one training step over documents of `lengths` tokens: over time, the model's FLOP/s."""
    return sum((part.total for part in model_parts(config, lengths, mode)), Work())


def _roles(config: ModelConfig) -> list[Role]:
    """One entry a layer that owns parameters: the decoder's, then those of multi-token prediction."""
    return [
        "dense" if source is None else "selects" if source == index else "shares"
        for index, source in enumerate(config.selection_sources)
    ]


def _layer_parts(config: ModelConfig, layer: Layer, lengths: Sequence[int], mode: Mode) -> list[Part]:
    role, backbone = layer.role, mode != "warmup"
    sparse = role != "dense" and mode in ("sparse", "frozen")
    matrices = attention_matrices(config) + mlp_matrices(config)
    if not layer.own_keys:
        matrices = _without_keys(config, matrices, sparse=sparse)
    parts = _linear_parts(matrices, sum(lengths), learns=backbone)
    parts.append(_attention_part(config, lengths, sparse=sparse, learns=backbone))
    if mode == "dense":
        return parts
    if role == "selects":
        parts += _indexer_parts(config, lengths, mode)
    if layer.teaches(config) and mode in ("warmup", "sparse"):
        parts.append(_loss_part(config, lengths, mode))
    return parts


def _without_keys(config: ModelConfig, matrices: list[Matrix], *, sparse: bool) -> list[Matrix]:
    """MLA that is handed its keys projects none; kv_b still works on queries and outputs where it is absorbed."""
    assert isinstance(config.attention, MLAConfig), "ModelConfig lets MLA alone share latents"
    rank = config.attention.kv_lora_rank
    keys = [Matrix("attention", config.hidden_size, config.attention.latent_width)]
    if not sparse:
        per_head = config.attention.qk_nope_head_dim + config.attention.v_head_dim
        keys.append(Matrix("attention", rank, config.attention.heads * per_head))
    left = list(matrices)
    for matrix in keys:
        left.remove(matrix)
    return left


def _attention_part(config: ModelConfig, lengths: Sequence[int], *, sparse: bool, learns: bool) -> Part:
    heads, width, value_width, kv_width = _attention_sizes(config.attention, sparse=sparse)
    pairs = _kept(config, lengths) if sparse else visible_pairs(lengths)
    kv_bytes = sparse_kv_bytes(pairs, kv_width) if sparse else dense_kv_bytes(sum(lengths), kv_width)
    sizes = (sum(lengths), pairs, heads, width, value_width)
    forward = attention_work(*sizes, kv_bytes=kv_bytes)
    backward = attention_work(*sizes, "backward", kv_bytes=kv_bytes) if learns else Work()
    return Part("sparse attention" if sparse else "dense attention", forward, backward)


def _indexer_parts(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> list[Part]:
    """Projections and selection of a layer that selects. Inputs are detached: only weights want gradients."""
    indexer, rows, size = config.dsa.indexer, sum(lengths), config.dsa.indexer.pool_size
    forward = sum((linear_work(rows, inputs, outputs) for _, inputs, outputs in indexer_matrices(config)), Work())
    parts = [Part("indexer projections", forward, forward if mode in ("warmup", "sparse") else Work())]
    if mode == "warmup":
        return parts
    pairs = visible_pools(lengths, size)
    work = select_keys_work(rows, pairs, indexer.heads, indexer.head_dim, indexer.top_k // size, rows // size)
    if size > 1:
        width = indexer.top_k + (size - 1 if indexer.pool_tail else 0)
        work += pool_keys_work(rows, indexer.head_dim, size, indexer.top_k // size, width)
    return [*parts, Part("indexer selection", work)]


def _loss_part(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> Part:
    # Sparse attention's backward makes the target's logits; in the warm-up nothing else does once lse is known.
    target = mode == "warmup"
    read = visible_pairs(lengths) if target else _kept(config, lengths)
    attention = _attention_sizes(config.attention, sparse=not target)[:2]
    sizes = (sum(lengths), read, (config.dsa.indexer.heads, config.dsa.indexer.head_dim), attention)
    return Part("indexer loss", indexer_kl_work(*sizes, target=target), indexer_kl_work(*sizes, "backward"))


def _kept(config: ModelConfig, lengths: Sequence[int]) -> int:
    indexer = config.dsa.indexer
    return kept_pairs(lengths, indexer.top_k, indexer.pool_size, tail=indexer.pool_tail)


def _linear_parts(matrices: Iterable[Matrix], rows: int, *, learns: bool) -> list[Part]:
    parts = []
    for part, inputs, outputs in matrices:
        backward = linear_work(rows, inputs, outputs, "backward") if learns else Work()
        name = part if part == "head" else f"{part} projections"
        parts.append(Part(name, linear_work(rows, inputs, outputs), backward))
    return _by_name(parts)


def _by_name(parts: Iterable[Part]) -> list[Part]:
    found: dict[str, Part] = {}
    for name, forward, backward in parts:
        before = found.get(name, Part(name, Work()))
        found[name] = Part(name, before.forward + forward, before.backward + backward)
    return list(found.values())


def _attention_sizes(attention: MLAConfig | GQAConfig, *, sparse: bool) -> tuple[int, int, int, int]:
    """(H, C, V, width of what one key row holds). MLA is absorbed where it is sparse, expanded where it is dense."""
    if isinstance(attention, GQAConfig):
        return attention.heads, attention.head_dim, attention.head_dim, 2 * attention.kv_heads * attention.head_dim
    if sparse:
        return attention.heads, attention.latent_width, attention.kv_lora_rank, attention.latent_width
    width, value_width = attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
    return attention.heads, width, value_width, attention.heads * (width + value_width)


def _size(matrices: Iterable[Matrix]) -> int:
    return sum(matrix.inputs * matrix.outputs for matrix in matrices)
