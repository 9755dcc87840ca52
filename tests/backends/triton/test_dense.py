"""The Triton kernels of dense attention against the formula in fp64: in the interpreter without a GPU, else on it."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsattn.backends import Call
from dsattn.errors import BackendUnavailable
from dsattn.keys import KeyRange, Layout
from dsattn.testing import LAYOUTS, Case, Sizes, error_budget, make_case, naive_attention, strided, tensor_similarity

pytest.importorskip("triton")
INF, NAN = float("inf"), float("nan")
KINDS = ("mla", "gqa")
# (H, G, C, V): one chunk or several, no rest, padded rests, values that end inside a chunk or reach into the rest.
SHAPES = [
    (4, 2, 24, 16),
    (1, 1, 16, 16),
    (6, 2, 6, 5),
    (3, 3, 40, 39),
    (17, 1, 48, 40),
    (2, 2, 66, 20),
    (4, 1, 64, 1),
    (6, 2, 12, 96),
]
TINY = Sizes(heads=2, groups=1, width=6, value_dim=5)


def test_in_the_interpreter(interpret: Callable[[str], int]) -> None:
    assert interpret(__file__) >= 60


@pytest.fixture(autouse=True)
def few_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of unequal sides, so that small cases have whole tiles and edges; on a GPU marked tests keep their own."""
    from dsattn.backends.triton import dense, dense_backward
    from dsattn.backends.triton.lines import Tiles

    if request.node.get_closest_marker("gpu") is None:
        rows, keys = getattr(request, "param", (64, 32))
        for module in (dense, dense_backward):
            monkeypatch.setattr(module, "first_fitting", lambda *_: Tiles(rows, keys, 32, 4, 2))
        monkeypatch.setattr(dense_backward, "MOST_SPLITS", 2)


def operands(kind: str, case: Case) -> tuple[Tensor, Tensor | None]:
    """k and v as `dsattn.ops.dense` hands them over."""
    return (case.kv[:, None], None) if kind == "mla" else (case.k, case.v)


def run(kind: str, case: Case, keys: KeyRange | None = None, *, sink: bool = False) -> dict[str, Tensor]:
    from dsattn.backends.triton import dense

    forward = dense.dense_mla_forward if kind == "mla" else dense.dense_gqa_forward
    backward = dense.dense_mla_backward if kind == "mla" else dense.dense_gqa_backward
    inputs = (case.q, *operands(kind, case), case.keys if keys is None else keys, case.sink if sink else None)
    out, lse = forward(*inputs, case.scale, case.sizes.value_dim)
    dq, dk, dv = backward(case.grad_out, *inputs, out, lse, case.scale)
    got = {"out": out, "lse": lse, "dq": dq, "dk": dk}
    return got if dv is None else {**got, "dv": dv}


def naive(kind: str, case: Case, keys: KeyRange | None = None, *, sink: bool = False) -> dict[str, Tensor]:
    """In the case's dtype; rows without keys give and take nothing."""
    k, v = operands(kind, case)
    leaves = [x.detach().clone().requires_grad_() for x in (case.q, k, v) if x is not None]
    values = leaves[1][..., : case.sizes.value_dim] if v is None else leaves[2]
    mask = (case.keys if keys is None else keys).mask(k.shape[0])
    logits = case.sink.to(case.q.dtype) if sink else None
    out, lse = naive_attention(leaves[0], leaves[1], values, mask, scale=case.scale, sink=logits)
    grads = torch.autograd.grad(out, leaves, case.grad_out.masked_fill(~mask.any(1)[:, None, None], 0))
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=False))}


def assert_right(
    got: dict[str, Tensor], kind: str, case: Case, keys: KeyRange | None = None, *, sink: bool = False
) -> None:
    """case: in fp32; its oracle in fp64."""
    exact = naive(kind, case.map(Tensor.double), keys, sink=sink)
    assert got.keys() == exact.keys()
    for name, value in exact.items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-5, msg=message)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("few_tiles", [(16, 32)], indirect=True)
def test_shapes(device: str, kind: str, shape: tuple[int, int, int, int]) -> None:
    heads, groups, width, value_dim = shape
    sizes = Sizes(heads=heads, groups=groups, width=width, value_dim=value_dim if kind == "gqa" else min(shape[2:]))
    case = make_case(Layout.causal(5 if heads > 10 else 11), sizes, device=device)
    assert_right(run(kind, case), kind, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("few_tiles", [(128, 64)], indirect=True)
def test_layouts(device: str, kind: str, layout: str) -> None:
    """Padding rows, unread keys and their gradients are NaN."""
    case = make_case(layout, replace(TINY, heads=1), device=device)
    got = run(kind, case, sink=True)
    assert_right(got, kind, case, sink=True)
    visible = case.keys.mask(case.layout.num_keys)
    rows, keys = ~visible.any(1), ~visible.any(0)
    assert not got["out"][rows].any()
    assert got["lse"][rows].eq(-INF).all()
    assert not got["dq"][rows].any()
    assert not any(got[name][keys].any() for name in ("dk", "dv") if name in got)


@pytest.mark.parametrize("few_tiles", [(16, 16), (16, 64)], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_other_sides(device: str, kind: str) -> None:
    case = make_case(Layout.packed([11, 1, 0, 15]), Sizes(heads=3, groups=1, width=20, value_dim=16), device=device)
    assert_right(run(kind, case), kind, case)


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_that_do_not_grow(device: str, kind: str) -> None:
    """Ranges in any order: blocks of lines that read nothing of a key lie between those that do."""
    case = make_case(Layout.causal(150), replace(TINY, heads=1), device=device, poison=False)
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(0, 150, (150,), generator=generator, dtype=torch.int32)
    keys = KeyRange(first, first + torch.randint(0, 40, (150,), generator=generator, dtype=torch.int32)).to(device)
    assert_right(run(kind, case, keys), kind, case, keys)
    halves = KeyRange(case.keys.start, case.keys.stop.roll(75)).to(device)
    assert_right(run(kind, case, halves), kind, case, halves)


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_may_leave_the_keys_and_say_anything(device: str, kind: str) -> None:
    """More rows than keys; ranges that start below 0, end past the keys, lie outside, or are upside down."""
    whole = make_case(Layout.causal(12), TINY, device=device, poison=False)
    case = replace(whole, kv=whole.kv[:5].clone(), k=whole.k[:5].clone(), v=whole.v[:5].clone())
    start = [-3, -9, 0, 2, 4, 5, 90, 3, 2**31 - 2, -(2**31), 1, 0]
    stop = [2, -4, 99, 99, 5, 9, 99, 1, 2**31 - 1, 2**31 - 1, 2, 0]
    keys = KeyRange(torch.tensor(start, dtype=torch.int32), torch.tensor(stop, dtype=torch.int32)).to(device)
    empty = ~keys.mask(5).any(1)
    case.q[empty] = NAN
    case.grad_out[empty] = NAN
    assert_right(run(kind, case, keys), kind, case, keys)
    assert empty.sum() == 6


@pytest.mark.parametrize("fill", [INF, 1e38])
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_does_not_touch_another(device: str, kind: str, fill: float) -> None:
    """Three documents in one block of rows; the middle one breaks, the others keep every bit, gradients too."""
    layout = Layout.packed([9, 14, 11])
    calm, wild = (make_case(layout, TINY, device=device) for _ in range(2))
    for tensor in (wild.q, *operands(kind, wild), wild.grad_out):
        if tensor is not None:
            tensor[9:23] = fill
    a, b = run(kind, calm), run(kind, wild)
    others = torch.cat([torch.arange(9), torch.arange(23, 34)]).to(device)
    for name in a:
        assert a[name][others].equal(b[name][others]), name
    assert not a["out"][9:23].equal(b["out"][9:23])


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize(("row", "operand"), [(70, "q"), (70, "grad_out"), (20, "v"), (75, "k")])
def test_nan_reaches_all_who_read_it_and_nobody_else(device: str, row: int, operand: str) -> None:
    """In whole tiles and on edges: of 64 rows and 32 keys."""
    clean, case = (make_case(Layout.packed([80, 15]), replace(TINY, heads=1), device=device) for _ in range(2))
    getattr(case, operand)[row] = NAN
    a, b = run("gqa", clean), run("gqa", case)
    visible = case.keys.mask(95)
    rows = visible[:, row] if operand in ("k", "v") else torch.arange(95, device=device) == row
    keys = visible[rows].any(0)
    for name in a:
        bad = keys if name in ("dk", "dv") else rows
        if name in ("out", "lse") and operand == "grad_out":
            bad = torch.zeros_like(rows)
        assert b[name][bad].isnan().all(), name
        assert b[name][~bad].equal(a[name][~bad]), name


@pytest.mark.parametrize("sink", [INF, -INF, 80.0, -80.0])
def test_sinks_at_the_ends(device: str, sink: float) -> None:
    case = make_case(Layout.causal(6), TINY, device=device)
    case.sink.fill_(sink)
    got = run("gqa", case, sink=True)
    if sink == INF:  # torch's softmax cannot say it: all the mass is the sink's
        assert not any(got[name].any() for name in ("out", "dq", "dk", "dv"))
    else:
        assert_right(got, "gqa", case, sink=True)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_any_scale(device: str, scale: float) -> None:
    case = replace(make_case(Layout.packed([70, 9]), replace(TINY, heads=1), device=device), scale=scale)
    for kind in KINDS:
        got, exact = run(kind, case), naive(kind, case.map(Tensor.double))
        for name in got:
            torch.testing.assert_close(got[name].double(), exact[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "keys", "heads"), [(0, 5, 2), (3, 0, 2), (3, 5, 0), (0, 0, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do(device: str, kind: str, rows: int, keys: int, heads: int) -> None:
    case = make_case(Layout.causal(5), TINY, device=device, poison=False)
    case = replace(case, q=case.q[:rows, :heads], grad_out=case.grad_out[:rows, :heads])
    case = replace(case, k=case.k[:keys], v=case.v[:keys], kv=case.kv[:keys])
    got = run(kind, case, case.keys.row_slice(0, rows))
    assert (got["out"].shape, got["lse"].shape) == ((rows, heads, 5), (rows, heads))
    assert got["dk"].shape == operands(kind, case)[0].shape
    assert got["lse"].eq(-INF).all()
    assert not any(got[name].any() for name in got if name != "lse")


def test_strides(device: str) -> None:
    case = make_case(Layout.packed([20, 9]), TINY, device=device)
    for kind in KINDS:
        expected = run(kind, case, sink=True)
        for name, value in run(kind, case.map(strided), sink=True).items():
            assert value.equal(expected[name]), name


def test_mixed_dtypes_meet_above(device: str) -> None:
    case = make_case(Layout.causal(5), TINY, device=device)
    case = replace(case, q=case.q.bfloat16())
    got = run("gqa", case)
    half, full = torch.bfloat16, torch.float32
    assert [got[name].dtype for name in ("out", "lse", "dq", "dk", "dv")] == [half, full, half, full, full]
    expected = naive("gqa", case.map(Tensor.double))
    torch.testing.assert_close(got["lse"].double(), expected["lse"], rtol=1e-5, atol=1e-5)
    for name in ("k", "v"):
        with pytest.raises(BackendUnavailable, match="computes in fp32"):
            run("gqa", replace(case, **{name: getattr(case, name).double()}))


def test_a_range_off_by_one_is_seen(device: str) -> None:
    """Negative control."""
    case = make_case(Layout.causal(40), TINY, device=device, poison=False)
    late = KeyRange(case.keys.start, case.keys.stop - 1)
    for kind in KINDS:
        with pytest.raises(AssertionError, match="out"):
            assert_right(run(kind, case, late), kind, case)


def test_packings_are_compiled_once() -> None:
    from dsattn.backends.triton.launch import recording

    generator = torch.Generator().manual_seed(0)
    kept: dict[str, set[str]] = {}
    for kind in KINDS:
        kept.clear()
        for _ in range(25):
            lengths = torch.randint(0, 40, (6,), generator=generator).tolist()
            case = make_case(Layout.packed([1, *lengths]), TINY, dtype=torch.bfloat16, poison=False)
            with recording(start=False) as now:
                run(kind, case, sink=True)
            for kernel, what in now.items():
                kept.setdefault(kernel, set()).update(what)
        assert len(kept) == 6
        assert all(len(what) == 1 for what in kept.values()), kept


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gqa", Sizes(heads=4, groups=4, width=192, value_dim=128)),
        ("gqa", Sizes(heads=16, groups=2, width=128, value_dim=128)),
        ("gqa", Sizes(heads=10, groups=2, width=64, value_dim=64)),
        ("gqa", Sizes(heads=2, groups=1, width=256, value_dim=256)),
        ("gqa", Sizes(heads=3, groups=1, width=72, value_dim=40)),
        ("mla", Sizes(heads=16, groups=1, width=576, value_dim=512)),
        ("mla", Sizes(heads=3, groups=1, width=160, value_dim=128)),
    ],
)
def test_half_precision_is_within_budget(device: str, dtype: torch.dtype, kind: str, sizes: Sizes) -> None:
    case = make_case(Layout.packed([700, 1, 0, 323], padded=[710, 1, 0, 330]), sizes, dtype=dtype, device=device)
    got, low = run(kind, case, sink=True), naive(kind, case, sink=True)
    exact = naive(kind, case.map(Tensor.double), sink=True)
    for name in got:
        if name != "lse":
            assert got[name].dtype == dtype
            assert not error_budget(got[name], exact[name], low[name]), name
            assert tensor_similarity(got[name], exact[name]) > 1 - (1e-3 if name == "out" else 3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_repeats(device: str, kind: str) -> None:
    sizes = Sizes(heads=16, groups=2, width=192, value_dim=128)
    case = make_case(Layout.packed([2000, 900]), sizes, dtype=torch.bfloat16, device=device)
    first = run(kind, case, sink=True)
    for _ in range(100):
        again = run(kind, case, sink=True)
        assert all(again[name].equal(first[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_other_data(device: str, kind: str) -> None:
    """One capture, then another packing and other numbers copied in."""
    sizes = Sizes(heads=4, groups=2, width=64, value_dim=64)
    case, other = (
        make_case(Layout.packed(lengths), sizes, seed=i, dtype=torch.bfloat16, device=device)
        for i, lengths in enumerate(([300, 212], [17, 400, 95]))
    )
    expected = run(kind, other)
    run(kind, case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(kind, case)
    case.layout.copy_(other.layout)
    for name in ("q", "kv", "k", "v", "grad_out"):
        getattr(case, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    assert all(got[name].equal(expected[name]) for name in got)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({}, []),
        ({"dtype": "float32", "deterministic": True}, []),
        ({"device": "cpu"}, ["a CUDA GPU of compute capability 8.0 or above"]),
        ({"capability": 75}, ["a CUDA GPU of compute capability 8.0 or above"]),
        ({"dtype": "float64"}, ["bfloat16, float16 or float32 operands"]),
        ({"width": 2048}, ["key and value widths of at most 1024"]),
        ({"value_width": 2048}, ["key and value widths of at most 1024"]),
    ],
)
def test_requirements(changes: dict[str, object], lacks: list[str]) -> None:
    from dsattn.backends.triton.dense import requirements

    base = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=192, value_width=128)
    assert requirements(replace(base, **changes)) == lacks
