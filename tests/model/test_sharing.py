import pytest

from dsattn.errors import InputError
from dsattn.model.sharing import selecting_layers, selection_sources, selects, source_layer


@pytest.mark.parametrize(
    ("offset", "every", "layers", "selecting", "sources"),
    [
        (0, 4, 10, (1, 5, 9), {2: 1, 3: 1, 4: 1, 6: 5, 7: 5, 8: 5, 10: 9}),
        (1, 4, 10, (1, 5, 9), {2: 1, 3: 1, 4: 1, 6: 5, 7: 5, 8: 5, 10: 9}),
        (3, 4, 16, (1, 2, 3, 7, 11, 15), {4: 3, 5: 3, 6: 3, 8: 7, 9: 7, 10: 7, 12: 11, 13: 11, 14: 11, 16: 15}),
        (2, 2, 8, (1, 2, 4, 6, 8), {3: 2, 5: 4, 7: 6}),
        (0, 1, 4, (1, 2, 3, 4), {}),
    ],
)
def test_published_patterns(offset, every, layers, selecting, sources):
    assert selecting_layers(layers, every=every, offset=offset) == selecting
    for layer in range(1, layers + 1):
        assert source_layer(layer, every=every, offset=offset) == sources.get(layer, layer)
        assert selects(layer, every=every, offset=offset) == (layer in selecting)


def test_the_count_of_a_long_model():
    assert len(selecting_layers(78, every=4, offset=3)) == 21
    assert len(selecting_layers(79, every=4, offset=3)) == 22
    assert selecting_layers(79, every=4, offset=3)[-2:] == (75, 79)
    assert selecting_layers(0, every=4, offset=3) == ()


@pytest.mark.parametrize(
    ("layer", "every", "offset", "name"),
    [(0, 1, 0, "layer"), (1, 0, 0, "every"), (1, 1, -1, "offset"), (1.0, 1, 0, "layer"), (True, 1, 0, "layer")],
)
def test_bad_integers(layer, every, offset, name):
    with pytest.raises(InputError, match=f"{name}=.* must be an integer"):
        source_layer(layer, every=every, offset=offset)


def test_dense_layers_are_not_counted():
    types = ("dense", "dsa", "dense", "dsa", "dsa", "dsa", "dense")
    assert selection_sources(types, every=2, offset=0) == (None, 1, None, 1, 4, 4, None)
    assert selection_sources(("dense",) * 2, every=2, offset=0) == (None, None)
