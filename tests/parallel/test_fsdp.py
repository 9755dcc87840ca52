"""One rank; what sharding does to losses and gradients is in test_agreement.py."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn.config import (
    DSAConfig,
    IndexerConfig,
    MLAConfig,
    Mode,
    ModelConfig,
    ParallelConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.parallel import fsdp
from dsattn.parallel.apply import apply
from dsattn.parallel.mesh import ParallelMesh, build_mesh
from dsattn.training.packs import Pack
from dsattn.training.stages import make_optimizer, set_mode
from dsattn.training.step import accumulate_gradients


def test_one_rank_shards_nothing() -> None:
    with torch.device("meta"):
        model = Decoder(ModelConfig(num_layers=1))
    fsdp.shard(model, ParallelMesh(), TrainConfig())
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    fsdp.last_micro_batch(model, True)
    fsdp.follow_mode(model, all_teach=False)
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


MODEL = ModelConfig(
    hidden_size=16,
    num_layers=4,
    intermediate_size=16,
    attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4), share_every=2),
)


@pytest.fixture
def two_shards() -> Iterator[ParallelMesh]:
    """A mesh whose other rank does not exist: collectives send nothing, and can be counted."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield build_mesh(ParallelConfig(dp_shard=2), "cpu")
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Collectives by name, and the elements that reduce-scatters leave on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.reduced = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("c10d::")
        self.calls[name] += 1
        self.reduced += args[0].numel() if name == "_reduce_scatter_base_" else 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "gathered"), [("dense", 4 + 1 + 4), ("warmup", 4 + 1 + 2), ("sparse", 4 + 1 + 4)])
def test_what_does_not_learn_is_not_reduced_and_rarely_gathered_again(
    two_shards: ParallelMesh, mode: Mode, gathered: int
) -> None:
    """Forward: four layers and the root. Backward: all layers, or in a warm-up the two that have an indexer."""
    torch.manual_seed(0)
    whole = apply(MODEL, two_shards, TrainConfig())
    set_mode(whole.model, mode)
    packs = [Pack(torch.arange(16), torch.arange(16), Layout.packed([9, 7]), 16)] * 2
    with Sent() as sent:
        accumulate_gradients(whole, packs, StageConfig(mode=mode), TrainConfig())
    assert sent.calls["_allgather_base_"] == gathered
    learning = [one for one in whole.model.parameters() if one.requires_grad]
    assert sent.reduced == sum(-(-len(one) // 2) * one[0].numel() for one in learning), "dimension 0 is padded"
    optimizer = make_optimizer(whole.model, TrainConfig(), StageConfig(mode=mode))
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert {id(one) for one in held} == {id(one) for one in learning}
