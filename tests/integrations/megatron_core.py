"""Megatron Core on a CPU: what it takes to build its DSA modules without a GPU and Transformer Engine.

Not a test: `megatron_parity.py` runs it in processes of its own, where replaced functions of torch disturb nobody.
"""

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HIDDEN, HEADS, TOP_K = 48, 4, 6
FIELDS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "use_cpu_initialization": True,
    "bf16": False,
    "params_dtype": torch.float32,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "init_method_std": 0.3,
    "apply_rope_fusion": False,
    "hidden_dropout": 0.0,
    "transformer_impl": "local",
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 16,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": TOP_K,
    "dsa_indexer_loss_coeff": 0.5,
    "dsa_indexer_rotate_activation": False,
}


def import_megatron(*, on_cpu: bool = True) -> None:
    """Import it without its warnings of packages that are absent, and without Transformer Engine's linear layer.

    on_cpu: stand a CPU's answers where it asks CUDA.
    Its fusions are left uncompiled: they would load Inductor, which takes longer than everything else here.
    """
    if on_cpu:
        torch.cuda.current_device = lambda: torch.device("cpu")
    compiled, torch.compile = torch.compile, lambda function=None, **_: function or (lambda one: one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.experimental_attention_variant import absorbed_mla
    torch.compile = compiled
    if on_cpu:
        random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
        random._set_cuda_rng_state = lambda *_, **__: None
    absorbed_mla.TELinear = Duplicated  # what a spec may name for the two down-projections


class Duplicated(nn.Module):
    """A linear layer that every tensor-parallel rank has whole, as Transformer Engine's with parallel_mode."""

    def __init__(self, size: int, out: int, *, init_method: Any, **rest: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, size))
        init_method(self.weight)
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.t(), None

    def backward_dw(self) -> None:
        self.calls.append("backward_dw")


class KeyNorm(nn.LayerNorm):
    """The indexer's, with the constructor that Megatron calls."""

    def __init__(self, config: Any, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps)


class LatentNorm(nn.RMSNorm):
    """Of either latent. Megatron's own wrapper of torch's refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps)


def config_of(**fields: Any) -> Any:
    """A config of `FIELDS`, changed; what Megatron refuses when it is made may be set afterwards."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MLATransformerConfig(**{**FIELDS, **fields})


def attention_spec(config: Any, down: Any = Duplicated) -> Any:
    """Megatron's spec of an absorbed self-attention with DSA, of layers that exist here."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    indexer = dsa.DSAIndexerSubmodules(
        linear_wq_b=Duplicated, linear_wk=Duplicated, k_norm=KeyNorm, linear_weights_proj=Duplicated
    )
    norm = LatentNorm if config.qk_layernorm else IdentityOp
    core = dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=indexer))
    return ModuleSpec(
        module=absorbed_mla.AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=down,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=down,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=ModuleSpec(module=dsa.DSAttention, submodules=core),
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def build(spec: Any, config: Any, groups: Any, layer_number: int = 1) -> Any:
    """The module of a spec. groups: SimpleNamespace(tp=, cp=)."""
    from megatron.core.transformer.spec_utils import build_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_module(
            spec, config=config, layer_number=layer_number, cp_comm_type="allgather", pg_collection=groups
        )


def packed(lengths: list[int], slots: list[int] | None = None, **rest: Any) -> Any:
    """Packed parameters of documents of `lengths` tokens in `slots` rows each."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = [torch.tensor([0, *one]).cumsum(0).int() for one in (lengths, slots or lengths)]
    longest = max(slots or lengths)
    given = {"cu_seqlens_q": ends[0], "cu_seqlens_kv": ends[0], "max_seqlen_q": longest, "max_seqlen_kv": longest}
    if slots is not None:
        given |= {"cu_seqlens_q_padded": ends[1], "cu_seqlens_kv_padded": ends[1]}
    return PackedSeqParams(qkv_format="thd", **given, **rest)


@dataclasses.dataclass
class World:
    """Process groups: of this rank alone, and of both."""

    rank: int
    alone: Any
    both: Any

    def groups(self, tp: int = 1, cp: int = 1) -> Any:
        return SimpleNamespace(tp=self.both if tp > 1 else self.alone, cp=self.both if cp > 1 else self.alone)


def start(rank: int, size: int, rendezvous: str) -> World:
    """Join the other processes over gloo."""
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()  # the linear layer without a query latent is built with no group named
    alone = [dist.new_group([one]) for one in range(size)]
    return World(rank, alone[rank], dist.new_group(list(range(size))))
