"""What a layer keeps between its forward and its backward, in bytes a token, by part and by recompute policy.

    none        everything that a gradient is computed from
    selective   norms, MLA's up-projections, the attention core and the MLP run again: from the residual stream before
                and behind attention, and from what the projections out of the hidden states gave
    full        the layer runs again, from the residual stream that entered it

A replay never selects again and repeats no loss: both keep the selection, and where an indexer learns what its loss
found. What one layer hands to others stays, too: latents to later depths, an indexer's q, k and w to all who teach it.
Under autocast to bf16 the decoder's residual stream and what norms read are fp32, and every linear layer keeps its own
bf16 copy of an fp32 input. The stream of a depth of multi-token prediction begins with a product, so it is bf16.
One tensor counts once, whoever keeps it. Left out: what belongs to the layout, scalars, and the copies of its key
norm's weights that an indexer keeps, two numbers a lane.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, get_args

from dsattn.accounting.kept import FP32, Kept, norm_bytes
from dsattn.accounting.weights import (
    Layer,
    Role,
    attention_matrices,
    decoder_layers,
    depths,
    expert_matrices,
    join_matrices,
    mlp_matrices,
    owning_layers,
)
from dsattn.accounting.weights import size as size_of
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
    return layer_parts_kept(Kept(config, Layer(role), mode, size, FP32, fused_norms), recompute)


def weight_copies(
    config: ModelConfig, mode: Mode, *, dtype: Dtype = "float32", experts: bool = False, expert_count: int | None = None
) -> int:
    """Bytes of the bf16 copies of one layer's weights that autocast keeps until the backward, whatever the tokens.

    The indexer's inputs want no gradient, so its weights are not among them, nor is the router, which stays in fp32.
    With recompute there are none. expert_count: routed experts that are here; None for all.
    """
    if dtype == "float32" or mode == "warmup":
        return 0
    matrices = attention_matrices(config) + mlp_matrices(config, experts=experts)
    total = sum(inputs * outputs for _, inputs, outputs in matrices)
    if experts and config.moe is not None:
        each = sum(inputs * outputs for _, inputs, outputs in expert_matrices(config))
        count = config.moe.experts if expert_count is None else expert_count
        total += count * each - config.hidden_size * config.moe.experts
    return 2 * total


def all_copies(
    config: ModelConfig,
    layers: Iterable[Layer],
    mode: Mode,
    recompute: Recompute,
    *,
    dtype: Dtype = "float32",
    expert_count: int | None = None,
) -> int:
    """Bytes of such copies of all layers that own weights; what joins depths runs again under `full` only."""
    if dtype == "float32" or mode == "warmup" or recompute == "full":
        return 0
    layers = list(layers)
    joins = sum(layer.ahead for layer in layers) * 2 * size_of(join_matrices(config))
    if recompute == "selective":
        return joins
    return joins + sum(
        weight_copies(config, mode, dtype=dtype, experts=layer.experts, expert_count=expert_count) for layer in layers
    )


def refuse_uncounted(config: ModelConfig) -> None:
    """Raise InputError for models with linear layers or two kinds of attention: what these keep is not counted."""
    for name in ("kda", "dense_attention"):
        if getattr(config, name) is not None:
            raise InputError(f"config.{name} is set, and what its layers keep is not counted; leave it out, or measure")


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
    Raises InputError for models with linear layers or two kinds of attention: these are not counted.
    """
    refuse_uncounted(config)
    size = _itemsize(dtype)
    layers = [Kept(config, layer, mode, size, FP32, fused_norms) for layer in decoder_layers(config)]
    ahead = [Kept(config, depth, mode, size, size, fused_norms) for depth in depths(config)]
    copies = all_copies(config, owning_layers(config), mode, recompute, dtype=dtype)
    return tokens * sum(row_memory(layers, ahead, recompute).values()) + copies


def row_memory(
    layers: Sequence[Kept], ahead: Sequence[Kept], recompute: Recompute, *, head: bool = True
) -> dict[str, int]:
    """Bytes a row, by part, of decoder layers and depths of multi-token prediction that one process holds.

    head: whether it holds the last norm and the losses, whose inputs stay.
    """
    parts: dict[str, int] = {}
    for one in (*layers, *ahead):
        for name, size in layer_parts_kept(one, recompute).items():
            parts[name] = parts.get(name, 0) + size
    if recompute != "none":
        parts["handed on"] = _handed(layers, ahead)
    if recompute == "full":
        parts["residual stream"] = parts.get("residual stream", 0) + _wider(ahead)
    if (layers or ahead) and (layers or ahead)[0].backbone_learns:
        parts["head"] = _of_head(layers, ahead) if head else 0
    return {name: size for name, size in parts.items() if size}


def _of_head(layers: Sequence[Kept], ahead: Sequence[Kept]) -> int:
    """The last norm, its fp32 result, labels and tokens; for each depth its result, labels and tokens."""
    one = (layers or ahead)[0]
    hidden = one.config.hidden_size
    total = norm_bytes(hidden, one.fused_norms) + FP32 * hidden
    total += sum(depth.itemsize * hidden for depth in ahead)
    return -(-total // one.shards) + _LABELS + _TOKEN + len(ahead) * (_LABELS + 2 * _TOKEN + 1)


def _handed(layers: Sequence[Kept], ahead: Sequence[Kept]) -> int:
    """Bytes of what layers that run again have from others: an indexer's q, k and w to teach, a first depth's keys."""
    total = 0
    roles = [one.layer.role for one in layers if one.layer.role != "dense"]
    for one in layers[:1]:
        if one.config.dsa.multi_layer_teacher and one.mode in ("warmup", "sparse"):
            total += sum(pair == ("selects", "shares") for pair in pairwise(roles)) * one.index()
    if ahead and ahead[0].config.mtp.shares("latent_kv") and ahead[0].backbone_learns:
        total += sum(next(depth for depth in ahead if depth.layer.own_keys).core()[1:3])
    return total


def _wider(ahead: Sequence[Kept]) -> int:
    """Bytes by which the first depth's hidden states are wider than the stream: the decoder's are fp32."""
    return sum(-(-(FP32 - one.stream) * one.config.hidden_size // one.shards) for one in ahead[:1] if one.runs_again)


def layer_parts_kept(kept: Kept, recompute: Recompute) -> dict[str, int]:
    """Bytes a row, by part, of one layer under a policy; parts that keep nothing are left out."""
    if recompute not in get_args(Recompute):
        raise InputError(f"recompute={recompute!r} must be one of {', '.join(get_args(Recompute))}")
    parts = kept.everything() if recompute == "none" else kept.to_run_again(whole=recompute == "full")
    return {name: size for name, size in parts.items() if size}


def _itemsize(dtype: Dtype) -> int:
    if dtype not in get_args(Dtype):
        raise InputError(f"dtype={dtype!r} must be one of {', '.join(get_args(Dtype))}")
    return 2 if dtype == "bfloat16" else 4
