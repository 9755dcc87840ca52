"""A kernel that is wrong is refused before its first use; one that is right runs, and is looked at once."""

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import backends, settings
from dsattn.backends import REFERENCE, TABLE, HeadRanks, Row
from dsattn.errors import BackendUnavailable
from dsattn.keys import Layout
from dsattn.ops import (
    dense_gqa,
    dense_mla,
    distill,
    dsa_attention,
    first_use,
    indexer_kl,
    select_keys,
    select_topk,
    sparse_gqa,
    sparse_mla,
)
from dsattn.selection import Selection, invert
from dsattn.testing import Case, Sizes, make_case, random_selection

SIZES = Sizes(heads=4, groups=2, width=24, value_dim=16, index_heads=3, index_width=8, top_k=7)
LAYOUT = Layout.packed([9, 0, 1, 20])
CASE = make_case(LAYOUT, SIZES, poison=False)
Run = Callable[..., Any]


def _references(module: str, forward: str, backward: str) -> tuple[Run, Run]:
    found = importlib.import_module(f"dsattn.ops.{module}")
    return getattr(found, forward), getattr(found, backward)


_MLA = _references("sparse_mla", "forward_reference", "backward_reference")
_GQA = _references("sparse_gqa", "forward_reference", "backward_reference")
_DENSE = _references("ranged", "forward_reference", "backward_reference")
_KL = _references("distill_reference", "forward_reference", "backward_reference")
_FUSED = importlib.import_module("dsattn.ops.dsa").shares_reference
_SELECT = _references("select", "select_reference", "topk_reference")
REFERENCES: dict[str, Run] = {
    "select_keys": _SELECT[0],
    "select_topk": _SELECT[1],
    "sparse_mla.forward": _MLA[0],
    "sparse_mla.backward": _MLA[1],
    "sparse_gqa.forward": _GQA[0],
    "sparse_gqa.backward": _GQA[1],
    "dense_mla.forward": _DENSE[0],
    "dense_mla.backward": _DENSE[1],
    "dense_gqa.forward": _DENSE[0],
    "dense_gqa.backward": _DENSE[1],
    "indexer_kl.forward": _KL[0],
    "indexer_kl.backward": _KL[1],
    "dsa_attention.forward": _FUSED,
    "invert": invert,
}


def _kl(case: Case, selection: Selection | None) -> tuple[Tensor, ...]:
    lse = torch.zeros(case.q.shape[:2])
    return (indexer_kl(case.q_i, case.k_i, case.w, case.q, case.kv, lse, case.keys, selection, scale=1.0),)


def _fused(case: Case, selection: Selection) -> tuple[Tensor, ...]:
    operands, flags = (case.q, case.kv, selection, case.q_i, case.k_i, case.w, case.keys), {"scale": case.scale}
    return dsa_attention(*operands, **flags, kl_weight=1.0, value_dim=16, sink=case.sink)


OPS: dict[str, Callable[[Case, Selection], tuple[Tensor, ...]]] = {
    "select_keys": lambda c, s: (select_keys(c.q_i, c.k_i, c.w, c.keys, 7, return_scores=True).index,),
    "select_topk": lambda c, s: (select_topk(torch.zeros(s.num_rows, len(c.kv)), c.keys, 7).index,),
    "sparse_mla": lambda c, s: sparse_mla(c.q, c.kv, s, scale=c.scale, value_dim=16, sink=c.sink),
    "sparse_gqa": lambda c, s: sparse_gqa(c.q, c.k, c.v, s, scale=c.scale, sink=c.sink),
    "dense_mla": lambda c, s: dense_mla(c.q, c.kv, c.keys, scale=c.scale, value_dim=16),
    "dense_gqa": lambda c, s: dense_gqa(c.q, c.k, c.v, c.keys, scale=c.scale),
    "indexer_kl": _kl,
    "dsa_attention": _fused,
    "invert": lambda c, s: (s.with_inverse(c.layout.num_keys).index,),
}
ATTENTION = ("sparse_mla", "sparse_gqa", "dense_mla", "dense_gqa")


def run_op(
    operation: str, *, sizes: Sizes = SIZES, layout: Layout = LAYOUT, dtype: torch.dtype = torch.float32
) -> None:
    """The public operation, forward and, for a backward, back."""
    family, _, direction = operation.partition(".")
    case = make_case(layout, sizes, dtype=dtype)
    selection = random_selection(case.keys, case.layout.num_keys, sizes.top_k)
    if direction == "backward":
        case = case.map(lambda x: x.requires_grad_())
    out = OPS[family](case, selection)[0]
    if direction == "backward":
        out.sum().backward()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(first_use, "_verdicts", {})
    backends._choose.cache_clear()
    yield
    backends._choose.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Run], list[int]]:
    """Make a function the first choice for an operation; gives the number of query rows of each of its calls."""

    def put(operation: str, function: Run) -> list[int]:
        calls: list[int] = []

        def counted(*given: Any) -> Any:
            calls.append(next(len(one) for one in given if isinstance(one, Tensor) and one.dim()))
            return function(*given)

        module = ModuleType("dsattn.backends.made_up")
        setattr(module, operation.replace(".", "_"), counted)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(TABLE, operation, (Row("made_up", "made_up", lambda _: []), REFERENCE))
        backends._choose.cache_clear()
        return calls

    return put


def spoilt(reference: Run, output: int) -> Run:
    """`reference` with one row of one result changed by a tenth, or by one where it is an index."""

    def wrong(*given: Any) -> Any:
        results = list(reference(*given))
        changed = results[output].clone()
        rows = changed.view(1, -1) if changed.dim() == 0 else changed.view(len(changed), -1)
        if changed.is_floating_point():
            largest = torch.where(rows.isfinite(), rows, 0.0).norm(dim=1).argmax()
            rows[largest] *= 1.1
        else:
            rows[0] += 1
        results[output] = changed
        return tuple(results)

    return wrong


def test_every_operation_with_kernels_is_checked() -> None:
    listed = {name for name, rows in TABLE.items() if any(row.module is not None for row in rows)}
    assert listed - {"kda"} <= set(REFERENCES)  # fla's is an autograd function that its own package tests


@pytest.mark.parametrize("operation", REFERENCES)
def test_a_right_kernel_runs_and_is_checked_once(operation: str, install, caplog: pytest.LogCaptureFixture) -> None:
    calls = install(operation, REFERENCES[operation])
    caplog.set_level(logging.INFO, logger="dsattn")
    run_op(operation)
    assert len(calls) == 2  # the small case, then the call
    run_op(operation, layout=Layout.packed([3, 41]))
    assert len(calls) == 3
    checked = [line for line in caplog.messages if f"{operation}: made_up checked on cpu, errors: " in line]
    assert len(checked) == 1


def test_another_kind_of_contributions_is_checked_anew(install) -> None:
    """It is another kernel."""
    calls = install("sparse_mla.backward", REFERENCES["sparse_mla.backward"])
    run_op("sparse_mla.backward")
    with settings(fp32_contributions=True):
        run_op("sparse_mla.backward")
        assert len(calls) == 4
        run_op("sparse_mla.backward")
    run_op("sparse_mla.backward")
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("operation", "output", "tensor"),
    [
        *(("select_keys", i, name) for i, name in enumerate(("index", "length", "score"))),
        *(("select_topk", i, name) for i, name in enumerate(("index", "length"))),
        *((f"{op}.forward", i, name) for op in ATTENTION for i, name in enumerate(("out", "lse"))),
        *((f"{op}_mla.backward", i, name) for op in ("sparse", "dense") for i, name in enumerate(("dq", "dkv"))),
        *((f"{op}_gqa.backward", i, name) for op in ("sparse", "dense") for i, name in enumerate(("dq", "dk", "dv"))),
        *(("indexer_kl.forward", i, name) for i, name in enumerate(("loss", "score_lse", "mass", "dscore"))),
        *(("indexer_kl.backward", i, name) for i, name in enumerate(("dq_i", "dk_i", "dw"))),
        *(("dsa_attention.forward", i, name) for i, name in enumerate(("out", "lse", "shares"))),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_refused_and_stays_refused(operation: str, output: int, tensor: str, install) -> None:
    calls = install(operation, spoilt(REFERENCES[operation], output))
    message = (
        rf"{operation}: made_up gives wrong results on cpu.*: {tensor} errs by \S+, limit \S+; use another backend "
        r"\(backend='reference' always serves\), or turn the check off: dsattn.settings\(first_use_checks=False\)"
    )
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=message):
            run_op(operation)
    assert len(calls) == 1
    with settings(first_use_checks=False):
        run_op(operation)
    assert len(calls) == 2


def _reads_all_slots(q, kv, index, length, *rest) -> Any:
    return _MLA[0](q, kv, index.clamp(min=0), length, *rest)


def _misses_the_last_key(q, kv, index, length, *rest) -> Any:
    last = torch.arange(index.shape[1]) == length[:, None] - 1
    return _MLA[0](q, kv, index.masked_fill(last & (length[:, None] > 1), -1), length, *rest)


def _forgets_the_sink(q, kv, index, length, sink, *rest) -> Any:
    return _MLA[0](q, kv, index, length, None, *rest)


def _takes_base_two(*given: Any) -> Any:
    out, lse = _MLA[0](*given)
    return out, lse / torch.tensor(2.0).log()


def _swaps_two_heads(q, *rest) -> Any:
    return _MLA[0](q.flip(1), *rest)


def _multiplies_in_fewer_bits(q, kv, *rest) -> Any:
    """As TF32 would: 10 bits of mantissa."""
    q, kv = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, kv))
    return _MLA[0](q, kv, *rest)


def _sums_rows_without_order(*given: Any) -> Any:
    return tuple(x + 1e-6 * x for x in _MLA[0](*given))


@pytest.mark.parametrize(
    "wrong",
    [
        _reads_all_slots,
        _misses_the_last_key,
        _forgets_the_sink,
        _takes_base_two,
        _swaps_two_heads,
        _multiplies_in_fewer_bits,
    ],
)
def test_faults_of_kernels_are_seen(wrong: Run, install) -> None:
    install("sparse_mla.forward", wrong)
    with pytest.raises(BackendUnavailable, match="gives wrong results"):
        run_op("sparse_mla.forward")


def test_rounding_is_no_fault(install) -> None:
    install("sparse_mla.forward", _sums_rows_without_order)
    run_op("sparse_mla.forward")


def test_ties_to_the_larger_key_are_seen(install) -> None:
    def wrong(q, k, w, start, stop, *rest) -> Any:
        keys = len(k)
        index, length, score = _SELECT[0](q, k.flip(0), w, keys - stop, keys - start, *rest)
        return Selection.from_index(torch.where(index < 0, -1, keys - 1 - index)).index, length, score

    install("select_keys", wrong)
    with pytest.raises(BackendUnavailable, match=r"select_keys: made_up gives wrong results .*index errs"):
        run_op("select_keys")


def test_the_loss_of_warm_up_is_checked_apart(install) -> None:
    calls = install("indexer_kl.backward", spoilt(_KL[1], 1))
    case = make_case(LAYOUT, SIZES).map(lambda x: x.requires_grad_())
    loss = _kl(case, None)[0]
    with pytest.raises(BackendUnavailable, match=r"indexer_kl.backward: made_up gives wrong results .*dk_i errs"):
        loss.backward()
    assert len(calls) == 1


def test_the_loss_of_grouped_keys_is_checked_apart(install) -> None:
    calls = install("indexer_kl.forward", _KL[0])
    case, lse = make_case(LAYOUT, SIZES), torch.zeros(30, 4)
    for kv in (case.kv, case.k):
        indexer_kl(case.q_i, case.k_i, case.w, case.q, kv, lse, case.keys, scale=1.0)
    assert len(calls) == 4


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_the_loss_of_rows_that_ranks_share_out_is_checked_apart(mode: str, direction: str, install) -> None:
    """Another number of ranks is another kernel, whose target has its rows in another order. No rank is asked."""
    selection = random_selection(CASE.keys, CASE.layout.num_keys, 7) if mode == "sparse" else None
    calls = install(f"indexer_kl.{direction}", _KL[direction == "backward"])
    for shards in (1, 2, 3):
        for _ in range(2):
            shared_loss(selection, shards).backward()
        assert len(calls) == 3 * shards


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_rows_in_another_order_are_seen(mode: str, install) -> None:
    def forgets_to_deal(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadRanks, "deal", lambda _, x: x)
            return _KL[0](*given)

    selection = random_selection(CASE.keys, CASE.layout.num_keys, 7) if mode == "sparse" else None
    install("indexer_kl.forward", forgets_to_deal)
    shared_loss(selection, 1)
    with pytest.raises(BackendUnavailable, match=r"indexer_kl.forward: made_up gives wrong results .*mass errs"):
        shared_loss(selection, 2)


def shared_loss(selection: Selection | None, shards: int) -> Tensor:
    """The first shard's part of the loss, of one rank that has every head."""
    mine = HeadRanks("", shards)
    index = (None, None) if selection is None else (selection.index, selection.length)
    q_i, k_i, w = (x.clone().requires_grad_() for x in (mine.own(CASE.q_i), CASE.k_i, mine.own(CASE.w)))
    attention = (CASE.q, CASE.kv, torch.full(CASE.q.shape[:2], 3.0))
    rows = (CASE.keys.start, CASE.keys.stop, *distill.row_weights(CASE.keys, None, 30, torch.float32))
    return distill._forward(q_i, k_i, w, *attention, *index, *rows, CASE.scale, True, "", 0, False, "auto")[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operation", REFERENCES)
def test_low_precision_is_no_fault(operation: str, dtype: torch.dtype, install) -> None:
    calls = install(operation, REFERENCES[operation])
    run_op(operation, dtype=dtype)
    assert len(calls) == 2


def test_another_geometry_is_checked_again(install) -> None:
    calls = install("sparse_mla.forward", _MLA[0])
    for sizes in (SIZES, Sizes(heads=5), Sizes(top_k=9), Sizes(width=32), SIZES):
        run_op("sparse_mla.forward", sizes=sizes)
    run_op("sparse_mla.forward", dtype=torch.bfloat16)
    assert len(calls) == 6 + 5


def test_a_kernel_that_raises_says_where(install) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of resources")

    install("sparse_mla.backward", broken)
    with pytest.raises(RuntimeError, match="out of resources") as caught:
        run_op("sparse_mla.backward")
    assert "in the first-use check of sparse_mla.backward; use another backend" in "".join(caught.value.__notes__)


def test_no_check_inside_a_capture(install, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install("sparse_mla.forward", _MLA[0])
    monkeypatch.setattr(first_use, "_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BackendUnavailable, match="run the call once before the capture"):
        run_op("sparse_mla.forward")
    assert not calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run_op("sparse_mla.forward")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run_op("sparse_mla.forward")
    assert len(calls) == 3


def test_compiling_checks_nothing_and_running_does(install) -> None:
    """The check belongs to the run: tracing sees the fake kernel alone."""
    calls = install("sparse_mla.forward", _MLA[0])
    case = make_case(LAYOUT, SIZES)
    selection = random_selection(case.keys, case.layout.num_keys, 7)

    def attend(q: Tensor) -> Tensor:
        return sparse_mla(q, case.kv, selection, scale=case.scale, value_dim=16)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    eager = attend(case.q)
    assert len(calls) == 2
    assert compiled(case.q).equal(eager)
    assert len(calls) == 3


def test_generators_are_left_alone(install) -> None:
    install("sparse_mla.forward", _MLA[0])
    case = make_case(LAYOUT, SIZES)
    before = torch.random.get_rng_state()
    sparse_mla(case.q, case.kv, random_selection(case.keys, 30, 7), scale=1.0, value_dim=16)
    assert torch.random.get_rng_state().equal(before)


def test_a_default_device_is_left_alone(install) -> None:
    install("sparse_mla.forward", _MLA[0])
    case = make_case(LAYOUT, SIZES)
    selection = random_selection(case.keys, 30, 7)
    with torch.device("meta"):
        out, _ = sparse_mla(case.q, case.kv, selection, scale=1.0, value_dim=16)
    assert out.device.type == "cpu"


def test_threads_check_once(install) -> None:
    calls = install("sparse_mla.forward", _MLA[0])
    threads = [threading.Thread(target=run_op, args=("sparse_mla.forward",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 5


def test_the_reference_needs_no_check() -> None:
    choice = backends.choose("sparse_mla.forward", backends.Call())
    assert first_use.serve("sparse_mla.forward", choice, _MLA[0]) is _MLA[0]


@pytest.mark.parametrize(
    ("got", "exact", "error"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[3.0, 4.0], [0.0, 0.0]], [[3.0, 4.0], [0.0, 0.5]], 0.14),  # against the root mean square of the norms
        ([[0.0, 5.5], [1.0, 0.0]], [[0.0, 5.0], [1.0, 0.0]], 0.1),
        ([[-torch.inf]], [[-torch.inf]], 0.0),
        ([[0.0]], [[-torch.inf]], torch.inf),
        ([[torch.nan]], [[1.0]], torch.inf),
        ([[torch.nan]], [[torch.nan]], torch.inf),
        ([[1.0, 1.0]], [[1.0]], torch.inf),
        ([[0.0]], [[0.0]], 0.0),
        ([[1e-6]], [[0.0]], 1e24),
        ([1, 2, 3], [1, 0, 4], 2.0),
        (2.0, 1.0, 1.0),
        ([], [], 0.0),
    ],
)
def test_errors(got: Any, exact: Any, error: float) -> None:
    wide = (
        torch.tensor(exact)
        if isinstance(exact, list) and exact and exact == [1, 0, 4]
        else torch.tensor(exact).double()
    )
    assert first_use.error_of(torch.tensor(got), wide) == pytest.approx(error, rel=0.02)
