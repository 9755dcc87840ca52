"""Selection in low precision: as the reference rounds, on kernels that multiply what was rounded.

The interpreter holds E4M3 in fp32, which multiplies alike: its bf16 products are garbage. On a GPU, marked tests: whole
numbers, whose scores are exact and whose selection is one, and others within a bar. Hopper adds up products of E4M3 in
about 14 bits, so a selected key may score 2^-10 of the row's largest score below the cut-off.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsattn.backends import Call, explain
from dsattn.keys import KeyRange
from dsattn.ops import select_keys
from dsattn.ops.first_use import compare
from dsattn.ops.select import low_precision_reference, select_reference
from dsattn.testing import strided

select = pytest.importorskip("dsattn.backends.triton.select", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
LOW = ("fp8", "mxfp8")
BAR = 2.0**-10


@pytest.fixture(autouse=True)
def in_the_interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide operands, and blocks that it does not pad without end."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        small = {"_E4M3": torch.float32, "_MXFP8": torch.float32, "_SAMPLE": 64, "_BLOCK": 128}
        for name, value in small.items():
            monkeypatch.setattr(select, name, value)


def operands(heads: int, width: int, rows: int, keys: int, device: str) -> tuple[Tensor, ...]:
    """q, k, w, start, stop: keys of all sizes, ranges of every length, none too; NaN in all that nobody reads."""
    generator = torch.Generator().manual_seed(heads)
    q, k = torch.randn(rows, heads, width, generator=generator), torch.randn(keys, width, generator=generator)
    w = torch.randn(rows, heads, generator=generator)
    k *= torch.rand(keys, 1, generator=generator).add(0.5)
    start = torch.randint(3, keys // 3, (rows,), generator=generator, dtype=torch.int32)
    stop = start + torch.randint(0, keys // 2, (rows,), generator=generator, dtype=torch.int32)
    stop[::7] = start[::7]
    q[::7], w[::7], k[:3], k[int(stop.max()) :] = torch.nan, torch.nan, torch.nan, torch.nan
    return tuple(x.to(device) for x in (q, k, w, start, stop))


def regret(got: tuple[Tensor, ...], case: tuple[Tensor, ...], top_k: int, precision: str) -> float:
    """How far below the cut-off in fp64 a selected key scores, of the row's largest score."""
    wide = (*(x.double() for x in case[:3]), *case[3:])
    index, length, score = low_precision_reference(*wide, len(case[1]), True, True, 2**30, precision)
    assert got[1].equal(length.clamp(max=top_k))
    every = torch.full((len(index), len(case[1]) + 1), -torch.inf, dtype=torch.float64, device=index.device)
    every.scatter_(1, torch.where(index < 0, len(case[1]), index).long(), score)
    best = every.topk(top_k, dim=1).values
    cutoff = torch.where(best.isfinite(), best, torch.inf).amin(1)
    picked = torch.where(got[0] < 0, torch.inf, every.gather(1, got[0].clamp(min=0).long()))
    below = (cutoff[:, None] - picked) / score.abs().masked_fill(index < 0, 0).amax(1, keepdim=True).clamp(min=1e-30)
    return float(below[length > 0].nan_to_num(0.0).amax())


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(("heads", "width", "relu"), [(5, 32, True), (3, 96, False)])
def test_selects_as_the_reference(precision: str, heads: int, width: int, relu: bool, device: str) -> None:
    """Strided operands, ranges, poison; scores that are given are those of the rounded operands."""
    case = operands(heads, width, 9, 130, device)
    rest = (11, relu, True, 2**30, precision)
    got = select.select_keys(*map(strided, case[:3]), *case[3:], *rest)
    want = low_precision_reference(*case, *rest)
    assert got[0].equal(want[0])
    assert got[1].equal(want[1])
    torch.testing.assert_close(got[2], want[2])


@pytest.mark.parametrize("precision", LOW)
def test_first_use_check_passes_and_sees_a_scale_left_out(
    precision: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*operands(4, 32, 9, 60, device), 6, True, False, 2**30, precision)
    for finding in compare("select_keys", select.select_keys, low_precision_reference, None, given):
        assert finding.error <= finding.limit
    if precision == "fp8":
        monkeypatch.setattr(select, "functools", _Forgetful)
        found = compare("select_keys", select.select_keys, low_precision_reference, None, given)
        assert any(finding.error > finding.limit for finding in found)


class _Forgetful:
    @staticmethod
    def partial(function: Callable[..., None], **_: Tensor) -> Callable[..., None]:
        return function


@pytest.mark.gpu
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(("heads", "width"), [(32, 128), (64, 128), (12, 64), (8, 32)])
def test_whole_numbers_give_the_selection_of_the_rule(precision: str, heads: int, width: int, device: str) -> None:
    q, k, w, start, stop = operands(heads, width, 130, 9000, device)
    unit = 2.0 ** (torch.arange(9000, device=device) % 3)[:, None]
    case = ((1.75 * q.sign()).bfloat16(), (1.75 * k.sign() * unit).bfloat16(), w.mul(3).round())
    got = select_keys(*case, KeyRange(start, stop), 200, precision=precision, backend="triton")
    want = select_keys(*case, KeyRange(start, stop), 200, precision=precision, backend="reference")
    assert got.index.equal(want.index)
    assert got.length.equal(want.length)


@pytest.mark.parametrize("precision", LOW)
def test_the_bar_tells_a_precision_from_bf16(precision: str) -> None:
    case = operands(8, 64, 40, 900, "cpu")
    assert regret(low_precision_reference(*case, 50, True, False, 2**30, precision), case, 50, precision) < 1e-6
    assert regret(select_reference(*case, 50, True, False, 2**30), case, 50, precision) > 4 * BAR


@pytest.mark.gpu
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(("heads", "width"), [(32, 128), (64, 128), (12, 64)])
def test_within_the_bar(precision: str, heads: int, width: int, device: str) -> None:
    q, k, w, start, stop = operands(heads, width, 100, 6000, device)
    case = (q.bfloat16(), k.bfloat16(), w, start, stop)
    got = select.select_keys(*case, 512, True, False, 2**30, precision)
    assert regret(got, case, 512, precision) <= BAR


@pytest.mark.gpu
@pytest.mark.parametrize("precision", LOW)
def test_bits_follow_from_row_and_key_alone(precision: str, device: str) -> None:
    q, k, w, start, stop = operands(32, 128, 300, 20000, device)
    case = (q.bfloat16(), k.bfloat16(), w, start, stop)
    whole = select.select_keys(*case, 512, True, True, 2**30, precision)
    for rows, block_bytes in ((slice(0, 300), 2**22), (slice(37, 138), 2**30), (slice(299, 300), 2**30)):
        part = (case[0][rows], case[1], *(x[rows] for x in case[2:]))
        got = select.select_keys(*part, 512, True, True, block_bytes, precision)
        assert all(one.equal(its[rows]) for one, its in zip(got, whole, strict=True))
    padded = (case[0], torch.cat([case[1][:77], case[1]]), case[2], start + 77, stop + 77)
    moved = select.select_keys(*padded, 512, True, True, 2**30, precision)
    assert moved[0].equal(torch.where(whole[0] < 0, -1, whole[0] + 77))
    assert moved[2].equal(whole[2])


def served(capability: int, precision: str) -> list[str]:
    call = Call(device="cuda", capability=capability, dtype="bfloat16", heads=32, width=128, top_k=2048)
    return select.requirements(Call(**{**vars(call), "precision": precision}))


def test_what_a_precision_needs() -> None:
    assert not served(90, "bf16") + served(90, "fp8") + served(89, "fp8") + served(100, "fp8") + served(80, "mxfp8")
    assert served(80, "fp8") == ["compute capability 8.9 or above for fp8"]
    assert served(100, "mxfp8") == ["a GPU before Blackwell for mxfp8, made in bf16"]
    for precision, said in (("fp8", "serves"), ("mxfp8", "precision 'bf16' or 'fp8'")):
        call = Call(device="cuda", capability=90, dtype="bfloat16", heads=32, width=128, precision=precision)
        row = next(line for line in explain(call).splitlines() if line.startswith("select_keys") and " hopper " in line)
        assert said in row
