"""Sparse MLA against whole-matrix fp64 attention, at its edges, and through torch's own machinery."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsattn.backends import settings
from dsattn.errors import BackendUnavailable, InputError
from dsattn.keys import Layout
from dsattn.ops import sparse_mla
from dsattn.selection import Selection
from dsattn.testing import (
    LAYOUTS,
    Case,
    Sizes,
    error_budget,
    make_case,
    naive_attention,
    random_selection,
    strided,
    tensor_similarity,
)

INF, NAN = float("inf"), float("nan")


def leaves(case: Case) -> Case:
    return case.map(lambda x: x.detach().clone().requires_grad_())


def attend(case: Case, selection: Selection, sink: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    width = case.sizes.value_dim
    return sparse_mla(case.q, case.kv, selection, scale=case.scale, value_dim=width, sink=sink, **options)


def naive(case: Case, selection: Selection, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    values = case.kv[:, None, : case.sizes.value_dim]
    mask = selection.mask(case.kv.shape[0])
    return naive_attention(case.q, case.kv[:, None], values, mask, scale=case.scale, sink=sink)


def pick(case: Case, **options: Any) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, options.pop("top_k", case.sizes.top_k), **options)


def gradients(
    run: Callable[..., tuple[Tensor, Tensor]], case: Case, selection: Selection, with_sink: bool = True
) -> dict[str, Tensor]:
    """out, lse and the gradients of q, kv and sink under the case's grad_out."""
    leaf = leaves(case)
    out, lse = run(leaf, selection, leaf.sink if with_sink else None)
    out.backward(case.grad_out.to(out.dtype))
    grads = {name: getattr(leaf, name).grad for name in ("q", "kv", *(["sink"] if with_sink else []))}
    return {"out": out.detach(), "lse": lse, **grads}


def clean_gradient(case: Case, selection: Selection) -> Case:
    """grad_out without NaN, for the oracle: rows that select nothing give nothing."""
    dead = (selection.length == 0)[:, None, None]
    clean = case.grad_out.masked_fill(dead, 0)
    return Case(**{**vars(case), "grad_out": clean})


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("with_sink", [True, False])
def test_equals_masked_attention(name: str, with_sink: bool) -> None:
    """Out, lse and every gradient in fp64; padding rows, unread keys and their grad_out are NaN."""
    case = make_case(name, dtype=torch.float64)
    selection = pick(case)
    got = gradients(attend, case, selection, with_sink)
    expected = gradients(naive, clean_gradient(case, selection), selection, with_sink)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["packed", "padded", "context_parallel"])
def test_fp32_is_close_to_fp64(name: str) -> None:
    case = make_case(name)
    selection = pick(case)
    got = gradients(attend, case, selection)
    wide = case.map(lambda x: x.double())
    expected = gradients(naive, clean_gradient(wide, selection), selection)
    for key, value in expected.items():
        assert got[key].dtype == torch.float32
        torch.testing.assert_close(
            got[key].double(), value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_within_budget(dtype: torch.dtype) -> None:
    case = make_case(Layout.causal(200), Sizes(width=64, value_dim=48, top_k=40), dtype=dtype)
    selection = pick(case)
    got = gradients(attend, case, selection)
    low = gradients(naive, clean_gradient(case, selection), selection)
    exact = gradients(naive, clean_gradient(case.map(lambda x: x.double()), selection), selection)
    assert got["lse"].dtype == torch.float32
    for key in ("out", "q", "kv", "sink"):
        assert got[key].dtype == dtype
        assert not error_budget(got[key], exact[key], low[key]), key
        assert tensor_similarity(got[key], exact[key]) > 1 - (1e-3 if key == "out" else 3e-3)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("value_dim", [1, 5, 6])
def test_gradcheck(heads: int, value_dim: int) -> None:
    sizes = Sizes(heads=heads, groups=1, width=6, value_dim=value_dim, top_k=3)
    case = leaves(make_case(Layout.packed([5, 0, 1]), sizes, dtype=torch.float64))
    selection = pick(case)

    def run(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        return sparse_mla(q, kv, selection, scale=0.7, value_dim=value_dim, sink=sink)[0]

    assert torch.autograd.gradcheck(run, (case.q, case.kv, case.sink))


def sines(*shape: int, phase: float) -> Tensor:
    return (torch.arange(math.prod(shape), dtype=torch.float64) * 0.7 + phase).sin().mul(2).view(shape)


def test_published_numbers() -> None:
    q, kv = sines(5, 2, 6, phase=0.4), sines(5, 6, phase=0.5)
    selection = Selection.from_index(torch.tensor([[0, -1], [0, 1], [1, 2], [2, 3], [0, 2]]))
    out, lse = sparse_mla(q, kv, selection, scale=0.3, value_dim=4)
    row = [1.00125127, -0.30815793, -1.47263564, -1.94450980, 0.95931195, 1.84046709, 1.85602180, 0.99866046]
    assert out[4].flatten().tolist() == pytest.approx(row, abs=5e-9)
    assert float(out.sum()) == pytest.approx(24.0912972384, abs=5e-11)
    assert float(out.square().sum()) == pytest.approx(73.8694300701, abs=5e-11)
    assert lse[4].tolist() == pytest.approx([3.00834763, 3.44031724], abs=5e-9)


def test_lse_is_a_natural_logarithm() -> None:
    """Two shards with denominators 2 and 8 and outputs 1 and 3 merge to 2.6; a wrong base gives 2.4466 or 2.7616."""
    q = torch.ones(1, 1, 2, dtype=torch.float64)
    first = torch.tensor([[1.0, math.log(2) - 1]], dtype=torch.float64)
    second = torch.tensor([[3.0, math.log(8) - 3]], dtype=torch.float64)
    only = Selection.from_index(torch.tensor([[0]]))
    outs, lses = zip(*(sparse_mla(q, kv, only, scale=1.0, value_dim=1) for kv in (first, second)), strict=True)
    weights = torch.stack([lse.flatten() for lse in lses]).softmax(0)
    assert float((weights.flatten() * torch.stack(outs).flatten()).sum()) == pytest.approx(2.6, abs=1e-12)
    both = sparse_mla(
        q, torch.cat([first, second]), Selection.from_index(torch.tensor([[0, 1]])), scale=1.0, value_dim=1
    )
    assert both[0].item() == pytest.approx(2.6, abs=1e-12)
    assert both[1].item() == pytest.approx(math.log(10), abs=1e-12)


def test_lse_holds_the_scale_and_no_sink() -> None:
    case = make_case("causal", dtype=torch.float64)
    selection = pick(case)
    plain = attend(case, selection)
    assert attend(case, selection, case.sink)[1].equal(plain[1])
    logits = torch.einsum("thc,sc->ths", case.q, case.kv) * case.scale
    logits = logits.masked_fill(~selection.mask(97)[:, None], -INF)
    torch.testing.assert_close(plain[1], logits.logsumexp(-1))


def test_lse_is_not_differentiable() -> None:
    case = leaves(make_case("causal"))
    out, lse = attend(case, pick(case))
    assert out.requires_grad
    assert not lse.requires_grad


def test_empty_slots_never_read_memory() -> None:
    """Row 0 keeps key 0 alone; the last key, which -1 would name, holds NaN or 1e4."""
    selection = Selection.from_index(torch.tensor([[0, -1, -1, -1], [1, 0, -1, -1], [2, 1, -1, -1], [-1] * 4]))
    for worst in (1e4, NAN, INF):
        kv = torch.randn(4, 6)
        kv[3] = worst
        kv.requires_grad_()
        q = torch.randn(4, 2, 6, requires_grad=True)
        out, lse = sparse_mla(q, kv, selection, scale=0.5, value_dim=4)
        assert out[0].equal(kv[0, :4].detach().expand(2, 4))
        assert out.isfinite().all()
        assert (lse[3] == -INF).all()
        assert lse[:3].isfinite().all()
        out.sum().backward()
        assert kv.grad is not None
        assert q.grad is not None
        assert not kv.grad[3].any()
        assert kv.grad[:3].isfinite().all()
        assert q.grad.isfinite().all()


def test_rows_that_select_nothing_give_and_take_nothing() -> None:
    case = make_case("packed")
    selection = pick(case)
    dead = selection.length == 0
    assert dead.any()
    case.q[dead], case.grad_out[dead] = NAN, NAN
    got = gradients(attend, case, selection)
    assert not got["out"][dead].any()
    assert (got["lse"][dead] == -INF).all()
    assert not got["q"][dead].any()
    clean = make_case("packed")
    clean.q[dead], clean.grad_out[dead] = 5.0, -7.0
    for key, value in gradients(attend, clean, selection).items():
        assert got[key].equal(value), key


@pytest.mark.parametrize("with_sink", [True, False])
def test_every_row_may_be_empty(with_sink: bool) -> None:
    case = make_case("only_padding")
    got = gradients(attend, case, Selection.from_index(torch.full((6, 3), -1)), with_sink)
    assert not got["out"].any()
    assert (got["lse"] == -INF).all()
    assert not got["q"].any()
    assert not got["kv"].any()


@pytest.mark.parametrize("sink", [INF, -INF, 80.0, -80.0, 1e30])
def test_sinks_at_the_ends(sink: float) -> None:
    """+inf takes all the mass, -inf none; gradients stay finite, also in rows that select nothing."""
    case = make_case("packed", dtype=torch.float64)
    case.sink.fill_(sink)
    selection = pick(case)
    got = gradients(attend, case, selection)
    assert all(got[key].isfinite().all() for key in ("out", "q", "kv", "sink"))
    plain = gradients(attend, case, selection, with_sink=False)
    if sink > 0:
        assert got["out"].abs().max() < 1e-20
        assert got["kv"].abs().max() < 1e-20
    else:
        for key in ("out", "q", "kv"):
            torch.testing.assert_close(got[key], plain[key])
        assert got["sink"].abs().max() < 1e-20


def test_a_large_sink_leaves_a_small_output_exact() -> None:
    """exp(-20) of the mass stays with the keys: 1 - sigmoid(20) would have lost most digits in fp32."""
    kv, q = torch.tensor([[3.0, 0.0]]), torch.zeros(1, 1, 2)
    selection = Selection.from_index(torch.tensor([[0]]))
    out, _ = sparse_mla(q, kv, selection, scale=1.0, value_dim=1, sink=torch.tensor([20.0]))
    assert out.item() == pytest.approx(3 * math.exp(-20), rel=1e-5)


@pytest.mark.parametrize("top_k", [8, 101])
def test_wider_selections_than_keys(top_k: int) -> None:
    case = make_case(Layout.causal(5), dtype=torch.float64)
    selection = pick(case, top_k=top_k, sparse_rows=False)
    assert selection.length.tolist() == [1, 2, 3, 4, 5]
    got, expected = gradients(attend, case, selection), gradients(naive, case, selection)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)


def test_one_key() -> None:
    case = make_case("one_token")
    out, lse = attend(case, pick(case, sparse_rows=False))
    assert out.equal(case.kv[:, None, :16].expand(1, 4, 16))
    torch.testing.assert_close(lse, (case.q @ case.kv.T)[..., 0] * case.scale)


@pytest.mark.parametrize(("rows", "keys", "top_k"), [(0, 5, 3), (3, 0, 2), (3, 5, 0), (0, 0, 0)])
def test_nothing_to_do(rows: int, keys: int, top_k: int) -> None:
    q, kv = torch.randn(rows, 2, 6, requires_grad=True), torch.randn(keys, 6, requires_grad=True)
    selection = Selection.from_index(torch.full((rows, top_k), -1))
    out, lse = sparse_mla(q, kv, selection, scale=1.0, value_dim=4)
    assert (out.shape, lse.shape) == ((rows, 2, 4), (rows, 2))
    assert not out.any()
    assert (lse == -INF).all()
    out.sum().backward()
    assert kv.grad is not None
    assert not kv.grad.any()


def test_a_key_may_be_selected_by_all() -> None:
    """Contributions to one key from every row are summed, in fp32 also for bf16 operands."""
    kv, q = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1000, 1, 4, dtype=torch.bfloat16)
    selection = Selection.from_index(torch.zeros(1000, 1, dtype=torch.int64))
    sparse_mla(q, kv, selection, scale=1.0, value_dim=4)[0].sum().backward()
    assert kv.grad is not None
    assert kv.grad.tolist() == [[1000.0] * 4, [0.0] * 4]  # bf16 sums would stop at 256


def test_a_key_that_a_row_names_twice_counts_twice() -> None:
    """Outside of the contract, where nobody looks for it: the same as two equal keys, whose gradients add up."""
    case = make_case(Layout.causal(3), dtype=torch.float64, poison=False)
    twice = Selection.from_index(torch.tensor([[0, 0, -1], [1, 0, 1], [2, 2, 2]]))
    copies = Selection.from_index(torch.tensor([[0, 3, -1], [1, 0, 4], [2, 5, 8]]))
    got = gradients(attend, case, twice)
    expected = gradients(naive, Case(**{**vars(case), "kv": case.kv.repeat(3, 1)}), copies)
    expected["kv"] = expected["kv"].view(3, 3, -1).sum(0)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_values_are_the_leading_channels() -> None:
    case = make_case("causal")
    selection = pick(case)
    narrow = sparse_mla(case.q, case.kv, selection, scale=case.scale, value_dim=5)
    wide = sparse_mla(case.q, case.kv, selection, scale=case.scale, value_dim=24)
    torch.testing.assert_close(narrow[0], wide[0][..., :5])
    assert narrow[1].equal(wide[1])


def test_large_logits() -> None:
    case = make_case("causal", dtype=torch.float64)
    case.q.mul_(1e4)
    selection = pick(case)
    got, expected = gradients(attend, case, selection), gradients(naive, clean_gradient(case, selection), selection)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("grad_strided", [True, False])
def test_strides(grad_strided: bool) -> None:
    case = make_case("packed", dtype=torch.float64)
    selection = pick(case)
    expected = gradients(attend, case, selection)
    loose = case.map(strided)
    q, kv, sink = (x.detach().requires_grad_() for x in (loose.q, loose.kv, loose.sink))
    out, lse = sparse_mla(q, kv, selection, scale=case.scale, value_dim=16, sink=sink)
    out.backward(loose.grad_out if grad_strided else case.grad_out)
    for key, value in {"out": out, "lse": lse, "q": q.grad, "kv": kv.grad, "sink": sink.grad}.items():
        torch.testing.assert_close(value, expected[key])


def test_an_expanded_gradient() -> None:
    case = leaves(make_case("causal"))
    attend(case, pick(case))[0].sum().backward()
    assert case.kv.grad is not None
    assert case.kv.grad.isfinite().all()


def test_only_what_asks_gets_a_gradient() -> None:
    case = make_case("causal")
    selection = pick(case)
    full = gradients(attend, case, selection)
    for wanted in ("q", "kv", "sink"):
        leaf = case.map(torch.clone)
        getattr(leaf, wanted).requires_grad_()
        attend(leaf, selection, leaf.sink)[0].backward(case.grad_out)
        assert getattr(leaf, wanted).grad.equal(full[wanted])
        assert [getattr(leaf, name).grad is None for name in ("q", "kv", "sink")].count(True) == 2


@pytest.mark.parametrize("how", ["argument", "settings", "torch"])
def test_deterministic_repeats(how: str) -> None:
    """Every row selects key 0, and 63 others."""
    case = make_case(Layout.causal(128), Sizes(heads=2, width=16, value_dim=8, top_k=64))
    index = pick(case).index.clone()
    index[:, 0] = 0
    index[:, 1:] = torch.where(index[:, 1:] == 0, -1, index[:, 1:])
    selection = Selection.from_index(index)
    runs = []
    if how == "torch":
        torch.use_deterministic_algorithms(True)
    for _ in range(34):
        leaf = leaves(case)
        with settings(deterministic=how == "settings"):
            out, _ = attend(leaf, selection, leaf.sink, deterministic=True if how == "argument" else None)
        out.backward(case.grad_out)
        runs.append([out.detach(), leaf.q.grad, leaf.kv.grad, leaf.sink.grad])
    for again in runs[1:]:
        assert all(a.equal(b) for a, b in zip(runs[0], again, strict=True))


def test_rows_do_not_depend_on_company() -> None:
    """A row's output stays with it when other rows hold NaN."""
    case = make_case("causal", dtype=torch.float64)
    selection = pick(case)
    clean, _ = attend(case, selection)
    case.q[50] = NAN
    touched = attend(case, selection)[0]
    rest = torch.arange(97) != 50
    torch.testing.assert_close(touched[rest], clean[rest], rtol=0, atol=1e-14)


def test_a_stale_selection_is_seen() -> None:
    """Negative control: one key more or less changes the output."""
    case = make_case("causal", dtype=torch.float64)
    selection = pick(case, sparse_rows=False)
    shifted = Selection(torch.where(selection.index > 0, selection.index - 1, selection.index), selection.length)
    assert (attend(case, shifted)[0] - naive(case, selection)[0]).abs().max() > 0.1


Q, KV, SINK = torch.zeros(3, 2, 6), torch.zeros(5, 6), torch.zeros(2)
ROWS = Selection.from_index(torch.zeros(3, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("q", "kv", "selection", "options", "says"),
    [
        (Q[0], KV, ROWS, {}, r"q must be \[T, H, C\], got \[2, 6\]; fold a batch into T"),
        (Q, KV[:, :5], ROWS, {}, r"kv must be \[S, 6\] to meet q \[3, 2, 6\], got \[5, 5\]"),
        (Q, KV[None], ROWS, {}, r"kv must be \[S, 6\]"),
        (Q.int(), KV, ROWS, {}, "q must be floating point, got torch.int32"),
        (Q, KV.long(), ROWS, {}, "kv must be floating point, got torch.int64"),
        (Q, KV, ROWS, {"value_dim": 7}, "value_dim=7 must be between 1 and the latent width 6"),
        (Q, KV, ROWS, {"value_dim": 0}, "value_dim=0 must be between 1 and"),
        (Q, KV, ROWS, {"sink": SINK[:1]}, r"sink must be \[2\], one logit a head, got \[1\]"),
        (Q[:2], KV, ROWS, {}, "selection has 3 rows, q has 2"),
        (Q, KV, ROWS.index, {}, "selection must be a Selection, got Tensor; select_keys returns one"),
        (Q, KV, ROWS.to("meta"), {}, r"selection is on meta, q on cpu; use selection.to\(q.device\)"),
    ],
)
def test_refuses(q: Tensor, kv: Tensor, selection: Selection, options: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        sparse_mla(q, kv, selection, **{"scale": 1.0, "value_dim": 4, **options})


def test_refuses_unknown_backends() -> None:
    with pytest.raises(BackendUnavailable, match="no backend named 'flash'"):
        sparse_mla(Q, KV, ROWS, scale=1.0, value_dim=4, backend="flash")


def test_keys_that_do_not_exist() -> None:
    with pytest.raises(IndexError, match=r"selection.index holds key row 5, but there are 5 keys"):
        sparse_mla(Q, KV, Selection.from_index(torch.tensor([[0], [5], [1]])), scale=1.0, value_dim=4)


@pytest.mark.parametrize("change", [torch.clone, strided])
@pytest.mark.parametrize("with_sink", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(change: Callable[[Tensor], Tensor], with_sink: bool, dtype: torch.dtype) -> None:
    case = make_case(Layout.packed([4, 0, 3]), dtype=dtype).map(lambda x: change(x).requires_grad_())
    selection = pick(case)
    sink = case.sink if with_sink else None
    operands = (case.q, case.kv, selection.index, selection.length, sink)
    torch.library.opcheck(torch.ops.dsattn.sparse_mla.default, (*operands, 0.3, 16, False, "auto"))
    with torch.no_grad():
        out, lse = attend(case, selection, sink)
        backward = (case.grad_out.contiguous(), *operands, out, lse, 0.3, False, "auto")
        torch.library.opcheck(torch.ops.dsattn.sparse_mla_backward.default, tuple(_detached(x) for x in backward))


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def test_compiles_whole() -> None:
    case = make_case("packed")
    selection = pick(case)
    run = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got, expected = gradients(run, case, selection), gradients(attend, case, selection)
    for key, value in expected.items():
        assert got[key].equal(value), key


def test_recomputes_under_checkpoint() -> None:
    case = make_case("packed")
    selection = pick(case)

    def run(leaf: Case, selection: Selection, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        result = checkpoint(attend, leaf, selection, sink, use_reentrant=False)
        assert isinstance(result, tuple)
        return result

    got, expected = gradients(run, case, selection), gradients(attend, case, selection)
    for key, value in expected.items():
        assert got[key].equal(value), key
