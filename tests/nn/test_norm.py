import pytest
import torch

from dsattn.errors import InputError
from dsattn.nn.norm import LayerNorm, RMSNorm, hadamard


def test_layer_norm_is_not_an_rms_norm():
    x = torch.tensor([1.0, 2, 3, 4])
    centred = torch.tensor([-1.3416, -0.4472, 0.4472, 1.3416])
    torch.testing.assert_close(LayerNorm(4, 1e-6)(x), centred, rtol=0, atol=1e-4)
    torch.testing.assert_close(RMSNorm(4, 1e-6)(x), torch.tensor([0.365, 0.730, 1.095, 1.461]), rtol=0, atol=1e-3)


def test_epsilon_is_used():
    x = torch.tensor([1e-3, -1e-3], dtype=torch.float64)
    norm = LayerNorm(2, 1e-6).double()
    torch.testing.assert_close(norm(x), x / (2e-6**0.5), rtol=1e-9, atol=0)
    assert not torch.allclose(LayerNorm(2, 1e-5).double()(x), norm(x))


@pytest.mark.parametrize("norm", [RMSNorm(8, 1e-6), LayerNorm(8, 1e-6), LayerNorm(8, 1e-6, fp32=True)])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_output_has_the_input_dtype(norm, weights, autocast):
    norm = norm.to(weights)
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert norm(torch.randn(3, 8).to(dtype)).dtype == dtype


@pytest.mark.parametrize("norm", [RMSNorm(64, 1e-6), LayerNorm(64, 1e-6)])
def test_mixed_dtypes_lose_nothing_but_the_last_rounding(norm):
    """bf16 rows under fp32 weights: rounding the weights first would be seen."""
    x = torch.randn(32, 64).bfloat16()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    wide = x.double()
    if isinstance(norm, LayerNorm):
        wide = wide - wide.mean(-1, keepdim=True)
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    exact = exact + (norm.bias.double() if isinstance(norm, LayerNorm) else 0)
    assert ((norm(x).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_fp32_asked_for_is_fp32_under_bf16_weights():
    """torch's own bf16 norm rounds its mean and scale otherwise in some rows; without them this shows nothing."""
    x = (3 * torch.randn(4096, 128) + 1).bfloat16()
    norm = LayerNorm(128, 1e-6, fp32=True).bfloat16()
    torch.nn.init.normal_(norm.weight)
    wide = torch.nn.functional.layer_norm(x.float(), (128,), norm.weight.float(), norm.bias.float(), 1e-6)
    assert norm(x).equal(wide.bfloat16())
    norm.fp32 = False
    assert not norm(x).equal(wide.bfloat16())


def test_hadamard_is_the_normalised_sylvester_matrix():
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(3, 2, 16, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ matrix / 4, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-12, atol=1e-12)


def test_hadamard_must_be_on_both_sides():
    x = torch.tensor([1.0, 0, 0, 0])
    assert (hadamard(x) @ hadamard(x)).item() == 1.0
    assert (hadamard(x) @ x).item() == 0.5


def test_hadamard_keeps_dtype_and_gradients():
    assert hadamard(torch.ones(2, 1)).equal(torch.ones(2, 1))
    assert hadamard(torch.randn(2, 8).bfloat16()).dtype == torch.bfloat16
    assert torch.autograd.gradcheck(hadamard, torch.randn(2, 8, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("width", [0, 3, 12])
def test_hadamard_refuses_other_widths(width):
    with pytest.raises(InputError, match=f"{width} lanes.*power of two"):
        hadamard(torch.zeros(2, width))
