"""Megatron's micro-batches as key ranges, against `Layout`, which is built from integers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsattn import Layout
from dsattn.errors import InputError
from dsattn.integrations.megatron_config import Options
from dsattn.integrations.megatron_layout import Groups, InOrder, Rows, causal_rows, fold, packed_rows, rows_of, unfold

CPU = torch.device("cpu")
DOCUMENTS = [
    ([5, 1, 0, 9], None, 0),
    ([5, 0, 9, 1], [8, 4, 12, 4], 0),
    ([3, 12], [8, 12], 4),
    ([0, 0], [4, 4], 8),
    ([7], None, 1),
]


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def assert_like(rows: Rows, layout: Layout) -> None:
    """Padding rows of a Layout start at themselves, here anywhere: both read nothing."""
    real = layout.real_rows
    assert rows.real.equal(real)
    assert rows.keys.start[real].equal(layout.keys.start[real])
    assert rows.keys.stop[real].equal(layout.keys.stop[real])
    assert not (rows.keys.stop > rows.keys.start)[~real].any()
    assert rows.positions[real].equal(layout.positions[real])
    assert int(rows.total) == sum(layout.lengths)


@pytest.mark.parametrize(("lengths", "slots", "tail"), DOCUMENTS)
@pytest.mark.parametrize("cp_size", [1, 2])
def test_packs_are_those_of_a_layout(lengths: list[int], slots: list[int] | None, tail: int, cp_size: int) -> None:
    if cp_size > 1 and (slots is None or tail % cp_size):
        slots, tail = [4 * one for one in lengths], 2 * tail
    covered = sum(slots or lengths)
    for rank in range(cp_size):
        layout = Layout.packed(lengths, padded=slots, total=covered + tail, cp_size=cp_size, cp_rank=rank)
        count = (covered + tail) // cp_size
        rows = packed_rows(ends(lengths), ends(slots or lengths), count, cp_size=cp_size, cp_rank=rank)
        assert_like(rows, layout)
        if cp_size > 1:
            assert rows.order is not None
            assert rows.inverse is not None
            assert rows.order.equal(layout.key_order)
            assert rows.inverse.equal(layout.key_order_inverse)


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 1), (4, 2)])
def test_samples_are_those_of_a_layout(cp_size: int, cp_rank: int) -> None:
    layout = Layout.causal(8 * cp_size, batch=1, cp_size=cp_size, cp_rank=cp_rank)
    rows = causal_rows(8, 1, CPU, cp_size=cp_size, cp_rank=cp_rank)
    assert_like(rows, layout)
    assert rows.keys.every_row_has_a_key


def test_several_samples_are_folded_one_after_the_other() -> None:
    rows = causal_rows(3, 2, CPU)
    layout = Layout.causal(3, batch=2)
    assert rows.keys.start.equal(layout.keys.start)
    assert rows.keys.stop.equal(layout.keys.stop)
    assert rows.positions.tolist() == [0, 1, 2]
    assert rows.total == 6


def test_position_ids_go_before_the_zigzag() -> None:
    given = torch.tensor([[1, 2, 5, 6], [1, 2, 5, 6]])
    rows = causal_rows(4, 2, CPU, cp_size=2, cp_rank=0, positions=given)
    assert rows.keys.stop.tolist() == [2, 3, 6, 7, 10, 11, 14, 15]
    with pytest.raises(InputError, match="must end with the 4 rows"):
        causal_rows(4, 1, CPU, cp_size=2, positions=torch.arange(3))
    with pytest.raises(InputError, match="zigzag needs an even number"):
        causal_rows(3, 1, CPU, cp_size=2)


def test_padding_can_read_as_in_megatron() -> None:
    """Within its slot it reads what stands before it; behind the last document, the padding there."""
    rows = packed_rows(ends([2, 1]), ends([4, 2]), 8, padding_reads=True)
    assert rows.keys.start.tolist() == [0, 0, 0, 0, 4, 4, 6, 6]
    assert rows.keys.stop.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows.real.all()
    assert rows.total == 8


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without data: whatever asked for a value would raise."""
    lengths, slots = (torch.empty(4, dtype=torch.int32, device="meta") for _ in "ab")
    for cp_size in (1, 4):
        rows = packed_rows(lengths, slots, 16, cp_size=cp_size, cp_rank=cp_size - 1)
        assert rows.keys.start.shape == rows.real.shape == (16,)


@pytest.mark.parametrize(
    ("lengths", "slots", "count", "cp_size", "why"),
    [
        ([3], [4, 4], 8, 1, "must both be"),
        ([9], [9], 8, 1, "beyond the 8 rows"),
        ([6, 4], [6, 4], 5, 2, "occupies 6 rows, not a multiple of 2"),
    ],
)
def test_sizes_that_do_not_fit(lengths: list[int], slots: list[int], count: int, cp_size: int, why: str) -> None:
    with pytest.raises(InputError, match=why):
        packed_rows(ends(lengths), ends(slots), count, cp_size=cp_size)


def test_order_and_its_gradient() -> None:
    order = torch.randperm(6)
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda one: InOrder.apply(one, order, order.argsort()), x)
    assert InOrder.apply(x, order, order.argsort()).equal(x[order])


def test_fold_and_unfold() -> None:
    x = torch.arange(12).view(3, 2, 2)
    assert fold(x)[:3].equal(x[:, 0])
    assert unfold(fold(x), 2).equal(x)


def collection(tp: Any = None, cp: Any = None) -> SimpleNamespace:
    return SimpleNamespace(tp=tp, cp=cp)


def test_groups_of_a_call() -> None:
    config = SimpleNamespace(sequence_parallel=True)
    alone = Groups.of(config, collection(), None, 8, 8)
    assert (alone.cp_size, alone.tp_size, alone.local, alone.full_rows) == (1, 1, False, 8)
    split = Groups.of(config, collection(group(2, 1), group(4, 3)), None, 16, 8)
    assert (split.cp_rank, split.tp_rank, split.local, split.full_rows) == (3, 1, False, 16)
    local = Groups.of(config, collection(group(2, 1)), None, 8, 8)
    assert (local.local, local.full_rows, local.own_rows) == (True, 16, slice(8, 16))
    with pytest.raises(InputError, match="12 query rows for 8"):
        Groups.of(config, collection(group(2)), None, 12, 8)


def test_a_micro_batch_brings_its_group() -> None:
    config, standing = SimpleNamespace(sequence_parallel=False), collection(cp=group(8, 5))
    own = SimpleNamespace(local_cp_size=2, cp_group=group(2, 1))
    assert Groups.of(config, standing, own, 4, 4).cp_rank == 1
    assert Groups.of(config, standing, SimpleNamespace(local_cp_size=1, cp_group=None), 4, 4).cp_size == 1
    with pytest.raises(InputError, match="local_cp_size=2 needs its cp_group"):
        Groups.of(config, standing, SimpleNamespace(local_cp_size=2, cp_group=None), 4, 4)


def test_a_tensor_parallel_rank_has_rows_of_its_own() -> None:
    groups = Groups.of(SimpleNamespace(sequence_parallel=True), collection(group(2, 1)), None, 4, 4)
    rows = rows_of(1, CPU, groups, None, Options())
    own = rows.own(groups)
    assert own.keys.stop.tolist() == [5, 6, 7, 8]
    assert own.positions.tolist() == [4, 5, 6, 7]
    with pytest.raises(InputError, match="one sample"):
        rows_of(2, CPU, groups, None, Options()).own(groups)


def test_rows_of_packed_parameters() -> None:
    groups = Groups.of(SimpleNamespace(sequence_parallel=False), collection(), None, 8, 8)
    padded = SimpleNamespace(qkv_format="thd", cu_seqlens_q=ends([3, 2]), cu_seqlens_q_padded=ends([4, 4]))
    assert rows_of(1, CPU, groups, padded, Options()).real.tolist() == [True] * 3 + [False] + [True] * 2 + [False] * 2
    assert rows_of(1, CPU, groups, padded, Options(rows="megatron")).real.all()
    plain = SimpleNamespace(qkv_format="thd", cu_seqlens_q=ends([3, 2]), cu_seqlens_q_padded=None)
    assert rows_of(1, CPU, groups, plain, Options()).total == 5
    with pytest.raises(InputError, match="neither cu_seqlens_q nor"):
        rows_of(
            1, CPU, groups, SimpleNamespace(qkv_format="thd", cu_seqlens_q=None, cu_seqlens_q_padded=None), Options()
        )
