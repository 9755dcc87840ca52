"""Dense attention to ranges of keys in Triton: flash attention over KeyRange, for GQA and for absorbed MLA.

How rows and keys are cut is in `lines`, widths in `chunks`; token counts are grids and loop bounds alone.
Letters: T query rows, S keys, H heads, G groups, C key width, V value width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import Call, unmet
from dsattn.backends.triton.chunks import (
    LN_2,
    LOG2_E,
    add_products,
    contiguous,
    finite_parts,
    finite_rows,
    load_chunks,
    meet,
    products,
    scaled,
    shared_bytes,
    store_chunks,
    zeros,
)
from dsattn.backends.triton.dense_backward import dense_gqa_backward, dense_mla_backward
from dsattn.backends.triton.launch import launch, needs_of
from dsattn.backends.triton.lines import Tiles, first_fitting, geometry, key_tiles, lines_of, load_keys, ranges_of
from dsattn.keys import KeyRange

__all__ = ["dense_gqa_backward", "dense_gqa_forward", "dense_mla_backward", "dense_mla_forward", "requirements"]

# Widest of keys and values -> tiles, best first; the first that fits in shared memory is taken.
FORWARD_TILES = {
    192: (Tiles(128, 64, 256, 8, 3), Tiles(128, 64, 256, 8, 2), Tiles(64, 64, 256, 4, 2), Tiles(64, 32, 256, 4, 2)),
    256: (Tiles(128, 64, 256, 8, 2), Tiles(64, 64, 256, 8, 1), Tiles(64, 32, 256, 8, 1)),
    1024: (Tiles(64, 64, 256, 8, 2), Tiles(64, 32, 256, 8, 1), Tiles(16, 32, 256, 4, 1)),
}


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here, forward or backward."""
    return unmet(needs_of(call) | {"key and value widths of at most 1024": max(call.width, call.value_width) <= 1024})


@triton.jit
def _attend(
    state,
    q_parts,
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
    """The online softmax over tiles (first, stop), leaving out a hole (first, count) among them."""
    top, total, sums = state
    for i in tl.range(tiles[0], tiles[1] - hole[1], num_stages=STAGES):
        tile = i + tl.where(i < hole[0], 0, hole[1])
        k_parts, v_parts = load_keys(k, v, tile, group, S, G, C, V, KEYS, CHUNK, REST, V_CHUNK, V_REST, MASKED)
        if MASKED:
            sound = finite_rows(k_parts)
            if v is not None:
                sound = sound & finite_rows(v_parts)
                v_parts = finite_parts(v_parts)
            k_parts = finite_parts(k_parts)
            if v is None:
                v_parts = k_parts
            key = tile * KEYS + tl.arange(0, KEYS)
            logits = tl.where(sound[None, :], products(q_parts, k_parts, None) * factor, float("nan"))
            read = (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None])
            logits = tl.where(read, logits, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, 1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(logits - shift[:, None])
        else:
            logits = products(q_parts, k_parts, None)
            new_top = tl.maximum(top, tl.max(logits, 1) * factor)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(logits * factor - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        sums = add_products(scaled(sums, shrink[:, None]), p.to(k.dtype.element_ty), v_parts)
    return top, total, sums


# A slice of these may start anywhere; nothing is gained by compiling twice for it.
@triton.jit(do_not_specialize=["T", "S"], do_not_specialize_on_alignment=["start", "stop", "sink", "lse"])
def _forward_kernel(
    q,
    k,
    v,
    start,
    stop,
    sink,
    out,
    lse,
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
    """scale: not negative."""
    group = tl.program_id(1)
    # Later rows read more in causal attention: they start first, so that the last programs to run are short.
    row, head, live = lines_of(tl.num_programs(0) - 1 - tl.program_id(0), group, T, H // G, ROWS)
    first, last = ranges_of(start, stop, row, live, S)
    tiles_first, tiles_stop, whole_first, whole_count = key_tiles(first, last, S, KEYS)
    row_head = row.to(tl.int64) * H + head
    q_parts = load_chunks(q, row_head * C, live, C, C, CHUNK, REST)
    factor = scale * LOG2_E
    V_CUT: tl.constexpr = C if v is None else V
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        zeros(ROWS, V, V_CUT, V_CHUNK, V_REST),
    )
    state = _attend(
        state, q_parts, k, v, first, last, (whole_first, whole_first + whole_count), (0, 0), group, S, factor,
        G, C, V, KEYS, CHUNK, REST, V_CHUNK, V_REST, False, STAGES,
    )  # fmt: skip
    state = _attend(
        state, q_parts, k, v, first, last, (tiles_first, tiles_stop), (whole_first, whole_count), group, S, factor,
        G, C, V, KEYS, CHUNK, REST, V_CHUNK, V_REST, True, 1,
    )  # fmt: skip
    top, total, sums = state
    # `total` is NaN where a logit is: such rows stay NaN.
    row_lse = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN_2)
    share = tl.where(total == 0, 0.0, 1.0 / total)
    if sink is not None:
        sink_logit = tl.load(sink + head, mask=live, other=0.0).to(tl.float32)
        share = tl.where(total == 0, 0.0, share / (1.0 + tl.exp(sink_logit - row_lse)))
    store_chunks(out, row_head * V, live, scaled(sums, share[:, None]), V, V_CHUNK)
    tl.store(lse + row_head, row_lse, mask=live)


def dense_gqa_forward(
    q: Tensor, k: Tensor, v: Tensor | None, keys: KeyRange, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] fp32) as `dsattn.ops.dense` promises them. v None: see `dense_mla`.

    Online softmax over tiles of keys, fp32 sums. Mixed dtypes meet in their promotion. A key that holds an infinity may
    count for nothing, instead of making NaN, in a head whose logit it makes -inf.
    """
    rows, heads, width = q.shape
    out = q.new_empty(rows, heads, value_dim)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    q, k, v = meet(q=q, k=k, v=v)
    if scale < 0:
        q, scale = -q, -scale
    groups = k.shape[1]
    tiles = forward_tiles(width, value_dim, v is None, q.dtype, shared_bytes(q.device))
    if heads == 0:
        return out, lse
    with torch.cuda.device_of(q):
        launch(
            _forward_kernel,
            (triton.cdiv(rows * (heads // groups), tiles.rows), groups, 1),
            *(q, k, v, keys.start.contiguous(), keys.stop.contiguous(), contiguous(sink), out, lse, scale),
            *(rows, k.shape[0]),
            **geometry(heads, groups, width, value_dim, v is None, tiles),
        )
    return out, lse


def dense_mla_forward(
    q: Tensor, k: Tensor, v: Tensor | None, keys: KeyRange, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """`dense_gqa_forward` with v None: the values are the leading `value_dim` channels of k [S, 1, C]."""
    return dense_gqa_forward(q, k, v, keys, sink, scale, value_dim)


def forward_tiles(width: int, value_dim: int, shared_kv: bool, dtype: torch.dtype, shared: int) -> Tiles:
    """q stays in shared memory beside the tiles of keys and values in flight."""
    both = width if shared_kv else width + value_dim

    def held(tiles: Tiles) -> int:
        return tiles.rows * width + tiles.num_stages * tiles.keys * both

    return first_fitting(FORWARD_TILES, held, max(width, value_dim), dtype, shared)
