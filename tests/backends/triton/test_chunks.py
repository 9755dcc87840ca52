"""Widths cut into chunks: what is loaded, multiplied and stored again, padding left alone."""

import pytest
import torch
import triton
import triton.language as tl

from dsattn.backends.triton.chunks import (
    add_products,
    cut,
    finite_parts,
    finite_rows,
    load_chunks,
    products,
    scaled,
    store_chunks,
    zeros,
)
from dsattn.backends.triton.launch import launch


@pytest.mark.parametrize("width", [1, 15, 16, 24, 64, 192, 576, 1000])
@pytest.mark.parametrize("widest", [64, 256])
def test_cut(width: int, widest: int) -> None:
    chunk, rest = cut(width, widest)
    assert 16 <= chunk <= widest
    assert chunk & (chunk - 1) == 0
    assert rest == 0 or (rest >= 16 and rest & (rest - 1) == 0)
    assert width <= width // chunk * chunk + rest <= max(16, 2 * width)


def test_common_widths_cost_no_padding() -> None:
    assert cut(192, 256) == (128, 64)
    assert cut(576, 256) == (256, 64)
    assert cut(576, 512) == (512, 64)
    assert cut(128, 256) == (128, 0)


@triton.jit
def _copy_kernel(
    x, out, dots, sums, sound, live, TOTAL: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr
):
    row = tl.arange(0, 16)
    parts = load_chunks(x, row * TOTAL, row < live, TOTAL, C, CHUNK, REST)
    tl.store(sound + row, finite_rows(parts).to(tl.int32))
    parts = finite_parts(parts)
    one = tl.full([16, 16], 1.0, tl.float32)
    tl.store(dots + row[:, None] * 16 + row[None, :], products(parts, parts, one))
    store_chunks(out, row * TOTAL, row < live, scaled(parts, 2.0), TOTAL, CHUNK)
    added = add_products(zeros(16, TOTAL, C, CHUNK, REST), one, parts)
    store_chunks(sums, row * TOTAL, row < 1, added, TOTAL, CHUNK)


@pytest.mark.parametrize(("total", "cut_like"), [(20, 20), (40, 40), (16, 40), (33, 40), (5, 5)])
def test_there_and_back(device: str, total: int, cut_like: int) -> None:
    """The first `total` channels, cut as `cut_like` channels are; rows that are not live stay untouched."""
    x = torch.randn(4, total, device=device)
    x[2, 0], x[3] = float("nan"), float("inf")
    out = torch.full_like(x, 7.0)
    dots, sums = torch.zeros(16, 16, device=device), torch.zeros(1, total, device=device)
    sound = torch.zeros(16, dtype=torch.int32, device=device)
    launch(_copy_kernel, (1,), x, out, dots, sums, sound, 3, total, cut_like, *cut(cut_like, 32))
    clean = x[:3].nan_to_num(0.0)
    torch.testing.assert_close(out[:3], 2 * clean)
    assert out[3].eq(7).all()
    torch.testing.assert_close(dots[:3, :3], 1 + clean @ clean.T, rtol=1e-5, atol=1e-5)
    assert dots[3:].eq(1).all()
    torch.testing.assert_close(sums[0], clean.sum(0), rtol=1e-5, atol=1e-5)
    assert sound.tolist() == [1, 1, 0, *[1] * 13]
