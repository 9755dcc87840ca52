"""Vendors' kernels as rows of the table, on a GPU: against fp64, against ours, and a step that mixes them.

Skips a package that is not installed. cuDNN, TileLang and DeepGEMM compile for 10 s and more a geometry, so few are
used here: 16, 40 or 64 heads (of one kernel of 64), 128 slots, up to 256 keys.
"""

import functools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from dsattn import KeyRange, Layout, backends
from dsattn.backends import ALONE, TABLE, Call, choose, deep_gemm, settings
from dsattn.ops import dsa_attention, select_keys, select_topk, sparse_mla
from dsattn.ops.distill_reference import backward_reference as kl_backward_reference
from dsattn.ops.distill_reference import forward_reference as kl_forward_reference
from dsattn.ops.first_use import error_of
from dsattn.ops.select import select_reference, topk_reference
from dsattn.ops.sparse_mla import backward_reference, forward_reference
from dsattn.selection import Selection
from dsattn.testing import SCORES, hostile_scores

pytestmark = pytest.mark.gpu
GPU, SLOTS, LIMIT = "cuda", 128, 3e-2
LAYOUTS = {
    "causal": Layout.causal(251),
    "packed": Layout.packed([7, 0, 1, 180, 3], padded=[8, 2, 1, 190, 5], total=240),
    "zigzag": Layout.packed([200, 9, 20], padded=[200, 16, 24], cp_size=2, cp_rank=1),
}
needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"needs the package {name}")
    for name in ("flash_mla", "cudnn", "deep_gemm", "tilelang")
}
# It and the package of its kernels warn of themselves, when they are imported and when they compile.
tilelang = (needs["tilelang"], pytest.mark.filterwarnings("ignore"))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(GPU, torch.bfloat16)


def chosen(keys: KeyRange, num_keys: int, slots: int = SLOTS) -> Selection:
    """Random keys of each row's range, some rows short, some empty."""
    visible = keys.mask(num_keys).to(GPU)
    score = torch.rand(visible.shape, generator=torch.Generator().manual_seed(9)).to(GPU)
    score[::11] = -torch.inf
    index, length = topk_reference(score.masked_fill(~visible, -torch.inf), *ranges(keys), slots)
    return Selection(index, length)


def ranges(keys: KeyRange) -> tuple[Tensor, Tensor]:
    return keys.start.to(GPU), keys.stop.to(GPU)


def poison(x: Tensor, read: Tensor) -> Tensor:
    """x with NaN in rows that nobody reads."""
    return x.masked_fill(~read.view(-1, *[1] * (x.dim() - 1)), torch.nan)


def attention(name: str, heads: int) -> tuple[Tensor, Tensor, Tensor, Selection]:
    """q, kv, the gradient of out, and the selection; NaN wherever nobody reads."""
    layout = LAYOUTS[name]
    num_keys = layout.num_keys
    selection = chosen(layout.keys, num_keys)
    reads, read = selection.length > 0, selection.mask(num_keys).any(0)
    rows = layout.keys.num_rows
    q, grad = normal(rows, heads, 576, seed=1), normal(rows, heads, 512, seed=3)
    return poison(q, reads), poison(normal(num_keys, 576, seed=2), read), grad, selection


def widened(operands: tuple) -> list:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in operands]


def close(got: Tensor, exact: Tensor, limit: float = LIMIT) -> None:
    assert error_of(got, exact) <= limit


def quietly(run):
    """Once as it is, once where waiting for the GPU is an error: what is compiled and measured first may wait."""
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


ATTENDS = [
    *(pytest.param("flash_mla", heads, marks=needs["flash_mla"]) for heads in (16, 64, 128)),
    pytest.param("tilelang", 64, marks=tilelang),
]


@pytest.mark.parametrize(("backend", "heads"), ATTENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_forward(backend, heads, layout):
    q, kv, _, selection = attention(layout, heads)
    sinks = (None, torch.randn(heads, device=GPU)) if backend == "flash_mla" else (None,)
    for sink in sinks:
        for scale in (0.04, -0.04) if backend == "flash_mla" else (0.04,):
            case = (q, kv, selection.index, selection.length, sink, scale, 512)
            exact = forward_reference(*widened(case))
            given = {"scale": scale, "value_dim": 512, "sink": sink}
            run = functools.partial(sparse_mla, q, kv, selection, backend=backend, **given)
            out, lse = run() if backend == "tilelang" else quietly(run)
            empty = selection.length == 0
            assert empty.any()
            assert not out[empty].any()
            assert (lse[empty] == -torch.inf).all()
            close(out, exact[0])
            close(lse, exact[1], 1e-3)
            if heads == 64 and sink is None:
                ours, our_lse = sparse_mla(q, kv, selection, **given)
                close(out, ours.double())
                close(lse, our_lse.double(), 1e-3)


@needs["flash_mla"]
def test_flash_mla_repeats_bit_for_bit():
    q, kv, _, selection = attention("causal", 64)
    first, again = (sparse_mla(q, kv, selection, scale=0.04, backend="flash_mla") for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("backend", "heads"),
    [
        *(pytest.param("cudnn", heads, marks=needs["cudnn"]) for heads in (16, 40, 64)),
        pytest.param("tilelang", 64, marks=tilelang),
    ],
)
def test_attention_backward(backend, heads, layout):
    q, kv, grad, selection = attention(layout, heads)
    for sink in (None, torch.randn(heads, device=GPU)) if backend == "cudnn" else (None,):
        saved = (q, kv, selection.index, selection.length, sink)
        out, lse = forward_reference(*widened((*saved, 0.04, 512)))
        case = (*saved, out.bfloat16(), lse.float(), 0.04, False)
        exact = backward_reference(*widened((grad, *case)))
        call = Call.of((q, kv), len(kv), heads=heads, width=576, value_width=512, top_k=SLOTS)
        run = choose("sparse_mla.backward", call, backend).function
        assert run is not None
        dq, dkv = run(grad, *case) if backend == "tilelang" else quietly(lambda case=case, run=run: run(grad, *case))
        unread = ~selection.mask(len(kv)).any(0)
        assert not dq[selection.length == 0].any()
        assert not dkv[unread].any()
        for got, right in zip((dq, dkv), exact, strict=True):
            close(got, right)
        if heads == 64 and sink is None:
            ours = choose("sparse_mla.backward", call).function
            assert ours is not None
            for got, other in zip((dq, dkv), ours(grad, *case), strict=True):
                close(got, other.double())


def indexer(layout: Layout, heads: int, *, whole: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, w: whole numbers, so that every score is exact and many are equal; NaN where nobody reads."""
    keys, rows = layout.keys, layout.keys.num_rows
    q, k, w = normal(rows, heads, 128, seed=4), normal(layout.num_keys, 128, seed=5), normal(rows, heads, seed=6)
    if whole:
        q, k, w = (x.float().round().bfloat16() for x in (q, k * 0.3, w))
    start, stop = ranges(keys)
    return poison(q, stop > start), poison(k, keys.mask(layout.num_keys).any(0).to(GPU)), w


@pytest.mark.parametrize(
    ("backend", "heads"),
    [
        pytest.param("cudnn", 16, marks=needs["cudnn"]),
        pytest.param("tilelang", 32, marks=tilelang),
    ],
)
def test_select_keys(backend, heads):
    for layout in LAYOUTS.values():
        q, k, w = indexer(layout, heads)
        keys = layout.keys.to(GPU)
        exact = select_reference(q.float(), k.float(), w.float(), *ranges(keys), 64, True, True, 2**30)
        for block in (2**30, 2**16):
            got = select_keys(q, k, w, keys, 64, return_scores=True, block_bytes=block, backend=backend)
            assert torch.equal(got.index, exact[0])
            assert torch.equal(got.length, exact[1])
            torch.testing.assert_close(got.score, exact[2], rtol=1e-5, atol=1e-4)
        assert torch.equal(select_keys(q, k, w, keys, 64).index, exact[0]), "ours"


@needs["cudnn"]
@pytest.mark.parametrize("name", SCORES)
def test_select_topk(name):
    scores = hostile_scores(name, 200, 251).to(GPU)
    keys = Layout.packed([7, 0, 44, 149], total=200).keys
    zero, whole = (torch.full((200,), key, dtype=torch.int32, device=GPU) for key in (0, 251))
    whole[::5] = 0  # the kernel writes nothing for such a row
    for start, stop in (ranges(keys), (zero, whole)):
        got = quietly(lambda a=start, b=stop: select_topk(scores, KeyRange(a, b), SLOTS, backend="cudnn"))
        index, length = topk_reference(scores, start, stop, SLOTS)
        assert torch.equal(got.index, index)
        assert torch.equal(got.length, length)


@needs["cudnn"]
def test_indexer_loss():
    layout = LAYOUTS["packed"]
    q, kv, _, selection = attention("packed", 64)
    q_i, k_i, w = indexer(layout, 32, whole=False)
    w = w * 0.02
    keys, rows = layout.keys.to(GPU), layout.keys.num_rows
    _, lse = forward_reference(*widened((q, kv, selection.index, selection.length, None, 0.04, 512)))
    real = (selection.length > 0) & (torch.arange(rows, device=GPU) % 5 != 2)
    saved = (q_i, k_i, w, q, kv, lse.float(), selection.index, selection.length, keys, real)
    flags = (torch.full((), 100.0, device=GPU), 0.04, True, ALONE)
    exact = kl_forward_reference(*widened((*saved, *flags)))
    call = Call.of((q_i, k_i), len(k_i), heads=32, width=128, top_k=SLOTS)
    run = choose("indexer_kl.forward", call, "cudnn").function
    assert run is not None
    loss, _, mass, dscore = quietly(lambda: run(*saved, *flags))
    close(loss, exact[0])
    close(mass[real], exact[2][real])
    close(dscore[real], exact[3][real])
    row_scale = torch.where(real, 0.01, 0.0)
    rest = tuple(x.float() for x in exact[1:])
    case = (row_scale, *saved, *rest, 0.04, True, ALONE, False)
    run = choose("indexer_kl.backward", call, "cudnn").function
    assert run is not None
    right = kl_backward_reference(*widened(case))
    for got, one in zip(quietly(lambda: run(*case)), right, strict=True):
        close(got, one)


@needs["deep_gemm"]
def test_deep_gemm_scores_and_selects():
    heads = 32
    for layout in LAYOUTS.values():
        q, k, w = indexer(layout, heads, whole=False)
        held = deep_gemm.quantized(q, k, w, "fp8")
        dot = torch.einsum("thd,sd->ths", held.q.double(), held.k.double() * held.k_scale.double()[:, None]).relu()
        scores = torch.einsum("ths,th->ts", dot, held.w.double())
        visible = layout.keys.mask(layout.num_keys).to(GPU)
        start, stop = ranges(layout.keys)
        got = deep_gemm.indexer_scores(held, start, stop)
        largest = scores[visible].abs().max()
        # Hopper adds fp8 products in about 14 bits: 2.2e-4 was seen.
        assert (got.double() - scores)[visible].abs().max() < 5e-4 * largest
        assert (got[~visible] == -torch.inf).all()
        index, length, _ = deep_gemm.select_keys(q, k, w, start, stop, 64, True, False, 2**20, "fp8")
        hidden = scores.masked_fill(~visible, -torch.inf)
        best, right = topk_reference(hidden, start, stop, 64)
        assert torch.equal(length, right)
        regret = hidden.gather(1, best.clamp(min=0).long()).masked_fill(best < 0, 0).sum(1)
        regret = regret - hidden.gather(1, index.clamp(min=0).long()).masked_fill(index < 0, 0).sum(1)
        assert regret.abs().max() < 64 * 5e-4 * largest


@pytest.fixture
def vendors_first(monkeypatch):
    """`auto` prefers a vendor's row wherever it can serve, whatever the records of the day say."""
    for operation in ("sparse_mla.forward", "sparse_mla.backward"):
        rows = (replace(row, record=lambda _: []) for row in TABLE[operation])
        monkeypatch.setitem(TABLE, operation, tuple(rows))
    backends._choose.cache_clear()
    yield
    backends._choose.cache_clear()


@needs["flash_mla"]
@needs["cudnn"]
def test_a_step_that_mixes_vendors_and_ours(vendors_first):
    """FlashMLA's forward, cuDNN's backward, our selection and loss, against all ours: gradients of every weight."""
    tokens, heads, top_k = 2304, 64, 2048
    keys = Layout.packed([2300, 0, 1], padded=[2302, 1, 1]).keys.to(GPU)
    hidden = normal(tokens, 128, seed=1)
    sizes = {"q": heads * 576, "kv": 576, "q_i": 32 * 128, "k_i": 128, "w": 32}
    weights = {
        name: normal(128, size, seed=i).mul(128**-0.5).requires_grad_() for i, (name, size) in enumerate(sizes.items())
    }
    grad = normal(tokens, heads, 512, seed=7) / tokens

    def step(backend: str) -> tuple[Tensor, Tensor, list[Tensor]]:
        made = {name: hidden @ weight for name, weight in weights.items()}
        q, q_i = made["q"].view(tokens, heads, 576), made["q_i"].view(tokens, 32, 128)
        indexer = (q_i, made["k_i"], made["w"] * 0.02)
        selection = select_keys(*indexer, keys, top_k)
        options = {"scale": 576**-0.5, "kl_weight": 1.0, "backend": backend}
        out, _, kl = dsa_attention(q, made["kv"], selection, *indexer, keys, **options)
        return out, kl, list(torch.autograd.grad((out, kl), list(weights.values()), (grad, torch.ones_like(kl))))

    call = Call.of(hidden, tokens, heads=heads, width=576, value_width=512, top_k=top_k)
    told = backends.explain(call)
    for operation, name in (("sparse_mla.forward", "flash_mla"), ("sparse_mla.backward", "cudnn")):
        assert choose(operation, call).name == name
        assert f"{operation:24s} {name:12s} serves" in told
        assert f"{operation:24s} hopper       can serve" in told
    with settings(strict=True):
        mixed, ours = step("composed"), step("hopper")
    assert abs(mixed[1] - ours[1]) < 1e-3 * ours[1]
    for got, right, bar in ((mixed[0], ours[0], 1e-3), *((x, y, 3e-3) for x, y in zip(mixed[2], ours[2], strict=True))):
        assert got.isfinite().all()
        x, y = got.double().flatten(), right.double().flatten()
        assert 1 - 2 * (x @ y) / (x @ x + y @ y) < bar
