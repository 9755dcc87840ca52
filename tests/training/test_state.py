import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dsattn.errors import CheckpointError, InputError
from dsattn.training import checkpoint, state
from dsattn.training.entries import slots_of


class Net(nn.Module):
    """Has a frozen, a tied, a scalar and a never used parameter, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.first.weight
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (self.frozen(self.first(rows)) + self.tied(rows)) * self.scalar


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "amsgrad, foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True, foreach=True),
    "tensor lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}


def optimizer_groups(model: Net) -> list[dict[str, Any]]:
    learning = [model.first.weight, model.scalar, model.unused, model.first.bias, model.tied.bias]
    return [{"params": learning[:1]}, {"params": learning[1:], "weight_decay": 0.0}]


def make(kind: str = "adamw", seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, OPTIMIZERS[kind](optimizer_groups(model))


def step(model: Net, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()


def bits(model: nn.Module) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumed_optimizer_goes_on_with_the_same_bits(tmp_path: Path, kind: str, steps_before: int) -> None:
    model, optimizer = make(kind)
    step(model, optimizer, steps_before)
    rest = {"rng": state.rng_state(), "lists": {"a": []}}
    path = checkpoint.save(tmp_path, steps_before, {**state.capture(model, optimizer), **rest}, keep=1)
    step(model, optimizer, 3)

    resumed, fresh = make(kind, seed=1)
    weight = resumed.first.weight
    found = state.restore(path, resumed, fresh, {"rng": None, "lists": None})
    state.set_rng_state(found["rng"])
    assert found["lists"] == {"a": []}
    assert resumed.first.weight is weight
    step(resumed, fresh, 3)
    assert bits(resumed) == bits(model)
    assert resumed.unused not in fresh.state, "no state where there was no gradient"


def test_used_optimizer_is_rewound(tmp_path: Path) -> None:
    model, optimizer = make()
    path = checkpoint.save(tmp_path, 0, {**state.capture(model, optimizer), "rng": state.rng_state()}, keep=1)
    step(model, optimizer, 2)
    once = bits(model)
    state.set_rng_state(state.restore(path, model, optimizer, {"rng": None})["rng"])
    assert len(optimizer.state) == 0
    step(model, optimizer, 2)
    assert bits(model) == once


def test_a_stage_in_which_nothing_learns_adds_no_entry() -> None:
    """What it saves must be what another mesh, whose ranks all learn, can hold."""
    model, optimizer = make()
    step(model, optimizer, 1)
    idle = torch.optim.AdamW([{"params": [], "kind": "0"}], lr=0.1)
    assert slots_of(state.capture(model, idle)).keys() < slots_of(state.capture(model, optimizer)).keys()


def test_why_torch_helpers_are_not_used() -> None:
    """When this fails, `capture` can become `get_optimizer_state_dict`."""
    model, optimizer = make()
    get_optimizer_state_dict(model, optimizer)
    assert {value["step"].item() for value in optimizer.state.values()} == {1.0}, "looking at it stepped it"


def test_other_parameters_are_named(tmp_path: Path) -> None:
    model, optimizer = make()
    step(model, optimizer, 1)
    path = checkpoint.save(tmp_path, 1, state.capture(model, optimizer), keep=1)
    other, _ = make(seed=1)
    before = bits(other)
    for parameters in ([other.first.weight], [*other.parameters()]):
        with pytest.raises(CheckpointError, match=r"'first\.weight'.*build the optimiser of the saved stage"):
            state.restore(path, other, torch.optim.AdamW(parameters))
    other.first.weight = nn.Parameter(torch.ones(4, 2))
    with pytest.raises(CheckpointError, match=r"first\.weight is torch.float32 \[4, 3\]"):
        state.restore(path, other, torch.optim.AdamW(optimizer_groups(other)))
    other.first.weight = other.tied.weight
    assert bits(other) == before, "nothing was changed"


def test_stranger_in_the_optimizer() -> None:
    with pytest.raises(InputError, match=r"shapes \[\(1, 1\), \(1,\)\]"):
        state.capture(Net(), torch.optim.AdamW(nn.Linear(1, 1).parameters()))


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(1).item()]  # noqa: NPY002


def test_random_generators(tmp_path: Path) -> None:
    draws()  # leaves half a pair of normal deviates in `random` and NumPy
    path = checkpoint.save(tmp_path, 0, {"rng": state.rng_state()}, keep=1)
    first = draws()
    assert draws() != first
    state.set_rng_state(checkpoint.load(path, {"rng": None})["rng"])
    assert draws() == first


def test_fewer_devices_than_saved_are_refused() -> None:
    before = state.rng_state()
    saved = {**before, "cuda": [b"\0" * 16] * (torch.cuda.device_count() + 1)}
    torch.rand(1)
    after = state.rng_state()
    with pytest.raises(CheckpointError, match="CUDA devices were saved"):
        state.set_rng_state(saved)
    assert state.rng_state()["torch"] == after["torch"], "nothing was set"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True, "foreach": True}])
def test_resume_on_the_gpu(tmp_path: Path, options: dict[str, Any]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 8, device="cuda")).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, optimizer = build()
    train(model, optimizer)
    path = checkpoint.save(tmp_path, 3, {**state.capture(model, optimizer), "rng": state.rng_state()}, keep=1)
    expected = train(model, optimizer)
    model, optimizer = build()
    state.set_rng_state(state.restore(path, model, optimizer, {"rng": None})["rng"])
    assert all(torch.equal(a, b) for a, b in zip(train(model, optimizer), expected, strict=True))
