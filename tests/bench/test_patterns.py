import numpy as np
import pytest
import torch

from dsattn import KeyRange, Layout
from dsattn.bench.patterns import BINS, RECENCY, UNIFORM, Pattern, draw, measure
from dsattn.errors import InputError
from dsattn.selection import Selection

KEYS = Layout.continuation(200, 300).keys


def distances(selection: Selection) -> torch.Tensor:
    return (KEYS.stop[:, None] - 1 - selection.index)[selection.index >= 0].float()


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("pattern", [UNIFORM, RECENCY], ids=["uniform", "recency"])
def test_draws_distinct_visible_keys(pattern, shuffled):
    selection = draw(pattern, Layout.causal(60).keys, 60, 16, shuffled=shuffled)
    assert selection.length.tolist() == [min(row + 1, 16) for row in range(60)]
    for row, index in enumerate(selection.index.tolist()):
        kept = index[: min(row + 1, 16)]
        assert len(set(kept)) == len(kept)
        assert set(kept) <= set(range(row + 1))
        assert shuffled or kept == sorted(kept)


def test_shuffled_holds_the_same_keys_in_another_order():
    plain, mixed = (draw(UNIFORM, KEYS, 500, 40, shuffled=shuffled) for shuffled in (False, True))
    assert torch.equal(Selection.from_index(mixed.index).index, plain.index)
    ascending = (mixed.index[:, 1:] > mixed.index[:, :-1]).float().mean()
    assert 0.4 < ascending < 0.6


def test_draws_are_the_same_each_time_and_for_any_split_of_rows():
    whole = draw(RECENCY, KEYS, 500, 20).index
    assert torch.equal(whole, draw(RECENCY, KEYS, 500, 20).index)
    assert torch.equal(whole[100:], draw(RECENCY, KEYS.row_slice(100, 300), 500, 20).index)


def test_uniform_is_uniform_and_recency_is_not():
    uniform, recent = (distances(draw(pattern, KEYS, 500, 40)).mean() for pattern in (UNIFORM, RECENCY))
    expected = float(KEYS.stop.float().mean() - 1) / 2
    assert abs(float(uniform) - expected) < 0.05 * expected
    assert recent < 0.8 * uniform


def test_more_slots_than_keys():
    assert draw(UNIFORM, Layout.causal(5).keys, 5, 9).length.tolist() == [1, 2, 3, 4, 5]


def test_rows_that_see_nothing_select_nothing():
    none = KeyRange(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    assert draw(UNIFORM, none, 8, 4).length.tolist() == [0, 0, 0]


@pytest.mark.parametrize("pattern", [UNIFORM, RECENCY, Pattern(np.ones(BINS), stay=20.0)], ids=["1", "8", "20"])
def test_what_is_drawn_is_what_is_measured(pattern):
    """Replaying a measured pattern gives selections that measure alike."""
    first = measure([(draw(pattern, KEYS, 500, 40), KEYS)], "made")
    again = measure([(draw(first, KEYS, 500, 40), KEYS)], "replayed")
    assert first.rows == again.rows == 300
    assert again.stay == pytest.approx(first.stay, rel=0.35)
    mean = [(p.density * np.linspace(0, 1, BINS)).sum() / p.density.sum() for p in (first, again)]
    assert mean[1] == pytest.approx(mean[0], abs=0.05)


def test_measure_of_a_window():
    """The last 40 keys: all near, and 39 of 40 stay."""
    index = KEYS.stop[:, None] - 1 - torch.arange(40, dtype=torch.int32)
    found = measure([(Selection.from_index(index), KEYS)], "window")
    assert found.stay == pytest.approx(40.0)
    assert not found.density[-5:].any()
    assert found.density[:10].max() == 1.0


def test_rows_that_select_everything_do_not_count():
    keys = Layout.causal(30).keys
    with pytest.raises(InputError, match="no row sees more keys than it selects"):
        measure([(draw(UNIFORM, keys, 30, 30), keys)], "all")


def test_saved_patterns_come_back(tmp_path):
    path = tmp_path / "deep" / "pattern.npz"
    pattern = measure([(draw(RECENCY, KEYS, 500, 40), KEYS)], "runs/x")
    pattern.save(path)
    found = Pattern.load(path)
    assert np.array_equal(found.density, pattern.density)
    assert (found.stay, found.rows, found.source) == (pattern.stay, 300, "runs/x")
    assert path.stat().st_size < 4096


def test_load_refuses_other_files(tmp_path):
    (tmp_path / "x.npz").write_text("no")
    np.savez(tmp_path / "y.npz", density=np.ones(BINS))
    for name, density in (("short.npz", np.ones(3)), ("nan.npz", np.full(BINS, np.nan))):
        np.savez(tmp_path / name, density=density, stay=1.0, rows=0, source="")
    UNIFORM.save(tmp_path / "whole.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:200])
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "one.npy", np.ones(BINS))
    for name in ("x.npz", "y.npz", "short.npz", "nan.npz", "cut.npz", "empty.npz", "one.npy", "missing.npz"):
        with pytest.raises(InputError, match="holds no recorded selection"):
            Pattern.load(tmp_path / name)
