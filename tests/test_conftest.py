"""The guards of tests/conftest.py are on; without them a read before a write passes by luck."""

from collections.abc import Callable

import pytest
import torch


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)),
        lambda: torch.empty_strided((2, 2), (1, 2), dtype=torch.float64),
        lambda: torch.zeros(2).new_empty(3),
        lambda: torch.zeros(2).new_empty_strided((2,), (2,)),
        lambda: torch.empty(3, requires_grad=True),
    ],
)
def test_floats_are_nan(make: Callable[[], torch.Tensor]) -> None:
    assert make().isnan().all()


def test_integers_are_the_largest() -> None:
    assert torch.empty(3, dtype=torch.int32).eq(2**31 - 1).all()
    assert torch.empty(3, dtype=torch.bool).all()


def test_reaches_into_custom_ops_and_backward() -> None:
    @torch.library.custom_op("dsattn_tests::hole", mutates_args=())
    def hole(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape)

    hole.register_autograd(lambda ctx, grad: torch.empty(grad.shape))
    x = torch.zeros(3, requires_grad=True)
    out = hole(x)
    out.sum().backward()
    assert out.isnan().all()
    assert x.grad is not None
    assert x.grad.isnan().all()


def test_device_contexts_and_compile_still_work() -> None:
    with torch.device("meta"):
        assert torch.empty(3).is_meta

    def double(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape)
        out.copy_(2 * x)
        return out

    assert torch.compile(double, fullgraph=True, backend="eager")(torch.ones(2)).eq(2).all()


def test_determinism_is_off_and_comes_back_off() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)


def test_the_test_before_left_nothing() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
