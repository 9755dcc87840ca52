"""Weights that may be split over ranks: a layer computes with this rank's part."""

import torch.nn.functional as F
from torch import Tensor, nn


def local(weight: Tensor) -> Tensor:
    """This rank's part of a DTensor, attached to autograd; any other tensor as it is."""
    # By its type: `torch.compile` traces that, and importing DTensor takes a second.
    return weight.to_local() if hasattr(type(weight), "to_local") else weight  # pyright: ignore[reportAttributeAccessIssue]


class Linear(nn.Linear):
    """x W^T + b with this rank's part of W and b."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in here] -> [..., out here]."""
        return F.linear(input, local(self.weight), None if self.bias is None else local(self.bias))
