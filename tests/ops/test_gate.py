"""The output gate: where it rounds, what it accepts, its gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsattn.errors import InputError
from dsattn.ops import output_gate
from dsattn.testing import strided

WAYS = [(granularity, cast) for granularity in ("elementwise", "headwise") for cast in ("before", "after")]


def operands(granularity: str, dtype: torch.dtype = torch.float64, rows: int = 7) -> tuple[Tensor, Tensor]:
    out = torch.randn(rows, 3, 4, dtype=dtype)
    gate = torch.randn((rows, 3, 4) if granularity == "elementwise" else (rows, 3), dtype=dtype)
    return out, gate


@pytest.mark.parametrize(("granularity", "cast"), WAYS)
def test_equals_the_formula(granularity: Any, cast: Any) -> None:
    out, gate = operands(granularity)
    wide = gate if granularity == "elementwise" else gate[..., None]
    torch.testing.assert_close(output_gate(out, gate, granularity=granularity, cast=cast), out * wide.sigmoid())


def test_flat_gates_are_elementwise_ones() -> None:
    out, gate = operands("elementwise")
    assert output_gate(out, gate.flatten(1)).equal(output_gate(out, gate))


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_cast_says_where_bf16_rounds(granularity: Any) -> None:
    out, gate = operands(granularity, torch.bfloat16, rows=200)
    share = (gate if granularity == "elementwise" else gate[..., None]).float().sigmoid()
    before = output_gate(out, gate, granularity=granularity, cast="before")
    after = output_gate(out, gate, granularity=granularity, cast="after")
    assert before.equal(out * share.bfloat16())
    assert after.equal((out.float() * share).bfloat16())
    assert not before.equal(after)
    assert before.dtype == after.dtype == torch.bfloat16


@pytest.mark.parametrize(("granularity", "cast"), WAYS)
def test_gradcheck(granularity: Any, cast: Any) -> None:
    out, gate = (x.requires_grad_() for x in operands(granularity, rows=2))
    assert torch.autograd.gradcheck(lambda a, b: output_gate(a, b, granularity=granularity, cast=cast), (out, gate))


@pytest.mark.parametrize("cast", ["before", "after"])
def test_a_saturated_gate_still_learns(cast: Any) -> None:
    """In bf16 sigmoid(8) is 1, and 1 - 1 would be no gradient."""
    out, gate = torch.ones(1, 1, 1, dtype=torch.bfloat16), torch.full((1, 1), 8.0, dtype=torch.bfloat16)
    gate.requires_grad_()
    output_gate(out, gate, granularity="headwise", cast=cast).sum().backward()
    assert gate.grad is not None
    assert gate.grad.item() == pytest.approx(3.35e-4, rel=0.01)


def test_gates_at_the_ends() -> None:
    out = torch.ones(1, 4, 1)
    inf = float("inf")
    gate = torch.tensor([[inf, -inf, 1e4, -1e4]], requires_grad=True)
    gated = output_gate(out, gate, granularity="headwise")
    assert gated.flatten().tolist() == [1, 0, 1, 0]
    gated.sum().backward()
    assert gate.grad is not None
    assert not gate.grad.any()


@pytest.mark.parametrize(("granularity", "cast"), WAYS)
def test_strides_change_nothing(granularity: Any, cast: Any) -> None:
    out, gate = operands(granularity)
    plain = output_gate(out, gate, granularity=granularity, cast=cast)
    turned = out.transpose(0, 1).contiguous().transpose(0, 1)
    for other in (strided(out), turned):
        got = output_gate(other, strided(gate), granularity=granularity, cast=cast)
        torch.testing.assert_close(got, plain)  # not to the bit: torch's vectorised sigmoid differs from its scalar one
        assert got.is_contiguous()


def test_no_rows() -> None:
    assert output_gate(*operands("elementwise", rows=0)).shape == (0, 3, 4)


OUT = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("out", "gate", "asked", "says"),
    [
        (OUT[0], OUT, {}, r"out must be \[T, H, V\], got \[3, 4\]"),
        (OUT, OUT[:, :, 0], {}, r"gate must be \[2, 3, 4\] or \[2, 12\] for elementwise gating, got \[2, 3\]"),
        (OUT, OUT, {"granularity": "headwise"}, r"gate must be \[2, 3\] for headwise gating, got \[2, 3, 4\]"),
        (OUT, OUT, {"granularity": "token"}, "granularity='token' must be 'elementwise' or 'headwise'"),
        (OUT, OUT, {"cast": "never"}, "cast='never' must be 'before' or 'after'"),
        (OUT.long(), OUT, {}, "out must be floating point, got torch.int64"),
        (OUT, OUT.int(), {}, "gate must be floating point, got torch.int32"),
    ],
)
def test_refuses(out: Tensor, gate: Tensor, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        output_gate(out, gate, **asked)


@pytest.mark.parametrize("change", [torch.clone, strided, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)])
@pytest.mark.parametrize(("cast_before", "width", "dtype"), [(True, 4, torch.float32), (False, 1, torch.bfloat16)])
def test_opcheck(change: Any, cast_before: bool, width: int, dtype: torch.dtype) -> None:
    out, gate, grad = (change(torch.randn(5, 3, w, dtype=dtype)) for w in (4, width, 4))
    backward = (grad.contiguous(), out, gate, cast_before)
    torch.library.opcheck(torch.ops.dsattn.output_gate_backward.default, backward)
    forward = (out.requires_grad_(), gate.requires_grad_(), cast_before)
    torch.library.opcheck(torch.ops.dsattn.output_gate.default, forward)


def test_compiles_whole() -> None:
    out, gate = (x.requires_grad_() for x in operands("elementwise"))
    run = torch.compile(lambda a, b: output_gate(a, b).square().sum(), fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(run(out, gate), (out, gate))
    expected = torch.autograd.grad(output_gate(out, gate).square().sum(), (out, gate))
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("granularity", "cast"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_changes_no_bit(granularity: Any, cast: Any, dtype: torch.dtype) -> None:
    out, gate = (x.requires_grad_() for x in operands(granularity, dtype))

    def run(out: Tensor, gate: Tensor) -> Tensor:
        return output_gate(out, gate, granularity=granularity, cast=cast)

    plain, again = run(out, gate), checkpoint(run, out, gate, use_reentrant=False)
    grad = torch.randn_like(plain)
    learned = [torch.autograd.grad(one, (out, gate), grad) for one in (plain, again)]
    assert all(map(torch.equal, *learned))


@pytest.mark.parametrize(("granularity", "cast"), WAYS)
def test_autocast_leaves_the_sigmoid_in_fp32(granularity: Any, cast: Any) -> None:
    out, gate = operands(granularity, torch.bfloat16)
    plain = output_gate(out, gate, granularity=granularity, cast=cast)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output_gate(out, gate, granularity=granularity, cast=cast), plain)
