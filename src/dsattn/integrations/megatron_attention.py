"""What takes the place of Megatron Core's `DSAttention.forward`: our operators on its tensors.

`CoreAttention` stands before Megatron's class in `megatron.core_attention`, so that constructor, parameters, state-dict
and sharded-state-dict keys stay Megatron's; its indexer's linear layers and norm are called, whatever they are made of,
and nothing else of its code.

    Megatron                                                here
    masks, bounds, positions: megatron_layout.Rows          one KeyRange
    scores, torch.topk                                      select_keys, ties by rule
    sparse attention, loss                                  dsa_attention; dense loss: indexer_kl over every visible key
    top-k holders on the config or the mask                 Shared: on the packed parameters, else one slot

Letters: s query rows of this rank, S keys in global order, b samples, h heads of this rank, M model width, T = b * s.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsattn.config import RopeConfig
from dsattn.errors import InputError
from dsattn.integrations.megatron_config import Options, check_config, rope_of
from dsattn.integrations.megatron_layout import Groups, InOrder, Rows, fold, rows_of, unfold
from dsattn.integrations.megatron_loss import Heads, Run, attach_loss, log_loss
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.norm import hadamard
from dsattn.nn.rope import rotary_table, rotate
from dsattn.ops import select_keys
from dsattn.selection import Selection


@dataclass
class Shared:
    """Selections of one micro-batch by layer number. It hangs on the packed parameters, and ends with them.

    They must be of one micro-batch alone, as Megatron's loaders make them. Without any a slot on the config serves,
    which holds the newest selection alone: right as long as no layer runs again.
    for_replay: layers whose selection was made by a first pass that will run again.
    """

    selections: dict[int, Selection] = field(default_factory=dict)
    for_replay: set[int] = field(default_factory=set)

    NAME = "_dsattn_shared"

    @classmethod
    def of(cls, owner: Any) -> "Shared":
        """That of `owner`, which gets one where it has none."""
        if (held := getattr(owner, cls.NAME, None)) is None:
            held = cls()
            setattr(owner, cls.NAME, held)
        return held

    def keep(self, layer: int, selection: Selection, *, first_pass: bool) -> None:
        """Take the selection of `layer`. first_pass: that layer will run again."""
        self.selections[layer] = selection
        (self.for_replay.add if first_pass else self.for_replay.discard)(layer)

    def replayed(self, layer: int) -> Selection | None:
        """What the first pass of `layer` chose, if this is its replay."""
        return self.selections[layer] if layer in self.for_replay and torch.is_grad_enabled() else None

    def of_source(self, source: int, layer: int) -> Selection:
        """The selection of layer `source`, for `layer`."""
        if source not in self.selections:
            raise InputError(
                f"layer {layer} shares the selection of layer {source}, which did not run before it on this pipeline "
                "stage; begin every stage with a layer that selects"
            )
        return self.selections[source]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shared":
        return Shared()  # a copy of a config is another model's

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, ()


class CoreAttention:
    """Mixin before Megatron's DSAttention; see the module.

    options: see Options. layer_offset: added to the layer's number, so that layers of multi-token prediction are
    numbered behind the decoder's. whole: the self-attention around it is ours, too. Other arguments are Megatron's.
    Raises ConfigError with every field that cannot be honoured.
    """

    config: Any
    indexer: Any
    pg_collection: Any
    training: bool
    layer_number: int
    source_layer: int
    index_share: bool
    softmax_scale: float

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args: Any, **kwargs: Any):
        options = kwargs.pop("options", None) or Options()
        layer_number += kwargs.pop("layer_offset", 0)
        check_config(config, whole=kwargs.pop("whole", False))
        super().__init__(config, submodules, layer_number, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        self.options: Options = options
        self.rope: RopeConfig = rope_of(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        position_ids: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        up_v_weight: Tensor | None = None,
    ) -> Tensor:
        """Megatron's signature and shapes.

        query: [s, b, h, C] or packed [T, h, C]; key alike with one head, its own rows or already every rank's. value:
        None with absorbed queries, else [s, b, h, V]. x: [s or s / TP, b, M], after the input norm. qr: the normalised
        query latent. up_v_weight: [h, v, V], with absorbed queries. attention_mask: not read, attention is causal.
        Returns [s, b, h * v]. Raises InputError on whatever a KeyRange cannot say.
        """
        mask_type = getattr(attn_mask_type, "name", attn_mask_type)
        if mask_type != "causal" or attention_bias is not None:
            raise InputError(
                f"attn_mask_type={mask_type} must be causal, and attention_bias None (it is "
                f"{type(attention_bias).__name__}): only causal attention, packed or not, is served"
            )
        query, key = _with_batch(query), _with_batch(key)
        groups = Groups.of(self.config, self.pg_collection, packed_seq_params, query.shape[0], x.shape[0])
        rows = rows_of(query.shape[1], query.device, groups, packed_seq_params, self.options, position_ids)
        mask = getattr(packed_seq_params, "real_token_mask_q", None)
        learns = self._learns(groups)
        selection, index = self._selected(x, qr, rows, packed_seq_params, groups, learns)

        key = _everyone(key, rows, groups)
        if value is None:
            heads = self._absorbed(query, key, up_v_weight)
        else:
            heads = self._expanded(query, key, _everyone(_with_batch(value), rows, groups))
        run = Run(self.config, self.options, rows, mask, groups, self._flags())
        out, loss = run.attend(heads, index if learns else None, selection)
        out = unfold(out.flatten(1), query.shape[1]).contiguous()
        if loss is not None:
            log_loss(self, loss, groups)
            out = attach_loss(out, loss)
        return out if x.dim() == 3 else out.squeeze(1)

    def _flags(self) -> dict[str, Any]:
        unfused = getattr(self.config.attention_backend, "name", self.config.attention_backend) == "unfused"
        backend = "reference" if unfused and self.options.backend == "auto" else self.options.backend
        return {"backend": backend, "deterministic": True if self.config.deterministic_mode else None}

    def _learns(self, groups: Groups) -> bool:
        wanted = self.training and torch.is_grad_enabled()
        learns = wanted and (self.config.dsa_indexer_loss_coeff or 0) > 0 and self.indexer is not None
        if learns and groups.local:
            raise InputError("the indexer's loss needs the same query rows on every tensor-parallel rank; gather them")
        return learns

    def _selected(
        self, x: Tensor, qr: Tensor, rows: Rows, micro_batch: Any, groups: Groups, learns: bool
    ) -> tuple[Selection, IndexerOutput | None]:
        """The selection of this layer's rows and, where the indexer ran, its queries, keys and weights."""
        config, number = self.config, self.layer_number
        runs_again = self.training and _recomputes(config)
        reuse = runs_again and micro_batch is not None and self.options.reuse_selection
        owner = config if micro_batch is None else micro_batch
        shared = Shared.of(owner) if self.index_share or reuse else Shared()
        if self.indexer is None:
            if micro_batch is None and runs_again:
                raise InputError(
                    f"dsa_indexer_topk_freq={config.dsa_indexer_topk_freq} with recompute needs packed_seq_params: by "
                    f"them a replay of layer {number} finds its selection; pack, or set recompute_granularity=None"
                )
            return shared.of_source(self.source_layer, number), None
        kept = shared.replayed(number) if reuse else None
        index = None
        if kept is None or learns:
            with torch.set_grad_enabled(learns):
                index = self._index(x, qr, rows, groups)
        if kept is not None:
            return kept, index
        assert index is not None, "without a kept selection the indexer runs"
        selection = select_keys(
            *index,
            rows.own(groups).keys,
            config.dsa_indexer_topk,
            relu=config.dsa_indexer_scoring_relu,
            precision=self.options.precision,
            block_bytes=self.options.block_bytes,
            backend=self._flags()["backend"],
        )
        if micro_batch is None:
            shared.selections.clear()
        if self.index_share or reuse:
            shared.keep(number, selection, first_pass=reuse and not torch.is_grad_enabled())
        return selection, index

    def _index(self, x: Tensor, qr: Tensor, rows: Rows, groups: Groups) -> IndexerOutput:
        """q [T, H_I, D], k [b * S, D], w [T, H_I] of the indexer, which learns from nothing but its loss."""
        indexer, config = self.indexer, self.config
        x, qr = x.detach(), qr.detach()
        if groups.sequence_parallel:
            x, qr = _gathered(x, groups.tp), _gathered(qr, groups.tp)
        if not rows.keys.every_row_has_a_key:  # what lies in padding must not reach a weight's gradient
            padding = ~rows.real
            x, qr = x.masked_fill(padding[:, None, None], 0), qr.flatten(1).masked_fill(padding[:, None], 0)
        heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        q = indexer.linear_wq_b(qr)[0].reshape(*x.shape[:2], heads, width)
        k = indexer.linear_wk(x)[0]
        k = indexer.k_norm(k.float()).to(k.dtype) if config.dsa_indexer_k_norm_fp32 else indexer.k_norm(k)
        table = rotary_table(rows.positions, self.rope, config.qk_pos_emb_head_dim, dtype=q.dtype)
        q, k = (rotate(one, table, interleaved=config.dsa_indexer_rope_interleaved) for one in (q, k))
        if config.dsa_indexer_rotate_activation:
            q, k = hadamard(q), hadamard(k)
        w = indexer.linear_weights_proj(x)[0] * heads**-0.5 * width**-0.5
        k = _everyone(k, rows, groups)
        if groups.local:
            q, w = (one[groups.own_rows] for one in (q, w))
        return IndexerOutput(fold(q), fold(k), fold(w))

    def _absorbed(self, query: Tensor, key: Tensor, up_v: Tensor | None) -> Heads:
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if key.shape[2] != 1 or not query.shape[3] == key.shape[3] == width or up_v is None:
            raise InputError(
                f"value=None needs absorbed queries and one key head, both {width} wide, and up_v_weight; got query "
                f"{list(query.shape)}, key {list(key.shape)}, up_v_weight {None if up_v is None else list(up_v.shape)}"
            )
        return Heads(fold(query), fold(key.squeeze(2)), None, up_v.to(query.dtype), self.softmax_scale)

    def _expanded(self, query: Tensor, key: Tensor, value: Tensor) -> Heads:
        if value.shape[2] != key.shape[2]:
            heads = max(value.shape[2], key.shape[2])
            key, value = (one.expand(-1, -1, heads, -1) for one in (key, value))
        return Heads(fold(query), fold(key), fold(value), None, self.softmax_scale)


def _everyone(keys: Tensor, rows: Rows, groups: Groups) -> Tensor:
    """[S, b, ...]: the keys of all ranks in global order; those that are complete already stay as they are."""
    full = groups.full_rows
    if groups.sequence_parallel and keys.shape[0] * groups.tp_size == full:
        keys = _gathered(keys, groups.tp)
    if groups.cp_size > 1 and keys.shape[0] == full:
        keys = InOrder.apply(_gathered(keys, groups.cp), rows.order, rows.inverse)  # pyright: ignore[reportAssignmentType]
    if keys.shape[0] != full * groups.cp_size:
        raise InputError(f"there are {keys.shape[0]} keys for {full} rows on each of {groups.cp_size} ranks")
    return keys


def _gathered(x: Tensor, group: Any) -> Tensor:
    """The rows of all ranks, rank by rank; the backward sums and scatters."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    return gather_from_sequence_parallel_region(x, group=group)


def _with_batch(x: Tensor) -> Tensor:
    """[s, b, h, d], of it or of packed [T, h, d]."""
    if x.dim() not in (3, 4):
        raise InputError(f"queries, keys and values must be [s, b, h, d] or [T, h, d], got {list(x.shape)}")
    return x if x.dim() == 4 else x.unsqueeze(1)


def _recomputes(config: Any) -> bool:
    """Whether attention runs again in the backward."""
    granularity = config.recompute_granularity
    return granularity == "full" or (granularity == "selective" and "core_attn" in (config.recompute_modules or ()))
