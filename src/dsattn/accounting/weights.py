"""What a model is made of: role and type of each layer, its weights, and how many parameters that is."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from dsattn.config import GQAConfig, KDAConfig, LayerType, MLAConfig, ModelConfig

Role = Literal["selects", "shares", "dense"]


class Matrix(NamedTuple):
    """One weight: `part` of the model that it belongs to, input and output width."""

    part: str
    inputs: int
    outputs: int


class Layer(NamedTuple):
    """What a layer does. own_keys, own_selection: False where a depth of MTP takes them from the first depth.

    given_kind: None for `dsa`, or `dense` by the role. experts: whether its MLP is a mixture of experts. ahead: whether
    it is a depth of multi-token prediction, whose weights and FSDP unit have what joins it to the depth before.
    """

    role: Role
    own_keys: bool = True
    own_selection: bool = True
    given_kind: LayerType | None = None
    experts: bool = False
    ahead: bool = False

    @property
    def kind(self) -> LayerType:
        """The layer's type."""
        return self.given_kind or ("dense" if self.role == "dense" else "dsa")

    def teaches(self, config: ModelConfig) -> bool:
        """Whether an indexer learns from its attention: its own, or with a multi-layer teacher that of its source."""
        shares = self.role == "shares" and self.own_selection
        return self.role == "selects" or (shares and config.dsa.multi_layer_teacher)


def attention_matrices(config: ModelConfig, kind: LayerType = "dsa") -> list[Matrix]:
    """Weights of one attention layer without its indexer. In absorbed MLA kv_b works on queries and outputs."""
    hidden = config.hidden_size
    if kind == "linear":
        return _kda_matrices(hidden, kda_of(config))
    attention = config.attention_of(kind)
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


def kda_of(config: ModelConfig) -> KDAConfig:
    """The linear attention of a model with `linear` layers."""
    assert config.kda is not None, "ModelConfig wants it where a layer is linear"
    return config.kda


def _kda_matrices(hidden: int, kda: KDAConfig) -> list[Matrix]:
    width, rank = kda.width, kda.head_dim
    gate = {"none": 0, "headwise": kda.heads, "elementwise": width}[kda.output_gate]
    shapes = [(hidden, width)] * 3 + [(hidden, rank), (rank, width), (hidden, kda.heads), (width, hidden)]
    shapes += [(hidden, rank), (rank, gate)] if gate else []
    return [Matrix("attention", *shape) for shape in shapes]


def mlp_matrices(config: ModelConfig, *, experts: bool = False) -> list[Matrix]:
    """Weights of the MLP that every token goes through: one SwiGLU, or router and shared experts."""
    hidden, moe = config.hidden_size, config.moe
    if not experts or moe is None:
        return _swiglu(hidden, config.intermediate_size)
    shared = moe.shared_experts * moe.intermediate_size
    return [Matrix("mlp", hidden, moe.experts), *(_swiglu(hidden, shared) if shared else [])]


def expert_matrices(config: ModelConfig) -> list[Matrix]:
    """Weights of one routed expert."""
    assert config.moe is not None, "only a layer with experts has them"
    return _swiglu(config.hidden_size, config.moe.intermediate_size)


def join_matrices(config: ModelConfig) -> list[Matrix]:
    """The weight that joins a depth of multi-token prediction to hidden states; three norms belong to it."""
    return [Matrix("mtp", 2 * config.hidden_size, config.hidden_size)]


def _swiglu(hidden: int, inner: int) -> list[Matrix]:
    return [Matrix("mlp", hidden, inner), Matrix("mlp", hidden, inner), Matrix("mlp", inner, hidden)]


def decoder_layers(config: ModelConfig) -> list[Layer]:
    """One entry a decoder layer."""
    return owning_layers(config)[: config.num_layers]


def layer_roles(config: ModelConfig) -> list[Role]:
    """What each decoder layer does: `selects` owns an indexer, `shares` reuses a selection, `dense` reads every key."""
    return [layer.role for layer in decoder_layers(config)]


def depths(config: ModelConfig) -> list[Layer]:
    """One entry a depth of multi-token prediction."""
    mtp, layers = config.mtp, owning_layers(config)
    found = []
    for depth in range(mtp.depths):
        layer, later = layers[config.num_layers + (0 if mtp.repeated else depth)], depth > 0
        follows = later and mtp.shares("sparse_attention_index")
        role = "shares" if follows and layer.role == "selects" else layer.role
        own_keys = not (later and mtp.shares("latent_kv"))
        found.append(layer._replace(role=role, own_keys=own_keys, own_selection=not follows))
    return found


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part of the model: embedding, attention, indexer, mlp, mtp, norms (biases and sinks too), head.

    Layers of multi-token prediction count with the others; `mtp` is what joins them to the hidden states before them.
    """
    layers, hidden = owning_layers(config), config.hidden_size
    indexer = config.dsa.indexer
    places = indexer.pool_size * indexer.head_dim if indexer.pool_size > 1 else 0  # KPool's position embedding
    indexers = [layer.role for layer in layers].count("selects")
    taps = 0 if config.kda is None else 3 * config.kda.width * config.kda.conv_size
    linear = [layer.kind for layer in layers].count("linear")
    routed = 0 if config.moe is None else config.moe.experts * size(expert_matrices(config))
    return {
        "embedding": config.vocab_size * hidden,
        "attention": sum(size(attention_matrices(config, layer.kind)) for layer in layers) + linear * taps,
        "indexer": indexers * (size(indexer_matrices(config)) + places),
        "mlp": sum(size(mlp_matrices(config, experts=one.experts)) + one.experts * routed for one in layers),
        "mtp": config.mtp.num_layers * size(join_matrices(config)),
        "norms": sum(layer_vectors(config, layer) for layer in layers) + hidden + indexers * 2 * indexer.head_dim,
        "head": 0 if config.tie_embeddings else config.vocab_size * hidden,
    }


def layer_vectors(config: ModelConfig, layer: Layer) -> int:
    """Parameters of one layer that are no matrices, its indexer's left out."""
    own = (5 if layer.ahead else 2) * config.hidden_size
    if layer.kind == "linear":  # the norm of the heads, dt and A
        kda = kda_of(config)
        return own + kda.head_dim + kda.width + kda.heads
    attention = config.attention_of(layer.kind)
    own += attention.heads if attention.sink else 0
    if isinstance(attention, GQAConfig):
        return own + (2 * attention.head_dim if attention.qk_norm else 0)
    return own + attention.kv_lora_rank + (attention.q_lora_rank or 0)


def owning_layers(config: ModelConfig) -> list[Layer]:
    """One entry a layer that owns parameters: the decoder's, then those of multi-token prediction."""
    facts = zip(config.selection_sources, config.all_types, config.has_experts, strict=True)
    return [
        Layer(
            "dense" if source is None else "selects" if source == index else "shares",
            given_kind=kind,
            experts=experts,
            ahead=index >= config.num_layers,
        )
        for index, (source, kind, experts) in enumerate(facts)
    ]


def size(matrices: Iterable[Matrix]) -> int:
    """Parameters of all of them."""
    return sum(matrix.inputs * matrix.outputs for matrix in matrices)
