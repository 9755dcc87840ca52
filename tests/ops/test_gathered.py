"""The gathered reference: its cut into blocks changes nothing, and its memory does not grow with rows times keys."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn.ops import blocks, dsa_attention, sparse_gqa, sparse_mla
from dsattn.ops.distill_reference import attention_shares
from dsattn.ops.gathered import attend, attend_backward, gather, gather_index, used_slots, with_zero_row
from dsattn.selection import Selection
from dsattn.testing import make_case, random_selection


def test_with_zero_row() -> None:
    rows = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    assert with_zero_row(rows, torch.float32).tolist() == [[1, 2], [0, 0]]
    assert with_zero_row(rows, torch.float32).dtype == torch.float32
    assert with_zero_row(rows[:0], torch.float64).tolist() == [[0, 0]]


def test_empty_slots_point_past_the_keys() -> None:
    index = torch.tensor([[0, 4, -1], [-1, -1, -1]], dtype=torch.int32)
    assert gather_index(index, 5).tolist() == [[0, 4, 5], [5, 5, 5]]
    assert gather_index(index, 5).dtype == torch.int64
    with pytest.raises(IndexError, match=r"selection.index holds key row 4, but there are 4 keys"):
        gather_index(index, 4)
    assert gather_index(index[:0], 0).shape == (0, 3)


def test_gather() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert gather(rows, torch.tensor([[2, 0], [1, 1]])).tolist() == [[[4, 5], [0, 1]], [[2, 3], [2, 3]]]


@pytest.mark.parametrize("budget", [1, 5000, 2**30])
@pytest.mark.parametrize("with_values", [True, False])
def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, budget: int, with_values: bool) -> None:
    case = make_case("packed", dtype=torch.float64)
    index = random_selection(case.keys, case.layout.num_keys, 7).index
    v = case.v[:, 0] if with_values else None
    sink = case.sink.expand(case.q.shape[:2])
    grad = torch.nan_to_num(case.grad_out)

    def run() -> list[Tensor]:
        out, lse = attend(case.q, case.kv, v, index, sink, 0.3, 16)
        grads = attend_backward(grad, case.q, case.kv, v, index, sink, out, lse, 0.3, True)
        return [out, lse, *(x for x in grads if x is not None)]

    expected = run()
    monkeypatch.setattr(blocks, "_CPU_BYTES", budget)
    for got, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return made


def test_no_tensor_of_rows_times_keys() -> None:
    rows, heads, width, top_k = 2048, 2, 8, 16
    q, kv = torch.randn(rows, heads, width), torch.randn(rows, width)
    index = torch.randint(0, rows, (rows, top_k), dtype=torch.int32)
    with Largest() as largest:
        out, lse = attend(q, kv, None, index, None, 0.3, width)
        attend_backward(torch.randn_like(out), q, kv, None, index, None, out, lse, 0.3, False)
    assert rows * top_k < largest.elements < rows * rows


def test_slots_past_the_keys_are_empty_or_an_error() -> None:
    index = torch.tensor([[0, 1, -1, -1], [1, -1, -1, -1]], dtype=torch.int32)
    assert used_slots(index, 2).tolist() == [[0, 1], [1, -1]]
    assert used_slots(index, 9).tolist() == index.tolist()
    assert used_slots(index.fill_(-1), 0).shape == (2, 0)
    hole = torch.tensor([[0, -1, -1], [-1, -1, 1]], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"keys behind slot 2, but there are 2 keys; .*Selection.from_index"):
        sparse_mla(torch.ones(2, 1, 3), torch.ones(2, 3), Selection(hole, hole[:, 0]), scale=1.0, value_dim=2)


def test_work_follows_the_keys_there_are_not_k() -> None:
    """K = 20,000 and 8 rows: nothing is made that is larger than the index."""
    case = make_case("packed", dtype=torch.float64)
    few = random_selection(case.keys, case.layout.num_keys, 9)
    many = Selection(torch.nn.functional.pad(few.index[:8], (0, 20_000 - 9), value=-1), few.length[:8])
    few, rows = Selection(few.index[:8], few.length[:8]), slice(8)
    learn = [x.requires_grad_() for x in (case.q, case.kv, case.k, case.v, case.q_i, case.k_i, case.w)]
    q, kv, k, v, q_i, k_i, w = learn

    def run(selection: Selection) -> list[Tensor]:
        gqa, _ = sparse_gqa(q[rows], k, v, selection, scale=0.3)
        indexer = (q_i[rows], k_i, w[rows], case.keys.row_slice(0, 8))
        out, lse, kl = dsa_attention(q[rows], kv, selection, *indexer, scale=0.3, kl_weight=2.0, value_dim=16)
        shares = attention_shares(q[rows], kv, selection.index, lse, 0.3)
        grads = torch.autograd.grad(gqa.square().sum() + out.square().sum() + kl, learn)
        return [gqa, out, lse, kl, shares[:, :9], *grads]

    for got, wanted in zip(run(many), run(few), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    with torch.no_grad(), Largest() as largest:
        out, lse = attend(q[rows], kv, None, many.index, None, 0.3, 16)
        attend_backward(torch.ones_like(out), q[rows], kv, None, many.index, None, out, lse, 0.3, True)
        attention_shares(q[rows], kv, many.index, lse, 0.3)
    assert largest.elements == many.index.numel()
