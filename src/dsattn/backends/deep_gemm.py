"""DeepGEMM: indexer scores in fp8 E4M3 (wheel `sgl-deep-gemm`; 0.1.x works with torch 2.11).

Its quirks, kept here: 32 or 64 heads on Hopper, width 32, 64 or 128, always relu, one scale a key row; a query's scale
is folded into its weight, which relu allows because a scale is positive. It writes the whole score matrix, in fp32.
Letters: T query rows, S keys, H indexer heads, D indexer width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = 448.0  # of E4M3


@dataclass(frozen=True)
class Fp8Operands:
    """q: [T, H, D] E4M3. k: [S, D] E4M3 with k_scale [S] fp32. w: [T, H] fp32, times the scales of q."""

    q: Tensor
    k: Tensor
    k_scale: Tensor
    w: Tensor


def quantize(q: Tensor, k: Tensor, w: Tensor) -> Fp8Operands:
    """The operands in fp8, one scale for each vector of D channels; vectors of zeros keep scale 1."""
    q8, q_scale = _to_fp8(q)
    k8, k_scale = _to_fp8(k)
    return Fp8Operands(q8, k8, k_scale, w.float() * q_scale)


def indexer_scores(operands: Fp8Operands, start: Tensor, stop: Tensor) -> Tensor:
    """[T, S] fp32 scores, -inf outside of `start[t] .. stop[t] - 1`. Raises ImportError without the package."""
    import deep_gemm

    keys = (operands.k, operands.k_scale)
    scores = deep_gemm.fp8_mqa_logits(operands.q, keys, operands.w, start, stop, clean_logits=True)
    if not isinstance(scores, Tensor):
        scores = torch.from_dlpack(scores)
    return scores[:, : operands.k.shape[0]]


def _to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.float().abs().amax(-1)
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale
