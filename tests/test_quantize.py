"""Bytes of operands in eight bits, against arithmetic in plain Python and bytes worked out by hand."""

import math
import struct

import pytest
import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.quantize import from_e4m3, from_mxfp8, pack_exponents, to_e4m3, to_mxfp8

NAN, INF = float("nan"), float("inf")
# Code -> value, from the definition: 4 exponent bits with bias 7, 3 mantissa bits, 126 is 448, 127 is NaN.
GRID = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]


def fp32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def expected(row: list[float], power_of_two: bool) -> tuple[list[int], float]:
    """(bytes, scale) of a vector of fp32 numbers."""
    if not all(map(math.isfinite, row)):
        return [127] * len(row), NAN
    scale = fp32(max(fp32(1e-4), *map(abs, row)) / 448)
    if power_of_two:
        scale = 2.0 ** math.ceil(math.log2(scale))
    return [_code(fp32(x / scale)) + 128 * (math.copysign(1, x) < 0) for x in row], scale


def _code(x: float) -> int:
    distance = [abs(abs(x) - value) for value in GRID]
    nearest = [code for code, one in enumerate(distance) if one == min(distance)]
    return min(nearest, key=lambda code: code % 2)


def hostile() -> Tensor:
    """Sizes of 2^-149 .. 3e38, zeros of both signs, ties, NaN and infinities."""
    x = torch.randn(40, 32) * torch.logspace(-9, 9, 40)[:, None]
    x[0], x[1], x[2] = 0.0, -0.0, 3e38
    x[3, 5], x[4, 31], x[5, 0] = NAN, INF, -INF
    x[6], x[7] = 448.0 * 2**-10, 2.0**-149
    x[8, :8] = torch.tensor([448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10, -(2.0**-11), 432.0])  # ties, both ways
    x[8, 8:] = 0
    return x


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bytes_and_scales_are_those_of_plain_arithmetic(dtype: torch.dtype, power_of_two: bool) -> None:
    x = hostile().to(dtype)
    got, scale = to_e4m3(x, power_of_two=power_of_two)
    assert (got.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    for row, codes, one in zip(x.float().tolist(), got.view(torch.uint8).tolist(), scale.tolist(), strict=True):
        right, its = expected(row, power_of_two)
        assert codes == right
        assert one == its or (math.isnan(one) and math.isnan(its))
    back = from_e4m3(got, scale)
    assert back.isnan().all(1).tolist() == (~x.float().isfinite()).any(1).tolist()


def test_golden_bytes() -> None:
    row = torch.tensor([[448.0, -448.0, 224.0, 1.0, 0.0, -0.0, 0.3, 2.0**-9]])
    codes = [0x7E, 0xFE, 0x76, 0x38, 0x00, 0x80, 0x2A, 0x01]
    assert to_e4m3(row)[0].view(torch.uint8).tolist() == [codes]
    assert to_e4m3(row)[1].tolist() == [1.0]
    assert to_e4m3(3 * row)[0].view(torch.uint8).tolist() == [codes]
    assert to_e4m3(torch.full((1, 128), 256.0), power_of_two=True)[0].view(torch.uint8).unique().tolist() == [0x78]
    assert to_e4m3(torch.full((1, 128), 256.0))[0].view(torch.uint8).unique().tolist() == [0x7E]
    assert to_e4m3(torch.zeros(1, 2))[1].view(torch.int32).tolist() == [0x346FACAD]  # 1e-4 / 448


def test_mxfp8_golden_bytes_and_words() -> None:
    x = torch.zeros(2, 160)
    x[0, :32], x[0, 32], x[0, 64:96], x[0, 100] = 256.0, 449.0, -3.5, NAN
    x[1, 0] = 2.0**120
    codes, exponent = to_mxfp8(x)
    assert exponent.tolist() == [[127, 128, 120, 255, 105], [239, 105, 105, 105, 105]]
    assert codes.view(torch.uint8)[0, [0, 31, 32, 33, 64, 96, 127, 128]].tolist() == [
        *(0x78, 0x78, 0x76, 0x00, 0xFE, 0x7F, 0x7F, 0x00)
    ]
    assert [[word & 0xFFFFFFFF for word in row] for row in pack_exponents(exponent).tolist()] == [
        [0xFF78807F, 0x69],
        [0x696969EF, 0x69],
    ]
    assert pack_exponents(exponent[:, :4]).shape == (2, 1)
    back = from_mxfp8(codes, exponent)
    assert back[0, :32].eq(256.0).all()
    assert back[0, 96:128].isnan().all()
    assert back.isnan().sum() == 32
    assert back[1, 0] == 2.0**120


def test_a_block_of_mxfp8_is_a_vector_with_a_power_of_two() -> None:
    x = hostile().view(10, 128)
    codes, exponent = to_mxfp8(x)
    alone, scale = to_e4m3(x.view(40, 32), power_of_two=True)
    assert codes.view(torch.uint8).equal(alone.view(torch.uint8).view(10, 128))
    finite = scale.isfinite()
    assert exponent.flatten()[finite].float().sub(127).exp2().equal(scale[finite])
    assert exponent.flatten()[~finite].eq(255).all()
    back = from_mxfp8(codes, exponent)
    torch.testing.assert_close(back.bfloat16().float(), back, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 64)])
def test_nothing_to_round(shape: tuple[int, ...]) -> None:
    assert to_e4m3(torch.zeros(shape))[1].shape == shape[:-1]
    assert to_mxfp8(torch.zeros(shape))[1].shape == (*shape[:-1], shape[-1] // 32)


@pytest.mark.parametrize("width", [0, 31, 48])
def test_mxfp8_needs_whole_blocks(width: int) -> None:
    with pytest.raises(InputError, match=f"x has {width} lanes; MXFP8 needs a multiple of 32"):
        to_mxfp8(torch.zeros(2, width))
