"""Dispatch on made-up rows: order, names, reasons, strictness, settings."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dsattn import backends
from dsattn.backends import (
    OPERATIONS,
    REFERENCE,
    TABLE,
    Call,
    Row,
    choose,
    explain,
    settings,
)
from dsattn.errors import BackendUnavailable
from dsattn.keys import Layout
from dsattn.ops import indexer_kl, select_keys, sparse_mla
from dsattn.selection import Selection

GPU = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, top_k=2048)
FORWARD, BACKWARD = "sparse_mla.forward", "sparse_mla.backward"


SHIPPED = dict(TABLE)


@pytest.fixture(autouse=True)
def bare_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table without kernels, no choices remembered, and none told of."""
    for operation in OPERATIONS:
        monkeypatch.setitem(TABLE, operation, SHIPPED[operation][-1:])
    backends._choose.cache_clear()
    backends._log_once.cache_clear()
    yield
    backends._choose.cache_clear()


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A backend `vendor` of the forward alone, which wants a Hopper GPU and 64 heads; and `old`, which never serves."""
    module = ModuleType("dsattn.backends.vendor")
    module.sparse_mla_forward = lambda *_: "vendor's forward"
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def requirements(call: Call) -> list[str]:
        wanted = {"a Hopper GPU": call.capability == 90, "64 heads": call.heads == 64}
        return [what for what, met in wanted.items() if not met]

    rows = (Row("old", "old", lambda _: ["retirement"]), Row("vendor", "vendor", requirements), REFERENCE)
    monkeypatch.setitem(TABLE, FORWARD, rows)
    return module


def test_the_reference_serves_everything() -> None:
    assert set(TABLE) == set(OPERATIONS)
    for operation in OPERATIONS:
        for call in (Call(), GPU):
            choice = choose(operation, call)
            name = "composed" if operation.startswith("dsa_attention") else "reference"
            assert (choice.name, choice.function, choice.passed_over) == (name, None, ())
            assert choose(operation, call, name) == choice


def test_auto_takes_the_first_that_can(vendor: ModuleType) -> None:
    choice = choose(FORWARD, GPU)
    assert choice.name == "vendor"
    assert choice.function is vendor.sparse_mla_forward
    assert choice.passed_over == (("old", "retirement"),)
    assert str(choice) == "vendor (passed over: old needs retirement)"


def test_auto_remembers_every_unmet_requirement(vendor: ModuleType) -> None:
    choice = choose(FORWARD, Call())
    assert (choice.name, choice.function) == ("reference", None)
    assert choice.passed_over == (("old", "retirement"), ("vendor", "a Hopper GPU, 64 heads"))


def test_a_name_runs_or_raises(vendor: ModuleType) -> None:
    assert choose(FORWARD, GPU, "vendor").name == "vendor"
    assert choose(FORWARD, GPU, "reference").function is None
    with pytest.raises(BackendUnavailable, match=r"sparse_mla.forward: vendor needs 64 heads; got Call\(.*heads=8"):
        choose(FORWARD, Call(capability=90, heads=8), "vendor")


def test_an_unknown_name_lists_the_known(vendor: ModuleType) -> None:
    with pytest.raises(BackendUnavailable, match="no backend named 'vndor'; there is auto, old, vendor, reference"):
        choose(FORWARD, GPU, "vndor")
    with pytest.raises(BackendUnavailable, match="select_keys: no backend named 'vendor'; there is auto, reference"):
        choose("select_keys", GPU, "vendor")


def test_a_forward_by_name_leaves_the_backward_to_auto(vendor: ModuleType) -> None:
    assert choose(BACKWARD, GPU, "vendor") == choose(BACKWARD, GPU, "auto")
    with pytest.raises(BackendUnavailable, match=r"sparse_gqa.backward: no backend named 'vendor'"):
        choose("sparse_gqa.backward", GPU, "vendor")


def test_a_row_without_its_function_is_our_mistake(vendor: ModuleType) -> None:
    del vendor.sparse_mla_forward
    with pytest.raises(AttributeError, match="sparse_mla_forward"):
        choose(FORWARD, GPU)


def test_choices_are_made_and_logged_once(vendor: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dsattn")
    first = choose(FORWARD, GPU)
    assert choose(FORWARD, GPU) is first
    assert caplog.messages == ["sparse_mla.forward in bfloat16: vendor (passed over: old needs retirement)"]
    choose(FORWARD, Call())
    assert caplog.messages[1:] == [
        "sparse_mla.forward in float32: reference (passed over: old needs retirement; "
        "vendor needs a Hopper GPU, 64 heads)"
    ]


def test_one_line_tells_of_all_calls_that_choose_alike(vendor: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """Steps with other sizes must not fill the log; another reason is another line."""
    caplog.set_level(logging.INFO, logger="dsattn")
    for top_k in (7, 2048):
        for size in ("8K", "64K"):
            choose(FORWARD, replace(GPU, top_k=top_k, size_class=size))
    assert len(caplog.messages) == 1
    choose(FORWARD, replace(GPU, heads=8))
    choose(FORWARD, replace(GPU, capability=80))
    assert caplog.messages[1:] == [
        "sparse_mla.forward in bfloat16: reference (passed over: old needs retirement; vendor needs 64 heads)",
        "sparse_mla.forward in bfloat16: reference (passed over: old needs retirement; vendor needs a Hopper GPU)",
    ]


def test_strict_forbids_the_reference_on_a_gpu(vendor: ModuleType) -> None:
    few_heads = Call(device="cuda", capability=90, heads=8)
    with settings(strict=True):
        assert choose(FORWARD, GPU).name == "vendor"
        with pytest.raises(BackendUnavailable, match=r"strict forbids the reference on cuda: .*vendor needs 64 heads"):
            choose(FORWARD, few_heads)
        with pytest.raises(BackendUnavailable, match=r"strict forbids .*: no kernel is listed for it"):
            choose("select_keys", GPU)
        assert choose(FORWARD, few_heads, "reference").name == "reference"
        assert choose(FORWARD, Call()).name == "reference"
    assert choose(FORWARD, few_heads).name == "reference"


def test_strict_forbids_a_fall_beside_a_named_forward(vendor: ModuleType) -> None:
    with settings(strict=True), pytest.raises(BackendUnavailable, match=r"strict forbids the reference on cuda"):
        choose(BACKWARD, GPU, "vendor")


def test_strict_sees_choices_made_before(vendor: ModuleType) -> None:
    choose("select_keys", GPU)
    with settings(strict=True), pytest.raises(BackendUnavailable):
        choose("select_keys", GPU)


def test_explain_shows_the_whole_table(vendor: ModuleType) -> None:
    lines = explain(GPU).splitlines()
    assert len(lines) == sum(map(len, TABLE.values()))
    shown = [line.split(maxsplit=2) for line in lines if line.startswith(FORWARD)]
    assert shown == [
        [FORWARD, "old", "needs retirement"],
        [FORWARD, "vendor", "serves"],
        [FORWARD, "reference", "can serve"],
    ]
    shown = [line.split(maxsplit=2) for line in explain(Call()).splitlines() if line.startswith(FORWARD)]
    assert shown[1:] == [[FORWARD, "vendor", "needs a Hopper GPU, 64 heads"], [FORWARD, "reference", "serves"]]


def test_operations_run_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table is called by the operation with its plain tensors, forward and backward apart."""
    seen: list[Any] = []
    module = ModuleType("dsattn.backends.spy")

    def forward(q, kv, index, length, sink, scale, value_dim):
        seen.append(("forward", scale, value_dim))
        return q.new_full((*q.shape[:2], value_dim), 2.0), q.new_zeros(q.shape[:2])

    def backward(grad_out, q, kv, index, length, sink, out, lse, scale, deterministic, inverse):
        seen.append(("backward", scale, deterministic, inverse))
        return torch.full_like(q, 3.0), torch.full_like(kv, 4.0)

    module.sparse_mla_forward, module.sparse_mla_backward = forward, backward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for operation in (FORWARD, BACKWARD):
        monkeypatch.setitem(TABLE, operation, (Row("spy", "spy", lambda _: []), REFERENCE))
    q, kv = torch.zeros(2, 1, 4, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
    selection = Selection.from_index(torch.tensor([[0], [1]]))
    with settings(first_use_checks=False):  # a spy computes nothing right
        out, _ = sparse_mla(q, kv, selection, scale=0.5, value_dim=3, deterministic=True)
        out.sum().backward()
    assert seen == [("forward", 0.5, 3), ("backward", 0.5, True, None)]
    assert q.grad is not None
    assert kv.grad is not None
    assert out.eq(2).all()
    assert q.grad.eq(3).all()
    assert kv.grad.eq(4).all()


def test_a_call_that_cannot_go_backward_does_not_go_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Call) -> list[str]:
        return ["fp64"] if call.dtype == "float32" else []

    monkeypatch.setitem(TABLE, BACKWARD, (Row("picky", "picky", broken),))
    q, kv = torch.zeros(1, 1, 4), torch.zeros(1, 4)
    with pytest.raises(BackendUnavailable, match=r"sparse_mla.backward: picky needs fp64"):
        sparse_mla(q, kv, Selection.from_index(torch.tensor([[0]])), scale=1.0, value_dim=4)


def test_fp64_beside_narrow_operands_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel multiplies it: `auto` must know."""
    seen, operations = set(), ("select_keys", "indexer_kl.forward", "indexer_kl.backward")
    for operation in operations:
        spy = Row("reference", None, lambda call, name=operation: seen.add((name, call.dtype)) or [])
        monkeypatch.setitem(TABLE, operation, (spy,))
    q_i, k_i, q, kv = (torch.ones(shape).bfloat16() for shape in ((3, 2, 4), (3, 4), (3, 2, 6), (3, 6)))
    q_i.requires_grad_()
    keys, lse = Layout.causal(3).keys, torch.ones(3, 2)
    for w, more, dtype in ((torch.ones(3, 2), lse, "bfloat16"), (torch.ones(3, 2).double(), lse.double(), "float64")):
        select_keys(q_i, k_i, w, keys, 2)
        indexer_kl(q_i, k_i, w.float(), q, kv, more, keys, scale=1.0).backward()
        assert seen == {
            (operation, dtype) for operation in ("select_keys", "indexer_kl.forward", "indexer_kl.backward")
        }
        seen.clear()


def test_unknown_operation_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        choose("sparse_mla", Call())


@pytest.fixture
def shipped_table(bare_table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for operation in OPERATIONS:
        monkeypatch.setitem(TABLE, operation, SHIPPED[operation])


KERNELS = {
    "select_topk": ("triton",),
    "select_keys": ("hopper", "triton", "deep_gemm"),
    "invert": ("triton",),
    FORWARD: ("flash_mla", "hopper", "triton"),
    BACKWARD: ("cudnn", "hopper", "triton"),
    "dsa_attention.forward": ("hopper",),
    **{
        f"{name}.{direction}": ("triton",)
        for name in ("sparse_gqa", "dense_mla", "dense_gqa", "indexer_kl")
        for direction in ("forward", "backward")
    },
    "kda": ("fla",),
}


BY_NAME = {
    "select_topk": ("cudnn", "deep_select"),
    "select_keys": ("cudnn", "tilelang"),
    FORWARD: ("tilelang",),
    BACKWARD: ("tilelang",),
    "indexer_kl.forward": ("cudnn",),
    "indexer_kl.backward": ("cudnn",),
}


@pytest.mark.usefixtures("shipped_table")
def test_our_kernels_come_first_and_need_a_gpu() -> None:
    for operation, ours in KERNELS.items():
        choice = choose(operation, Call())
        assert choice.name == ("composed" if operation.startswith("dsa_attention") else "reference")
        assert choice.passed_over == tuple((name, "a CUDA GPU") for name in ours)
        for name in ours:
            with pytest.raises(BackendUnavailable, match=f"{name} needs a CUDA GPU"):
                choose(operation, Call(), name)
    for rows, by_name in ((KERNELS, False), (BY_NAME, True)):
        found = {op: tuple(row.name for row in TABLE[op][:-1] if bool(row.by_name) is by_name) for op in OPERATIONS}
        assert {op: names for op, names in found.items() if names} == rows


@pytest.mark.usefixtures("shipped_table")
def test_vendors_that_are_absent_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    vendors = {"flash_mla", "cudnn", "tilelang", "deep_select", "deep_gemm"}
    for module in [name for name in sys.modules if name.startswith(tuple(f"dsattn.backends.{one}" for one in vendors))]:
        monkeypatch.delitem(sys.modules, module)
    missing = " ".join(line for line in explain(GPU).splitlines() if "needs the package" in line)
    assert all(name in missing for name in vendors)
    assert not [name for name in sys.modules if name.removeprefix("dsattn.backends.").partition(".")[0] in vendors]


def _before_ours(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    module = ModuleType("dsattn.backends.peer")
    module.sparse_mla_forward = lambda *_: "the peer's"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = (Row("peer", "peer", lambda call: [] if call.heads == 64 else ["64 heads"], **options), REFERENCE)
    monkeypatch.setitem(TABLE, FORWARD, rows)
    monkeypatch.setitem(TABLE, BACKWARD, (Row("peer", "peer", lambda _: ["luck"], by_name="no"), REFERENCE))


def test_auto_wants_a_record_and_a_name_does_not(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="dsattn")
    wanted, merit = (lambda call: [] if call.top_k == 2048 else ["a record"]), lambda _: "0.9 x"
    _before_ours(monkeypatch, record=wanted, merit=merit)
    assert choose(FORWARD, GPU).name == "peer"
    shown = [line.split(maxsplit=2)[1:] for line in explain(GPU).splitlines() if line.startswith(FORWARD)]
    assert shown == [["peer", "serves (0.9 x)"], ["reference", "can serve"]]
    other = replace(GPU, top_k=7)
    choice = choose(FORWARD, other)
    assert (choice.name, choice.passed_over) == ("reference", (("peer", "a record"),))
    assert caplog.messages[-1] == "sparse_mla.forward in bfloat16: reference (passed over: peer needs a record)"
    assert choose(FORWARD, other, "peer").name == "peer"
    with pytest.raises(BackendUnavailable, match="peer needs 64 heads"):
        choose(FORWARD, replace(other, heads=8), "peer")
    shown = [line.split(maxsplit=2)[1:] for line in explain(other).splitlines() if line.startswith(FORWARD)]
    assert shown == [["peer", "can serve by name (a record)"], ["reference", "serves"]]


def test_rows_by_name_are_nothing_to_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    _before_ours(monkeypatch, by_name="ties are anyone's")
    choice = choose(FORWARD, GPU)
    assert (choice.name, choice.passed_over) == ("reference", ())
    assert choose(FORWARD, GPU, "peer").name == "peer"
    assert choose(BACKWARD, GPU).passed_over == ()
    with pytest.raises(BackendUnavailable, match="peer needs luck"):
        choose(BACKWARD, GPU, "peer")
    shown = [line.split(maxsplit=2)[1:] for line in explain(GPU).splitlines() if line.startswith(FORWARD)]
    assert shown == [["peer", "can serve by name (ties are anyone's)"], ["reference", "serves"]]


@pytest.mark.usefixtures("shipped_table")
def test_our_kernels_serve_a_gpu_where_triton_is() -> None:
    pytest.importorskip("triton", reason="needs triton: installed by the dev extra on Linux")
    index = {"heads": 32, "width": 128}
    ampere = replace(GPU, capability=80)
    for operation, call in ((FORWARD, ampere), (BACKWARD, ampere), ("select_keys", replace(ampere, **index))):
        choice = choose(operation, call)
        assert choice.name == "triton"
        assert choice.function is not None
        assert choice.function.__name__ == operation.replace(".", "_")
    assert choose(FORWARD, replace(GPU, dtype="float64")).name == "reference"


@pytest.mark.usefixtures("shipped_table")
def test_without_the_package_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    choice = choose(FORWARD, GPU)
    assert choice.name == "reference"
    missing = (("flash_mla", "flash_mla"), ("hopper", "triton"), ("triton", "triton"))
    assert choice.passed_over == tuple((name, f"the package {package}") for name, package in missing)
