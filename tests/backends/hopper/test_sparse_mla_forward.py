"""The forward kernel compiled for Hopper. What it computes is tested in test_sparse_mla.py, on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
SHARED = 232448  # of one block of threads
ONE_GROUP = 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "width", "sink"),
    [(64, 576, None), (100, 512, torch.float32)],
)
def test_compiles_for_hopper(
    launches: list, assemble: Callable[[Any], Any], heads: int, width: int, sink: torch.dtype | None
) -> None:
    from dsattn.backends.hopper.sparse_mla import sparse_mla_forward

    rows, keys, slots = 3, 100, 70
    q = torch.zeros(rows, heads, width, dtype=torch.bfloat16)
    index, length = torch.zeros(rows, slots, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    sinks = None if sink is None else torch.zeros(heads, dtype=sink)
    sparse_mla_forward(q, q.new_zeros(keys, width), index, length, sinks, 0.1, 512)
    (launch,) = launches
    assert launch.grid == (rows * (2 if heads > 64 else 1),)
    got = assemble(launch)
    assert got.complaints == []
    assert got.shared <= SHARED
    assert got.registers <= 65536 // (3 * ONE_GROUP)
    assert got.spills <= 16
    # In both groups S of all channels, and out of its 256 in four steps of 16 keys: of its own tiles and the other
    # group's, the last of which `odd` adds behind its loop; and every group sets its registers.
    assert got.ptx.count("wgmma.mma_async") == 2 * width // 16 + 5 * 4
    assert got.ptx.count("cp.async.cg") == 2 * width // 16
    assert got.ptx.count("setmaxnreg") >= 3


def test_as_many_blocks_as_processors(launches: list) -> None:
    from dsattn.backends.hopper.sparse_mla import sparse_mla_forward

    for rows in (1, 131, 132, 133, 5000):
        q, index = torch.zeros(rows, 2, 512, dtype=torch.bfloat16), torch.zeros(rows, 3, dtype=torch.int32)
        sparse_mla_forward(q, q.new_zeros(4, 512), index, index[:, 0], None, 1.0, 512)
    assert [launch.grid for launch in launches] == [(1,), (131,), (132,), (132,), (132,)]
