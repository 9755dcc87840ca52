"""Fully sharded data parallelism by PyTorch's `fully_shard` (FSDP2): a layer's weights are whole only while it runs.

    one unit a layer, one for embedding, last norm and head; with expert parallelism one more for a layer's experts
    forward    all-gather of a unit over fsdp (in bfloat16 where `train.dtype` is), freed behind it
    backward   all-gather, then reduce-scatter of its gradients over fsdp in fp32, all-reduce over dp_replicate

Gradients are summed, never averaged: losses are divided by counts of the whole global batch. What does not learn is
never reduced.

In `warmup` nothing is gathered for the backward. It reads no weight: an indexer's projections have inputs without
gradients, and its key norm keeps a copy. So an indexer is no unit of its own, which would cost every mode a collective
a layer. A layer that runs again (`train.recompute`) is gathered for that alone, and freed behind it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dsattn.config import TrainConfig
from dsattn.model.layer import DecoderLayer
from dsattn.model.moe import Experts, MoE
from dsattn.nn import LightningIndexer
from dsattn.parallel.mesh import ParallelMesh


def shard(model: nn.Module, mesh: ParallelMesh, train: TrainConfig) -> None:
    """Shard the parameters of `model`, in place, over the ranks of fsdp, and replicate over dp_replicate.

    model: a `Decoder` or a pipeline stage with `DecoderLayer`s, on its device; after tensor and expert parallelism.
    Does nothing where all these groups have one rank. Its parameters are DTensors afterwards, `state_dict` too. The
    root unit stays whole from its forward to its backward: `lm_loss` and `mtp_losses` use the head in between.
    """
    wide = torch.float32
    narrow = torch.bfloat16 if train.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False)
    dense, over_ep = _data_mesh(mesh, "fsdp"), mesh.size("ep") > 1
    experts = _data_mesh(mesh, "efsdp") if over_ep else None
    apart = {
        one for module in model.modules() if over_ep and isinstance(module, Experts) for one in module.parameters()
    }
    for layer in [module for module in model.modules() if isinstance(module, DecoderLayer)]:
        if isinstance(layer.mlp, MoE):
            if experts is not None:
                # They are cut by expert over ep already, and may be fewer than the ranks of efsdp.
                fully_shard(layer.mlp.experts, mesh=experts, mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
            if dense is not None and narrow is not None:
                fully_shard(layer.mlp.gate, mesh=dense, mp_policy=exact)  # routes are chosen by fp32 weights
        if dense is not None:
            fully_shard(layer, mesh=dense, mp_policy=policy, ignored_params=apart)
            _show_tensors(layer)
    if dense is not None:
        fully_shard(model, mesh=dense, mp_policy=policy, reshard_after_forward=False, ignored_params=apart)
        _show_tensors(model)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # a factor of 1 is still a premultiplied sum, which gloo lacks


def last_micro_batch(model: nn.Module, last: bool) -> None:
    """Say, before a forward, whether its backward is the step's last: replicas' gradients are all-reduced only then."""
    for unit in _units(model):
        unit.set_requires_all_reduce(last, recurse=False)


def follow_mode(model: nn.Module) -> None:
    """Behind a change of `requires_grad`: gather units for the backward, or ahead of it, where it reads weights.

    That is, unless indexers alone learn: torch would keep what it gathers then until the whole backward has ended.
    Collective: each unit is gathered once. Torch asks only then, of what learns, which dtype gradients are reduced and
    stored in, and would leave units that begin to learn later with that of their bfloat16 gradients.
    """
    reads = _backbone_learns(model)
    for unit in _units(model):
        unit.set_unshard_in_backward(reads)
        unit.unshard()
        unit.reshard()


@contextlib.contextmanager
def whole(layer: object) -> Iterator[None]:
    """Inside, a layer that runs again has its weights, also where `follow_mode` has none gathered for the backward."""
    given = isinstance(layer, DecoderLayer) and not isinstance(layer.input_layernorm.weight, DTensor)
    if given or not isinstance(layer, FSDPModule):
        yield
        return
    layer.set_unshard_in_backward(True)
    layer.unshard()
    layer.set_unshard_in_backward(False)
    try:
        yield
    finally:
        layer.reshard()


def reshard(model: nn.Module) -> None:
    """Free whole weights, which a forward without a backward leaves behind; `parameters` are shards again."""
    for unit in _units(model):
        unit.reshard()


def _data_mesh(mesh: ParallelMesh, shards: str) -> DeviceMesh | None:
    if mesh.size("dp_replicate") > 1:
        return mesh.device_mesh("dp_replicate", shards)
    return mesh.device_mesh(shards) if mesh.size(shards) > 1 else None


def _backbone_learns(model: nn.Module) -> bool:
    indexers = (module for module in model.modules() if isinstance(module, LightningIndexer))
    inside = {parameter for indexer in indexers for parameter in indexer.parameters()}
    return any(one.requires_grad and one not in inside for one in model.parameters())


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class _Result:
    """A module's output, in a shell that FSDP's hooks do not look into."""

    def __init__(self, value: Any):
        self.value = value


def _show_tensors(module: nn.Module) -> None:
    """Let FSDP's forward hook see the tensors of an output that is a dataclass: torch 2.11 looks into tuples only.

    Views are left out, because hooks on them warn; no output is made of views alone.
    """

    def unpack(_: nn.Module, __: Any, output: Any) -> Any:
        if not dataclasses.is_dataclass(output):
            return output
        return (*(one for one in _tensors(output) if one.requires_grad and not one._is_view()), _Result(output))

    def pack(_: nn.Module, __: Any, output: Any) -> Any:
        return output[-1].value if isinstance(output, tuple) and isinstance(output[-1], _Result) else output

    module.register_forward_hook(unpack, prepend=True)
    module.register_forward_hook(pack)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple):
        for one in value:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(tuple(getattr(value, item.name) for item in dataclasses.fields(value)))
