"""Which layers select keys and which reuse a selection (Megatron Core's IndexShare; GLM-5.2, Hunyuan V4).

Layers are counted from 1. The first max(offset, 1) of them all select, and so does every `every`-th one after those;
a layer between reuses the selection of the nearest one before it that selects.
"""

from collections.abc import Sequence

from dsattn.config import LayerType
from dsattn.errors import InputError


def selects(layer: int, *, every: int, offset: int) -> bool:
    """Whether `layer` (from 1) selects. Raises InputError for layer < 1, every < 1, offset < 0."""
    return source_layer(layer, every=every, offset=offset) == layer


def source_layer(layer: int, *, every: int, offset: int) -> int:
    """The layer (from 1) whose selection `layer` uses: itself where it selects. Errors as for `selects`."""
    for name, value, least in (("layer", layer, 1), ("every", every, 1), ("offset", offset, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r} must be an integer of at least {least}")
    return layer - max(layer - max(offset, 1), 0) % every


def selecting_layers(num_layers: int, *, every: int, offset: int) -> tuple[int, ...]:
    """The layers of 1 .. num_layers that select."""
    return tuple(layer for layer in range(1, num_layers + 1) if selects(layer, every=every, offset=offset))


def selection_sources(types: Sequence[LayerType], *, every: int, offset: int) -> tuple[int | None, ...]:
    """For each layer of a model, the index (from 0) of the layer whose selection it uses; None for dense layers.

    `every` and `offset` count the `dsa` layers alone, so dense layers between them change nothing.
    """
    dsa = [index for index, kind in enumerate(types) if kind == "dsa"]
    source = {
        index: dsa[source_layer(number, every=every, offset=offset) - 1] for number, index in enumerate(dsa, start=1)
    }
    return tuple(source.get(index) for index in range(len(types)))
