"""Our DSA in a model of Megatron Core (0.19 on): the same constructors, tensors and checkpoint keys, other kernels.

    spec = get_transformer_block_with_experimental_attention_variant_spec(config)   # or a hybrid stack's, or MTP's
    spec = with_dsattn(spec, config)                # our core attention
    spec = with_dsattn(spec, config, whole=True)    # and our self-attention around it

A checkpoint of Megatron's DSA goes on training as it is. docs/megatron.md says how closely the two agree.
"""

import dataclasses
import functools
from typing import Any

from dsattn.errors import InputError
from dsattn.integrations.megatron_attention import CoreAttention
from dsattn.integrations.megatron_config import Options, check_config
from dsattn.integrations.megatron_loss import set_loss_scale
from dsattn.integrations.megatron_mla import SelfAttention
from dsattn.integrations.megatron_model import from_megatron, parallel_from_megatron

__all__ = [
    "Options",
    "core_attention",
    "from_megatron",
    "parallel_from_megatron",
    "self_attention",
    "set_loss_scale",
    "with_dsattn",
]

_CORE, _WHOLE, _MTP = "DSAttention", "AbsorbedMLASelfAttention", "MultiTokenPredictionBlockSubmodules"


@functools.cache
def core_attention() -> type:
    """The class that goes where Megatron's DSAttention stands, made from it: see `megatron_attention`."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    return type(_CORE, (CoreAttention, DSAttention), {"__module__": __name__, "__doc__": CoreAttention.__doc__})


@functools.cache
def self_attention() -> type:
    """The class that goes where Megatron's AbsorbedMLASelfAttention stands, made from it: see `megatron_mla`."""
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention

    bases = (SelfAttention, AbsorbedMLASelfAttention)
    return type(_WHOLE, bases, {"__module__": __name__, "__doc__": SelfAttention.__doc__})


def with_dsattn(spec: Any, config: Any, *, whole: bool = False, options: Options | None = None) -> Any:
    """A copy of `spec` with our classes where Megatron's DSA stands, at any depth.

    spec: a ModuleSpec or a dataclass of submodules: of a layer, a GPT block, a hybrid stack, a block of MTP layers.
    config: the model's. whole: replace the absorbed self-attention, too.
    Layers inside a block of MTP layers are numbered behind the decoder's.
    Raises ConfigError with every field of `config` that cannot be honoured, InputError where there is no DSAttention.
    """
    check_config(config, whole=whole)
    change = _Change(whole, options or Options(), config.num_layers)
    changed = change(spec, 0)
    if not change.count:
        raise InputError(
            "spec holds no DSAttention; make it with experimental_attention_variant='dsa', or take a hybrid stack's"
        )
    return changed


class _Change:
    def __init__(self, whole: bool, options: Options, num_layers: int):
        self.count, self._whole, self._options, self._num_layers = 0, whole, options, num_layers

    def __call__(self, spec: Any, layer_offset: int) -> Any:
        if isinstance(spec, list | tuple):
            return type(spec)(self(one, layer_offset) for one in spec)
        if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
            return spec
        if type(spec).__name__ == _MTP:
            layer_offset = self._num_layers
        held = {item.name: getattr(spec, item.name) for item in dataclasses.fields(spec)}
        changed = {name: self(value, layer_offset) for name, value in held.items() if name != "module"}
        name = _class_name(held.get("module"))
        if name == _CORE:
            self.count += 1
            params = {"options": self._options, "layer_offset": layer_offset, "whole": self._whole}
            changed |= {"module": core_attention(), "params": {**held["params"], **params}}
        elif name == _WHOLE and self._whole:
            changed |= {"module": self_attention(), "params": {**held["params"], "options": self._options}}
        return dataclasses.replace(spec, **changed)


def _class_name(module: Any) -> str | None:
    """Of a spec's module: a class, or the (path, name) of one."""
    return module[1] if isinstance(module, tuple) else getattr(module, "__name__", None)
