"""Who visits whom in the backward of dense attention, counted by hand; and the tiles that every width is given."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("members", [1, 3, 8])
@pytest.mark.parametrize("grows", [True, False])
def test_visits_cover_every_reader(device: str, members: int, grows: bool) -> None:
    """From the first to the last block of lines that reads of a tile; the run in between reads it whole."""
    from dsattn.backends.triton.dense_backward import _bounds_kernel, _visits_kernel
    from dsattn.backends.triton.launch import launch

    rows, keys, block_lines, tile_keys = 90, 70, 16, 8
    generator = torch.Generator().manual_seed(members)
    if grows:
        stop = torch.arange(1, rows + 1).clamp(max=keys).int()
        start = torch.where(torch.arange(rows) < 50, 0, 33).int()
    else:
        start = torch.randint(-5, keys, (rows,), generator=generator).int()
        stop = start + torch.randint(-3, 40, (rows,), generator=generator).int()
    blocks, tiles = -(-rows * members // block_lines), -(-keys // tile_keys)
    bounds, visits = (torch.full((4, n), -9, dtype=torch.int32, device=device) for n in (blocks, tiles))
    ranges = start.to(device), stop.to(device)
    launch(_bounds_kernel, (blocks,), *ranges, bounds, rows, keys, members, block_lines, num_warps=1)
    launch(_visits_kernel, (tiles,), bounds, visits, blocks, tile_keys, 4)
    column = torch.arange(tiles * tile_keys)
    reads = (column >= start[:, None]) & (column < stop[:, None]) & (column < keys)
    lines = torch.cat([reads.repeat_interleave(members, 0), reads.new_zeros(block_lines, reads.shape[1])])
    by_block = lines[: blocks * block_lines].view(blocks, block_lines, tiles, tile_keys)
    some, whole = by_block.any(3).any(1), by_block.all(3).all(1)
    found = 0
    for tile, (first, last, whole_first, whole_last) in enumerate(visits.T.tolist()):
        readers = some[:, tile].nonzero().flatten().tolist()
        if grows:
            assert (first, last) == ((readers[0], readers[-1] + 1) if readers else (blocks, 0))
        else:  # what lies between the lines' ranges counts as read
            assert not readers or (first <= readers[0] and last > readers[-1])
        assert whole[whole_first:whole_last, tile].all()
        if whole[:, tile].any():
            assert whole_first == int(whole[:, tile].nonzero()[0])
            assert whole_last == blocks or not whole[whole_last, tile]
        found += max(whole_last - whole_first, 0)
    assert found > 0 or not grows


@pytest.mark.parametrize("width", [1, 16, 64, 128, 160, 192, 256, 512, 576, 1024])
@pytest.mark.parametrize("shared", [232448, 166912, 101376])
def test_tiles_fit(width: int, shared: int) -> None:
    """One side stays in shared memory beside the tiles of the other in flight, where any listed tile can."""
    from dsattn.backends.triton.dense import forward_tiles
    from dsattn.backends.triton.dense_backward import backward_tiles

    value_dim = width if width <= 256 else min(width, 512)
    shared_kv = width > 256
    forward = forward_tiles(width, value_dim, shared_kv, torch.bfloat16, shared)
    by_rows, by_keys = backward_tiles(width, value_dim, shared_kv, torch.bfloat16, shared)
    of_keys = width if shared_kv else width + value_dim
    held = (
        forward.rows * width + forward.num_stages * forward.keys * of_keys,
        by_rows.rows * (width + value_dim) + by_rows.num_stages * by_rows.keys * of_keys,
        by_keys.keys * of_keys + by_keys.num_stages * by_keys.rows * (width + value_dim),
    )
    assert max(held) * 2 <= shared or width == 1024
    for tiles in (forward, by_rows, by_keys):
        assert min(tiles.rows, tiles.keys) >= 16
