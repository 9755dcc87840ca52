"""RoPE as Hugging Face configurations say it (`rope_parameters`), and as `RopeConfig` does."""

import math
from typing import Any

from dsattn.config import RopeConfig
from dsattn.errors import InputError
from dsattn.integrations.hf_fields import Fields


def rope_from_hf(model_type: str, fields: Fields) -> RopeConfig:
    """The frequencies of a config with every field filled in. Raises InputError for kinds other than default and YaRN.

    transformers multiplies cos and sin by `attention_factor`, else by m(mscale) / m(mscale_all_dim), else by m(1).
    Families with MLA also scale logits by m(mscale_all_dim)^2, as RopeConfig means it; those with GQA do not.
    """
    rope = fields["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"partial_rotary_factor={rope['partial_rotary_factor']} must be 1 for {model_type}")
    if kind == "default":
        return RopeConfig(base=rope["rope_theta"])
    if kind != "yarn" or rope.get("truncate", True) is False:
        raise InputError(f"rope_parameters={rope} must have rope_type default, or yarn with truncate")
    original = rope["original_max_position_embeddings"]
    factor = float(rope["factor"] or fields["max_position_embeddings"] / original)
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    wanted = rope.get("attention_factor")
    if wanted is None:
        wanted = (1 + mscale * growth) / (1 + all_dim * growth) if mscale and all_dim else 1 + growth
    coefficient = float(all_dim or 0.0)
    return RopeConfig(
        base=rope["rope_theta"],
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=_mscale(wanted * (1 + coefficient * growth), growth, mscale),
        mscale_all_dim=coefficient,
    )


def _mscale(concentration: float, growth: float, given: float | None) -> float:
    """The m with 1 + m growth = concentration: `given` or 1 where either fits."""
    for m in (given, 1.0):
        if m is not None and math.isclose(1 + m * growth, concentration, rel_tol=1e-12):
            return float(m)
    if growth == 0 or concentration < 1:
        raise InputError(f"attention_factor asks for m(mscale)={concentration}, which no mscale of at least 0 gives")
    return (concentration - 1) / growth


def rope_to_hf(rope: RopeConfig) -> Fields:
    """`rope_parameters` of these frequencies."""
    if rope.scaling == "none":
        return {"rope_type": "default", "rope_theta": rope.base}
    fields: Fields = {
        "rope_type": "yarn",
        "rope_theta": rope.base,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
    }
    if rope.mscale and rope.mscale_all_dim:
        return fields | {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    factor = rope.concentration(rope.mscale) / rope.concentration(rope.mscale_all_dim)
    return fields | {"attention_factor": factor, "mscale_all_dim": rope.mscale_all_dim}


def rope_facts(rope: RopeConfig) -> dict[str, Any]:
    """What decides the table, under the names of fields: two configurations with the same facts rotate alike."""
    ratio = rope.concentration(rope.mscale) / rope.concentration(rope.mscale_all_dim)
    said: dict[str, Any] = {"base": rope.base, "scaling": rope.scaling, "concentration": round(ratio, 12)}
    if rope.scaling != "none":
        names = ("factor", "original_max_position", "beta_fast", "beta_slow")
        said |= {name: getattr(rope, name) for name in names}
    return said
