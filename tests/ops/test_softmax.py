"""Probabilities and sinks at the ends of the number line."""

import pytest
import torch

from dsattn.ops.softmax import keys_share, lse_with_sink, probabilities, row_dot, sink_gradient, sink_share

INF, NAN = float("inf"), float("nan")


def test_probabilities() -> None:
    logits = torch.tensor([[1.0, 2.0, -INF], [1e4, 1e4, -1e4]], dtype=torch.float64)
    expected = logits.softmax(-1)
    torch.testing.assert_close(probabilities(logits.clone(), logits.logsumexp(-1)), expected)
    assert expected[0, 2] == 0


def test_a_row_without_keys_has_no_probability() -> None:
    logits = torch.full((2, 3), -INF)
    assert not probabilities(logits.clone(), logits.logsumexp(-1)).any()
    # The whole denominator of such a row may be a sink, of any size.
    for sink in (-INF, -5.0, INF):
        assert not probabilities(logits.clone(), torch.full((2,), sink)).any()


def test_probabilities_are_taken_in_place() -> None:
    logits = torch.zeros(1, 2)
    assert probabilities(logits, torch.zeros(1)) is logits


@pytest.mark.parametrize(
    ("lse", "sink", "share"),
    [
        (0.0, 0.0, 0.5),
        (0.0, -INF, 0.0),
        (0.0, INF, 1.0),
        (-INF, 0.0, 1.0),
        (-INF, -INF, 0.0),
        (-INF, INF, 1.0),
        (1e4, -1e4, 0.0),
        (-1e4, 1e4, 1.0),
    ],
)
def test_sink_share(lse: float, sink: float, share: float) -> None:
    got = sink_share(torch.tensor([[lse]]), torch.tensor([sink]))
    assert got.tolist() == [[share]]
    left = keys_share(torch.tensor([[lse]]), torch.tensor([sink]))
    assert left.tolist() == [[0.0 if lse == -INF else 1 - share]]


def test_what_a_large_sink_leaves_is_exact() -> None:
    assert keys_share(torch.zeros(1, 1), torch.tensor([20.0])).item() == pytest.approx(2.0611536e-9, rel=1e-6)


def test_lse_with_sink() -> None:
    lse = torch.tensor([[0.0, -INF]], dtype=torch.float64)
    assert lse_with_sink(lse, None) is lse
    both = lse_with_sink(lse, torch.tensor([0.0, 3.0]))
    assert both.dtype == torch.float64
    torch.testing.assert_close(both, torch.tensor([[2.0, torch.e**3]], dtype=torch.float64).log())
    assert lse_with_sink(lse, torch.full((2,), -INF)).equal(lse)


def test_row_dot_ignores_what_arrives_at_rows_without_keys() -> None:
    out = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    grad = torch.tensor([[[3.0, 4.0]], [[NAN, INF]]])
    assert row_dot(out, grad, torch.float32).tolist() == [[11.0], [0.0]]


def test_sink_gradient_is_that_of_the_softmax() -> None:
    lse = torch.randn(5, 3, dtype=torch.float64)
    plain, grad_out = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    sink = torch.randn(3, dtype=torch.float64, requires_grad=True)
    out = plain * (lse - torch.logaddexp(lse, sink)).exp().unsqueeze(-1)
    (expected,) = torch.autograd.grad(out, sink, grad_out)
    torch.testing.assert_close(sink_gradient(out.detach(), grad_out, lse, sink.detach()), expected)


def test_sink_gradient_comes_in_the_sinks_dtype() -> None:
    out = torch.ones(2, 1, 4)
    got = sink_gradient(out, out, torch.zeros(2, 1), torch.zeros(1, dtype=torch.bfloat16))
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [-4.0]
