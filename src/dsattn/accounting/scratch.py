"""What kernels need beside operands and results while they run, in bytes.

On a GPU these are the budgets that the kernels keep to, or less where the case is smaller; on a CPU the references work
in blocks of rows.
Letters: T rows, S keys, H heads, C key width, K kept keys, D indexer width.
"""

from typing import Literal

from dsattn.accounting.kept import FP32, Kept
from dsattn.accounting.place import Place
from dsattn.config import GQAConfig

CPU_BLOCK = 2**24  # `ops.blocks`
CPU_TILE_ROWS, CPU_SCORE = 128, 32  # `ops.indexer`, `ops.select`: rows scored at a time, bytes a score
CONTRIBUTIONS = 2**31  # sparse MLA's backward on Hopper
CONTRIBUTIONS_FROM = 40960  # so many keys; below, its sums are added by atomics unless `deterministic`
GQA_CONTRIBUTIONS = 2**30
TARGET = 2**30  # the indexer's loss
LOGIT_ROWS = 4096  # of `Decoder.lm_loss`


def logits(vocab_size: int, rows: int) -> int:
    """A chunk's log-probabilities, their gradient, and that of the logits, in fp32."""
    return 3 * FP32 * vocab_size * min(rows, LOGIT_ROWS)


def selection(one: Kept, here: Place, device: Literal["cpu", "cuda"]) -> int:
    """Scores of a block of rows."""
    if one.layer.role != "selects" or not one.sparse:
        return 0
    rows = here.rows // here.indexer_shards
    if device == "cpu":
        rows, size = min(rows, CPU_TILE_ROWS), CPU_SCORE
    else:
        size = FP32
    return min(one.config.dsa.block_bytes, size * rows * here.keys // one.config.dsa.indexer.pool_size)


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
    if not is_gqa and here.keys < CONTRIBUTIONS_FROM and one.config.dsa.deterministic is not True:
        return sums
    return sums + min(GQA_CONTRIBUTIONS if is_gqa else CONTRIBUTIONS, size * rows * top_k * width)


def _cpu_attention(one: Kept, here: Place) -> int:
    """Gathered keys thrice, logits thrice, of a block of rows; or tiles of logits."""
    attention, rows = one.config.attention, here.rows
    heads = attention.heads
    if not one.sparse:
        return CPU_BLOCK
    width = attention.head_dim * 2 if isinstance(attention, GQAConfig) else attention.latent_width
    a_row = FP32 * one.config.dsa.indexer.top_k * (width + 3 * heads)
    block = min(rows, max(1, CPU_BLOCK // (2 * a_row)))
    return block * FP32 * one.config.dsa.indexer.top_k * 3 * (width + heads)


def indexer_loss(one: Kept, here: Place, device: Literal["cpu", "cuda"]) -> int:
    """The target of a block of rows, and the gradient of the keys in fp32."""
    if not one.has_loss:
        return 0
    indexer, rows = one.config.dsa.indexer, here.rows // here.indexer_shards
    if device == "cpu":
        return 0 if one.sparse else 9 * CPU_BLOCK // 8
    sums = FP32 * here.keys * indexer.head_dim
    columns = indexer.top_k if one.sparse else 2 * here.keys
    return sums + min(TARGET, FP32 * rows * columns)
