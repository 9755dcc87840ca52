"""Tensor parallel: heads, and the channels of dense MLPs, are split over the ranks of `tp`; the rest stays whole.

split by                          weights
rows (heads, channels)            q_proj or q_b_proj, kv_b_proj, k_proj, v_proj, gate_proj, sinks; the MLP's gate, up
columns, and results summed       o_proj; the MLP's down
not                               down-projections to latents, norms, indexer, linear layers, router, experts,
                                  embedding, head

With sequence parallelism each rank runs whole weights on its own shard of rows, embedding and head included: nothing
is computed twice, and their gradients are parts of a sum. Without it every rank computes the same, and gradients are
complete but for weights that heads share.
Attention itself is told by `Pass.ranks`: see `nn/ranks.py` and `parallel.context.ranks_of`.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dsattn.config import GQAConfig
from dsattn.errors import InputError
from dsattn.model.layer import DecoderLayer
from dsattn.model.mlp import SwiGLU
from dsattn.nn.attention import SelfAttention
from dsattn.nn.gqa import GQASelfAttention
from dsattn.parallel.mesh import ParallelMesh

BY_ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
BUCKET = 2**25  # elements that are summed at a time; a larger gradient goes alone, without a copy


def split(model: nn.Module, mesh: ParallelMesh) -> None:
    """Leave each rank of `tp` its part of the weights, in place; nothing where the group has one rank.

    Split weights become DTensors over `tp`, so FSDP2 may shard them further and checkpoints know the whole. Every rank
    must hold the same whole weights before: nothing is sent. Call it before FSDP2.
    Raises InputError, before anything is changed, where the group does not divide heads, groups or channels.
    """
    if mesh.size("tp") == 1:
        return
    parts = list(_split_modules(model))
    _check(parts, mesh.size("tp"))
    over = mesh.device_mesh("tp")

    def divide(module: nn.Module, name: str, dim: int) -> None:
        whole = getattr(module, name)
        part = distribute_tensor(whole.detach(), over, [Shard(dim)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))

    for _, module in parts:
        for name, child in module.named_children():
            if name in BY_ROWS + BY_COLUMNS and isinstance(child, nn.Linear):
                divide(child, "weight", 0 if name in BY_ROWS else 1)
        if getattr(module, "sinks", None) is not None:
            divide(module, "sinks", 0)


def reduce_replicated(model: nn.Module, mesh: ParallelMesh) -> None:
    """Sum over `tp` the gradients of which each rank holds a part, in place. Once a step, after the last backward: what
    was summed before must not be among them (`gradients.set_aside`).

    With sequence parallelism these are all that are not split; without, those of weights that heads share (the norms of
    GQA's queries and keys). Gradients may be sharded by FSDP2: a sum of shards is the shard of the sum.
    """
    group = mesh.group("tp")
    if group is None:
        return
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for _, parameter in partial_parameters(model, sequence_parallel=mesh.config.sequence_parallel):
        if parameter.grad is not None:
            grad = parameter.grad
            buckets.setdefault(grad.dtype, []).append(grad.to_local() if isinstance(grad, DTensor) else grad)
    for grads in buckets.values():
        _sum(grads, group)


def partial_parameters(model: nn.Module, *, sequence_parallel: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of whose gradients each rank of `tp` holds a part. Works before and after FSDP2."""
    shared = {
        parameter
        for module in model.modules()
        if isinstance(module, GQASelfAttention)
        for norm in (module.q_norm, module.k_norm)
        if norm is not None
        for parameter in norm.parameters()
    }
    for name, parameter in model.named_parameters():
        if not is_split(parameter) and (sequence_parallel or parameter in shared):
            yield name, parameter


def is_split(parameter: Tensor) -> bool:
    """Whether ranks of `tp` hold different parts of it: by `split`, or by expert parallelism, whose ranks they are."""
    if not isinstance(parameter, DTensor):
        return False
    return not {"tp", "ep", "efsdp"}.isdisjoint(parameter.device_mesh.mesh_dim_names or ())


def _split_modules(model: nn.Module) -> Iterator[tuple[str, SelfAttention | SwiGLU]]:
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention):
            yield name, module
        elif isinstance(module, DecoderLayer) and isinstance(module.mlp, SwiGLU):
            yield f"{name}.mlp", module.mlp


def _check(parts: list[tuple[str, SelfAttention | SwiGLU]], size: int) -> None:
    problems = []
    for name, module in parts:
        if isinstance(module, SwiGLU):
            counts = {"channels": module.gate_proj.out_features}
        else:
            config = module.config
            counts = {"heads": config.heads} | ({"kv_heads": config.kv_heads} if isinstance(config, GQAConfig) else {})
        problems += [f"{name}: {what}={count}" for what, count in counts.items() if count % size]
    if problems:
        raise InputError(
            f"tp={size} must divide the heads and channels that it splits, but not so {'; '.join(problems)}"
        )


def _sum(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    small: list[Tensor] = []
    for grad in grads:
        if grad.numel() >= BUCKET:
            dist.all_reduce(grad, group=group)
            continue
        if sum(one.numel() for one in small) + grad.numel() > BUCKET:
            _sum_together(small, group)
            small = []
        small.append(grad)
    if small:
        _sum_together(small, group)


def _sum_together(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
