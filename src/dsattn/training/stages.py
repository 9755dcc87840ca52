"""What learns in each mode, with which optimiser and learning rate.

mode     backbone   indexer
dense    learns     fixed (and not run)
warmup   fixed      learns
sparse   learns     learns
frozen   learns     fixed
"""

import math

import torch
from torch import nn

from dsattn.config import Mode, StageConfig, TrainConfig
from dsattn.errors import InputError
from dsattn.model.decoder import Decoder
from dsattn.parallel.apply import Parallel, Stages
from dsattn.parallel.fsdp import follow_mode

Model = Decoder | Stages

_LEARNS: dict[str, tuple[bool, bool]] = {
    "dense": (True, False),
    "warmup": (False, True),
    "sparse": (True, True),
    "frozen": (True, False),
}


def learns(mode: Mode) -> tuple[bool, bool]:
    """(backbone learns, indexer learns)."""
    return _LEARNS[mode]


def set_mode(model: Model, mode: Mode) -> None:
    """Set `requires_grad` of every parameter by `mode`, and drop gradients of what no longer learns.

    Collective with FSDP2. Raises InputError where the mode would train an indexer and the model has none.
    """
    backbone, indexer = learns(mode)
    index_parameters = _index_parameters(model)
    if indexer and "dsa" not in model.config.types:
        raise InputError(f"mode={mode!r} trains an indexer, but the model has none; add a dsa layer")
    for parameter in model.parameters():
        parameter.requires_grad_(indexer if id(parameter) in index_parameters else backbone)
        parameter.grad = None
    follow_mode(model)


def audit(whole: Parallel, mode: Mode) -> list[str]:
    """Lines that say which parameters of the whole model get gradients, how many: what a start prints. Collective."""
    index_parameters = _index_parameters(whole.model)
    counts = {"embedding and head": [0, 0, 0], "layers": [0, 0, 0], "indexers": [0, 0, 0]}
    for name, parameter in whole.named_parameters():
        outside = "layers" if ".layers." in name else "embedding and head"
        count = counts["indexers" if id(parameter) in index_parameters else outside]
        for place, more in enumerate((1, parameter.numel(), parameter.numel() * parameter.requires_grad)):
            count[place] += more
    found = whole.of_all_stages([number for count in counts.values() for number in count])
    lines = [f"mode {mode}: {sum(found[2::3]):,} parameters learn"]
    for group, tensors, elements, learning in zip(counts, found[::3], found[1::3], found[2::3], strict=True):
        lines.append(f"  {group:18s} {elements:>14,} in {tensors:4d} tensors: {'learn' if learning else 'fixed'}")
    return lines


def make_optimizer(model: Model, train: TrainConfig, stage: StageConfig) -> torch.optim.AdamW:
    """AdamW over what learns; vectors (norms, biases, sinks) get no weight decay.

    Each group says its `kind`, matrices or vectors; of one kind there are as many as ways to lie on ranks, since one
    fused step takes tensors of one mesh.
    """
    decays = {"matrices": train.weight_decay, "vectors": 0.0}
    groups: dict[tuple[str, object], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = "matrices" if parameter.dim() >= 2 else "vectors"
            groups.setdefault((kind, getattr(parameter, "device_mesh", None)), []).append(parameter)
    given = [{"params": params, "weight_decay": decays[kind], "kind": kind} for (kind, _), params in groups.items()]
    if not given:  # a pipeline stage without indexers, in a warm-up: its settings are saved for those of all stages
        given = [{"params": [], "weight_decay": train.weight_decay, "kind": "matrices"}]
    return torch.optim.AdamW(given, lr=stage.lr, betas=(train.beta1, train.beta2), fused=True)


def learning_rate(stage: StageConfig, step: int) -> float:
    """Rate of the stage's step 0, 1, ...: linear warm-up, then a half cosine down to `lr_final * lr`."""
    if step < stage.lr_warmup:
        return stage.lr * (step + 1) / stage.lr_warmup
    span = max(stage.steps - stage.lr_warmup - 1, 1)
    progress = min((step - stage.lr_warmup) / span, 1.0)
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return stage.lr * (stage.lr_final + (1 - stage.lr_final) * share)


def _index_parameters(model: Model) -> set[int]:
    return {id(parameter) for indexer in model.indexers() for parameter in indexer.parameters()}
