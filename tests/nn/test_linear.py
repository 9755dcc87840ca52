"""A layer computes with this rank's part of a weight, and that part gets the gradient."""

import torch
from torch import nn

from dsattn.nn.linear import Linear, local


class Part(nn.Parameter):
    """Stands for a DTensor, of which this rank holds the first two rows."""

    def to_local(self) -> torch.Tensor:
        return self[:2]


def test_a_plain_weight_is_itself():
    weight = nn.Parameter(torch.randn(3, 4))
    assert local(weight) is weight


def test_equals_torch_with_and_without_bias():
    x = torch.randn(5, 4)
    for bias in (False, True):
        ours, plain = Linear(4, 3, bias=bias), nn.Linear(4, 3, bias=bias)
        plain.load_state_dict(ours.state_dict())
        assert torch.equal(ours(x), plain(x))


def test_works_with_the_part_here():
    linear = Linear(4, 3, bias=False)
    whole = linear.weight.detach().clone()
    linear.weight = Part(whole)
    x = torch.randn(5, 4)
    out = linear(x)
    torch.testing.assert_close(out, x @ whole[:2].T)
    out.sum().backward()
    assert linear.weight.grad[:2].any()
    assert not linear.weight.grad[2:].any()
