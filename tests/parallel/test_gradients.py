"""One rank; norms over ranks are compared in test_agreement.py, where every case clips."""

import pytest
import torch
from torch import nn

from dsattn.parallel.gradients import clip, local
from dsattn.parallel.mesh import ParallelMesh


def parameters(scale: float) -> list[tuple[str, nn.Parameter]]:
    made = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in (("a", (3, 4)), ("b", (5,)), ("c", (2,)))]
    for number, (name, one) in enumerate(made):
        if name != "c":
            one.grad = scale * torch.randn(one.shape, generator=torch.Generator().manual_seed(number))
    return made


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_one_rank_clips_as_torch_does(scale: float) -> None:
    ours, torchs = parameters(scale), parameters(scale)
    norm = clip(ours, 1.0, ParallelMesh(), frozenset())
    expected = nn.utils.clip_grad_norm_([one for _, one in torchs], 1.0)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for (_, a), (_, b) in zip(ours, torchs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_copies_are_scaled_and_not_counted() -> None:
    given = parameters(10.0)
    (_, a), (_, b) = given[:2]
    assert a.grad is not None
    assert b.grad is not None
    alone, before = float(b.grad.norm()), a.grad.clone()
    assert clip(given, 1.0, ParallelMesh(), frozenset({"a"})) == pytest.approx(alone, rel=1e-6)
    torch.testing.assert_close(a.grad, before / alone, rtol=1e-4, atol=0)


def test_a_norm_that_is_not_finite_is_returned() -> None:
    given = parameters(1.0)
    gradient = given[0][1].grad
    assert gradient is not None
    gradient[0, 0] = torch.inf
    assert clip(given, 1.0, ParallelMesh(), frozenset()) == float("inf")


def test_no_gradient_at_all_is_no_error() -> None:
    assert clip([("c", nn.Parameter(torch.zeros(2)))], 1.0, ParallelMesh(), frozenset()) == 0.0
    assert local(torch.ones(2)).shape == (2,)
