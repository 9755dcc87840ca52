"""A selection's inverse as an operator, and what operations do with one: nothing that can be seen."""

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dsattn.selection
from dsattn import settings
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.ops import dsa_attention, indexer_kl, sparse_gqa, sparse_mla
from dsattn.ops.first_use import serve
from dsattn.ops.invert import fields, joined
from dsattn.selection import Inverse, Selection, invert
from dsattn.testing import Case, Sizes, make_case, random_selection

Run = Callable[[Case, Selection], tuple[Tensor, ...]]


def _kl(case: Case, selection: Selection) -> tuple[Tensor, ...]:
    lse = torch.zeros(case.q.shape[:2])
    return (indexer_kl(case.q_i, case.k_i, case.w, case.q, case.kv, lse, case.keys, selection, scale=1.0),)


def _dsa(case: Case, selection: Selection) -> tuple[Tensor, ...]:
    operands = (case.q, case.kv, selection, case.q_i, case.k_i, case.w, case.keys)
    return dsa_attention(*operands, scale=0.3, kl_weight=0.5, value_dim=16, deterministic=True)[::2]


# Operation -> (its results that are differentiable, what gets gradients).
OPERATIONS: dict[str, tuple[Run, tuple[str, ...]]] = {
    "sparse_mla": (lambda c, s: sparse_mla(c.q, c.kv, s, scale=0.3, value_dim=16)[:1], ("q", "kv")),
    "sparse_gqa": (lambda c, s: sparse_gqa(c.q, c.k, c.v, s, scale=0.3)[:1], ("q", "k", "v")),
    "indexer_kl": (_kl, ("q_i", "k_i", "w")),
    "dsa_attention": (_dsa, ("q", "kv", "q_i", "k_i", "w")),
}


def chosen(case: Case) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)


@pytest.mark.parametrize("num_keys", [30, 4])
def test_serves_what_the_selection_asks_for(num_keys: int) -> None:
    case = make_case("packed")
    selection = chosen(case)
    inverse = selection.with_inverse(num_keys).inverse
    expected = invert(selection.index, selection.length, num_keys)
    assert inverse is not None
    assert all(got.equal(one) for got, one in zip(inverse, expected, strict=True))


def test_opcheck() -> None:
    selection = chosen(make_case("packed"))
    torch.library.opcheck(torch.ops.dsattn.invert.default, (selection.index, selection.length, 9))


def test_fields_of_what_fits() -> None:
    selection = Selection.from_index(torch.tensor([[0, 1], [1, 2]]))
    assert fields(None, 3) == fields(selection, 3) == fields(selection.with_inverse(4), 3) == (None, None)
    slot, offset = fields(selection.with_inverse(3), 3)
    inverse = joined(slot, offset)
    assert inverse is not None
    assert inverse.slot.tolist() == [0, 1, 2, 3]
    assert inverse.offset.tolist() == [0, 1, 3, 4]
    assert joined(None, None) is None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_inverse_reaches_the_backward_alone(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients have the same bits with it, without it, and with one of other keys, which is left out."""
    run, leaves = OPERATIONS[operation]
    case = make_case("packed").map(lambda x: x.requires_grad_())
    selection, keys = chosen(case), case.layout.num_keys
    seen: list[tuple] = []

    def noted(name: str, *rest):
        function = serve(name, *rest)
        return lambda *given: (seen.append((name, given)), function(*given))[1]

    for name in ("sparse_mla", "sparse_gqa", "distill"):
        monkeypatch.setattr(importlib.import_module(f"dsattn.ops.{name}"), "serve", noted)
    found = []
    for given in (selection, selection.with_inverse(keys), selection.with_inverse(keys + 1)):
        results = run(case, given)
        seeds = [torch.ones_like(x) if x.dim() == 0 else case.grad_out for x in results]
        grads = torch.autograd.grad(results, [getattr(case, name) for name in leaves], seeds)
        found.append([*results, *grads])
    for other in found[1:]:
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found[0], other, strict=True))
    last = [given[-1] for name, given in seen if name.endswith("backward")]
    each = len(last) // 3
    assert each == (2 if operation == "dsa_attention" else 1)
    assert [isinstance(one, Inverse) for one in last] == [False] * each + [True] * each + [False] * each


@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiles_whole(operation: str) -> None:
    run, leaves = OPERATIONS[operation]
    case = make_case("packed").map(lambda x: x.requires_grad_())
    keys = case.layout.num_keys

    def step(selection: Selection) -> tuple[Tensor, ...]:
        return run(case, selection.with_inverse(keys))

    found = []
    for function in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        results = function(chosen(case))
        seeds = [torch.ones_like(x) if x.dim() == 0 else case.grad_out for x in results]
        found.append([*results, *torch.autograd.grad(results, [getattr(case, name) for name in leaves], seeds)])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def _changed_by_replace(selection: Selection, other: Selection) -> Selection:
    return replace(selection, index=other.index, length=other.length)


def _changed_in_place(selection: Selection, other: Selection) -> Selection:
    selection.index.copy_(other.index)
    selection.length.copy_(other.length)
    return selection


@pytest.mark.parametrize("change", [_changed_by_replace, _changed_in_place])
@pytest.mark.parametrize("again", [False, True], ids=["left out", "made again"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_inverse_of_another_index_reaches_nobody(
    operation: str, again: bool, change: Callable[[Selection, Selection], Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, leaves = OPERATIONS[operation]
    case = make_case("packed").map(lambda x: x.requires_grad_())
    keys, other = case.layout.num_keys, random_selection(case.keys, case.layout.num_keys, case.sizes.top_k, seed=7)
    changed = change(chosen(case).with_inverse(keys), other)
    assert changed.index.equal(other.index)
    assert not chosen(case).index.equal(other.index)
    changed = changed.with_inverse(keys) if again else changed
    seen: list[Inverse | None] = []

    def noted(name: str, *rest):
        function = serve(name, *rest)
        return lambda *given: (seen.extend(given[-1:] if name.endswith("backward") else ()), function(*given))[1]

    for name in ("sparse_mla", "sparse_gqa", "distill"):
        monkeypatch.setattr(importlib.import_module(f"dsattn.ops.{name}"), "serve", noted)
    results = run(case, changed)
    seeds = [torch.ones_like(x) if x.dim() == 0 else case.grad_out for x in results]
    torch.autograd.grad(results, [getattr(case, name) for name in leaves], seeds)
    expected = invert(other.index, other.length, keys)
    assert seen
    for one in seen:
        assert (one is not None) == again
        assert one is None or all(got.equal(right) for got, right in zip(one, expected, strict=True))


def test_compiles_whole_around_a_selection_that_has_one() -> None:
    case = make_case("packed").map(lambda x: x.requires_grad_())
    selection, keys = chosen(case).with_inverse(case.layout.num_keys), case.layout.num_keys

    def step(given: Selection) -> tuple[Tensor, bool, bool]:
        kept = given.with_inverse(keys) is given and given.inverse_of(keys) is not None
        changed = replace(given, index=given.index.roll(1, 0))
        return sparse_mla(case.q, case.kv, given, scale=0.3, value_dim=16)[0], kept, changed.inverse is not None

    found = [function(selection) for function in (torch.compile(step, fullgraph=True, backend="aot_eager"), step)]
    assert found[0][1:] == found[1][1:] == (True, False)
    grads = [torch.autograd.grad(out, case.kv, case.grad_out)[0] for out, *_ in found]
    assert grads[0].equal(grads[1])


def test_a_captured_graph_takes_no_inverse_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays may meet another index, and would not tell. What it made means nothing outside of it."""
    outside = Selection.from_index(torch.tensor([[0, 1]])).with_inverse(2)
    monkeypatch.setattr(dsattn.selection, "_is_captured", lambda x: True)
    with pytest.raises(InputError, match=r"outside of the CUDA graph .*with_inverse inside of the capture"):
        fields(outside, 2)
    inside = outside.with_inverse(2)
    assert inside is not outside
    assert inside.with_inverse(2) is inside
    assert joined(*fields(inside, 2)) is not None
    monkeypatch.undo()
    assert fields(inside, 2) == (None, None)


GPU_SIZES = {
    "mla": Sizes(heads=64, groups=1, width=576, value_dim=512, index_heads=32, index_width=128, top_k=2048),
    "gqa": Sizes(heads=64, groups=8, width=128, value_dim=128, index_heads=32, index_width=128, top_k=2048),
}
# Operation -> (geometry, results, leaves, backends).
ON_A_GPU: dict[str, tuple[str, Callable[..., tuple[Tensor, ...]], tuple[str, ...], tuple[str, ...]]] = {
    "sparse_mla": (
        "mla",
        lambda c, s, f: sparse_mla(c.q, c.kv, s, scale=c.scale, **f)[:1],
        ("q", "kv"),
        ("triton", "auto"),
    ),
    "sparse_gqa": (
        "gqa",
        lambda c, s, f: sparse_gqa(c.q, c.k, c.v, s, scale=c.scale, **f)[:1],
        ("q", "k", "v"),
        ("auto",),
    ),
    "indexer_kl": (
        "mla",
        lambda c, s, f: (
            indexer_kl(
                *(c.q_i, c.k_i, c.w, c.q, c.kv, c.q.detach().float().square().mean(-1), c.keys, s), scale=c.scale, **f
            ),
        ),
        ("q_i", "k_i", "w"),
        ("auto",),
    ),
    "dsa_attention": (
        "mla",
        lambda c, s, f: dsa_attention(*(c.q, c.kv, s, c.q_i, c.k_i, c.w, c.keys), scale=c.scale, kl_weight=0.5, **f)[
            ::2
        ],
        ("q", "kv", "q_i", "k_i", "w"),
        ("auto",),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("scratch", [2**31, 2**28])
@pytest.mark.parametrize(
    ("operation", "backend"), [(name, backend) for name, (*_, served) in ON_A_GPU.items() for backend in served]
)
def test_bits_on_a_gpu(operation: str, backend: str, scratch: int) -> None:
    """In one run of rows and in several; rows that do not count in the loss, empty rows, keys that nobody reads."""
    geometry, run, leaves, _ = ON_A_GPU[operation]
    layout = Layout.packed([1100, 0, 1, 3000], total=4200)
    case = make_case(layout, GPU_SIZES[geometry], dtype=torch.bfloat16, device="cuda")
    case = replace(case, w=case.w * (case.q_i[0].numel() ** -0.5)).map(lambda x: x.requires_grad_())
    selection, found = chosen(case), []
    with settings(scratch_bytes=scratch):
        for given in (selection, selection.with_inverse(layout.num_keys)):
            results = run(case, given, {"deterministic": True, "backend": backend})
            seeds = [torch.ones_like(x) if x.dim() == 0 else case.grad_out for x in results]
            found.append([*results, *torch.autograd.grad(results, [getattr(case, name) for name in leaves], seeds)])
    for without, inverted in zip(*found, strict=True):
        assert torch.equal(without.nan_to_num(), inverted.nan_to_num())


@pytest.mark.gpu
def test_a_kernel_serves_a_gpu_and_a_graph_holds_it() -> None:
    layout = Layout.causal(700).to("cuda")
    one, other = (random_selection(layout.keys, 700, 64, seed=seed) for seed in (0, 1))
    expected = invert(other.index, other.length, 700)
    with settings(strict=True):
        one.with_inverse(700)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inverse = one.with_inverse(700).inverse
    one.index.copy_(other.index)
    one.length.copy_(other.length)
    graph.replay()
    assert inverse is not None
    assert all(got.equal(wanted) for got, wanted in zip(inverse, expected, strict=True))
