"""How much work an operation, a layer and a model do: counted once, by structure, exact in visible pairs.

A multiply-add is two FLOPs. Only matrix products count, not norms, RoPE, softmax, gates, the embedding, ranking, the
optimiser, or what is computed again to save memory (but the field's rules count logits again in the backwards). Bytes
are the least that must move: each operand once, gathered keys once a pair, two bytes a number unless said otherwise.
Letters: H heads, C key width, V value width, H_I / D indexer heads / width, G kv groups; pairs (query row, key).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dsattn.config import GQAConfig, MLAConfig, Mode, ModelConfig
from dsattn.errors import InputError
from dsattn.model.sharing import selection_sources

Direction = Literal["forward", "backward"]
Role = Literal["selects", "shares", "dense"]


@dataclass(frozen=True)
class Work:
    """flops: floating-point operations. bytes: moved to and from memory at least."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)


class Part(NamedTuple):
    """What one kind of operation of a layer or model does in a training step."""

    name: str
    forward: Work
    backward: Work = Work()

    @property
    def total(self) -> Work:
        """Forward and backward."""
        return self.forward + self.backward


class Matrix(NamedTuple):
    """One weight: `part` of the model that it belongs to, input and output width."""

    part: str
    inputs: int
    outputs: int


def visible_pairs(lengths: Iterable[int]) -> int:
    """(row, key) pairs of causal attention inside documents: sum of L (L + 1) / 2."""
    return sum(length * (length + 1) // 2 for length in _checked(lengths))


def kept_pairs(lengths: Iterable[int], top_k: int) -> int:
    """Pairs that are left where each row keeps min(top_k, visible) keys."""
    if top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    full = ((min(length, top_k), length) for length in _checked(lengths))
    return sum(short * (short + 1) // 2 + (length - short) * top_k for short, length in full)


def _checked(lengths: Iterable[int]) -> Iterator[int]:
    for index, length in enumerate(lengths):
        if length < 0:
            raise InputError(f"lengths[{index}]={length} must be at least 0")
        yield length


def linear_work(rows: int, inputs: int, outputs: int, direction: Direction = "forward", itemsize: int = 2) -> Work:
    """`rows` vectors through one weight; backward is the gradients of both input and weight."""
    times = 1 if direction == "forward" else 2
    operands = rows * (inputs + outputs) + inputs * outputs
    return Work(times * 2 * rows * inputs * outputs, times * itemsize * operands)


def indexer_scores_work(rows: int, pairs: int, heads: int, width: int, num_keys: int, itemsize: int = 2) -> Work:
    """q . k for each indexer head over the visible pairs: 2 pairs H_I D. Scores leave in fp32.

    Left out: ReLU and the weighted sum over heads, 1/D of it.
    """
    moved = itemsize * (rows * heads * (width + 1) + num_keys * width) + 4 * pairs
    return Work(2 * pairs * heads * width, moved)


def select_topk_work(rows: int, pairs: int, top_k: int) -> Work:
    """Ranking: every fp32 score read once, K int32 indices and a length a row written; comparisons are no FLOPs."""
    return Work(0, 4 * pairs + 4 * rows * (top_k + 1))


def select_keys_work(rows: int, pairs: int, heads: int, width: int, top_k: int, num_keys: int) -> Work:
    """Scores and ranking in one: the scores never leave their block."""
    scores = indexer_scores_work(rows, pairs, heads, width, num_keys)
    return Work(scores.flops, scores.bytes - 4 * pairs + 4 * rows * (top_k + 1))


def attention_work(
    rows: int, pairs: int, heads: int, width: int, value_width: int, direction: Direction = "forward", *, kv_bytes: int
) -> Work:
    """Dense or sparse attention over `pairs`: forward 2 pairs H (C + V), backward 2 pairs H (3 C + 2 V).

    The backward is logits again, dq, dk on width C, and dp, dv on width V. kv_bytes: what reading keys and values once
    moves, see `dense_kv_bytes` and `sparse_kv_bytes`; the backward also writes as much. Operands have two bytes.
    """
    own = 2 * rows * heads * (width + value_width) + 4 * rows * heads
    if direction == "forward":
        return Work(2 * pairs * heads * (width + value_width), own + kv_bytes)
    return Work(2 * pairs * heads * (3 * width + 2 * value_width), 2 * own + 2 * kv_bytes)


def dense_kv_bytes(num_keys: int, kv_width: int, itemsize: int = 2) -> int:
    """Every key once. kv_width: G (d + d) for GQA, H (d + v) for expanded MLA, C for absorbed MLA."""
    return itemsize * num_keys * kv_width


def sparse_kv_bytes(pairs: int, kv_width: int, itemsize: int = 2) -> int:
    """Every kept pair gathers its key, and reads the int32 index that names it; cache hits are left out."""
    return pairs * (itemsize * kv_width + 4)


def indexer_kl_work(
    rows: int,
    pairs: int,
    index: tuple[int, int],
    attention: tuple[int, int],
    direction: Direction = "forward",
    *,
    target: bool = True,
) -> Work:
    """The indexer's loss over `pairs`. index: (H_I, D). attention: (H, C).

    Forward: scores, 2 pairs H_I D, and the target's logits, 2 pairs H C; target=False leaves these out: attention made
    them in the same pass. Backward: products again, dq and dk, 6 pairs H_I D.
    Bytes are the queries, read, and in the backward the indexer's written too; keys are counted with attention.
    """
    queries, scores = 2 * rows * index[0] * (index[1] + 1), 2 * pairs * index[0] * index[1]
    if direction == "backward":
        return Work(3 * scores, 2 * queries)
    if not target:
        return Work(scores, queries)
    return Work(scores + 2 * pairs * attention[0] * attention[1], queries + 2 * rows * attention[0] * attention[1])


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
    """Weights of one indexer: queries, key, head weights."""
    indexer, hidden = config.dsa.indexer, config.hidden_size
    latent = config.attention.q_lora_rank if isinstance(config.attention, MLAConfig) else None
    source = latent if indexer.query_from == "q_latent" and latent is not None else hidden
    shapes = [(source, indexer.heads * indexer.head_dim), (hidden, indexer.head_dim), (hidden, indexer.heads)]
    return [Matrix("indexer", *shape) for shape in shapes]


def mlp_matrices(config: ModelConfig) -> list[Matrix]:
    """Weights of one SwiGLU."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return [Matrix("mlp", hidden, inner), Matrix("mlp", hidden, inner), Matrix("mlp", inner, hidden)]


def layer_roles(config: ModelConfig) -> list[Role]:
    """What each layer does: `selects` owns an indexer, `shares` reuses a selection, `dense` reads every key."""
    sources = selection_sources(config.types, every=config.dsa.share_every, offset=config.dsa.share_offset)
    return [
        "dense" if source is None else "selects" if source == index else "shares"
        for index, source in enumerate(sources)
    ]


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part of the model: embedding, attention, indexer, mlp, norms (biases and sinks too), head."""
    roles, hidden, attention = layer_roles(config), config.hidden_size, config.attention
    vectors = 2 * hidden + (attention.heads if attention.sink else 0)
    if isinstance(attention, GQAConfig):
        vectors += 2 * attention.head_dim if attention.qk_norm else 0
    else:
        vectors += attention.kv_lora_rank + (attention.q_lora_rank or 0)
    indexers, layers = roles.count("selects"), len(roles)
    return {
        "embedding": config.vocab_size * hidden,
        "attention": layers * _size(attention_matrices(config)),
        "indexer": indexers * _size(indexer_matrices(config)),
        "mlp": layers * _size(mlp_matrices(config)),
        "norms": layers * vectors + hidden + indexers * 2 * config.dsa.indexer.head_dim,
        "head": 0 if config.tie_embeddings else config.vocab_size * hidden,
    }


def layer_parts(config: ModelConfig, role: Role, lengths: Sequence[int], mode: Mode) -> list[Part]:
    """One layer over a pack of documents of `lengths` tokens each; padding rows are no work."""
    backbone = mode != "warmup"
    matrices = attention_matrices(config) + mlp_matrices(config)
    parts = _linear_parts(matrices, sum(lengths), learns=backbone)
    sparse = role != "dense" and mode in ("sparse", "frozen")
    parts.append(_attention_part(config, lengths, sparse=sparse, learns=backbone))
    if role == "selects" and mode != "dense":
        parts += _indexer_parts(config, lengths, mode)
    return parts


def layer_work(config: ModelConfig, role: Role, lengths: Sequence[int], mode: Mode) -> Work:
    """Forward and backward of `layer_parts` together."""
    return sum((part.total for part in layer_parts(config, role, lengths, mode)), Work())


def model_parts(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> list[Part]:
    """One training step over one pack, summed over layers by name, and the head.

    Mode `warmup`: the backbone and the head (whose loss is reported) run forward only. Evaluations are left out.
    """
    head = [Matrix("head", config.hidden_size, config.vocab_size)]
    layers = [part for role in layer_roles(config) for part in layer_parts(config, role, lengths, mode)]
    return _by_name([*layers, *_linear_parts(head, sum(lengths), learns=mode != "warmup")])


def model_work(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> Work:
    """Forward and backward of one training step over documents of `lengths` tokens: over time, the model's FLOP/s."""
    return sum((part.total for part in model_parts(config, lengths, mode)), Work())


def _attention_part(config: ModelConfig, lengths: Sequence[int], *, sparse: bool, learns: bool) -> Part:
    heads, width, value_width, kv_width = _attention_sizes(config.attention, sparse=sparse)
    pairs = kept_pairs(lengths, config.dsa.indexer.top_k) if sparse else visible_pairs(lengths)
    kv_bytes = sparse_kv_bytes(pairs, kv_width) if sparse else dense_kv_bytes(sum(lengths), kv_width)
    sizes = (sum(lengths), pairs, heads, width, value_width)
    forward = attention_work(*sizes, kv_bytes=kv_bytes)
    backward = attention_work(*sizes, "backward", kv_bytes=kv_bytes) if learns else Work()
    return Part("sparse attention" if sparse else "dense attention", forward, backward)


def _indexer_parts(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> list[Part]:
    """Projections, selection and loss of a layer that selects. Inputs are detached: only weights want gradients."""
    indexer, rows, pairs = config.dsa.indexer, sum(lengths), visible_pairs(lengths)
    learns = mode in ("warmup", "sparse")
    forward = sum((linear_work(rows, inputs, outputs) for _, inputs, outputs in indexer_matrices(config)), Work())
    parts = [Part("indexer projections", forward, forward if learns else Work())]
    if mode != "warmup":
        selected = select_keys_work(rows, pairs, indexer.heads, indexer.head_dim, indexer.top_k, rows)
        parts.append(Part("indexer selection", selected))
    if learns:
        # Sparse attention's backward makes the target's logits; in the warm-up nothing else does once lse is known.
        target = mode == "warmup"
        read = pairs if target else kept_pairs(lengths, indexer.top_k)
        attention = _attention_sizes(config.attention, sparse=not target)[:2]
        sizes = (rows, read, (indexer.heads, indexer.head_dim), attention)
        parts.append(Part("indexer loss", indexer_kl_work(*sizes, target=target), indexer_kl_work(*sizes, "backward")))
    return parts


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
