"""What kernels need beside operands and results while they run, in bytes.

On a GPU these are the budgets that the kernels keep to, `dsattn.settings(scratch_bytes=)` or their own where that is
smaller, or less where the case is smaller; on a CPU the references work in blocks of rows.
Letters: T rows, S keys, H heads, C key width, K kept keys, D indexer width.
"""

import dataclasses
import functools
from typing import Literal

from torch import Tensor

from dsattn.accounting.kept import FP32, Kept
from dsattn.accounting.place import Place
from dsattn.backends import ALONE, CUT_KEYS, HeadRanks, current, row_cuts, scratch_bytes
from dsattn.config import GQAConfig, MLAConfig
from dsattn.keys import Layout

CPU_BLOCK = 2**24  # `ops.blocks`
CPU_RUN = 1024  # `ops.blocks`: keys met at once
CPU_TILE_ROWS, CPU_SCORE = 128, 32  # `ops.indexer`, `ops.select`: rows scored at a time, bytes a score
CPU_SORTED = 20  # bytes of a slot while slots are sorted by key
HOPPER_WIDTHS, HOPPER_VALUE_WIDTH, HOPPER_HEADS = (512, 576), 512, 64  # its kernels of sparse MLA; heads of a block
HOPPER_TILE = 64  # slots
CONTRIBUTIONS_FROM = 40960  # keys; below, sparse MLA's backward on Hopper adds by atomics unless `deterministic`
TRITON_ATOMIC_KEYS = 8192  # up to so many keys that in Triton adds by atomics unless `deterministic`
TRITON_HEADS = {2: 128, 4: 16}  # most heads of its blocks, by bytes of an element; at least 16
GQA_CONTRIBUTIONS = 2**30
TARGET = 2**30  # the indexer's loss over selected keys
RANGES = 2**28  # over ranges: target and scores
RECORDS = 2**27  # of slots that are sorted by key, by groups of rows
RECORD, RECORD_ROWS = 32, 224  # bytes of a key in such a group, and its rows
LOGIT_ROWS = 4096  # of `Decoder.lm_loss`


def logits(vocab_size: int, rows: int) -> int:
    """A chunk's log-probabilities, their gradient, and that of the logits, in fp32."""
    return 3 * FP32 * vocab_size * min(rows, LOGIT_ROWS)


def selection(one: Kept, here: Place, device: Literal["cpu", "cuda"]) -> int:
    """Scores of a block of rows; then, where layers share what was selected, what its inverse is made from."""
    if one.layer.role != "selects" or not one.sparse:
        return 0
    rows = here.rows // here.indexer_shards
    if device == "cpu":
        rows, size = min(rows, CPU_TILE_ROWS), CPU_SCORE
    else:
        size = FP32
    scores = min(one.config.dsa.block_bytes, size * rows * here.keys // one.config.dsa.indexer.pool_size)
    if not one.inverse():
        return scores
    sorting = CPU_SORTED * here.rows * one.config.dsa.indexer.top_k
    return max(scores, sorting if device == "cpu" else _records(here, here.rows))


def probabilities(one: Kept, here: Place, device: Literal["cpu", "cuda"]) -> int:
    """What the Hopper forward leaves for the indexer's loss: P in bf16 and its tops, of a run of rows; the target.

    Nothing in a layer whose bits must repeat: see `ops.dsa.shares_work`.
    """
    if device == "cpu" or not (one.has_loss and _on_hopper(one)):
        return 0
    if one.config.dsa.deterministic is True:
        return 0
    blocks = -(-one.config.attention.heads // HOPPER_HEADS)
    tiles = -(-one.config.dsa.indexer.top_k // HOPPER_TILE)
    a_row = blocks * tiles * HOPPER_HEADS * (2 * HOPPER_TILE + FP32)
    runs = -(-here.rows // max(1, scratch_bytes() // a_row))
    return a_row * -(-here.rows // max(runs, 1)) + FP32 * here.rows * one.config.dsa.indexer.top_k


def _on_hopper(one: Kept) -> bool:
    """Whether sparse MLA's Hopper kernels take this layer."""
    attention = one.config.attention
    if not one.sparse or isinstance(attention, GQAConfig) or one.itemsize != 2:
        return False
    return attention.latent_width in HOPPER_WIDTHS and attention.kv_lora_rank == HOPPER_VALUE_WIDTH


def attention_backward(one: Kept, here: Place, device: Literal["cpu", "cuda"]) -> int:
    """Sums over keys, and what each slot adds to them."""
    if not one.backbone_learns:
        return 0
    attention, rows, size = one.config.attention, here.rows, one.itemsize
    _, keys, values, _ = one.core()
    width = (keys + values) // max(size * one.keys, 1)
    if device == "cpu":
        return _cpu_attention(one, here)
    sums = FP32 * here.keys * width
    if not one.sparse:
        return sums
    top_k, is_gqa = one.config.dsa.indexer.top_k, isinstance(attention, GQAConfig)
    if not is_gqa and not _on_hopper(one):
        return sums + _triton_run(one, here, width)
    if not is_gqa and here.keys < CONTRIBUTIONS_FROM and one.config.dsa.deterministic is not True:
        return sums
    return sums + min(scratch_bytes(GQA_CONTRIBUTIONS if is_gqa else None), _contribution(size) * rows * top_k * width)


def _contribution(itemsize: int) -> int:
    """Bytes of a number that a slot contributes to a key's gradient."""
    return FP32 if current().fp32_contributions else itemsize


def _triton_run(one: Kept, here: Place, width: int) -> int:
    """Of a run of rows the gradients of the logits, and what each slot adds to the sums where atomics do not."""
    heads, size = one.config.attention.heads, one.itemsize
    block = min(TRITON_HEADS[size], max(16, 1 << (heads - 1).bit_length()))
    atomic = here.keys <= TRITON_ATOMIC_KEYS and one.config.dsa.deterministic is not True
    line = block * size + (0 if atomic else width * _contribution(size))
    a_row = -(-heads // block) * one.config.dsa.indexer.top_k * line
    runs = -(-here.rows // max(1, scratch_bytes() // a_row))
    return a_row * -(-here.rows // max(runs, 1))


def dense_attention(one: Kept, here: Place, device: Literal["cpu", "cuda"]) -> int:
    """Of the forward over ranges: on a CPU keys and values of every head in fp32, and two tiles of logits."""
    return 2 * CPU_BLOCK // 3 + _cpu_ranges(one, here) if device == "cpu" and not one.sparse else 0


def _cpu_ranges(one: Kept, here: Place) -> int:
    """Copies of all keys and values, head by head, in fp32: `ops.ranged`."""
    _, keys, values, _ = dataclasses.replace(one, layer=one.layer._replace(own_keys=True)).core()
    attention = one.config.attention
    if isinstance(attention, MLAConfig):  # what stands beside values in kv_b_proj's output is not copied
        values = values * attention.v_head_dim // (attention.qk_nope_head_dim + attention.v_head_dim)
    return FP32 * here.rows * (keys + values) // one.itemsize


def _cpu_run(one: Kept, here: Place) -> int:
    """A run of every head's keys in fp32, as the target's product reads them."""
    _, keys, _, _ = dataclasses.replace(one, layer=one.layer._replace(own_keys=True)).core()
    return FP32 * min(here.keys, CPU_RUN) * keys // (one.itemsize * one.keys)


def _cpu_attention(one: Kept, here: Place) -> int:
    """Gathered keys thrice, logits thrice, of a block of rows; or copies of keys, tiles, and sums wider than keys."""
    attention, rows = one.config.attention, here.rows
    heads = attention.heads
    if not one.sparse:
        copies = _cpu_ranges(one, here)
        return 2 * CPU_BLOCK // 3 + copies + copies * (FP32 - one.itemsize) // FP32
    width = attention.head_dim * 2 if isinstance(attention, GQAConfig) else attention.latent_width
    slots = max(1, min(one.config.dsa.indexer.top_k, here.keys))
    block = min(rows, max(1, CPU_BLOCK // (2 * FP32 * slots * (width + 3 * heads))))
    return block * FP32 * slots * 3 * (width + heads)


def loss_target(one: Kept, here: Place, device: Literal["cpu", "cuda"]) -> int:
    """The target of a block of rows, in the forward of the indexer's loss; over ranges its scores, too.

    Where ranks sum it, every rank's part of it and the sum: `HeadRanks.tables`.
    """
    if not one.has_loss:
        return 0
    if device == "cpu":
        return 0 if one.sparse else CPU_BLOCK + _cpu_run(one, here)
    rows = here.rows // here.indexer_shards
    ranks = HeadRanks("tp", here.indexer_shards) if here.parallel.tp > 1 else ALONE
    if one.sparse:
        target = ranks.tables * FP32 * rows * one.config.dsa.indexer.top_k
        return min(scratch_bytes(TARGET), target) + _own_slots(one, here)
    cell = FP32 * (1 + ranks.tables)
    if ranks == ALONE:
        return min(scratch_bytes(RANGES), cell * rows * here.keys)
    most, line = scratch_bytes(RANGES) // cell, -(-here.keys // CUT_KEYS) * CUT_KEYS
    found = row_cuts(rows, _reach(here.keys, here.parallel.cp), line, ranks.shards, most)
    return cell * min(most, max((cut.cells for cut in found), default=0))


@functools.lru_cache(maxsize=16)
def _reach(keys: int, cp: int) -> Tensor:
    """What the rows of one of `cp` ranks read of one document."""
    reach = Layout.packed([keys - keys % (2 * cp)], total=keys, cp_size=cp).keys.reach
    assert reach is not None, "a layout knows"
    return reach


def _own_slots(one: Kept, here: Place) -> int:
    """My rows of a selection of all ranks' rows."""
    return FP32 * here.rows // here.indexer_shards * one.config.dsa.indexer.top_k if here.indexer_shards > 1 else 0


def indexer_loss(one: Kept, here: Place, device: Literal["cpu", "cuda"]) -> int:
    """The gradient of the keys in fp32; what each slot adds to it, or over ranges the forward's buffers again."""
    if not one.has_loss:
        return 0
    indexer, rows = one.config.dsa.indexer, here.rows // here.indexer_shards
    if device == "cpu":
        return loss_target(one, here, device)
    sums = FP32 * here.keys * indexer.head_dim
    if not one.sparse:
        return sums + loss_target(one, here, device)
    sums += _own_slots(one, here)
    if one.config.dsa.deterministic is not True:
        return sums
    part = _contribution(one.itemsize) * indexer.head_dim
    run = min(rows, max(1, scratch_bytes(TARGET) // (part * indexer.top_k)))
    sums += run * indexer.top_k * part
    if one.has_inverse and here.indexer_shards == 1:
        return sums
    return sums + FP32 * run * indexer.top_k + _records(here, run)  # the run's own inverse, and what it is made from


def _records(here: Place, rows: int) -> int:
    """What an inverse of `rows` rows of a selection is made from."""
    group = RECORD * here.keys
    return group * min(-(-rows // RECORD_ROWS), max(1, scratch_bytes(RECORDS) // group))
