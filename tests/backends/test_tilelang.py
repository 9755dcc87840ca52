"""The conventions of TileLang's kernels, on stand-ins that keep them: the packages need a GPU."""

import functools
import math
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from dsattn import Layout
from dsattn.backends import Call, tilelang
from dsattn.errors import BackendUnavailable
from dsattn.ops.first_use import LIMITS, compare, error_of
from dsattn.ops.select import select_reference
from dsattn.ops.sparse_mla import backward_reference, forward_reference
from dsattn.testing import Sizes, make_case, random_selection

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)
LAYOUTS = {
    "causal": Layout.causal(80),
    "packed": Layout.packed([7, 0, 1, 72]),
    "zigzag": Layout.packed([64, 16], cp_size=2, cp_rank=1),
}
OPS = "megatron.core.transformer.experimental_attention_variant.ops"


def unwatched(kernel):
    """The stand-in may look at values, the adapter may not."""

    @functools.wraps(kernel)
    def run(*given, **options):
        with _disable_current_modes():
            return kernel(*given, **options)

    return run


def check(q, kv, indices):
    """What the kernels of attention are made for. Returns what every slot reads, and which slots hold a key."""
    rows, heads, width = q.shape
    assert q.dtype == kv.dtype == torch.bfloat16
    assert heads in (16, 32, 64, 128)
    assert (width, kv.shape[1:], indices.shape[:2]) == (576, (1, 576), (rows, 1))
    assert indices.shape[2] % 64 == 0
    assert indices.dtype == torch.int32
    assert all(x.is_contiguous() for x in (q, kv, indices))
    assert q.isfinite().all(), "every row is multiplied"
    return kv[indices[:, 0].clamp(min=0).long(), 0].float(), indices[:, 0] >= 0


def powers(q, key, inside, sm_scale):
    """[T, H, K] logits to base 2: -inf is where a sum begins that an empty slot's key is added to."""
    begin = torch.where(inside, 0.0, -torch.inf)[:, None]
    return (begin + torch.einsum("thc,tnc->thn", q.float(), key)) * sm_scale / math.log(2)


@unwatched
def forward(q, kv, indices, sm_scale, d_v):
    """To base 2; out and log-sum-exp are 0 where the sum is not above 0: in rows without keys, and where it is NaN."""
    assert d_v == 512
    key, inside = check(q, kv, indices)
    power = powers(q, key, inside, sm_scale).exp2()
    total = power.sum(-1)
    out = torch.einsum("thn,tnv->thv", power, key[..., :512]) / total[..., None]
    real = total > 0
    return torch.where(real[..., None], out, 0).to(q.dtype), torch.where(real, total, 1.0).log2()


@unwatched
def backward(q, kv, o, do, indices, lse, sm_scale):
    key, inside = check(q, kv, indices)
    assert o.shape == do.shape == (*q.shape[:2], 512)
    assert o.dtype == do.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert all(x.isfinite().all() for x in (o, do)), "every row is multiplied"
    assert lse.isfinite().all(), "rows without keys have 0"
    p = (powers(q, key, inside, sm_scale) - lse[..., None]).exp2()
    dp = torch.einsum("thv,tnv->thn", do.float(), key[..., :512]) - (o.float() * do.float()).sum(-1, keepdim=True)
    ds = p * dp * sm_scale
    dkey = torch.einsum("thn,thc->tnc", ds, q.float())
    dkey[..., :512] += torch.einsum("thn,thv->tnv", p, do.float())
    dkv = torch.zeros(len(kv), 1, 576).index_put_(
        (indices[inside[:, None]].long(),), dkey[inside][:, None], accumulate=True
    )
    dq = torch.einsum("thn,tnc->thc", ds, key).masked_fill(~inside.any(1)[:, None, None], torch.nan)
    return dq.to(q.dtype), dkv.to(kv.dtype)


@unwatched
def scores(q, kv, weights, start, stop, clean_logits, use_relu):
    assert q.dtype == kv.dtype == torch.bfloat16
    assert q.shape[1] % 8 == 0
    assert q.shape[1] <= 64
    assert start.dtype == stop.dtype == torch.int32
    assert all(x.is_contiguous() for x in (q, kv, weights, start, stop))
    dot = torch.einsum("thd,sd->ths", q.float(), kv.float())
    found = torch.einsum("ths,th->ts", dot.relu() if use_relu else dot, weights.float())
    column = torch.arange(len(kv))
    outside = (column < start[:, None]) | (column >= stop[:, None])
    return found.masked_fill(outside, -torch.inf if clean_logits else torch.nan)


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    functions = {
        "tilelang_sparse_mla_fwd": {"sparse_mla_fwd_interface": forward},
        "tilelang_sparse_mla_bwd": {"sparse_mla_bwd": backward},
        "tilelang_indexer_fwd": {"indexer_fwd_interface": scores},
        "tilelang_indexer_bwd": {"indexer_bwd_interface": lambda q, w, k, index, grad: (q, w, k)},
        "tilelang_indexer_loss": {
            "sparse_indexer_target_interface": lambda q, k, index, scale: torch.ones(index.shape),
            "sparse_indexer_kl_interface": lambda target, score, valid: (target[valid].sum(), score * valid),
        },
    }
    for name in ("tilelang", "megatron", *(f"{OPS}.{file}" for file in functions)):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(functions.get(name.rpartition(".")[2], {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def case():
    sizes = Sizes(heads=16, width=576, value_dim=512, index_heads=8)
    return make_case("causal", sizes, dtype=torch.bfloat16, poison=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_has_a_natural_log_sum_exp(layout):
    case = make_case(LAYOUTS[layout], Sizes(heads=16, width=576, value_dim=512), dtype=torch.bfloat16)
    selection = random_selection(case.keys, case.layout.num_keys, 64)
    case.kv[0] = torch.nan  # no row's key, and what empty slots read
    selection = replace(selection, index=selection.index.masked_fill(selection.index == 0, -1))
    operands = (case.q, case.kv, selection.index, selection.length, None, case.scale, 512)
    out, lse = tilelang.sparse_mla_forward(*operands)
    exact = forward_reference(*operands)
    torch.testing.assert_close(out, exact[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, exact[1])
    rest = (case.q, case.kv, selection.index, selection.length, None, *exact, case.scale, False)
    grads = tilelang.sparse_mla_backward(case.grad_out, *rest), backward_reference(case.grad_out, *rest)
    for got, right in zip(*grads, strict=True):
        assert error_of(got, right.double()) < LIMITS[torch.bfloat16]


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_first_use_checks_pass(heads, no_sync):
    def quiet(run):
        @functools.wraps(run)
        def call(*case):
            with no_sync():
                return run(*case)

        return call

    bf16 = torch.bfloat16
    q, index = torch.empty(2, heads, 576, dtype=bf16), torch.empty(2, 64, dtype=torch.int32)
    given = (q, q[:, 0], index, index[:, 0], None, 0.1, 512)
    for finding in compare("sparse_mla.forward", quiet(tilelang.sparse_mla_forward), forward_reference, None, given):
        assert finding.error <= finding.limit, finding
    out, lse = q[..., :512], q[..., 0].float()
    given = (out, *given[:5], out, lse, 0.1, False, None)
    functions = (quiet(tilelang.sparse_mla_backward), backward_reference, forward_reference)
    for finding in compare("sparse_mla.backward", *functions, given):
        assert finding.error <= finding.limit, finding
    q = torch.empty(2, heads, 16, dtype=bf16)
    for relu in (True, False):
        given = (q, q[:, 0], q[..., 0], index[:, 0], index[:, 0], 9, relu, True, 2**12)
        for finding in compare("select_keys", quiet(tilelang.select_keys), select_reference, None, given):
            assert finding.error <= finding.limit, finding


def test_strided_operands_are_moved(case):
    operands = (case.q_i, case.k_i, case.w)
    loose = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in operands]
    rest = (case.keys.start, case.keys.stop, 7, True, False, 2**12)
    assert torch.equal(tilelang.select_keys(*loose, *rest)[0], tilelang.select_keys(*operands, *rest)[0])


def test_megatrons_topk_leaves_slots_empty(case):
    index = tilelang.topk_of_megatron(case.q_i, case.k_i, case.w, case.keys.start, case.keys.stop, 7)
    assert index.dtype == torch.int32
    assert torch.equal((index >= 0).sum(1), case.keys.lengths().clamp(max=7).long())
    assert (index < case.keys.stop[:, None]).all()
    few = tilelang.topk_of_megatron(case.q_i, case.k_i, case.w, case.keys.start, case.keys.stop, 1000)
    assert few.shape[1] == case.layout.num_keys


def test_the_loss_masks_empty_slots_and_orders_its_gradients(case):
    index = random_selection(case.keys, case.layout.num_keys, 7).index
    kl, grad = tilelang.indexer_kl_forward(case.q, case.kv, index, torch.ones(index.shape), case.scale)
    assert kl == (index >= 0).sum()
    assert torch.equal(grad != 0, index >= 0)
    grads = tilelang.indexer_kl_backward((case.q_i, case.k_i, case.w), index, grad)
    assert [x.shape for x in grads] == [x.shape for x in (case.q_i, case.k_i, case.w)]


def test_refuses_what_the_kernels_lack(case):
    nothing = torch.empty(0)
    with pytest.raises(BackendUnavailable, match="no sink"):
        tilelang.sparse_mla_forward(nothing, nothing, nothing, nothing, case.sink, 1.0, 16)
    with pytest.raises(BackendUnavailable, match="repeat bit for bit"):
        tilelang.sparse_mla_backward(*[nothing] * 5, None, nothing, nothing, 1.0, True)


@pytest.mark.parametrize(
    ("change", "need"),
    [
        ({"heads": 48}, "a power of two of at least 16 heads"),
        ({"heads": 8}, "a power of two of at least 16 heads"),
        ({"width": 512}, "width 576 with 512 values"),
        ({"deterministic": True}, "gradients that need not repeat"),
        ({"top_k": 100}, "slots in multiples of 64"),
        ({"dtype": "float16"}, "bfloat16 operands, not float16"),
        ({"value_width": 0, "heads": 12}, "at most 64 indexer heads, in multiples of 8"),
    ],
)
def test_requirements(change, need):
    assert tilelang.requirements(CALL) == []
    assert tilelang.requirements(Call(**{**vars(CALL), "width": 128, "value_width": 0})) == []
    assert tilelang.requirements(Call(**{**vars(CALL), **change})) == [need]
