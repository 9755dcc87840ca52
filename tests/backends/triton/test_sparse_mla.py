"""The Triton kernels of sparse MLA against the formula in fp64: in the interpreter without a GPU, else on it."""

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
from dsattn.testing import Case, Sizes, error_budget, make_case, naive_attention, random_selection, tensor_similarity

pytest.importorskip("triton")
INF, NAN = float("inf"), float("nan")
SMALL = Layout.packed([5, 0, 1, 12], padded=[6, 2, 1, 12], total=23)
# (H, C, V, K): one product or several, no rest, a padded rest, values that end inside a chunk or reach into the rest.
SHAPES = [
    (4, 24, 16, 7),
    (1, 16, 16, 3),
    (3, 6, 5, 1),
    (5, 40, 39, 35),
    (17, 80, 64, 33),
    (2, 130, 20, 16),
    (2, 64, 1, 5),
]
COMMON = Sizes(heads=5, width=24, value_dim=17, top_k=19)


def test_in_the_interpreter(interpret: Callable[[str], int]) -> None:
    assert interpret(__file__) >= 20


def choose_keys(case: Case) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)


def run(
    case: Case,
    selection: Selection,
    sink: Tensor | None,
    deterministic: bool = False,
    inverse: Inverse | None = None,
) -> dict[str, Tensor]:
    from dsattn.backends.triton.sparse_mla import sparse_mla_backward, sparse_mla_forward

    operands = (case.q, case.kv, selection.index, selection.length, sink)
    out, lse = sparse_mla_forward(*operands, case.scale, case.sizes.value_dim)
    dq, dkv = sparse_mla_backward(case.grad_out, *operands, out, lse, case.scale, deterministic, inverse)
    return {"out": out, "lse": lse, "q": dq, "kv": dkv}


def naive(case: Case, selection: Selection, sink: Tensor | None) -> dict[str, Tensor]:
    """In the case's dtype; rows that select nothing give and take nothing."""
    dead = (selection.length == 0)[:, None, None]
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    values, mask = kv[:, None, : case.sizes.value_dim], selection.mask(kv.shape[0])
    sink = None if sink is None else sink.to(q.dtype)
    out, lse = naive_attention(q, kv[:, None], values, mask, scale=case.scale, sink=sink)
    dq, dkv = torch.autograd.grad(out, (q, kv), case.grad_out.masked_fill(dead, 0))
    return {"out": out.detach(), "lse": lse, "q": dq, "kv": dkv}


def assert_right(got: dict[str, Tensor], case: Case, selection: Selection, sink: Tensor | None) -> None:
    """case: in fp32; its oracle in fp64."""
    wide = case.map(lambda x: x.double())
    for name, value in naive(wide, selection, None if sink is None else sink.double()).items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-5, msg=message)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device: str, shape: tuple[int, int, int, int], deterministic: bool) -> None:
    """Several tiles of keys where K is large, never a whole number of them, and more keys than K."""
    heads, width, value_dim, top_k = shape
    sizes = Sizes(heads=heads, groups=1, width=width, value_dim=value_dim, top_k=top_k)
    layout = Layout.causal(9) if top_k < 9 else Layout.causal(40).shard_rows(9, 10)
    case = make_case(layout, sizes, device=device)
    selection = choose_keys(case)
    sink = case.sink if deterministic else None
    assert_right(run(case, selection, sink, deterministic), case, selection, sink)


def test_layouts(device: str) -> None:
    """Padding rows, unread keys and their gradients are NaN."""
    case = make_case(SMALL, COMMON, device=device)
    selection = choose_keys(case)
    assert (selection.length == 0).any()
    assert_right(run(case, selection, case.sink), case, selection, case.sink)


@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_slots_never_read_memory(device: str, deterministic: bool) -> None:
    """The last key, which -1 would name, is poison; so is what lies past `length`; empty rows give exact zeros."""
    index = torch.tensor([[0, -1, -1], [0, 1, -1], [1, 2, 3], [-1, -1, -1]], dtype=torch.int32, device=device)
    length = torch.tensor([1, 2, 2, 0], dtype=torch.int32, device=device)
    for poison in (NAN, INF):
        case = make_case(Layout.causal(4), Sizes(heads=2, width=6, value_dim=4, top_k=3), device=device)
        for tensor in (case.kv, case.q, case.grad_out):
            tensor[3] = poison
        got = run(case, Selection(index, length), case.sink, deterministic)
        assert got["out"].isfinite().all()
        assert not got["out"][3].any()
        assert (got["lse"][3] == -INF).all()
        assert got["lse"][:3].isfinite().all()
        assert not got["q"][3].any()
        assert not got["kv"][3].any()
        assert all(got[name].isfinite().all() for name in ("q", "kv"))


def test_holes_are_skipped(device: str) -> None:
    """A -1 before `length` is no key either."""
    case = make_case(Layout.causal(6), COMMON, device=device, poison=False)
    index = torch.full((6, 19), -1, dtype=torch.int32, device=device)
    index[:, 2], index[:, 17] = 0, 4
    selection = Selection(index, torch.full((6,), 18, dtype=torch.int32, device=device))
    assert_right(run(case, selection, None), case, selection, None)


@pytest.mark.parametrize("sink", [INF, -INF, 80.0, -80.0])
def test_sinks_at_the_ends(device: str, sink: float) -> None:
    case = make_case(Layout.causal(6), Sizes(heads=2), device=device)
    case.sink.fill_(sink)
    selection = choose_keys(case)
    got = run(case, selection, case.sink)
    if sink == INF:  # torch's softmax cannot say it: all the mass is the sink's
        assert not any(got[name].any() for name in ("out", "q", "kv"))
    else:
        assert_right(got, case, selection, case.sink)


@pytest.mark.parametrize(("rows", "keys", "top_k"), [(0, 5, 3), (3, 0, 2), (3, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_to_do(device: str, rows: int, keys: int, top_k: int, deterministic: bool) -> None:
    from dsattn.backends.triton.sparse_mla import sparse_mla_backward, sparse_mla_forward

    q, kv = torch.randn(rows, 2, 6, device=device), torch.randn(keys, 6, device=device)
    selection = Selection.from_index(torch.full((rows, top_k), -1, device=device))
    operands = (q, kv, selection.index, selection.length, None)
    out, lse = sparse_mla_forward(*operands, 1.0, 4)
    assert (out.shape, lse.shape) == ((rows, 2, 4), (rows, 2))
    assert not out.any()
    assert (lse == -INF).all()
    dq, dkv = sparse_mla_backward(torch.randn_like(out), *operands, out, lse, 1.0, deterministic)
    assert (dq.shape, dkv.shape) == (q.shape, kv.shape)
    assert not dq.any()
    assert not dkv.any()


def test_strides(device: str) -> None:
    case = make_case(Layout.causal(6), COMMON, device=device)
    selection = choose_keys(case)
    turned = case.map(lambda x: x.transpose(0, -1).contiguous().transpose(0, -1))
    loose = Selection(selection.index.T.contiguous().T, selection.length)
    expected = run(case, selection, case.sink, True)
    for name, value in run(turned, loose, turned.sink, True).items():
        assert value.equal(expected[name]), name


def test_deterministic_runs_of_rows(device: str) -> None:
    """Rows in runs of 3 give what one run gives, up to the order of fp32 sums."""
    case = make_case(Layout.causal(7), COMMON, device=device)
    selection = choose_keys(case)
    whole = run(case, selection, case.sink, True)
    with settings(scratch_bytes=3 * 19 * (16 + 24) * 4):
        got = run(case, selection, case.sink, True)
    for name, value in got.items():
        torch.testing.assert_close(value, whole[name])


def test_fp32_contributions(device: str) -> None:
    """The sums are then those of atomics but for their order; contributions in half precision are another matter."""
    case = make_case(Layout.causal(40), COMMON, dtype=torch.bfloat16, device=device)
    selection = choose_keys(case)
    atomic, rounded = (run(case, selection, None, deterministic)["kv"] for deterministic in (False, True))
    with settings(fp32_contributions=True):
        got, again = (run(case, selection, None, True)["kv"] for _ in range(2))
    assert got.equal(again)
    assert float((got != atomic).float().mean()) < 0.01
    assert float((rounded != atomic).float().mean()) > 0.1


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
    with settings(scratch_bytes=rows * 19 * (16 + 24) * 4):
        expected = run(case, selection, case.sink, True)
        got = run(case, selection, case.sink, True, held)
    for name, value in got.items():
        assert value.nan_to_num().equal(expected[name].nan_to_num()), name
    live = int(held.offset[-1])
    wrong = held._replace(slot=held.slot[:live].roll(1))
    assert not run(case, selection, case.sink, True, wrong)["kv"].equal(expected["kv"])


def test_more_keys_than_atomics_serve(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the bits of the deterministic mode, which is what runs then."""
    from dsattn.backends.triton import sparse_mla

    case = make_case(Layout.causal(6), COMMON, device=device)
    selection = choose_keys(case)
    expected = run(case, selection, None, True)
    monkeypatch.setattr(sparse_mla, "ATOMIC_KEYS", 5)
    for name, value in run(case, selection, None, False).items():
        assert value.equal(expected[name]), name


def test_mixed_dtypes_meet_above(device: str) -> None:
    case = make_case(Layout.causal(5), Sizes(heads=2), device=device)
    case = replace(case, q=case.q.bfloat16())
    selection = choose_keys(case)
    got = run(case, selection, None)
    assert [got[name].dtype for name in got] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    expected = naive(case.map(lambda x: x.double()), selection, None)
    torch.testing.assert_close(got["lse"].double(), expected["lse"], rtol=1e-5, atol=1e-5)
    with pytest.raises(BackendUnavailable, match="computes in fp32"):
        run(replace(case, kv=case.kv.double()), selection, None)


def test_an_off_by_one_selection_is_seen(device: str) -> None:
    """Negative control: the neighbour of a key gives something else."""
    case = make_case(Layout.causal(6), COMMON, device=device)
    selection = choose_keys(case)
    shifted = Selection(torch.where(selection.index > 0, selection.index - 1, selection.index), selection.length)
    with pytest.raises(AssertionError):
        assert_right(run(case, shifted, None), case, selection, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(heads=64, groups=1, width=576, value_dim=512, top_k=200),
        Sizes(heads=96, groups=1, width=512, value_dim=512, top_k=64),
        Sizes(heads=16, groups=1, width=160, value_dim=128, top_k=100),
    ],
)
def test_half_precision_is_within_budget(device: str, dtype: torch.dtype, deterministic: bool, sizes: Sizes) -> None:
    case = make_case(Layout.packed([300, 1, 150]), sizes, dtype=dtype, device=device)
    selection = choose_keys(case)
    got = run(case, selection, case.sink, deterministic)
    low = naive(case, selection, case.sink)
    exact = naive(case.map(lambda x: x.double()), selection, case.sink.double())
    for name in ("out", "q", "kv"):
        assert got[name].dtype == dtype
        assert not error_budget(got[name], exact[name], low[name]), name
        assert tensor_similarity(got[name], exact[name]) > 1 - (1e-3 if name == "out" else 3e-3)


@pytest.mark.gpu
def test_deterministic_repeats(device: str) -> None:
    sizes = Sizes(heads=64, groups=1, width=576, value_dim=512, top_k=128)
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
        ({"width": 2048}, ["a latent width of at most 1024"]),
    ],
)
def test_requirements(changes: dict[str, object], lacks: list[str]) -> None:
    from dsattn.backends.triton.sparse_mla import requirements

    base = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)
    assert requirements(replace(base, **changes)) == lacks


@pytest.mark.parametrize("heads", [1, 12, 16, 33, 64, 128])
@pytest.mark.parametrize("width", [1, 16, 160, 512, 576])
@pytest.mark.parametrize("shared", [232448, 166912, 101376])
def test_tiles_fit(heads: int, width: int, shared: int) -> None:
    """What stays in shared memory: q in the forward, and the tiles in flight."""
    from dsattn.backends.triton.sparse_mla import backward_key_tiles, backward_query_tiles, forward_tiles

    makers = (forward_tiles, backward_key_tiles, backward_query_tiles)
    forward, key, query = (make(heads, width, torch.bfloat16, shared) for make in makers)
    for tiles in (forward, key, query):
        assert min(tiles.heads, tiles.keys, tiles.chunk) >= 16
        assert tiles.heads // 2 < max(heads, 16)
        assert width // tiles.chunk <= 16
    assert (forward.heads + forward.num_stages * forward.keys) * width * 2 <= shared
    assert query.num_stages * query.keys * (width + query.heads) * 2 <= shared
    assert key.num_stages * (key.keys + 2 * key.heads) * key.chunk * 2 <= shared
    assert key.heads % query.heads == 0
    assert key.heads >= heads
