"""What a resumed run needs to go on bit for bit: model, optimiser, random generators."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsattn.errors import CheckpointError, InputError
from dsattn.model.stage import DecoderStage
from dsattn.parallel.apply import Stages
from dsattn.training import checkpoint, consensus

_STATE, _SETTINGS = "optimizer.state", "optimizer.param_groups"  # names of entries, as those of tensors in a branch


def capture(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State of model and optimiser by parameter name, for `checkpoint.save`: views, not copies. See `restore`.

    Give the bare module, not one wrapped by `torch.compile(model)`, whose names differ. Groups of the optimiser go by
    their `kind` where they have one, so that their number, which depends on the ranks, does not matter. Collective
    where ranks hold different parameters. A stage in which nothing learns has no entry of its own for the optimiser's
    state: an empty one would stand beside those of other stages, and another mesh could not hold it. The helpers of
    `torch.distributed.checkpoint.state_dict` are not used: they step an optimiser without state once, which advances
    Adam's bias correction, and refuse to load where a parameter never had a gradient.
    """
    names = _parameter_names(model, optimizer)
    state = optimizer.state_dict()
    by_name = {names[number]: value for number, value in state["state"].items()}
    settings: dict[str, dict[str, Any]] = {}
    members: dict[str, list[str]] = {}
    for index, group in enumerate(state["param_groups"]):
        kind = _kind(group, index)
        settings[kind] = {key: value for key, value in group.items() if key != "params"}
        members.setdefault(kind, []).extend(names[number] for number in group["params"])
    settings, members = _of_all_stages(model, settings, members)
    return {
        "model": model.state_dict(),
        **({_STATE: by_name} if by_name else {}),
        _SETTINGS: settings,
        "optimizer_groups": members,
    }


def restore(path: Path, model: nn.Module, optimizer: Optimizer, rest: dict[str, Any] | None = None) -> dict[str, Any]:
    """Load what `save(..., {**capture(model, optimizer), **rest})` wrote; return `rest`, filled as by `load`.

    The mesh may be another one. The optimiser may be fresh or used; afterwards it holds exactly the saved state, also
    none for parameters that never had a gradient. Raises CheckpointError as `load` does, and where the optimiser's
    groups hold other parameters than the saved ones; nothing is changed then.
    """
    checkpoint.verify(path)
    names = _parameter_names(model, optimizer)
    state = {**capture(model, optimizer), **(rest or {})}
    _check_groups(path, state["optimizer_groups"])
    state.pop(_STATE, None)
    state |= _blank_optimizer_state(path, dict(model.named_parameters()))
    checkpoint.load(path, state, verified=True)
    groups = [
        {**state[_SETTINGS][_kind(group, index)], "params": group["params"]}
        for index, group in enumerate(optimizer.state_dict()["param_groups"])
    ]
    saved = state.get(_STATE, {})
    by_number: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(names):
        if name in saved:  # a second copy, of another stage of this rank, needs tensors of its own
            by_number[number] = _copy(saved[name]) if name in names[:number] else saved[name]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})
    return {key: state[key] for key in rest or {}}


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {field: value.clone() if isinstance(value, Tensor) else value for field, value in state.items()}


def _kind(group: dict[str, Any], index: int) -> str:
    return group.get("kind", str(index))


def _of_all_stages(
    model: nn.Module, settings: dict[str, dict[str, Any]], members: dict[str, list[str]]
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Groups and their parameters, sorted, of all pipeline ranks."""
    parts = [(settings, members)]
    if isinstance(model, DecoderStage | Stages):
        parts = consensus.everyone(parts[0])
    kinds = sorted({kind for _, part in parts for kind in part})
    held = {kind: sorted({name for _, part in parts for name in part.get(kind, ())}) for kind in kinds}
    return {kind: value for part, _ in reversed(parts) for kind, value in part.items()}, held


def rng_state() -> dict[str, Any]:
    """States of the global generators of `random`, NumPy, torch's CPU and, if CUDA is in use, every CUDA device.

    With many processes each uses one device, and only that one's.
    """
    cuda = []
    if torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all() if consensus.size() == 1 else [torch.cuda.get_rng_state()]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [state.numpy().tobytes() for state in cuda],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Set what `rng_state` returned. Raises CheckpointError where fewer CUDA devices are visible than were saved."""
    if len(state["cuda"]) > torch.cuda.device_count():
        raise CheckpointError(
            f"random states of {len(state['cuda'])} CUDA devices were saved, {torch.cuda.device_count()} are visible; "
            "make as many visible, or give up the bitwise resume with set_rng_state({**state, 'cuda': []})"
        )
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_as_tensor(state["torch"]))
    if consensus.size() > 1:
        for saved in state["cuda"][:1]:
            torch.cuda.set_rng_state(_as_tensor(saved))
        return
    for device, saved in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(_as_tensor(saved), device)


def _as_tensor(saved: bytes) -> Tensor:
    return torch.frombuffer(bytearray(saved), dtype=torch.uint8)


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The model's name of each of the optimiser's parameters, in the order of `Optimizer.state_dict`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if strangers:
        raise InputError(f"optimizer holds parameters of shapes {strangers} that model does not; give its own model")
    return [names[id(parameter)] for parameter in parameters]


def _check_groups(path: Path, expected: dict[str, list[str]]) -> None:
    saved = checkpoint.load(path, {"optimizer_groups": None}, partial=True, verified=True)["optimizer_groups"]
    if saved != expected:
        raise CheckpointError(
            f"checkpoint {path} was saved by an optimiser of other parameters: its groups hold {saved}, "
            f"this one's {expected}; build the optimiser of the saved stage"
        )


def _blank_optimizer_state(path: Path, parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Room for what was saved of the optimiser's state, by the name of its entry; empty where nothing was.

    What has its parameter's shape is also on its device, the rest on the CPU.
    """
    blank: dict[str, Any] = {}
    contents = checkpoint.contents(path)
    if _STATE in contents:  # whole, for no part of it is a tensor
        return {_STATE: None}
    for full_name, facts in contents.items():
        if not full_name.startswith(f"{_STATE}."):
            continue
        name, _, field = full_name.removeprefix(f"{_STATE}.").rpartition(".")
        if facts is None and f"{name}.{field}" in parameters:
            blank[f"{name}.{field}"] = None
        elif name in parameters:
            blank.setdefault(name, {})[field] = _blank(parameters[name], field, facts)
    return {_STATE: blank} if blank else {}


def _blank(parameter: nn.Parameter, field: str, facts: tuple[torch.Size, torch.dtype] | None) -> Tensor | None:
    if facts is None:
        return None
    shape, dtype = facts
    # A scalar parameter must not pull Adam's step counter, a scalar on the CPU, onto its device.
    if shape == parameter.shape and field != "step":
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype)
