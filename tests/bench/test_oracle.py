"""The oracles against others' (testing.py, the operations), and the judge against faults made on purpose."""

import pytest
import torch

from dsattn.bench import oracle
from dsattn.bench.cases import SHAPES, Operands, Setting, gqa, indexer, mla
from dsattn.bench.oracle import Error, Triple, judge
from dsattn.ops import select_keys
from dsattn.testing import naive_attention, naive_kl, naive_scores

SETTING = Setting(shape=SHAPES["small"], rows=20, keys=50, dtype=torch.float64)
MASK = SETTING.ranges.mask(50)


def operands(make=mla, selects=True) -> Operands:
    return make(SETTING, 0, SETTING.selection() if selects else None)


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("make", [mla, gqa])
def test_attention_is_that_of_whole_matrices(make, selects):
    given = operands(make, selects)
    rows = oracle.candidates(given, SETTING.ranges, 50)
    assert {0, 19} <= set(rows.row.tolist())
    found = oracle.attention(given, rows, torch.float64, scale=0.3, value_dim=16)
    leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v) if x is not None]
    mask = given.selection.mask(50) if selects else MASK
    k = leaves[1] if make is gqa else leaves[1][:, None]
    v = leaves[2] if make is gqa else k[..., :16]
    out, lse = naive_attention(leaves[0], k, v, mask, scale=0.3)
    grad = torch.zeros_like(given.grad_out).index_copy_(0, rows.row, given.grad_out[rows.row])
    dq, *rest = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(found.out, out[rows.row])
    torch.testing.assert_close(found.lse, lse[rows.row])
    torch.testing.assert_close(found.dq, dq[rows.row])
    torch.testing.assert_close(found.dk, rest[0])
    assert (found.dv is None) == (make is mla)
    if found.dv is not None:
        torch.testing.assert_close(found.dv, rest[1])


@pytest.mark.parametrize("selects", [True, False])
def test_distillation_is_that_of_whole_matrices(selects):
    own = indexer(SETTING, 1)
    given = Operands(**{**vars(operands(mla, selects)), "q_i": own.q_i, "k_i": own.k_i, "w": own.w})
    rows = oracle.candidates(given, SETTING.ranges, 50)
    found = oracle.distillation(given, rows, torch.float64, scale=0.3)
    leaves = [x.clone().requires_grad_() for x in (own.q_i, own.k_i, own.w)]
    mask = given.selection.mask(50) if selects else MASK
    only = torch.zeros(20, dtype=torch.bool).index_fill_(0, rows.row, True)
    scores = naive_scores(*leaves, SETTING.ranges)
    kl = naive_kl(scores, given.q, given.k[:, None], mask & only[:, None], scale=0.3, divisor=len(rows.row))
    dq, dk, dw = torch.autograd.grad(kl, leaves)
    torch.testing.assert_close(found.kl, kl.detach())
    for got, exact in ((found.dq, dq[rows.row]), (found.dk, dk), (found.dw, dw[rows.row])):
        torch.testing.assert_close(got, exact)


EXACT = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PLAIN = EXACT.bfloat16()


def test_plain_torch_is_within_and_exact_is_best():
    assert judge([Triple(PLAIN, EXACT, PLAIN)]).max < 1.0
    assert judge([Triple(EXACT, EXACT, PLAIN)]) == Error(0.0, 0.0, oracle.LIMIT)
    assert judge([]) == Error(0.0, 0.0, oracle.LIMIT)


@pytest.mark.parametrize("fault", ["one value", "all a little", "nan", "infinity", "shape"])
def test_faults_are_wrong(fault):
    got = PLAIN.clone()
    if fault == "one value":
        got[3, 4] += 0.5
    if fault == "all a little":
        got = (EXACT * 1.02).bfloat16()
    if fault == "nan":
        got[0, 0] = torch.nan
    if fault == "infinity":
        got[0, 0] = torch.inf
    if fault == "shape":
        got = got[1:]
    error = judge([Triple(PLAIN, EXACT, PLAIN), Triple(got, EXACT, PLAIN)])
    assert error.wrong
    assert "limit 2" in str(error)


def test_infinities_that_belong_there_are_right():
    exact = torch.tensor([-torch.inf, 1.0], dtype=torch.float64)
    assert not judge([Triple(exact.float(), exact, exact.bfloat16())]).wrong
    assert judge([Triple(torch.tensor([-3e38, 1.0]), exact, exact.bfloat16())]).wrong


@pytest.mark.parametrize(("value", "wrong"), [(2.0, False), (2.1, True), (torch.nan, True)])
def test_either_bound_counts(value, wrong):
    assert Error(value, 0.0, 2.0).wrong == wrong
    assert Error(0.0, value, 2.0).wrong == wrong


def test_regret_of_a_right_selection_is_nothing():
    given = indexer(SETTING, 0)
    index = select_keys(given.q_i, given.k_i, given.w, SETTING.ranges, 16).index
    assert oracle.regret(index, given, SETTING.ranges) == Error(0.0, 0.0, oracle.REGRET_LIMIT["bf16"])


@pytest.mark.parametrize("fault", ["another key", "order", "twice", "hidden key", "empty slot", "full slot"])
def test_regret_sees_a_wrong_selection(fault):
    setting = Setting(shape=SHAPES["small"], rows=50, keys=50)
    given = indexer(setting, 0)
    index = select_keys(given.q_i, given.k_i, given.w, setting.ranges, 16).index
    last = index[-1]
    if fault == "another key":
        best = set(last.tolist())
        index[-1] = torch.tensor(sorted([*last.tolist()[1:], next(key for key in range(50) if key not in best)]))
    if fault == "order":
        index[-1] = last.flip(0)
    if fault == "twice":
        index[-1, 1] = last[0]
    if fault == "hidden key":
        index[0, 0] = 1
    if fault == "empty slot":
        index[-1, -1] = -1
    if fault == "full slot":
        index[0, 1] = 1
    assert oracle.regret(index, given, setting.ranges).wrong


def test_rows_fit_the_budget(monkeypatch):
    given = operands()
    monkeypatch.setattr(oracle, "_BUDGET", 1)
    assert oracle.sampled_rows(given, SETTING.ranges, 50).tolist() == [0, 19]
