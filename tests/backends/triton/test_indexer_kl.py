"""The Triton kernels of the indexer's loss over selected keys against the reference in fp64."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsattn.backends import ALONE, Call, HeadRanks, settings
from dsattn.errors import BackendUnavailable
from dsattn.keys import Layout
from dsattn.ops.distill_reference import backward_reference, forward_reference
from dsattn.selection import Inverse, Selection, invert
from dsattn.testing import (
    Case,
    Sizes,
    error_budget,
    make_case,
    naive_attention,
    naive_kl,
    naive_scores,
    random_selection,
    strided,
    tensor_similarity,
)

kernels = pytest.importorskip("dsattn.backends.triton.indexer_kl", exc_type=ImportError)

# The interpreter multiplies NaN and infinities in numpy, which tells; that results are right is asserted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN = float("nan")
SMALL = Layout.packed([5, 0, 1, 8], padded=[6, 1, 1, 8], total=17)
COMMON = Sizes(heads=6, groups=2, width=24, index_heads=5, index_width=12, top_k=7)
LEARNERS = ("q_i", "k_i", "w")
Results = dict[str, Tensor]


def test_in_the_interpreter(interpret: Callable[[str], int]) -> None:
    assert interpret(__file__) >= 30


def choose_keys(case: Case) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)


def operands_of(case: Case, selection: Selection, target: str = "mla", real: Tensor | None = None) -> tuple:
    """What forward and backward share, up to `real`; the log-sum-exp is of attention to the selection, in fp64."""
    keys = case.kv if target == "mla" else case.k
    k = keys.double() if keys.dim() == 3 else keys.double()[:, None]
    lse = naive_attention(case.q.double(), k, k, selection.mask(k.shape[0]), scale=case.scale)[1]
    if case.w.dtype != torch.float64:
        lse = lse.float()
    if real is None:
        real = case.keys.stop > case.keys.start
    return case.q_i, case.k_i, case.w, case.q, keys, lse, selection.index, selection.length, case.keys, real


def run(
    functions: tuple[Callable, Callable],
    operands: tuple,
    scale: float,
    *,
    relu: bool = True,
    row_scale: Tensor | None = None,
    ranks: HeadRanks = ALONE,
    deterministic: bool = False,
    inverse: Inverse | None = None,
) -> Results:
    real, wide = operands[-1], operands[5].dtype
    divisor = torch.tensor(3.0, dtype=wide, device=real.device)
    loss, *saved = functions[0](*operands, divisor, scale, relu, ranks)
    if row_scale is None:
        row_scale = torch.where(real, 0.25 + torch.arange(len(real), device=real.device) % 3, 0.0)
    grads = functions[1](row_scale.to(wide), *operands, *saved, scale, relu, ranks, deterministic, inverse)
    named = {"loss": loss, "score_lse": saved[0].sum(0), "mass": saved[1], "dscore": saved[2]}
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


# (H, G, C, H_I, D, K): products in steps, padded heads and widths, one group or one a head, several tiles of slots.
SHAPES = [(4, 2, 24, 3, 8, 7), (1, 1, 16, 1, 16, 3), (3, 3, 6, 17, 5, 1), (5, 1, 33, 4, 20, 40), (40, 2, 17, 2, 20, 33)]


@pytest.mark.parametrize("target", ["mla", "gqa"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device: str, shape: tuple[int, ...], target: str) -> None:
    heads, groups, width, index_heads, index_width, top_k = shape
    sizes = Sizes(
        heads=heads, groups=groups, width=width, index_heads=index_heads, index_width=index_width, top_k=top_k
    )
    case = make_case(Layout.continuation(45, 5), sizes, device=device)
    operands = operands_of(case, choose_keys(case), target)
    flags = {"relu": target == "mla", "deterministic": target == "gqa"}
    assert_right(kernel_run(operands, case.scale, **flags), exact_run(operands, case.scale, **flags))


@pytest.mark.parametrize("deterministic", [False, True])
def test_layouts(device: str, deterministic: bool) -> None:
    """Padding rows and keys that nobody reads are NaN."""
    case = make_case(SMALL, COMMON, device=device)
    operands = operands_of(case, choose_keys(case))
    got = kernel_run(operands, case.scale, deterministic=deterministic)
    assert_right(got, exact_run(operands, case.scale))
    idle = operands[7] == 0
    assert idle.any()
    assert not any(got[name][idle].any() for name in ("dscore", "mass", "q_i", "w"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_slots_never_read_memory(device: str, deterministic: bool) -> None:
    """The last key, which -1 would name, is poison; so is what lies past `length`; a -1 before it is no key either."""
    index = torch.tensor([[0, 3, 3], [1, -1, 0], [-1, 2, 1], [-1, -1, -1]], dtype=torch.int32, device=device)
    length = torch.tensor([1, 3, 3, 0], dtype=torch.int32, device=device)
    for poison in (NAN, float("inf")):
        case = make_case(Layout.causal(4), Sizes(), device=device)
        for tensor in (case.kv, case.q, case.k_i, case.q_i, case.w):
            tensor[3] = poison
        clean = torch.where(index == 3, -1, index)
        operands = operands_of(case, Selection(clean, length))
        given = (*operands[:6], index, *operands[7:])
        got = kernel_run(given, case.scale, deterministic=deterministic)
        assert_right(got, exact_run(operands, case.scale))
        assert not got["k_i"][3].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_that_are_not_real_may_hold_nan(device: str, deterministic: bool) -> None:
    case = make_case(Layout.packed([5, 3, 2]), COMMON, device=device)
    real = torch.ones(10, dtype=torch.bool, device=device)
    real[5:8] = False
    operands = operands_of(case, choose_keys(case), real=real)
    clean = kernel_run(operands, case.scale, deterministic=True)
    assert_right(clean, exact_run(operands, case.scale))
    for tensor in operands[:6]:
        tensor[5:8] = NAN
    got = kernel_run(operands, case.scale, deterministic=deterministic)
    assert not got["k_i"][5:8].any()
    torch.testing.assert_close(got.pop("k_i"), clean.pop("k_i"))
    assert_same(got, clean)
    assert not any(got[name][5:8].any() for name in ("dscore", "q_i", "w"))


def test_rows_without_mass_lose_and_learn_nothing(device: str) -> None:
    case = make_case(Layout.causal(6), COMMON, device=device)
    operands = operands_of(case, choose_keys(case))
    operands[5][3] = torch.inf
    got = kernel_run(operands, case.scale)
    assert got["mass"][3] == 0
    assert not any(got[name][3].any() for name in ("dscore", "q_i", "w"))
    assert_right(got, exact_run(operands, case.scale))


def test_weight_zero_gives_exact_zeros_where_scores_overflow(device: str) -> None:
    case = make_case(Layout.causal(6), COMMON, device=device)
    case.w[5] = 3e38
    selection = random_selection(case.keys, 6, 7, sparse_rows=False)
    got = kernel_run(operands_of(case, selection), case.scale, row_scale=torch.zeros(6, device=device))
    assert not got["loss"].isfinite()
    assert not any(got[name].any() for name in LEARNERS)


@pytest.mark.parametrize(("name", "value"), [("k_i", -torch.inf), ("k_i", NAN), ("kv", NAN), ("w", NAN), ("q", NAN)])
def test_what_is_not_finite_is_told(device: str, name: str, value: float) -> None:
    case = make_case(Layout.causal(7), Sizes(index_heads=1, index_width=1, top_k=7), device=device)
    case = replace(case, q_i=torch.ones_like(case.q_i), w=torch.ones_like(case.w))
    getattr(case, name)[2] = value
    selection = random_selection(case.keys, 7, 7, sparse_rows=False)
    operands = operands_of(case, selection)
    got, exact = kernel_run(operands, case.scale, relu=False), exact_run(operands, case.scale, relu=False)
    assert not got["loss"].isfinite()
    assert_right({**got, "k_i": got["w"]}, {**exact, "k_i": exact["w"]})


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_scores_keep_their_differences(device: str, offset: float) -> None:
    case = make_case(Layout.causal(9), Sizes(index_heads=1, index_width=1), device=device)
    near = torch.randint(-256, 256, (9, 1), generator=torch.Generator().manual_seed(0)).to(device) / 64
    case = replace(case, q_i=torch.ones_like(case.q_i), w=torch.ones_like(case.w), k_i=offset + near)
    operands = operands_of(case, choose_keys(case))
    got, exact = kernel_run(operands, case.scale, relu=False), exact_run(operands, case.scale, relu=False)
    torch.testing.assert_close(got["loss"].double(), exact["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(got["k_i"].double(), exact["k_i"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("rows", "keys", "top_k"), [(0, 5, 3), (3, 0, 2), (3, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_to_do(device: str, rows: int, keys: int, top_k: int, deterministic: bool) -> None:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    ranges = Layout.causal(rows).to(device).keys
    index = torch.full((rows, top_k), -1, dtype=torch.int32, device=device)
    length, real = ranges.start * 0, torch.ones(rows, dtype=torch.bool, device=device)
    indexer, attention = (normal(rows, 2, 4), normal(keys, 4), normal(rows, 2)), (normal(rows, 3, 6), normal(keys, 6))
    got = kernel_run(
        (*indexer, *attention, normal(rows, 3), index, length, ranges, real), 1.0, deterministic=deterministic
    )
    assert got["loss"] == 0
    assert got["score_lse"].tolist() == [-torch.inf] * rows
    assert got["dscore"].shape == (rows, top_k)
    assert [got[name].shape for name in LEARNERS] == [x.shape for x in indexer]
    assert not any(got[name].any() for name in ("mass", "dscore", *LEARNERS))


def test_strides(device: str) -> None:
    case = make_case(Layout.causal(6), COMMON, device=device)
    operands = operands_of(case, choose_keys(case))
    loose = tuple(strided(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in operands)
    loose = (*loose[:6], operands[6].T.contiguous().T, *operands[7:])
    assert_same(kernel_run(loose, case.scale, deterministic=True), kernel_run(operands, case.scale, deterministic=True))


def test_blocks_of_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in runs give what one run gives; dk up to the order of fp32 sums."""
    case = make_case(Layout.causal(8), COMMON, device=device)
    operands = operands_of(case, choose_keys(case))
    whole = kernel_run(operands, case.scale, deterministic=True)
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 3 * 7 * 12 * 4)  # runs of 3 rows in the backward
    got = kernel_run(operands, case.scale, deterministic=True)
    with settings(scratch_bytes=kernels.SCRATCH_BYTES):
        monkeypatch.setattr(kernels, "SCRATCH_BYTES", 2**30)
        assert_same(kernel_run(operands, case.scale, deterministic=True), got)
    torch.testing.assert_close(got.pop("k_i"), whole.pop("k_i"))
    assert_same(got, whole)
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1)
    got = kernel_run(operands, case.scale)
    del got["k_i"]
    assert_same(got, whole)


def test_fp32_contributions(device: str) -> None:
    """The sums are then those of atomics but for their order; contributions in half precision are another matter."""
    case = make_case(Layout.causal(40), COMMON, dtype=torch.bfloat16, device=device)
    operands = operands_of(case, choose_keys(case))
    atomic, rounded = (kernel_run(operands, case.scale, deterministic=fixed)["k_i"] for fixed in (False, True))
    with settings(fp32_contributions=True):
        got, again = (kernel_run(operands, case.scale, deterministic=True)["k_i"] for _ in range(2))
    assert got.equal(again)
    assert float((got != atomic).float().mean()) < 0.01
    assert float((rounded != atomic).float().mean()) > 0.1


@pytest.mark.parametrize("layout", [SMALL, Layout.causal(5)], ids=["packed", "fewer keys than slots"])
@pytest.mark.parametrize("rows", [99, 3])
def test_an_inverse_changes_no_bit(device: str, layout: Layout, rows: int) -> None:
    """In one run of rows and in several, with holes, rows that weigh nothing and a key that nobody reads."""
    case = make_case(layout, COMMON, device=device)
    selection = choose_keys(case)
    selection.index[::2, 1] = -1
    selection.index[selection.index == 2] = -1
    operands = operands_of(case, selection)
    weights = torch.where(operands[-1], torch.arange(len(case.q), device=device) % 3, 0.0)
    flags = {"row_scale": weights, "deterministic": True}
    held = invert(selection.index, selection.length, case.layout.num_keys)
    with settings(scratch_bytes=rows * 7 * 12 * 4):
        expected = kernel_run(operands, case.scale, **flags)
        assert_same(kernel_run(operands, case.scale, **flags, inverse=held), expected)
    moved = held._replace(slot=held.slot[: int(held.offset[-1])].roll(1))
    wrong = kernel_run(operands, case.scale, **flags, inverse=moved)
    assert not wrong["k_i"].equal(expected["k_i"])


def test_mixed_dtypes_meet_above(device: str) -> None:
    case = make_case(Layout.causal(5), Sizes(heads=2), device=device)
    case = replace(case, q_i=case.q_i.bfloat16(), q=case.q.bfloat16(), w=case.w.bfloat16())
    operands = operands_of(case, choose_keys(case))
    got = kernel_run(operands, case.scale)
    assert [got[name].dtype for name in LEARNERS] == [torch.bfloat16, torch.float32, torch.bfloat16]
    exact = exact_run(operands, case.scale)
    for name in ("loss", "dscore", "mass", "k_i"):
        torch.testing.assert_close(got[name].double(), exact[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["q_i"].double(), exact["q_i"], rtol=1e-2, atol=1e-5)
    wide = (*operands[:2], operands[2].double(), *operands[3:])
    with pytest.raises(BackendUnavailable, match="fp64 operands need backend='reference'"):
        kernel_run(wide, case.scale)


def test_target_is_summed_over_the_group(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank with the same heads: twice the mass, the same loss. The backward needs no other sum."""
    case = make_case(Layout.causal(8), COMMON, device=device)
    operands = operands_of(case, choose_keys(case))
    alone, asked = kernel_run(operands, case.scale), []

    def double(ranks: HeadRanks, target: Tensor) -> Callable[[], Tensor]:
        asked.append(ranks)
        return lambda: target * 2

    monkeypatch.setattr(HeadRanks, "begin", double)
    ranks = HeadRanks("heads")
    got = kernel_run(operands, case.scale, ranks=ranks)
    assert asked == [ranks]
    assert_right(got, {**{name: x.double() for name, x in alone.items()}, "mass": 2 * alone["mass"].double()})


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("target", ["mla", "gqa"])
def test_rows_that_ranks_share_out(device: str, parts_add_up: Callable, target: str, shards: int) -> None:
    case = make_case(Layout.packed([7, 0, 1, 5 + 16]), COMMON, device=device)
    operands = operands_of(case, choose_keys(case), target)
    scratch = 3 * 4 * COMMON.top_k * (shards + 1)  # of three rows
    parts_add_up((kernel_run, exact_run, assert_right), operands, case.scale, shards, scratch)


def test_an_off_by_one_selection_is_seen(device: str) -> None:
    """Negative control: the neighbour of a key gives something else."""
    case = make_case(Layout.causal(6), COMMON, device=device)
    selection = choose_keys(case)
    operands = operands_of(case, selection)
    shifted = torch.where(selection.index > 0, selection.index - 1, selection.index)
    with pytest.raises(AssertionError, match="loss"):
        assert_right(kernel_run((*operands[:6], shifted, *operands[7:]), case.scale), exact_run(operands, case.scale))


def test_token_counts_compile_nothing_again() -> None:
    """Nor do tensors that begin where they like."""
    from dsattn.backends.triton.launch import recording

    sizes = Sizes(heads=6, groups=2, width=32, index_heads=5, index_width=16, top_k=7)
    with recording(start=False) as kept:
        for rows, keys in ((1, 1), (16, 16), (17, 64), (33, 100), (160, 160)):
            case = make_case(Layout.continuation(keys, rows), sizes, poison=False)
            operands = operands_of(case, choose_keys(case))
            for given in (operands, _without_the_first_row(operands)):
                for deterministic in (False, True):
                    kernel_run(given, case.scale, deterministic=deterministic)
    loss = ("_slot_score_kernel", "_target_kernel", "_loss_kernel", "_dscore_kernel")
    once = dict.fromkeys((*loss, "_mark_kernel", "_count_kernel", "_place_kernel", "_slot_sum_kernel"), 1)
    assert {name: len(found) for name, found in kept.items()} == {**once, "_slot_gradient_kernel": 2}  # atomics or not


def _without_the_first_row(operands: tuple) -> tuple:
    keys = operands[8].row_slice(1, operands[8].num_rows)
    rows = tuple(x[1:] if place in (0, 2, 3, 5, 6, 7) else x for place, x in enumerate(operands[:8]))
    return (*rows, keys, operands[9][1:])


LARGE = {
    "mla": Sizes(heads=64, groups=1, width=576, value_dim=512, index_heads=32, index_width=128, top_k=200),
    "gqa": Sizes(heads=48, groups=4, width=128, index_heads=64, index_width=64, top_k=100),
    "odd": Sizes(heads=17, groups=1, width=160, index_heads=5, index_width=33, top_k=33),
}


def naive_run(case: Case, selection: Selection, target: str) -> Results:
    """Loss and gradients over whole matrices in the case's dtype; every row weighs 1."""
    operands = [getattr(case, name).detach().clone().requires_grad_() for name in LEARNERS]
    mask = selection.mask(case.layout.num_keys)
    k = case.kv[:, None] if target == "mla" else case.k
    loss = naive_kl(naive_scores(*operands, case.keys), case.q, k, mask, scale=case.scale, divisor=1)
    return {"loss": loss.detach(), **dict(zip(LEARNERS, torch.autograd.grad(loss, operands), strict=True))}


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sizes", LARGE)
def test_bf16_is_within_budget(device: str, sizes: str, deterministic: bool) -> None:
    target = "gqa" if sizes == "gqa" else "mla"
    case = make_case(Layout.packed([300, 1, 150]), LARGE[sizes], dtype=torch.bfloat16, device=device)
    selection = choose_keys(case)
    ones = case.keys.stop.new_ones(len(case.q), dtype=torch.float32)
    got = kernel_run(operands_of(case, selection, target), case.scale, row_scale=ones, deterministic=deterministic)
    low = naive_run(case, selection, target)
    exact = naive_run(case.map(lambda x: x.double()), selection, target)
    torch.testing.assert_close(3 * got["loss"].double(), exact["loss"], rtol=1e-5, atol=0)
    for name in LEARNERS:
        assert got[name].dtype == torch.bfloat16
        assert not error_budget(got[name], exact[name], low[name]), name
        assert tensor_similarity(got[name], exact[name]) > 1 - 3e-3, name


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_that_weigh_nothing_leave_no_unwritten_scratch(device: str, deterministic: bool) -> None:
    """Scratch holds NaN before it is written, as torch's deterministic mode fills it."""
    case = make_case(Layout.causal(10), COMMON, device=device)
    operands = operands_of(case, choose_keys(case))
    row_scale = (torch.arange(10, device=device) % 3 == 0).float()
    exact = exact_run(operands, case.scale, row_scale=row_scale)
    torch.use_deterministic_algorithms(True)
    try:
        got = kernel_run(operands, case.scale, row_scale=row_scale, deterministic=deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in LEARNERS:
        torch.testing.assert_close(got[name].double(), exact[name], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [4096, 40_000])
def test_many_rows(device: str, keys: int) -> None:
    """4096 rows, of which the reference meets the last 48, which alone teach."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    ranges = Layout.continuation(keys, 4096).to(device).keys
    order = torch.rand(4096, keys, generator=generator, device=device)
    order.masked_fill_(torch.arange(keys, device=device) >= ranges.stop[:, None], -1)
    picked = order.topk(2048, dim=1)
    selection = Selection.from_index(torch.where(picked.values < 0, -1, picked.indices))
    indexer = normal(4096, 32, 128), normal(keys, 128), normal(4096, 32) / 32
    q, kv, real = normal(4096, 64, 576), normal(keys, 576), torch.ones(4096, dtype=torch.bool, device=device)
    lse, scale = torch.full((4096, 64), 10.0, device=device), 576**-0.5
    operands = (*indexer, q, kv, lse, selection.index, selection.length, ranges, real)
    row_scale = (torch.arange(4096, device=device) >= 4048).float()
    last = slice(4048, 4096)
    part = (0, 2, 3, 5, 6, 7)
    few = tuple(x[last].double() if i in part and x.is_floating_point() else x for i, x in enumerate(operands[:8]))
    few = tuple(x[last] if i in (6, 7) else x for i, x in enumerate(few))
    exact = exact_run((*few, ranges.row_slice(4048, 4096), real[last]), scale, row_scale=row_scale[last])
    for deterministic in (False, True):
        got = kernel_run(operands, scale, row_scale=row_scale, deterministic=deterministic)
        for name in ("score_lse", "mass", "dscore"):
            torch.testing.assert_close(got[name][last].double(), exact[name], rtol=1e-4, atol=1e-6)
        for name in ("q_i", "w"):
            assert not got[name][:4048].any()
            assert tensor_similarity(got[name][last], exact[name]) > 1 - 1e-4, name
        assert tensor_similarity(got["k_i"], exact["k_i"]) > 1 - 1e-4


@pytest.mark.gpu
def test_deterministic_repeats(device: str) -> None:
    case = make_case(Layout.causal(1000), replace(LARGE["mla"], top_k=128), dtype=torch.bfloat16, device=device)
    operands = operands_of(case, choose_keys(case))
    first = kernel_run(operands, case.scale, deterministic=True)
    for _ in range(100):
        assert_same(kernel_run(operands, case.scale, deterministic=True), first)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_inside_a_cuda_graph(device: str, deterministic: bool) -> None:
    """No host sync after a warm-up, and a replay follows data that were swapped in place."""
    cases = [make_case(Layout.causal(300), LARGE["gqa"], seed=n, dtype=torch.bfloat16, device=device) for n in (0, 1)]
    calls = [operands_of(case, choose_keys(case), "gqa") for case in cases]
    static = tuple(x.clone() if isinstance(x, Tensor) else x for x in calls[0])
    divisor, ones = torch.tensor(3.0, device=device), torch.ones(300, device=device)

    def step() -> tuple[Tensor, ...]:
        loss, *saved = kernels.indexer_kl_forward(*static, divisor, cases[0].scale, True, ALONE)
        return loss, *kernels.indexer_kl_backward(ones, *static, *saved, cases[0].scale, True, ALONE, deterministic)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for old, new in zip(static, calls[1], strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
    graph.replay()
    for got, wanted in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0 if deterministic else 1e-2, atol=0 if deterministic else 1e-3)


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({}, []),
        ({"top_k": 0, "deterministic": True, "dtype": "float32"}, []),
        ({"device": "cpu", "capability": 0}, ["a CUDA GPU of compute capability 8.0 or above"]),
        ({"dtype": "float64"}, ["bfloat16 or float32 operands"]),
        ({"heads": 65}, ["at most 64 indexer heads"]),
        ({"width": 129}, ["an indexer width of at most 128"]),
    ],
)
def test_requirements(change: dict[str, object], lacks: list[str]) -> None:
    base = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=128, top_k=2048)
    assert kernels.requirements(replace(base, **change)) == lacks
