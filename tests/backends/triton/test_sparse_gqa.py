"""The Triton kernels of sparse GQA against the formula in fp64: in the interpreter without a GPU, else on it."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsattn.backends import Call, settings
from dsattn.errors import BackendUnavailable
from dsattn.keys import Layout
from dsattn.selection import Inverse, Selection, invert
from dsattn.testing import (
    Case,
    Sizes,
    error_budget,
    make_case,
    naive_attention,
    random_selection,
    strided,
    tensor_similarity,
)

pytest.importorskip("triton")
INF, NAN = float("inf"), float("nan")
NAMES = ("out", "lse", "dq", "dk", "dv")
SMALL = Layout.packed([3, 0, 1, 6], padded=[4, 2, 1, 6], total=14)
# (H, G, C, V, K): one chunk or several, padded rests, groups of one head and of more than 16, K of several steps.
SHAPES = [
    (4, 2, 24, 16, 7),
    (1, 1, 16, 16, 3),
    (6, 2, 6, 5, 1),
    (3, 3, 40, 39, 20),
    (17, 1, 80, 64, 33),
    (2, 1, 20, 130, 16),
    (10, 2, 64, 1, 5),
]
COMMON = Sizes(heads=6, groups=2, width=24, value_dim=17, top_k=19)


def test_in_the_interpreter(interpret: Callable[[str], int]) -> None:
    assert interpret(__file__) >= 30


def choose_keys(case: Case) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)


def run(
    case: Case,
    selection: Selection,
    sink: Tensor | None,
    deterministic: bool = False,
    inverse: Inverse | None = None,
) -> dict[str, Tensor]:
    from dsattn.backends.triton.sparse_gqa import sparse_gqa_backward, sparse_gqa_forward

    operands = (case.q, case.k, case.v, selection.index, selection.length, sink)
    out, lse = sparse_gqa_forward(*operands, case.scale)
    grads = sparse_gqa_backward(case.grad_out, *operands, out, lse, case.scale, deterministic, inverse)
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


def naive(case: Case, selection: Selection, sink: Tensor | None) -> dict[str, Tensor]:
    """In the case's dtype; rows that select nothing give and take nothing."""
    dead = (selection.length == 0)[:, None, None]
    leaves = q, k, v = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    sink = None if sink is None else sink.to(case.q.dtype)
    out, lse = naive_attention(q, k, v, selection.mask(case.k.shape[0]), scale=case.scale, sink=sink)
    grads = torch.autograd.grad(out, leaves, case.grad_out.masked_fill(dead, 0))
    return dict(zip(NAMES, (out.detach(), lse, *grads), strict=True))


def assert_right(got: dict[str, Tensor], case: Case, selection: Selection, sink: Tensor | None) -> None:
    """case: in fp32; its oracle in fp64."""
    exact = naive(case.map(Tensor.double), selection, None if sink is None else sink.double())
    for name, value in exact.items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-5, msg=message)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device: str, shape: tuple[int, int, int, int, int], deterministic: bool) -> None:
    """Padding rows, unread keys and their gradients are NaN."""
    heads, groups, width, value_dim, top_k = shape
    sizes = Sizes(heads=heads, groups=groups, width=width, value_dim=value_dim, top_k=top_k)
    case = make_case(Layout.causal(5), sizes, device=device)
    selection = choose_keys(case)
    sink = case.sink if deterministic else None
    assert_right(run(case, selection, sink, deterministic), case, selection, sink)


@pytest.mark.parametrize("deterministic", [False, True])
def test_layouts(device: str, deterministic: bool) -> None:
    case = make_case(SMALL, COMMON, device=device)
    selection = choose_keys(case)
    assert (selection.length == 0).any()
    sink = None if deterministic else case.sink
    assert_right(run(case, selection, sink, deterministic), case, selection, sink)


@pytest.mark.parametrize("deterministic", [False, True])
def test_large_groups_take_several_programs(device: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsattn.backends.triton import sparse_gqa

    monkeypatch.setattr(sparse_gqa, "MOST_HEADS", 16)
    case = make_case(Layout.causal(6), Sizes(heads=42, groups=2, width=12, value_dim=8, top_k=5), device=device)
    selection = choose_keys(case)
    assert_right(run(case, selection, case.sink, deterministic), case, selection, case.sink)


@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_slots_never_read_memory(device: str, deterministic: bool) -> None:
    """The last key, which -1 would name, is poison; so is what lies past `length`; empty rows give exact zeros."""
    index = torch.tensor([[0, -1, -1], [0, 1, -1], [1, 2, 3], [-1, -1, -1]], dtype=torch.int32, device=device)
    length = torch.tensor([1, 2, 2, 0], dtype=torch.int32, device=device)
    for poison in (NAN, INF):
        case = make_case(Layout.causal(4), Sizes(heads=2, groups=1, width=6, value_dim=4, top_k=3), device=device)
        for tensor in (case.k, case.v, case.q, case.grad_out):
            tensor[3] = poison
        got = run(case, Selection(index, length), case.sink, deterministic)
        assert got["lse"][:3].isfinite().all()
        assert (got["lse"][3] == -INF).all()
        for name in ("out", "dq", "dk", "dv"):
            assert got[name].isfinite().all(), name
            assert not got[name][3].any(), name


def test_holes_are_skipped(device: str) -> None:
    """A -1 before `length` is no key either; a row of holes takes nothing of what is not finite."""
    case = make_case(Layout.causal(6), COMMON, device=device, poison=False)
    index = torch.full((6, 19), -1, dtype=torch.int32, device=device)
    index[:5, 2], index[:5, 17] = 0, 4
    selection = Selection(index, torch.full((6,), 18, dtype=torch.int32, device=device))
    case.grad_out[5] = 0
    assert_right(run(case, selection, None), case, selection, None)
    case.q[5], case.grad_out[5] = NAN, NAN
    got = run(case, selection, None)
    assert not got["dq"][5].any()
    assert got["dk"].isfinite().all()


@pytest.mark.parametrize("sink", [INF, -INF, 80.0, -80.0])
def test_sinks_at_the_ends(device: str, sink: float) -> None:
    case = make_case(Layout.causal(6), Sizes(heads=2), device=device)
    case.sink.fill_(sink)
    selection = choose_keys(case)
    got = run(case, selection, case.sink)
    if sink == INF:  # torch's softmax cannot say it: all the mass is the sink's
        assert not any(got[name].any() for name in ("out", "dq", "dk", "dv"))
    else:
        assert_right(got, case, selection, case.sink)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_any_scale(device: str, scale: float) -> None:
    case = replace(make_case(Layout.causal(6), COMMON, device=device), scale=scale)
    selection = choose_keys(case)
    assert_right(run(case, selection, None), case, selection, None)


@pytest.mark.parametrize(("rows", "keys", "top_k"), [(0, 5, 3), (3, 0, 2), (3, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_to_do(device: str, rows: int, keys: int, top_k: int, deterministic: bool) -> None:
    case = make_case(Layout.causal(5), Sizes(heads=2), device=device, poison=False)
    case = replace(case, q=case.q[:rows], grad_out=case.grad_out[:rows], k=case.k[:keys], v=case.v[:keys])
    selection = Selection.from_index(torch.full((rows, top_k), -1, device=device))
    got = run(case, selection, None, deterministic)
    shapes = [tuple(got[name].shape) for name in NAMES]
    assert shapes == [(rows, 2, 16), (rows, 2), (rows, 2, 24), (keys, 2, 24), (keys, 2, 16)]
    assert (got["lse"] == -INF).all()
    assert not any(got[name].any() for name in NAMES if name != "lse")


def test_strides(device: str) -> None:
    case = make_case(Layout.causal(6), COMMON, device=device)
    selection = choose_keys(case)
    loose = Selection(selection.index.T.contiguous().T, selection.length)
    expected = run(case, selection, case.sink, True)
    turned = case.map(strided)
    for name, value in run(turned, loose, turned.sink, True).items():
        assert value.equal(expected[name]), name


def test_deterministic_runs_of_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in runs of 2 give what one run gives, up to the order of fp32 sums."""
    from dsattn.backends.triton import sparse_gqa

    case = make_case(Layout.causal(5), COMMON, device=device)
    selection = choose_keys(case)
    whole = run(case, selection, case.sink, True)
    size = 2 * 19 * 2 * (24 + 17) * 4
    with settings(scratch_bytes=size):
        got = run(case, selection, case.sink, True)
    for name, value in got.items():
        torch.testing.assert_close(value, whole[name])
    monkeypatch.setattr(sparse_gqa, "SCRATCH_BYTES", size)
    assert all(value.equal(got[name]) for name, value in run(case, selection, case.sink, True).items())


def test_fp32_contributions(device: str) -> None:
    """The sums are then those of atomics but for their order; contributions in half precision are another matter."""
    case = make_case(Layout.causal(40), COMMON, dtype=torch.bfloat16, device=device)
    selection = choose_keys(case)
    atomic, rounded = (run(case, selection, None, deterministic) for deterministic in (False, True))
    with settings(fp32_contributions=True):
        got, again = (run(case, selection, None, True) for _ in range(2))
    for name in NAMES[3:]:
        assert got[name].equal(again[name])
        assert float((got[name] != atomic[name]).float().mean()) < 0.01, name
        assert float((rounded[name] != atomic[name]).float().mean()) > 0.1, name


@pytest.mark.parametrize("layout", [SMALL, Layout.causal(12)], ids=["packed", "fewer keys than slots"])
@pytest.mark.parametrize("rows", [99, 5])
def test_an_inverse_changes_no_bit(device: str, layout: Layout, rows: int) -> None:
    """In one run of rows and in several, with holes, empty rows and a key that nobody reads."""
    case = make_case(layout, COMMON, device=device)
    selection = choose_keys(case)
    selection.index[::2, 1] = -1
    selection.index[selection.index == 4] = -1
    held = invert(selection.index, selection.length, case.layout.num_keys)
    assert (held.offset.diff() == 0).any()
    with settings(scratch_bytes=rows * 19 * 2 * (24 + 17) * 4):
        expected = run(case, selection, case.sink, True)
        got = run(case, selection, case.sink, True, held)
    for name, value in got.items():
        assert value.nan_to_num().equal(expected[name].nan_to_num()), name
    live = int(held.offset[-1])
    wrong = held._replace(slot=held.slot[:live].roll(1))
    assert not run(case, selection, case.sink, True, wrong)["dk"].equal(expected["dk"])


def test_mixed_dtypes_meet_above(device: str) -> None:
    case = make_case(Layout.causal(5), Sizes(heads=2), device=device)
    case = replace(case, q=case.q.bfloat16())
    selection = choose_keys(case)
    got = run(case, selection, None)
    half, full = torch.bfloat16, torch.float32
    assert [got[name].dtype for name in NAMES] == [half, full, half, full, full]
    expected = naive(case.map(Tensor.double), selection, None)
    torch.testing.assert_close(got["lse"].double(), expected["lse"], rtol=1e-5, atol=1e-5)
    for name in ("k", "v"):
        with pytest.raises(BackendUnavailable, match="computes in fp32"):
            run(replace(case, **{name: getattr(case, name).double()}), selection, None)


def test_the_wrong_group_is_seen(device: str) -> None:
    """Negative control: heads that read their neighbours' group."""
    case = make_case(Layout.causal(6), COMMON, device=device)
    selection = choose_keys(case)
    turned = replace(case, k=case.k.flip(1), v=case.v.flip(1))
    with pytest.raises(AssertionError):
        assert_right(run(turned, selection, None), case, selection, None)


def test_an_off_by_one_selection_is_seen(device: str) -> None:
    """Negative control: the neighbour of a key gives something else."""
    case = make_case(Layout.causal(6), COMMON, device=device)
    selection = choose_keys(case)
    shifted = Selection(torch.where(selection.index > 0, selection.index - 1, selection.index), selection.length)
    with pytest.raises(AssertionError):
        assert_right(run(case, shifted, None), case, selection, None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_packings_are_compiled_once(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsattn.backends.triton import sparse_gqa
    from dsattn.backends.triton.launch import recording

    monkeypatch.setattr(sparse_gqa, "SCRATCH_BYTES", 7 * 19 * 2 * (24 + 17) * 2)
    generator = torch.Generator().manual_seed(0)
    kept: dict[str, set[str]] = {}
    for _ in range(25):
        lengths = torch.randint(0, 12, (6,), generator=generator).tolist()
        case = make_case(Layout.packed([1, *lengths]), COMMON, dtype=torch.bfloat16, poison=False)
        with recording(start=False) as now:
            run(case, choose_keys(case), case.sink, deterministic)
        for kernel, what in now.items():
            kept.setdefault(kernel, set()).update(what)
    # The sums by key differ in the width of k and of v alone.
    assert {kernel: len(what) for kernel, what in kept.items()} == {
        "_forward_kernel": 1,
        "_backward_kernel": 1,
        **({"_sum_kernel": 2, "_mark_kernel": 1, "_count_kernel": 1, "_place_kernel": 1} if deterministic else {}),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(heads=64, groups=8, width=128, value_dim=128, top_k=200),
        Sizes(heads=40, groups=4, width=128, value_dim=128, top_k=64),
        Sizes(heads=4, groups=4, width=192, value_dim=128, top_k=100),
        Sizes(heads=80, groups=1, width=64, value_dim=96, top_k=100),
        Sizes(heads=8, groups=2, width=256, value_dim=256, top_k=65),
    ],
)
def test_half_precision_is_within_budget(device: str, dtype: torch.dtype, deterministic: bool, sizes: Sizes) -> None:
    case = make_case(Layout.packed([300, 1, 150]), sizes, dtype=dtype, device=device)
    selection = choose_keys(case)
    got = run(case, selection, case.sink, deterministic)
    low = naive(case, selection, case.sink)
    exact = naive(case.map(Tensor.double), selection, case.sink.double())
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].dtype == dtype
        assert not error_budget(got[name], exact[name], low[name]), name
        assert tensor_similarity(got[name], exact[name]) > 1 - (1e-3 if name == "out" else 3e-3)


@pytest.mark.gpu
def test_deterministic_repeats(device: str) -> None:
    sizes = Sizes(heads=64, groups=8, width=128, value_dim=128, top_k=128)
    case = make_case(Layout.causal(1000), sizes, dtype=torch.bfloat16, device=device)
    selection = choose_keys(case)
    first = run(case, selection, case.sink, True)
    for _ in range(100):
        again = run(case, selection, case.sink, True)
        assert all(again[name].equal(first[name]) for name in first)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({}, []),
        ({"dtype": "float32", "deterministic": True}, []),
        ({"device": "cpu"}, ["a CUDA GPU of compute capability 8.0 or above"]),
        ({"capability": 75}, ["a CUDA GPU of compute capability 8.0 or above"]),
        ({"dtype": "float64"}, ["bfloat16, float16 or float32 operands"]),
        ({"width": 1024}, ["key and value widths of at most 512"]),
        ({"value_width": 1024}, ["key and value widths of at most 512"]),
    ],
)
def test_requirements(changes: dict[str, object], lacks: list[str]) -> None:
    from dsattn.backends.triton.sparse_gqa import requirements

    base = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=128, value_width=128, top_k=2048)
    assert requirements(replace(base, **changes)) == lacks


@pytest.mark.parametrize("heads", [1, 8, 10, 33, 128])
@pytest.mark.parametrize("width", [1, 64, 128, 256, 512])
@pytest.mark.parametrize("shared", [232448, 166912, 101376])
def test_tiles_fit(heads: int, width: int, shared: int) -> None:
    """Operands that stay in shared memory: the heads' rows, and the tiles of keys and values in flight."""
    from dsattn.backends.triton.sparse_gqa import backward_tiles, forward_tiles

    for make in (forward_tiles, backward_tiles):
        tiles = make(heads, 2 * width, torch.bfloat16, shared)
        assert tiles.heads >= min(heads, 16)
        assert (tiles.heads + tiles.num_stages * tiles.keys) * 2 * width * 2 <= shared
        assert tiles.num_stages >= 2, "one stage is compiled to addresses outside of shared memory"
