"""Rows of channels as tuples of chunks: how kernels hold widths that are no power of two.

A width is cut into chunks of one power of two and a rest padded to another: 512 + 64 and 128 + 64 cost no padding.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.errors import BackendUnavailable

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# What one block of a Hopper or Blackwell data centre GPU may use; assumed where torch does not tell.
SHARED_BYTES = 232448


@triton.jit
def load(base, offset, live, FIRST: tl.constexpr, WIDTH: tl.constexpr, TOTAL: tl.constexpr):
    """[R, WIDTH] channels from FIRST on of the rows at `offset`; 0 past TOTAL and where not `live` (None: all are)."""
    channel = FIRST + tl.arange(0, WIDTH)
    pointers = base + offset[:, None] + channel[None, :]
    if FIRST + WIDTH <= TOTAL and live is None:
        part = tl.load(pointers)
    elif FIRST + WIDTH <= TOTAL:
        part = tl.load(pointers, mask=live[:, None], other=0.0)
    elif live is None:
        part = tl.load(pointers, mask=(channel < TOTAL)[None, :], other=0.0)
    else:
        part = tl.load(pointers, mask=live[:, None] & (channel < TOTAL)[None, :], other=0.0)
    return part


@triton.jit
def load_chunks(base, offset, live, TOTAL: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr):
    """The first TOTAL channels of rows, as a tuple cut where C channels are cut."""
    parts = ()
    for i in tl.static_range(C // CHUNK):
        if i * CHUNK < TOTAL:
            parts = parts + (load(base, offset, live, i * CHUNK, CHUNK, TOTAL),)
    if REST > 0:
        if C // CHUNK * CHUNK < TOTAL:
            parts = parts + (load(base, offset, live, C // CHUNK * CHUNK, REST, TOTAL),)
    return parts


@triton.jit
def zeros(R: tl.constexpr, TOTAL: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr):
    """fp32 sums for what `_load_chunks` gives."""
    parts = ()
    for i in tl.static_range(C // CHUNK):
        if i * CHUNK < TOTAL:
            parts = parts + (tl.zeros([R, CHUNK], tl.float32),)
    if REST > 0:
        if C // CHUNK * CHUNK < TOTAL:
            parts = parts + (tl.zeros([R, REST], tl.float32),)
    return parts


@triton.jit
def store_chunks(base, offset, live, parts, TOTAL: tl.constexpr, CHUNK: tl.constexpr):
    for i in tl.static_range(len(parts)):
        channel = i * CHUNK + tl.arange(0, parts[i].shape[1])
        mask = live[:, None] & (channel < TOTAL)[None, :]
        tl.store(base + offset[:, None] + channel[None, :], parts[i].to(base.dtype.element_ty), mask=mask)


@triton.jit
def products(a, b, initial):
    """initial + sum_c a_c b_c^T over the chunks that both have: [rows of a, rows of b] fp32. initial None: 0."""
    if initial is None:
        total = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    else:
        total = tl.dot(a[0], tl.trans(b[0]), acc=initial, input_precision="ieee")
    for i in tl.static_range(1, len(a) if len(a) < len(b) else len(b)):
        total = tl.dot(a[i], tl.trans(b[i]), acc=total, input_precision="ieee")
    return total


@triton.jit
def add_products(sums, a, b):
    """sums_c + a b_c, chunk after chunk of `sums`."""
    grown = ()
    for i in tl.static_range(len(sums)):
        grown = grown + (tl.dot(a, b[i], acc=sums[i], input_precision="ieee"),)
    return grown


@triton.jit
def scaled(parts, factor):
    scaled = ()
    for i in tl.static_range(len(parts)):
        scaled = scaled + (parts[i] * factor,)
    return scaled


@triton.jit
def finite_rows(parts):
    """[R] bool: rows that are finite in every chunk."""
    finite = tl.full([parts[0].shape[0]], 1, tl.int32)
    for i in tl.static_range(len(parts)):
        finite = tl.minimum(finite, tl.min((tl.abs(parts[i].to(tl.float32)) < float("inf")).to(tl.int32), 1))
    return finite != 0


@triton.jit
def finite_parts(parts):
    """0 where not finite, so that products that mix rows and keys carry nothing over."""
    cleaned = ()
    for i in tl.static_range(len(parts)):
        part = parts[i]
        cleaned = cleaned + (tl.where(tl.abs(part.to(tl.float32)) < float("inf"), part, 0.0).to(part.dtype),)
    return cleaned


def cut(width: int, widest: int) -> tuple[int, int]:
    """Channels of a chunk and of the padded rest: the chunk is the largest power of two in `width`, 16 to `widest`."""
    chunk = min(widest, max(16, 1 << (width.bit_length() - 1)))
    rest = width % chunk
    return chunk, max(16, triton.next_power_of_2(rest)) if rest else 0


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may use."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES)


def meet(**operands: Tensor | None) -> list[Tensor | None]:
    """The operands, by name, contiguous and in the dtype that all promote to; None stays None.

    Raises BackendUnavailable where that is fp64.
    """
    dtypes = {name: x.dtype for name, x in operands.items() if x is not None}
    common = functools.reduce(torch.promote_types, dtypes.values())
    if common == torch.float64:
        given = " and ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise BackendUnavailable(f"triton computes in fp32, but {given}; use the reference")
    return [None if x is None else x.to(common).contiguous() for x in operands.values()]


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
