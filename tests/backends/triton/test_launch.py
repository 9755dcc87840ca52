"""Launches and what they would be compiled for."""

import pytest
import torch
import triton
import triton.language as tl

from dsattn.backends.triton.launch import compilations, launch, recording, specialization


@triton.jit(do_not_specialize=["free"])
def _fill(out, value, free, WIDTH: tl.constexpr):
    tl.store(out + tl.arange(0, WIDTH), value + free)


BUFFER = torch.zeros(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "compiles_again"),
    [
        ({}, False),
        ({"value": 9}, False),
        ({"value": 16}, True),  # divisible by 16
        ({"value": 1}, True),
        ({"free": 1}, False),
        ({"free": 16}, False),
        ({"out": BUFFER.float()}, True),
        ({"out": BUFFER[1:]}, True),  # not aligned
        ({"WIDTH": 16}, True),
        ({"num_warps": 8}, True),
    ],
)
def test_specialization(changes: dict, compiles_again: bool) -> None:
    base = {"out": BUFFER, "value": 7, "free": 3, "WIDTH": 8, "num_warps": 4}
    same = specialization(_fill, **base) == specialization(_fill, **base | changes)
    assert same != compiles_again


def test_recording_without_a_start() -> None:
    with recording(start=False) as outer:
        launch(_fill, (1,), BUFFER, 2, 0, WIDTH=8)
        with recording(start=False) as inner:
            launch(_fill, (1,), BUFFER, 3, 0, WIDTH=8)
        launch(_fill, (1,), BUFFER, 16, 0, WIDTH=8)
    assert [len(kept["_fill"]) for kept in (outer, inner)] == [2, 1]
    assert not BUFFER.any()
    assert compilations(_fill) == 0


def test_an_empty_grid_starts_nothing() -> None:
    with recording() as kept:
        launch(_fill, (0,), BUFFER, 2, 0, WIDTH=8)
    assert not kept


def test_a_launch_runs(device: str) -> None:
    out = torch.zeros(8, dtype=torch.int32, device=device)
    with recording(start=False):
        pass
    launch(_fill, (1,), out, 2, 3, WIDTH=8)
    assert out.eq(5).all()


@pytest.mark.gpu
def test_compilations_are_counted(device: str) -> None:
    out, before = torch.zeros(64, dtype=torch.int32, device=device), compilations(_fill)
    with recording() as kept:
        for value in (2, 3, 16, 32, 5):
            launch(_fill, (1,), out, value, 0, WIDTH=64)
    assert len(kept["_fill"]) == compilations(_fill) - before == 2
