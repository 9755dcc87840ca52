"""How much work a training step of a model does, by layer and by part.

Structure decides: a layer that shares a selection runs no indexer, KPool scores pools and keeps whole ones, a depth of
multi-token prediction is one more layer, one more product of head and embedding, and one more pass of the head. A token
goes through the experts that it is sent to, not through all.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from dsattn.accounting.weights import (
    Layer,
    Matrix,
    Role,
    attention_matrices,
    decoder_layers,
    depths,
    expert_matrices,
    indexer_matrices,
    join_matrices,
    kda_of,
    mlp_matrices,
)
from dsattn.accounting.work import (
    Part,
    Work,
    attention_work,
    delta_rule_work,
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
from dsattn.config import GQAConfig, LayerType, MLAConfig, Mode, ModelConfig


def layer_parts(config: ModelConfig, role: Role, lengths: Sequence[int], mode: Mode) -> list[Part]:
    """One `dsa` or `dense` layer with an MLP, over a pack of documents of `lengths` tokens; padding is no work."""
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
    parts = [
        Part(name, forward * count, backward * count)
        for layer, count in Counter(decoder_layers(config)).items()
        for name, forward, backward in _layer_parts(config, layer, lengths, mode)
    ]
    for depth in depths(config):
        parts += _layer_parts(config, depth, lengths, mode)
        parts += _linear_parts([*join_matrices(config), *head], sum(lengths), learns=learns)
    return _by_name([*parts, *_linear_parts(head, sum(lengths), learns=learns)])


def model_work(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> Work:
    """Forward and backward of one training step over documents of `lengths` tokens: over time, the model's FLOP/s."""
    return sum((part.total for part in model_parts(config, lengths, mode)), Work())


def _layer_parts(config: ModelConfig, layer: Layer, lengths: Sequence[int], mode: Mode) -> list[Part]:
    role, backbone = layer.role, mode != "warmup"
    sparse = role != "dense" and mode in ("sparse", "frozen")
    matrices = attention_matrices(config, layer.kind) + mlp_matrices(config, experts=layer.experts)
    if not layer.own_keys:
        matrices = _without_keys(config, matrices, sparse=sparse)
    parts = _linear_parts(matrices, sum(lengths), learns=backbone)
    if layer.experts:
        parts = _by_name([*parts, _experts_part(config, sum(lengths), learns=backbone)])
    parts.append(_attention_part(config, layer.kind, lengths, sparse=sparse, learns=backbone))
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


def _experts_part(config: ModelConfig, rows: int, *, learns: bool) -> Part:
    """Routed experts: each token through its own, every expert's weights read once."""
    assert config.moe is not None, "only a layer with experts has them"
    sent, forward = rows * config.moe.experts_per_token, Work()
    for _, inputs, outputs in expert_matrices(config):
        one = linear_work(sent, inputs, outputs)
        forward += Work(one.flops, one.bytes + 2 * (config.moe.experts - 1) * inputs * outputs)
    return Part("mlp projections", forward, forward + forward if learns else Work())


def _attention_part(
    config: ModelConfig, kind: LayerType, lengths: Sequence[int], *, sparse: bool, learns: bool
) -> Part:
    if kind == "linear":
        kda, rows = kda_of(config), sum(lengths)
        sizes = (rows, kda.heads, kda.head_dim, kda.head_dim)
        backward = delta_rule_work(*sizes, "backward") if learns else Work()
        return Part("linear attention", delta_rule_work(*sizes), backward)
    heads, width, value_width, kv_width = _attention_sizes(config.attention_of(kind), sparse=sparse)
    pairs = _kept(config, lengths) if sparse else visible_pairs(lengths)
    if kind == "sliding":
        pairs = kept_pairs(lengths, config.sliding_window or 1)
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
