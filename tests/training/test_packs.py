import numpy as np
import pytest

from dsattn.errors import InputError
from dsattn.training.packs import IGNORED_LABEL, RawPack, finish, fold


def test_a_raw_pack_is_padded_and_labelled() -> None:
    pack = finish(RawPack(np.array([5, 6, 7, 8], np.int32), [3, 1]), 6, pad=1)
    assert pack.tokens.tolist() == [5, 6, 7, 8, 1, 1]
    assert pack.labels.tolist() == [6, 7, *[IGNORED_LABEL] * 4]
    assert (pack.num_labels, pack.layout.lengths, pack.layout.num_real_rows) == (2, (3, 1), 4)


def test_packs_fold_end_to_end_with_their_padding() -> None:
    one = finish(RawPack(np.array([5, 6], np.int32), [2]), 3, pad=0)
    two = finish(RawPack(np.array([7, 8, 9], np.int32), [1, 2]), 3, pad=0)
    both = fold([one, two])
    assert both.tokens.tolist() == [5, 6, 0, 7, 8, 9]
    assert both.layout.real_rows.tolist() == [True, True, False, True, True, True]
    assert (both.layout.lengths, both.num_labels) == ((2, 1, 2), 2)
    with pytest.raises(InputError, match="packs is empty"):
        fold([])
