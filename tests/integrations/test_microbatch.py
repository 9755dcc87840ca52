import pytest
import torch

from dsattn.errors import InputError
from dsattn.integrations.microbatch import layout_of


def seen(layout) -> torch.Tensor:
    return layout.keys.mask(layout.num_keys)


def by_hand(documents: list[list[int]], rows: int) -> torch.Tensor:
    """Each document is its rows, in order."""
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    for document in documents:
        for t in document:
            mask[t, document[0] : t + 1] = True
    return mask


def test_a_plain_batch() -> None:
    layout = layout_of(2, 3)
    assert torch.equal(seen(layout), by_hand([[0, 1, 2], [3, 4, 5]], 6))
    assert layout.every_row_has_a_key


def test_padding_on_both_sides_and_documents_in_what_is_left() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    ids = torch.tensor([[1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1], [3, 4, 0, 0, 1, 2]])
    layout = layout_of(3, 6, mask, ids)
    assert torch.equal(seen(layout), by_hand([[1, 2], [3, 4], [12, 13], [14], [15, 16, 17]], 18))
    assert torch.equal(layout.real_rows, mask.bool().flatten())
    assert layout.num_real_rows == 10


def test_one_row_of_positions_serves_the_batch() -> None:
    assert torch.equal(seen(layout_of(2, 3, None, torch.tensor([[0, 0, 1]]))), by_hand([[0], [1, 2], [3], [4, 5]], 6))


def test_cu_seq_lens_leave_padding_behind() -> None:
    layout = layout_of(1, 6, None, torch.zeros(1, 6), torch.tensor([0, 2, 2, 5], dtype=torch.int32))
    assert torch.equal(seen(layout), by_hand([[0, 1], [2, 3, 4]], 6))
    assert layout.num_real_rows == 5


@pytest.mark.parametrize("additive", [False, True])
def test_square_masks_of_any_run(additive) -> None:
    square = by_hand([[1, 2], [3]], 4)
    square[3, 1:3] = True
    mask = torch.stack([square, by_hand([[0, 1, 2, 3]], 4)])[:, None]
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if additive else mask
    layout = layout_of(2, 4, given)
    assert torch.equal(seen(layout), torch.block_diag(square, mask[1, 0]))
    assert layout.real_rows.tolist() == [False, *[True] * 7]
    assert layout.num_real_rows == 7
    assert not layout.every_row_has_a_key


HOLE = torch.tensor([[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]).bool()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mask": torch.ones(2, 3)}, r"must be \[1, 3\] or 4D, got \[2, 3\]"),
        ({"mask": torch.tensor([[1, 0, 1]])}, "hole"),
        ({"mask": HOLE}, r"attention_mask\[0, 0, 2\] has a hole"),
        ({"mask": torch.full((1, 1, 3, 3), -1.0)}, "cannot say a bias"),
        ({"mask": HOLE.long()}, "boolean or additive"),
        ({"mask": HOLE.expand(1, 2, 3, 3)}, r"got \[1, 2, 3, 3\]"),
        ({"position_ids": torch.tensor([[0, 1, 5]])}, r"position_ids\[0\] jump to 5 at column 2"),
        ({"position_ids": torch.zeros(3, 1, 3)}, r"position_ids must be \[1, 3\]"),
        ({"cu_seq_lens": torch.tensor([0, 4])}, "end at most at 3"),
        ({"cu_seq_lens": torch.tensor([1, 3])}, "must start at 0"),
        ({"cu_seq_lens": torch.tensor([0, 2, 1])}, "never fall"),
        ({"cu_seq_lens": torch.tensor([0, 3]), "mask": torch.tensor([[0, 1, 1]])}, "give one"),
    ],
)
def test_refuses(options, match) -> None:
    with pytest.raises(InputError, match=match):
        layout_of(1, 3, **options)


def test_cu_seq_lens_of_a_batch() -> None:
    with pytest.raises(InputError, match="fold it into one"):
        layout_of(2, 3, cu_seq_lens=torch.tensor([0, 3]))
