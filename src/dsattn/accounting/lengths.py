"""What a token costs to train as documents grow: dense attention, DSA, DSA whose layers share their selections."""

import dataclasses

from dsattn.accounting.model import model_work
from dsattn.config import Mode, ModelConfig
from dsattn.errors import InputError

SHARE_EVERY, SHARE_OFFSET = 4, 3  # GLM-5.2's, for models that do not share
MOST = 2**24  # tokens of the longest document that is tried


def variants(config: ModelConfig, mode: Mode = "sparse") -> dict[str, tuple[ModelConfig, Mode]]:
    """Name -> (model, mode): `dense`, `DSA` and `DSA, shared selection` of one model with `dsa` layers.

    mode: of the latter two, `sparse` or `frozen`. A model that shares keeps its own rule. Raises InputError otherwise.
    """
    if mode not in ("sparse", "frozen"):
        raise InputError(f"mode={mode!r} reads every key; compare in mode 'sparse' or 'frozen'")
    if "dsa" not in config.types:
        raise InputError("layer_types has no dsa layer, so there is nothing to compare; give layers indexers")
    alone = dataclasses.replace(
        config.dsa, share_every=1, share_offset=0, indexer_types=None, multi_layer_teacher=False
    )
    shared = config.dsa
    if not shared.shares:
        shared = dataclasses.replace(alone, share_every=SHARE_EVERY, share_offset=SHARE_OFFSET, share_numbering="dsa")
    return {
        "dense": (config, "dense"),
        "DSA": (dataclasses.replace(config, dsa=alone), mode),
        "DSA, shared selection": (dataclasses.replace(config, dsa=shared), mode),
    }


def flops_per_token(config: ModelConfig, mode: Mode, length: int) -> float:
    """Of a training step over one document of `length` tokens."""
    if length < 1:
        raise InputError(f"length={length} must be at least 1")
    return model_work(config, [length], mode).flops / length


def crossover(cheaper: tuple[ModelConfig, Mode], dense: tuple[ModelConfig, Mode]) -> int | None:
    """The document length from which on `cheaper` costs fewer FLOPs than `dense`; None where it never does.

    Both grow evenly with length, dense attention faster, so there is one such length. Kernels decide about time:
    `dsattn bench` measures that.
    """

    def wins(length: int) -> bool:
        return flops_per_token(*cheaper, length) < flops_per_token(*dense, length)

    if not wins(MOST):
        return None
    below, reached = 0, 1
    while not wins(reached):
        below, reached = reached, 2 * reached
    while reached - below > 1:
        middle = (below + reached) // 2
        below, reached = (below, middle) if wins(middle) else (middle, reached)
    return reached
