"""Rotary position embedding (RoPE, arXiv 2104.09864) with YaRN's frequencies (arXiv 2309.00071).

    angle[t, j] = position[t] * frequency[j],    (a, b) -> (a cos - b sin, b cos + a sin) for each pair of lanes (a, b)

Pairs are neighbouring lanes (2j, 2j+1) when interleaved, else (j, j + R/2). Lanes keep their stored order either way.
Letters: T rows, R rotated lanes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsattn.config import RopeConfig
from dsattn.errors import InputError


class RotaryTable(NamedTuple):
    """cos and sin, [T, R/2] each in fp32 (fp64 for fp64 layers), YaRN's concentration included."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(
    rope: RopeConfig, rope_dim: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """[rope_dim/2] radians a position: base^(-2j/rope_dim), where YaRN asks for it divided by `factor` at the slow end.

    YaRN keeps a frequency that turns more than `beta_fast` times in the original context, divides one that turns less
    than `beta_slow` times, and blends linearly in j between the two (arXiv 2309.00071, "NTK-by-parts").
    """
    lane = torch.arange(0, rope_dim, 2, dtype=dtype, device=device)
    kept = rope.base ** (-lane / rope_dim)
    if rope.scaling == "none":
        return kept

    def lane_that_turns(times: float) -> float:
        turns_of_lane_0 = rope.original_max_position / (2 * math.pi)
        return rope_dim * math.log(turns_of_lane_0 / times) / (2 * math.log(rope.base))

    low = max(math.floor(lane_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(lane_that_turns(rope.beta_slow)), rope_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((lane / 2 - low) / width).clamp(0, 1)
    return kept * (1 - stretched) + kept / rope.factor * stretched


def rotary_table(positions: Tensor, rope: RopeConfig, rope_dim: int, *, dtype: torch.dtype) -> RotaryTable:
    """The table for rows at `positions` ([T] int64), for activations of `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    frequency = inverse_frequencies(rope, rope_dim, dtype=wide, device=positions.device)
    angle = positions[:, None].to(wide) * frequency
    concentration = rope.concentration(rope.mscale) / rope.concentration(rope.mscale_all_dim)
    return RotaryTable(angle.cos() * concentration, angle.sin() * concentration)


def rotate(x: Tensor, table: RotaryTable, *, interleaved: bool, first: bool = True) -> Tensor:
    """x [T, ..., D] with its first (else last) R lanes rotated; computed in the table's dtype, returned in x's.

    Raises InputError where the table has other rows than x, or more lanes.
    """
    width, lanes = x.shape[-1], 2 * table.cos.shape[-1]
    if table.cos.shape[0] != x.shape[0] or lanes > width:
        raise InputError(
            f"table is for {table.cos.shape[0]} rows and {lanes} lanes, x has {x.shape[0]} rows and {width} lanes; "
            "make it from the positions of these rows, with rope_dim at most the head's width"
        )
    if lanes == 0:
        return x
    turned, still = x.split([lanes, width - lanes], -1) if first else reversed(x.split([width - lanes, lanes], -1))
    per_head = (x.shape[0], *(1,) * (x.dim() - 2), lanes // 2)
    cos, sin = table.cos.view(per_head), table.sin.view(per_head)
    wide = turned.to(cos.dtype)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    return torch.cat((turned, still) if first else (still, turned), -1)
