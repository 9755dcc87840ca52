"""The parts that selected keys and ranges share: lines of columns, the target, a row's loss and gradient."""

import pytest
import torch
from torch import Tensor

from dsattn.backends import ALONE
from dsattn.keys import KeyRange

rows = pytest.importorskip("dsattn.backends.triton.indexer_kl_rows", exc_type=ImportError)

# The interpreter multiplies NaN and infinities in numpy, which tells; that results are right is asserted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INF, NAN = float("inf"), float("nan")


def ints(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_lines_of_ranges_are_cut() -> None:
    keys, real = KeyRange(ints(-3, 2, 5, 0), ints(4, 99, 3, 7)), torch.tensor([True, True, True, False])
    lines = rows.lines_of(None, None, keys, real, 9)
    assert lines.begin.tolist() == [0, 2, 5, 0]
    assert lines.end.tolist() == [4, 9, 3, 0]
    assert lines.begin.dtype == lines.end.dtype == torch.int32
    assert (lines.index, lines.columns) == (None, 9)


def test_lines_of_slots_end_at_length() -> None:
    index, keys = torch.zeros(4, 3, dtype=torch.int32).T, KeyRange(ints(0, 0, 0), ints(9, 9, 9))
    lines = rows.lines_of(index, ints(4, 2, 77), keys, torch.tensor([True, False, True]), 9)
    assert lines.end.tolist() == [4, 0, 4]
    assert lines.begin is None
    assert lines.index.is_contiguous()
    assert lines.columns == 4


@pytest.mark.parametrize("with_begin", [False, True])
def test_loss_and_gradient_of_long_rows(device: str, with_begin: bool) -> None:
    """Rows of several blocks of columns against whole rows in fp64; what does not count is NaN."""
    generator, columns = torch.Generator().manual_seed(0), 4500
    score = (100 + 3 * torch.randn(5, columns, generator=generator)).to(device)
    target = torch.rand(5, columns, generator=generator).pow(4).to(device)
    target[:, ::7] = 0
    begin, end = ints(3, 2049, 4499, 0, 50, device=device), ints(4500, 2050, 4499, 2048, 4100, device=device)
    if not with_begin:
        begin = torch.zeros_like(begin)
    column = torch.arange(columns, device=device)
    counts = (column >= begin[:, None]) & (column < end[:, None])
    score[~counts], target[~counts] = NAN, NAN
    score[3, 5] = -INF
    target[3, 5] = 0
    lines = rows.Lines(begin if with_begin else None, end, None, columns)
    values = tuple(torch.empty(7, device=device) for _ in range(4))
    block = slice(0, 5)
    rows.fill_loss(score, target, lines, block, values)
    loss, peak, rest, mass = (x[:5].double() for x in values)
    wide, p = score.double().masked_fill(~counts, -INF), target.double().masked_fill(~counts, 0)
    share = p / p.sum(1, keepdim=True)
    kl = torch.where(share > 0, share * (share.log() - wide.log_softmax(1)), 0.0).sum(1)
    alive = counts.any(1)
    torch.testing.assert_close(loss[alive], kl[alive], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((peak + rest)[alive], wide.logsumexp(1)[alive], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mass, p.sum(1), rtol=1e-6, atol=0)
    assert loss[~alive].eq(0).all()
    row_scale = torch.tensor([1.0, 2.0, 3.0, 0.0, -1.0], device=device) if with_begin else None
    rows.fill_dscore(score, target, lines, block, torch.stack(values[1:3]), values[3], row_scale)
    expected = torch.where(alive[:, None] & counts, wide.softmax(1) - share, 0.0)
    if with_begin:
        expected *= row_scale.double()[:, None]
        torch.testing.assert_close(score[counts].double(), expected[counts], rtol=1e-5, atol=1e-7)
    else:  # slots: everywhere
        torch.testing.assert_close(score.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_scores_that_are_not_finite(device: str, value: float) -> None:
    """No such softmax: the loss says so. Without mass nothing is lost."""
    score = torch.zeros(2, 6, device=device)
    score[:, 2] = value
    target = torch.ones(2, 6, device=device)
    target[1] = 0
    lines = rows.Lines(None, ints(6, 6, device=device), None, 6)
    values = tuple(torch.empty(2, device=device) for _ in range(4))
    rows.fill_loss(score, target, lines, slice(0, 2), values)
    assert not values[0][0].isfinite()
    assert values[0][1] == 0
    rows.fill_dscore(score, target, lines, slice(0, 2), torch.stack(values[1:3]), values[3])
    assert not score[1].any()


def test_target_of_a_block_in_the_middle(device: str) -> None:
    """Rows 4 .. 6 of 9, several tiles of keys, a row that reads nothing; infinite log-sum-exps."""
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(*shape, generator=generator).to(device) for shape in ((9, 6, 20), (70, 2, 20)))
    lse = torch.randn(9, 6, generator=generator).to(device)
    lse[4, 0], lse[4, 1] = -INF, INF
    begin, end = torch.full((9,), 5), torch.tensor([9, 9, 9, 9, 61, 5, 70, 9, 9])
    lines = rows.Lines(begin.int().to(device), end.int().to(device), None, 70)
    target = torch.full((3, 128), NAN, device=device)
    assert rows.begin_target(q, kv, lse, lines, 0.3, ALONE, slice(4, 7), target)() is target
    logits = 0.3 * torch.einsum("thc,shc->ths", q.double(), kv.double().repeat_interleave(3, 1))
    shift = lse.double().masked_fill(lse == -INF, 0)
    expected = (logits - shift[..., None]).exp().sum(1)[4:7]
    column = torch.arange(70, device=device)
    counts = (column >= 5) & (column < end[4:7].to(device)[:, None])
    torch.testing.assert_close(target[:, :70][counts].double(), expected[counts], rtol=1e-5, atol=1e-6)
    assert target[:, :70][~counts].isnan().all()


def test_lines_within_some_columns() -> None:
    keys, real = KeyRange(ints(70, 65, 3, 80), ints(90, 65, 9, 99)), torch.tensor([True, True, False, True])
    lines = rows.lines_of(None, None, keys, real, 98)
    part = lines.within(64, 128)
    assert part.begin.tolist() == [6, 1, -61, 16]
    assert part.end.tolist() == [26, 1, -64, 34]
    assert part.columns == 34
    assert lines.within(0, 128) == lines._replace(reach=None)


@pytest.mark.gpu
def test_queries_beyond_two_to_the_31(device: str) -> None:
    """The last rows of a tensor of 2.3e9 numbers."""
    count, heads, width = 62_000, 64, 576
    q = torch.empty(count, heads, width, dtype=torch.bfloat16, device=device)
    assert q.numel() > 2**31
    q[-2:] = torch.randn(2, heads, width, device=device)
    kv = torch.randn(300, width, device=device).bfloat16()
    lse = torch.full((count, heads), 3.0, device=device)
    begin, end = (torch.full((count,), value, dtype=torch.int32, device=device) for value in (0, 300))
    lines = rows.Lines(begin, end, None, 300)
    target = torch.empty(2, 320, device=device)
    rows.begin_target(q, kv, lse, lines, 0.05, ALONE, slice(count - 2, count), target)()
    expected = (0.05 * torch.einsum("thc,sc->ths", q[-2:].double(), kv.double()) - 3).exp().sum(1)
    torch.testing.assert_close(target[:, :300].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shared", [232448, 166912, 101376])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("share", [1, 3, 8, 48, 64, 128, 200])
def test_tiles(share: int, selected: bool, dtype: torch.dtype, shared: int) -> None:
    """What a tensor core takes, no wider than needed, and in shared memory."""
    for width in (3, 24, 128, 192, 576):
        tiles = rows.target_tiles(share, width, dtype, selected, shared)
        columns = tiles.rows * tiles.heads
        assert min(tiles.keys, columns, tiles.chunk) >= 16
        assert tiles.heads <= max(16, 2 * share)
        assert not selected or (tiles.rows, tiles.band) == (1, 1)
        assert tiles.num_stages >= 2
        assert tiles.num_stages * (tiles.keys + columns) * tiles.chunk * dtype.itemsize <= shared


@pytest.mark.parametrize(
    ("arguments", "stops"),
    [
        ((10, 4, 40), [10]),
        ((10, 4, 12), [3, 6, 9, 10]),
        ((3, 100, 1), [1, 2, 3]),
        ((9, 1, 7, 4), [4, 8, 9]),
        ((0, 4, 9), []),
    ],
)
def test_row_blocks(arguments: tuple[int, ...], stops: list[int]) -> None:
    blocks = rows.row_blocks(*arguments)
    assert [block.stop for block in blocks] == stops
    assert [block.start for block in blocks] == [0, *stops][: len(stops)]
