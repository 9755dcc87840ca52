"""What one weight gets; parts on many ranks are in tests/parallel/test_apply.py."""

import pytest
import torch
from torch import Tensor

from dsattn.nn import draw

SHAPE = (7, 5, 4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of SHAPE a block: four blocks, the last one short."""
    monkeypatch.setattr(draw, "BLOCK", 40)


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32, fill=draw.normal_, arguments=(0.5,)) -> Tensor:
    weight = torch.empty(SHAPE, dtype=dtype)
    fill(weight, *arguments, torch.Generator().manual_seed(seed))
    return weight


def test_seeds_and_blocks_differ() -> None:
    one = drawn()
    assert torch.equal(one, drawn())
    assert not torch.equal(one, drawn(1))
    assert len(one.flatten().unique()) == one.numel(), "no block is another's"


def test_numbers_have_the_distribution_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "BLOCK", 2**10)
    normal, even = torch.empty(400, 250), torch.empty(100_000)
    draw.normal_(normal, 0.5)
    draw.uniform_(even, 1, 16)
    assert normal.mean().item() == pytest.approx(0, abs=0.01)
    assert normal.std().item() == pytest.approx(0.5, rel=0.02)
    assert (normal.abs() < 0.5).float().mean().item() == pytest.approx(0.6827, abs=0.01)
    assert (even.min().item(), even.mean().item(), even.max().item()) == pytest.approx((1, 8.5, 16), abs=0.1)
    assert normal[:4].flatten().corrcoef().item() == pytest.approx(1)
    rows = normal.view(100, 1000)  # nearly a block each
    assert (rows.corrcoef() - torch.eye(100)).abs().max() < 0.2


def test_a_narrow_weight_is_the_rounded_wide_one() -> None:
    wide = drawn()
    assert torch.equal(drawn(dtype=torch.bfloat16), wide.bfloat16())
    assert torch.equal(drawn(dtype=torch.float64), wide.double())


def test_every_weight_takes_one_number_wherever_it_is() -> None:
    """Else weights that are drawn later would depend on what a rank holds."""
    here, there = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    draw.normal_(torch.empty(SHAPE), 1.0, here)
    draw.uniform_(torch.empty(0, 3), 0, 1, here)
    draw.normal_(torch.empty(SHAPE, device="meta"), 1.0, there)
    draw.uniform_(torch.empty(9, device="meta"), 0, 1, there)
    assert torch.equal(here.get_state(), there.get_state())


class Part(Tensor):
    """A cut of a weight, as a DTensor shows it."""

    def __create_chunk_list__(self):
        return [type("Chunk", (), {"offsets": torch.Size(self.begin), "sizes": self.own.shape})]

    def to_local(self) -> Tensor:
        return self.own


@pytest.mark.parametrize(
    "box",
    [
        (slice(0, 7), slice(0, 5), slice(0, 4)),
        (slice(1, 6), slice(2, 3), slice(0, 4)),
        (slice(3, 4), slice(0, 5), slice(1, 3)),
        (slice(6, 7), slice(4, 5), slice(3, 4)),
        (slice(7, 7), slice(0, 5), slice(0, 4)),
        (slice(2, 4), slice(5, 5), slice(0, 4)),
    ],
)
def test_a_part_has_the_numbers_of_the_whole(box: tuple[slice, ...]) -> None:
    part = torch.empty(SHAPE).as_subclass(Part)
    part.begin, part.own = [one.start for one in box], torch.full(SHAPE, torch.nan)[box]
    draw.normal_(part, 0.5, torch.Generator().manual_seed(0))
    assert torch.equal(part.own, drawn()[box])


def test_a_part_draws_the_blocks_that_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    part, made = torch.empty(SHAPE).as_subclass(Part), []
    part.begin, part.own = [3, 0, 0], torch.empty(2, 5, 4)
    plain = Tensor.normal_
    monkeypatch.setattr(Tensor, "normal_", lambda self, **options: made.append(self.shape) or plain(self, **options))
    draw.normal_(part, 0.5, torch.Generator().manual_seed(0))
    assert made == [(2, 5, 4), (2, 5, 4)]
