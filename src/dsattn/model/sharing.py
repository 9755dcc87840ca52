"""Which layers select keys and which reuse a selection (Megatron Core's IndexShare; GLM-5.2, Hunyuan V4).

Layers are counted from 1. The first max(offset, 1) of them all select, and so does every `every`-th one after those;
a layer between reuses the selection of the nearest one before it that selects. `ModelConfig.selection_sources` applies
the rule (`config.source_number`), or an explicit list, to a model; `Sharing` carries what one layer hands to others.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.state import AttentionOutput, Handed, Pass
from dsattn.selection import Selection


def sharing_from_megatron(arguments: Mapping[str, Any], *, hybrid: bool = False) -> dict[str, Any]:
    """Fields of DSAConfig from `dsa_indexer_topk_freq` and `dsa_indexer_skip_topk_offset`.

    Missing ones and None are 1 and 0, and a frequency of 0 is 1, as Megatron Core runs them. It counts layers from 1,
    as here. hybrid: the model is built from a hybrid pattern, whose symbols it counts.
    """
    return {
        "share_every": arguments.get("dsa_indexer_topk_freq") or 1,
        "share_offset": arguments.get("dsa_indexer_skip_topk_offset") or 0,
        "share_numbering": "pattern" if hybrid else "dsa",
    }


def sharing_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of DSAConfig from what a Hugging Face config says of sharing; the first of these that is there decides.

    `indexer_types`: a list of full and shared. `index_topk_pattern`: the same, or a string of F and S.
    `index_topk_freq` with `index_skip_topk_offset` (default 2): layer i, counted from 0, selects where
    max(i - offset + 1, 0) is a multiple of freq. That is Megatron Core's rule, which counts from 1: the offset stays.
    Raises InputError where the first layer would share: by a pattern, or by freq above 1 with offset 0, where Megatron
    Core would take an offset of 1.
    """
    if (types := config.get("indexer_types")) is None:
        types = config.get("index_topk_pattern")
    if types is not None:
        return {"indexer_types": _indexer_types(types)}
    every, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    if every > 1 and offset < 1:
        raise InputError(
            f"index_skip_topk_offset={offset} with index_topk_freq={every} makes layer 0 share, and nobody is before "
            "it; give an offset of at least 1"
        )
    return {"share_every": every, "share_offset": offset, "share_numbering": "layers"}


def _indexer_types(given: str | Sequence[str]) -> tuple[str, ...]:
    names = {"F": "full", "S": "shared"}
    types = tuple(names.get(one, one) if isinstance(given, str) else one for one in given)
    for index, kind in enumerate(types):
        if kind not in names.values():
            raise InputError(f"{given!r} has {kind!r} at {index}; it must hold full and shared, or F and S in a string")
    if types[:1] == ("shared",):
        raise InputError(f"{given!r} makes layer 0 share, and nobody is before it; it must begin with a full layer")
    return types


class Sharing:
    """What the layers of one forward of one micro-batch hand to later ones: selections, and indexers to be taught.

    sources: `ModelConfig.selection_sources`, or that of the layers which run here. teach: layers that share a selection
    teach the indexer that made it (`DSAConfig.multi_layer_teacher`). Made by the forward and gone with it.

    selections: by index of the layer that selected.
    """

    def __init__(self, sources: Sequence[int | None], *, teach: bool = False):
        self.selections: dict[int, Selection] = {}
        self._sources = sources
        self._teach = teach
        self._indexers: dict[int, IndexerOutput] = {}
        self._kl: dict[int, list[Tensor]] = {}

    def before(self, layer: int, run: Pass) -> tuple[Selection | None, Pass]:
        """The selection that `layer` is to use, None where it makes its own; and its pass."""
        source = self._sources[layer]
        if source is None or source == layer:
            return None, run
        if (index := self._indexers.get(source)) is not None:
            run = dataclasses.replace(run, handed=Handed(index=index))
        return self.selections.get(source), run

    def after(self, layer: int, out: AttentionOutput, *, key: int | None = None) -> None:
        """Keep what later layers need of `layer`'s output. key: its index in results, None for `layer`."""
        source, key = self._sources[layer], layer if key is None else key
        own = source == layer
        if own and out.selection is not None:
            self.selections[key] = out.selection
        if own and self._teach and out.kl is not None and out.index is not None:
            self._indexers[layer] = out.index
        if out.kl is not None:
            self._kl.setdefault(key if own or source is None else source, []).append(out.kl)

    @property
    def kl(self) -> dict[int, Tensor]:
        """By index of the layer whose indexer learns: its own KL, or the mean over all layers that taught it."""
        return {layer: parts[0] if len(parts) == 1 else torch.stack(parts).mean() for layer, parts in self._kl.items()}
