"""State as flat entries, as torch.distributed.checkpoint saves them, and what differs between two sets of them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dsattn.errors import InputError

Facts = tuple[torch.Size, torch.dtype] | None
"""Shape and dtype of a tensor; None for anything else."""


def slots_of(tree: dict[str, Any], prefix: str = "") -> dict[str, tuple[dict[str, Any], str]]:
    """Dotted name -> (dict, key) of every tensor and of every largest branch without tensors."""
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if not isinstance(key, str):
            raise InputError(f"state: key {name!r} must be a string; tensors are found by their dotted names")
        deeper = isinstance(value, dict) and _holds_tensor(value)
        for inner, slot in slots_of(value, f"{name}.").items() if deeper else [(name, (tree, key))]:
            if slots.setdefault(inner, slot) is not slot:
                raise InputError(f"state: two entries are both named {inner!r}; rename one")
        if not (deeper or isinstance(value, Tensor)) and (_holds_tensor(value) or hasattr(value, "state_dict")):
            raise InputError(f"state: {name} is a {type(value).__name__}; give tensors in dicts, x.state_dict() for x")
    return slots


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset):
        return isinstance(value, Tensor)
    return any(_holds_tensor(item) for item in value)


def as_json(meta: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(meta))
    except (TypeError, ValueError) as error:
        raise InputError(f"meta must be JSON-able: {error}; use numbers, strings, lists and dicts") from error


def missing(entries: Mapping[str, Any], saved: Mapping[str, Facts]) -> Iterator[str]:
    """A sentence for each entry that was not saved."""
    for name in sorted(entries.keys() - saved.keys()):
        yield f"{name} is missing from the checkpoint"


def differing(entries: Mapping[str, Any], saved: Mapping[str, Facts]) -> Iterator[str]:
    """A sentence for each entry that was saved with another shape or dtype."""
    for name in sorted(entries.keys() & saved.keys()):
        given = facts_of(entries[name])
        if given != saved[name]:
            yield f"{name} is {_describe(saved[name])} in the checkpoint, {_describe(given)} here"


def facts_of(value: Any) -> Facts:
    """What is compared; of a DTensor, the whole one's."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _describe(facts: Facts) -> str:
    return f"{facts[1]} {list(facts[0])}" if facts else "not a tensor"
