"""The indexer's loss against the formula over whole matrices, its golden vectors, and all that must not reach it."""

import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsattn.errors import BackendUnavailable, InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops import blocks, dense_gqa, dense_mla, distill, indexer_kl, ranged, select_keys, sparse_gqa, sparse_mla
from dsattn.selection import Selection
from dsattn.testing import (
    LAYOUTS,
    Case,
    Sizes,
    error_budget,
    make_case,
    naive_attention,
    naive_kl,
    naive_scores,
    random_selection,
    strided,
)

MODES = ("warmup", "sparse")
TARGETS = ("mla", "gqa")
LEARNERS = ("q_i", "k_i", "w")


def selection_of(mode: str, case: Case) -> Selection | None:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k) if mode == "sparse" else None


def attention_keys(target: str, case: Case) -> Tensor:
    return case.kv if target == "mla" else case.k


def lse_of(target: str, case: Case, selection: Selection | None) -> Tensor:
    if target == "mla":
        flags = {"scale": case.scale, "value_dim": case.sizes.value_dim}
        if selection is None:
            return dense_mla(case.q, case.kv, case.keys, **flags)[1]
        return sparse_mla(case.q, case.kv, selection, **flags)[1]
    if selection is None:
        return dense_gqa(case.q, case.k, case.v, case.keys, scale=case.scale)[1]
    return sparse_gqa(case.q, case.k, case.v, selection, scale=case.scale)[1]


def learners(case: Case) -> list[Tensor]:
    return [getattr(case, name).detach().clone().requires_grad_() for name in LEARNERS]


@dataclass(frozen=True)
class Run:
    """A loss and the gradients of q_i, k_i and w."""

    loss: Tensor
    grads: tuple[Tensor, ...]


def finish(loss: Tensor, operands: list[Tensor]) -> Run:
    return Run(loss.detach(), torch.autograd.grad(loss, operands))


def run(case: Case, mode: str = "warmup", target: str = "mla", *, attention: Case | None = None, **flags) -> Run:
    """indexer_kl of a case. attention: the case whose q, kv and lse make the target, if another."""
    teacher = attention or case
    selection = flags.pop("selection", None) or selection_of(mode, case)
    lse = lse_of(target, teacher, selection)
    operands = learners(case)
    fixed = (teacher.q, attention_keys(target, teacher), lse, case.keys, selection)
    return finish(indexer_kl(*operands, *fixed, scale=case.scale, **flags), operands)


def naive(case: Case, mode: str, target: str = "mla", *, relu: bool = True, real: Tensor | None = None) -> Run:
    selection = selection_of(mode, case)
    visible = case.keys.mask(case.layout.num_keys)
    mask = visible if selection is None else selection.mask(case.layout.num_keys)
    counted = visible.any(1) if real is None else real & visible.any(1)
    operands = learners(case)
    scores = naive_scores(*operands, case.keys, relu=relu)
    k = attention_keys(target, case)
    k = k[:, None] if k.dim() == 2 else k
    flags = {"scale": case.scale, "divisor": max(1, int(counted.sum()))}
    return finish(naive_kl(scores, case.q, k, mask & counted[:, None], **flags), operands)


def assert_close(got: Run, want: Run, rtol: float) -> None:
    for name, a, b in zip(("loss", *LEARNERS), (got.loss, *got.grads), (want.loss, *want.grads), strict=True):
        size = max(1e-3, float(b.abs().max())) if b.numel() else 0.0
        torch.testing.assert_close(a.to(b.dtype), b, rtol=rtol, atol=rtol * size, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(got: Run, want: Run) -> None:
    for name, a, b in zip(("loss", *LEARNERS), (got.loss, *got.grads), (want.loss, *want.grads), strict=True):
        assert torch.equal(a, b), name


# The numeric example: 5 causal tokens, 2 indexer heads of 4, 2 heads over latents of 6, scale 0.3, weight 0.01.


def golden_case() -> Case:
    def wave(shift: float, *shape: int) -> Tensor:
        steps = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        return (0.7 * steps + shift).sin().view(shape)

    layout = Layout.causal(5)
    case = make_case(layout, Sizes(heads=2, groups=1, width=6, value_dim=4, top_k=2), dtype=torch.float64)
    indexer = {"q_i": wave(0.1, 5, 2, 4), "k_i": wave(0.2, 5, 4), "w": 0.5 * wave(0.3, 5, 2)}
    return replace(case, **indexer, q=2 * wave(0.4, 5, 2, 6), kv=2 * wave(0.5, 5, 6), scale=0.3)


GOLDEN = {
    "warmup": {
        "rows": [0.0, 0.28074610, 0.28999902, 0.37789979, 0.39766478],
        "mean": 2.692619402131e-03,
        "sum": 1.346309701065e-02,
        "squares": [5.7712085521e-07, 4.3308981920e-07, 2.6289441722e-06],
        "dk[0]": [6.551e-05, -9.519e-05, -2.1113e-04, -2.2777e-04],
    },
    "sparse": {
        "rows": [0.0, 0.28074610, 0.00012283, 0.01683822, 0.00063422],
        "mean": 5.966827441341e-04,
        "sum": 2.983413720671e-03,
        "squares": [3.9912265134e-07, 3.2158926166e-07, 1.7283779463e-06],
        "dk[0]": [1.8521e-04, -3.477e-05, -2.3841e-04, -3.2991e-04],
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_golden_numbers(mode: str) -> None:
    case, golden = golden_case(), GOLDEN[mode]
    selection = None
    if mode == "sparse":
        selection = select_keys(case.q_i, case.k_i, case.w, case.keys, 2)
        assert selection.index.tolist() == [[0, -1], [0, 1], [1, 2], [2, 3], [0, 2]]
    for row, kl in enumerate(golden["rows"]):
        alone = run(case, mode, selection=selection, real_rows=torch.arange(5) == row)
        assert float(alone.loss) == pytest.approx(kl, abs=5.1e-9)
    assert 0.01 * float(run(case, mode, selection=selection).loss) == pytest.approx(golden["mean"], abs=5.1e-16)
    total = 0.01 * float(run(case, mode, selection=selection, divisor=1).loss)
    assert total == pytest.approx(golden["sum"], abs=5.1e-15)
    grads = [0.01 * grad for grad in run(case, mode, selection=selection).grads]
    for grad, squares in zip(grads, golden["squares"], strict=True):
        assert float(grad.square().sum()) == pytest.approx(squares, rel=5e-11)
    assert grads[1][0].tolist() == pytest.approx(golden["dk[0]"], abs=5.1e-9)


@pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_equals_whole_matrices(mode: str, layout: str, target: str, relu: bool) -> None:
    """NaN stands in rows that read nothing and in keys that nobody reads; some selections are empty."""
    case = make_case(layout, dtype=torch.float64)
    got = run(case, mode, target, relu=relu)
    assert_close(got, naive(case, mode, target, relu=relu), 1e-10)
    visible = case.keys.mask(case.layout.num_keys)
    assert got.grads[0][~visible.any(1)].eq(0).all()
    assert got.grads[1][~visible.any(0)].eq(0).all()
    assert got.grads[2][~visible.any(1)].eq(0).all()


@pytest.mark.parametrize("name", ["q_i", "k_i", "w", "q", "kv"])
@pytest.mark.parametrize("mode", MODES)
def test_any_fp64_operand_makes_it_fp64(mode: str, name: str) -> None:
    """As scores and attention do: one operand of fp64 among fp32 ones."""
    case = make_case("packed")
    case = replace(case, **{name: getattr(case, name).double()})
    got = run(case, mode)
    assert got.loss.dtype == torch.float64
    assert [grad.dtype for grad in got.grads] == [getattr(case, learner).dtype for learner in LEARNERS]
    exact = run(case.map(lambda x: x.double()), mode)
    torch.testing.assert_close(got.loss, exact.loss, rtol=1e-6, atol=0)  # lse may be fp32


@pytest.mark.parametrize("mode", MODES)
def test_oracle_sees_another_loss(mode: str) -> None:
    case = make_case("packed", dtype=torch.float64)
    with pytest.raises(AssertionError, match="loss"):
        assert_close(run(replace(case, scale=1.01 * case.scale), mode), naive(case, mode), 1e-6)


def test_oracle_sees_a_reversed_kl() -> None:
    """KL(softmax(I) || target), the usual slip, is another number on the golden example."""
    case = golden_case()
    mask = case.keys.mask(5)
    target = naive_attention(
        case.q, case.kv[:, None], torch.eye(5, dtype=torch.float64)[:, None], mask, scale=case.scale
    )[0].mean(1)
    share = naive_scores(case.q_i, case.k_i, case.w, case.keys).softmax(-1)
    reverse = torch.where(mask, share * (share.log() - target.log()), 0.0).sum() / 5
    assert abs(0.01 * float(reverse) - GOLDEN["warmup"]["mean"]) > 1e-5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode: str, target: str) -> None:
    sizes = Sizes(heads=2, groups=2, width=4, value_dim=3, index_heads=2, index_width=3, top_k=2)
    case = make_case(Layout.packed([5, 0, 3], padded=[6, 0, 4]), sizes, dtype=torch.float64, poison=False)
    selection = selection_of(mode, case)
    fixed = (case.q, attention_keys(target, case), lse_of(target, case, selection), case.keys, selection)

    def loss(*operands: Tensor) -> Tensor:
        return indexer_kl(*operands, *fixed, scale=case.scale)

    assert torch.autograd.gradcheck(loss, learners(case))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", MODES)
def test_fp32_is_accurate(mode: str, target: str) -> None:
    case = make_case("packed", Sizes(heads=8, groups=4, width=96, index_heads=4, index_width=32))
    assert_close(run(case, mode, target), naive(case.map(Tensor.double), mode, target), 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_bf16_keeps_the_error_budget(mode: str) -> None:
    case = make_case("causal", dtype=torch.bfloat16)
    exact, plain = naive(case.map(Tensor.double), mode), naive(case, mode)
    got = run(case, mode)
    assert got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss.double(), exact.loss, rtol=1e-5, atol=0)
    for name, ours, wanted, theirs in zip(LEARNERS, got.grads, exact.grads, plain.grads, strict=True):
        assert ours.dtype == torch.bfloat16
        assert not error_budget(ours, wanted, theirs), name


@pytest.mark.parametrize("runs", [1024, 7])
@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("mode", MODES)
def test_large_scores_keep_their_differences(
    mode: str, offset: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of 1e4 with fp32-exact differences of 1/64: the loss knows only the differences."""
    monkeypatch.setattr(ranged, "key_runs", lambda device: runs)
    case = make_case(Layout.causal(40), Sizes(index_heads=1, index_width=1))
    near = torch.randint(-256, 256, (40, 1)) / 64
    case = replace(case, q_i=torch.ones_like(case.q_i), w=torch.ones_like(case.w), k_i=offset + near)
    got, exact = run(case, mode, relu=False), naive(case.map(Tensor.double), mode, relu=False)
    torch.testing.assert_close(got.loss.double(), exact.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.grads[1].double(), exact.grads[1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_not_real_add_nothing_and_may_hold_nan(mode: str) -> None:
    """The middle document is real to attention, not to the loss; then all it holds is NaN."""
    case = make_case(Layout.packed([9, 14, 11]), dtype=torch.float64)
    real, middle = torch.ones(34, dtype=torch.bool), slice(9, 23)
    real[middle] = False
    want = naive(case, mode, real=real)
    clean = run(case, mode, real_rows=real)
    assert_close(clean, want, 1e-10)
    for name in ("q", "kv", *LEARNERS):
        getattr(case, name)[middle] = torch.nan
    poisoned = run(case, mode, real_rows=real)
    assert_equal(poisoned, clean)
    assert all(grad[middle].eq(0).all() for grad in poisoned.grads)
    assert run(case, mode).loss.isnan()


@pytest.mark.parametrize("mode", MODES)
def test_single_rows_add_up(mode: str) -> None:
    case = make_case("padded", dtype=torch.float64)
    whole = run(case, mode, divisor=1)
    rows = [run(case, mode, divisor=1, real_rows=row.bool()) for row in torch.eye(len(case.q))]
    total = Run(sum(r.loss for r in rows), tuple(map(sum, zip(*(r.grads for r in rows), strict=True))))
    assert_close(total, whole, 1e-12)


@pytest.mark.parametrize("divisor", [3, 3.0, torch.tensor(3), torch.tensor(3.0), torch.tensor(3, dtype=torch.float64)])
def test_divisor_in_any_form(divisor: float | Tensor) -> None:
    case = make_case("padded")
    one, got = run(case, divisor=1), run(case, divisor=divisor)
    torch.testing.assert_close(got.loss, one.loss / 3)
    for a, b in zip(got.grads, one.grads, strict=True):
        torch.testing.assert_close(a, b / 3)


def test_default_divisor_counts_rows_that_are_real_and_can_read() -> None:
    case = make_case("padded")
    reads = case.keys.stop > case.keys.start
    assert_equal(run(case), run(case, divisor=int(reads.sum())))
    some = torch.arange(len(reads)) % 3 > 0
    assert_equal(run(case, real_rows=some), run(case, real_rows=some, divisor=int((reads & some).sum())))
    assert float(run(case, real_rows=some & ~reads).loss) == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_split_into_microbatches(mode: str) -> None:
    """Two microbatches of unequal size with the global divisor give what one gives; local divisors do not."""
    whole = make_case(Layout.packed([13, 1, 22, 9]))
    parts = [(Layout.packed([13, 1]), slice(0, 14)), (Layout.packed([22, 9]), slice(14, 45))]
    selection = selection_of(mode, whole)
    want = run(whole, mode, selection=selection)

    def split(**flags) -> Run:
        runs = []
        for layout, rows in parts:
            part = replace(whole.map(lambda x, r=rows: x[r] if x.shape[0] == 45 else x), layout=layout)
            kept = None
            if selection is not None:
                index = selection.index[rows]
                kept = Selection.from_index(torch.where(index < 0, -1, index - rows.start))
            runs.append(run(part, mode, selection=kept, **flags))
        grads = tuple(torch.cat(pair) for pair in zip(*(r.grads for r in runs), strict=True))
        return Run(sum(r.loss for r in runs), grads)

    assert_close(split(divisor=45), want, 1e-6)
    with pytest.raises(AssertionError, match="loss"):
        assert_close(split(), want, 1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_context_parallel_ranks_add_up(mode: str) -> None:
    """Rows dealt out in zigzag, keys whole: with the global divisor, loss and gradients are those of one rank."""
    lengths = [16, 0, 40]
    whole = make_case(Layout.packed(lengths), dtype=torch.float64)
    selection = selection_of(mode, whole)
    want = run(whole, mode, selection=selection)
    total, grads = torch.zeros((), dtype=torch.float64), [torch.zeros_like(grad) for grad in want.grads]
    for rank in range(2):
        layout = Layout.packed(lengths, cp_size=2, cp_rank=rank)
        rows = {name: getattr(whole, name)[layout.rows] for name in ("q", "q_i", "w")}
        kept = None if selection is None else Selection(selection.index[layout.rows], selection.length[layout.rows])
        part = run(replace(whole, layout=layout, **rows), mode, selection=kept, divisor=56)
        total += part.loss
        for name, sums, grad in zip(LEARNERS, grads, part.grads, strict=True):
            sums.add_(grad) if name == "k_i" else sums.index_add_(0, layout.rows, grad)
        assert not torch.allclose(part.loss, want.loss / 2, rtol=1e-3)  # ranks differ: no mean of theirs would do
    assert_close(Run(total, tuple(grads)), want, 1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_sparse_with_room_for_every_key_is_warmup(target: str) -> None:
    case = make_case("packed", Sizes(top_k=130), dtype=torch.float64)
    everything = random_selection(case.keys, case.layout.num_keys, 130, sparse_rows=False)
    assert everything.width > int(everything.length.max())
    assert_close(run(case, target=target, selection=everything), run(case, target=target), 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_reaches_the_teacher(mode: str) -> None:
    case = make_case("padded")
    selection = selection_of(mode, case)
    lse = lse_of("mla", case, selection)
    teachers = [x.clone().requires_grad_() for x in (case.q, case.kv, lse)]
    operands = learners(case)
    indexer_kl(*operands, *teachers, case.keys, selection, scale=case.scale).backward()
    assert all(x.grad is None for x in teachers)
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in operands)


@pytest.mark.parametrize("mode", MODES)
def test_weight_zero_gives_exact_zeros(mode: str) -> None:
    """Connected, as optimisers and gradient synchronisation want it, and zero even where the scores overflow."""
    case = make_case("causal")
    case.w[5] = 3e38
    assert not run(case, mode).loss.isfinite()
    operands = learners(case)
    selection = selection_of(mode, case)
    loss = indexer_kl(
        *operands, case.q, case.kv, lse_of("mla", case, selection), case.keys, selection, scale=case.scale
    )
    (0.0 * loss).backward()
    assert all(x.grad is not None and x.grad.eq(0).all() for x in operands)


def test_frozen_indexer_makes_no_graph() -> None:
    case = make_case("causal")
    args = (case.q_i, case.k_i, case.w, case.q.requires_grad_(), case.kv, lse_of("mla", case, None))
    assert not indexer_kl(*args, case.keys, scale=1.0).requires_grad


def test_rows_whose_scores_are_all_minus_infinity_or_nan_select_nothing() -> None:
    case = make_case(Layout.causal(20), dtype=torch.float64)
    case.w[8], case.w[9] = -torch.inf, torch.nan
    selection = select_keys(case.q_i, case.k_i, case.w, case.keys, 4)
    assert selection.length[[8, 9]].tolist() == [0, 0]
    got = run(case, selection=selection, divisor=20)
    assert all(grad.isfinite().all() for grad in got.grads)
    assert got.grads[0][[8, 9]].eq(0).all()
    assert got.grads[2][[8, 9]].eq(0).all()
    others = torch.ones(20, dtype=torch.bool)
    others[[8, 9]] = False
    assert_equal(got, run(case, selection=selection, divisor=20, real_rows=others))
    assert not run(case, divisor=20).loss.isfinite()  # over all keys there is no such softmax, and the loss says so


def test_a_selection_without_slots_loses_nothing() -> None:
    case = make_case(Layout.causal(5))
    got = run(case, selection=Selection.from_index(torch.full((5, 0), -1)))
    assert got.loss == 0
    assert not any(grad.any() for grad in got.grads)


@pytest.mark.parametrize("mode", MODES)
def test_a_score_of_minus_infinity_where_attention_reads_is_an_infinite_loss(mode: str) -> None:
    case = make_case(Layout.causal(6), Sizes(index_heads=1, index_width=1, top_k=6), dtype=torch.float64)
    case = replace(case, q_i=torch.ones_like(case.q_i), w=torch.ones_like(case.w))
    case.k_i[2] = -torch.inf
    selection = random_selection(case.keys, 6, 6, sparse_rows=False) if mode == "sparse" else None
    assert float(run(case, selection=selection, relu=False).loss) == torch.inf


@pytest.mark.parametrize("mode", MODES)
def test_streaming_changes_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("packed", dtype=torch.float64)
    whole = run(case, mode, "gqa")
    monkeypatch.setattr(ranged, "key_runs", lambda device: 5)
    monkeypatch.setattr(blocks, "_CPU_BYTES", 20_000)
    assert_close(run(case, mode, "gqa"), whole, 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_another_document_changes_no_bit(mode: str) -> None:
    """Per document: the loss of real rows here is bitwise the same whatever finite numbers stand there."""
    case = make_case(Layout.packed([9, 14, 11]))
    real = torch.zeros(34, dtype=torch.bool)
    real[:9] = True
    before = run(case, mode, real_rows=real)
    for name in ("q", "kv", *LEARNERS):
        getattr(case, name)[9:] *= 1e6
    assert_equal(run(case, mode, real_rows=real), before)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", MODES)
def test_strides_do_not_matter(mode: str, target: str) -> None:
    case = make_case("left_padded")
    assert_equal(run(case.map(strided), mode, target), run(case, mode, target))


@pytest.mark.parametrize("mode", MODES)
def test_autocast_stays_outside(mode: str) -> None:
    case = make_case("padded")
    with torch.autocast("cpu", torch.bfloat16):
        got = run(case, mode)
    assert_equal(got, run(case, mode))


@pytest.mark.parametrize("deterministic", [False, True, None])
@pytest.mark.parametrize("mode", MODES)
def test_repeats_bit_for_bit(mode: str, deterministic: bool | None) -> None:
    case = make_case("packed")
    assert_equal(run(case, mode, deterministic=deterministic), run(case, mode, deterministic=deterministic))


@pytest.mark.parametrize("mode", MODES)
def test_compiles_whole(mode: str) -> None:
    case = make_case("padded")
    selection = selection_of(mode, case)
    fixed = (case.q, case.kv, lse_of("mla", case, selection), case.keys, selection)
    compiled = torch.compile(indexer_kl, fullgraph=True, backend="aot_eager")
    ours, plain = learners(case), learners(case)
    count = torch.tensor(45)
    got = finish(compiled(*ours, *fixed, scale=case.scale, divisor=count), ours)
    assert_equal(got, finish(indexer_kl(*plain, *fixed, scale=case.scale, divisor=count), plain))


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_gives_the_same_bits(mode: str) -> None:
    case = make_case("padded")
    selection = selection_of(mode, case)
    fixed = (case.q, case.kv, lse_of("mla", case, selection), case.keys, selection)
    operands = learners(case)
    loss = checkpoint(indexer_kl, *operands, *fixed, scale=case.scale, use_reentrant=False)
    assert_equal(finish(loss, operands), run(case, mode))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode: str, target: str) -> None:
    case = make_case("padded", poison=False)
    selection = selection_of(mode, case)
    index = (None, None) if selection is None else (selection.index, selection.length)
    rows = (case.keys.start, case.keys.stop, *distill.row_weights(case.keys, None, None, torch.float32))
    teacher = (case.q, attention_keys(target, case), lse_of(target, case, selection))
    operands = [strided(getattr(case, name)).requires_grad_() for name in LEARNERS]
    flags = (case.scale, True, "", 0, True, "auto")
    torch.library.opcheck(distill._forward, (*operands, *teacher, *index, *rows, *flags))


TWO_RANKS = """
import os
import sys
import torch
import torch.distributed as dist
from dsattn.backends import HeadRanks
from dsattn.errors import InputError
from dsattn.keys import KeyRange
from dsattn.ops import indexer_kl, sparse_mla, dense_mla, dsa_attention
from dsattn.selection import Selection
from dsattn.testing import Sizes, make_case, random_selection

other = os.fork()  # two ranks of one import of torch
rank, store = int(other == 0), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
case = make_case("padded", Sizes(heads=6), dtype=torch.float64)
mine = slice(3 * rank, 3 * rank + 3)
real = torch.arange(case.layout.num_keys) % 7 != 2


def run(heads, selection, group, shards=1):
    flags = {"scale": case.scale, "value_dim": 16}
    q = case.q[:, heads].contiguous()
    lse = (dense_mla(q, case.kv, case.keys, **flags) if selection is None else
           sparse_mla(q, case.kv, selection, **flags))[1]
    operands = learners(shards)
    loss = indexer_kl(*operands, q, case.kv, lse, case.keys, selection, scale=case.scale, head_group=group,
                      real_rows=real, divisor=40)
    return loss.detach(), *torch.autograd.grad(loss, operands)


def fused(heads, selection, group, shards=1):
    operands = learners(shards)
    kl = dsa_attention(case.q[:, heads].contiguous(), case.kv, selection, *operands, case.keys, scale=case.scale,
                       value_dim=16, kl_weight=1.0, head_group=group, real_rows=real, divisor=40)[2]
    return kl.detach(), *torch.autograd.grad(kl, operands)


def learners(shards):
    rows = slice(rank, None, 2) if shards == 2 else slice(None)
    return [x.clone().requires_grad_() for x in (case.q_i[rows], case.k_i, case.w[rows])]


for wrong, said in (
    ({"q": case.q[:-2]}, f"or [{len(case.q)}, H, C] of rows dealt to 2 ranks of head_group, to meet q_i"),
    ({"keys": KeyRange(case.keys.start[1:], case.keys.stop[1:])}, f"keys has {len(case.q) - 1} rows, q has"),
    ({"selection": Selection.from_index(torch.zeros(7, 1, dtype=torch.long))}, "selection has"),
    ({"real_rows": real[::2]}, f"real_rows must be bool [{len(case.q)}]"),
):
    given = {"q": case.q, "kv": case.kv, "lse": torch.zeros(len(wrong.get("q", case.q)), 6, dtype=torch.float64)}
    given |= {"keys": case.keys, "scale": 1.0, "head_group": dist.group.WORLD}
    try:
        indexer_kl(*learners(2), **{**given, **wrong})
        raise AssertionError(said)
    except InputError as error:
        assert said in str(error), error

collectives = []
begin = HeadRanks.begin
HeadRanks.begin = lambda ranks, x: collectives.append((ranks.shards, len(x))) or begin(ranks, x)
for selection in (None, random_selection(case.keys, case.layout.num_keys, 7)):
    if selection is not None:
        selection = selection.with_inverse(case.layout.num_keys)  # of all rows: not for a part of them
    for how in (run,) if selection is None else (run, fused):
        whole, split, alone = how(slice(0, 6), selection, None), how(mine, selection, dist.group.WORLD), \
            how(mine, selection, None)
        collectives.clear()
        loss, dq, dk, dw = how(mine, selection, dist.group.WORLD, shards=2)
        assert collectives and all(one == (2, len(case.q)) for one in collectives), collectives
        dist.all_reduce(loss)
        dist.all_reduce(dk)
        for a, b in zip((loss, dq, dk, dw), (whole[0], whole[1][rank::2], whole[2], whole[3][rank::2])):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        for a, b in zip(split, whole):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        for x in split:
            both = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(both, x)
            assert torch.equal(*both), "ranks disagree"
        assert not torch.allclose(alone[0], whole[0], rtol=1e-4), "half of the heads must not do"
dist.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.slow
def test_heads_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(TWO_RANKS), str(tmp_path / "store")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def call(**change: object) -> dict[str, object]:
    indexer = {"q_i": torch.zeros(8, 2, 4), "k_i": torch.zeros(8, 4), "w": torch.zeros(8, 2)}
    teacher = {"q": torch.zeros(8, 3, 6), "kv": torch.zeros(8, 6), "lse": torch.zeros(8, 3)}
    return {**indexer, **teacher, "keys": Layout.causal(8).keys, "scale": 1.0, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_i": torch.zeros(8, 4)}, r"q_i must be \[T, H_I, D\]"),
        ({"k_i": torch.zeros(8, 5)}, r"k_i must be \[S, 4\]"),
        ({"w": torch.zeros(8, 3)}, r"w must be \[8, 2\]"),
        ({"q": torch.zeros(7, 3, 6)}, r"q must be \[8, H, C\]"),
        ({"kv": torch.zeros(8, 5)}, r"kv must be \[8, 6\] or \[8, G, 6\]"),
        ({"kv": torch.zeros(9, 6)}, r"kv must be \[8, 6\]"),
        ({"kv": torch.zeros(8, 2, 6)}, "3 heads, not a multiple of the 2 groups"),
        ({"kv": torch.zeros(8, 0, 6)}, "3 heads, not a multiple of the 0 groups"),
        ({"q": torch.zeros(8, 3, 6).long()}, "q must be floating point, got torch.int64"),
        ({"kv": torch.zeros(8, 6).int()}, "kv must be floating point, got torch.int32"),
        ({"lse": torch.zeros(8, 3).int()}, "lse must be floating point, got torch.int32"),
        ({"lse": torch.zeros(8, 2)}, r"lse must be \[8, 3\]"),
        ({"keys": Layout.causal(7).keys}, "keys has 7 rows, q_i has 8"),
        ({"selection": Selection.from_index(torch.zeros(7, 1, dtype=torch.long))}, "selection has 7 rows, q has 8"),
        ({"selection": torch.zeros(8, 1, dtype=torch.long)}, "selection must be a Selection, got Tensor"),
        ({"real_rows": torch.ones(8)}, r"real_rows must be bool \[8\], got torch.float32"),
        ({"real_rows": torch.ones(7, dtype=torch.bool)}, r"real_rows must be bool \[8\]"),
        ({"divisor": 0}, "divisor=0 must be positive"),
        ({"divisor": -1.0}, "divisor=-1.0 must be positive"),
        ({"divisor": "7"}, "divisor must be a number or a 0-d tensor, got '7'"),
        ({"divisor": float("nan")}, "divisor=nan must be positive"),
        ({"divisor": torch.ones(1)}, r"divisor must be a number or a 0-d tensor, got \[1\]"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        indexer_kl(**call(**change))


def test_unknown_backend_raises() -> None:
    with pytest.raises(BackendUnavailable, match="no backend named 'abacus'"):
        indexer_kl(**call(backend="abacus"))


def test_ranges_beyond_the_keys_are_cut() -> None:
    case = make_case(Layout.causal(8), dtype=torch.float64)
    wide = KeyRange(case.keys.start - 3, torch.where(case.keys.stop == 8, 99, case.keys.stop))
    assert_equal(run(replace(case, layout=replace(case.layout, keys=wide))), run(case))
