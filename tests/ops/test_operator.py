"""What registering an operation adds to its body."""

import pytest
import torch
from torch import Tensor

from dsattn.ops import indexer_scores, select_keys, sparse_gqa, sparse_mla
from dsattn.ops.operator import operator
from dsattn.testing import make_case, random_selection


def test_registers_under_our_namespace() -> None:
    @operator("test_registers")
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert double(torch.ones(2)).tolist() == [2, 2]
    assert torch.ops.dsattn.test_registers(torch.ones(2)).tolist() == [2, 2]


def test_autocast_stays_outside() -> None:
    @operator("test_autocast")
    def product(x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return x @ x

    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16  # autocast is on
        assert product(x).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_have_the_same_bits_under_autocast(dtype: torch.dtype) -> None:
    case = make_case("packed", dtype=dtype)
    chosen = random_selection(case.keys, case.layout.num_keys, 7)

    def run() -> list[Tensor]:
        leaf = case.map(lambda x: x.detach().clone().requires_grad_())
        selection = select_keys(leaf.q_i, leaf.k_i, leaf.w, case.keys, 7, return_scores=True)
        assert selection.score is not None
        scores = indexer_scores(leaf.q_i, leaf.k_i, leaf.w, case.keys)
        mla, lse = sparse_mla(leaf.q, leaf.kv, chosen, scale=0.3, value_dim=16, sink=leaf.sink)
        gqa, _ = sparse_gqa(leaf.q, leaf.k, leaf.v, chosen, scale=0.3)
        torch.autograd.backward((mla, gqa), (leaf.grad_out.detach(), leaf.grad_out.detach()))
        scores[case.keys.mask(case.layout.num_keys)].sum().backward()
        grads = [x.grad for x in (leaf.q, leaf.kv, leaf.k, leaf.v, leaf.sink, leaf.q_i, leaf.k_i, leaf.w)]
        return [
            selection.index,
            selection.score,
            scores.detach(),
            mla.detach(),
            lse,
            gqa.detach(),
            *(x for x in grads if x is not None),
        ]

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        got = run()
    assert len(got) == 14
    for ours, wanted in zip(got, expected, strict=True):
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours.nan_to_num(), wanted.nan_to_num())
