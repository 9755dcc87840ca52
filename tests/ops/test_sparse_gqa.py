"""Sparse GQA against whole-matrix fp64 attention, and against MLA where the two are one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.ops import sparse_gqa, sparse_mla
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
    return sparse_gqa(case.q, case.k, case.v, selection, scale=case.scale, sink=sink, **options)


def naive(case: Case, selection: Selection, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return naive_attention(case.q, case.k, case.v, selection.mask(len(case.k)), scale=case.scale, sink=sink)


def pick(case: Case, **options: Any) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k, **options)


def gradients(
    run: Callable[..., tuple[Tensor, Tensor]], case: Case, selection: Selection, with_sink: bool = True
) -> dict[str, Tensor]:
    """out, lse and every gradient under the case's grad_out."""
    leaf = leaves(case)
    out, lse = run(leaf, selection, leaf.sink if with_sink else None)
    out.backward(case.grad_out)
    grads = {name: getattr(leaf, name).grad for name in ("q", "k", "v", *(["sink"] if with_sink else []))}
    return {"out": out.detach(), "lse": lse, **grads}


def clean_gradient(case: Case, selection: Selection) -> Case:
    """grad_out without NaN, for the oracle: rows that select nothing give nothing."""
    clean = case.grad_out.masked_fill((selection.length == 0)[:, None, None], 0)
    return Case(**{**vars(case), "grad_out": clean})


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("with_sink", [True, False])
def test_equals_masked_attention(name: str, with_sink: bool) -> None:
    """Out, lse and every gradient in fp64; padding rows, unread keys and values and their grad_out are NaN."""
    case = make_case(name, dtype=torch.float64)
    selection = pick(case)
    got = gradients(attend, case, selection, with_sink)
    expected = gradients(naive, clean_gradient(case, selection), selection, with_sink)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (3, 3), (8, 2), (8, 4)])
def test_heads_read_their_group(heads: int, groups: int) -> None:
    case = make_case("packed", Sizes(heads=heads, groups=groups, value_dim=30), dtype=torch.float64)
    selection = pick(case)
    got = gradients(attend, case, selection)
    expected = gradients(naive, clean_gradient(case, selection), selection)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


def test_swapped_groups_are_seen() -> None:
    """Negative control: heads dealt out in turn (h % G) instead of in runs (h // (H / G)) give another output."""
    case = make_case("causal", dtype=torch.float64)
    selection = pick(case, sparse_rows=False)
    dealt = sparse_gqa(case.q, case.k.flip(1), case.v.flip(1), selection, scale=case.scale)[0]
    assert (dealt - naive(case, selection)[0]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_one_group_is_mla(name: str) -> None:
    case = make_case(name, Sizes(groups=1))
    selection = pick(case)
    width = case.sizes.value_dim
    kv, k, v = (x.clone().requires_grad_() for x in (case.kv, case.kv[:, None], case.kv[:, None, :width]))
    q_mla, q_gqa = (case.q.clone().requires_grad_() for _ in range(2))
    mla = sparse_mla(q_mla, kv, selection, scale=case.scale, value_dim=width, sink=case.sink)
    gqa = sparse_gqa(q_gqa, k, v, selection, scale=case.scale, sink=case.sink)
    torch.testing.assert_close(gqa, mla, rtol=1e-6, atol=1e-6)
    for out in (mla[0], gqa[0]):
        out.backward(case.grad_out)
    torch.testing.assert_close(q_gqa.grad, q_mla.grad, rtol=1e-5, atol=1e-6)
    assert k.grad is not None
    assert v.grad is not None
    assert kv.grad is not None
    summed = k.grad[:, 0].clone()
    summed[:, :width] += v.grad[:, 0]
    torch.testing.assert_close(summed, kv.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_within_budget(dtype: torch.dtype) -> None:
    case = make_case(Layout.causal(200), Sizes(width=64, value_dim=48, top_k=40), dtype=dtype)
    selection = pick(case)
    got = gradients(attend, case, selection)
    low = gradients(naive, clean_gradient(case, selection), selection)
    exact = gradients(naive, clean_gradient(case.map(lambda x: x.double()), selection), selection)
    assert got["lse"].dtype == torch.float32
    for key in ("out", "q", "k", "v", "sink"):
        assert got[key].dtype == dtype
        assert not error_budget(got[key], exact[key], low[key]), key
        assert tensor_similarity(got[key], exact[key]) > 1 - (1e-3 if key == "out" else 3e-3)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2), (3, 3)])
def test_gradcheck(heads: int, groups: int) -> None:
    sizes = Sizes(heads=heads, groups=groups, width=4, value_dim=3, top_k=3)
    case = leaves(make_case(Layout.packed([5, 0, 1]), sizes, dtype=torch.float64))
    selection = pick(case)

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return sparse_gqa(q, k, v, selection, scale=0.7, sink=sink)[0]

    assert torch.autograd.gradcheck(run, (case.q, case.k, case.v, case.sink))


@pytest.mark.parametrize("worst", [1e4, NAN, INF])
@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_empty_slots_never_read_memory(worst: float, poisoned: str) -> None:
    """The last key of each group, which -1 or a neighbour group's offset would name, holds NaN or worse."""
    selection = Selection.from_index(torch.tensor([[0, -1, -1], [1, 0, -1], [2, 1, -1], [-1] * 3]))
    operands = {"k": torch.randn(4, 2, 6), "v": torch.randn(4, 2, 5)}
    operands[poisoned][3] = worst
    k, v = (x.requires_grad_() for x in operands.values())
    q = torch.randn(4, 4, 6, requires_grad=True)
    out, lse = sparse_gqa(q, k, v, selection, scale=0.5)
    assert out[0].equal(v[0].detach().repeat_interleave(2, dim=0))
    assert out.isfinite().all()
    assert (lse[3] == -INF).all()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert not x.grad[3].any()


def test_rows_that_select_nothing_give_and_take_nothing() -> None:
    case = make_case("packed")
    selection = pick(case)
    dead = selection.length == 0
    assert dead.any()
    case.q[dead], case.grad_out[dead] = NAN, NAN
    got = gradients(attend, case, selection)
    assert not got["out"][dead].any()
    assert not got["q"][dead].any()
    clean = make_case("packed")
    clean.q[dead], clean.grad_out[dead] = 5.0, -7.0
    for key, value in gradients(attend, clean, selection).items():
        assert got[key].equal(value), key


@pytest.mark.parametrize("sink", [INF, -INF])
def test_sinks_at_the_ends(sink: float) -> None:
    case = make_case("packed", dtype=torch.float64)
    case.sink.fill_(sink)
    selection = pick(case)
    got = gradients(attend, case, selection)
    assert all(value.isfinite().all() for key, value in got.items() if key != "lse")
    assert not got["sink"].any()
    if sink > 0:
        assert not any(got[key].any() for key in ("out", "q", "k", "v"))
    else:
        plain = gradients(attend, case, selection, with_sink=False)
        assert all(got[key].equal(plain[key]) for key in ("out", "q", "k", "v"))


@pytest.mark.parametrize(("rows", "keys", "top_k"), [(0, 5, 3), (3, 0, 2), (3, 5, 0), (4, 1, 1), (5, 3, 40)])
def test_few_rows_keys_or_slots(rows: int, keys: int, top_k: int) -> None:
    q, k, v = (torch.randn(n, g, d, dtype=torch.float64) for n, g, d in ((rows, 4, 6), (keys, 2, 6), (keys, 2, 3)))
    index = torch.arange(top_k).expand(rows, top_k)
    selection = Selection.from_index(torch.where(index < keys, index, -1))
    out, lse = sparse_gqa(q, k, v, selection, scale=1.0)
    expected = naive_attention(q, k, v, selection.mask(keys), scale=1.0)
    torch.testing.assert_close((out, lse), expected)


def test_strides() -> None:
    case = make_case("packed", dtype=torch.float64)
    selection = pick(case)
    expected = gradients(attend, case, selection)
    loose = case.map(strided)
    q, k, v, sink = (x.detach().requires_grad_() for x in (loose.q, loose.k, loose.v, loose.sink))
    out, _ = sparse_gqa(q, k, v, selection, scale=case.scale, sink=sink)
    out.backward(loose.grad_out)
    for key, value in {"out": out, "q": q.grad, "k": k.grad, "v": v.grad, "sink": sink.grad}.items():
        torch.testing.assert_close(value, expected[key])


def test_lse_is_not_differentiable() -> None:
    case = leaves(make_case("causal"))
    out, lse = attend(case, pick(case))
    assert out.requires_grad
    assert not lse.requires_grad


def test_deterministic_repeats() -> None:
    case = make_case("causal")
    selection = Selection.from_index(torch.where(pick(case).index < 0, -1, pick(case).index.clamp(max=3)).unique(dim=1))

    def run(leaf: Case, selection: Selection, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        return attend(leaf, selection, sink, deterministic=True)

    first = gradients(run, case, selection)
    for _ in range(100):
        again = gradients(run, case, selection)
        assert all(value.equal(first[key]) for key, value in again.items())


Q, K, V = torch.zeros(3, 4, 6), torch.zeros(5, 2, 6), torch.zeros(5, 2, 3)
ROWS = Selection.from_index(torch.zeros(3, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "says"),
    [
        (Q[0], K, V, {}, r"q must be \[T, H, D\], got \[4, 6\]; fold a batch into T"),
        (Q, K[:, 0], V, {}, r"k must be \[S, G, 6\] to meet q \[3, 4, 6\], got \[5, 6\]"),
        (Q, K[..., :5], V, {}, r"k must be \[S, G, 6\]"),
        (Q, K, V[:4], {}, r"v must be \[5, 2, V\] to meet k \[5, 2, 6\], got \[4, 2, 3\]"),
        (Q, K, V[:, :1], {}, r"v must be \[5, 2, V\]"),
        (Q[:, :3], K, V, {}, "q has 3 heads, not a multiple of the 2 groups of k"),
        (Q, K[:, :0], V[:, :0], {}, "q has 4 heads, not a multiple of the 0 groups of k"),
        (Q, K, V.int(), {}, "v must be floating point, got torch.int32"),
        (Q, K, V, {"sink": torch.zeros(2)}, r"sink must be \[4\], one logit a head, got \[2\]"),
        (Q[:2], K, V, {}, "selection has 3 rows, q has 2"),
    ],
)
def test_refuses(q: Tensor, k: Tensor, v: Tensor, options: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        sparse_gqa(q, k, v, ROWS, scale=1.0, **options)


def test_keys_that_do_not_exist() -> None:
    """One past the first group's keys is the second group's first key: it must not be read."""
    with pytest.raises(IndexError, match=r"selection.index holds key row 5, but there are 5 keys"):
        sparse_gqa(Q, K, V, Selection.from_index(torch.tensor([[0], [5], [1]])), scale=1.0)


@pytest.mark.parametrize("change", [torch.clone, strided, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)])
@pytest.mark.parametrize(("with_sink", "groups"), [(True, 2), (False, 1)])
def test_opcheck(change: Callable[[Tensor], Tensor], with_sink: bool, groups: int) -> None:
    case = make_case(Layout.packed([4, 0, 3]), Sizes(groups=groups)).map(lambda x: change(x).requires_grad_())
    selection = pick(case)
    sink = case.sink if with_sink else None
    operands = (case.q, case.k, case.v, selection.index, selection.length, sink)
    torch.library.opcheck(torch.ops.dsattn.sparse_gqa.default, (*operands, 0.3, False, "auto"))
    with torch.no_grad():
        out, lse = attend(case, selection, sink)
        backward = (case.grad_out.contiguous(), *operands, out, lse, 0.3, False, "auto")
        plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in backward)
        torch.library.opcheck(torch.ops.dsattn.sparse_gqa_backward.default, plain)


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
