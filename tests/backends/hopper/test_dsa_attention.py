"""Attention that hands the loss its target: runs of rows, the sum over heads, and, on a GPU, the two parts in turn."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import settings
from dsattn.keys import Layout
from dsattn.ops import dsa_attention
from dsattn.selection import Selection
from dsattn.testing import Case, Sizes, make_case, random_selection

pytest.importorskip("triton")
NAN = float("nan")


def small(rows: int, heads: int, slots: int, width: int = 576) -> tuple[Any, ...]:
    q, index = torch.zeros(rows, heads, width, dtype=torch.bfloat16), torch.zeros(rows, slots, dtype=torch.int32)
    return q, q.new_zeros(100, width), index, torch.zeros(rows, dtype=torch.int32), None, 0.1, 512


@pytest.mark.parametrize("heads", [1, 64, 65])
@pytest.mark.parametrize("slots", [1, 64, 65, 2048])
def test_runs_fit_the_scratch_and_are_even(heads: int, slots: int) -> None:
    from dsattn.backends.hopper.dsa_attention import rows_of_run

    a_row = -(-heads // 64) * -(-slots // 64) * 64 * (64 * 2 + 4)
    for rows, scratch in itertools.product((1, 4096, 10**6 + 1), (2**31, 2**26)):
        with settings(scratch_bytes=scratch):
            most = rows_of_run(rows, heads, slots)
        assert most * a_row <= scratch
        runs = -(-rows // most)
        assert runs == max(-(-rows // (scratch // a_row)), 1)
        assert most * runs - rows < runs


@pytest.mark.parametrize(("rows", "heads", "slots"), [(0, 2, 3), (3, 0, 3), (3, 2, 0)])
def test_nothing_to_do(launches: list, rows: int, heads: int, slots: int) -> None:
    from dsattn.backends.hopper.dsa_attention import dsa_attention_forward

    out, lse, shares = dsa_attention_forward(*small(rows, heads, slots))
    assert (out.shape, lse.shape, shares.shape) == ((rows, heads, 512), (rows, heads), (rows, slots))
    assert {launch.kernel.__name__ for launch in launches if 0 not in launch.grid} <= {
        *(["forward_kernel"] if rows * heads else []),
        *(["_shares_kernel"] if rows * slots else []),
    }


def test_runs_of_rows_meet_their_own_results(launches: list) -> None:
    from dsattn.backends.hopper.dsa_attention import dsa_attention_forward

    with settings(scratch_bytes=4 * 2 * 3 * 64 * 132):
        out, lse, shares = dsa_attention_forward(*small(7, 100, 130))
    assert [launch.kernel.__name__ for launch in launches] == ["forward_kernel", "_shares_kernel"] * 2
    assert [launch.grid for launch in launches] == [(8,), (12,), (6,), (9,)]
    for first, attention, sums in zip((0, 4), launches[::2], launches[1::2], strict=True):
        assert [x.data_ptr() for x in attention.arguments[5:7]] == [out[first:].data_ptr(), lse[first:].data_ptr()]
        p, top, *results = sums.arguments[:5]
        assert all(a is b for a, b in zip((p, top), attention.arguments[7:9], strict=True))
        assert (results[0].data_ptr(), results[2].data_ptr()) == (lse[first:].data_ptr(), shares[first:].data_ptr())
        assert p.shape == (8, 3, 64, 64)
        assert top.shape == (8, 3, 64)


def test_token_counts_do_not_compile_anew() -> None:
    from dsattn.backends.hopper.dsa_attention import dsa_attention_forward
    from dsattn.backends.triton.launch import recording

    with settings(scratch_bytes=2**20), recording(start=False) as kept:
        for rows, slots in ((1, 3), (16, 16), (33, 129), (128, 1)):
            dsa_attention_forward(*small(rows, 3, slots))
    assert {name: len(forms) for name, forms in kept.items()} == {"forward_kernel": 1, "_shares_kernel": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "width", "sink"), [(64, 576, False), (100, 512, True)])
def test_compiles_for_hopper(
    launches: list, assemble: Callable[[Any], Any], heads: int, width: int, sink: bool
) -> None:
    """Leaving P costs four stores of 16 bytes a thread and tile, no register that is not there, and no wait."""
    from dsattn.backends.hopper.dsa_attention import dsa_attention_forward

    operands = list(small(3, heads, 70, width))
    operands[4] = torch.zeros(heads) if sink else None
    dsa_attention_forward(*operands)
    attention, sums = (assemble(launch) for launch in launches)
    assert attention.complaints == sums.complaints == []
    assert attention.shared <= 232448
    assert attention.registers <= 65536 // 384
    assert attention.spills <= 16
    assert sums.spills == 0
    assert attention.ptx.count("st.global.v4.b32") == 2 * 4  # of `even` and of `odd`


def in_register_order(p: Tensor) -> Tensor:
    """p [..., 64 keys] as the kernel leaves it: place 32 g + 8 q + 2 b + x holds key 32 g + 8 b + 2 q + x."""
    return p.unflatten(-1, (2, 4, 4, 2)).transpose(-3, -2).flatten(-4)


@pytest.mark.parametrize("heads", [3, 64, 100])
def test_shares_are_sums_over_heads(device: str, heads: int) -> None:
    """P relative to each tile's own top; tiles past a row's keys, padded heads and empty rows hold poison."""
    from dsattn.backends.hopper.dsa_attention import _shares_kernel
    from dsattn.backends.triton.launch import launch

    torch.manual_seed(0)
    rows, slots, blocks = 5, 150, -(-heads // 64)
    length = torch.tensor([150, 64, 65, 1, 0], dtype=torch.int32)
    logits = torch.randn(rows, 64 * blocks, 192) * 4
    logits.masked_fill_(torch.arange(192) >= length[:, None, None], -torch.inf)
    logits[0, :, 64:128] = -torch.inf  # a tile of holes
    logits[2] -= 1000.0
    top = logits.unflatten(-1, (3, 64)).amax(-1)
    top = torch.where(top == -torch.inf, 0.0, top)  # [rows, heads, tiles]
    p = (logits - top.repeat_interleave(64, -1)).exp2()
    lse = (logits * 0.6931471805599453)[:, :heads].logsumexp(-1)
    want = torch.where(
        lse[..., None] == -torch.inf, 0.0, (logits[:, :heads] * 0.6931471805599453 - lse[..., None]).exp()
    )
    p = in_register_order(p.unflatten(-1, (3, 64)).unflatten(1, (blocks, 64)).transpose(2, 3).contiguous())
    top = top.unflatten(1, (blocks, 64)).transpose(2, 3).contiguous()
    for row, count in enumerate(length.tolist()):
        p[row, :, -(-count // 64) :], top[row, :, -(-count // 64) :] = NAN, NAN
    p.transpose(2, 3).flatten(1, 2)[:, heads:], top.transpose(2, 3).flatten(1, 2)[:, heads:] = NAN, NAN
    shares = torch.full((rows, slots), NAN, device=device)
    operands = (x.to(device) for x in (p, top, lse, length))
    launch(_shares_kernel, (rows * 3,), *operands, shares, slots, 3, H=heads, HEADS=64, KEYS=64, num_warps=1)
    torch.testing.assert_close(shares.cpu(), want.sum(1)[:, :slots].nan_to_num(0.0), rtol=1e-4, atol=1e-6)


def test_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret(__file__)


# On a GPU


def make(layout: Layout, heads: int, width: int, device: str, top_k: int = 200) -> tuple[Case, Selection]:
    sizes = Sizes(heads=heads, groups=1, width=width, value_dim=512, index_heads=32, index_width=128, top_k=top_k)
    case = make_case(layout, sizes, dtype=torch.bfloat16, device=device)
    return case, random_selection(case.keys, case.layout.num_keys, top_k)


def step(case: Case, selection: Selection, sink: Tensor | None, **flags: Any) -> dict[str, Tensor]:
    """Outputs and every gradient."""
    names = ("q", "kv", "q_i", "k_i", "w")
    q, kv, *indexer = (getattr(case, name).clone().requires_grad_() for name in names)
    shape = {"scale": case.scale, "value_dim": 512, "kl_weight": 0.5, "sink": sink}
    out, lse, kl = dsa_attention(q, kv, selection, *indexer, case.keys, **shape, **flags)
    grads = torch.autograd.grad((out, kl), (q, kv, *indexer), (case.grad_out, torch.ones_like(kl)))
    return {"out": out.detach(), "lse": lse, "kl": kl.detach(), **dict(zip(names, grads, strict=True))}


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [70, 200])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(64, 576), (128, 576), (33, 512)])
def test_equals_the_composed_operation(hopper: str, heads: int, width: int, with_sink: bool, top_k: int) -> None:
    """Attention bit for bit, the loss and the indexer's gradients as far as P in bf16 is P; all beside fp64."""
    case, selection = make(Layout.packed([300, 0, 1, 150], padded=[301, 2, 1, 160]), heads, width, hopper, top_k)
    sink = case.sink.float() if with_sink else None
    got, again = (step(case, selection, sink, deterministic=True) for _ in range(2))
    composed = step(case, selection, sink, deterministic=True, backend="composed")
    wide = case.map(lambda x: x.double())
    exact = step(wide, selection, None if sink is None else sink.double(), backend="reference")
    for name, value in got.items():
        assert value.equal(again[name]), name
        if name in ("out", "lse", "q", "kv"):
            assert value.equal(composed[name]), name
        else:
            assert error(value, exact[name]) < 1.5 * error(composed[name], exact[name]) + 1e-3, name
    assert any(not got[name].equal(composed[name]) for name in ("kl", "q_i", "k_i", "w"))  # the row did serve


@pytest.mark.gpu
def test_under_a_cuda_graph_and_without_gradients(hopper: str) -> None:
    case, selection = make(Layout.causal(300), 64, 576, hopper)
    expected = step(case, selection, None, deterministic=True)
    with torch.no_grad():
        shape = {"scale": case.scale, "value_dim": 512, "kl_weight": 0.5}
        operands = (case.q, case.kv, selection, case.q_i, case.k_i, case.w, case.keys)
        assert dsa_attention(*operands, **shape)[2].equal(expected["kl"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(case, selection, None, deterministic=True)
    graph.replay()
    assert all(got[name].equal(expected[name]) for name in got)
    with settings(scratch_bytes=2**22):  # many runs
        many = step(case, selection, None, deterministic=True)
    assert all(many[name].equal(expected[name]) for name in ("out", "lse", "kl", "q_i", "k_i", "w"))
