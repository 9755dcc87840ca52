"""What dispatch may know of a call."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Call:
    """What dispatch may know of a call: never a tensor, never an exact token count.

    device: `cpu` or `cuda`; capability: 90 for Hopper, 0 without a GPU; dtype: of the operands.
    heads, width, value_width: of the attention or indexer heads; top_k: kept keys, 0 where nothing is selected.
    size_class: of the number of keys, see `size_class`; deterministic: bitwise repeatable gradients are asked for.
    precision: of the scores that select keys, `bf16`, `fp8` or `mxfp8`.
    """

    device: str = "cpu"
    capability: int = 0
    dtype: str = "float32"
    heads: int = 1
    width: int = 1
    value_width: int = 0
    top_k: int = 0
    size_class: str = "8K"
    deterministic: bool = False
    precision: str = "bf16"

    @classmethod
    def of(
        cls, operands: Tensor | tuple[Tensor, ...], num_keys: int, beside: tuple[Tensor, ...] = (), /, **rest: Any
    ) -> "Call":
        """The call with these operands, on one device: their dtypes meet in their promotion.

        beside: operands whose dtype is the kernels' own affair, unless it is fp64.
        """
        operands = operands if isinstance(operands, tuple) else (operands,)
        operand, capability = operands[0], 0
        if operand.is_cuda:
            major, minor = torch.cuda.get_device_capability(operand.device)
            capability = 10 * major + minor
        dtypes = [one.dtype for one in operands]
        dtypes += [torch.float64 for one in beside if one.dtype == torch.float64]
        common = functools.reduce(torch.promote_types, dtypes)
        dtype = str(common).removeprefix("torch.")
        device = operand.device.type
        return cls(device=device, capability=capability, dtype=dtype, size_class=size_class(num_keys), **rest)


def unmet(needs: Mapping[str, bool]) -> list[str]:
    """Of needs in words, those that are not met: what a row's `requirements` give."""
    return [need for need, met in needs.items() if not met]


def size_class(num_keys: int) -> str:
    """`8K`, `64K` (up to so many keys) or `above`."""
    return "8K" if num_keys <= 8192 else "64K" if num_keys <= 65536 else "above"
