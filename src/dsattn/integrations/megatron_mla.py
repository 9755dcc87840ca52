"""The whole of Megatron's absorbed self-attention: its projections and norms, our RoPE, absorption and gate.

`SelfAttention` stands before Megatron's `AbsorbedMLASelfAttention` in `megatron.self_attention`, so that constructor,
parameters and keys stay Megatron's. What Megatron 0.19 lacks: context-parallel groups of a micro-batch, an output gate,
deferred weight gradients, RoPE for packs without a device sync and with padding behind them, and the right gradient of
the rotated key lanes where linear_kv_down_proj is column-parallel.
Letters: s rows of one sample on this rank, b samples, h heads of this rank, M model width, T = b * s.
"""

import copy
import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from dsattn.config import RopeConfig
from dsattn.errors import InputError
from dsattn.integrations.megatron_config import Options, rope_of
from dsattn.integrations.megatron_layout import Groups, fold, rows_of, unfold
from dsattn.nn.rope import RotaryTable, rotary_table, rotate
from dsattn.ops import output_gate


class SelfAttention:
    """Mixin before Megatron's AbsorbedMLASelfAttention; see the module.

    options: see `megatron_config.Options`; the core attention of the spec is ours. Other arguments are Megatron's. With
    `attention_output_gate` there is a further weight `linear_gate.weight`, [h * v_head_dim or h, M], split by rows.
    """

    config: Any
    pg_collection: Any
    training: bool
    attn_mask_type: Any
    recompute_up_proj: bool
    checkpoint_core_attention: bool
    core_attention: Any
    linear_q_proj: Any
    linear_q_down_proj: Any
    linear_q_up_proj: Any
    linear_kv_down_proj: Any
    linear_proj: Any
    q_layernorm: Any
    kv_layernorm: Any
    _checkpointed_attention_forward: Any
    _get_kv_up_weights: Any

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args: Any, **kwargs: Any):
        options = kwargs.pop("options", None) or Options()
        if getattr(config, "delay_wgrad_compute", False):
            at_once = _at_once(submodules.linear_kv_up_proj)
            submodules = dataclasses.replace(submodules, linear_kv_up_proj=at_once)
        super().__init__(config, submodules, layer_number, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        self.options: Options = options
        self.rope: RopeConfig = rope_of(config)
        self.granularity: Literal["elementwise", "headwise"] | None = None
        if getattr(config, "attention_output_gate", False):
            self.granularity = getattr(config, "gated_attention_proj_granularity", None) or "elementwise"
            if not hasattr(self, "linear_gate"):
                self.linear_gate = self._new_gate(submodules)

    def _new_gate(self, submodules: Any) -> Any:
        from megatron.core.transformer.spec_utils import build_module

        config = self.config
        return build_module(
            submodules.linear_q_proj if config.q_lora_rank is None else submodules.linear_q_up_proj,
            config.hidden_size,
            config.num_attention_heads * (config.v_head_dim if self.granularity == "elementwise" else 1),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="gate",
            tp_group=self.pg_collection.tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        position_ids: Tensor | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron's signature. hidden_states: [s or s / TP, b, M], after the input norm; packs have b = 1.

        Returns the same shape and the projection's bias, None. Raises InputError for what only inference uses.
        """
        _refuse(
            key_value_states=key_value_states,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            rotary_pos_cos_sin=rotary_pos_cos_sin,
            attention_bias=attention_bias,
            inference_params=inference_params,
        )
        query, key, q_latent, discard = self._absorbed(hidden_states, packed_seq_params, position_ids)
        _, up_v = self._get_kv_up_weights()
        given: dict[str, Any] = {"position_ids": position_ids, "packed_seq_params": packed_seq_params}
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
            out = attend(query, key, hidden_states, q_latent, attention_mask, up_v, **given)
        else:
            given |= {"x": hidden_states, "qr": q_latent, "up_v_weight": up_v}
            mask_type = self.attn_mask_type
            out = self.core_attention(query, key, None, attention_mask, attn_mask_type=mask_type, **given)
        if discard is not None:
            discard(out)
        return self.linear_proj(out if self.granularity is None else self._gated(out, hidden_states))

    def _gated(self, out: Tensor, hidden: Tensor) -> Tensor:
        batch, width = out.shape[1], self.config.v_head_dim
        gate = fold(self.linear_gate(hidden)[0])
        heads = fold(out).unflatten(-1, (-1, width))
        return unfold(output_gate(heads, gate, granularity=self.granularity or "elementwise").flatten(1), batch)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Megatron's: absorbed queries [s, b, h, C], keys [s, b, 1, C], normalised query latent [s or s / TP, b, r]."""
        _refuse(
            key_value_states=key_value_states, inference_context=inference_context, inference_params=inference_params
        )
        return self._absorbed(hidden_states, packed_seq_params, None)[:3]

    def _absorbed(self, hidden: Tensor, packed: Any, position_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Any]:
        """(queries, keys, query latent, what frees queries and keys once attention has read them, or None)."""
        config, tp = self.config, self.pg_collection.tp
        q_latent = hidden
        if config.q_lora_rank is not None:
            q_latent = self.q_layernorm(self._down(self.linear_q_down_proj, hidden, config.q_lora_rank))
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        latent, k_rope = self._down(self.linear_kv_down_proj, hidden, width).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1
        )
        kv = torch.cat((self.kv_layernorm(latent), k_rope), -1)
        if tp is not None and tp.size() > 1 and config.sequence_parallel:
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

            kv = gather_from_sequence_parallel_region(kv, group=tp)
        groups = Groups.of(config, self.pg_collection, packed, kv.shape[0], hidden.shape[0])
        rows = rows_of(kv.shape[1], kv.device, groups, packed, self.options, position_ids)
        table = rotary_table(rows.positions, self.rope, config.qk_pos_emb_head_dim, dtype=kv.dtype)
        if not self.recompute_up_proj:
            return *self._up(q_latent, kv, *table), q_latent, None
        from megatron.core.tensor_parallel import CheckpointWithoutOutput

        checkpoint = CheckpointWithoutOutput(fp8=config.fp8 or config.fp4)  # None, not False, says neither
        query, key = checkpoint.checkpoint(self._up, q_latent, kv, *table)
        return query, key, q_latent, checkpoint.discard_output_and_register_recompute

    def _down(self, linear: Any, hidden: Tensor, width: int) -> Tensor:
        """[s or s / TP, b, width], also of a column-parallel layer, which has gathered the rows and split the width."""
        from megatron.core.tensor_parallel import mappings

        out = linear(hidden)[0]
        if out.shape[-1] == width:
            return out
        out = mappings.gather_from_tensor_model_parallel_region(out, group=self.pg_collection.tp)
        return mappings.scatter_to_sequence_parallel_region(out, group=self.pg_collection.tp)

    def _up(self, q_latent: Tensor, kv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(queries [s, b, h, C] with the key up-projection folded in, keys [s, b, 1, C]), both rotated."""
        config, table = self.config, RotaryTable(cos, sin)
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        widths = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        q_nope, q_rope = project(q_latent)[0].unflatten(-1, (-1, sum(widths))).split(widths, -1)
        up_k, _ = self._get_kv_up_weights()
        folded = torch.einsum("sbhd,hdk->sbhk", q_nope, up_k)
        query = torch.cat((folded, rotate(q_rope, table, interleaved=True)), -1)
        latent, k_rope = kv.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        return query, torch.cat((latent, rotate(k_rope, table, interleaved=True)), -1).unsqueeze(-2)

    def backward_dw(self) -> None:
        """Deferred weight gradients of every linear layer whose forward ran, the indexer's and the gate's with them.

        linear_kv_up_proj is not among them: its weight is read, and has its gradient at once, see `_at_once`.
        """
        names = ["linear_kv_down_proj", "linear_proj"]
        names += ["linear_q_proj"] if self.config.q_lora_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
        names += [] if self.granularity is None else ["linear_gate"]
        for name in names:
            getattr(self, name).backward_dw()
        indexer = self.core_attention.indexer
        if indexer is not None and (self.config.dsa_indexer_loss_coeff or 0) > 0:
            for name in ("linear_wq_b", "linear_wk", "linear_weights_proj"):
                getattr(indexer, name).backward_dw()

    def set_for_recompute_input_layernorm(self) -> None:
        """For fp8 and fp4: layers that read the input norm's output keep it as it is, the gate with them."""
        super().set_for_recompute_input_layernorm()  # pyright: ignore[reportAttributeAccessIssue]
        if self.granularity is not None:
            from megatron.core.extensions.transformer_engine import set_save_original_input

            set_save_original_input(self.linear_gate)


def _at_once(linear: type) -> type:
    """The same layer without deferral: no forward of it runs that could hand a weight gradient on."""

    def __init__(self: Any, *args: Any, config: Any, **rest: Any) -> None:
        config = copy.copy(config)
        config.delay_wgrad_compute = False
        linear.__init__(self, *args, config=config, **rest)

    return type(linear.__name__, (linear,), {"__init__": __init__, "__module__": linear.__module__})


def _refuse(**given: Any) -> None:
    """Raise InputError for arguments that training does not use."""
    if names := [name for name, value in given.items() if value is not None]:
        raise InputError(
            f"{', '.join(names)} must be None: this layer trains, with causal attention and RoPE of its own"
        )
