"""Names of weights in Hugging Face checkpoints, and in `Decoder.state_dict()`. They are the same but for these:

    Hugging Face                                          dsattn
    mlp.experts.0.gate_proj.weight, .up_proj, .down_proj  mlp.experts.gate_up_proj [E, 2 I, M], .down_proj [E, M, I]
    model.layers.N.embed_tokens.weight                    none: a layer of multi-token prediction uses the model's own
    model.layers.N.shared_head.head.weight                none: likewise
    lm_head.weight                                        none where it is tied to the embedding
    rotary_emb.inv_freq                                   none: it follows from the configuration

Experts that transformers saved fused have our names and shapes. Values are kept: float16 and bfloat16 widen to float32.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dsattn.config import ModelConfig
from dsattn.integrations.stored import LastRead, Stored, Tensors, check
from dsattn.model.decoder import Decoder

_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)(gate_up_proj|down_proj)")
_DERIVED = re.compile(r".*\brotary_emb\.inv_freq")
_BLOCK = 128
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything in `Decoder(config).state_dict()`; allocates nothing."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}


def holds_mtp(tensors: Mapping[str, Stored], config: ModelConfig) -> bool:
    """Whether any tensor belongs to a layer of multi-token prediction of `config`."""
    layers = range(config.num_layers, len(config.all_types))
    return any(name.startswith(tuple(f"model.layers.{layer}." for layer in layers)) for name in tensors)


def dequantised(tensors: Tensors) -> Tensors:
    """Float8 weights with their `weight_scale_inv`, one for each 128 x 128 block, as one bfloat16 weight.

    That holds their products exactly where scales are powers of two; others are rounded, as by DeepSeek's own code.
    """
    plain: Tensors = {}
    for name, one in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None and one.dtype == torch.float8_e4m3fn and len(one.shape) == 2:
            plain[name] = Stored(one.shape, torch.bfloat16, _scaled(one, scale))
        elif not name.endswith("_scale_inv") or name.removesuffix("_scale_inv") not in tensors:
            plain[name] = one
    return plain


def from_hf_names(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The weights of `Decoder(config)`, in float32, out of a Hugging Face checkpoint's.

    Raises CheckpointError with everything that is missing, that nothing uses, or whose shape or dtype does not fit, and
    for a copy of embedding or head (see above) that differs from it: this model has one.
    """
    found: Tensors = {}
    used: set[str] = set()
    problems: list[str] = []
    for name, shape in shapes(config).items():
        parts = _parts(name, shape)
        sources = {name: shape} if name in tensors or parts is None else parts
        used |= sources.keys()
        bad = [problem for one, wanted in sources.items() for problem in _misfit(one, wanted, tensors)]
        problems += bad
        if not bad:
            found[name] = joined(shape, [tensors[one] for one in sources])
    copies = _copies(config)
    for name in sorted(tensors.keys() - used):
        if name in copies and copies[name] in tensors:
            if not torch.equal(tensors[name].read(), tensors[copies[name]].read()):
                problems.append(f"{name} differs from {copies[name]}, and this model has one for both")
        elif not _DERIVED.fullmatch(name):
            problems.append(f"{name} belongs to nothing in this model")
    check("the checkpoint does not fit its configuration", problems)
    return found


def to_hf_names(tensors: Tensors, config: ModelConfig) -> Tensors:
    """A Hugging Face checkpoint's weights out of those of `Decoder(config)`: experts one by one, copies for MTP layers.

    Parts of one tensor follow each other, so that a writer in this order reads it once.
    """
    last = LastRead()
    named: Tensors = {}
    for name, one in tensors.items():
        parts = _parts(name, one.shape)
        if parts is None:
            named[name] = one
            continue
        for number, (part, shape) in enumerate(parts.items()):
            named[part] = Stored(shape, one.dtype, _slice_reader(last, one, number, len(parts), shape))
    head = _EMBEDDING if config.tie_embeddings else _HEAD
    layers = range(config.num_layers, len(config.all_types))
    for layer in layers:
        named[f"model.layers.{layer}.embed_tokens.weight"] = tensors[_EMBEDDING]
        named[f"model.layers.{layer}.shared_head.head.weight"] = tensors[head]
    return named


def joined(shape: tuple[int, ...], parts: list[Stored]) -> Stored:
    """One float32 tensor of `parts`, all alike and one after the other."""

    def read() -> Tensor:
        whole = torch.empty(len(parts), *parts[0].shape)
        for place, part in zip(whole, parts, strict=True):
            place.copy_(part.read())
        return whole.view(shape)

    return parts[0].to(torch.float32) if parts[0].shape == shape else Stored(shape, torch.float32, read)


def _parts(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of the tensors that a fused one is made of, in its order; None for others."""
    fused = _EXPERTS.fullmatch(name)
    if fused is None:
        return None
    prefix, kind = fused.groups()
    experts, rows, columns = shape
    if kind == "down_proj":
        return {f"{prefix}{expert}.down_proj.weight": (rows, columns) for expert in range(experts)}
    pairs = itertools.product(range(experts), ("gate_proj", "up_proj"))
    return {f"{prefix}{expert}.{half}.weight": (rows // 2, columns) for expert, half in pairs}


def _slice_reader(
    last: LastRead, whole: Stored, number: int, count: int, shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        part = last.read(whole).view(count, *shape)[number].clone()
        if number == count - 1:
            last.forget()
        return part

    return read


def _scaled(weight: Stored, scale: Stored) -> Callable[[], Tensor]:
    blocks = tuple(-(-size // _BLOCK) for size in weight.shape)
    check("a float8 weight has no scale for each block", [f"scales are {scale.shape}"] * (scale.shape != blocks))

    def read() -> Tensor:
        rows, columns = weight.shape
        spread = scale.read().float().repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
        return (weight.read().float() * spread).bfloat16()

    return read


def _copies(config: ModelConfig) -> dict[str, str]:
    """Copy -> what it is a copy of."""
    head = _EMBEDDING if config.tie_embeddings else _HEAD
    copies = {_HEAD: _EMBEDDING} if config.tie_embeddings else {}
    for layer in range(config.num_layers, len(config.all_types)):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = _EMBEDDING
        copies[f"model.layers.{layer}.shared_head.head.weight"] = head
    return copies


def _misfit(name: str, shape: tuple[int, ...], tensors: Tensors) -> Iterator[str]:
    one = tensors.get(name)
    if one is None:
        yield f"{name} is missing"
        return
    if one.shape != shape:
        yield f"{name} is {list(one.shape)}, must be {list(shape)}"
    if one.dtype not in _FLOATS:
        yield f"{name} is {one.dtype}, must be float32, bfloat16 or float16: dequantise it first"
