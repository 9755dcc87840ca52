"""On a CUDA GPU, operands and buffers of more than 2^31 elements: rows at their ends against the reference on slices.

Only rows at the ends of the operands send gradients, so what they send to shared keys can be said from them alone.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.keys import KeyRange, Layout
from dsattn.ops import dense_gqa, dense_mla, indexer_kl, select_keys, select_topk, sparse_gqa, sparse_mla
from dsattn.ops.first_use import LIMITS, error_of
from dsattn.selection import Selection

pytestmark = pytest.mark.gpu
GPU, DTYPE, SHARED_KEYS, DOCUMENT, SOME = "cuda", torch.bfloat16, 4096, 100, 48
LIMIT = 2**31
HEADS, WIDTH, VALUE_DIM, TOP_K, SCALE = 64, 576, 512, 2048, 0.06
INDEX_HEADS, INDEX_WIDTH = 32, 128


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def beyond(width: int, multiple: int = 1) -> int:
    """The fewest rows of `width`, in whole multiples, that hold more than 2^31 elements."""
    return -(-(LIMIT // width + 1) // multiple) * multiple


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=DTYPE)


def whole(*shape: int) -> Tensor:
    """Whole numbers: scores of them are exact, so the selection has one value."""
    return torch.randint(-2, 3, shape, device=GPU, dtype=torch.int8).to(DTYPE)


def flags() -> dict[str, Any]:
    """Of attention. A sink, as in the other tests of this geometry: without one, kernels are compiled again."""
    return {"scale": SCALE, "sink": torch.zeros(HEADS, device=GPU, dtype=DTYPE)}


def ends(rows: int) -> Tensor:
    """The first rows and the last."""
    return torch.cat([torch.arange(SOME // 4), torch.arange(rows - 3 * SOME // 4, rows)]).to(GPU)


def select_some(rows: int, keys: int) -> Selection:
    """Ascending keys, evenly spread from a place that differs by row; the last row's last is the last key."""
    step = max(1, (keys - 1) // TOP_K)
    first = (keys - 1) - step * (TOP_K - 1) - torch.arange(rows - 1, -1, -1, device=GPU) % max(1, step - 1)
    index = first[:, None].int() + step * torch.arange(TOP_K, device=GPU, dtype=torch.int32)
    return Selection(index, torch.full((rows,), TOP_K, dtype=torch.int32, device=GPU))


def part(selection: Selection, rows: Tensor) -> Selection:
    return Selection(selection.index[rows], selection.length[rows])


def exact(**operands: Tensor) -> dict[str, Any]:
    return {name: one.detach().double().requires_grad_() for name, one in operands.items()}


def gradients(out: Tensor, small: dict[str, Any], seed: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, list(small.values()), seed)


def only(rows: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient that is zero but for `rows`, and these rows of it in fp64."""
    some = normal(len(rows), *like.shape[1:])
    grad = torch.zeros_like(like)
    grad[rows] = some
    return grad, some.double()


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    errors = {name: error_of(one.detach(), expected[name].detach()) for name, one in got.items()}
    assert all(error < LIMITS[DTYPE] for error in errors.values()), errors


@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_of_sparse_mla(deterministic: bool) -> None:
    rows = beyond(HEADS * VALUE_DIM)
    q, kv = normal(rows, HEADS, WIDTH).requires_grad_(), normal(SHARED_KEYS, WIDTH).requires_grad_()
    selection, some = select_some(rows, SHARED_KEYS), ends(rows)
    out, lse = sparse_mla(q, kv, selection, **flags(), deterministic=deterministic)
    assert out.numel() > LIMIT
    grad, some_grad = only(some, out)
    dq, dkv = torch.autograd.grad(out, (q, kv), grad)
    small = exact(q=q[some], kv=kv)
    want, want_lse = sparse_mla(**small, selection=part(selection, some), **flags(), backend="reference")
    want_dq, want_dkv = gradients(want, small, some_grad)
    got = {"out": out[some], "lse": lse[some], "dq": dq[some], "dkv": dkv}
    assert_close(got, {"out": want, "lse": want_lse, "dq": want_dq, "dkv": want_dkv})


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_of_sparse_mla(deterministic: bool) -> None:
    keys = beyond(WIDTH)
    q, kv = normal(SOME, HEADS, WIDTH).requires_grad_(), normal(keys, WIDTH).requires_grad_()
    selection = select_some(SOME, keys)
    out, lse = sparse_mla(q, kv, selection, **flags(), deterministic=deterministic)
    grad, some_grad = only(torch.arange(SOME, device=GPU), out)
    dq, dkv = torch.autograd.grad(out, (q, kv), grad)
    read, place = selection.index.unique(return_inverse=True)  # the reference meets the keys that are read, alone
    small = exact(q=q, kv=kv[read])
    compact = Selection(place.int(), selection.length)
    want, want_lse = sparse_mla(**small, selection=compact, **flags(), backend="reference")
    want_dq, want_dkv = gradients(want, small, some_grad)
    got = {"out": out, "lse": lse, "dq": dq, "dkv": dkv[read]}
    assert_close(got, {"out": want, "lse": want_lse, "dq": want_dq, "dkv": want_dkv})
    dkv[read] = 0
    assert not dkv.any()


def test_queries_of_sparse_gqa() -> None:
    rows, groups, width = beyond(HEADS * 128), 8, 128
    q = normal(rows, HEADS, width).requires_grad_()
    k, v = (normal(SHARED_KEYS, groups, width).requires_grad_() for _ in range(2))
    selection, some = select_some(rows, SHARED_KEYS), ends(rows)
    out, lse = sparse_gqa(q, k, v, selection, **flags())
    grad, some_grad = only(some, out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    small = exact(q=q[some], k=k, v=v)
    want, want_lse = sparse_gqa(**small, selection=part(selection, some), **flags(), backend="reference")
    expected = gradients(want, small, some_grad)
    got = {"out": out[some], "lse": lse[some], "dq": dq[some], "dk": dk, "dv": dv}
    assert_close(got, dict(zip(got, (want, want_lse, *expected), strict=True)))


def test_queries_and_keys_of_dense_gqa() -> None:
    """Documents of a hundred rows; the last against the reference alone."""
    rows, groups = beyond(HEADS * 128, DOCUMENT), HEADS
    layout = Layout.packed([DOCUMENT] * (rows // DOCUMENT)).to(GPU)
    q, k, v = (normal(rows, heads, 128).requires_grad_() for heads in (HEADS, groups, groups))
    out, lse = dense_gqa(q, k, v, layout.keys, **flags())
    last = torch.arange(rows - DOCUMENT, rows, device=GPU)
    grad, some_grad = only(last, out)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    small = exact(q=q[last], k=k[last], v=v[last])
    alone = Layout.packed([DOCUMENT]).to(GPU)
    want, want_lse = dense_gqa(**small, keys=alone.keys, **flags(), backend="reference")
    expected = gradients(want, small, some_grad)
    got = {"out": out[last], "lse": lse[last], "dq": grads[0][last], "dk": grads[1][last], "dv": grads[2][last]}
    assert_close(got, dict(zip(got, (want, want_lse, *expected), strict=True)))
    assert not any(one[: rows - DOCUMENT].any() for one in grads)


def test_queries_of_dense_mla() -> None:
    rows = beyond(HEADS * VALUE_DIM, DOCUMENT)
    layout = Layout.packed([DOCUMENT] * (rows // DOCUMENT)).to(GPU)
    q, kv = normal(rows, HEADS, WIDTH).requires_grad_(), normal(rows, WIDTH).requires_grad_()
    out, lse = dense_mla(q, kv, layout.keys, **flags())
    last = torch.arange(rows - DOCUMENT, rows, device=GPU)
    grad, some_grad = only(last, out)
    dq, dkv = torch.autograd.grad(out, (q, kv), grad)
    small = exact(q=q[last], kv=kv[last])
    alone = Layout.packed([DOCUMENT]).to(GPU)
    want, want_lse = dense_mla(**small, keys=alone.keys, **flags(), backend="reference")
    expected = gradients(want, small, some_grad)
    got = {"out": out[last], "lse": lse[last], "dq": dq[last], "dkv": dkv[last]}
    assert_close(got, dict(zip(got, (want, want_lse, *expected), strict=True)))


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_queries_of_the_loss(mode: str) -> None:
    """Only the last rows count; sparse: they share keys, dense: they are the last document."""
    rows = beyond(HEADS * WIDTH, DOCUMENT)
    q = normal(rows, HEADS, WIDTH)
    keys = SHARED_KEYS if mode == "sparse" else rows
    kv, k_i = normal(keys, WIDTH), normal(keys, INDEX_WIDTH).requires_grad_()
    q_i = normal(rows, INDEX_HEADS, INDEX_WIDTH).requires_grad_()
    w = normal(rows, INDEX_HEADS).mul_(0.02).requires_grad_()
    last = torch.arange(rows - DOCUMENT, rows, device=GPU)
    real = torch.zeros(rows, dtype=torch.bool, device=GPU)
    real[last] = True
    if mode == "sparse":
        selection, ranges = select_some(rows, keys), everything(rows, keys)
        few, few_ranges, first = part(selection, last), everything(DOCUMENT, keys), 0
        lse = sparse_mla(q[last], kv, few, **flags())[1]
    else:
        selection = few = None
        ranges, first = Layout.packed([DOCUMENT] * (rows // DOCUMENT)).to(GPU).keys, rows - DOCUMENT
        few_ranges = Layout.packed([DOCUMENT]).to(GPU).keys
        lse = dense_mla(q[last], kv[first:], few_ranges, **flags())[1]
    every_lse = torch.zeros(rows, HEADS, device=GPU)
    every_lse[last] = lse
    rest = {"scale": SCALE, "divisor": DOCUMENT}
    loss = indexer_kl(q_i, k_i, w, q, kv, every_lse, ranges, selection, real_rows=real, **rest)
    dq, dk, dw = torch.autograd.grad(loss, (q_i, k_i, w))
    small = exact(q_i=q_i[last], k_i=k_i[first:], w=w[last])
    target = {"q": q[last].double(), "kv": kv[first:].double(), "lse": lse.double()}
    want = indexer_kl(**small, **target, keys=few_ranges, selection=few, backend="reference", **rest)
    expected = gradients(want, small)
    got = {"loss": loss, "dq_i": dq[last], "dk_i": dk[first:], "dw": dw[last]}
    assert_close(got, dict(zip(got, (want, *expected), strict=True)))
    assert not any(one[: rows - DOCUMENT].any() for one in (dq, dw))


def everything(rows: int, keys: int) -> KeyRange:
    start = torch.zeros(rows, dtype=torch.int32, device=GPU)
    return KeyRange(start, torch.full_like(start, keys), every_row_has_a_key=True)


def test_scores_of_select_keys() -> None:
    """A buffer of more than 2^31 scores; the same bits as in many small ones, and the same keys as the reference's."""
    rows, keys = 1200, beyond(1200, 64)
    q, k, w = whole(rows, INDEX_HEADS, INDEX_WIDTH), whole(keys, INDEX_WIDTH), whole(rows, INDEX_HEADS)
    ranges, some = everything(rows, keys), ends(rows)[-6:]
    got = select_keys(q, k, w, ranges, TOP_K, return_scores=True, block_bytes=2**35)
    few = (q[some], k, w[some], everything(len(some), keys), TOP_K)
    small = select_keys(*few, return_scores=True)
    want = select_keys(*few, return_scores=True, backend="reference")
    assert got.score is not None
    for other in (small, want):
        assert other.score is not None
        assert got.index[some].equal(other.index)
        assert got.score[some].equal(other.score)


def test_keys_of_select_keys() -> None:
    keys = beyond(INDEX_WIDTH)
    q, k, w = whole(4, INDEX_HEADS, INDEX_WIDTH), whole(keys, INDEX_WIDTH), whole(4, INDEX_HEADS)
    stop = torch.full((4,), keys, dtype=torch.int32, device=GPU)
    ranges = KeyRange(stop - 5000, stop)  # scores of the last keys alone
    got = select_keys(q, k, w, ranges, TOP_K)
    start = torch.zeros_like(stop)
    want = select_keys(q, k[-5000:], w, KeyRange(start, start + 5000), TOP_K, backend="reference")
    assert got.index.equal(want.index + (keys - 5000))


def test_scores_of_select_topk() -> None:
    rows, keys = 1200, beyond(1200, 64)
    scores = torch.randint(-1000, 1000, (rows, keys), device=GPU, dtype=torch.int16).to(torch.float32)
    some = ends(rows)[-6:]
    got = select_topk(scores, everything(rows, keys), TOP_K)
    want = select_topk(scores[some], everything(len(some), keys), TOP_K, backend="reference")
    assert got.index[some].equal(want.index)
