"""Activation recompute of a patched model: parts of its layers give their memory back and run again in the backward.

    policy      runs again                                              kept for it
    selective   attention behind its first projections, and the MLP     what enters the two, what attention projects
                                                                        from hidden states
    full        the whole layer                                         what enters it

As in `parallel.recompute`, a replay selects nothing, repeats no loss of an indexer, and does not run an indexer that is
fixed. Experts are transformers' own code: a replay routes again, from the same numbers. Dropout of adapters repeats.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dsattn.config import Recompute
from dsattn.integrations.microbatch import MICROBATCH, Microbatch, Report
from dsattn.nn.state import Part
from dsattn.parallel.recompute import PARTS, Checkpoints, Stash, checkpointed, tensors

Forward = Callable[..., Any]


def runs_again(policy: Recompute, part: Part, forward: Forward) -> Forward:
    """`forward(module, ...)`, which a backward calls again where the policy names this part."""
    return functools.partial(_run, Checkpoints(policy), forward) if part in PARTS[policy] else forward


def other_parts(policy: Recompute, bodies: list[nn.Module]) -> Iterator[tuple[str, nn.Module, Forward]]:
    """(name, module, its forward) of the parts that run again, beside attention layers."""
    for body in bodies:
        for name, layer in body.get_submodule("layers").named_children():
            if "layer" in PARTS[policy]:
                yield f"layers.{name}", layer, runs_again(policy, "layer", _of_class)
            if "mlp" in PARTS[policy]:
                yield f"layers.{name}.mlp", layer.get_submodule("mlp"), runs_again(policy, "mlp", _of_class)


def _of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _run(checkpoints: Checkpoints, forward: Forward, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In a checkpoint of its own where the call trains. The first argument, or hidden_states, is its input."""
    if not (module.training and torch.is_grad_enabled()):
        return forward(module, *args, **kwargs)
    stash = Stash(checkpoints.keeps)
    given: Microbatch | None = kwargs.pop(MICROBATCH, None)
    microbatch = None if given is None else given.part(stash, Report(owned=True, closed=True))
    # The first pass takes it out: a loss holds its checkpoint, which must not hold the loss.
    reports = [] if given is None else [given.report]
    read = () if given is None else (given.layout, given.documents)
    hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())

    def again(hidden: Tensor, *_: Tensor) -> Any:
        if microbatch is None:
            return forward(module, hidden, *rest, **kwargs)
        here = microbatch.part(stash, reports.pop()) if reports else microbatch
        return forward(module, hidden, *rest, **kwargs, **{MICROBATCH: here})

    inputs = (hidden, *tensors((rest, tuple(kwargs.values()), read)))
    return checkpointed(stash, again, *inputs, preserve_rng_state=True)
