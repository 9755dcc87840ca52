"""One rank, and stages side by side in one process; ranks are in test_agreement.py."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from dsattn.config import (
    DSAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
    TrainConfig,
)
from dsattn.model.decoder import Decoder
from dsattn.model.stage import DecoderStage, cut
from dsattn.nn import draw
from dsattn.nn.linear import local
from dsattn.parallel.apply import Parallel, Stages, apply
from dsattn.parallel.mesh import ParallelMesh, build_mesh

MODEL = ModelConfig(
    hidden_size=16,
    num_layers=4,
    intermediate_size=16,
    attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
    tie_embeddings=True,
)


def test_one_rank_gets_the_plain_model() -> None:
    torch.manual_seed(0)
    plain = Decoder(MODEL)
    torch.manual_seed(0)
    whole = apply(MODEL, ParallelMesh(), TrainConfig())
    assert (whole.pipeline, whole.ranks, whole.copies) == (None, None, frozenset())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), whole.model.parameters(), strict=True))
    assert whole.count_parameters() == sum(one.numel() for one in plain.parameters())


WIDE = dataclasses.replace(
    MODEL,
    hidden_size=96,
    intermediate_size=480,
    attention=dataclasses.replace(MODEL.attention, sink=True, output_gate="headwise"),
    moe=MoEConfig(experts=8, experts_per_token=2, intermediate_size=128, first_dense_layers=2),
    mtp=MTPConfig(depths=1),
)
LINEAR = dataclasses.replace(
    WIDE, layer_types=("dsa", "linear", "dsa", "linear"), kda=KDAConfig(heads=4, head_dim=8), mtp=MTPConfig()
)


@contextmanager
def as_rank(rank: int, parallel: ParallelConfig) -> Iterator[ParallelMesh]:
    """A mesh whose other ranks do not exist: what is made without them can be made here."""
    dist.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
    debug._clear_sharding_prop_cache()  # it keeps meshes, and with them the rank before
    try:
        yield build_mesh(parallel, "cpu")
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (LINEAR, {"dp_shard": 3}),
        (WIDE, {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2}),
        (WIDE, {"dp_shard": 2, "cp": 2, "ep": 2}),
        (WIDE, {"pp": 2, "vpp": 2, "schedule": "Interleaved1F1B"}),
    ],
    ids=["linear layers, shards", "stages, heads, experts, shards", "experts, shards", "two stages a rank"],
)
def test_every_rank_draws_its_own_parts_alone(
    model: ModelConfig, mesh: dict, monkeypatch: pytest.MonkeyPatch, peak_bytes: Callable[[Callable[[], object]], int]
) -> None:
    """Together they are what one process draws; none holds more than them and one block at any time."""
    monkeypatch.setattr(draw, "BLOCK", 2**12)
    parallel = ParallelConfig(**mesh)
    torch.manual_seed(0)
    left = {name: one.detach().clone() for name, one in Decoder(model).named_parameters()}
    largest = max(one[0].nbytes for one in left.values())  # a slice is drawn whole
    later = torch.rand(1)
    for rank in range(parallel.world_size):
        made: list[Parallel] = []
        with as_rank(rank, parallel) as over:
            torch.manual_seed(0)
            most = peak_bytes(lambda over=over, made=made: made.append(apply(model, over, TrainConfig())))
            assert torch.equal(torch.rand(1), later), "what is drawn afterwards does not depend on the mesh"
            parts = [(name, one, local(one)) for name, one in made[0].model.named_parameters()]
            held = sum(part.untyped_storage().nbytes() for _, _, part in parts)
            assert held <= most <= held + max(4 * draw.BLOCK, largest) + 2**16, (rank, held, most)
            for name, one, part in parts:
                assert part.untyped_storage().nbytes() <= 1.5 * part.nbytes + 2**12, name
                found = left[name][box(one)]
                assert torch.equal(part, found) or found.isnan().all(), name
                found.fill_(torch.nan)  # replicas find that another rank has had it
    assert not [name for name, one in left.items() if not one.isnan().all()], "no rank holds some part"


def box(parameter: Tensor) -> tuple[slice, ...]:
    """Which part of the whole this rank has."""
    if not isinstance(parameter, DTensor):
        return (slice(None),) * parameter.dim()
    (chunk,) = parameter.__create_chunk_list__()
    return tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))


def test_stages_are_one_model_under_its_names() -> None:
    """Two of four chunks, the last with a copy of the embedding."""
    torch.manual_seed(0)
    plain = dict(Decoder(MODEL).named_parameters())
    chunks = cut(MODEL, ("Et", "t", "t", "tL"))
    stages: list[DecoderStage] = []
    for chunk in (chunks[1], chunks[3]):
        torch.manual_seed(0)
        stages.append(DecoderStage(MODEL, chunk))
    both = Stages(stages)
    names = [name for name, _ in both.named_parameters()]
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"1", "3"}
    assert all(torch.equal(one, plain[name]) for name, one in both.named_parameters())
    assert both.copies == {"model.embed_tokens.weight"}
    assert len(both.indexers()) == 2
    state = {name: value + 1 for name, value in both.state_dict().items()}
    both.load_state_dict(state)
    assert all(torch.equal(one, plain[name] + 1) for name, one in both.named_parameters())
    both.reset_indexers()
    changed = {name for name, one in both.named_parameters() if not torch.equal(one, plain[name] + 1)}
    assert changed
    assert all(".indexer." in name for name in changed)
    both.move_routing_biases({}, 0.1)
