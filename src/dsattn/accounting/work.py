"""How much work one operation does: FLOPs exact in the pairs that are read, and the bytes that must move.

A multiply-add is two FLOPs. Only matrix products count, not norms, RoPE, softmax, gates, pooling, the embedding,
ranking, the optimiser, or what is computed again to save memory (but the field's rules count logits again in the
backwards). Bytes are the least that must move: each operand once, gathered keys once a pair, two bytes a number unless
said otherwise.
Letters: H heads, C key width, V value width, H_I / D indexer heads / width, G kv groups, P keys of a pool; pairs
(query row, key).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dsattn.errors import InputError

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Work:
    """flops: floating-point operations. bytes: moved to and from memory at least."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "Work":
        return Work(self.flops * times, self.bytes * times)


class Part(NamedTuple):
    """What one kind of operation of a layer or model does in a training step."""

    name: str
    forward: Work
    backward: Work = Work()

    @property
    def total(self) -> Work:
        """Forward and backward."""
        return self.forward + self.backward


def visible_pairs(lengths: Iterable[int]) -> int:
    """(row, key) pairs of causal attention inside documents: sum of L (L + 1) / 2."""
    return sum(_triangle(length) for length in _checked(lengths))


def visible_pools(lengths: Iterable[int], pool_size: int) -> int:
    """(row, pool) pairs of complete pools: a row that sees n keys may select n // P."""
    _at_least_1("pool_size", pool_size)
    return sum(_pools(length, pool_size, length) for length in _checked(lengths))


def kept_pairs(lengths: Iterable[int], top_k: int, pool_size: int = 1, *, tail: bool = True) -> int:
    """Pairs that are left where each row keeps min(top_k, visible) keys.

    pool_size: P, divides top_k. Above 1 a row that sees n keys keeps P min(top_k / P, n // P) of them, whole pools, and
    with `tail` the n mod P behind its last complete pool.
    """
    _at_least_1("top_k", top_k)
    _at_least_1("pool_size", pool_size)
    if top_k % pool_size:
        raise InputError(f"top_k={top_k} must be a multiple of pool_size={pool_size}: pools are kept whole")
    total = 0
    for length in _checked(lengths):
        pools, rest = divmod(length, pool_size)
        total += pool_size * _pools(length, pool_size, top_k // pool_size)
        if tail:
            total += pools * _triangle(pool_size - 1) + _triangle(rest)
    return total


def _pools(length: int, size: int, most: int) -> int:
    """Sum over n = 1 .. length of min(n // size, most): `size` rows for each number of pools, fewer for the last."""
    pools, rest = divmod(length, size)
    rising = min(max(pools - 1, 0), most)
    return size * (_triangle(rising) + (max(pools - 1, 0) - rising) * most) + (rest + 1) * min(pools, most)


def _triangle(number: int) -> int:
    return number * (number + 1) // 2


def _at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{name}={value} must be at least 1")


def _checked(lengths: Iterable[int]) -> Iterator[int]:
    for index, length in enumerate(lengths):
        if length < 0:
            raise InputError(f"lengths[{index}]={length} must be at least 0")
        yield length


def linear_work(rows: int, inputs: int, outputs: int, direction: Direction = "forward", itemsize: int = 2) -> Work:
    """`rows` vectors through one weight; backward is the gradients of both input and weight."""
    times = 1 if direction == "forward" else 2
    operands = rows * (inputs + outputs) + inputs * outputs
    return Work(times * 2 * rows * inputs * outputs, times * itemsize * operands)


def indexer_scores_work(rows: int, pairs: int, heads: int, width: int, num_keys: int, itemsize: int = 2) -> Work:
    """q . k for each indexer head over the visible pairs: 2 pairs H_I D. Scores leave in fp32.

    Left out: ReLU and the weighted sum over heads, 1/D of it.
    """
    moved = itemsize * (rows * heads * (width + 1) + num_keys * width) + 4 * pairs
    return Work(2 * pairs * heads * width, moved)


def select_topk_work(rows: int, pairs: int, top_k: int) -> Work:
    """Ranking: every fp32 score read once, K int32 indices and a length a row written; comparisons are no FLOPs."""
    return Work(0, 4 * pairs + 4 * rows * (top_k + 1))


def select_keys_work(rows: int, pairs: int, heads: int, width: int, top_k: int, num_keys: int) -> Work:
    """Scores and ranking in one: the scores never leave their block."""
    scores = indexer_scores_work(rows, pairs, heads, width, num_keys)
    return Work(scores.flops, scores.bytes - 4 * pairs + 4 * rows * (top_k + 1))


def pool_keys_work(rows: int, width: int, pool_size: int, pools: int, top_k: int, itemsize: int = 2) -> Work:
    """KPool around a selection: keys and gates read, pools written; selected pools read, their keys written.

    pools, top_k: slots a row has for pools and, its tail included, for keys. No matrix product is in it.
    """
    pooled = itemsize * (2 * rows + rows // pool_size) * width
    return Work(0, pooled + 4 * rows * (pools + 1) + 4 * rows * (top_k + 1))


def attention_work(
    rows: int, pairs: int, heads: int, width: int, value_width: int, direction: Direction = "forward", *, kv_bytes: int
) -> Work:
    """Dense or sparse attention over `pairs`: forward 2 pairs H (C + V), backward 2 pairs H (3 C + 2 V).

    The backward is logits again, dq, dk on width C, and dp, dv on width V. kv_bytes: what reading keys and values once
    moves, see `dense_kv_bytes` and `sparse_kv_bytes`; the backward also writes as much. Operands have two bytes.
    """
    own = 2 * rows * heads * (width + value_width) + 4 * rows * heads
    if direction == "forward":
        return Work(2 * pairs * heads * (width + value_width), own + kv_bytes)
    return Work(2 * pairs * heads * (3 * width + 2 * value_width), 2 * own + 2 * kv_bytes)


def delta_rule_work(
    rows: int, heads: int, width: int, value_width: int, direction: Direction = "forward", itemsize: int = 2
) -> Work:
    """Linear attention by the delta rule, row by row: what the state holds of the key, the write, the read, 6 H d V.

    Backward: each of the three products has two gradients. Chunked kernels do more inside a chunk, which is not work of
    the function. Bytes: q, k, v, out and beta, and log decays in fp32; states never leave the chip.
    """
    times = 1 if direction == "forward" else 2
    moved = rows * heads * (itemsize * (2 * width + 2 * value_width + 1) + 4 * width)
    return Work(times * 6 * rows * heads * width * value_width, times * moved)


def dense_kv_bytes(num_keys: int, kv_width: int, itemsize: int = 2) -> int:
    """Every key once. kv_width: G (d + d) for GQA, H (d + v) for expanded MLA, C for absorbed MLA."""
    return itemsize * num_keys * kv_width


def sparse_kv_bytes(pairs: int, kv_width: int, itemsize: int = 2) -> int:
    """Every kept pair gathers its key, and reads the int32 index that names it; cache hits are left out."""
    return pairs * (itemsize * kv_width + 4)


def indexer_kl_work(
    rows: int,
    pairs: int,
    index: tuple[int, int],
    attention: tuple[int, int],
    direction: Direction = "forward",
    *,
    target: bool = True,
) -> Work:
    """The indexer's loss over `pairs`. index: (H_I, D). attention: (H, C).

    Forward: scores, 2 pairs H_I D, and the target's logits, 2 pairs H C; target=False leaves these out: attention made
    them in the same pass. Backward: products again, dq and dk, 6 pairs H_I D.
    Bytes are the queries, read, and in the backward the indexer's written too; keys are counted with attention.
    """
    queries, scores = 2 * rows * index[0] * (index[1] + 1), 2 * pairs * index[0] * index[1]
    if direction == "backward":
        return Work(3 * scores, 2 * queries)
    if not target:
        return Work(scores, queries)
    return Work(scores + 2 * pairs * attention[0] * attention[1], queries + 2 * rows * attention[0] * attention[1])
