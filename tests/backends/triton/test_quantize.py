"""The kernel gives the bytes and scales of `dsattn.quantize`, wherever its operands lie."""

import pytest
import torch
from torch import Tensor

from dsattn.quantize import to_e4m3

quantize = pytest.importorskip("dsattn.backends.triton.quantize", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
NAN, INF = float("nan"), float("inf")


def hostile(*shape: int) -> Tensor:
    x = torch.randn(shape) * torch.logspace(-9, 9, shape[0]).view(-1, *[1] * (len(shape) - 1))
    x[0], x[2] = 0.0, 3e38
    x[3, ..., 0], x[4, ..., -1], x[5, ..., 1] = NAN, INF, -INF
    x[6, ..., :8] = torch.tensor([448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10, -(2.0**-11), 432.0])
    x[6, ..., 8:] = 0
    return x


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit; NaN is NaN."""
    return bool((got.float().view(torch.int32) == want.float().view(torch.int32)).logical_or(want.isnan()).all()) and (
        got.isnan().equal(want.isnan())
    )


def held(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.float8_e4m3fn  # the interpreter knows no NaN in fp8


@pytest.mark.parametrize("shape", [(12, 3, 24), (41, 128), (7, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_and_scales(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = hostile(*shape).to(device, dtype)
    got, scale = quantize.to_e4m3(x, dtype=held(device))
    right, its = to_e4m3(x)
    assert same(got.float(), right.float())
    assert same(scale, its)


def test_strides_and_factors(device: str) -> None:
    wide = hostile(14, 4, 40).to(device)
    x, factor = wide[::2, 1:, 3:35], torch.randn(3, 7, device=device).t()
    got, scale = quantize.to_e4m3(x, factor, dtype=held(device))
    right, its = to_e4m3(x)
    assert same(got.float(), right.float())
    assert same(scale, factor * its)


@pytest.mark.gpu
def test_repeats_at_any_size(device: str) -> None:
    """Every bf16 number, as many vectors as pass 2^31 bytes."""
    every = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16).view(-1, 128)
    x = every.repeat(2**17 // 4, 1)
    got, scale = quantize.to_e4m3(x)
    right, its = to_e4m3(every)
    for part in (slice(0, len(every)), slice(len(x) - len(every), len(x))):
        assert same(got[part].float(), right.float())
        assert same(scale[part], its)
    again, _ = quantize.to_e4m3(x)
    assert torch.equal(got.view(torch.uint8), again.view(torch.uint8))
