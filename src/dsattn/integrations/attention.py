"""The forward that takes the place of a Hugging Face attention layer's.

It is absorbed multi-latent attention on packed rows (see nn/mla.py), made from the layer's own parameters; no key or
value of a head, no mask and no score matrix is made. Where Hugging Face's code and ours would round differently, theirs
is followed: RoPE in the dtype of the model's tables, norms by the layer's own modules.
Letters: B samples, S tokens, T = B * S rows, H heads, n and R plain and rotated lanes, V latent width, C = V + R.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from dsattn.errors import InputError
from dsattn.integrations.families import FAMILIES, Family, class_names
from dsattn.integrations.glm5_next import select_pools
from dsattn.integrations.microbatch import MICROBATCH, Microbatch
from dsattn.keys import Layout
from dsattn.nn.attention import without_padding
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.rope import RotaryTable, rotate
from dsattn.ops import dense_mla, dsa_attention, indexer_kl, output_gate, select_keys, sparse_mla
from dsattn.ops.dsa import shares_work
from dsattn.selection import Selection

IndexInputs = tuple[Tensor, Tensor | None, RotaryTable | None, Tensor | None]


def attention_forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Hugging Face's forward where the model's call made no microbatch (it has a cache), else ours.

    Ours takes hidden_states [B, S, M] and position_embeddings, and returns what the class returns: the output
    [B, S, M], None for the weights, and in families that share selections the packed key rows [B, S, K].
    """
    microbatch = kwargs.pop(MICROBATCH, None)
    if microbatch is None:
        if self.training and torch.is_grad_enabled():
            raise InputError(
                f"layer {self.layer_idx} is patched, but runs without the hooks of its model; "
                "call the model itself, model(...), neither model.forward(...) nor a layer alone"
            )
        return type(self).forward(self, *args, **kwargs)
    family = next(family for family in FAMILIES.values() if family.attention in class_names(self))
    return _forward(self, family, microbatch, *args, **kwargs)


def _forward(
    attn: Any,
    family: Family,
    microbatch: Microbatch,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    *,
    position_ids: Tensor,
    prev_topk_indices: Tensor | None = None,
    **rest: Any,
) -> tuple[Any, ...]:
    if microbatch.learns and not torch.is_grad_enabled():
        raise InputError(
            "reentrant gradient checkpointing would lose the indexer's loss; pass {'use_reentrant': False} where you "
            "switch checkpointing on"
        )
    batch, tokens, _width = hidden_states.shape
    layout = _on(microbatch.layout, hidden_states.device)
    hidden = without_padding(hidden_states.flatten(0, 1), layout)
    table = None if position_embeddings is None else _table(position_embeddings, batch, tokens)
    log_positions = None
    if hasattr(attn, "softmax_scaling"):
        log_positions = (position_ids.expand(batch, -1).reshape(-1) + 1).float().log()

    w_uk, w_uv = _up_projections(attn, hidden.dtype)
    q_latent, q_nope, q_rope, gate = _queries(attn, family, microbatch, hidden)
    if attn.qk_rope_head_dim and table is not None:
        q_rope = rotate(q_rope, table, interleaved=family.interleaved)
    q = torch.cat((torch.einsum("thn,hnc->thc", q_nope, w_uk), q_rope.to(q_nope.dtype)), -1)
    if log_positions is not None:
        q = q * _growth(attn.softmax_scaling, log_positions, q)[..., None]
    kv = _latents(attn, family, microbatch, hidden, table, rest.get("shared_kv_states", {})).to(q.dtype)
    index_inputs = (hidden, q_latent, table, log_positions)
    out, selection = _attend(attn, family, microbatch, layout, q, kv, index_inputs, prev_topk_indices)
    out = torch.einsum("thc,hvc->thv", out, w_uv)
    if gate is not None:
        cast = "after" if family.gate == "fused" else "before"
        out = output_gate(out, gate, granularity="headwise" if family.gate == "headwise" else "elementwise", cast=cast)
    output = without_padding(attn.o_proj(out.flatten(1)), layout).unflatten(0, (batch, tokens))  # gradients of NaN stop
    if not family.returns_index:
        return output, None
    return output, None, None if selection is None else selection.index.unflatten(0, (batch, tokens))


def _attend(
    attn: Any,
    family: Family,
    microbatch: Microbatch,
    layout: Layout,
    q: Tensor,
    kv: Tensor,
    index_inputs: IndexInputs,
    handed: Tensor | None,
) -> tuple[Tensor, Selection | None]:
    """([T, H, V], the selection that was read, if any). Adds this layer's loss to the report."""
    settings, keys = microbatch.settings, layout.keys
    options = {"backend": settings.backend, "deterministic": settings.deterministic, "scale": attn.scaling}
    attending = {**options, "value_dim": attn.kv_lora_rank, "sink": _sink(attn)}
    if window := getattr(attn, "sliding_window", None):
        return dense_mla(q, kv, keys.last(window), **attending)[0], None
    learns = microbatch.learns and attn.indexer is not None
    index = None
    chooses = settings.mode != "warmup" and not microbatch.chosen(attn.layer_idx)
    if attn.indexer is not None and not family.pools and (learns or chooses):
        with torch.set_grad_enabled(learns):
            index = _index(attn, family, *index_inputs)
    if settings.mode == "warmup":
        out, lse = dense_mla(q, kv, keys, **attending)
        if learns and index is not None:
            microbatch.report.add(attn.layer_idx, _kl(microbatch, layout, index, q, kv, lse, None, options))
        return out, None
    selection = _selection(attn, microbatch, layout, index, index_inputs, handed)
    if not learns or index is None:
        return sparse_mla(q, kv, selection, **attending)[0], selection
    if shares_work(settings.deterministic) and microbatch.kept is None:
        rows = {"real_rows": layout.real_rows, "kl_weight": 1.0}
        out, _, loss = dsa_attention(q, kv, selection, *index, keys, **rows, **attending)
    else:  # two operations where attention runs again and the loss does not
        out, lse = sparse_mla(q, kv, selection, **attending)
        loss = _kl(microbatch, layout, index, q, kv, lse, selection, options)
    microbatch.report.add(attn.layer_idx, loss)
    return out, selection


def _kl(
    microbatch: Microbatch,
    layout: Layout,
    index: IndexerOutput,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    selection: Selection | None,
    options: dict[str, Any],
) -> Tensor:
    make = functools.partial(indexer_kl, real_rows=layout.real_rows, **options)
    return microbatch.graph("loss", make, *index, q, kv, lse, layout.keys, selection)


def _selection(
    attn: Any,
    microbatch: Microbatch,
    layout: Layout,
    index: IndexerOutput | None,
    inputs: IndexInputs,
    handed: Tensor | None,
) -> Selection:
    """Made here, kept from the first pass, or handed over by an earlier layer. index: None where pools are selected."""
    if attn.indexer is not None:
        return microbatch.selected(attn.layer_idx, _select, attn, microbatch.settings.backend, layout, index, inputs)
    if handed is None:
        raise InputError(f"layer {attn.layer_idx} shares a selection, but no layer before it has made one")
    rows = handed.reshape(-1, handed.shape[-1])
    certain = layout.every_row_has_a_key and getattr(attn.config, "index_kpool_always_select_tail", True)
    return Selection(rows, (rows >= 0).sum(-1, dtype=torch.int32), every_row_has_a_key=certain)


def _select(attn: Any, backend: str, layout: Layout, index: IndexerOutput | None, inputs: IndexInputs) -> Selection:
    if index is not None:
        return select_keys(*index, layout.keys, attn.indexer.index_topk, backend=backend)
    hidden, q_latent, *_ = inputs
    assert q_latent is not None, "the family that selects pools has a query latent"
    return select_pools(attn.indexer, hidden, q_latent, layout, backend)


def _index(
    attn: Any,
    family: Family,
    hidden: Tensor,
    q_latent: Tensor | None,
    table: RotaryTable | None,
    log_positions: Tensor | None,
) -> IndexerOutput:
    """The indexer's queries, keys and weights, from detached inputs."""
    indexer, hidden = attn.indexer, hidden.detach()
    heads, lanes = indexer.n_heads, indexer.head_dim
    query_input = indexer.q_input_norm(hidden) if q_latent is None else q_latent.detach()
    q = indexer.wq_b(query_input).unflatten(-1, (heads, lanes))
    if log_positions is not None:
        q = q * _growth(indexer.softmax_scaling, log_positions, q)[..., None]
    projected = indexer.wk(hidden)
    k = indexer.k_norm(projected.to(indexer.k_norm.weight.dtype)).to(projected.dtype)
    if getattr(indexer, "use_rope", True) and table is not None:
        table = RotaryTable(table.cos.detach(), table.sin.detach())  # mistral_large4 learns its frequencies
        wide = torch.promote_types(q.dtype, table.cos.dtype)
        options = {"interleaved": family.index_interleaved, "first": family.index_first}
        q, k = (rotate(x.to(wide), table, **options) for x in (q, k))
    w = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    w = w.to(torch.promote_types(w.dtype, torch.float32)) * (heads**-0.5 * lanes**-0.5)
    return IndexerOutput(q, k, w)


def _queries(
    attn: Any, family: Family, microbatch: Microbatch, hidden: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """(query latent or None, plain lanes [T, H, n], lanes before RoPE [T, H, R], the gate's logits or None)."""
    widths = [attn.qk_nope_head_dim, attn.qk_rope_head_dim]
    if not hasattr(attn, "q_a_proj"):
        q = microbatch.graph("queries", attn.q_proj, hidden)
        q_nope, q_rope = q.unflatten(-1, (attn.num_heads, -1)).split(widths, -1)
        return None, q_nope, q_rope, None
    compressed = microbatch.graph("queries", attn.q_a_proj, hidden)
    q_latent = attn.q_a_layernorm(compressed)
    if hasattr(attn, "q_lora_scale"):
        q_latent = q_latent * attn.q_lora_scale
    if family.gate == "fused":
        fused = attn.q_gate_proj(torch.cat((q_latent, compressed), -1)).unflatten(-1, (attn.num_heads, -1))
        q_nope, q_rope, gate = fused.split([*widths, attn.v_head_dim], -1)
        return q_latent, q_nope, q_rope, gate
    q_nope, q_rope = attn.q_b_proj(q_latent).unflatten(-1, (attn.num_heads, -1)).split(widths, -1)
    gates = {"none": None, "elementwise": "gate_proj", "headwise": "g_proj"}
    name = gates[family.gate]
    gate = None if name is None else microbatch.graph("gate", getattr(attn, name), hidden)
    return q_latent, q_nope, q_rope, gate


def _latents(
    attn: Any,
    family: Family,
    microbatch: Microbatch,
    hidden: Tensor,
    table: RotaryTable | None,
    shared: dict[str, Any],
) -> Tensor:
    """[T, C]: the row that all heads read; of an earlier layer where this one reuses it."""
    name = "rope" if attn.qk_rope_head_dim else "nope"
    if getattr(attn, "is_kv_shared_layer", False):
        return shared[name]
    projected = microbatch.graph("keys", attn.kv_a_proj_with_mqa, hidden)
    latent, k_rope = projected.split([attn.kv_lora_rank, attn.qk_rope_head_dim], -1)
    latent = attn.kv_a_layernorm(latent)
    if hasattr(attn, "kv_lora_scale"):
        latent = latent * attn.kv_lora_scale
    if hasattr(attn, "k_rope_only_layernorm"):
        k_rope = attn.k_rope_only_layernorm(k_rope)
    if attn.qk_rope_head_dim and table is not None:
        k_rope = rotate(k_rope, table, interleaved=family.interleaved)
    kv = torch.cat((latent, k_rope.to(latent.dtype)), -1)
    if getattr(attn, "store_full_length_kv", False):
        shared[name] = kv
    return kv


def _up_projections(attn: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(W_UK [H, n, V], W_UV [H, v, V]): the weight that kv_b_proj has with whatever wraps it, LoRA included."""
    projection = attn.kv_b_proj
    plain = type(projection) is nn.Linear and not projection._forward_pre_hooks and not projection._forward_hooks
    weight = projection.weight
    if not plain:
        basis = torch.eye(attn.kv_lora_rank, dtype=dtype, device=weight.device)
        weight = projection(basis).transpose(0, 1)
    w_uk, w_uv = weight.unflatten(0, (attn.num_heads, -1)).split([attn.qk_nope_head_dim, attn.v_head_dim], 1)
    return w_uk, w_uv


def _growth(scaling: Any, log_positions: Tensor, q: Tensor) -> Tensor:
    """[T, H]: a learned factor that grows with the logarithm of the position."""
    return scaling.scale.to(q.dtype) * log_positions.to(q.dtype)[:, None] + scaling.bias.to(q.dtype)


def _sink(attn: Any) -> Tensor | None:
    sink = getattr(attn, "sinks", None)
    return None if sink is None else sink.to(torch.promote_types(sink.dtype, torch.float32))


def _table(embeddings: tuple[Tensor, Tensor], batch: int, tokens: int) -> RotaryTable:
    """The model's own cos and sin [B or 1, S, R], halves repeated, as a table of T rows."""
    half = embeddings[0].shape[-1] // 2
    return RotaryTable(*(x[..., :half].expand(batch, tokens, half).reshape(-1, half) for x in embeddings))


def _on(layout: Layout, device: torch.device) -> Layout:
    return layout if layout.real_rows.device == device else layout.to(device)
