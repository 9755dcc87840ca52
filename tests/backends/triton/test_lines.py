"""Lines, the tiles of keys that they read, and how launches are cut."""

import pytest
import torch
import triton
import triton.language as tl

from dsattn.backends.triton.launch import launch
from dsattn.backends.triton.lines import Tiles, first_fitting, geometry, key_tiles, lines_of, ranges_of
from dsattn.keys import Layout


@triton.jit
def _tiles_kernel(start, stop, rows, heads, tiles, T, S, J: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    row, head, live = lines_of(tl.program_id(0), 1, T, J, ROWS)  # pyright: ignore[reportGeneralTypeIssues]
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(rows + line, tl.where(live, row, -1))
    tl.store(heads + line, head)
    first, last = ranges_of(start, stop, row, live, S)
    found = key_tiles(first, last, S, KEYS)
    for i in tl.static_range(4):
        tl.store(tiles + tl.program_id(0) * 4 + i, found[i])


@pytest.mark.parametrize("members", [1, 3, 16])
@pytest.mark.parametrize("lengths", [[40], [13, 0, 1, 20, 6]])
def test_tiles_of_a_block_of_lines(device: str, members: int, lengths: list[int]) -> None:
    """Every key that a line reads lies in its block's tiles; every line reads all of the whole ones."""
    keys = Layout.packed(lengths).keys
    blocks, num_keys = -(-40 * members // 8), 39  # ranges end past the keys there are
    rows, heads = (torch.full((blocks * 8,), -9, dtype=torch.int32, device=device) for _ in range(2))
    tiles = torch.full((blocks, 4), -9, dtype=torch.int32, device=device)
    ranges = keys.start.to(device), keys.stop.to(device)
    launch(_tiles_kernel, (blocks,), *ranges, rows, heads, tiles, 40, num_keys, members, 8, 4)
    line = torch.arange(blocks * 8)
    assert rows.cpu().equal(torch.where(line // members < 40, line // members, -1).int())
    assert heads.cpu().equal((members + line % members).int())
    reads = keys.mask(40)[:, :num_keys].repeat_interleave(members, 0)
    for block, (first, stop, whole, count) in enumerate(tiles.tolist()):
        mine = reads[block * 8 : block * 8 + 8]
        used = mine.any(0).nonzero().flatten() // 4
        assert (first, stop) == (int(used[0]), int(used[-1]) + 1)
        assert mine[:, whole * 4 : (whole + count) * 4].all()
        expected = [tile for tile in range(num_keys // 4) if len(mine) == 8 and mine[:, tile * 4 : tile * 4 + 4].all()]
        assert count == len(expected)
        assert not count or whole == expected[0]


def test_the_first_that_fits() -> None:
    table = {64: (Tiles(128, 64, 64, 8, 2), Tiles(16, 16, 64, 4, 1)), 512: (Tiles(32, 32, 64, 4, 1),)}

    def held(tiles: Tiles) -> int:
        return tiles.rows * 64

    assert first_fitting(table, held, 64, torch.bfloat16, 16384).rows == 128
    assert first_fitting(table, held, 64, torch.bfloat16, 16383).rows == 16
    assert first_fitting(table, held, 64, torch.bfloat16, 1).rows == 16
    assert first_fitting(table, held, 65, torch.bfloat16, 16384).rows == 32
    assert first_fitting(table, held, 64, torch.float32, 2**20).num_stages == 1


def test_geometry() -> None:
    """Values that are the keys' leading channels are cut where the keys are."""
    tiles = Tiles(64, 32, 256, 8, 2)
    apart, shared = geometry(4, 2, 192, 128, False, tiles), geometry(4, 1, 576, 512, True, tiles)
    assert [apart[name] for name in ("CHUNK", "REST", "V_CHUNK", "V_REST")] == [128, 64, 128, 0]
    assert [shared[name] for name in ("CHUNK", "REST", "V_CHUNK", "V_REST")] == [256, 64, 256, 64]
    assert (apart["ROWS"], apart["KEYS"], apart["num_warps"], apart["num_stages"]) == (64, 32, 8, 2)
