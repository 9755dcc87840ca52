"""Counts of one operation against brute force loops and the published formulas."""

import pytest

from dsattn import accounting
from dsattn.accounting import Work
from dsattn.errors import InputError

LENGTHS = (7, 0, 1, 12)
TOP_K = 5


def rows(lengths=LENGTHS) -> list[int]:
    """Visible keys of every row."""
    return [row + 1 for length in lengths for row in range(length)]


@pytest.mark.parametrize("lengths", [LENGTHS, (), (0,), (5,), (6,), (4, 5, 6)])
@pytest.mark.parametrize("top_k", [1, TOP_K, 100])
def test_pairs_are_those_of_a_loop(lengths, top_k):
    assert accounting.visible_pairs(lengths) == sum(rows(lengths))
    assert accounting.kept_pairs(lengths, top_k) == sum(min(top_k, visible) for visible in rows(lengths))


def test_published_means_of_a_short_document():
    """8 tokens at K = 2: a row attends to 15/8 keys on average, without a selection to 9/2."""
    assert accounting.kept_pairs((8,), 2) / 8 == 15 / 8
    assert accounting.visible_pairs((8,)) / 8 == 9 / 2


@pytest.mark.parametrize("lengths", [LENGTHS, (), (0,), (1,), (3,), (4,), (23, 24, 25), (7, 8, 9, 100)])
@pytest.mark.parametrize(("top_k", "pool_size"), [(4, 4), (8, 4), (12, 4), (6, 3), (5, 1), (400, 8), (7, 7)])
@pytest.mark.parametrize("tail", [True, False])
def test_pools_are_those_of_a_loop(lengths, top_k, pool_size, tail):
    kept = scored = 0
    for visible in rows(lengths):
        pools = [range(first, first + pool_size) for first in range(0, visible, pool_size)]
        complete = [pool for pool in pools if pool[-1] < visible]
        scored += len(complete)
        kept += sum(len(pool) for pool in complete[: top_k // pool_size])
        kept += visible - len(complete) * pool_size if tail else 0
    assert accounting.visible_pools(lengths, pool_size) == scored
    assert accounting.kept_pairs(lengths, top_k, pool_size, tail=tail) == kept


def test_a_long_document_is_counted_at_once():
    """Beyond its first K + P rows each row keeps K keys and its tail: a loop would take minutes."""
    length, top_k, size = 10**9, 2048, 16
    start = accounting.kept_pairs((2 * top_k,), top_k, size)
    rest = (length - 2 * top_k) * top_k + (length - 2 * top_k) // size * sum(range(size))
    assert accounting.kept_pairs((length,), top_k, size) == start + rest
    assert accounting.visible_pools((length,), 1) == accounting.visible_pairs((length,))


def test_wrong_sizes_are_refused():
    with pytest.raises(InputError, match=r"lengths\[1\]=-1 must be at least 0"):
        accounting.visible_pairs((3, -1))
    with pytest.raises(InputError, match="top_k=0 must be at least 1"):
        accounting.kept_pairs((3,), 0)
    with pytest.raises(InputError, match="pool_size=0 must be at least 1"):
        accounting.visible_pools((3,), 0)
    with pytest.raises(InputError, match="top_k=5 must be a multiple of pool_size=2"):
        accounting.kept_pairs((3,), 5, 2)


def test_work_adds():
    assert Work(1, 2) + Work(10, 20) == Work(11, 22)
    assert Work(1, 2) * 3 == Work(3, 6)


def test_published_rules_of_one_op():
    """The rules by which kernels are compared: T K pairs, H heads, 576 and 512 wide."""
    tokens, heads, kept = 4096, 64, 2048
    pairs = tokens * kept
    sizes = (tokens, pairs, heads, 576, 512)
    forward = accounting.attention_work(*sizes, kv_bytes=0)
    backward = accounting.attention_work(*sizes, "backward", kv_bytes=0)
    assert forward.flops == 2 * tokens * heads * kept * (576 + 512)
    assert backward.flops == 2 * tokens * heads * kept * (3 * 576 + 2 * 512)
    assert accounting.indexer_scores_work(tokens, pairs, heads, 128, tokens).flops == 2 * heads * 128 * pairs
    assert accounting.indexer_kl_work(tokens, pairs, (heads, 128), (heads, 576), "backward").flops == (
        6 * tokens * kept * heads * 128
    )


def test_bytes_by_hand():
    assert accounting.linear_work(3, 4, 5).bytes == 2 * (12 + 15 + 20)
    assert accounting.linear_work(3, 4, 5, itemsize=4).bytes == 4 * (12 + 15 + 20)
    assert accounting.select_topk_work(3, 100, 8) == Work(0, 400 + 3 * 9 * 4)
    operands = 2 * (3 * 2 * 4 + 3 * 2 + 5 * 4)
    assert accounting.indexer_scores_work(3, 100, 2, 4, 5).bytes == operands + 400
    assert accounting.select_keys_work(3, 100, 2, 4, 8, 5) == Work(2 * 100 * 2 * 4, operands + 3 * 9 * 4)
    assert accounting.pool_keys_work(9, 4, 2, 3, 7) == Work(0, 2 * (2 * 9 + 4) * 4 + 9 * 4 * 4 + 9 * 8 * 4)
    assert accounting.dense_kv_bytes(10, 6) == 120
    assert accounting.sparse_kv_bytes(10, 6) == 10 * (12 + 4)
    q, out, lse = 2 * 3 * 2 * 12, 2 * 3 * 2 * 8, 4 * 3 * 2
    assert accounting.attention_work(3, 10, 2, 12, 8, kv_bytes=7).bytes == q + out + lse + 7


def test_the_delta_rule_is_three_products_a_row_and_head():
    forward = accounting.delta_rule_work(10, 3, 4, 5)
    assert forward.flops == 10 * 3 * (3 * 2 * 4 * 5)
    assert forward.bytes == 10 * 3 * (2 * (4 + 4 + 5 + 5 + 1) + 4 * 4)
    backward = accounting.delta_rule_work(10, 3, 4, 5, "backward")
    assert backward.flops == 2 * forward.flops
