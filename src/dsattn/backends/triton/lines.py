"""Lines, ranges and tiles: what the kernels of dense attention share.

A line is a query row with one of the J = H / G heads that share a group of keys; line i of a group is row i // J, head
i % J. Tiles of ROWS lines meet tiles of KEYS keys. Tiles that no line reads are skipped; those that all lines read
whole need no mask and are pipelined; the rest, on the edge of a range, are masked and cleaned of what is not finite.
Letters: T query rows, S keys, H heads, G groups, J = H / G, C key width, V value width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsattn.backends.triton.chunks import cut, load_chunks


class Tiles(NamedTuple):
    """How one launch is cut. rows: lines a tile; keys: a tile; chunk: channels of one product at most."""

    rows: int
    keys: int
    chunk: int
    num_warps: int
    num_stages: int


@triton.jit
def lines_of(block, group, T, J: tl.constexpr, ROWS: tl.constexpr):
    """Row, head and existence of each line of a block."""
    line = block * ROWS + tl.arange(0, ROWS)
    return line // J, group * J + line % J, line // J < T


@triton.jit
def ranges_of(start, stop, row, live, S):
    """First key of each line and one past its last, cut to the keys there are."""
    first = tl.maximum(tl.load(start + row, mask=live, other=0), 0)
    last = tl.minimum(tl.load(stop + row, mask=live, other=0), S)
    return first, last


@triton.jit
def read_by(first, last, S):
    """First key and one past the last that any line reads, then that every line reads; first >= last where none is."""
    reads = first < last
    low = tl.where(reads, first, S)
    high = tl.where(reads, last, 0)
    return tl.min(low, 0), tl.max(high, 0), tl.max(low, 0), tl.min(high, 0)


@triton.jit
def key_tiles(first, last, S, KEYS: tl.constexpr):
    """(first, stop) of the tiles that a block of lines reads, (first, count) of those that every line reads whole."""
    any_first, any_last, all_first, all_last = read_by(first, last, S)
    whole = tl.cdiv(all_first, KEYS)
    return any_first // KEYS, tl.cdiv(any_last, KEYS), whole, tl.maximum(all_last // KEYS - whole, 0)


@triton.jit
def load_keys(
    k,
    v,
    tile,
    group,
    S,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_REST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Chunks of a tile's keys and of its values; v None: the values are the keys' leading channels."""
    within = tl.arange(0, KEYS)
    live = None
    if MASKED:
        live = tile * KEYS + within < S
    first = tile.to(tl.int64) * (KEYS * G) + group
    k_parts = load_chunks(k + first * C, within * (G * C), live, C, C, CHUNK, REST)
    v_parts = k_parts
    if v is not None:
        v_parts = load_chunks(v + first * V, within * (G * V), live, V, V, V_CHUNK, V_REST)
    return k_parts, v_parts


def first_fitting(
    table: dict[int, tuple[Tiles, ...]], held: Callable[[Tiles], int], widest: int, dtype: torch.dtype, shared: int
) -> Tiles:
    """The first of `table` (widest of keys and values -> tiles, best first) whose `held` elements fit in shared memory.

    Where none does, the last.
    """
    if dtype == torch.float32:  # without tensor cores: whole operands of a product are held in registers
        return Tiles(16, 16, 128, 8, 1) if widest > 512 else Tiles(16, 16, 64, 4, 1)
    choices = next(tiles for most, tiles in table.items() if widest <= most)
    return next((tiles for tiles in choices if held(tiles) * dtype.itemsize <= shared), choices[-1])


def geometry(heads: int, groups: int, width: int, value_dim: int, shared_kv: bool, tiles: Tiles) -> dict[str, int]:
    """Constants and options of a launch. shared_kv: the values are the keys' leading channels."""
    chunk, rest = cut(width, tiles.chunk)
    v_chunk, v_rest = (chunk, rest) if shared_kv else cut(value_dim, tiles.chunk)
    return {
        "H": heads,
        "G": groups,
        "C": width,
        "V": value_dim,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "CHUNK": chunk,
        "REST": rest,
        "V_CHUNK": v_chunk,
        "V_REST": v_rest,
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
