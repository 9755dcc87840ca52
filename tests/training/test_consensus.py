"""One process decides alone; many are in tests/parallel/test_failures.py."""

import pytest

from dsattn.errors import DataError
from dsattn.training import consensus


def test_one_process_decides_alone() -> None:
    assert (consensus.size(), consensus.rank()) == (1, 0)
    assert consensus.most([1, 2]) == [1, 2]
    assert consensus.everyone("a") == ["a"]
    assert consensus.together(lambda: 3) == consensus.on_first(lambda: 3) == 3


@pytest.mark.parametrize("decide", [consensus.together, consensus.on_first])
def test_its_errors_are_its_own(decide) -> None:
    def fail() -> None:
        raise DataError("no text")

    with pytest.raises(DataError, match=r"^no text$"):
        decide(fail)
