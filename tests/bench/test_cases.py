import pytest
import torch

from dsattn import KeyRange
from dsattn.bench.cases import SHAPES, Operands, Setting, described, gqa, indexer, mla, shape_named
from dsattn.errors import InputError

SMALL = SHAPES["small"]


def setting(**changes) -> Setting:
    return Setting(**{"shape": SMALL, "rows": 20, "keys": 50, **changes})


def test_rows_are_the_last_of_one_sequence():
    ranges = setting().ranges
    assert ranges.start.tolist() == [0] * 20
    assert ranges.stop.tolist() == list(range(31, 51))
    assert setting().visible_pairs == int(ranges.lengths().sum())
    assert setting().ranges.start.dtype == torch.int32


@pytest.mark.parametrize("order", ["ascending", "random", "recency"])
def test_selection_keeps_to_the_ranges(order):
    given = setting(order=order, rows=50)
    selection = given.selection()
    assert torch.equal(selection.length, given.ranges.lengths().clamp(max=SMALL.top_k))
    for row, (index, length) in enumerate(zip(selection.index.tolist(), selection.length.tolist(), strict=True)):
        assert len(set(index[:length])) == length
        assert max(index[:length]) <= row
        assert set(index[length:]) <= {-1}
        assert order == "random" or index[:length] == sorted(index[:length])


def test_without_lengths_every_slot_counts():
    with_lengths, without = (setting(rows=50, lengths=known).selection() for known in (True, False))
    assert torch.equal(with_lengths.index, without.index)
    assert (without.length == SMALL.top_k).all()
    assert (with_lengths.length < SMALL.top_k).any()


def test_recorded_needs_a_pattern():
    with pytest.raises(InputError, match="order='recorded' needs a pattern"):
        setting(order="recorded")


@pytest.mark.parametrize("rows", [0, 51])
def test_refuses_more_rows_than_keys(rows):
    with pytest.raises(InputError, match=f"rows={rows} must be between 1 and keys=50"):
        setting(rows=rows)


def test_operands_have_the_shapes_that_a_record_tells():
    given = setting()
    selection = given.selection()
    latent, grouped, scored = mla(given, 0, selection), gqa(given, 0, None), indexer(given, 0)
    assert described(given, latent) == {
        "T": 20,
        "S": 50,
        "H": 4,
        "K": 16,
        "H_I": None,
        "D": None,
        "order": "ascending",
        "lengths": True,
        "C": 24,
        "V": 16,
        "G": None,
    }
    assert described(given, grouped)["K"] == 0
    assert described(given, grouped)["G"] == 2
    assert described(given, scored) | {"H_I": 4, "D": 16, "K": 16, "H": None} == described(given, scored)
    assert latent.q.shape == (20, 4, 24)
    assert latent.k.shape == (50, 24)
    assert latent.grad_out.shape == (20, 4, 16)
    assert grouped.v.shape == (50, 2, 16)
    assert [tuple(x.shape) for x in scored.tensors] == [(20, 4, 16), (50, 16), (20, 4)]
    assert selection.index is latent.tensors[-1]


def test_operands_repeat_and_differ_by_seed():
    given = setting(dtype=torch.bfloat16)
    one, again, other = (mla(given, seed, None) for seed in (1, 1, 2))
    assert one.q.dtype == torch.bfloat16
    assert torch.equal(one.q, again.q)
    assert not torch.equal(one.q, other.q)


def test_take_names_what_is_missing():
    with pytest.raises(InputError, match="no lse, scores"):
        Operands(q=torch.zeros(1)).take("q", "lse", "scores")


def test_shapes_by_name():
    assert shape_named("glm", top_k=None) == SHAPES["glm"]
    assert shape_named("deepseek", top_k=512).top_k == 512
    assert shape_named("deepseek").heads == 128
    with pytest.raises(InputError, match="shape='gml' must be one of glm, deepseek, hunyuan, small"):
        shape_named("gml")
    with pytest.raises(InputError, match="no field size"):
        shape_named("glm", size=3)


def test_ranges_are_made_once():
    given = setting()
    assert isinstance(given.ranges, KeyRange)
    assert given.ranges is given.ranges
