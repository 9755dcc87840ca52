"""One rank; losses of many are compared in tests/parallel/test_failures.py."""

import math

import numpy as np
import pytest
import torch

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, ParallelConfig, StageConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.parallel.apply import Parallel
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training import evaluation
from dsattn.training.metrics import held_out_loss, indexer_health
from dsattn.training.packs import RawPack, finish

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


def test_packs_that_are_shared_out_have_the_same_loss(model: Decoder) -> None:
    whole = Parallel(model, ParallelMesh())
    loss = evaluation._shared_out(whole, PACKS, StageConfig(mode="sparse"), TrainConfig())
    assert loss == pytest.approx(held_out_loss(model, PACKS, "sparse"), rel=1e-6)
    assert math.isnan(evaluation._shared_out(whole, [evaluation._empty(PACKS[0])], StageConfig(), TrainConfig()))


def test_a_pack_of_padding_fills_up(model: Decoder) -> None:
    """Three ranks for two packs: the third one's holds no label, and the losses of all make that of one."""
    parts = []
    for rank in range(3):
        mesh = ParallelMesh(ParallelConfig(dp_shard=3), global_rank=rank)
        object.__setattr__(mesh, "group", lambda name: None)
        parts.append(evaluation._shared_out(Parallel(model, mesh), PACKS, StageConfig(mode="sparse"), TrainConfig()))
    assert sum(parts) == pytest.approx(held_out_loss(model, PACKS, "sparse"), rel=1e-6)
    assert parts[2] == 0


def test_health_without_whole_rows_is_a_note(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = ParallelMesh(ParallelConfig(cp=2))
    monkeypatch.setattr(evaluation, "_shared_out", lambda *_: 1.0)
    loss, health = evaluation.evaluate(Parallel(model, mesh), PACKS, StageConfig(mode="sparse"), TrainConfig())
    assert loss == 1.0
    assert health is not None
    assert (health.layers, health.rows) == ([], 0)
    assert "dsattn inspect" in health.note
