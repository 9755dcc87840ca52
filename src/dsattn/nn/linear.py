"""Weights that may be split over ranks: a layer computes with this rank's part."""

import torch.nn.functional as F
from torch import Tensor, nn


def local(weight: Tensor) -> Tensor:
    """This rank's part of a DTensor, attached to autograd; any other tensor as it is."""
    part = getattr(weight, "to_local", None)
    return weight if part is None else part()


class Linear(nn.Linear):
    """x W^T + b with this rank's part of W and b."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in here] -> [..., out here]."""
        return F.linear(input, local(self.weight), None if self.bias is None else local(self.bias))
