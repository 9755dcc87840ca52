"""How the loss's reference streams: nothing of size [T, S], a log-sum-exp in two parts, the same tiles for any cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn.backends import ALONE, HeadRanks
from dsattn.keys import Layout
from dsattn.ops import blocks, dense_mla, distill, ranged, sparse_mla
from dsattn.ops.distill_reference import attention_shares, backward_reference, forward_reference
from dsattn.selection import Selection
from dsattn.testing import Case, Sizes, make_case, naive_attention, naive_scores, random_selection

MODES = ("warmup", "sparse")


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def selection_of(mode: str, case: Case) -> Selection | None:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k) if mode == "sparse" else None


def forward(case: Case, selection: Selection | None) -> tuple[Tensor, tuple[Any, ...]]:
    """Its outputs, and the arguments that the backward shares."""
    flags = {"scale": case.scale, "value_dim": case.sizes.value_dim}
    if selection is None:
        lse, index = dense_mla(case.q, case.kv, case.keys, **flags)[1], (None, None)
    else:
        lse, index = sparse_mla(case.q, case.kv, selection, **flags)[1], (selection.index, selection.length)
    real, divisor = distill.row_weights(case.keys, None, None, lse.dtype)
    operands = (case.q_i, case.k_i, case.w, case.q, case.kv, lse, *index, case.keys, real)
    return forward_reference(*operands, divisor, case.scale, True, ALONE), operands


def backward(operands: tuple[Any, ...], saved: list[Tensor], scale: float) -> tuple[Tensor, ...]:
    real = operands[-1]
    return backward_reference(real.to(saved[0].dtype), *operands, *saved, scale, True, ALONE, True)


@pytest.mark.parametrize("cut", [(1, 1), (3, 500), (16, 40_000), (4096, 2**30)])
@pytest.mark.parametrize("mode", MODES)
def test_saves_what_whole_matrices_say(mode: str, cut: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(Layout.packed([11, 0, 1, 26], padded=[12, 2, 1, 26]), dtype=torch.float64)
    selection = selection_of(mode, case)
    monkeypatch.setattr(ranged, "key_runs", lambda device: cut[0])
    monkeypatch.setattr(blocks, "_CPU_BYTES", cut[1])
    (_, score_lse, mass, dscore), _ = forward(case, selection)
    mask = case.keys.mask(case.layout.num_keys)
    if selection is not None:
        mask = selection.mask(case.layout.num_keys)
    scores = naive_scores(case.q_i, case.k_i, case.w, case.keys).masked_fill(~mask, -torch.inf)
    peak = scores.amax(1)
    torch.testing.assert_close(score_lse[0], torch.where(peak.isfinite(), peak, 0.0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(score_lse.sum(0), scores.logsumexp(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mass, case.sizes.heads * mask.any(1).double(), rtol=1e-12, atol=0)
    if selection is None:
        assert dscore.shape == (41, 0)
    else:
        identity = torch.eye(case.layout.num_keys, dtype=torch.float64)[:, None]
        target = naive_attention(case.q, case.kv[:, None], identity, mask, scale=case.scale)[0].mean(1)
        share = torch.where(mask, scores.softmax(1), 0.0)
        wanted = (share - target).gather(1, selection.index.clamp(min=0).long())
        torch.testing.assert_close(dscore, torch.where(selection.index < 0, 0.0, wanted), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("cut", [(1, 1), (3, 500), (16, 40_000), (4096, 2**30)])
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_rows_that_ranks_share_out(
    mode: str, shards: int, cut: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are the whole, however rows and keys are cut: each rank has rows i, i + n, ..., and here every head."""
    case = make_case(Layout.packed([11, 0, 1, 26], padded=[12, 2, 1, 29]), dtype=torch.float64)
    whole, operands = forward(case, selection_of(mode, case))
    grads = backward(operands, list(whole[1:]), case.scale)
    monkeypatch.setattr(ranged, "key_runs", lambda device: cut[0])
    monkeypatch.setattr(blocks, "_CPU_BYTES", cut[1])
    q_i, k_i, w, *rest = operands
    divisor = torch.tensor(float(rest[-1].sum()), dtype=torch.float64)
    loss, dk = torch.zeros_like(whole[0]), torch.zeros_like(grads[1])
    exact = {"rtol": 1e-11, "atol": 1e-13, "equal_nan": True}
    for shard in range(shards):
        ranks = HeadRanks("", shards, shard)
        mine = (ranks.own(q_i), k_i, ranks.own(w), *rest)
        part, *saved = forward_reference(*mine, divisor, case.scale, True, ranks)
        row_scale = ranks.own(rest[-1]).to(part.dtype)
        dq, dk_part, dw = backward_reference(row_scale, *mine, *saved, case.scale, True, ranks, True)
        loss, dk = loss + part, dk + dk_part
        live = ranks.own(rest[-1])
        for got, right in zip((dq, dw, saved[1], saved[2]), (grads[0], grads[2], whole[2], whole[3]), strict=True):
            torch.testing.assert_close(got[live], ranks.own(right)[live], **exact)
    torch.testing.assert_close(loss, whole[0], **exact)
    torch.testing.assert_close(dk, grads[1], **exact)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_size_rows_times_keys(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_CPU_BYTES", 2**20)
    sizes = Sizes(heads=2, width=8, value_dim=4, index_heads=2, index_width=4, top_k=64)
    case = make_case(Layout.packed([700, 324]), sizes)
    selection = selection_of(mode, case)
    with Largest() as largest:
        (loss, *saved), operands = forward(case, selection)
        backward(operands, saved, case.scale)
    assert loss.isfinite()
    assert largest.numel <= 1024 * 1024 // 8


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_one_row_stay_in_it(mode: str) -> None:
    """dL/dKL_t of one row moves that row, and the keys that it reads."""
    case = make_case(Layout.packed([9, 14]))
    selection = selection_of(mode, case)
    (_, *saved), operands = forward(case, selection)
    row_scale = torch.zeros(23)
    row_scale[16] = 1.0
    dq, dk, dw = backward_reference(row_scale, *operands, *saved, case.scale, True, ALONE, True)
    read = case.keys.mask(23)[16] if selection is None else selection.mask(23)[16]
    others = torch.arange(23) != 16
    assert dq[others].eq(0).all()
    assert dw[others].eq(0).all()
    assert dk[~read].eq(0).all()
    assert dk[read].abs().sum() > 0
    assert dq[16].abs().sum() > 0


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_shared_scores_cancel(mode: str) -> None:
    """softmax - target sums to 0 in every row: adding a constant to all scores of a row changes nothing."""
    sizes = Sizes(index_heads=1, index_width=1, top_k=6)
    case = make_case(Layout.causal(30), sizes, dtype=torch.float64)
    case.q_i.fill_(1.0)
    case.w.fill_(1.0)
    case.k_i.fill_(2.0)  # then dw = 2 * sum_s dL/dI
    (_, *saved), operands = forward(case, selection_of(mode, case))
    dq, dk, dw = backward(operands, saved, case.scale)
    assert dk.abs().max() > 1e-2
    assert dw.abs().max() < 1e-14
    assert dq.abs().max() < 1e-14


def test_a_given_target_is_not_made_again() -> None:
    """The same bits from a fused attention's shares, with NaN in all that they are made from; they stay as they are."""
    case = make_case(Layout.packed([11, 0, 1, 26], padded=[12, 2, 1, 26]))
    selection = selection_of("sparse", case)
    want, operands = forward(case, selection)
    q_i, k_i, w, q, kv, lse, *rows = operands
    shares = attention_shares(q, kv, rows[0], lse, case.scale)
    assert shares.shape == selection.index.shape
    assert not shares[selection.index < 0].any()
    shares[~rows[3]] = torch.nan
    before, divisor = shares.clone(), distill.row_weights(case.keys, None, None, lse.dtype)[1]
    unread = (torch.full_like(x, torch.nan) for x in (q, kv, lse))
    got = forward_reference(q_i, k_i, w, *unread, *rows, divisor, case.scale, True, ALONE, shares)
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))
    torch.testing.assert_close(shares, before, rtol=0, atol=0, equal_nan=True)
