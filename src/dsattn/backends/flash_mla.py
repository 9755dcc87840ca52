"""FlashMLA: the sparse MLA forward of DeepSeek. It has no backward.

Three distributions share the import name `flash_mla`. `sgl-flash-mla` serves Hopper through kernels behind
`use_legacy`, and Blackwell with current kernels for width 512 and legacy ones for 576. `tokenspeed-flashmla` serves
Blackwell alone. `flash-mla` served both until September 2026; its first versions took no `topk_length` and no sink.

Quirks, kept here: 64 or 128 heads, slots in multiples of 128 with -1 in empty ones, latents of 512 + 64 or 512, bf16, a
scale above 0. The log-sum-exp is natural in the code and to base 2 in some documents, so it is measured; it is +inf in
rows without keys, whose output is 0. A sink enters the denominator alone. Results repeat bit for bit.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsattn.backends import Call, unmet
from dsattn.backends.vendors import is_capturing, positive_scale, version_of
from dsattn.errors import BackendUnavailable

# Distribution -> compute capabilities it has sparse forward kernels for. `flash-mla` depends on its age.
BUILDS = {"sgl-flash-mla": (90, 100, 103), "tokenspeed-flashmla": (100, 103), "flash-mla": (90, 100, 103)}
_KEYS = 128  # two tiles of keys a step

Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def requirements(call: Call) -> list[str]:
    """What `call` lacks, in words; the package is not imported."""
    build = next((name for name in BUILDS if version_of(name)), "flash-mla")
    served = BUILDS[build]
    needs = {
        f"compute capability {' or '.join(str(one / 10) for one in served)} for {build}": call.capability in served,
        f"bfloat16 operands, not {call.dtype}": call.dtype == "bfloat16",
        "width 512 or 576 with 512 values": call.width in (512, 576) and call.value_width == 512,
        "at most 128 heads": call.heads <= 128,
    }
    return unmet(needs)


def sparse_mla_forward(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V], lse [T, H]), argument for argument as the reference's forward.

    Heads are padded with zeros to 64 or 128, slots with -1 to a multiple of 128. Raises ImportError without the
    package, BackendUnavailable where a CUDA graph is captured before the log-sum-exp was measured.
    """
    from flash_mla import flash_mla_sparse_fwd

    rows, heads, _ = q.shape
    if 0 in (rows, heads, len(kv)):
        return q.new_zeros(rows, heads, value_dim), q.new_full((rows, heads), -torch.inf, dtype=torch.float32)
    unit = _unit_of_lse(flash_mla_sparse_fwd, q.device, q.shape[2])
    q, scale, _ = positive_scale(q, scale)
    wide = 64 if heads <= 64 else 128
    q = q.contiguous() if wide == heads else pad(q, (0, 0, 0, wide - heads))
    slots = max(-(-index.shape[1] // _KEYS), 1) * _KEYS
    index = pad(index, (0, slots - index.shape[1]), value=-1)
    padded_sink = None if sink is None else pad(sink.float(), (0, wide - heads)).contiguous()
    operands = (q, kv.contiguous()[:, None], index.contiguous()[:, None])
    out, lse = _run(flash_mla_sparse_fwd, operands, scale, value_dim, padded_sink, length.contiguous())
    empty = length[:, None] == 0
    out, lse = out[:, :heads].contiguous(), lse[:, :heads] * unit
    if sink is not None and not _takes(flash_mla_sparse_fwd, "attn_sink"):
        share = torch.sigmoid(lse - sink.float()).masked_fill(empty, 0.0)
        out = (out * share[..., None]).to(q.dtype)
    return out, lse.masked_fill(empty, -torch.inf)


def _run(
    forward: Forward,
    operands: tuple[Tensor, Tensor, Tensor],
    scale: float,
    value_dim: int,
    sink: Tensor | None,
    length: Tensor,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as the package gives them. operands: q [T, H, C], kv [S, 1, C], index [T, 1, K]."""
    q = operands[0]
    options: dict[str, Any] = {"attn_sink": sink, "topk_length": length}
    # The current kernels are Blackwell's, for width 512.
    options["use_legacy"] = torch.cuda.get_device_capability(q.device)[0] == 9 or q.shape[2] == 576
    taken = {name: value for name, value in options.items() if _takes(forward, name)}
    out, _, lse = forward(*operands, scale, d_v=value_dim, **taken)
    return out, lse


@functools.cache
def _takes(forward: Forward, name: str) -> bool:
    return name in inspect.signature(forward).parameters


_units: dict[tuple[Forward, torch.device, int], float] = {}


def _unit_of_lse(forward: Forward, device: torch.device, width: int) -> float:
    """What turns the package's log-sum-exp into a natural one: 1, or ln 2. Measured once, on two equal logits."""
    key = (forward, device, width)
    if key not in _units:
        q = torch.zeros(1, 64, width, dtype=torch.bfloat16, device=device)
        if is_capturing(q):
            raise BackendUnavailable(
                "sparse_mla.forward: flash_mla has not run yet, and the base of its log-sum-exp cannot be measured "
                "inside a CUDA graph; run the call once before the capture"
            )
        index = torch.full((1, 1, _KEYS), -1, dtype=torch.int32, device=device)
        index[..., :2] = torch.arange(2, dtype=torch.int32, device=device)
        length = torch.full((1,), 2, dtype=torch.int32, device=device)
        _, lse = _run(forward, (q, q[0, :2, None], index), 1.0, 512, None, length)
        _units[key] = _unit(float(lse[0, 0]))
    return _units[key]


def _unit(measured: float) -> float:
    """measured: the log-sum-exp of two logits of 0."""
    if abs(measured - math.log(2)) < 1e-3:
        return 1.0
    if abs(measured - 1) < 1e-3:
        return math.log(2)
    raise BackendUnavailable(
        f"sparse_mla.forward: flash_mla gives {measured} as the log-sum-exp of two zeros, which is to no known base; "
        "use backend='hopper' or 'triton'"
    )
