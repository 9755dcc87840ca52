import pytest
import torch
import torch.nn.functional as F

from dsattn.errors import InputError
from dsattn.ops.rows import take_rows


def operands(rows=300, table=7, width=5, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(table, width, generator=generator, dtype=torch.float64).to(device, dtype)
    index = torch.randint(table - 1, (rows,), generator=generator).to(device)  # the last row is taken by nobody
    return values.requires_grad_(), index


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_equals_an_embedding(rows, deterministic):
    table, index = operands(rows)
    weight = torch.randn(rows, 5, dtype=torch.float64)
    out = take_rows(table, index, deterministic=deterministic)
    exact = F.embedding(index, table)
    assert torch.equal(out, exact)
    (grad,) = torch.autograd.grad((out * weight).sum(), table)
    (wanted,) = torch.autograd.grad((exact * weight).sum(), table)
    torch.testing.assert_close(grad, wanted)
    assert not grad[-1].any()


def test_gradients():
    table, index = operands(9)
    assert torch.autograd.gradcheck(lambda one: take_rows(one, index, deterministic=True), table)


def test_a_bf16_gradient_is_summed_in_fp32():
    """4096 times 1 + 2**-7 is no bf16 sum: it would stop growing at 256."""
    table = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    take_rows(table, torch.zeros(4096, dtype=torch.int64), deterministic=True).sum().backward()
    assert table.grad is not None
    assert table.grad.item() == 4096


def test_shapes():
    table, index = operands()
    with pytest.raises(InputError, match=r"table must be \[S, C\]"):
        take_rows(table[0], index)
    with pytest.raises(InputError, match=r"index \[T\]"):
        take_rows(table, index[None])


def test_compiles_whole():
    table, index = operands(20, dtype=torch.float32)
    compiled = torch.compile(lambda one: take_rows(one, index, deterministic=True), fullgraph=True, backend="aot_eager")
    compiled(table).sum().backward()
    assert table.grad is not None
    assert table.grad.sum() == 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_repeats_to_the_bit_where_torch_does_not():
    """32768 rows of 259: torch's own gradient differs from run to run there. Nothing waits for the device."""
    table, index = operands(32768, 260, 1024, torch.float32, "cuda")
    weight = torch.randn(32768, 1024, device="cuda")

    def grads(deterministic):
        out = take_rows(table, index, deterministic=deterministic)
        return torch.autograd.grad((out * weight).sum(), table)[0]

    first = grads(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [grads(True) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, one) for one in again)
    torch.testing.assert_close(first, grads(False), rtol=1e-5, atol=1e-4)
