"""How dense attention's reference is cut into tiles: each pair once, none that nobody reads, nothing of size [T, S]."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn.keys import KeyRange, Layout
from dsattn.ops import blocks, ranged
from dsattn.ops.ranged import RangeBlock, backward_reference, by_group, forward_reference, from_group, range_blocks
from dsattn.testing import LAYOUTS, Sizes, make_case


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def count_reads(cut: list[RangeBlock], rows: int, keys: int) -> Tensor:
    times = torch.zeros(rows, keys, dtype=torch.int64)
    for block in cut:
        for run, read_RW in block.runs():
            times[block.rows, run] += 1 if read_RW is None else read_RW
    return times


@pytest.mark.parametrize("step", [1, 5, 16, 4096])
@pytest.mark.parametrize("bytes_per_pair", [1, 64, 2**30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_pair_is_met_once(layout: str, bytes_per_pair: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = LAYOUTS[layout]()
    monkeypatch.setattr(ranged, "key_runs", lambda device: step)
    monkeypatch.setattr(blocks, "_CPU_BYTES", 8192)
    cut = list(range_blocks(made.keys, made.num_keys, bytes_per_pair))
    times = count_reads(cut, made.keys.num_rows, made.num_keys)
    assert torch.equal(times, made.keys.mask(made.num_keys).long())
    rows = [row for block in cut for row in range(block.rows.start, block.rows.stop)]
    assert rows == list(range(made.keys.num_rows))


def test_runs_outside_every_range_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "key_runs", lambda device: 16)
    layout = Layout.packed([64, 64])
    monkeypatch.setattr(blocks, "_CPU_BYTES", 16 * 16)
    met = sum(
        (block.rows.stop - block.rows.start) * (run.stop - run.start)
        for block in range_blocks(layout.keys, 128, 1)
        for run, _ in block.runs()
    )
    assert met == 2 * 16 * 16 * (1 + 2 + 3 + 4)  # both triangles in tiles of 16 x 16, and nothing between them


def test_only_tiles_on_an_edge_carry_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "key_runs", lambda device: 16)
    monkeypatch.setattr(blocks, "_CPU_BYTES", 16 * 16)
    tiles = [read for block in range_blocks(Layout.causal(64).keys, 64, 1) for _, read in block.runs()]
    assert sum(read is None for read in tiles) == 6
    assert sum(read is not None for read in tiles) == 4


def test_ranges_beyond_the_keys_are_cut() -> None:
    keys = KeyRange(
        torch.tensor([-5, 3, 9, 4], dtype=torch.int32), torch.tensor([2**31 - 1, 2, 12, 9], dtype=torch.int32)
    )
    (block,) = range_blocks(keys, 6, 1)
    assert block.read_by_any == (0, 6)
    assert torch.equal(count_reads([block], 4, 6), keys.mask(6).long())


def test_nothing_to_read_has_no_runs() -> None:
    nothing = KeyRange(*torch.tensor([[3, 1], [3, 0]], dtype=torch.int32))
    (block,) = range_blocks(nothing, 6, 1)
    assert not list(block.runs())


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_go_there_and_back(groups: int) -> None:
    x = torch.arange(5 * 4 * 3).view(5, 4, 3)
    grouped = by_group(x, groups)
    assert grouped.shape == (groups, 5 * 4 // groups, 3)
    assert torch.equal(from_group(grouped, x), x)
    row, head = 3, 2
    group, place = divmod(head, 4 // groups)
    assert torch.equal(grouped[group, row * (4 // groups) + place], x[row, head])


@pytest.mark.parametrize("shared", [True, False], ids=["mla", "gqa"])
def test_nothing_of_size_rows_times_keys(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_CPU_BYTES", 2**18)
    case = make_case(Layout.packed([1500, 548]), Sizes(heads=2, groups=1, width=8, value_dim=4))
    k, v = (case.kv[:, None], None) if shared else (case.k, case.v)
    with Largest() as largest:
        out, lse = forward_reference(case.q, k, v, case.keys, None, 1.0, 4)
        backward_reference(case.grad_out, case.q, k, v, case.keys, None, out, lse, 1.0)
    assert out.isfinite().all()
    assert largest.numel < 2048 * 2048 // 16


def test_largest_sees_a_whole_matrix() -> None:
    with Largest() as largest:
        torch.randn(256, 4) @ torch.randn(4, 256)
    assert largest.numel == 256 * 256


def test_peaks_that_come_late_and_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running softmax is anchored again in every run: logits climb to 500 and fall; some runs are unread."""
    monkeypatch.setattr(ranged, "key_runs", lambda device: 3)
    climb = torch.cat([torch.linspace(-500, 500, 16), torch.linspace(500, -500, 16)]).double()
    k = torch.stack([climb, torch.linspace(-1, 1, 32).double()], 1)[:, None]
    keys = KeyRange(torch.tensor([0, 0, 16, 20], dtype=torch.int32), torch.tensor([32, 16, 32, 22], dtype=torch.int32))
    q = torch.tensor([1.0, 0.3]).double().expand(4, 1, 2)
    out, lse = forward_reference(q, k, None, keys, None, 1.0, 2)
    logits = (q[:, 0] @ k[:, 0].t()).masked_fill(~keys.mask(32), -torch.inf)
    torch.testing.assert_close(lse[:, 0], logits.logsumexp(-1), rtol=1e-14, atol=0)
    torch.testing.assert_close(out[:, 0], logits.softmax(-1) @ k[:, 0], rtol=1e-12, atol=0)
