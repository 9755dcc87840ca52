import pytest
import torch

from dsattn.errors import InputError
from dsattn.nn.state import LayerCache, Pass


def test_an_unknown_mode_is_an_error():
    with pytest.raises(InputError, match="mode='sparce' must be one of dense, warmup, sparse, frozen"):
        Pass(mode="sparce")


def test_a_cache_grows_by_value():
    first = LayerCache().extended((torch.zeros(2, 3),), torch.zeros(2, 4))
    second = first.extended((torch.ones(1, 3),), torch.ones(1, 4))
    assert (LayerCache().num_rows, first.num_rows, second.num_rows) == (0, 2, 3)
    assert torch.equal(second.entries[0][2], torch.ones(3))
    assert torch.equal(second.index_keys[:, 0], torch.tensor([0.0, 0, 1]))


def test_index_keys_cannot_come_late():
    dense = LayerCache().extended((torch.zeros(2, 3),), None)
    with pytest.raises(InputError, match=r"2 rows without index keys.*fill it in the mode that decodes"):
        dense.extended((torch.zeros(1, 3),), torch.zeros(1, 4))


def test_index_keys_are_dropped_by_dense_rows():
    """Rows without index keys leave a gap, so that selecting later is an error and not a selection with holes."""
    sparse = LayerCache().extended((torch.zeros(2, 3),), torch.zeros(2, 4))
    mixed = sparse.extended((torch.zeros(1, 3),), None)
    assert mixed.index_keys is None
    with pytest.raises(InputError):
        mixed.extended((torch.zeros(1, 3),), torch.zeros(1, 4))
