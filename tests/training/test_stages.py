"""What learns in each mode, the audit, the optimiser's groups and the learning rate."""

import dataclasses

import pytest
import torch

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, StageConfig, TrainConfig
from dsattn.errors import InputError
from dsattn.model.decoder import Decoder
from dsattn.parallel.apply import Parallel
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training.stages import audit, learning_rate, learns, make_optimizer, set_mode

MODEL = ModelConfig(
    hidden_size=16,
    num_layers=2,
    intermediate_size=24,
    attention=MLAConfig(
        heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, sink=True
    ),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
)


@pytest.mark.parametrize(
    ("mode", "backbone", "indexer"),
    [("dense", True, False), ("warmup", False, True), ("sparse", True, True), ("frozen", True, False)],
)
def test_requires_grad_follows_the_mode(mode, backbone, indexer) -> None:
    model = Decoder(MODEL)
    set_mode(model, mode)
    assert learns(mode) == (backbone, indexer)
    names = {name: p.requires_grad for name, p in model.named_parameters()}
    assert any("indexer" in name for name in names)
    assert all(asked == (indexer if "indexer" in name else backbone) for name, asked in names.items())


def test_a_change_of_mode_drops_gradients() -> None:
    model = Decoder(MODEL)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_mode(model, "warmup")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_indexer_cannot_warm_one_up() -> None:
    model = Decoder(dataclasses.replace(MODEL, layer_types=("dense", "dense")))
    with pytest.raises(InputError, match="mode='warmup' trains an indexer"):
        set_mode(model, "warmup")
    set_mode(model, "dense")


def test_the_audit_counts_every_parameter_once() -> None:
    model = Decoder(MODEL)
    set_mode(model, "warmup")
    lines = audit(Parallel(model, ParallelMesh()), "warmup")
    index = sum(p.numel() for n, p in model.named_parameters() if "indexer" in n)
    everything = sum(p.numel() for p in model.parameters())
    assert lines[0] == f"mode warmup: {index:,} parameters learn"
    assert [line.rsplit(": ")[1] for line in lines[1:]] == ["fixed", "fixed", "learn"]
    counted = [int(line[len("  embedding and head ") :].split()[0].replace(",", "")) for line in lines[1:]]
    assert sum(counted) == everything
    assert counted[2] == index


def test_the_optimiser_holds_what_learns_and_spares_vectors() -> None:
    model = Decoder(MODEL)
    set_mode(model, "sparse")
    matrices, vectors = make_optimizer(model, TrainConfig(weight_decay=0.3), StageConfig(lr=0.5)).param_groups
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert all(p.dim() < 2 for p in vectors["params"])
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))
    set_mode(model, "warmup")
    held = [p for group in make_optimizer(model, TrainConfig(), StageConfig()).param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for indexer in model.indexers() for p in indexer.parameters()}


def test_an_idle_stage_has_the_settings_of_all() -> None:
    """Its group is the first that a checkpoint of all pipeline ranks takes settings from."""
    [idle] = make_optimizer(
        Decoder(MODEL).requires_grad_(False), TrainConfig(weight_decay=0.3), StageConfig()
    ).param_groups
    assert (idle["params"], idle["kind"], idle["weight_decay"]) == ([], "matrices", 0.3)


def test_the_learning_rate_rises_peaks_and_ends_where_it_should() -> None:
    stage = StageConfig(steps=100, lr=2.0, lr_warmup=10, lr_final=0.25)
    rates = [learning_rate(stage, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[99] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(StageConfig(steps=1, lr=3.0), 0) == 3.0
    assert learning_rate(stage, 500) == pytest.approx(0.5)
