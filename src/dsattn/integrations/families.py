"""What the Hugging Face families with a lightning indexer have in common, and where each differs.

All of them are multi-latent attention with an indexer of the DeepSeek-V3.2 shape, and share the names of parameters.
Read from transformers 5.24.0; `sources` are fingerprints of the code that was read.
"""

import hashlib
import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from dsattn.errors import InputError


@dataclass(frozen=True)
class Family:
    """One family.

    prefix: what the names of its classes start with. heads: names of classes that compute a language model's loss.
    index_interleaved, index_first: the indexer's RoPE pairs neighbours (else halves), and turns its first lanes (else
        last). interleaved: the same for attention, which always turns its last lanes.
    gate: how attention's output is gated. returns_index: attention returns its selection, for layers that share it.
    mask_keys: layer types for which the model would make masks. sources: fingerprints of the classes that are replaced.
    """

    model_type: str
    prefix: str
    heads: tuple[str, ...]
    sources: frozenset[str]
    index_interleaved: bool
    index_first: bool = True
    interleaved: bool = True
    gate: Literal["none", "fused", "elementwise", "headwise"] = "none"
    returns_index: bool = False
    mask_keys: tuple[str, ...] = field(default=("indexed_attention",))

    @property
    def body(self) -> str:
        """The class that makes masks and runs the layers."""
        return f"{self.prefix}Model"

    @property
    def attention(self) -> str:
        """The class whose forward is replaced."""
        return f"{self.prefix}Attention"


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "deepseek_v32",
            "DeepseekV32",
            ("DeepseekV32ForCausalLM",),
            frozenset({"a83d3e3637417213"}),
            index_interleaved=False,
        ),
        Family(
            "glm_moe_dsa",
            "GlmMoeDsa",
            ("GlmMoeDsaForCausalLM",),
            frozenset({"a8160f46b26a1371"}),
            index_interleaved=True,
            returns_index=True,
        ),
        Family(
            "axk2", "AXK2", ("AXK2ForCausalLM",), frozenset({"337a2341b9459464"}), index_interleaved=False, gate="fused"
        ),
        Family(
            "hy_v4",
            "HYV4",
            ("HYV4ForCausalLM",),
            frozenset({"9c1ec068aca2d674"}),
            index_interleaved=False,
            index_first=False,
            interleaved=False,
            gate="elementwise",
            returns_index=True,
        ),
        Family(
            "mistral_large4_text",
            "MistralLarge4Text",
            ("MistralLarge4ForConditionalGeneration",),
            frozenset({"3d6391d21a21dcf3"}),
            index_interleaved=True,
            returns_index=True,
        ),
        Family(
            "dots3_note_text",
            "Dots3NoteText",
            ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
            frozenset({"987a622842a57063"}),
            index_interleaved=True,
            gate="headwise",
            mask_keys=("full_attention", "sliding_attention", "indexed_attention"),
        ),
    )
}

# Families with an indexer whose attention is not served: what stands in the way.
NOT_YET = {
    "glm5_next": "it selects pools of keys and has linear attention layers",
    "minimax_m3_vl": "it selects blocks of keys for each key/value group",
    "qwen4_exp": "it selects pools of keys for grouped-query attention",
    "deepseek_v4": "it selects among compressed keys",
}


def class_names(module: nn.Module) -> set[str]:
    """Names of the module's class and its bases: FSDP puts a class of its own in front."""
    return {cls.__name__ for cls in type(module).__mro__}


def family_of(model: nn.Module) -> tuple[Family, list[nn.Module]]:
    """The model's family and its bodies, for a model that may be wrapped. Raises InputError for any other model."""
    for family in FAMILIES.values():
        if bodies := [module for module in model.modules() if family.body in class_names(module)]:
            return family, bodies
    config = getattr(model, "config", None)
    name = getattr(config, "model_type", type(model).__name__)
    known = ", ".join(FAMILIES)
    if why := NOT_YET.get(str(name).removesuffix("_text")):
        raise InputError(f"model_type={name!r} is not supported yet: {why}; supported: {known}")
    raise InputError(f"model_type={name!r} has no attention that dsattn knows; supported: {known}")


def fingerprint(body: Any) -> str:
    """Hash of the source of the classes on which the replacement relies."""
    attention = [layer.self_attn for layer in body.layers]
    indexers = [layer.indexer for layer in attention if getattr(layer, "indexer", None) is not None]
    digest = hashlib.sha256()
    for module in (body, body.layers[0], attention[0], *indexers[:1]):
        cls = next(cls for cls in type(module).__mro__ if not cls.__name__.startswith("FSDP"))
        digest.update(inspect.getsource(cls).encode())
    return digest.hexdigest()[:16]
