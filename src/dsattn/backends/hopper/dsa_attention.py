"""Sparse absorbed MLA on Hopper and the target of the indexer's loss, without a second pass over the keys.

The forward kernel has every probability in its registers, relative to the tops it knows so far. It leaves them in bf16;
once lse is known, they are weighed and summed over heads. At 2048 keys and 64 heads a row leaves 264 KB, written and
read once: a quarter of what its keys are, without their products. Rows are taken in runs whose P fits the scratch.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import scratch_bytes
from dsattn.backends.hopper.sparse_mla import HEADS, attend, blocks_of_heads, requirements
from dsattn.backends.triton.launch import launch

__all__ = ["dsa_attention_forward", "requirements"]

KEYS = 64  # of a tile
_LOG2_E = tl.constexpr(1.4426950408889634)


def dsa_attention_forward(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse) of `sparse_mla_forward`, bit for bit, and shares [T, K] fp32, of `dsattn.ops.dsa.shares_reference`.

    Summed in fp32 from probabilities rounded to bf16. Scratch: at most what settings allow.
    """
    (rows, heads, _), slots = q.shape, index.shape[1]
    blocks, tiles = blocks_of_heads(heads), triton.cdiv(slots, KEYS)
    out, lse = q.new_empty(rows, heads, value_dim), q.new_empty(rows, heads, dtype=torch.float32)
    shares = torch.empty(rows, slots, dtype=torch.float32, device=q.device)
    most = rows_of_run(rows, heads, slots)
    p = q.new_empty(most * blocks, tiles, HEADS, KEYS, dtype=torch.bfloat16)
    top = lse.new_empty(most * blocks, tiles, HEADS)
    index, length = index.contiguous(), length.contiguous()
    for first in range(0, rows, most):
        part = slice(first, first + most)
        attend(q[part], kv, index[part], length[part], sink, scale, (out[part], lse[part]), (p, top))
        with torch.cuda.device_of(q):
            grid = (len(out[part]) * tiles,)
            operands = (p, top, lse[part], length[part], shares[part])
            launch(_shares_kernel, grid, *operands, slots, tiles, H=heads, HEADS=HEADS, KEYS=KEYS, num_warps=1)
    return out, lse, shares


def rows_of_run(rows: int, heads: int, slots: int) -> int:
    """Rows whose P fits into the scratch, at least one, in runs as even as their number allows."""
    a_row = blocks_of_heads(heads) * triton.cdiv(slots, KEYS) * HEADS * (2 * KEYS + 4)
    most = max(1, scratch_bytes() // max(a_row, 1))
    return triton.cdiv(rows, triton.cdiv(rows, most)) if rows else 1


@triton.jit(
    do_not_specialize=["slots", "tiles"],
    do_not_specialize_on_alignment=["lse", "length", "shares"],
)
def _shares_kernel(
    p,
    top,
    lse,
    length,
    shares,
    slots,
    tiles,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """shares of one tile's slots: sum_h exp2(top_h - lse_h) P_h, 0 where there is no key.

    p: [T, blocks, tiles, HEADS, KEYS], keys in register order, see `sparse_mla_reduce`. top: [T, blocks, tiles, HEADS].
    """
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    place = tl.arange(0, KEYS)
    within = place % 32
    slot = tile * KEYS + place - within + within // 2 % 4 * 8 + within // 8 * 2 + within % 2
    total = tl.zeros([KEYS], tl.float32)
    if tile * KEYS < tl.load(length + row):
        for block in tl.static_range(BLOCKS):
            head = tl.arange(0, HEADS)
            real = block * HEADS + head < H
            at = ((row * BLOCKS + block) * tiles + tile) * HEADS
            part = tl.load(p + at * KEYS + head[:, None] * KEYS + place[None, :]).to(tl.float32)
            log = tl.load(lse + row * H + block * HEADS + head, mask=real, other=0.0)
            weight = tl.exp2(tl.load(top + at + head) - log * _LOG2_E)
            # Where nothing is left a weight may be infinite; a padded head may have anything.
            held = real[:, None] & (part != 0.0)
            total += tl.sum(tl.where(held, part * weight[:, None], 0.0), 0)
    tl.store(shares + row * slots + slot, total, mask=slot < slots)
