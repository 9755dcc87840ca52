"""DeepGEMM: indexer scores in low precision, ranked by whichever row of `select_topk` serves.

`auto` takes it where ours do not serve: in mxfp8 on Blackwell. In fp8 every record is behind ours: by name.

`fp8` on Hopper and Blackwell: E4M3 with one fp32 scale a key, a query's scale folded into its weight, which relu allows
because a scale is positive. `mxfp8` on Blackwell, never run: E4M3 with a power of two for every 32 channels, four of
them packed into an int32. Wheel `sgl-deep-gemm`; 0.1.x works with torch 2.11.

Quirks, kept here: 32 or 64 heads on Hopper, also 8 and 16 on Blackwell; width 32, 64 or 128 (128 in mxfp8), always
relu. Ranges go in as they are. The first versions fill what is outside of them unless told not to, later ones never do;
nobody reads it here. Scores come as rows of padded columns, at offsets that must stay below 2^31. Kernels are compiled
for a geometry when it first runs, so not while a graph is captured, and for one device of a process.
Letters: T query rows, S keys, H indexer heads, D indexer width, K kept keys.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import Call, unmet
from dsattn.backends.vendors import is_capturing, select_in_blocks
from dsattn.errors import BackendUnavailable
from dsattn.quantize import pack_exponents, to_e4m3, to_mxfp8

_COLUMNS = 256  # a row of scores has so many more, and a multiple of them
_HEADS = {90: (32, 64), 100: (8, 16, 32, 64), 103: (8, 16, 32, 64)}


@dataclass(frozen=True)
class Fp8Operands:
    """q: [T, H, D] E4M3. k: [S, D] E4M3 with k_scale [S]. w: [T, H] fp32.

    fp8: k_scale is fp32, w is times the scales of q, q_scale is None. mxfp8: k_scale and q_scale [T, H] are int32 of
    four exponents, the first block's in the lowest byte.
    """

    q: Tensor
    k: Tensor
    k_scale: Tensor
    w: Tensor
    q_scale: Tensor | None = None

    def rows(self, part: slice) -> "Fp8Operands":
        """Those of some query rows."""
        q_scale = None if self.q_scale is None else self.q_scale[part]
        return Fp8Operands(self.q[part], self.k, self.k_scale, self.w[part], q_scale)


def requirements(call: Call) -> list[str]:
    """What `call` of `select_keys` lacks, in words; the package is not imported."""
    micro = call.precision == "mxfp8"
    heads = _HEADS.get(call.capability, ())
    needs = {
        "precision 'fp8' or 'mxfp8'": call.precision in ("fp8", "mxfp8"),
        "a Hopper or Blackwell data-centre GPU": bool(heads),
        "a Blackwell data-centre GPU for mxfp8": not micro or call.capability >= 100,
        f"{' or '.join(map(str, heads))} indexer heads": call.heads in heads or not heads,
        "an indexer width of 128" if micro else "an indexer width of 32, 64 or 128": call.width
        in ((128,) if micro else (32, 64, 128)),
    }
    return unmet(needs)


def select_keys(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    top_k: int,
    relu: bool,
    return_scores: bool,
    block_bytes: int,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(index [T, K], length [T], no score [T, 0]): the arguments of `low_precision_reference`.

    The operator makes the scores that are returned, from the operands as given. Raises BackendUnavailable without relu,
    on a second device, and where a graph is captured before this geometry has run.
    """
    if not relu:
        raise BackendUnavailable("select_keys: deep_gemm's scores have a relu; use backend='triton' or 'reference'")
    if 0 in (len(q), len(k)):
        index = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
        length = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    else:
        operands = quantized(q, k, w, precision)
        start, stop = start.clamp(min=0), stop.clamp(max=len(k))
        stop = torch.maximum(start, stop)

        def score_rows(part: slice) -> Tensor:
            return indexer_scores(operands.rows(part), start[part], stop[part], clean=False)

        index, length = select_in_blocks(score_rows, start, stop, top_k, rows_per_call(len(k), block_bytes))
    return index, length, q.new_empty(len(q), 0, dtype=torch.float32)


def rows_per_call(keys: int, block_bytes: int) -> int:
    """Rows whose padded scores fit into block_bytes, at offsets below 2^31; at least one."""
    columns = -(-(keys + _COLUMNS) // _COLUMNS) * _COLUMNS
    return max(min(block_bytes // (4 * columns), (2**31 - 1) // columns), 1)


def indexer_scores(operands: Fp8Operands, start: Tensor, stop: Tensor, *, clean: bool = True) -> Tensor:
    """[T, S] fp32 scores; outside of `start[t] .. stop[t] - 1` -inf, or anything where not `clean`.

    Raises ImportError without the package.
    """
    run = _function(operands.q_scale is not None)
    _admit(operands)
    q = (
        operands.q.contiguous()
        if operands.q_scale is None
        else (operands.q.contiguous(), operands.q_scale.contiguous())
    )
    keys = (operands.k.contiguous(), operands.k_scale.contiguous())
    options = {"clean_logits": clean, "max_seqlen_k": 0}
    taken = {name: value for name, value in options.items() if _takes(run, name)}
    scores = run(q, keys, operands.w.contiguous(), start.contiguous(), stop.contiguous(), **taken)
    _compiled.add(_geometry(operands))
    if not isinstance(scores, Tensor):
        scores = torch.from_dlpack(scores)
    scores = scores[:, : len(operands.k)]
    if clean and not _takes(run, "clean_logits"):
        column = torch.arange(len(operands.k), dtype=torch.int32, device=start.device)
        scores = scores.masked_fill((column < start[:, None]) | (column >= stop[:, None]), -torch.inf)
    return scores


def quantized(q: Tensor, k: Tensor, w: Tensor, precision: str) -> Fp8Operands:
    """The operands in `fp8` or `mxfp8`, as `dsattn.quantize` rounds them."""
    if precision == "mxfp8":
        (q8, q_exponent), (k8, k_exponent) = to_mxfp8(q), to_mxfp8(k)
        return Fp8Operands(q8, k8, pack_exponents(k_exponent)[..., 0], w.float(), pack_exponents(q_exponent)[..., 0])
    (q8, q_scale), (k8, k_scale) = to_e4m3(q), to_e4m3(k)
    return Fp8Operands(q8, k8, k_scale, w.float() * q_scale)


_compiled: set[tuple[Any, ...]] = set()
_device: list[torch.device] = []


def _admit(operands: Fp8Operands) -> None:
    """Raise BackendUnavailable on a second device, and where a kernel would be compiled during capture."""
    device = operands.q.device
    if _device and _device[0] != device:
        raise BackendUnavailable(
            f"select_keys: deep_gemm runs on one device of a process, {_device[0]}, not {device}; use backend='triton'"
        )
    if _geometry(operands) not in _compiled and is_capturing(operands.q):
        raise BackendUnavailable(
            f"select_keys: deep_gemm has not run with {operands.q.shape[1]} heads of {operands.q.shape[2]} yet, and "
            "would compile inside a CUDA graph; run the call once before the capture"
        )
    _device[:] = [device]


def _geometry(operands: Fp8Operands) -> tuple[Any, ...]:
    """What kernels are compiled for."""
    return tuple(operands.q.shape[1:]), operands.q_scale is None


def _function(micro: bool) -> Callable[..., Any]:
    import deep_gemm

    names = ("fp8_fp4_mqa_logits",) if micro else ("fp8_mqa_logits", "fp8_fp4_mqa_logits")
    found = next((getattr(deep_gemm, name) for name in names if hasattr(deep_gemm, name)), None)
    if found is None:
        raise BackendUnavailable(f"select_keys: this deep_gemm has no {' and no '.join(names)}; install sgl-deep-gemm")
    return found


@functools.cache
def _takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters
