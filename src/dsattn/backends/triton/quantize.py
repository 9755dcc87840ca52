"""Rounding to E4M3 by one scale a vector, in one pass: the bytes and scales of `dsattn.quantize.to_e4m3`.

Letters: R rows, H heads, D width, V vectors of a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends.triton.launch import launch
from dsattn.quantize import FLOOR, LARGEST

_VECTORS = 32


def to_e4m3(x: Tensor, factor: Tensor | None = None, *, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, ...]:
    """(E4M3 like x, fp32 scales) of x [..., D] of one or two leading axes, whose last axis is contiguous.

    factor: [...], what scales are multiplied by, in fp32. dtype: of the first result, any that holds E4M3.
    """
    rounded = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    steps = (x.stride(0), x.stride(1) if x.dim() == 3 else 0)
    given = scale if factor is None else factor
    factor_steps = (given.stride(0), given.stride(1) if x.dim() == 3 else 0)
    launch(
        _to_e4m3_kernel,
        (triton.cdiv(scale.numel(), _VECTORS),),
        *(x, given, rounded, scale),
        *(scale.numel(), heads, *steps, *factor_steps),
        WIDTH=x.shape[-1],
        TILE_WIDTH=triton.next_power_of_2(x.shape[-1]),
        VECTORS=_VECTORS,
        FACTOR=factor is not None,
        LARGEST=LARGEST,
        FLOOR=FLOOR,
        num_warps=4,
    )
    return rounded, scale


@triton.jit
def _on_grid(x):
    """The nearest E4M3, ties to even, of fp32 up to +-448: sums with a number whose last bit is E4M3's round so.

    What follows is exact: Triton's interpreter rounds conversions wrongly, and GPUs differ in what overflows.
    """
    bits = x.to(tl.int32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    anchor = tl.maximum(power, 0.015625) * 1572864.0  # 2^-6, the least normal E4M3; 3 * 2^19
    size = (tl.abs(x) + anchor) - anchor
    return (size.to(tl.int32, bitcast=True) | (bits & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["vectors", "factor_row", "factor_head"],
    do_not_specialize_on_alignment=["factor_ptr"],  # parts of tensors begin anywhere
)
def _to_e4m3_kernel(
    x_ptr,
    factor_ptr,
    rounded_ptr,
    scale_ptr,
    vectors,
    heads,
    x_row,
    x_head,
    factor_row,
    factor_head,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,
    FACTOR: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
):
    vector_V = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    row_V, head_V = vector_V // heads, vector_V % heads
    live_V = vector_V < vectors
    d_D = tl.arange(0, TILE_WIDTH)
    live_VD = live_V[:, None] & (d_D < WIDTH)[None, :]
    x_VD = tl.load(x_ptr + (row_V * x_row + head_V * x_head)[:, None] + d_D[None, :], mask=live_VD, other=0.0)
    x_VD = x_VD.to(tl.float32)
    finite_VD = tl.abs(x_VD) < float("inf")  # false for NaN too
    finite_V = tl.sum(finite_VD.to(tl.int32), 1) == TILE_WIDTH
    largest_V = tl.maximum(tl.max(tl.where(finite_VD, tl.abs(x_VD), 0.0), 1), FLOOR)
    scale_V = tl.div_rn(largest_V, tl.full((VECTORS,), LARGEST, tl.float32))
    scale_V = tl.where(finite_V, scale_V, float("nan"))
    rounded_VD = tl.div_rn(x_VD, tl.broadcast_to(scale_V[:, None], (VECTORS, TILE_WIDTH)))
    rounded_VD = tl.where(finite_V[:, None], _on_grid(rounded_VD), float("nan"))
    to_VD = rounded_ptr + (vector_V * WIDTH)[:, None] + d_D[None, :]
    tl.store(to_VD, rounded_VD.to(rounded_ptr.dtype.element_ty), mask=live_VD)
    if FACTOR:
        factor_V = tl.load(factor_ptr + row_V * factor_row + head_V * factor_head, mask=live_V, other=0.0)
        scale_V = factor_V.to(tl.float32) * scale_V
    tl.store(scale_ptr + vector_V, scale_V, mask=live_V)
