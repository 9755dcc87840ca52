"""On a CUDA GPU every operation can be captured in a CUDA graph, compiled whole, and recomputed; scratch is reused."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsattn import settings
from dsattn.errors import BackendUnavailable
from dsattn.keys import Layout
from dsattn.ops import (
    dense_gqa,
    dense_mla,
    dsa_attention,
    first_use,
    indexer_kl,
    output_gate,
    select_keys,
    select_topk,
    sparse_gqa,
    sparse_mla,
)
from dsattn.selection import Selection
from dsattn.testing import Case, Sizes, make_case, random_selection

pytestmark = pytest.mark.gpu
GPU = "cuda"
# The geometries of results/record_errors.py: what is compiled there is not compiled here.
MLA = Sizes(heads=64, groups=1, width=576, value_dim=512, index_heads=32, index_width=128, top_k=2048)
GQA = Sizes(heads=64, groups=8, width=128, value_dim=128, index_heads=32, index_width=128, top_k=2048)
TOTAL = 600
# Equal numbers of rows and keys, cut otherwise.
LAYOUTS = (
    lambda: Layout.packed([300, 0, 1, 211], total=TOTAL),
    lambda: Layout.packed([5, 64, 420], total=TOTAL),
)
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Operation:
    """sizes: of its case. leaves: operands that get gradients, none where the operation has no backward."""

    sizes: Sizes
    leaves: tuple[str, ...]
    run: Callable[[Case, Selection], Results]


def _flags(case: Case) -> dict[str, Any]:
    return {"scale": case.scale, "value_dim": case.sizes.value_dim}


def _kl(case: Case, selection: Selection | None) -> Results:
    """Of a made-up log-sum-exp: what the loss is worth does not matter here."""
    lse = case.q.detach().float().square().mean(-1)
    args = (case.q_i, case.k_i, case.w, case.q, case.kv, lse, case.keys, selection)
    return (indexer_kl(*args, scale=case.scale),)


def _dsa(case: Case, selection: Selection) -> Results:
    args = (case.q, case.kv, selection, case.q_i, case.k_i, case.w, case.keys)
    return dsa_attention(*args, kl_weight=0.5, sink=case.sink, **_flags(case))[::2]


def _select(case: Case, _: Selection) -> Results:
    selection = select_keys(case.q_i, case.k_i, case.w, case.keys, case.sizes.top_k, return_scores=True)
    assert selection.score is not None
    return selection.index, selection.length, selection.score


def _topk(case: Case, _: Selection) -> Results:
    selection = select_topk(case.kv.float() @ case.kv.float().T, case.keys, case.sizes.top_k)
    return selection.index, selection.length


OPERATIONS = {
    "select_keys": Operation(MLA, (), _select),
    "select_topk": Operation(MLA, (), _topk),
    "sparse_mla": Operation(
        MLA, ("q", "kv", "sink"), lambda c, s: sparse_mla(c.q, c.kv, s, sink=c.sink, **_flags(c))[:1]
    ),
    "dense_mla": Operation(
        MLA, ("q", "kv", "sink"), lambda c, s: dense_mla(c.q, c.kv, c.keys, sink=c.sink, **_flags(c))[:1]
    ),
    "sparse_gqa": Operation(
        GQA, ("q", "k", "v", "sink"), lambda c, s: sparse_gqa(c.q, c.k, c.v, s, scale=c.scale, sink=c.sink)[:1]
    ),
    "dense_gqa": Operation(
        GQA, ("q", "k", "v", "sink"), lambda c, s: dense_gqa(c.q, c.k, c.v, c.keys, scale=c.scale, sink=c.sink)[:1]
    ),
    "indexer_kl_sparse": Operation(MLA, ("q_i", "k_i", "w"), _kl),
    "indexer_kl_dense": Operation(MLA, ("q_i", "k_i", "w"), lambda c, _: _kl(c, None)),
    "dsa_attention": Operation(MLA, ("q", "kv", "sink", "q_i", "k_i", "w"), _dsa),
    "output_gate": Operation(GQA, ("grad_out", "q"), lambda c, _: (output_gate(c.grad_out, c.q),)),
}
WITH_BACKWARD = [name for name, operation in OPERATIONS.items() if operation.leaves]
READ_KEYS = [name for name in OPERATIONS if name.startswith(("select", "dense")) or name.endswith("kl_dense")]


@functools.cache
def _made(sizes: Sizes, number: int) -> tuple[Case, Selection]:
    case = make_case(LAYOUTS[number](), sizes, seed=number, dtype=torch.bfloat16, device=GPU)
    selection = random_selection(case.keys, case.layout.num_keys, sizes.top_k, seed=number)
    return replace(case, w=case.w * (case.q_i[0].numel() ** -0.5)), selection


def inputs(op: str, number: int) -> tuple[Case, Selection]:
    """The number-th case, of its own layout, data and selection, with leaves that ask for gradients."""
    case, selection = _made(OPERATIONS[op].sizes, number)
    case = replace(case.map(lambda x: x.clone().requires_grad_()), layout=LAYOUTS[number]().to(GPU))
    return case, Selection(selection.index.clone(), selection.length.clone())


def step(op: str, case: Case, selection: Selection) -> Results:
    """Everything that the operation gives, forward and backward."""
    operation = OPERATIONS[op]
    results = operation.run(case, selection)
    if not operation.leaves:
        return results
    seeds = [torch.ones_like(one) if one.dim() == 0 else case.grad_out for one in results]
    grads = torch.autograd.grad(results, [getattr(case, name) for name in operation.leaves], seeds)
    return *(one.detach() for one in results), *grads


def fill(into: tuple[Case, Selection], source: tuple[Case, Selection], *, layout: bool = True) -> None:
    """Replace data, layout and selection in place, as a training loop with CUDA graphs does."""
    case, selection = into
    with torch.no_grad():
        for name in ("q", "kv", "k", "v", "q_i", "k_i", "w", "sink", "grad_out"):
            getattr(case, name).copy_(getattr(source[0], name))
    selection.index.copy_(source[1].index)
    selection.length.copy_(source[1].length)
    if layout:
        case.layout.copy_(source[0].layout)


def capture(run: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A graph of `run` after one warm-up on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def same(got: Results, expected: Results) -> bool:
    return all(
        torch.equal(
            a.nan_to_num(0.0) if a.is_floating_point() else a, b.nan_to_num(0.0) if b.is_floating_point() else b
        )
        for a, b in zip(got, expected, strict=True)
    )


@pytest.fixture(autouse=True)
def sync_debug_off() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("op", OPERATIONS)
def test_nothing_waits_for_the_gpu(op: str, deterministic: bool) -> None:
    case, selection = inputs(op, 0)
    with settings(deterministic=deterministic):
        step(op, case, selection)
        torch.cuda.set_sync_debug_mode("error")
        step(op, case, selection)


def test_a_wait_is_seen() -> None:
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=GPU).item()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_replay_with_other_data_equals_eager(op: str, deterministic: bool) -> None:
    static, other = inputs(op, 0), inputs(op, 1)
    with settings(deterministic=deterministic):
        graph, results = capture(lambda: step(op, *static))
        for source in (other, inputs(op, 0)):
            fill(static, source)
            graph.replay()
            expected = step(op, *source)
            assert same(results[:1], expected[:1])
            if deterministic or not OPERATIONS[op].leaves:
                assert same(results, expected)
            else:
                for got, want in zip(results, expected, strict=True):
                    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().nan_to_num(0).max()),
                                               equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("op", READ_KEYS)
def test_a_stale_layout_is_another_result(op: str) -> None:
    """Negative control: everything but the layout is refreshed."""
    static, other = inputs(op, 0), inputs(op, 1)
    with settings(deterministic=True):
        graph, results = capture(lambda: step(op, *static))
        fill(static, other, layout=False)
        graph.replay()
        assert not same(results, step(op, *other))


def test_a_selection_is_made_and_used_in_one_graph() -> None:
    def layer(case: Case) -> Results:
        selection = select_keys(case.q_i, case.k_i, case.w, case.keys, case.sizes.top_k)
        return step("dsa_attention", case, selection)

    (static, unused), (other, _) = inputs("dsa_attention", 0), inputs("dsa_attention", 1)
    with settings(deterministic=True):
        graph, results = capture(lambda: layer(static))
        fill((static, unused), (other, unused))
        graph.replay()
        assert same(results, layer(other))


def test_a_capture_without_a_warm_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case, selection = inputs("sparse_mla", 0)
    step("sparse_mla", case, selection)  # compiled, and then forgotten
    monkeypatch.setattr(first_use, "_verdicts", {})
    refused = pytest.raises(BackendUnavailable, match="run the call once before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        case.q.detach().clone()  # torch warns of graphs without a kernel
        sparse_mla(case.q, case.kv, selection, sink=case.sink, **_flags(case))
    torch.cuda.synchronize()


def peak(run: Callable[[], object]) -> int:
    """Bytes that `run` allocates beyond what was there, at its highest."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def times(count: int, run: Callable[[], object]) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(count):
            run()

    return repeat


@pytest.mark.parametrize("op", WITH_BACKWARD)
def test_more_calls_take_no_more_memory(op: str) -> None:
    """The scratch of the deterministic mode is one, in eager calls and in a capture of them."""
    case, selection = inputs(op, 0)

    def captured(count: int) -> int:
        graph = torch.cuda.CUDAGraph()

        def record() -> None:
            with torch.cuda.graph(graph):
                times(count, lambda: step(op, case, selection))()

        return peak(record)

    with settings(deterministic=True):
        step(op, case, selection)
        # Torch's allocator cuts its blocks a little differently from call to call.
        assert peak(times(5, lambda: step(op, case, selection))) <= 1.25 * peak(lambda: step(op, case, selection))
        assert captured(5) <= 1.25 * captured(1)


def test_kept_results_take_more_memory() -> None:
    """Negative control: the measure sees what stays alive."""
    case, selection = inputs("sparse_mla", 0)
    step("sparse_mla", case, selection)
    kept: list[Results] = []
    once = peak(lambda: step("sparse_mla", case, selection))
    assert peak(times(5, lambda: kept.append(step("sparse_mla", case, selection)))) > 1.25 * once


@pytest.mark.parametrize("op", OPERATIONS)
def test_compiles_whole(op: str) -> None:
    case, selection = inputs(op, 0)
    compiled = torch.compile(OPERATIONS[op].run, fullgraph=True, backend="aot_eager")
    with settings(deterministic=True):
        expected = OPERATIONS[op].run(case, selection)
        got = compiled(case, selection)
        assert same(tuple(one.detach() for one in got), tuple(one.detach() for one in expected))
        if OPERATIONS[op].leaves:
            leaves = [getattr(case, name) for name in OPERATIONS[op].leaves]
            seeds = [torch.ones_like(one) if one.dim() == 0 else case.grad_out for one in got]
            assert same(torch.autograd.grad(got, leaves, seeds), torch.autograd.grad(expected, leaves, seeds))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own imports
def test_a_layer_compiles_by_inductor() -> None:
    def layer(case: Case) -> Results:
        selection = select_keys(case.q_i, case.k_i, case.w, case.keys, case.sizes.top_k)
        out, kl = _dsa(case, selection)
        return output_gate(out, out * 0.5), kl

    case, _ = inputs("dsa_attention", 0)
    got, expected = torch.compile(layer, fullgraph=True)(case), layer(case)
    torch.testing.assert_close(got[0], expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[1], expected[1])


@pytest.mark.parametrize("op", WITH_BACKWARD)
def test_recomputes_to_the_same_bits(op: str) -> None:
    case, selection = inputs(op, 0)
    leaves = [getattr(case, name) for name in OPERATIONS[op].leaves]
    with settings(deterministic=True):
        expected = step(op, case, selection)
        results = checkpoint(OPERATIONS[op].run, case, selection, use_reentrant=False)
        seeds = [torch.ones_like(one) if one.dim() == 0 else case.grad_out for one in results]
        grads = torch.autograd.grad(results, leaves, seeds)
    assert same((*(one.detach() for one in results), *grads), expected)
