"""Layouts that the forward and the backward share."""

import itertools

import pytest

pytest.importorskip("triton")


def test_products_belong_to_four_warps() -> None:
    from dsattn.backends.hopper.sparse_mla_tiles import accumulator

    for columns in (64, 128, 256):
        layout = accumulator(columns)
        assert (layout.warps_per_cta, layout.instr_shape[:2]) == ([4, 1], [16, columns])


def test_copies_take_16_bytes_of_a_row_of_128() -> None:
    """A thread's bf16 are neighbours, and eight threads that follow each other fill the line of a row."""
    from dsattn.backends.hopper.sparse_mla_tiles import copies

    layout = copies()
    rows, wide = layout.threads_per_warp
    assert (layout.size_per_thread, layout.order) == ([1, 8], [1, 0])
    assert wide * layout.size_per_thread[1] == 64
    assert rows * wide == 32
    assert list(itertools.accumulate(layout.warps_per_cta, lambda a, b: a * b))[-1] == 4
