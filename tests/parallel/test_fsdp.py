"""One rank; what sharding does to losses and gradients is in test_agreement.py."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dsattn.config import ModelConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.parallel import fsdp
from dsattn.parallel.mesh import ParallelMesh


def test_one_rank_shards_nothing() -> None:
    with torch.device("meta"):
        model = Decoder(ModelConfig(num_layers=1))
    fsdp.shard(model, ParallelMesh(), TrainConfig())
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    fsdp.last_micro_batch(model, True)
    fsdp.reshard(model)


@dataclass(frozen=True)
class Result:
    hidden: Tensor
    by_layer: dict[int, Tensor]
    fixed: Tensor
    view: Tensor


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Result:
        return Result(x * 2, {3: x.sum()}, x.detach(), (x * 3)[:1])


def test_hooks_see_the_tensors_with_a_gradient_and_callers_the_dataclass() -> None:
    layer, seen = Layer(), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    fsdp._show_tensors(layer)
    x = torch.ones(2, requires_grad=True)
    out = layer(x)
    assert isinstance(out, Result)
    (hook,) = seen
    assert isinstance(hook, tuple)
    shown = [one for one in hook if isinstance(one, Tensor)]
    assert [id(one) for one in shown] == [id(out.hidden), id(out.by_layer[3])]
