"""The backward kernel compiled for Hopper. What it computes is tested in test_sparse_mla.py, on a GPU."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsattn import settings

pytest.importorskip("triton")
SHARED = 232448  # of one block of threads
ONE_GROUP = 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "width", "route", "with_sink"),
    [
        (100, 576, "bfloat16", True),
        (64, 576, "bfloat16", False),
        (64, 512, "atomics", False),
        (100, 576, "float32", True),
        (64, 576, "float32", False),
        (64, 512, "float32", False),
    ],
)
def test_compiles_for_hopper(
    launches: list,
    assemble: Callable[[Any], Any],
    heads: int,
    width: int,
    route: str,
    with_sink: bool,
) -> None:
    from dsattn.backends.hopper import sparse_mla
    from dsattn.backends.hopper.sparse_mla_backward import backward_kernel

    rows, keys, slots = 3, 100, 70
    q, out = (torch.zeros(rows, heads, columns, dtype=torch.bfloat16) for columns in (width, 512))
    index, length = torch.zeros(rows, slots, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    sink = torch.zeros(heads) if with_sink else None
    operands = (out, q, q.new_zeros(keys, width), index, length, sink, out, torch.zeros(rows, heads), 0.1)
    with settings(fp32_contributions=route == "float32"):
        sparse_mla.sparse_mla_backward(*operands, route != "atomics")
    (launch,) = (launch for launch in launches if launch.kernel is backward_kernel)
    assert launch.grid == (rows * (2 if heads > 64 else 1),)
    got = assemble(launch)
    assert got.complaints == []
    assert got.shared <= SHARED
    assert got.registers <= 65536 // (3 * ONE_GROUP)
    assert got.spills <= (128 if heads % 64 == 0 else 256)
    # S, dP, dq and dk in steps of 16 channels, heads or keys; keys arrive, and dk leaves, 16 bytes at a time.
    assert got.ptx.count("wgmma.mma_async") == (width + 512) // 16 + (4 * (width // 256 + width % 256 // 64)) + (
        4 * (width + 512) // 64
    )
    assert got.ptx.count("setmaxnreg") >= 3
    stores = {"atomics": 0, "bfloat16": 4, "float32": 8}[route]
    assert got.ptx.count("add.v4.f32") == (width // 64 * 8 if route == "atomics" else 0)
    assert got.ptx.count("st.global.cs.v4.b32") == width // 64 * stores


@pytest.mark.parametrize(("vector", "sizes"), [(4, (4, 2, 4, 2)), (8, (2, 4, 4, 2))])
def test_no_element_changes_its_thread(vector: int, sizes: tuple[int, ...]) -> None:
    """A thread of a tensor core product holds two of every eight columns; in register order they are its own too."""
    from dsattn.backends.hopper.sparse_mla_backward import leaving

    layout = leaving(vector)
    place = torch.arange(64).reshape(sizes).permute(0, 2, 1, 3).flatten().tolist()
    for lane, warp in itertools.product(range(32), range(4)):
        product = {(16 * warp + lane // 4 + 8 * half, 8 * b + 2 * (lane % 4) + x)
                   for half, b, x in itertools.product(range(2), range(8), range(2))}  # fmt: skip
        bases = [base for bit, base in enumerate(layout.lane_bases) if lane >> bit & 1]
        bases += [base for bit, base in enumerate(layout.warp_bases) if warp >> bit & 1]
        held = set()
        for register in range(32):
            every = bases + [base for bit, base in enumerate(layout.reg_bases) if register >> bit & 1]
            held.add((sum(row for row, _ in every), place[sum(column for _, column in every)]))
        assert held == product


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
        "ptxas info    : (C7507) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register ...",
        "ptxas warning : Value of threads per SM for entry kernel is out of range",
    ],
)
def test_complaints_are_seen(line: str, complaints: Callable[[str], list[str]]) -> None:
    assert complaints(f"ptxas info    : Used 168 registers, used 3 barriers\n{line}\n") == [line]
