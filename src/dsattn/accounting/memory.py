"""What a layer keeps between its forward and its backward, in bytes a token, by part and by recompute policy.

    none        everything that a gradient is computed from
    selective   norms, MLA's up-projections, the attention core and the MLP run again: from the residual stream before
                and behind attention, and from what the projections out of the hidden states gave
    full        the layer runs again, from the residual stream that entered it

A replay never selects again and repeats no loss: both keep the selection, and where an indexer learns what its loss
found. What one layer hands to others stays, too: latents to later depths, an indexer's q, k and w to all who teach it.
Under autocast to bf16 the decoder's residual stream and what norms read are fp32, and every linear layer keeps its own
bf16 copy of an fp32 input. The stream of a depth of multi-token prediction begins with a product, so it is bf16.
One tensor counts once, whoever keeps it. Left out: what belongs to the layout, and scalars.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from dsattn.accounting.kept import FP32, Kept, norm_bytes
from dsattn.accounting.weights import Layer, Role, attention_matrices, depths, layer_roles, mlp_matrices
from dsattn.config import Mode, ModelConfig, Recompute
from dsattn.errors import InputError

Dtype = Literal["float32", "bfloat16"]

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
    return _layer_memory(Kept(config, Layer(role), mode, size, FP32, fused_norms), recompute)


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
    What joins a depth of multi-token prediction to the one before it runs again under `full` only.
    Raises InputError for models with experts, linear layers or two kinds of attention: these are not counted.
    """
    for name in ("moe", "kda", "dense_attention"):
        if getattr(config, name) is not None:
            raise InputError(f"config.{name} is set, and what its layers keep is not counted; leave it out, or measure")
    size, ahead = _itemsize(dtype), depths(config)
    kept = [Kept(config, Layer(role), mode, size, FP32, fused_norms) for role in layer_roles(config)]
    kept += [Kept(config, depth, mode, size, size, fused_norms) for depth in ahead]
    a_token = sum(sum(_layer_memory(layer, recompute).values()) for layer in kept)
    a_token += 0 if recompute == "none" else _handed(kept)
    if recompute == "full":
        a_token += _entered_ahead(kept[len(kept) - len(ahead) :])
    if mode == "warmup":
        return tokens * a_token
    hidden, norm = config.hidden_size, norm_bytes(config.hidden_size, fused_norms)
    owners, copies = config.num_layers + config.mtp.num_layers, 0
    if recompute == "none":
        copies = owners * weight_copies(config, mode, dtype=dtype)
    a_token += norm + FP32 * hidden + _LABELS + _TOKEN
    if ahead:
        a_token += len(ahead) * (size * hidden + _LABELS + 2 * _TOKEN + 1)
    if ahead and recompute != "full":  # norms of both inputs and of the result, what the product that joins them reads
        a_token += len(ahead) * (3 * norm + size * 2 * hidden)
        copies += config.mtp.num_layers * 2 * (2 * hidden * hidden) if dtype == "bfloat16" else 0
    return tokens * a_token + copies


def _handed(kept: Sequence[Kept]) -> int:
    """Bytes of what layers that run again have from others: an indexer's q, k and w to teach, a first depth's keys."""
    first = kept[0]
    config, sources, total = first.config, first.config.selection_sources, 0
    if config.dsa.multi_layer_teacher and first.mode in ("warmup", "sparse"):
        teachers = {source for layer, source in enumerate(sources) if source not in (None, layer)}
        total += len(teachers) * first.index()
    if config.mtp.shares("latent_kv") and first.backbone_learns:
        source = next(layer for layer in kept[config.num_layers :] if layer.layer.own_keys)
        total += sum(source.core()[1:3])
    return total


def _entered_ahead(ahead: Sequence[Kept]) -> int:
    """Bytes that enter depths beside the stream: embeddings, and the first one's hidden states, which are fp32."""
    each = [FP32 * one.config.hidden_size for one in ahead if one.runs_again]
    wider = [(FP32 - one.stream) * one.config.hidden_size for one in ahead[:1] if one.runs_again]
    return sum(each) + sum(wider)


def _layer_memory(kept: Kept, recompute: Recompute) -> dict[str, int]:
    if recompute not in get_args(Recompute):
        raise InputError(f"recompute={recompute!r} must be one of {', '.join(get_args(Recompute))}")
    parts = kept.everything() if recompute == "none" else kept.to_run_again(whole=recompute == "full")
    return {name: size for name, size in parts.items() if size}


def _itemsize(dtype: Dtype) -> int:
    if dtype not in get_args(Dtype):
        raise InputError(f"dtype={dtype!r} must be one of {', '.join(get_args(Dtype))}")
    return 2 if dtype == "bfloat16" else 4
