"""What stands behind the Hopper backward, in plain Triton: in the interpreter without a GPU, else on it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import settings

pytest.importorskip("triton")
NAN = float("nan")


def test_in_the_interpreter(interpret: Callable[[str], int]) -> None:
    assert interpret(__file__) >= 12


def register_order(channels: Tensor, vector: int) -> Tensor:
    """[S, C] as the backward kernel leaves it, by the formula of the module's first lines."""
    stored = torch.empty_like(channels)
    for channel in range(channels.shape[1]):
        group, within = divmod(channel, 4 * vector)
        b, q, x = within // 8, within % 8 // 2, within % 2
        stored[:, 4 * vector * group + vector * q + 2 * b + x] = channels[:, channel]
    return stored


def test_register_order_is_that_of_the_kernel() -> None:
    """`_leave` reshapes and permutes a tile of 64 channels like this."""
    x = torch.randn(3, 64)
    assert register_order(x, 4).equal(x.reshape(3, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(3, 64))
    assert register_order(x, 8).equal(x.reshape(3, 2, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(3, 64))


@pytest.mark.parametrize(("keys", "width"), [(1, 512), (5, 576), (8, 512)])
def test_additions(device: str, keys: int, width: int) -> None:
    from dsattn.backends.hopper.sparse_mla_reduce import gather_additions

    x = torch.randn(keys, width)
    got = torch.full((keys, width), NAN, device=device)
    gather_additions(register_order(x, 4).to(device), got)
    assert got.cpu().equal(x)


@pytest.mark.parametrize(("width", "blocks"), [(576, 1), (512, 2), (576, 3)])
@pytest.mark.parametrize("runs", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_contributions(device: str, width: int, blocks: int, runs: int, dtype: torch.dtype) -> None:
    """Keys without lines, with one, with more than one step; lines past the last are poison; one run starts at 0."""
    from dsattn.backends.hopper.sparse_mla_reduce import add_contributions

    counts = torch.tensor([[0, 1, 17, 0, 40], [3, 0, 16, 0, 0], [0, 0, 5, 0, 33]])[:runs]
    keys = counts.shape[1]
    total, dkv = torch.full((keys, width), NAN, device=device), torch.full((keys, width), NAN, device=device)
    expected = torch.zeros(keys, width, dtype=torch.float64)
    for run, count in enumerate(counts):
        lines = torch.randn(int(count.sum()) + 3, blocks, width).to(dtype)
        lines[-3:] = NAN
        start = torch.cat([count.new_zeros(1), count.cumsum(0)]).int()
        for key in range(keys):
            expected[key] += lines[start[key] : start[key + 1]].double().sum((0, 1))
        stored = register_order(lines.flatten(0, 1), 16 // dtype.itemsize).view_as(lines).to(device)
        add_contributions(stored, (start + 7 * run).to(device), total, dkv, run == 0, run == runs - 1)
    torch.testing.assert_close(dkv.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert total.isnan().all() == (runs == 1)


@pytest.mark.slow
def test_compiles_for_hopper(launches: list, assemble: Callable[[Any], Any]) -> None:
    """No spills, and contributions arrive 16 bytes at a time while others are summed."""
    from dsattn.backends.hopper.sparse_mla import sparse_mla_backward
    from dsattn.backends.hopper.sparse_mla_backward import backward_kernel

    q, out = torch.zeros(2, 64, 576, dtype=torch.bfloat16), torch.zeros(2, 64, 512, dtype=torch.bfloat16)
    index, sink = torch.zeros(2, 2048, dtype=torch.int32), torch.zeros(64)
    operands = (out, q, q.new_zeros(64, 576), index, index[:, 0], sink, out, torch.zeros(2, 64), 0.1)
    for deterministic, fp32 in ((False, False), (True, False), (True, True)):
        with settings(fp32_contributions=fp32):
            sparse_mla_backward(*operands, deterministic)
    others = [launch for launch in launches if launch.kernel is not backward_kernel]
    forms = {(launch.kernel.__name__, launch.arguments[0].dtype): launch for launch in others}
    assert len(forms) == 6
    for launch in forms.values():
        got = assemble(launch)
        name = launch.kernel.__name__
        assert got.complaints == [], name
        assert got.spills == 0, name
        if name == "_contributions_kernel":
            copies = set(re.findall(r"cp\.async\.\S+ \[[^\]]*\], \[[^\]]*\], (\w+)", got.ptx))
            rest = 4 * 64 * launch.arguments[0].itemsize // 64  # four lines of 64 channels, among 64 threads
            assert copies == {"0x10", hex(rest)}
            assert got.registers <= 80
