"""FLOPs of a training step by Megatron Core's published formula, to lay TFLOP/s of the two frameworks side by side.

Forward and backward are three forwards, a multiply-add two FLOPs; T = sum of L, S2 = sum of L^2 over documents of L
tokens. Letters: H heads, C key width, V value width, H_I / D indexer heads / width, K kept keys, M model width.

    weights of attention, MLP and head, norms of latents      6 T a number
    joints of multi-token prediction                          6 T (2 M^2 + 3 M) a depth
    attention                                                 6 S2 H (C + V) / 2 a layer, times s:
        dense: widths of expanded heads, s = 1
        sparse: absorbed widths, s = e (1 - e / 2m) / (m / 2), with m = S2 / T and e = min(K, floor(m))
    indexer, its loss on                                      4 T a weight, 6 S2 H_I D / 2 a layer that selects
    indexer, its loss off                                     2 T a weight, 2 S2 H_I D / 2

What differs from `model_work`, and why, is in docs/guide.md, "FLOPs and memory".
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

from dsattn.accounting.weights import (
    Layer,
    attention_matrices,
    decoder_layers,
    depths,
    expert_matrices,
    indexer_matrices,
    mlp_matrices,
    size,
)
from dsattn.config import MLAConfig, Mode, ModelConfig
from dsattn.errors import InputError


def megatron_flops(config: ModelConfig, lengths: Sequence[int], mode: Mode = "sparse") -> int:
    """FLOPs of one step over documents of `lengths` tokens, rounded to a whole number.

    mode: `sparse` has the indexer's loss, `frozen` has not. `dense` has neither indexer nor selection: so Megatron Core
    0.19 counts its own DSA models, too. A depth of MTP counts as the layer it repeats; where depths share latents,
    later ones have no weight that makes keys.
    Raises InputError with all that the formula does not know: mode `warmup`, and models other than MLA with DSA.
    """
    if problems := list(_problems(config, lengths, mode)):
        raise InputError("Megatron's formula does not count this: " + "; ".join(problems))
    tokens, squares = sum(lengths), sum(length * length for length in lengths)
    ahead, hidden = depths(config), config.hidden_size
    layers = decoder_layers(config) + ahead
    numbers = sum(_numbers(config, layer) for layer in layers)
    numbers += len(ahead) * (2 * hidden * hidden + 3 * hidden) + (len(ahead) + 1) * hidden * config.vocab_size
    total = Fraction(6 * tokens * numbers) + 3 * len(layers) * _attention(config, tokens, squares, mode)
    if mode != "dense":
        projected, scored = (4, 6) if mode == "sparse" else (2, 2)
        indexer = config.dsa.indexer
        one = projected * tokens * size(indexer_matrices(config))
        one += Fraction(scored * squares * indexer.heads * indexer.head_dim, 2)
        total += one * [layer.role for layer in layers].count("selects")
    return round(total)


def _numbers(config: ModelConfig, layer: Layer) -> int:
    """Numbers that a token meets in one layer: weights, the latents' norms, and experts it goes to, but no router."""
    attention, hidden = _mla(config), config.hidden_size
    numbers = size(attention_matrices(config)) + (attention.q_lora_rank or 0) + attention.kv_lora_rank
    if not layer.own_keys:
        numbers -= hidden * attention.latent_width + attention.kv_lora_rank
    if not layer.experts or config.moe is None:
        return numbers + size(mlp_matrices(config))
    return numbers + (config.moe.experts_per_token + config.moe.shared_experts) * size(expert_matrices(config))


def _attention(config: ModelConfig, tokens: int, squares: int, mode: Mode) -> Fraction:
    """Twice the multiply-adds of one layer's forward over causal pairs: S2 s H (C + V)."""
    attention = _mla(config)
    if mode == "dense" or not squares:
        expanded = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        return Fraction(squares * attention.heads * expanded)
    mean = Fraction(squares, tokens)
    kept = min(config.dsa.indexer.top_k, int(mean))
    scale = kept * (1 - kept / (2 * mean)) / (mean / 2)
    return squares * scale * attention.heads * (attention.latent_width + attention.kv_lora_rank)


def _mla(config: ModelConfig) -> MLAConfig:
    assert isinstance(config.attention, MLAConfig), "checked"
    return config.attention


def _problems(config: ModelConfig, lengths: Sequence[int], mode: Mode) -> Iterator[str]:
    if mode not in ("dense", "sparse", "frozen"):
        yield f"mode={mode!r} must be dense, sparse or frozen: Megatron has no warm-up of an indexer alone"
    for index, length in enumerate(lengths):
        if length < 0:
            yield f"lengths[{index}]={length} must be at least 0"
    if set(config.types) != {"dsa"}:
        yield f"layer_types={config.layer_types} must all be dsa"
    if not isinstance(config.attention, MLAConfig):
        yield "attention must be an MLAConfig"
    elif config.attention.output_gate != "none":
        yield f"attention.output_gate={config.attention.output_gate!r} must be 'none'"
    if config.dsa.indexer.pool_size > 1:
        yield f"dsa.indexer.pool_size={config.dsa.indexer.pool_size} must be 1"
    if config.dsa.multi_layer_teacher:
        yield "dsa.multi_layer_teacher=True must be False"
