"""The scorer compiled for Hopper. What it computes is tested in test_select.py, on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "width", "dtype"),
    [
        (32, 128, torch.bfloat16),
        (64, 64, torch.bfloat16),
        (64, 128, torch.float8_e4m3fn),
        (12, 64, torch.float8_e4m3fn),
    ],
)
def test_compiles_for_hopper(
    launches: list, assemble: Callable[[Any], Any], heads: int, width: int, dtype: torch.dtype
) -> None:
    from dsattn.backends.hopper.select import _score

    rows, keys, fp8 = 64, 1024, dtype == torch.float8_e4m3fn
    q, k = torch.zeros(rows, heads, width).to(dtype), torch.zeros(keys, width).to(dtype)
    stop, scale = torch.zeros(rows, dtype=torch.int32), torch.zeros(keys) if fp8 else None
    _score(q, k, torch.zeros(rows, heads), stop, stop, True, torch.zeros(rows, keys), key_scale=scale)
    (launch,) = launches
    got = assemble(launch)
    padded_heads = max(heads, 16)
    assert got.complaints == []
    assert got.spills == 0
    assert got.shared <= 232448
    # two groups, and before each one's loop the first product: three halves of the columns
    assert got.ptx.count("wgmma.mma_async") == 2 * 3 * width * dtype.itemsize // 32
    assert got.ptx.count(".f32.e4m3.e4m3") == (2 * 3 * width // 32 if fp8 else 0)
    assert got.ptx.count("setmaxnreg") >= 3
    # a thread has 128 products; the first of each of its sums, of two keys and all rows, is not added to anything
    assert got.ptx.count("fma.rn.f32") == 2 * (128 - 2 * 256 // padded_heads)
    assert got.ptx.count("st.global.b32") == 2 * 256 // 2 // padded_heads


@pytest.mark.slow
def test_triton_multiplies_fp8_for_hopper(launches: list, assemble: Callable[[Any], Any]) -> None:
    """The portable scorer: wgmma on E4M3 as it lies, nothing transposed, nothing spilled."""
    from dsattn.backends.triton.select_scores import score_rows

    q, k = (torch.zeros(shape, dtype=torch.float8_e4m3fn) for shape in ((64, 32, 128), (1024, 128)))
    stop = torch.zeros(64, dtype=torch.int32)
    score_rows(q, k, torch.zeros(64, 32), stop, stop, True, torch.zeros(64, 1024), key_scale=torch.zeros(1024))
    got = assemble(*launches)
    assert got.complaints == []
    assert got.spills == 0
    assert got.ptx.count(".f32.e4m3.e4m3") == 128 // 32
    assert "fma.rn.f32" not in got.ptx
    assert "cvt" not in "".join(line for line in got.ptx.splitlines() if "e4m3" in line and "wgmma" not in line)
