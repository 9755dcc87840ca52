"""Operands in eight bits: float8 E4M3 by one fp32 scale a vector, or MXFP8, E4M3 by a power of two for every 32 lanes.

    scale = max(absmax, 1e-4) / 448         a power of two is rounded up
    E4M3  = x / scale                       to the nearest, ties to even

Nothing overflows: 448 is the largest E4M3. The floor is the models' own (DeepSeek-V3.2, GLM-5.3-Flash); vectors of
zeros are zeros by it. A vector, or block, that holds a NaN or an infinity is NaN as a whole, and so is its scale: a
score made of it is NaN, which is never selected. All is made in fp32, with true divisions, so that bytes are the same
on every device.
Scales of MXFP8 are UE8M0, biased exponents: byte b is 2^(b - 127), 255 is NaN (OCP Microscaling Formats 1.0).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.errors import InputError

LARGEST = 448.0
FLOOR = 1e-4
BLOCK = 32  # lanes that share a scale in MXFP8

_MANTISSA_BITS = 23
_MANTISSA = 2**_MANTISSA_BITS - 1


def to_e4m3(x: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """(E4M3 [..., D], fp32 scales [...]) of floating point x [..., D], D >= 1."""
    x = x.detach().float()
    largest = x.abs().amax(-1)
    finite = largest < torch.inf  # false for NaN too
    scale = largest.clamp(min=FLOOR) / torch.full_like(largest, LARGEST)  # by a number, CUDA multiplies by 1 / 448
    if power_of_two:
        scale = ((scale.view(torch.int32) + _MANTISSA) & ~_MANTISSA).view(torch.float32)
    scale = scale.masked_fill(~finite, torch.nan)
    rounded = (x / scale[..., None]).masked_fill(~finite[..., None], torch.nan)
    return rounded.to(torch.float8_e4m3fn), scale


def from_e4m3(e4m3: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., D], exact where scales are powers of two."""
    return e4m3.float() * scale[..., None]


def to_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 [..., D], uint8 exponents [..., D / 32]) of floating point x [..., D].

    Raises InputError where D is no multiple of 32.
    """
    if x.shape[-1] % BLOCK or not x.shape[-1]:
        raise InputError(f"x has {x.shape[-1]} lanes; MXFP8 needs a multiple of {BLOCK}: each block has its own scale")
    e4m3, scale = to_e4m3(x.unflatten(-1, (-1, BLOCK)), power_of_two=True)
    return e4m3.flatten(-2), (scale.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)


def from_mxfp8(e4m3: Tensor, exponent: Tensor) -> Tensor:
    """fp32 [..., D], exact; bf16 holds it exactly too."""
    scale = (exponent.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
    return from_e4m3(e4m3.unflatten(-1, (-1, BLOCK)), scale).flatten(-2)


def pack_exponents(exponent: Tensor) -> Tensor:
    """int32 [..., B / 4, rounded up] of uint8 [..., B]: four a word, the first in the lowest byte, zeros behind."""
    padded = F.pad(exponent, (0, -exponent.shape[-1] % 4))
    byte = padded.unflatten(-1, (-1, 4)).to(torch.int32)
    return byte[..., 0] | byte[..., 1] << 8 | byte[..., 2] << 16 | byte[..., 3] << 24
