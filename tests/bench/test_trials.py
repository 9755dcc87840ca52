"""Every trial passes its own check on the reference, counts what the formulas say, and refuses a wrong operation."""

import pytest
import torch

from dsattn.bench import oracle, trials
from dsattn.bench.cases import SHAPES, Operands, Setting, indexer
from dsattn.bench.trials import ATTENTION, attention_trial, kl_trial, select_keys_trial, select_topk_trial

SETTING = Setting(shape=SHAPES["small"], rows=40, keys=64)
DIRECTIONS = ("forward", "backward")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", ATTENTION)
def test_attention_is_right_and_counted(op, direction):
    trial = attention_trial(op, direction, SETTING)
    assert trial.op == f"{op}.{direction}"
    assert not trial.check().wrong
    selects, grouped = ATTENTION[op]
    pairs = 40 * 16 if selects else sum(range(25, 65))
    width, value_dim = (16, 16) if grouped else (24, 16)
    widths = width + value_dim if direction == "forward" else 3 * width + 2 * value_dim
    assert trial.flops == 2 * 4 * pairs * widths
    results = trial.prepare(trial.sets[0])()
    first = results[0].shape
    assert first == (40, 4, value_dim) if direction == "forward" else first == (40, 4, width)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_loss_is_right_and_counted(direction, dense):
    trial = kl_trial(direction, SETTING, dense=dense)
    assert not trial.check().wrong
    assert trial.shape["K"] == (0 if dense else 16)
    pairs = SETTING.visible_pairs if dense else 40 * 16
    assert trial.flops == pairs * (2 * (4 * 24 + 4 * 16) if direction == "forward" else 6 * 4 * 16)
    trial.prepare(trial.sets[0])()


def test_selections_are_right_and_counted():
    keys, topk = select_keys_trial(SETTING), select_topk_trial(SETTING)
    assert not keys.check().wrong
    assert topk.check() == oracle.Error(0.0, 0.0, 0.0)
    assert keys.flops == 2 * 4 * 16 * SETTING.visible_pairs
    assert (topk.flops, topk.reads) == (0, 4 * 40 * 64)
    assert keys.prepare(keys.sets[0])().shape == topk.prepare(topk.sets[0])().shape == (40, 16)


@pytest.mark.parametrize("order", ["random", "recency"])
@pytest.mark.parametrize("lengths", [True, False])
def test_other_operands_are_right_too(order, lengths):
    setting = Setting(shape=SHAPES["small"], rows=40, keys=40, order=order, lengths=lengths)
    for direction in DIRECTIONS:
        assert not attention_trial("sparse_mla", direction, setting).check().wrong


def test_deterministic_gradients_are_asked_for():
    trial = attention_trial(
        "sparse_mla", "backward", Setting(shape=SHAPES["small"], rows=9, keys=9, deterministic=True)
    )
    assert not trial.check().wrong


def test_a_backward_run_repeats_without_its_forward(monkeypatch):
    trial = attention_trial("sparse_mla", "backward", SETTING)
    run = trial.prepare(trial.sets[0])
    monkeypatch.setattr(trials, "sparse_mla", lambda *_, **__: pytest.fail("the forward is timed too"))
    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize(
    "fault", [lambda out: out * 1.01, lambda out: out + 1e-3, lambda out: torch.where(out == out.max(), 0.0, out)]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_wrong_attention_is_seen(direction, fault, monkeypatch):
    real = trials.sparse_mla

    def wrong(*operands, **flags):
        out, lse = real(*operands, **flags)
        return fault(out) * (1.0 if direction == "forward" else out.detach()), lse

    trial = attention_trial("sparse_mla", direction, SETTING)
    monkeypatch.setattr(trials, "sparse_mla", wrong)
    assert trial.check().wrong


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_wrong_loss_is_seen(direction, monkeypatch):
    real = trials.indexer_kl
    trial = kl_trial(direction, SETTING)
    monkeypatch.setattr(trials, "indexer_kl", lambda *operands, **flags: real(*operands, **flags) * 1.001)
    assert trial.check().wrong


def test_a_wrong_ranking_is_seen(monkeypatch):
    real = trials.select_topk
    trial = select_topk_trial(SETTING)
    monkeypatch.setattr(trials, "select_topk", lambda scores, *rest, **flags: real(-scores, *rest, **flags))
    assert trial.check().wrong


def test_sets_rotate():
    setting = Setting(shape=SHAPES["small"], rows=8, keys=16, copies=3)
    trial = attention_trial("sparse_mla", "forward", setting)
    assert len(trial.sets) == 3
    assert not torch.equal(trial.sets[0].q, trial.sets[2].q)
    assert trial.sets[0].selection is trial.sets[2].selection


def test_size_counts_bytes():
    given = indexer(Setting(shape=SHAPES["small"], rows=8, keys=16, dtype=torch.bfloat16), 0)
    assert trials.size([given.q_i, None, given.k_i]) == 2 * (8 * 4 * 16 + 16 * 16)
    assert trials.scale_of(Operands()) == 1.0
