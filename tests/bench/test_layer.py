import dataclasses

import pytest
import torch

from dsattn.bench import layer
from dsattn.bench.cases import SHAPES, Setting
from dsattn.bench.layer import layer_trial

SETTING = Setting(shape=SHAPES["small"], rows=48, keys=48)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_layer_is_right(deterministic):
    trial = layer_trial(dataclasses.replace(SETTING, deterministic=deterministic))
    assert not trial.check().wrong
    assert (trial.op, trial.choice.name, trial.shape["K"]) == ("dsa_layer", "composed", 16)
    grads = trial.prepare(trial.sets[0])()
    operands = trial.sets[0]
    assert [x.shape for x in grads] == [getattr(operands, name).shape for name in ("q", "k", "q_i", "k_i", "w")]


def test_its_work_is_that_of_its_parts():
    pairs, index = 48 * 16, 4 * 16
    attention = 2 * 4 * pairs * ((24 + 16) + (3 * 24 + 2 * 16))
    loss = pairs * (2 * (4 * 24 + index) + 6 * index)
    assert layer_trial(SETTING).flops == attention + loss + 2 * index * SETTING.visible_pairs


@pytest.mark.parametrize("part", ["output", "loss", "selection"])
def test_a_wrong_part_is_seen(part, monkeypatch):
    trial = layer_trial(SETTING)
    attend, select = layer.dsa_attention, layer.select_keys

    def wrong(*operands, **flags):
        out, lse, kl = attend(*operands, **flags)
        return (out * 1.01, lse, kl) if part == "output" else (out, lse, kl * 1.01)

    def worst(q, k, w, *rest, **flags):
        return select(q, k, -w, *rest, **flags)

    if part == "selection":
        monkeypatch.setattr(layer, "select_keys", worst)
    else:
        monkeypatch.setattr(layer, "dsa_attention", wrong)
    error = trial.check()
    assert error.wrong
    assert (error.max == torch.inf) == (part == "selection")
