"""Selection on any GPU that Triton serves: scores of a block of rows into a buffer, then the exact top-k of every row.

Scores come from `select_scores`; in mxfp8 their operands are bf16, which holds its values exactly.

Top-k. One program a row, no atomics. Scores become int32 of the same order. Rows of up to CAPACITY keys are held in
registers and their cut-off is found by cutting its interval in four, again and again. Longer rows are sampled first; a
pass over the row keeps, in key order, all that reach a pivot which about (K + CAPACITY) / 2 scores are expected to
reach, and counts. Between K and CAPACITY of them: they are what a short row would be. Otherwise the counts narrow the
interval and the pass is repeated: the pivot is luck, the result is not. Where a pivot's ties alone cross K, it is the
cut-off. A last pass, over the candidates or the row, writes what is above the cut-off and the first of what equals it.

Letters: T query rows, S keys, H heads, D width, K kept keys.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsattn.backends import Call, unmet
from dsattn.backends.triton.launch import launch
from dsattn.backends.triton.quantize import to_e4m3
from dsattn.backends.triton.select_scores import indexer_needs, score_rows
from dsattn.backends.triton.select_scores import processors as processors
from dsattn.errors import BackendUnavailable
from dsattn.quantize import from_mxfp8, to_mxfp8

MOST_TOP_K = 4096

_NOTHING = tl.constexpr(-(2**31))  # NaN, -inf
_LOWEST = tl.constexpr(-0x7F800000)  # the lowest finite score
_BEYOND = tl.constexpr(0x7F800001)  # one above +inf

_E4M3, _MXFP8 = torch.float8_e4m3fn, torch.bfloat16  # what holds low precision: exactly, so any wider would do
_SAMPLE = 4096
_WARPS = 8
_BLOCK = 4 * 32 * _WARPS  # four scores a thread
# Four programs a processor; AMD's compiler has no such option.
_REGISTERS = {} if torch.version.hip else {"maxnreg": 64}
_SCORE_BYTES = 4
_CANDIDATE_BYTES = 8  # a score and its key


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here, for `select_keys` and `select_topk`."""
    needs = indexer_needs(call, "bfloat16", "float16", "float32") | {
        f"top_k of at most {MOST_TOP_K}": call.top_k <= MOST_TOP_K,
        "compute capability 8.9 or above for fp8": call.precision != "fp8" or call.capability >= 89,
        "a GPU before Blackwell for mxfp8, made in bf16": call.precision != "mxfp8" or call.capability < 100,
    }
    return unmet(needs)


def select_topk(scores: Tensor, start: Tensor, stop: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(index [T, K], length [T]) of scores [T, S] in bf16, fp16 or fp32: the arguments of `topk_reference`."""
    rows = scores.shape[0]
    index = torch.empty(rows, top_k, dtype=torch.int32, device=scores.device)
    length = torch.empty(rows, dtype=torch.int32, device=scores.device)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    _rank(scores, scores.shape[1], start, stop, index, length, index.new_empty(rows, 0, dtype=torch.float32))
    return index, length


def select_keys(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    top_k: int,
    relu: bool,
    return_scores: bool,
    block_bytes: int,
    precision: str = "bf16",
) -> tuple[Tensor, Tensor, Tensor]:
    """(index [T, K], length [T], score [T, K] or [T, 0]): the arguments of `low_precision_reference`.

    A block of at least one row is scored at once, over all keys: 4 bytes a key are the least `block_bytes` can mean.
    Raises BackendUnavailable where an operand is fp64.
    """
    if torch.float64 in (q.dtype, k.dtype, w.dtype):
        raise BackendUnavailable("select_keys: fp64 operands need backend='reference'; cast q, k and w alike")
    if q.dtype != k.dtype:
        q, k = q.to(torch.promote_types(q.dtype, k.dtype)), k.to(torch.promote_types(q.dtype, k.dtype))
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    score = score_rows
    if precision == "fp8":
        (q, w), (k, key_scale) = to_e4m3(q, w, dtype=_E4M3), to_e4m3(k, dtype=_E4M3)
        score = functools.partial(score_rows, key_scale=key_scale)
    elif precision == "mxfp8":
        q, k = (from_mxfp8(*to_mxfp8(x)).to(_MXFP8) for x in (q, k))
    return select_blocks(score, q, k, w, start, stop, top_k, relu, return_scores, block_bytes)


def select_blocks(
    fill: Callable[..., None],
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    top_k: int,
    relu: bool,
    return_scores: bool,
    block_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`select_keys`, where `fill` makes a block of scores as `score_rows` does."""
    rows, keys, device = q.shape[0], k.shape[0], q.device
    index = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    length = torch.empty(rows, dtype=torch.int32, device=device)
    score = torch.empty(rows, top_k if return_scores else 0, dtype=torch.float32, device=device)
    step = _rows_of_block(rows, keys, top_k, block_bytes, device)
    buffer = torch.empty(step, _padded(keys), dtype=torch.float32, device=device)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        ranges = start[part], stop[part]
        scores = buffer[: part.stop - first]
        fill(q, k, w, start, stop, relu, scores, first)
        _rank(scores, keys, *ranges, index[part], length[part], score[part])
    return index, length, score


def _rows_of_block(rows: int, keys: int, top_k: int, block_bytes: int, device: torch.device) -> int:
    """Rows whose scores, with the candidates of those ranked at once, fit: as even as the number of blocks allows."""
    row_bytes = _SCORE_BYTES * _padded(keys)
    beside = _CANDIDATE_BYTES * _capacity(top_k) if _needs_candidates(keys, top_k) else 0
    most = max((block_bytes - _programs(device) * beside) // row_bytes, block_bytes // (row_bytes + beside), 1)
    return triton.cdiv(rows, triton.cdiv(rows, most)) if rows else 1


def _padded(keys: int) -> int:
    """Columns of the buffer: whole tiles of keys, so that neither kernel meets its edge."""
    return max(triton.cdiv(keys, 64), 1) * 64


def _capacity(top_k: int) -> int:
    return max(2 * triton.next_power_of_2(top_k), _SAMPLE)


def _needs_candidates(keys: int, top_k: int) -> bool:
    return keys > _capacity(top_k)


def _programs(device: torch.device) -> int:
    """Rows ranked at once: twice as many programs as the processors hold, so that none waits for the slowest."""
    return 8 * processors(device)


def _rank(
    scores: Tensor, keys: int, start: Tensor, stop: Tensor, index: Tensor, length: Tensor, picked: Tensor
) -> None:
    """Fill index, length and, where it has columns, picked, from the first `keys` columns of scores."""
    rows, top_k = index.shape
    if not rows:
        return
    device, capacity = scores.device, _capacity(top_k)
    programs = min(rows, _programs(device))
    spare = (programs, capacity if _needs_candidates(keys, top_k) else 0)
    launch(
        _rank_kernel,
        (programs,),
        scores,
        start,
        stop,
        index,
        length,
        picked,
        torch.empty(spare, dtype=torch.float32, device=device),
        torch.empty(spare, dtype=torch.int32, device=device),
        rows,
        keys,
        scores.stride(0),
        spare[1],
        start.stride(0),
        stop.stride(0),
        top_k,
        CAPACITY=capacity,
        SAMPLE=_SAMPLE,
        BLOCK=_BLOCK,
        SCORES=picked.shape[1] > 0,
        num_warps=_WARPS,
        **_REGISTERS,
    )


@triton.jit
def _load(row_ptr, slot, count):
    """fp32 scores; -inf from `count` on."""
    return tl.load(row_ptr + slot, mask=slot < count, other=float("-inf")).to(tl.float32)


@triton.jit
def _ordered(score):
    """int32 in the order of the scores, -0.0 as +0.0; _NOTHING for NaN and -inf."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score > float("-inf"), order, _NOTHING)


@triton.jit
def _value(order):
    """The score that `_ordered` maps to `order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """floor((low + high) / 2) without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _cutoff(order, low, least, most):
    """The cut-off of at least `low` that between `least` and `most` reach.

    The highest that `least` reach, where ties leave no such; `low`, where fewer than `least` reach it.
    """
    high = tl.maximum(tl.max(order), low) + 1
    reach = tl.sum((order >= low).to(tl.int32))
    while (reach > most) & (low + 1 < high):
        half = _middle(low, high)
        lower, upper = _middle(low, half), _middle(half, high)
        # one sum, in fields of 21 bits: sums over a program cost more than comparisons
        reached = (order >= lower).to(tl.int64) + ((order >= half).to(tl.int64) << 21)
        reached = tl.sum(reached + ((order >= upper).to(tl.int64) << 42))
        by_lower, by_half = (reached & 0x1FFFFF).to(tl.int32), ((reached >> 21) & 0x1FFFFF).to(tl.int32)
        by_upper = (reached >> 42).to(tl.int32)
        high = tl.where(by_upper >= least, high, tl.where(by_half >= least, upper, half))
        high = tl.where(by_lower >= least, high, lower)
        low = tl.where(by_lower >= least, lower, low)
        low = tl.where(by_half >= least, half, low)
        low = tl.where(by_upper >= least, upper, low)
        reach = tl.where(by_lower >= least, by_lower, reach)
        reach = tl.where(by_half >= least, by_half, reach)
        reach = tl.where(by_upper >= least, by_upper, reach)
    return low


@triton.jit
def _counted(order, cutoff):
    """(the cut-off as a score, how many exceed it, how many reach it)."""
    return _value(cutoff), tl.sum((order > cutoff).to(tl.int32)), tl.sum((order >= cutoff).to(tl.int32))


@triton.jit
def _sampled_cutoff(row_ptr, count, share, SAMPLE: tl.constexpr):
    """What about `share` of the row's `count` scores reach, by SAMPLE of them: sectors of memory, evenly spread."""
    SECTOR: tl.constexpr = 8
    at = tl.arange(0, SAMPLE)
    sectors = (count // SECTOR).to(tl.int64)
    slot = ((at // SECTOR) * sectors // (SAMPLE // SECTOR)).to(tl.int32) * SECTOR + at % SECTOR
    wanted = tl.maximum((share * SAMPLE // count).to(tl.int32), 1)
    lowest = tl.full((), _LOWEST, tl.int32)
    return _cutoff(_ordered(_load(row_ptr, slot, count)), lowest, wanted - wanted // 8, wanted + wanted // 8)


@triton.jit
def _slots(block, BLOCK: tl.constexpr):
    """[BLOCK / 4, 4] slots, column by column: so stored, threads follow slots, as they do in a store to any place."""
    return block + tl.arange(0, BLOCK // 4)[:, None] + tl.arange(0, 4)[None, :] * (BLOCK // 4)


@triton.jit
def _places(kept_BA):
    """How many of [B, 4] are kept before each, column after column, and how many in all; B is at most 2**13.

    Four counts share an int64, 16 bits each, so that one scan over B serves all four columns.
    """
    shift_1A = 16 * tl.arange(0, 4)[None, :].to(tl.int64)
    packed_B = tl.sum(kept_BA.to(tl.int64) << shift_1A, 1)
    running_B = tl.cumsum(packed_B, 0)
    sums = tl.max(running_B, 0) * 0x0001000100010001  # field by field: kept in this column and those before
    before_B = running_B - packed_B + (sums << 16)
    return ((before_B[:, None] >> shift_1A) & 0xFFFF).to(tl.int32), (sums >> 48).to(tl.int32)


@triton.jit
def _gather(row_ptr, count, pivot, score_ptr, slot_ptr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Write the first CAPACITY that reach the pivot, scores and slots; returns how many reach it."""
    least = _value(pivot)
    reach = tl.full((), 0, tl.int32)
    for block in range(0, count, BLOCK):
        slot = _slots(block, BLOCK)
        score = _load(row_ptr, slot, count)
        kept = score >= least
        place, total = _places(kept)
        fits = kept & (reach + place < CAPACITY)
        tl.store(score_ptr + reach + place, score, mask=fits)
        tl.store(slot_ptr + reach + place, slot, mask=fits)
        reach += total
    return reach


@triton.jit
def _count(row_ptr, count, pivot, BLOCK: tl.constexpr):
    """(how many exceed the pivot, how many are valid at all)."""
    least = _value(pivot)
    both_BA = tl.zeros((BLOCK // 4, 4), tl.int64)
    for block in range(0, count, BLOCK):
        score = _load(row_ptr, _slots(block, BLOCK), count)
        both_BA += (score > least).to(tl.int64) + ((score > float("-inf")).to(tl.int64) << 32)
    both = tl.sum(tl.sum(both_BA, 1), 0)
    return (both & 0xFFFFFFFF).to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def _narrow(
    row_ptr, count, top_k, score_ptr, slot_ptr, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr
):
    """(pivot, how many reach it), all that reach it being candidates, of which the first CAPACITY are written.

    More than CAPACITY reach it only where it is the cut-off; fewer than top_k only where no more are valid.
    """
    low = tl.full((), _LOWEST, tl.int32)
    high = tl.full((), _BEYOND, tl.int32)
    share = ((top_k + CAPACITY) // 2).to(tl.int64)
    pivot = _sampled_cutoff(row_ptr, count, share, SAMPLE)
    reach = tl.full((), 0, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching > 0:
        tl.debug_barrier()  # every thread has read the candidates of the pass, or row, before
        reach = _gather(row_ptr, count, pivot, score_ptr, slot_ptr, CAPACITY, BLOCK)
        searching = ((reach < top_k) | (reach > CAPACITY)).to(tl.int32)
        if searching > 0:
            exceed, valid = _count(row_ptr, count, pivot, BLOCK)
            enough = reach >= top_k
            settled = (enough & (exceed < top_k)) | (~enough & (reach == valid))
            searching = tl.where(settled, 0, 1)
            if searching > 0:
                low = tl.where(enough, pivot, low)
                high = tl.where(enough, high, pivot)
                share = tl.where(enough, share // 2, share * 2)
                next_pivot = _sampled_cutoff(row_ptr, count, share, SAMPLE)
                next_pivot = tl.where((next_pivot > low) & (next_pivot < high), next_pivot, _middle(low, high))
                pivot = tl.where(valid <= CAPACITY, _LOWEST, next_pivot)
    tl.debug_barrier()  # the candidates are written
    return pivot, reach


@triton.jit
def _write(
    score_ptr,
    slot_ptr,
    count,
    cutoff,
    top_k,
    begin,
    out,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Write, in order, all above the cut-off and the first that equal it, up to top_k; returns how many.

    score_ptr: `count` scores of the slots in slot_ptr, or, without SLOTS, of slots 0 .. count - 1; slot 0 is key
    `begin`. out: (index_ptr, picked_ptr). cutoff: (its value, how many exceed it, how many reach it).
    """
    index_ptr, picked_ptr = out
    value, exceed, reach = cutoff
    written = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    for block in range(0, count, BLOCK):
        slot = _slots(block, BLOCK)
        score = _load(score_ptr, slot, count)
        if SLOTS:
            slot = tl.load(slot_ptr + slot, mask=slot < count, other=0)
        taken = score >= value
        if reach > top_k:  # too many ties
            place, total = _places(score == value)
            taken = (score > value) | ((score == value) & (equal + place < top_k - exceed))
            equal += total
        place, total = _places(taken)
        tl.store(index_ptr + written + place, begin + slot, mask=taken)
        if SCORES:
            tl.store(picked_ptr + written + place, score, mask=taken)
        written += total
    return written


@triton.jit(
    do_not_specialize=["rows", "keys", "scores_row", "spare_row", "start_row", "stop_row", "top_k"],
    do_not_specialize_on_alignment=["scores_ptr", "start_ptr", "stop_ptr", "index_ptr", "length_ptr", "picked_ptr"],
)
def _rank_kernel(
    scores_ptr,
    start_ptr,
    stop_ptr,
    index_ptr,
    length_ptr,
    picked_ptr,
    spare_score_ptr,
    spare_slot_ptr,
    rows,
    keys,
    scores_row,
    spare_row,
    start_row,
    stop_row,
    top_k,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Top-k of every num_programs-th row; spare_*: a row of CAPACITY candidates for every program."""
    program = tl.program_id(0).to(tl.int64)
    spare_score_ptr += program * spare_row
    spare_slot_ptr += program * spare_row
    row = program
    while row < rows:
        begin = tl.minimum(tl.maximum(tl.load(start_ptr + row * start_row), 0), keys)
        count = tl.maximum(tl.minimum(tl.load(stop_ptr + row * stop_row), keys) - begin, 0)
        row_ptr = scores_ptr + row * scores_row + begin
        out = (index_ptr + row * top_k, picked_ptr + row * top_k)
        if count <= CAPACITY:
            order = _ordered(_load(row_ptr, tl.arange(0, CAPACITY), count))
            cutoff = _counted(order, _cutoff(order, tl.full((), _LOWEST, tl.int32), top_k, top_k))
            length = _write(row_ptr, spare_slot_ptr, count, cutoff, top_k, begin, out, False, BLOCK, SCORES)
        else:
            pivot, held = _narrow(row_ptr, count, top_k, spare_score_ptr, spare_slot_ptr, CAPACITY, SAMPLE, BLOCK)
            if held <= CAPACITY:
                order = _ordered(_load(spare_score_ptr, tl.arange(0, CAPACITY), held))
                cutoff = _counted(order, _cutoff(order, pivot, top_k, top_k))
                length = _write(spare_score_ptr, spare_slot_ptr, held, cutoff, top_k, begin, out, True, BLOCK, SCORES)
            else:
                exceed, _ = _count(row_ptr, count, pivot, BLOCK)
                cutoff = (_value(pivot), exceed, held)
                length = _write(row_ptr, spare_slot_ptr, count, cutoff, top_k, begin, out, False, BLOCK, SCORES)
        tl.store(length_ptr + row, length)
        for block in range(length // BLOCK * BLOCK, top_k, BLOCK):
            place = block + tl.arange(0, BLOCK)
            empty = (place >= length) & (place < top_k)
            tl.store(out[0] + place, -1, mask=empty)
            if SCORES:
                tl.store(out[1] + place, float("-inf"), mask=empty)
        row += tl.num_programs(0)
