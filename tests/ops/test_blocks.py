"""How the references cut their work."""

import pytest
import torch

from dsattn.ops import blocks
from dsattn.ops.blocks import add_rows_, key_runs, row_blocks, span

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("rows", "bytes_per_row"), [(0, 8), (1, 8), (10, 1), (10, 2**21), (10, 2**40), (5, 0)])
def test_row_blocks_cover_every_row_once(rows: int, bytes_per_row: int) -> None:
    cut = list(row_blocks(rows, bytes_per_row, CPU))
    assert [row for block in cut for row in range(block.start, block.stop)] == list(range(rows))
    for block in cut:
        size = block.stop - block.start
        assert size == 1 or size * bytes_per_row <= blocks._CPU_BYTES


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("bytes_per_row", [1, 2**22, 2**23, 2**40])
def test_row_blocks_are_multiples(bytes_per_row: int, multiple: int) -> None:
    cut = list(row_blocks(12, bytes_per_row, CPU, multiple))
    assert [row for block in cut for row in range(block.start, block.stop)] == list(range(12))
    for block in cut:
        size = block.stop - block.start
        assert block.start % multiple == size % multiple == 0
        assert size == multiple or size * bytes_per_row <= blocks._CPU_BYTES


def test_a_gpu_gets_larger_blocks() -> None:
    assert len(list(row_blocks(1000, 2**20, CUDA))) < len(list(row_blocks(1000, 2**20, CPU)))
    assert key_runs(CUDA) > key_runs(CPU)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (ints(3, 1, 5), ints(4, 6, 9), (1, 9)),
        (ints(3, 0, 5), ints(4, 0, 9), (3, 9)),  # the row that reads nothing does not widen the span
        (ints(0, 100), ints(7, 90), (0, 7)),
        (ints(-4), ints(3), (0, 3)),
        (ints(2), ints(99), (2, 10)),
        (ints(4, 5), ints(4, 3), (0, 0)),
        (ints(), ints(), (0, 0)),
    ],
)
def test_span(start: torch.Tensor, stop: torch.Tensor, expected: tuple[int, int]) -> None:
    assert span(start, stop, 10) == expected


@pytest.mark.parametrize("deterministic", [True, False])
def test_add_rows(deterministic: bool) -> None:
    total = torch.ones(4, 2)
    values = torch.arange(8.0).view(2, 2, 2)
    add_rows_(total, torch.tensor([[3, 0], [3, 3]]), values, deterministic)
    assert total.tolist() == [[3, 4], [1, 1], [1, 1], [11, 14]]


def test_sums_in_order_equal_index_add() -> None:
    torch.manual_seed(0)
    index, values = torch.randint(0, 10, (100,)), torch.randn(100, 3, dtype=torch.float64)
    index[index == 7] = 6  # a row that nothing is added to
    total = torch.zeros(10, 3, dtype=torch.float64)
    blocks._add_in_order_(total, index, values)
    torch.testing.assert_close(total, torch.zeros_like(total).index_add_(0, index, values), rtol=0, atol=1e-12)
