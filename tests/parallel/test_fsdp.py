"""One rank; what sharding does to losses and gradients is in test_agreement.py."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn import accounting
from dsattn.config import (
    DataConfig,
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    Mode,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
    Recompute,
    RunConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.layer import DecoderLayer
from dsattn.model.stage import DecoderStage, MicroBatch, Task
from dsattn.nn.state import Pass
from dsattn.parallel import fsdp
from dsattn.parallel.apply import apply
from dsattn.parallel.mesh import ParallelMesh, build_mesh
from dsattn.parallel.recompute import learning_pass
from dsattn.training.packs import Pack
from dsattn.training.stages import make_optimizer, set_mode
from dsattn.training.step import accumulate_gradients


def test_one_rank_shards_nothing() -> None:
    with torch.device("meta"):
        model = Decoder(ModelConfig(num_layers=1))
    fsdp.shard(model, ParallelMesh(), TrainConfig())
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    fsdp.last_micro_batch(model, True)
    fsdp.follow_mode(model)
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
    """Elements of each gather and reduce-scatter, of all ranks, and the dtypes of what was reduced.

    most_whole: most of `layers` that a later gather found whole.
    """

    def __init__(self, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.layers = list(layers)
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.reduced: list[int] = []
        self.reduced_in: list[torch.dtype] = []
        self.most_whole = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("c10d::")
        if name == "_allgather_base_" and torch._C._current_graph_task_id() == -1:
            self.forward.append(args[0].numel())
        elif name == "_allgather_base_":
            self.backward.append(args[0].numel())
            whole = [one for one in self.layers if not isinstance(next(one.parameters()), DTensor)]
            self.most_whole = max(self.most_whole, len(whole))
        elif name == "_reduce_scatter_base_":
            self.reduced.append(args[1].numel())
            self.reduced_in.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


def sizes(model: Decoder, *, learning: bool = False) -> list[int]:
    """Elements of the root unit and of each layer's, of all of them or of what learns; dimension 0 is padded."""
    units = [[*layer.parameters()] for layer in model.model.layers]
    inside = {parameter for unit in units for parameter in unit}
    units.insert(0, [one for one in model.parameters() if one not in inside])
    return [sum(-(-len(x) // 2) * 2 * x[0].numel() for x in unit if x.requires_grad or not learning) for unit in units]


def step(
    mesh: ParallelMesh, model: ModelConfig, mode: Mode, recompute: Recompute = "none", fixed: int | None = None
) -> tuple[Decoder, Sent]:
    """One step of one micro-batch. fixed: a layer in which nothing learns, whatever the mode."""
    torch.manual_seed(0)
    train = TrainConfig(recompute=recompute)
    whole = apply(model, mesh, train)
    assert isinstance(whole.model, Decoder)
    set_mode(whole.model, mode)
    if fixed is not None:
        whole.model.model.layers[fixed].requires_grad_(False)
        fsdp.follow_mode(whole.model)
    packs = [Pack(torch.arange(16), torch.arange(16), Layout.packed([9, 7]), 16)] * 2
    with Sent(whole.model.model.layers) as sent:
        accumulate_gradients(whole, packs, StageConfig(mode=mode), train)
    return whole.model, sent


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse"])
def test_what_does_not_learn_is_neither_reduced_nor_gathered_again(two_shards: ParallelMesh, mode: Mode) -> None:
    """Four layers, two of them with an indexer, and the root, which stays whole."""
    model, sent = step(two_shards, MODEL, mode)
    root, *layers = sizes(model)
    assert sent.forward == [root, *layers]
    assert sent.backward == ([] if mode == "warmup" else layers[::-1])
    assert sum(sent.reduced) == sum(sizes(model, learning=True))
    assert len(sent.reduced) == {"dense": 4 + 1, "warmup": 2, "sparse": 4 + 1}[mode]
    optimizer = make_optimizer(model, TrainConfig(), StageConfig(mode=mode))
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert {id(one) for one in held} == {id(one) for one in model.parameters() if one.requires_grad}


TEACHERS = dataclasses.replace(MODEL, dsa=dataclasses.replace(MODEL.dsa, multi_layer_teacher=True))


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("config", [MODEL, TEACHERS], ids=["two teach", "all teach"])
def test_layers_that_run_again_in_a_warm_up_are_whole_one_at_a_time(
    two_shards: ParallelMesh, config: ModelConfig, policy: Recompute
) -> None:
    model, sent = step(two_shards, config, "warmup", policy)
    teaching = sizes(model)[1 :: 1 if config is TEACHERS else 2]
    assert sent.backward == teaching[::-1]
    assert sent.most_whole == 0, "none is left whole when the next one is gathered"


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_a_fixed_layer_is_whole_until_its_backward_has_ended(two_shards: ParallelMesh, policy: Recompute) -> None:
    """Gradients go through it."""
    model, sent = step(two_shards, MODEL, "sparse", policy, fixed=1)
    assert sent.backward == sizes(model)[:0:-1]


@pytest.mark.parametrize("modes", [("warmup", "sparse"), ("dense", "warmup", "sparse", "frozen")], ids="-".join)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_layers_that_begin_to_learn_later_reduce_and_store_in_fp32(
    two_shards: ParallelMesh, policy: Recompute, modes: tuple[Mode, ...]
) -> None:
    """In bfloat16, whose gradients torch would keep as they are where nothing learned when it first asked."""
    train = TrainConfig(recompute=policy, dtype="bfloat16")
    whole = apply(TEACHERS, two_shards, train)
    packs = [Pack(torch.arange(16), torch.arange(16), Layout.packed([9, 7]), 16)] * 2
    for mode in modes:
        set_mode(whole.model, mode)
        with Sent() as sent:
            accumulate_gradients(whole, packs, StageConfig(mode=mode), train)
        found = [one.grad.dtype for one in whole.model.parameters() if one.grad is not None]
        assert set(found) == set(sent.reduced_in) == {torch.float32}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse"])
def test_accounting_counts_these_bytes(two_shards: ParallelMesh, mode: Mode, policy: Recompute) -> None:
    """Of two ranks each receives half of what is gathered or reduced."""
    _, sent = step(two_shards, TEACHERS, mode, policy)
    counted_are_those_sent(sent, TEACHERS, two_shards.config, mode, policy)


def layers_traffic(
    model: ModelConfig, parallel: ParallelConfig, mode: Mode, recompute: Recompute, stage: int = 0
) -> list[accounting.Collective]:
    """What accounting counts of every unit but the root, for one micro-batch."""
    train = TrainConfig(recompute=recompute, packs_per_step=4, packs_per_micro_batch=1)
    run = RunConfig(model=model, parallel=parallel, train=train, data=DataConfig(pack_tokens=16))
    here = accounting.place(run, stage)
    found = [
        one
        for number, kept in enumerate(accounting.layers_kept(here, run, mode))
        for one in accounting.layer_traffic(here, number, kept, run, mode)
    ]
    assert {one.what for one in found} == {"weights"}
    return found


def counted_are_those_sent(
    sent: Sent, model: ModelConfig, parallel: ParallelConfig, mode: Mode, recompute: Recompute
) -> None:
    """Of every unit but the root; each of two ranks receives half."""
    found = layers_traffic(model, parallel, mode, recompute)
    root = 0 if mode == "warmup" else sent.reduced[-1]
    assert [one.forward for one in found] == [4 * size // 2 for size in sent.forward[1:]]
    assert sum(one.backward for one in found) == 4 * (sum(sent.backward) + sum(sent.reduced) - root) // 2


AHEAD = {
    "one depth": MTPConfig(depths=1),
    "two depths": MTPConfig(depths=2),
    "repeated": MTPConfig(depths=2, repeated=True),
    "repeated, one selection": MTPConfig(depths=2, repeated=True, shared_components=("sparse_attention_index",)),
    "repeated, same keys": MTPConfig(depths=2, repeated=True, shared_components=("latent_kv",)),
}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse"])
@pytest.mark.parametrize("mtp", AHEAD.values(), ids=AHEAD)
def test_accounting_counts_the_bytes_of_depths(
    two_shards: ParallelMesh, mtp: MTPConfig, mode: Mode, policy: Recompute
) -> None:
    """What joins a depth is of its unit. A repeated one is gathered for each depth, its gradients are reduced once."""
    model = dataclasses.replace(TEACHERS, mtp=mtp)
    whole, sent = step(two_shards, model, mode, policy)
    depths = [whole.model.layers[4 + (0 if mtp.repeated else depth)] for depth in range(mtp.depths)]
    assert sent.forward[-mtp.depths :] == [sum(one.numel() for one in depth.parameters()) for depth in depths]
    assert len(sent.reduced) == {"dense": 4 + 1, "warmup": 2, "sparse": 4 + 1}[mode] + (
        1 if mode == "warmup" else mtp.num_layers
    ), "of two depths one has an indexer"
    counted_are_those_sent(sent, model, two_shards.config, mode, policy)


@pytest.fixture
def rank_of_the_last_stage() -> Iterator[Callable[[str], ParallelMesh]]:
    """Pipeline layout -> the mesh of a rank of the second stage of two, each on two shards."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    debug._clear_sharding_prop_cache()  # it keeps meshes, and with them the rank before
    yield lambda layout: build_mesh(ParallelConfig(dp_shard=2, pp=2, pipeline_layout=layout), "cpu")
    dist.destroy_process_group()
    debug._clear_sharding_prop_cache()


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse"])
@pytest.mark.parametrize("mtp", [AHEAD["two depths"], AHEAD["repeated"]], ids=["two depths", "repeated"])
@pytest.mark.parametrize("layout", ["Ett|ttmmL", "Etttt|mmL"])
def test_accounting_counts_the_bytes_of_a_stage_with_depths(
    rank_of_the_last_stage: Callable[[str], ParallelMesh], layout: str, mtp: MTPConfig, mode: Mode, policy: Recompute
) -> None:
    """Of two micro-batches as torch's schedules run them: units stay whole behind a backward and are reduced once.

    Depths may be all that a stage has.
    """
    mesh, model = rank_of_the_last_stage(layout), dataclasses.replace(MODEL, mtp=mtp)
    assert mesh.rank("pp") == 1
    train = TrainConfig(recompute=policy, packs_per_step=4, packs_per_micro_batch=1)
    whole = apply(model, mesh, train)
    assert isinstance(whole.model, DecoderStage)
    set_mode(whole.model, mode)
    units = [module for module in whole.model.modules() if isinstance(module, DecoderLayer)]
    layers = [sum(one.numel() for one in unit.parameters()) for unit in units]
    micro, learning = MicroBatch(torch.arange(16), torch.arange(16), Layout.packed([9, 7])), StageConfig(mode=mode)
    task = Task(micro, learning_pass(learning, train, 16), learning, 16, with_mtp=True, rows=16)
    assert whole.pipeline is not None
    part = whole.pipeline._part(whole.model, 16, with_mtp=True, learns=True)
    micro_batches = train.packs_per_step // mesh.size("dp_shard")
    with Sent() as sent:
        for number in range(1, micro_batches + 1):
            received = torch.randn(16, model.hidden_size, requires_grad=True)
            given = {"stage_output": whole.model(received, task=task), "output_grads": None, "input_values": [received]}
            part.backward_maybe_with_nosync("full", given, last_backward=number == micro_batches)
        part.perform_reduce_grad(1)
    gathered = [size for size in sent.forward + sent.backward if size in layers]
    root = 0 if mode == "warmup" else sent.reduced[0]
    assert root not in layers
    found = layers_traffic(model, mesh.config, mode, policy, stage=1)
    counted = micro_batches * sum(one.forward + one.backward for one in found)
    assert counted == pytest.approx(4 * (sum(gathered) + sum(sent.reduced) - root) // 2, rel=1e-3)


WARM = {
    "shared": TEACHERS,
    "key norm in fp32": dataclasses.replace(
        MODEL, dsa=DSAConfig(indexer=dataclasses.replace(MODEL.dsa.indexer, k_norm_fp32=True, hadamard=True))
    ),
    "gqa": dataclasses.replace(
        MODEL,
        attention=GQAConfig(heads=4, kv_heads=2, head_dim=4, rope_dim=4, qk_norm=True, sink=True),
        dsa=DSAConfig(indexer=dataclasses.replace(MODEL.dsa.indexer, query_from="hidden")),
    ),
    "gates, no query latent": dataclasses.replace(
        MODEL,
        attention=dataclasses.replace(MODEL.attention, q_lora_rank=None, sink=True, output_gate="headwise"),
        dsa=DSAConfig(indexer=dataclasses.replace(MODEL.dsa.indexer, query_from="hidden", relu=False)),
    ),
    "repeated mtp": dataclasses.replace(
        MODEL, mtp=MTPConfig(depths=2, repeated=True, shared_components=("latent_kv",)), tie_embeddings=True
    ),
    "linear": dataclasses.replace(
        MODEL, layer_types=("linear", "dsa", "linear", "dsa"), kda=KDAConfig(heads=2, head_dim=8)
    ),
    "experts and mtp": dataclasses.replace(
        MODEL,
        moe=MoEConfig(experts=4, experts_per_token=2, intermediate_size=8, first_dense_layers=1),
        mtp=MTPConfig(depths=2),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WARM)
def test_the_backward_of_a_warm_up_reads_no_weight(name: str, dtype: torch.dtype) -> None:
    """FSDP2 has freed them. In bfloat16 as it gathers them."""
    torch.manual_seed(0)
    model, layout = Decoder(WARM[name]).to(dtype).train(), Layout.packed([9, 7])

    def saved(mode: Mode) -> set[int]:
        """Storages of weights among what the forward keeps."""
        set_mode(model, mode)
        kept: list[Tensor] = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        ):
            out = model(torch.arange(16), layout, Pass(mode=mode))
        assert out.kl_sum is not None
        assert out.kl_sum.requires_grad
        weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
        return weights & {one.untyped_storage().data_ptr() for one in kept}

    assert saved("sparse"), "negative control: a backbone that learns reads them"
    assert not saved("warmup")
