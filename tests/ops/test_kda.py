"""The delta rule against its matrix formula, in documents that know nothing of each other."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import backends
from dsattn.backends import Call
from dsattn.errors import BackendUnavailable, InputError
from dsattn.ops import kda
from dsattn.ops.kda import kimi_delta_attention

HEADS, WIDTH, VALUES = 2, 4, 3
LENGTHS = [5, 1, 9]


def operands(lengths: list[int] = LENGTHS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, log_decay, beta."""
    rows = sum(lengths)
    q, k = torch.randn(2, rows, HEADS, WIDTH, dtype=dtype)
    v = torch.randn(rows, HEADS, VALUES, dtype=dtype)
    return [q, k, v, -torch.rand(rows, HEADS, WIDTH, dtype=dtype) * 3, torch.rand(rows, HEADS, dtype=dtype)]


def by_hand(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> Any:
    """One document: the state's transition as a matrix, head by head."""
    outs = torch.empty_like(v)
    states = []
    for head in range(HEADS):
        s = torch.zeros(WIDTH, VALUES, dtype=v.dtype) if state is None else state[head]
        for row in range(len(q)):
            key, query = (x[row, head] / (x[row, head].square().sum() + 1e-6).sqrt() for x in (k, q))
            write = beta[row, head] * key
            s = (torch.eye(WIDTH, dtype=v.dtype) - torch.outer(write, key)) @ torch.diag(g[row, head].exp()) @ s
            s = s + torch.outer(write, v[row, head])
            outs[row, head] = s.T @ query / WIDTH**0.5
        states.append(s)
    return outs, torch.stack(states)


@pytest.mark.parametrize("lengths", [[12], LENGTHS, [1, 1, 1], [1]])
def test_equals_the_formula_in_each_document(lengths: list[int]) -> None:
    given = operands(lengths)
    out, states = kimi_delta_attention(*given, lengths)
    first = 0
    for index, length in enumerate(lengths):
        exact, last = by_hand(*(x[first : first + length] for x in given))
        torch.testing.assert_close(out[first : first + length], exact)
        torch.testing.assert_close(states[index], last)
        first += length


def test_documents_that_would_leak_are_seen() -> None:
    given = operands()
    apart, together = kimi_delta_attention(*given, LENGTHS)[0], kimi_delta_attention(*given, [sum(LENGTHS)])[0]
    assert torch.equal(apart[:5], together[:5])
    assert (apart[5:] - together[5:]).abs().max() > 0.01


def test_a_state_carries_on() -> None:
    given = operands([9])
    whole, last = kimi_delta_attention(*given, [9])
    head, state = kimi_delta_attention(*(x[:4] for x in given), [4])
    tail, end = kimi_delta_attention(*(x[4:] for x in given), [5], state=state)
    torch.testing.assert_close(torch.cat((head, tail)), whole)
    torch.testing.assert_close(end, last)


def test_gradcheck() -> None:
    given = [x.requires_grad_() for x in operands([3, 1])]
    state = torch.randn(2, HEADS, WIDTH, VALUES, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: kimi_delta_attention(*x[:5], [3, 1], state=x[5]), (*given, state))


def test_half_precision_runs_in_fp32() -> None:
    given = [x.bfloat16() if index < 3 else x.float() for index, x in enumerate(operands())]
    out, states = kimi_delta_attention(*given, LENGTHS)
    assert (out.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = kimi_delta_attention(*(x.double() for x in given), LENGTHS)
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-8, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kimi_delta_attention(*given, LENGTHS)[0], out)


def test_no_rows() -> None:
    out, states = kimi_delta_attention(*operands([]), [])
    assert out.shape == (0, HEADS, VALUES)
    assert states.shape == (0, HEADS, WIDTH, VALUES)


def test_without_rows_every_operand_has_its_gradient() -> None:
    """Ranks whose pack is empty reduce as many gradients as the others."""
    given = [x.requires_grad_() for x in operands([])]
    kimi_delta_attention(*given, [])[0].sum().backward()
    assert [x.grad is not None and x.grad.shape == x.shape for x in given] == [True] * 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: torch.zeros(15, 2)}, r"q must be \[T, H, d\], got \[15, 2\]"),
        ({1: torch.zeros(15, 2, 3)}, r"k must be \[15, 2, 4\], got \[15, 2, 3\]"),
        ({2: torch.zeros(14, 2, 3)}, r"v must be \[15, 2, 3\], got \[14, 2, 3\]"),
        ({3: torch.zeros(15, 2)}, r"log_decay must be \[15, 2, 4\], got \[15, 2\]"),
        ({4: torch.zeros(15, 3)}, r"beta must be \[15, 2\], got \[15, 3\]"),
        ({5: [5, 0, 10]}, r"lengths\[1\]=0 must be at least 1; leave empty documents out"),
        ({5: [5, 9]}, "lengths sum to 14, but q has 15 rows"),
    ],
)
def test_refuses(change: dict[int, Any], says: str) -> None:
    given = [change.get(index, x) for index, x in enumerate([*operands(), LENGTHS])]
    with pytest.raises(InputError, match=says):
        kimi_delta_attention(*given)


def test_a_state_of_each_document() -> None:
    with pytest.raises(InputError, match=r"state must be \[3, 2, 4, 3\], got \[2, 4, 3\]"):
        kimi_delta_attention(*operands(), LENGTHS, state=torch.zeros(HEADS, WIDTH, VALUES))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch sees a GPU without fla."""
    of = Call.of.__func__  # pyright: ignore[reportFunctionMemberAccess]
    gpu = {"device": "cuda", "capability": 90}
    monkeypatch.setattr(Call, "of", classmethod(lambda cls, *a, **k: dataclasses.replace(of(cls, *a, **k), **gpu)))
    find = backends.importlib.util.find_spec
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None if name == "fla" else find(name))
    backends._choose.cache_clear()
    yield
    backends._choose.cache_clear()


@pytest.mark.usefixtures("on_gpu")
def test_a_gpu_without_fla_is_told_what_to_do() -> None:
    given = [x.float() for x in operands()]
    with pytest.raises(BackendUnavailable, match=r"kda: fla needs the package fla \(fla-core\); install dsattn\[kda\]"):
        kimi_delta_attention(*given, LENGTHS)
    with pytest.raises(BackendUnavailable, match=r"kda: fla needs the package fla \(fla-core\)"):
        kimi_delta_attention(*given, LENGTHS, backend="fla")
    named, _ = kimi_delta_attention(*given, LENGTHS, backend="reference")
    assert torch.equal(named, kda.kda_reference(*given, LENGTHS, None)[0])


def test_fla_by_name_wants_a_gpu() -> None:
    with pytest.raises(BackendUnavailable, match="kda: fla needs a CUDA GPU"):
        kimi_delta_attention(*operands(), LENGTHS, backend="fla")
