"""Kimi Delta Attention of flash-linear-attention (wheel `fla-core`): chunks of 64 rows on tensor cores.

Its quirks, kept here: a batch of one with `cu_seqlens`, states in fp32, a faster path for log decays in -5 .. 0.
It brings its own backward. Its table of chunks is made from the host's lengths and copied over in every call.
Letters: T rows, H heads, d key width, V value width, N documents.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from dsattn.backends import Call, unmet


def requirements(call: Call) -> list[str]:
    """What `call` lacks, in words; the package is looked for, not imported."""
    if call.device != "cuda":
        return ["a CUDA GPU"]
    needs = {
        "the package fla (fla-core)": importlib.util.find_spec("fla") is not None,
        "Ampere or newer": call.capability >= 80,
        "bfloat16, float16 or float32": call.dtype != "float64",
        "heads of at most 256": call.width <= 256,
    }
    return unmet(needs)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
    state: Tensor | None,
    bounded: bool,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V], states [N, H, d, V] fp32), argument for argument as the reference, and `bounded`.

    Raises ImportError without the package.
    """
    from fla.ops.kda import chunk_kda

    ends = torch.tensor([0, *lengths]).cumsum(0)
    out, last = chunk_kda(
        *(x.contiguous()[None] for x in (q, k, v, log_decay, beta)),
        initial_state=None if state is None else state.float().contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        safe_gate=bounded,
        cu_seqlens=ends.to(q.device, non_blocking=True),
        cu_seqlens_cpu=ends,
    )
    return out[0], last
