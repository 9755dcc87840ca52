"""The scorer compiled for Hopper. What it computes is tested in test_select.py, on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "width"), [(32, 128), (64, 128), (12, 64)])
def test_compiles_for_hopper(launches: list, assemble: Callable[[Any], Any], heads: int, width: int) -> None:
    from dsattn.backends.hopper.select import _score

    rows, keys = 64, 1024
    q, k = torch.zeros(rows, heads, width, dtype=torch.bfloat16), torch.zeros(keys, width, dtype=torch.bfloat16)
    stop = torch.zeros(rows, dtype=torch.int32)
    _score(q, k, torch.zeros(rows, heads), stop, stop, True, torch.zeros(rows, keys))
    (launch,) = launches
    got = assemble(launch)
    assert got.complaints == []
    assert got.spills == 0
    assert got.shared <= 232448
    assert got.ptx.count("wgmma.mma_async") == 2 * width // 16
    assert got.ptx.count("setmaxnreg") >= 3
    assert "fma.rn.f32" not in got.ptx  # sums that may be fused in one place and not in another change bits
    assert got.ptx.count("st.global.v4.b32") == 2 * (1 if heads > 16 else 2)


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
