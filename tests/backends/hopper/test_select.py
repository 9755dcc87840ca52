"""Selection on Hopper: what needs no GPU, and on one the scores of the portable kernel and the rule's bits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.backends import Call
from dsattn.config import Precision
from dsattn.errors import BackendUnavailable
from dsattn.keys import KeyRange
from dsattn.ops import select_keys
from dsattn.quantize import from_e4m3, to_e4m3

pytest.importorskip("triton")
HERE = Call(device="cuda", capability=90, dtype="bfloat16", heads=32, width=128, top_k=2048)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({}, []),
        ({"width": 64, "heads": 8}, []),
        ({"capability": 80}, ["a GPU of compute capability 9.0 (Hopper)"]),
        ({"dtype": "float32"}, ["bfloat16 operands, or precision 'fp8'"]),
        ({"dtype": "float32", "precision": "fp8"}, []),
        ({"precision": "mxfp8"}, ["precision 'bf16' or 'fp8'"]),
        ({"width": 96}, ["an indexer width of 64 or 128"]),
        ({"heads": 4}, ["at least 8 indexer heads"]),
        ({"heads": 65}, ["at most 64 indexer heads"]),
        ({"top_k": 4097}, ["top_k of at most 4096"]),
    ],
)
def test_requirements(changes: dict[str, object], lacks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsattn.backends.hopper import select

    monkeypatch.setattr(select.triton, "__version__", "3.6.1")
    assert select.requirements(replace(HERE, **changes)) == lacks


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("size_class", ["8K", "above"])
def test_auto_prefers_it(size_class: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsattn.backends import choose
    from dsattn.backends.hopper import select

    monkeypatch.setattr(select.triton, "__version__", "3.6.1")
    assert choose("select_keys", replace(HERE, size_class=size_class, precision=precision)).name == "hopper"
    for other in (replace(HERE, precision="mxfp8"), replace(HERE, precision=precision, heads=16)):
        assert choose("select_keys", replace(other, size_class=size_class)).name == "triton"


def test_refuses_other_dtypes() -> None:
    """Dispatch sees what q and k promote to, and of w whether it is fp64."""
    from dsattn.backends.hopper.select import select_keys

    q, k, w = torch.zeros(2, 8, 64).bfloat16(), torch.zeros(3, 64).bfloat16(), torch.zeros(2, 8)
    stop = torch.zeros(2, dtype=torch.int32)
    for operands in ((q.float(), k, w), (q, k.half(), w), (q, k, w.double())):
        with pytest.raises(BackendUnavailable, match="use backend='triton'"):
            select_keys(*operands, stop, stop, 2, True, False, 2**20)
    for operands in ((q.double(), k, w), (q, k.double(), w), (q, k, w.double())):
        with pytest.raises(BackendUnavailable, match="precision='fp8'; cast them or use backend='triton'"):
            select_keys(*operands, stop, stop, 2, True, False, 2**20, "fp8")


def loose(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def shifted(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def halved(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 0)[::2]


@pytest.mark.parametrize("change", [loose, shifted, halved])
def test_operands_can_be_copied_16_bytes_at_a_time(change: Callable[[Tensor], Tensor]) -> None:
    from dsattn.backends.hopper.select import _copyable

    x = torch.randn(6, 3, 64).bfloat16()
    got = _copyable(change(x))
    assert got.equal(x)
    assert got.data_ptr() % 16 == 0
    assert got.stride(-1) == 1
    assert all(step % 16 == 0 for step in got.stride()[:-1])
    assert _copyable(x) is x


def test_far_heads_are_moved() -> None:
    """The kernel multiplies a head and its stride in int32."""
    from dsattn.backends.hopper.select import _copyable

    for apart, moved in ((2**29, False), (2**30, True)):
        q = torch.empty(4 * apart, dtype=torch.bfloat16, device="meta").as_strided((2, 3, 64), (64, apart, 1))
        assert (_copyable(q).stride() == (192, 64, 1)) is moved


@pytest.mark.parametrize(
    ("rows", "heads", "keys", "chunk", "programs"),
    [(4096, 32, 4096, 2048, 1024), (4096, 32, 2**17, 8192, 8192), (1, 8, 100, 512, 16), (17, 64, 5000, 512, 160)],
)
def test_chunks_fill_the_processors(
    launches: list, rows: int, heads: int, keys: int, chunk: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsattn.backends.hopper import select

    monkeypatch.setattr(select.portable, "processors", lambda device: 132)
    q, k = torch.zeros(1, 1, 64).bfloat16().expand(rows, heads, 64), torch.zeros(keys, 64).bfloat16()
    stop = torch.zeros(1, dtype=torch.int32).expand(rows)
    select._score(q, k, torch.zeros(1, 1).expand(rows, heads), stop, stop, True, torch.zeros(1, 1).expand(rows, 64))
    (launch,) = launches
    assert launch.grid == (programs,)
    assert launch.arguments[12] == chunk // 64


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0)])
def test_nothing_to_score(launches: list, rows: int, keys: int) -> None:
    from dsattn.backends.hopper.select import select_keys

    stop = torch.zeros(rows, dtype=torch.int32)
    q, k = torch.zeros(rows, 8, 64).bfloat16(), torch.zeros(keys, 64).bfloat16()
    index, length, score = select_keys(q, k, torch.zeros(rows, 8), stop, stop, 3, True, True, 2**20)
    assert (index.shape, length.shape, score.shape) == ((rows, 3), (rows,), (rows, 3))
    assert all(launch.kernel.__name__ == "_rank_kernel" for launch in launches)


def test_token_counts_do_not_compile_anew() -> None:
    from dsattn.backends.hopper.select import select_keys
    from dsattn.backends.triton.launch import recording

    with recording(start=False) as kept:
        for rows, keys in ((1, 1), (16, 32), (33, 9000), (128, 77)):
            q, k = torch.zeros(rows, 12, 64).bfloat16(), torch.zeros(keys, 64).bfloat16()
            w, stop = shifted(torch.zeros(rows, 12)), shifted(torch.zeros(rows, dtype=torch.int32))
            for block_bytes in (2**20, 2**30):
                select_keys(q, k, w, stop, stop, 16, True, True, block_bytes)
    assert {name: len(forms) for name, forms in kept.items()} == {"scores_kernel": 1, "_rank_kernel": 1}


# On a GPU


def operands(heads: int, width: int, rows: int, keys: int, device: str, *, whole: bool) -> tuple:
    """q, k, w and ranges of every length, none among them, from anywhere on; NaN in all that nobody reads."""
    torch.manual_seed(heads)
    q, k = torch.randn(rows, heads, width, device=device), torch.randn(keys, width, device=device)
    w = torch.randn(rows, heads, device=device)
    if whole:
        q, k, w = q.round(), k.round(), w.mul(3).round()
    start = torch.randint(3, keys // 3, (rows,), device=device, dtype=torch.int32)
    stop = start + torch.randint(0, keys // 2, (rows,), device=device, dtype=torch.int32)
    stop[::7] = start[::7]
    q[::7], w[::7], k[:3], k[int(stop.max()) :] = torch.nan, torch.nan, torch.nan, torch.nan
    return q.bfloat16(), k.bfloat16(), w, KeyRange(start, stop)


@pytest.mark.gpu
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("heads", "width", "precision"),
    [
        *[(32, 128, "bf16"), (64, 128, "bf16"), (12, 128, "bf16"), (8, 64, "bf16"), (33, 64, "bf16")],
        *[(64, 128, "fp8"), (12, 64, "fp8")],
    ],
)
@pytest.mark.parametrize(("rows", "keys"), [(130, 9000), (3, 100)])
def test_whole_numbers_give_the_selection_of_the_rule(
    hopper: str, heads: int, width: int, precision: Precision, rows: int, keys: int, relu: bool
) -> None:
    """Scores are exact, ties are many: there is one right answer."""
    case = operands(heads, width, rows, keys, hopper, whole=True)
    if precision == "fp8":  # 7 / 448 is a power of two, and E4M3 has every whole number up to 7
        case[0][..., 0] = 7 * torch.randn(rows, heads, device=hopper).sign()
        case[1][..., 0] = 7
    asked: dict[str, Any] = {"relu": relu, "return_scores": True, "precision": precision}
    got = select_keys(*case, 200, backend="hopper", **asked)
    for backend in ("triton", "reference"):
        want = select_keys(*case, 200, backend=backend, **asked)
        assert got.index.equal(want.index)
        assert got.length.equal(want.length)
        assert got.score.equal(want.score)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("heads", "width"), [(32, 128), (64, 128), (12, 64)])
def test_bits_follow_from_row_and_key_alone(hopper: str, heads: int, width: int, precision: Precision) -> None:
    """Other rows beside it, other blocks, keys at other places: the same bits; and they are near those in fp64.

    Scores are the kernel's own: in fp8 the operation gives those of the operands as they were.
    """
    from dsattn.backends.hopper.select import select_keys

    q, k, w, ranges = operands(heads, width, 300, 20000, hopper, whole=False)
    case, asked = (q, k, w, ranges.start, ranges.stop), (512, True, True)
    index, length, score = whole = select_keys(*case, *asked, 2**30, precision)
    for rows, block_bytes in ((slice(0, 300), 2**22), (slice(37, 138), 2**30), (slice(299, 300), 2**30)):
        got = select_keys(q[rows], k, *(x[rows] for x in case[2:]), *asked, block_bytes, precision)
        assert all(one.equal(its[rows]) for one, its in zip(got, whole, strict=True))
    moved = select_keys(q, torch.cat([k[:77], k]), w, ranges.start + 77, ranges.stop + 77, *asked, 2**30, precision)
    assert moved[0].equal(torch.where(index < 0, -1, index + 77))
    assert moved[2].equal(score)
    row, live = 3, index[3] >= 0
    assert live.sum() == length[row] > 0
    if precision == "fp8":
        q, k = (from_e4m3(*to_e4m3(x)) for x in (q, k))
    dot = (k[index[row, live].long()].double() @ q[row].double().T).relu() @ w[row].double()
    # The tensor cores add products of E4M3 in about 14 bits.
    near = {"rtol": 1e-4, "atol": 1e-2} if precision == "bf16" else {"rtol": 1e-3, "atol": 0.1}
    torch.testing.assert_close(score[row, live].double(), dot, **near)


@pytest.mark.gpu
def test_under_a_cuda_graph(hopper: str) -> None:
    case = operands(32, 128, 300, 9000, hopper, whole=False)
    expected = select_keys(*case, 100, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = select_keys(*case, 100, backend="hopper")
    graph.replay()
    assert got.index.equal(expected.index)
