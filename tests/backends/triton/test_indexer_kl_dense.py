"""The Triton kernels of the indexer's loss over ranges of keys against the reference in fp64."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsattn import settings
from dsattn.backends import ALONE, HeadRanks
from dsattn.keys import KeyRange, Layout
from dsattn.ops.distill_reference import backward_reference, forward_reference
from dsattn.testing import (
    LAYOUTS,
    Case,
    Sizes,
    error_budget,
    make_case,
    naive_attention,
    naive_kl,
    naive_scores,
    strided,
    tensor_similarity,
)

kernels = pytest.importorskip("dsattn.backends.triton.indexer_kl", exc_type=ImportError)
dense = pytest.importorskip("dsattn.backends.triton.indexer_kl_dense", exc_type=ImportError)

# The interpreter multiplies NaN and infinities in numpy, which tells; that results are right is asserted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN = float("nan")
SMALL = Layout.packed([5, 0, 1, 28], padded=[6, 1, 1, 29], total=39)
COMMON = Sizes(heads=6, groups=2, width=12, index_heads=3, index_width=8)
LEARNERS = ("q_i", "k_i", "w")
Results = dict[str, Tensor]


def test_in_the_interpreter(interpret: Callable[[str], int]) -> None:
    assert interpret(__file__) >= 15


def operands_of(case: Case, target: str = "mla", real: Tensor | None = None) -> tuple:
    """What forward and backward share, up to `real`; the log-sum-exp is of dense attention, in fp64."""
    keys = case.kv if target == "mla" else case.k
    k = keys.double() if keys.dim() == 3 else keys.double()[:, None]
    lse = naive_attention(case.q.double(), k, k, case.keys.mask(k.shape[0]), scale=case.scale)[1]
    if case.w.dtype != torch.float64:
        lse = lse.float()
    if real is None:
        real = case.keys.stop > case.keys.start
    return case.q_i, case.k_i, case.w, case.q, keys, lse, None, None, case.keys, real


def run(
    functions: tuple[Callable, Callable],
    operands: tuple,
    scale: float,
    *,
    relu: bool = True,
    row_scale: Tensor | None = None,
    ranks: HeadRanks = ALONE,
) -> Results:
    real, wide = operands[-1], operands[5].dtype
    divisor = torch.tensor(3.0, dtype=wide, device=real.device)
    loss, *saved = functions[0](*operands, divisor, scale, relu, ranks)
    assert saved[2].shape == (len(operands[0]), 0)
    if row_scale is None:
        row_scale = torch.where(real, 0.25 + torch.arange(len(real), device=real.device) % 3, 0.0)
    grads = functions[1](row_scale.to(wide), *operands, *saved, scale, relu, ranks, True)
    named = {"loss": loss, "score_lse": saved[0].sum(0), "mass": saved[1]}
    return {**named, **dict(zip(LEARNERS, grads, strict=True))}


def kernel_run(operands: tuple, scale: float, **flags) -> Results:
    return run((kernels.indexer_kl_forward, kernels.indexer_kl_backward), operands, scale, **flags)


def exact_run(operands: tuple, scale: float, **flags) -> Results:
    """The reference in fp64."""
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in operands)
    return run((forward_reference, backward_reference), wide, scale, **flags)


def assert_right(got: Results, exact: Results) -> None:
    for name, value in exact.items():
        finite = value[value.isfinite()].abs()
        size = max(float(finite.max()), 1e-3) if finite.numel() else 1e-3
        message = functools.partial("{}: {}".format, name)
        flags = {"rtol": 1e-5, "atol": 3e-6 * size, "equal_nan": True, "msg": message}
        torch.testing.assert_close(got[name].double(), value, **flags)


def assert_same(got: Results, expected: Results) -> None:
    for name, value in expected.items():
        assert torch.equal(got[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


# (H, G, C, H_I, D): products in steps, padded heads and widths, one group or one a head, heads beyond a tile's columns.
SHAPES = [(4, 2, 24, 3, 8), (1, 1, 16, 1, 16), (3, 3, 6, 17, 5), (40, 1, 17, 4, 20), (34, 34, 3, 2, 3)]


@pytest.mark.parametrize("target", ["mla", "gqa"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device: str, shape: tuple[int, ...], target: str) -> None:
    """Rows whose ranges begin and end inside tiles."""
    heads, groups, width, index_heads, index_width = shape
    sizes = Sizes(heads=heads, groups=groups, width=width, index_heads=index_heads, index_width=index_width)
    case = make_case(Layout.continuation(45, 5), sizes, device=device)
    start = torch.tensor([0, 3, 17, 40, 12], dtype=torch.int32, device=device)
    stop = torch.tensor([1, 33, 18, 40, 99], dtype=torch.int32, device=device)
    case = replace(case, layout=replace(case.layout, keys=KeyRange(start, stop)))
    operands, flags = operands_of(case, target), {"relu": target == "mla"}
    assert_right(kernel_run(operands, case.scale, **flags), exact_run(operands, case.scale, **flags))


def test_packed_documents_with_poison(device: str) -> None:
    """Padding rows and keys that nobody reads are NaN."""
    case = make_case(SMALL, COMMON, device=device)
    operands = operands_of(case)
    got = kernel_run(operands, case.scale)
    assert_right(got, exact_run(operands, case.scale))
    visible = case.keys.mask(case.layout.num_keys)
    assert not any(got[name][~visible.any(1)].any() for name in ("mass", "q_i", "w"))
    assert not got["k_i"][~visible.any(0)].any()


@pytest.mark.parametrize("layout", ["decode", "only_padding", "nothing", "one_token"])
def test_other_layouts(device: str, layout: str) -> None:
    case = make_case(LAYOUTS[layout](), COMMON, device=device)
    operands = operands_of(case, "gqa")
    assert_right(kernel_run(operands, case.scale), exact_run(operands, case.scale))


def test_rows_that_are_not_real_may_hold_nan(device: str) -> None:
    case = make_case(Layout.packed([9, 8, 4]), COMMON, device=device)
    real = torch.ones(21, dtype=torch.bool, device=device)
    real[9:17] = False
    operands = operands_of(case, real=real)
    clean = kernel_run(operands, case.scale)
    assert_right(clean, exact_run(operands, case.scale))
    for tensor in operands[:6]:
        tensor[9:17] = NAN
    got = kernel_run(operands, case.scale)
    assert_same(got, clean)
    assert not any(got[name][9:17].any() for name in LEARNERS)


def test_gradients_of_one_row_stay_in_it(device: str) -> None:
    case = make_case(Layout.packed([9, 14]), COMMON, device=device)
    row_scale = torch.zeros(23, device=device)
    row_scale[16] = 1.0
    got = kernel_run(operands_of(case), case.scale, row_scale=row_scale)
    others, read = torch.arange(23, device=device) != 16, case.keys.mask(23)[16]
    assert not got["q_i"][others].any()
    assert not got["w"][others].any()
    assert not got["k_i"][~read].any()
    assert got["k_i"][read].any()


def test_weight_zero_gives_exact_zeros_where_scores_overflow(device: str) -> None:
    case = make_case(Layout.causal(6), COMMON, device=device)
    case.w[5] = 3e38
    got = kernel_run(operands_of(case), case.scale, row_scale=torch.zeros(6, device=device))
    assert not got["loss"].isfinite()
    assert not any(got[name].any() for name in LEARNERS)


@pytest.mark.parametrize(("name", "value"), [("k_i", -torch.inf), ("k_i", NAN), ("kv", NAN), ("w", NAN)])
def test_what_is_not_finite_is_told(device: str, name: str, value: float) -> None:
    """A score of -inf where attention reads is an infinite loss, and NaN is NaN."""
    case = make_case(Layout.causal(7), Sizes(index_heads=1, index_width=1), device=device)
    case = replace(case, q_i=torch.ones_like(case.q_i), w=torch.ones_like(case.w))
    getattr(case, name)[2] = value
    operands = operands_of(case)
    got, exact = (how(operands, case.scale, relu=False) for how in (kernel_run, exact_run))
    for part in ("loss", "score_lse", "mass"):
        torch.testing.assert_close(got[part].double(), exact[part], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_scores_keep_their_differences(device: str, offset: float) -> None:
    case = make_case(Layout.causal(20), Sizes(index_heads=1, index_width=1), device=device)
    near = torch.randint(-256, 256, (20, 1), generator=torch.Generator().manual_seed(0)).to(device) / 64
    case = replace(case, q_i=torch.ones_like(case.q_i), w=torch.ones_like(case.w), k_i=offset + near)
    operands = operands_of(case)
    got, exact = kernel_run(operands, case.scale, relu=False), exact_run(operands, case.scale, relu=False)
    torch.testing.assert_close(got["loss"].double(), exact["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(got["k_i"].double(), exact["k_i"], rtol=1e-5, atol=1e-7)


def test_strides(device: str) -> None:
    case = make_case(Layout.causal(9), COMMON, device=device)
    operands = operands_of(case, "gqa")
    loose = tuple(strided(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in operands)
    assert_same(kernel_run(loose, case.scale), kernel_run(operands, case.scale))


def test_blocks_and_shares_of_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in blocks of 6, dk in 3 shares: what one gives, up to the order of sums."""
    case = make_case(Layout.packed([3, 12]), COMMON, device=device)
    operands = operands_of(case)
    whole = kernel_run(operands, case.scale)
    monkeypatch.setattr(dense, "_shares", lambda key_tiles, device: 3)
    with settings(scratch_bytes=6 * 2 * 4 * 64):
        got = kernel_run(operands, case.scale)
    assert_right(got, {name: x.double() for name, x in whole.items()})
    monkeypatch.setattr(dense, "SCRATCH_BYTES", 6 * 2 * 4 * 64)
    assert_same(kernel_run(operands, case.scale), got)


def test_target_is_summed_over_the_group(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank with the same heads: twice the mass, the same loss and gradients."""
    case = make_case(Layout.causal(8), COMMON, device=device)
    operands = operands_of(case)
    alone, asked = kernel_run(operands, case.scale), []

    def double(ranks: HeadRanks, target: Tensor) -> Callable[[], Tensor]:
        asked.append(ranks)
        return lambda: target * 2

    monkeypatch.setattr(HeadRanks, "begin", double)
    ranks = HeadRanks("heads")
    got = kernel_run(operands, case.scale, ranks=ranks)
    assert asked == [ranks, ranks]  # the backward makes it again
    assert_right(got, {**{name: x.double() for name, x in alone.items()}, "mass": 2 * alone["mass"].double()})


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("target", ["mla", "gqa"])
def test_rows_that_ranks_share_out(device: str, parts_add_up: Callable, target: str, shards: int) -> None:
    case = make_case(Layout.packed([7, 0, 1, 5 + 16], padded=[7, 2, 1, 26]), COMMON, device=device)
    operands = operands_of(case, target)
    scratch = 3 * 4 * 64 * (shards + 2)  # of three rows
    parts_add_up((kernel_run, exact_run, assert_right), operands, case.scale, shards, scratch)


LONG = Layout.packed([100, 250, 0, 90, 130], padded=[128, 256, 256, 90, 134])


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_what_no_row_reads_is_not_sent(device: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is known on the host of the ranges, the blocks' keys alone travel; results are those of whole lines."""
    sizes = Sizes(heads=2, groups=1, width=8, index_heads=2, index_width=4)
    case = make_case(LONG, sizes, device=device)
    *before, keys, real = operands_of(case)
    ranks, sent = HeadRanks("heads", shards, shards - 1), []

    def mine(ranks: HeadRanks, x: Tensor) -> Callable[[], Tensor]:
        sent.append(x.numel())
        return lambda: x.unflatten(0, (ranks.shards, -1))[ranks.shard].clone()

    monkeypatch.setattr(HeadRanks, "begin", mine)
    found, cells = [], []
    indexer = (ranks.own(case.q_i), case.k_i, ranks.own(case.w))
    row_scale = ranks.own(torch.where(real, 1.0 + torch.arange(len(real), device=device) % 3, 0.0))
    for reach in (keys.reach, None):
        operands = (*indexer, *before[3:], keys.reaching(reach), real)
        with settings(scratch_bytes=4 * (2 + shards) * 864 * 90):
            found.append(kernel_run(operands, case.scale, row_scale=row_scale, ranks=ranks))
        cells.append(sum(sent))
        sent.clear()
    assert_right(found[0], {name: x.double() for name, x in found[1].items()})
    assert cells[1] == 2 * 864 * 896
    assert cells[0] < 0.3 * cells[1]


def test_an_off_by_one_range_is_seen(device: str) -> None:
    """Negative control."""
    case = make_case(Layout.causal(8), COMMON, device=device)
    operands = operands_of(case)
    later = KeyRange(case.keys.start, case.keys.stop - 1)
    with pytest.raises(AssertionError, match="loss"):
        assert_right(kernel_run((*operands[:8], later, operands[9]), case.scale), exact_run(operands, case.scale))


LARGE = {
    "mla": Sizes(heads=64, groups=1, width=576, value_dim=512, index_heads=32, index_width=128),
    "heads": Sizes(heads=64, groups=64, width=192, index_heads=64, index_width=128),
    "gqa": Sizes(heads=48, groups=4, width=128, index_heads=4, index_width=32),
}


def naive_run(case: Case, target: str) -> Results:
    """Loss and gradients over whole matrices in the case's dtype; every row weighs 1."""
    operands = [getattr(case, name).detach().clone().requires_grad_() for name in LEARNERS]
    mask = case.keys.mask(case.layout.num_keys)
    k = case.kv[:, None] if target == "mla" else case.k
    loss = naive_kl(naive_scores(*operands, case.keys), case.q, k, mask, scale=case.scale, divisor=1)
    return {"loss": loss.detach(), **dict(zip(LEARNERS, torch.autograd.grad(loss, operands), strict=True))}


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", LARGE)
def test_bf16_is_within_budget(device: str, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "SCRATCH_BYTES", 256 * 2 * 4 * 576)  # blocks of 256 rows
    target = "mla" if sizes == "mla" else "gqa"
    case = make_case(Layout.packed([200, 1, 370]), LARGE[sizes], dtype=torch.bfloat16, device=device)
    got = kernel_run(operands_of(case, target), case.scale, row_scale=torch.ones(571, device=device))
    low, exact = naive_run(case, target), naive_run(case.map(lambda x: x.double()), target)
    torch.testing.assert_close(3 * got["loss"].double(), exact["loss"], rtol=1e-5, atol=0)
    for name in LEARNERS:
        assert got[name].dtype == torch.bfloat16
        assert not error_budget(got[name], exact[name], low[name]), name
        assert tensor_similarity(got[name], exact[name]) > 1 - 3e-3, name


@pytest.mark.gpu
def test_repeats_bit_for_bit(device: str) -> None:
    case = make_case(Layout.causal(1500), LARGE["gqa"], dtype=torch.bfloat16, device=device)
    operands = operands_of(case, "gqa")
    first = kernel_run(operands, case.scale)
    for _ in range(100):
        assert_same(kernel_run(operands, case.scale), first)


@pytest.mark.gpu
def test_waits_for_no_host(device: str) -> None:
    """After a warm-up neither pass synchronises, so both fit into a CUDA graph."""
    case = make_case(Layout.causal(300), LARGE["gqa"], dtype=torch.bfloat16, device=device)
    operands, divisor, ones = operands_of(case, "gqa"), torch.tensor(3.0, device=device), torch.ones(300, device=device)

    def step() -> tuple[Tensor, ...]:
        loss, *saved = kernels.indexer_kl_forward(*operands, divisor, case.scale, True, ALONE)
        return loss, *kernels.indexer_kl_backward(ones, *operands, *saved, case.scale, True, ALONE, True)

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph.replay()
    for got, wanted in zip(captured, expected, strict=True):
        assert torch.equal(got, wanted)


def test_token_counts_compile_nothing_again() -> None:
    """Nor do packings and tensors that begin where they like."""
    from dsattn.backends.triton.launch import recording

    sizes = Sizes(heads=6, groups=2, width=32, index_heads=3, index_width=16)
    with recording(start=False) as kept:
        for lengths in ([1], [16], [17, 0, 47], [100, 33], [160, 160]):
            operands = operands_of(make_case(Layout.packed(lengths), sizes, poison=False))
            kernel_run(operands, 0.2)
            keys = operands[8].row_slice(1, operands[8].num_rows)
            rows = tuple(x[1:] if place in (0, 2, 3, 5) else x for place, x in enumerate(operands[:8]))
            kernel_run((*rows, keys, operands[9][1:]), 0.2)
    names = ("_score_kernel", "_target_kernel", "_loss_kernel", "_dscore_kernel", "_query_kernel", "_key_kernel")
    assert {name: len(found) for name, found in kept.items()} == dict.fromkeys(names, 1)
