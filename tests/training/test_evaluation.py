"""One rank; losses of many are compared in tests/parallel/test_failures.py."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, ParallelConfig, StageConfig, TrainConfig
from dsattn.errors import InputError
from dsattn.model.decoder import Decoder, DecoderOutput
from dsattn.parallel.apply import Parallel
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training import evaluation
from dsattn.training.health import Survey
from dsattn.training.metrics import held_out_loss, indexer_health
from dsattn.training.packs import IGNORED_LABEL, Pack, RawPack, finish

MODEL = ModelConfig(
    hidden_size=16,
    num_layers=2,
    intermediate_size=16,
    attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
)
PACKS = [finish(RawPack(np.arange(n, dtype=np.int32), [n - 3, 3]), 16, pad=0) for n in (16, 9)]


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(MODEL)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_one_rank_measures_what_it_always_did(model: Decoder, mode) -> None:
    loss, health = evaluation.evaluate(Parallel(model, ParallelMesh()), PACKS, StageConfig(mode=mode), TrainConfig())
    assert loss == held_out_loss(model, PACKS, mode)
    assert health == (None if mode == "dense" else indexer_health(model, PACKS))


def test_packs_that_are_shared_loss_have_the_same_loss(model: Decoder) -> None:
    whole = Parallel(model, ParallelMesh())
    loss = evaluation._shared_loss(whole, PACKS, StageConfig(mode="sparse"), TrainConfig())
    assert loss == pytest.approx(held_out_loss(model, PACKS, "sparse"), rel=1e-6)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_nothing_of_a_pack_is_held_while_the_next_runs(model: Decoder, shared: bool) -> None:
    """Its hidden states and selections, by references alone, without the garbage collector."""
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def leaving(_: Any, __: Any, out: DecoderOutput) -> None:
        made.extend(weakref.ref(one) for one in (out.hidden, *(one.index for one in out.selections.values())))

    model.register_forward_pre_hook(lambda *_: held.append(sum(one() is not None for one in made)))
    model.register_forward_hook(leaving)
    gc.collect()
    gc.disable()
    try:
        if shared:
            evaluation._shared_loss(Parallel(model, ParallelMesh()), PACKS, StageConfig(mode="sparse"), TrainConfig())
        else:
            held_out_loss(model, PACKS, "sparse")
    finally:
        gc.enable()
    assert len(made) == 6
    assert held == [0, 0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_packs_without_a_label_are_refused(model: Decoder, ranks: int) -> None:
    mesh = ParallelMesh(ParallelConfig(dp_shard=ranks))
    empty = Pack(PACKS[0].tokens, torch.full_like(PACKS[0].labels, IGNORED_LABEL), PACKS[0].layout, 0)
    with pytest.raises(InputError, match="packs: 2 of them hold no label"):
        evaluation.evaluate(Parallel(model, mesh), [empty] * 2, StageConfig(mode="dense"), TrainConfig())


def test_a_pack_of_padding_fills_up(model: Decoder) -> None:
    """Three ranks for two packs: the third one's holds no label, and the losses of all make that of one."""
    parts = []
    for rank in range(3):
        mesh = ParallelMesh(ParallelConfig(dp_shard=3), global_rank=rank)
        object.__setattr__(mesh, "group", lambda name: None)
        parts.append(evaluation._shared_loss(Parallel(model, mesh), PACKS, StageConfig(mode="sparse"), TrainConfig()))
    assert sum(parts) == pytest.approx(held_out_loss(model, PACKS, "sparse"), rel=1e-6)
    assert parts[2] == 0


def test_health_of_packs_that_are_shared_out_adds_up(model: Decoder) -> None:
    """Three ranks for two packs, summed by hand; one rank alone would have rows of one pack, or none."""
    expected = indexer_health(model, PACKS)
    assert expected.rows > 0
    alone = evaluation._shared_health(Parallel(model, ParallelMesh()), PACKS, TrainConfig())
    assert alone == expected
    sums: list[list[torch.Tensor]] = []

    def take(survey: Survey, groups: list) -> None:
        assert groups == []
        mine = [part for tally in survey.tallies.values() for part in tally.sums()]
        sums.append([part.clone() for part in mine])
        if len(sums) == 3:
            for part, *parts in zip(mine, *sums, strict=True):
                part.copy_(sum(parts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Survey, "sum_over", take)
        for rank in range(3):
            mesh = ParallelMesh(ParallelConfig(dp_shard=3), global_rank=rank)
            object.__setattr__(mesh, "group", lambda name: None)
            health = evaluation._shared_health(Parallel(model, mesh), PACKS, TrainConfig())
    assert [int(parts[0].sum()) for parts in sums] == [9, 2, 0]
    for found, wanted in zip(health.layers, expected.layers, strict=True):
        assert found.recall == pytest.approx(wanted.recall, rel=1e-6)
        assert (found.rows, found.distances) == (wanted.rows, wanted.distances)


def test_nothing_to_measure_is_a_note(model: Decoder) -> None:
    short = [finish(RawPack(np.arange(4, dtype=np.int32), [4]), 16, pad=0)]
    health = evaluation._shared_health(Parallel(model, ParallelMesh()), short, TrainConfig())
    assert health == indexer_health(model, short)
    assert "no row sees more" in health.note
