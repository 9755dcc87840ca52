"""Fresh weights whose values do not depend on who holds them: one process, or many ranks with a part each.

A weight takes one number from the generator, its seed. It is drawn in blocks along its first dimension, each by a
generator of its own, seeded by that number and by where the block begins. So a rank draws the blocks that its part
meets, one at a time, and a weight on the meta device, which other ranks hold, takes its number and costs nothing.
Values are drawn on the CPU in fp32: neither the device nor the dtype of a weight changes them, but for rounding.
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from dsattn.nn.linear import local

BLOCK = 2**22
"""Numbers drawn at a time, 16 MiB; one slice of the first dimension where that has more."""


def normal_(weight: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill this rank's part of `weight` from a normal distribution around 0.

    weight: [N, ...] of any dtype, on any device, or a DTensor that is cut into boxes. generator: None takes torch's.
    """
    _fill(weight, generator, lambda block, own: block.normal_(std=std, generator=own))


def uniform_(weight: Tensor, low: float, high: float, generator: torch.Generator | None = None) -> None:
    """Fill this rank's part of `weight` evenly from [low, high). Arguments: `normal_`."""
    _fill(weight, generator, lambda block, own: block.uniform_(low, high, generator=own))


@torch.no_grad()
def _fill(weight: Tensor, generator: torch.Generator | None, draw: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    device = "cpu" if generator is None else generator.device
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=device))
    if weight.is_meta:
        return
    part, offsets = local(weight), _offsets(weight)
    begin, end = offsets[0], offsets[0] + part.shape[0]
    step = max(1, BLOCK // max(1, weight.shape[1:].numel()))
    for first in range(begin // step * step, end if part.numel() else begin, step):
        last = min(first + step, weight.shape[0])
        block = torch.empty(last - first, *weight.shape[1:], dtype=torch.float32, device="cpu")
        draw(block, torch.Generator().manual_seed(zlib.crc32(f"{seed} {first}".encode())))
        above, below = max(begin, first), min(end, last)
        mine = block[above - first : below - first]
        for dim, offset in enumerate(offsets[1:], 1):
            mine = mine.narrow(dim, offset, part.shape[dim])
        part[above - begin : below - begin].copy_(mine)
        del block, mine  # before the next one is made


def _offsets(weight: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole weight; what DTensors tell `torch.distributed.checkpoint`."""
    chunks = getattr(weight, "__create_chunk_list__", None)
    return (0,) * weight.dim() if chunks is None else tuple(chunks()[0].offsets)
