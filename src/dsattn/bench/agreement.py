"""Whether a peer's result is that of the same work: else its time says nothing."""

from typing import Any

import torch
from torch import Tensor

from dsattn.bench.trials import Trial


def disagreement(trial: Trial, name: str, ours: Any, theirs: Any) -> str:
    """Why a peer's result is not that of the same work, empty where it is.

    Tensors may differ by 3 % in norm, as far as the peer returns them; selections in 2 % of their keys, in 20 % where
    fp8 scores chose them beside bf16. Ours in bf16 is no such peer of a lower precision.
    """
    if (trial.op, name) in (("dsa_layer", "torch"), ("select_keys", "bf16")):
        return ""
    if trial.op.startswith("select"):
        other_precision = name == "deep_gemm" and trial.setting.precision == "bf16"
        found, allowed = _differing_keys(ours, theirs, trial.setting.keys), 0.2 if other_precision else 0.02
        return f"selects {found:.1%} other keys" if found > allowed else ""
    for number, (mine, other) in enumerate(zip(_flat(ours), _flat(theirs), strict=False)):
        distance = float((mine.float() - other.float()).norm() / mine.float().norm().clamp(min=1e-30))
        if not distance <= 0.03:
            return f"result {number} differs by {distance:.1%} from ours"
    return ""


def _differing_keys(ours: Tensor, theirs: Tensor, num_keys: int) -> float:
    row = torch.linspace(0, len(ours) - 1, min(len(ours), 64), device=ours.device).long()
    mine, other = (_mask(index[row], num_keys) for index in (ours, theirs))
    return float((mine & ~other).sum() / mine.sum().clamp(min=1))


def _mask(index: Tensor, num_keys: int) -> Tensor:
    held = torch.zeros(len(index), num_keys + 1, dtype=torch.bool, device=index.device)
    return held.scatter_(1, torch.where(index < 0, num_keys, index).long(), True)[:, :num_keys]


def _flat(results: Any) -> list[Tensor]:
    found = [results] if isinstance(results, Tensor) else list(results)
    return [x for x in found if isinstance(x, Tensor)]
