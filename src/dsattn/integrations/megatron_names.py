"""Names of weights in Megatron Core's GPT models with multi-latent attention and DSA, whole and unsharded.

    decoder.layers.N.self_attention.linear_q_down_proj.weight            self_attn.q_a_proj.weight
    decoder.layers.N.self_attention.core_attention.indexer.linear_wk     self_attn.indexer.wk
    decoder.layers.N.mlp.linear_fc1.weight                               mlp.gate_proj over mlp.up_proj
    decoder.layers.N.mlp.experts.linear_fc1.weight3                      mlp.experts.gate_up_proj[3]
    mtp.layers.D.mtp_model_layer.self_attention...                       model.layers.(num_layers + D).self_attn...

These are the names of a state dict of Megatron Core 0.19 with Transformer Engine. A model of a hybrid pattern numbers
attention 2 N and its MLP 2 N + 1, and calls the last norm final_norm. Read are also checkpoints whose linear_kv_up_proj
is split into linear_k_up_proj and linear_v_up_proj, and the names of `_other_names`. Shapes are those of one
tensor-parallel rank; values are ours: Megatron rotates neighbouring lanes in MLA, too.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dsattn.config import MLAConfig, ModelConfig
from dsattn.errors import InputError
from dsattn.integrations.hf_names import joined, shapes
from dsattn.integrations.stored import LastRead, Stored, Tensors, check

_ATTENTION = {
    "q_proj.weight": "linear_q_proj.weight",
    "q_a_proj.weight": "linear_q_down_proj.weight",
    "q_a_layernorm.weight": "q_layernorm.weight",
    "q_b_proj.weight": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa.weight": "linear_kv_down_proj.weight",
    "kv_a_layernorm.weight": "kv_layernorm.weight",
    "kv_b_proj.weight": "linear_kv_up_proj.weight",
    "o_proj.weight": "linear_proj.weight",
    "indexer.wq_b.weight": "core_attention.indexer.linear_wq_b.weight",
    "indexer.wk.weight": "core_attention.indexer.linear_wk.weight",
    "indexer.k_norm.weight": "core_attention.indexer.k_norm.weight",
    "indexer.k_norm.bias": "core_attention.indexer.k_norm.bias",
    "indexer.weights_proj.weight": "core_attention.indexer.linear_weights_proj.weight",
}
_DENSE = {"down_proj.weight": "linear_fc2.weight"}
_MOE = {
    "gate.weight": "router.weight",
    "gate.e_score_correction_bias": "router.expert_bias",
    "shared_experts.down_proj.weight": "shared_experts.linear_fc2.weight",
}
_TOP = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}

Part = tuple[str, int | None]
"""One of our tensors, or one expert of it."""


def to_megatron_names(tensors: Tensors, config: ModelConfig, *, hybrid: bool = False) -> Tensors:
    """Megatron's weights out of those of `Decoder(config)`. Raises InputError for a model that Megatron has not."""
    last = LastRead()
    named: Tensors = {}
    for name, parts in _parts(config, hybrid).items():
        wholes = [tensors[ours] for ours, _ in parts]
        each = [one.shape if part[1] is None else one.shape[1:] for one, part in zip(wholes, parts, strict=True)]
        shape = (sum(one[0] for one in each), *each[0][1:])
        named[name] = Stored(shape, wholes[0].dtype, _over_each_other(last, wholes, [expert for _, expert in parts]))
    return named


def from_megatron_names(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The weights of `Decoder(config)`, in float32, out of Megatron's; hybrid numbering is recognised.

    Raises InputError for a model that Megatron has not, and CheckpointError with everything that is missing, that
    nothing uses (other than `_extra_state`), or whose shape does not fit.
    """
    parts = _parts(config, "decoder.final_norm.weight" in tensors)
    wanted = shapes(config)
    held = {name: one for name, one in tensors.items() if "_extra_state" not in name}
    held = _merged_up_projections(_other_names(held, parts), config)
    problems = [f"{name} is missing" for name in sorted(parts.keys() - held.keys())]
    problems += [f"{name} belongs to nothing in this model" for name in sorted(held.keys() - parts.keys())]
    pieces: dict[str, list[Stored]] = {name: [] for name in wanted}
    for name in [name for name in parts if name in held]:
        ours = [wanted[one] if expert is None else wanted[one][1:] for one, expert in parts[name]]
        expected = (sum(shape[0] for shape in ours), *ours[0][1:])
        if held[name].shape != expected:
            problems.append(f"{name} is {list(held[name].shape)}, must be {list(expected)}")
            continue
        for place, (one, _) in enumerate(parts[name]):
            pieces[one].append(_piece(held[name], ours[0], place))
    check("the checkpoint does not fit its configuration", problems)
    return {name: joined(shape, pieces[name]) for name, shape in wanted.items()}


def _other_names(tensors: Tensors, parts: Mapping[str, Any]) -> Tensors:
    """Under the names above, what is called otherwise.

    transformer_layer: the layer of MTP, in sharded and in older checkpoints. experts.local_experts.3: an expert, where
    products are not grouped. pre_mlp_layernorm: the norm before an MLP, where Transformer Engine does not fuse it.
    """
    renamed: Tensors = {}
    for name, one in tensors.items():
        ours = re.sub(r"^(mtp\.layers\.\d+\.)transformer_layer\.", r"\1mtp_model_layer.", name)
        ours = re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", ours)
        fused = re.sub(r"pre_mlp_layernorm\.weight$", "mlp.linear_fc1.layer_norm_weight", ours)
        renamed[fused if ours not in parts and fused in parts else ours] = one
    return renamed


def _parts(config: ModelConfig, hybrid: bool) -> dict[str, list[Part]]:
    """Megatron's name -> what stands in it, one over the other along the first axis; experts in their order."""
    problems = list(_problems(config, hybrid))
    if problems:
        raise InputError("Megatron Core does not have this model: " + "; ".join(problems))
    parts: dict[str, list[Part]] = {}
    for ours, theirs in _TOP.items():
        parts[theirs.replace("final_layernorm", "final_norm") if hybrid else theirs] = [(ours, None)]
    for layer in range(len(config.all_types)):
        depth = layer - config.num_layers
        attention = f"decoder.layers.{2 * layer if hybrid else layer}."
        mlp = f"decoder.layers.{2 * layer + 1 if hybrid else layer}."
        if depth >= 0:
            parts |= {
                f"mtp.layers.{depth}.{name}": [(f"model.layers.{layer}.{one}", None)] for one, name in _MTP.items()
            }
            attention = mlp = f"mtp.layers.{depth}.mtp_model_layer."
        parts |= _parts_of_layer(config, layer, attention, mlp)
    held = shapes(config)
    return {name: ours for name, ours in parts.items() if all(one in held for one, _ in ours)}


def _parts_of_layer(config: ModelConfig, layer: int, attention: str, mlp: str) -> dict[str, list[Part]]:
    ours, experts = f"model.layers.{layer}.", config.has_experts[layer]
    parts: dict[str, list[Part]] = {f"{attention}input_layernorm.weight": [(f"{ours}input_layernorm.weight", None)]}
    for one, name in _ATTENTION.items():
        parts[f"{attention}self_attention.{name}"] = [(f"{ours}self_attn.{one}", None)]
    # Megatron fuses the norm before a dense MLP with the first linear layer.
    norm = "pre_mlp_layernorm.weight" if experts else "mlp.linear_fc1.layer_norm_weight"
    parts[mlp + norm] = [(f"{ours}post_attention_layernorm.weight", None)]
    for one, name in (_MOE if experts else _DENSE).items():
        parts[f"{mlp}mlp.{name}"] = [(f"{ours}mlp.{one}", None)]
    inner = "shared_experts." if experts else ""
    halves: list[Part] = [(f"{ours}mlp.{inner}{half}_proj.weight", None) for half in ("gate", "up")]
    parts[f"{mlp}mlp.{inner}linear_fc1.weight"] = halves
    for one, name in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        for expert in range(config.moe.experts if experts and config.moe is not None else 0):
            parts[f"{mlp}mlp.experts.{name}.weight{expert}"] = [(f"{ours}mlp.experts.{one}", expert)]
    return parts


def _problems(config: ModelConfig, hybrid: bool) -> Iterator[str]:
    attention = config.attention
    if set(config.all_types) != {"dsa"}:
        yield f"layer_types={config.layer_types} must all be dsa"
    if not isinstance(attention, MLAConfig):
        yield "attention must be an MLAConfig"
        return
    if not attention.rope_interleaved:
        yield "attention.rope_interleaved=False must be True"
    if attention.output_gate != "none" or attention.sink:
        yield f"attention.output_gate={attention.output_gate!r} and sink={attention.sink} must be 'none' and False"
    if config.dsa.indexer.pool_size > 1:
        yield f"dsa.indexer.pool_size={config.dsa.indexer.pool_size} must be 1"
    if hybrid and config.mtp.depths:
        yield "hybrid=True needs mtp.depths=0: no names of its MTP layers are known"


def _merged_up_projections(tensors: Tensors, config: ModelConfig) -> Tensors:
    """With linear_k_up_proj [H nope, V] and linear_v_up_proj [H v, V] merged, head by head, into linear_kv_up_proj."""
    attention = config.attention
    assert isinstance(attention, MLAConfig), "checked"
    merged: Tensors = {}
    for name, one in tensors.items():
        other = tensors.get(name.replace("linear_k_up_proj", "linear_v_up_proj"))
        if "linear_k_up_proj" in name and other is not None:
            shape = (one.shape[0] + other.shape[0], *one.shape[1:])
            read = _head_by_head(one, other, attention.heads)
            merged[name.replace("linear_k_up_proj", "linear_kv_up_proj")] = Stored(shape, one.dtype, read)
        elif "linear_v_up_proj" not in name or name.replace("linear_v_up", "linear_k_up") not in tensors:
            merged[name] = one
    return merged


def _head_by_head(keys: Stored, values: Stored, heads: int) -> Callable[[], Tensor]:
    def read() -> Tensor:
        return torch.cat([one.read().unflatten(0, (heads, -1)) for one in (keys, values)], 1).flatten(0, 1)

    return read


def _over_each_other(last: LastRead, wholes: list[Stored], experts: list[int | None]) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if len(wholes) == 1 and experts[0] is not None:
            return last.read(wholes[0])[experts[0]].clone()
        return torch.cat([one.read() for one in wholes])

    return read


def _piece(whole: Stored, shape: tuple[int, ...], place: int) -> Stored:
    """Rows place * shape[0] and on."""
    if whole.shape == shape:
        return whole
    return Stored(shape, whole.dtype, lambda: whole.read()[place * shape[0] :][: shape[0]])
