"""Norms whose statistics are fp32 and whose output has the input's dtype, and the Hadamard rotation.

Torch's own norms return fp32 under autocast or refuse their fast path where a bf16 input meets fp32 weights; an op that
takes queries and keys of one dtype needs the input's back.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsattn.errors import InputError


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467), in the wider dtype of input and weight."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape and dtype."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x - mean) / std * weight + bias over the last dimension (arXiv 1607.06450).

    fp32: compute in fp32 even where input and weight are both narrower (Hunyuan V4's indexer keys).
    """

    def __init__(self, width: int, eps: float, fp32: bool = False):
        super().__init__(width, eps=eps)
        self.fp32 = fp32

    def forward(self, input: Tensor) -> Tensor:
        """input [..., D] -> the same shape and dtype."""
        wide = torch.promote_types(input.dtype, self.weight.dtype)
        if self.fp32:
            wide = torch.promote_types(wide, torch.float32)
        # Copies, for the backward: FSDP2 may free the weights, and in a warm-up gathers none again.
        weight, bias = self.weight.to(wide, copy=True), self.bias.to(wide, copy=True)
        return F.layer_norm(input.to(wide), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the Hadamard matrix of Sylvester's order, normalised: orthogonal and its own inverse.

    O(D log D), in fp32 (fp64 for fp64), returned in x's dtype. Raises InputError unless D is a power of two.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise InputError(
            f"x has {width} lanes; the Hadamard rotation needs a power of two: pad the lanes or leave it off"
        )
    out = x.to(torch.promote_types(x.dtype, torch.float32))
    half = 1
    while half < width:
        a, b = out.unflatten(-1, (width // (2 * half), 2, half)).unbind(-2)
        out = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return (out * width**-0.5).to(x.dtype)
