"""What the Hugging Face families with a lightning indexer have in common, and where each differs.

All of them are multi-latent attention with an indexer of the DeepSeek-V3.2 shape, and share the names of parameters;
glm5_next selects pools of keys, and most of its layers are linear attention. `SOURCES` has fingerprints of the code of
transformers that was read.
"""

import hashlib
import inspect
import sys
from dataclasses import dataclass
from typing import Literal

from torch import nn

from dsattn.errors import InputError


@dataclass(frozen=True)
class Family:
    """One family.

    prefix: what the names of its classes start with. heads: names of classes that compute a language model's loss.
    index_interleaved, index_first: the indexer's RoPE pairs neighbours (else halves), and turns its first lanes (else
        last). interleaved: the same for attention, which always turns its last lanes.
    gate: how attention's output is gated. returns_index: attention returns its selection, for layers that share it.
    mask_keys: layer types for which the model would make masks. pools: the indexer selects pools of keys (KPool).
    """

    model_type: str
    prefix: str
    heads: tuple[str, ...]
    index_interleaved: bool = False
    index_first: bool = True
    interleaved: bool = True
    gate: Literal["none", "fused", "elementwise", "headwise"] = "none"
    returns_index: bool = False
    mask_keys: tuple[str, ...] = ("indexed_attention",)
    pools: bool = False

    @property
    def body(self) -> str:
        """The class that makes masks and runs the layers."""
        return f"{self.prefix}Model"

    @property
    def attention(self) -> str:
        """The class whose forward is replaced."""
        return f"{self.prefix}Attention"

    @property
    def linear_attention(self) -> str:
        """The class of layers that keep a state instead of keys, where there are any."""
        return f"{self.prefix}LinearAttention"

    @property
    def sources(self) -> dict[str, str]:
        """Release of transformers -> fingerprint of the classes that are replaced, as they are in it."""
        return {version: known[self.model_type] for version, known in SOURCES.items()}


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "deepseek_v32",
            "DeepseekV32",
            ("DeepseekV32ForCausalLM",),
            index_interleaved=False,
        ),
        Family(
            "glm_moe_dsa",
            "GlmMoeDsa",
            ("GlmMoeDsaForCausalLM",),
            index_interleaved=True,
            returns_index=True,
        ),
        Family("axk2", "AXK2", ("AXK2ForCausalLM",), index_interleaved=False, gate="fused"),
        Family(
            "hy_v4",
            "HYV4",
            ("HYV4ForCausalLM",),
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
            index_interleaved=True,
            returns_index=True,
        ),
        Family(
            "dots3_note_text",
            "Dots3NoteText",
            ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
            index_interleaved=True,
            gate="headwise",
            mask_keys=("full_attention", "sliding_attention", "indexed_attention"),
        ),
        Family(
            "glm5_next_text",
            "Glm5NextText",
            ("Glm5NextForConditionalGeneration",),
            returns_index=True,
            mask_keys=("indexed_attention", "linear_attention"),
            pools=True,
        ),
    )
}

SOURCES = {
    "5.23.0": {
        "deepseek_v32": "250807ebeba17105",
        "glm_moe_dsa": "2f785a9b67a8f64e",
        "axk2": "d45e74bf96ac15ab",
        "hy_v4": "7d4ed15212c39f8a",
        "mistral_large4_text": "49aa5de54afe2149",
        "dots3_note_text": "1ed3fcd156082884",
        "glm5_next_text": "5fab480678f550fc",
    },
    "5.24.0": {
        "deepseek_v32": "a83d3e3637417213",
        "glm_moe_dsa": "a8160f46b26a1371",
        "axk2": "337a2341b9459464",
        "hy_v4": "9c1ec068aca2d674",
        "mistral_large4_text": "3d6391d21a21dcf3",
        "dots3_note_text": "987a622842a57063",
        "glm5_next_text": "3bbc183c10a7d807",
    },
}
"""Release of transformers -> model type -> fingerprint. Another release with the same code is known too."""

# Families with an indexer whose attention is not served: what stands in the way.
NOT_YET = {
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


def fingerprint(family: Family, body: nn.Module) -> str:
    """Hash of the source of the classes on which the replacement relies, in the module that the body comes from."""
    genuine = next(cls for cls in type(body).__mro__ if cls.__name__ == family.body)
    module = sys.modules[genuine.__module__]
    parts = ("Model", "DecoderLayer", "Attention", "LinearAttention", "Indexer")
    classes = (getattr(module, f"{family.prefix}{part}", None) for part in parts)
    digest = hashlib.sha256()
    for cls in classes:
        digest.update(b"" if cls is None else inspect.getsource(cls).encode())
    return digest.hexdigest()[:16]
