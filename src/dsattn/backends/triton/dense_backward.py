"""The backward of dense attention in Triton: a kernel by lines for dq, a kernel by keys for dk and dv.

Each sum has one owner and one order, so gradients repeat bit for bit without atomics.
Letters: T query rows, S keys, H heads, G groups, C key width, V value width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends.triton.chunks import (
    LN_2,
    LOG2_E,
    add_products,
    contiguous,
    finite_parts,
    finite_rows,
    load,
    load_chunks,
    meet,
    products,
    scaled,
    shared_bytes,
    store_chunks,
    zeros,
)
from dsattn.backends.triton.launch import launch
from dsattn.backends.triton.lines import (
    Tiles,
    first_fitting,
    geometry,
    key_tiles,
    lines_of,
    load_keys,
    ranges_of,
    read_by,
)
from dsattn.keys import KeyRange

# Programs of the kernel by keys that keep a large GPU busy. Few groups are split over lines until there are so many.
BUSY = 264
MOST_SPLITS = 8
# Widest of keys and values -> tiles, best first; the first that fits in shared memory is taken.
BY_ROWS_TILES = {
    64: (Tiles(128, 128, 256, 8, 2), Tiles(64, 64, 256, 4, 2)),
    192: (Tiles(128, 64, 256, 8, 3), Tiles(128, 64, 256, 8, 2), Tiles(64, 64, 256, 4, 1), Tiles(64, 32, 256, 4, 1)),
    256: (Tiles(128, 32, 256, 8, 2), Tiles(64, 32, 256, 8, 1)),
    1024: (Tiles(64, 64, 256, 8, 1), Tiles(64, 32, 64, 8, 1), Tiles(16, 32, 64, 4, 1)),
}
BY_KEYS_TILES = {
    128: (Tiles(64, 128, 256, 8, 3), Tiles(64, 128, 256, 8, 2), Tiles(64, 64, 256, 8, 1), Tiles(32, 64, 256, 8, 1)),
    192: (Tiles(32, 128, 256, 8, 3), Tiles(64, 64, 256, 8, 1), Tiles(32, 64, 256, 8, 1)),
    256: (Tiles(32, 64, 256, 8, 2), Tiles(32, 64, 256, 8, 1)),
    1024: (Tiles(64, 64, 64, 8, 1), Tiles(32, 64, 64, 8, 1), Tiles(16, 32, 64, 4, 1)),
}


@triton.jit(do_not_specialize=["lines"], do_not_specialize_on_alignment=["sink", "lse"])
def _row_kernel(
    grad_out,
    q,
    sink,
    out,
    lse,
    stats,
    lines,
    H: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    LINES: tl.constexpr,
    C_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
):
    """stats: [T, H, 2], what the backward needs of each row and head: the softmax's denominator, and out . grad_out.

    The denominator is a log2, the sink's part included. It is NaN where q, grad_out or the dot is not finite, and
    so makes NaN of all that the row reads.
    """
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    live = line < lines
    q_part = load(q, line * C, live, 0, C_WIDTH, C)
    grad = load(grad_out, line * V, live, 0, V_WIDTH, V)
    result = load(out, line * V, live, 0, V_WIDTH, V).to(tl.float32)
    # 0 where out is 0 whatever arrives there: the rows without keys.
    dot = tl.sum(tl.where(result == 0, 0.0, result * grad.to(tl.float32)), 1)
    log = tl.load(lse + line, mask=live, other=0.0)
    if sink is not None:
        sink_logit = tl.load(sink + line % H, mask=live, other=0.0).to(tl.float32)
        high = tl.maximum(log, sink_logit)
        low = tl.minimum(log, sink_logit)
        # Two equal infinities differ by NaN.
        log = tl.where(high == low, high + LN_2, high + tl.log(1.0 + tl.exp(low - high)))
    log = tl.where(log == float("-inf"), 0.0, log * LOG2_E)
    sound = finite_rows((q_part,)) & finite_rows((grad,)) & (tl.abs(dot) < float("inf"))
    tl.store(stats + 2 * line, tl.where(sound, log, float("nan")), mask=live)
    tl.store(stats + 2 * line + 1, dot, mask=live)


@triton.jit
def _gather_keys(
    sums,
    q_parts,
    grad_parts,
    denominator,
    delta,
    k,
    v,
    first,
    last,
    tiles,
    hole,
    group,
    S,
    factor,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_REST: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq / scale over tiles (first, stop), leaving out a hole (first, count) among them."""
    for i in tl.range(tiles[0], tiles[1] - hole[1], num_stages=STAGES):
        tile = i + tl.where(i < hole[0], 0, hole[1])
        k_parts, v_parts = load_keys(k, v, tile, group, S, G, C, V, KEYS, CHUNK, REST, V_CHUNK, V_REST, MASKED)
        if MASKED:
            sound = finite_rows(k_parts)
            if v is not None:
                sound = sound & finite_rows(v_parts)
            k_parts = finite_parts(k_parts)
            if v is None:
                v_parts = k_parts
        p = tl.exp2(products(q_parts, k_parts, None) * factor - denominator[:, None])
        ds = p * (products(grad_parts, v_parts, None) - delta[:, None])
        if MASKED:
            key = tile * KEYS + tl.arange(0, KEYS)
            read = (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None])
            ds = tl.where(read, tl.where(sound[None, :], ds, float("nan")), 0.0)
        sums = add_products(sums, ds.to(k.dtype.element_ty), k_parts)
    return sums


@triton.jit(do_not_specialize=["T", "S"], do_not_specialize_on_alignment=["start", "stop"])
def _by_rows_kernel(
    grad_out,
    q,
    k,
    v,
    start,
    stop,
    stats,
    dq,
    scale,
    T,
    S,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    group = tl.program_id(1)
    row, head, live = lines_of(tl.num_programs(0) - 1 - tl.program_id(0), group, T, H // G, ROWS)
    first, last = ranges_of(start, stop, row, live, S)
    tiles_first, tiles_stop, whole_first, whole_count = key_tiles(first, last, S, KEYS)
    row_head = row.to(tl.int64) * H + head
    V_CUT: tl.constexpr = C if v is None else V
    q_parts = load_chunks(q, row_head * C, live, C, C, CHUNK, REST)
    grad_parts = load_chunks(grad_out, row_head * V, live, V, V_CUT, V_CHUNK, V_REST)
    denominator = tl.load(stats + 2 * row_head, mask=live, other=0.0)
    delta = tl.load(stats + 2 * row_head + 1, mask=live, other=0.0)
    factor = scale * LOG2_E
    sums = zeros(ROWS, C, C, CHUNK, REST)
    sums = _gather_keys(
        sums, q_parts, grad_parts, denominator, delta, k, v, first, last,
        (whole_first, whole_first + whole_count), (0, 0), group, S, factor,
        G, C, V, KEYS, CHUNK, REST, V_CHUNK, V_REST, False, STAGES,
    )  # fmt: skip
    sums = _gather_keys(
        sums, q_parts, grad_parts, denominator, delta, k, v, first, last,
        (tiles_first, tiles_stop), (whole_first, whole_count), group, S, factor,
        G, C, V, KEYS, CHUNK, REST, V_CHUNK, V_REST, True, 1,
    )  # fmt: skip
    store_chunks(dq, row_head * C, live, scaled(sums, scale), C, CHUNK)


@triton.jit(do_not_specialize=["T", "S"], do_not_specialize_on_alignment=["start", "stop"])
def _bounds_kernel(start, stop, bounds, T, S, J: tl.constexpr, ROWS: tl.constexpr):
    """bounds: [4, blocks], for each block of ROWS lines what `_read` says."""
    block = tl.program_id(0)
    row, _, live = lines_of(block, 0, T, J, ROWS)
    first, last = ranges_of(start, stop, row, live, S)
    read = read_by(first, last, S)
    for i in tl.static_range(4):
        tl.store(bounds + i * tl.num_programs(0) + block, read[i])


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["bounds"])
def _visits_kernel(bounds, visits, blocks, KEYS: tl.constexpr, BLOCKS: tl.constexpr):
    """visits: [4, tiles], for each tile of KEYS keys the first and one past the last block of lines that read of it,
    and the first and one past the last of a run of blocks whose every line reads it whole."""
    first_key = tl.program_id(0) * KEYS
    last_key = first_key + KEYS
    first = blocks
    last = tl.program_id(0) * 0
    whole_first = blocks
    whole_last = blocks
    for at in range(0, blocks, BLOCKS):
        block = at + tl.arange(0, BLOCKS)
        there = block < blocks
        any_first = tl.load(bounds + block, mask=there, other=0)
        any_last = tl.load(bounds + blocks + block, mask=there, other=0)
        all_first = tl.load(bounds + 2 * blocks + block, mask=there, other=0)
        all_last = tl.load(bounds + 3 * blocks + block, mask=there, other=0)
        some = there & (any_first < last_key) & (any_last > first_key)
        whole = there & (all_first <= first_key) & (all_last >= last_key)
        first = tl.minimum(first, tl.min(tl.where(some, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(some, block + 1, 0), 0))
        whole_first = tl.minimum(whole_first, tl.min(tl.where(whole, block, blocks), 0))
        ended = there & (block > whole_first) & (whole == 0)
        whole_last = tl.minimum(whole_last, tl.min(tl.where(ended, block, blocks), 0))
    tile = visits + tl.program_id(0)
    tl.store(tile, first)
    tl.store(tile + tl.num_programs(0), last)
    tl.store(tile + 2 * tl.num_programs(0), whole_first)
    tl.store(tile + 3 * tl.num_programs(0), whole_last)


@triton.jit
def _load_stats(base, offset):
    """Both numbers of each line, four times over: fewer than there are threads would be read in the products' layout,
    16 a thread."""
    copies = tl.load(base + offset[:, None] + (tl.arange(0, 8) // 4)[None, :])
    return tl.split(tl.max(tl.reshape(copies, [copies.shape[0], 2, 4]), 2))


@triton.jit
def _gather_block(
    dk_sums,
    dv_sums,
    k_parts,
    v_parts,
    q,
    grad_out,
    v,
    start,
    stop,
    stats,
    key,
    block,
    group,
    T,
    S,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_REST: tl.constexpr,
    MASKED: tl.constexpr,
):
    V_CUT: tl.constexpr = C if v is None else V
    row, head, live = lines_of(block, group, T, H // G, ROWS)
    # A block's lines lie near each other: only its first needs 64 bits.
    first_row = block * ROWS // (H // G)
    base = first_row.to(tl.int64) * H
    offset = (row - first_row) * H + head
    mask = None
    if MASKED:
        denominator = tl.load(stats + 2 * (base + offset), mask=live, other=0.0)
        delta = tl.load(stats + 2 * (base + offset) + 1, mask=live, other=0.0)
        mask = live & (denominator == denominator)
    else:
        denominator, delta = _load_stats(stats + 2 * base, 2 * offset)
    q_parts = load_chunks(q + base * C, offset * C, mask, C, C, CHUNK, REST)
    grad_parts = load_chunks(grad_out + base * V, offset * V, mask, V, V_CUT, V_CHUNK, V_REST)
    p = tl.exp2(products(k_parts, q_parts, None) * (scale * LOG2_E) - denominator[None, :])
    # As an initial sum, delta needs no registers of its own.
    ds = p * products(v_parts, grad_parts, tl.zeros([KEYS, ROWS], tl.float32) - delta[None, :])
    if v is None:
        ds *= scale
    if MASKED:
        first, last = ranges_of(start, stop, row, live, S)
        read = (key[:, None] >= first[None, :]) & (key[:, None] < last[None, :])
        p = tl.where(read, p, 0.0)
        ds = tl.where(read, ds, 0.0)
    p = p.to(q.dtype.element_ty)
    ds = ds.to(q.dtype.element_ty)
    if v is None:
        grown = ()
        for i in tl.static_range(len(dk_sums)):
            add = tl.dot(ds, q_parts[i], acc=dk_sums[i], input_precision="ieee")
            if i < len(grad_parts):
                add = tl.dot(p, grad_parts[i], acc=add, input_precision="ieee")
            grown = grown + (add,)
        dk_sums = grown
    else:
        dk_sums = add_products(dk_sums, ds, q_parts)
        dv_sums = add_products(dv_sums, p, grad_parts)
    return dk_sums, dv_sums


@triton.jit(
    do_not_specialize=["T", "S", "blocks"], do_not_specialize_on_alignment=["start", "stop", "bounds", "visits"]
)
def _by_keys_kernel(
    grad_out,
    q,
    k,
    v,
    start,
    stop,
    stats,
    bounds,
    visits,
    dk,
    dv,
    scale,
    T,
    S,
    blocks,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk: [splits, S, G, C], dv: [splits, S, G, V] or None where dk holds both. Split i takes every splits-th block."""
    tile = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    key = tile * KEYS + tl.arange(0, KEYS)
    live = key < S
    from_key = key.to(tl.int64) * G + group
    k_parts = load_chunks(k, from_key * C, live, C, C, CHUNK, REST)
    dk_sums = zeros(KEYS, C, C, CHUNK, REST)
    if v is None:
        v_parts = k_parts
        dv_sums = ()
    else:
        v_parts = load_chunks(v, from_key * V, live, V, V, V_CHUNK, V_REST)
        dv_sums = zeros(KEYS, V, V, V_CHUNK, V_REST)
    first = tl.load(visits + tile)
    last = tl.load(visits + tl.num_programs(0) + tile)
    whole_first = tl.load(visits + 2 * tl.num_programs(0) + tile)
    whole_last = tl.load(visits + 3 * tl.num_programs(0) + tile)
    for block in tl.range(whole_first + split, whole_last, splits, num_stages=STAGES):
        dk_sums, dv_sums = _gather_block(
            dk_sums, dv_sums, k_parts, v_parts, q, grad_out, v, start, stop, stats, key, block, group,
            T, S, scale, H, G, C, V, ROWS, KEYS, CHUNK, REST, V_CHUNK, V_REST, False,
        )  # fmt: skip
    hole = tl.maximum(whole_last - whole_first, 0)
    for i in tl.range(first + split, last - hole, splits, num_stages=1):
        block = i + tl.where(i < whole_first, 0, hole)
        # Where ranges do not grow with the rows, not all blocks between the first and the last read of these keys.
        if (tl.load(bounds + block) < (tile + 1) * KEYS) & (tl.load(bounds + blocks + block) > tile * KEYS):
            dk_sums, dv_sums = _gather_block(
                dk_sums, dv_sums, k_parts, v_parts, q, grad_out, v, start, stop, stats, key, block, group,
                T, S, scale, H, G, C, V, ROWS, KEYS, CHUNK, REST, V_CHUNK, V_REST, True,
            )  # fmt: skip
    to_key = (split.to(tl.int64) * S + key) * G + group
    if v is None:
        store_chunks(dk, to_key * C, live, dk_sums, C, CHUNK)
    else:
        store_chunks(dk, to_key * C, live, scaled(dk_sums, scale), C, CHUNK)
        store_chunks(dv, to_key * V, live, dv_sums, V, V_CHUNK)


def dense_gqa_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keys: KeyRange,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv), bitwise repeatable; dv is None where the values are the keys' leading channels.

    Probabilities come back from lse; sums in fp32.
    """
    rows, heads, width = q.shape
    num_keys, groups, value_dim = k.shape[0], k.shape[1], out.shape[-1]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dtypes = k.dtype, None if v is None else v.dtype
    q, k, v = meet(q=q, k=k, v=v)
    if 0 in (rows, heads, num_keys):
        return (
            dq.zero_(),
            torch.zeros_like(k, dtype=dtypes[0]),
            None if v is None else torch.zeros_like(v, dtype=dtypes[1]),
        )
    grad_out, out = grad_out.to(q.dtype).contiguous(), out.to(q.dtype).contiguous()
    start, stop = keys.start.contiguous(), keys.stop.contiguous()
    by_rows, by_keys = backward_tiles(width, value_dim, v is None, q.dtype, shared_bytes(q.device))
    stats = torch.empty(rows, heads, 2, dtype=torch.float32, device=q.device)
    lines = rows * (heads // groups)
    blocks, tiles = triton.cdiv(lines, by_keys.rows), triton.cdiv(num_keys, by_keys.keys)
    bounds = torch.empty(4, blocks, dtype=torch.int32, device=q.device)
    visits = torch.empty(4, tiles, dtype=torch.int32, device=q.device)
    with torch.cuda.device_of(q):
        widths = triton.next_power_of_2(width), triton.next_power_of_2(value_dim)
        lines_each = max(1, 4096 // max(widths))
        launch(
            _row_kernel,
            (triton.cdiv(rows * heads, lines_each),),
            *(grad_out, q, contiguous(sink), out, lse.contiguous(), stats, rows * heads),
            *(heads, width, value_dim, lines_each, *widths),
        )
        launch(
            _by_rows_kernel,
            (triton.cdiv(lines, by_rows.rows), groups, 1),
            *(grad_out, q, k, v, start, stop, stats, dq, scale, rows, num_keys),
            **geometry(heads, groups, width, value_dim, v is None, by_rows),
        )
        launch(
            _bounds_kernel, (blocks,), start, stop, bounds, rows, num_keys, heads // groups, by_keys.rows, num_warps=1
        )
        launch(_visits_kernel, (tiles,), bounds, visits, blocks, by_keys.keys, 1024)
        dk, dv = _sums(k, v, tiles * groups, dtypes)
        launch(
            _by_keys_kernel,
            (tiles, groups, dk.shape[0]),
            *(grad_out, q, k, v, start, stop, stats, bounds, visits, dk, dv),
            *(scale, rows, num_keys, blocks),
            **geometry(heads, groups, width, value_dim, v is None, by_keys),
        )
    return dq, _joined(dk, dtypes[0]), None if dv is None else _joined(dv, dtypes[1])


def dense_mla_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keys: KeyRange,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`dense_gqa_backward` with v None: dk holds the gradients of keys and values, and dv is None."""
    return dense_gqa_backward(grad_out, q, k, v, keys, sink, out, lse, scale)


def _sums(k: Tensor, v: Tensor | None, programs: int, dtypes: tuple) -> tuple[Tensor, Tensor | None]:
    """What the kernel by keys writes: [splits, S, G, C] and [splits, S, G, V].

    Where groups are few, a program a tile of keys would leave a GPU idle: splits of the lines are summed in fp32.
    """
    few = k.shape[1] <= 2
    splits = max(1, min(MOST_SPLITS, BUSY // programs)) if few else 1
    dk = k.new_empty(splits, *k.shape, dtype=torch.float32 if few else dtypes[0])
    dv = None if v is None else v.new_empty(splits, *v.shape, dtype=torch.float32 if few else dtypes[1])
    return dk, dv


def _joined(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return (parts[0] if parts.shape[0] == 1 else parts.sum(0)).to(dtype)


def backward_tiles(width: int, value_dim: int, shared_kv: bool, dtype: torch.dtype, shared: int) -> tuple[Tiles, Tiles]:
    """(by rows, by keys): one side stays in shared memory beside the tiles of the other in flight."""
    of_rows, of_keys = width + value_dim, width if shared_kv else width + value_dim

    def held_by_rows(tiles: Tiles) -> int:
        return tiles.rows * of_rows + tiles.num_stages * tiles.keys * of_keys

    def held_by_keys(tiles: Tiles) -> int:
        return tiles.keys * of_keys + tiles.num_stages * tiles.rows * of_rows

    rest = (max(width, value_dim), dtype, shared)
    return first_fitting(BY_ROWS_TILES, held_by_rows, *rest), first_fitting(BY_KEYS_TILES, held_by_keys, *rest)
