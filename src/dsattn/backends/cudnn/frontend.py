"""The package behind these adapters: its generations, its entry points, the scratch that its ranking takes.

before 1.26  no `q_causal_offsets`: scores are causal from the bottom right; ids of keys are global
1.26         `q_causal_offsets`, and without it causal from the top left; `topk_indices_global` says what ids are
1.29         rows without keys are safe in the attention backward, which takes `deterministic`; `grad_loss` is a tensor
1.31         `tie_break` in the ranking
1.32         `deterministic` in the ranking and in the indexer's backward

What a version has is read from its signatures, so that a build with a feature ahead of its number is served as what it
is. A frontend that is causal from the top left and takes no offsets is refused.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsattn.backends import Call, scratch_bytes
from dsattn.backends.vendors import dotted, version_of

DISTRIBUTION = "nvidia-cudnn-frontend"
GLOBAL_IDS = (1, 26)
_ALIGNED_BYTES = 32

Entry = Callable[..., Any]

# What these adapters and the benchmarks call.
ENTRIES = (
    "indexer_forward",
    "indexer_top_k",
    "indexer_backward",
    "sparse_attention_backward",
    "sparse_attn_score_recompute",
    "sparse_indexer_score_recompute",
)


def needs_of(call: Call, version: tuple[int, ...]) -> dict[str, bool]:
    """What every operation needs: need in words -> whether it is met. The package is not imported."""
    return {
        f"{DISTRIBUTION} {dotted(version)} or newer": version_of(DISTRIBUTION) >= version,
        "a Hopper or Blackwell data-centre GPU": call.capability in (90, 100, 103),
        f"bfloat16 operands, not {call.dtype}": call.dtype == "bfloat16",
    }


@functools.cache
def entries() -> dict[str, Entry]:
    """Those of ENTRIES that this generation has, all resolved at the first call.

    The namespace imports a function's module when it is first asked for, and the import leaves cycles that keep the
    frames of its callers alive, tensors and all: they are collected once, behind the last, and never while a graph is
    captured. Raises ImportError without the package.
    """
    namespace, found = importlib.import_module("cudnn").DSA, {}
    for name in ENTRIES:
        with contextlib.suppress(Exception):  # whatever an import may raise: `entry` does, for those who need it
            found[name] = getattr(namespace, f"{name}_wrapper")
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        gc.collect()
    return found


def entry(name: str) -> Entry:
    """`cudnn.DSA`'s function `name_wrapper`. Raises what the package raises where its generation has none."""
    return entries().get(name) or getattr(importlib.import_module("cudnn").DSA, f"{name}_wrapper")


@functools.cache
def takes(function: Entry, parameter: str) -> bool:
    """Whether a function of this generation has a parameter."""
    return parameter in inspect.signature(function).parameters


def supported(function: Entry, **options: Any) -> dict[str, Any]:
    """Those of the options that this generation has parameters for."""
    return {name: value for name, value in options.items() if takes(function, name)}


def rows_per_launch(columns: int, scratch: int | None = None) -> int:
    """Rows of scores [rows, columns] that one launch of the ranking may take. scratch: bytes; None asks the settings.

    Its scratch is two int32 for each score, and its offsets are int32. Rounded down so that the next launch begins at a
    multiple of 32 bytes; one such group at least.
    """
    columns = max(columns, 1)
    scratch = scratch_bytes() if scratch is None else scratch
    most = min(scratch // 8, 2**30) // columns
    group = _ALIGNED_BYTES // math.gcd(_ALIGNED_BYTES, 4 * columns)
    return max(most // group, 1) * group


def padded_slots(x: Tensor, multiple: int, value: float) -> Tensor:
    """x with its last axis a multiple, contiguous."""
    more = -x.shape[-1] % multiple
    return pad(x, (0, more), value=value).contiguous() if more else x.contiguous()
