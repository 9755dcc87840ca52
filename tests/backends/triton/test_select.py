"""The kernels of selection keep the ranking rule and the bits of scores. Small blocks let few keys make long rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsattn.backends import Call
from dsattn.errors import BackendUnavailable
from dsattn.keys import KeyRange, Layout
from dsattn.testing import SCORES, Sizes, hostile_scores, make_case, naive_ranking, naive_scores, strided

select = pytest.importorskip("dsattn.backends.triton.select", exc_type=ImportError)

# The interpreter multiplies NaN and infinities in numpy, which tells; that results are right is asserted.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
INF, NAN = float("inf"), float("nan")
SERVED = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=128, top_k=2048)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_SAMPLE", 64)
    monkeypatch.setattr(select, "_BLOCK", 128)


def ranges(*pairs: tuple[int, int], device: str) -> KeyRange:
    start, stop = torch.tensor(pairs, dtype=torch.int32).t().contiguous().to(device)
    return KeyRange(start, stop)


def topk(scores: Tensor, keys: KeyRange, top_k: int) -> tuple[list[list[int]], list[int]]:
    index, length = select.select_topk(scores, keys.start, keys.stop, top_k)
    assert index.dtype == length.dtype == torch.int32
    return index.tolist(), length.tolist()


def pick(case, keys: KeyRange | None = None, *, top_k: int = 7, relu: bool = True, block_bytes: int = 2**30):
    keys = keys or case.keys
    return select.select_keys(case.q_i, case.k_i, case.w, keys.start, keys.stop, top_k, relu, True, block_bytes)


@pytest.mark.parametrize("name", SCORES)
def test_topk_against_sorted_python_numbers(name: str, device: str) -> None:
    """Ranges below and above CAPACITY (256 at most here), beside the matrix, and empty."""
    keys = ranges((3, 599), (-5, 66), (20, 20), (590, 999), device=device)
    scores = hostile_scores(name, 4, 600)
    for top_k in (1, 60):
        expected = naive_ranking(scores, keys.to("cpu"), top_k)
        assert topk(scores.to(device), keys, top_k) == expected


def _spikes(sign: float) -> Tensor:
    """What a sample of every eighth sector alone sees, or never."""
    return sign * (torch.arange(1200) % 64 < 8).float() * 100 + torch.rand(1200)


@pytest.mark.parametrize(
    "row",
    [
        torch.arange(1200.0),
        _spikes(1),
        _spikes(-1),
        torch.where(torch.arange(1200) % 47 == 0, 1.0, NAN),
        torch.where(torch.arange(1200) % 2 == 0, torch.arange(1200.0), -INF),
        torch.where(torch.arange(1200) < 1100, 2.0, torch.arange(1200.0)),
    ],
    ids=["ascending", "sampled peaks", "missed peaks", "few valid", "half valid", "ties at the cut-off"],
)
def test_topk_where_the_sample_misleads(row: Tensor, device: str) -> None:
    keys = ranges((0, 1200), device=device)
    for top_k in (5, 64):
        assert topk(row[None].to(device), keys, top_k) == naive_ranking(row[None], keys.to("cpu"), top_k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_topk_dtypes_and_strides(dtype: torch.dtype, device: str) -> None:
    scores = hostile_scores("relu_plateau", 6, 20).to(dtype)
    keys = ranges((0, 20), (1, 9), (0, 0), (4, 20), (19, 20), (0, 19), device=device)
    expected = naive_ranking(scores, keys.to("cpu"), 6)
    assert topk(strided(scores.to(device)), keys, 6) == expected


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_without_rows_or_keys(shape: tuple[int, int], device: str) -> None:
    rows, columns = shape
    keys = KeyRange(*torch.tensor([[0], [3]], dtype=torch.int32, device=device).expand(2, rows).contiguous())
    assert topk(torch.zeros(shape, device=device), keys, 3) == ([[-1] * 3] * rows, [0] * rows)
    q, k, w = (torch.zeros(size, device=device) for size in ((rows, 2, 4), (columns, 4), (rows, 2)))
    index, length, score = select.select_keys(q, k, w, keys.start, keys.stop, 3, True, True, 1)
    assert index.tolist() == [[-1] * 3] * rows
    assert length.tolist() == [0] * rows
    assert score.tolist() == [[-INF] * 3] * rows


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("layout", "heads", "width"),
    [("left_padded", 3, 8), ("decode", 64, 33), ("only_padding", 5, 32)],
)
def test_keys_against_sorted_python_numbers(layout: str, heads: int, width: int, relu: bool, device: str) -> None:
    """Whole numbers: fp32 scores are exact, and ties are many."""
    case = make_case(layout, Sizes(index_heads=heads, index_width=width), device=device).map(lambda x: x.round())
    index, length, score = pick(case, relu=relu)
    scores = naive_scores(case.q_i, case.k_i, case.w, case.keys, relu=relu)
    assert (index.tolist(), length.tolist()) == naive_ranking(scores.cpu(), case.keys.to("cpu"), 7)
    kept = index >= 0
    assert score[kept].equal(scores.gather(1, index.clamp(min=0).long())[kept])
    assert (score[~kept] == -INF).all()


def _same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(a.equal(b) for a, b in zip(got, expected, strict=True))


def test_bits_do_not_depend_on_blocks_or_company(device: str) -> None:
    rows = 9 if device == "cpu" else 23
    alone = make_case(Layout.causal(rows), device=device)
    if device == "cpu":  # the interpreter's products are numpy's, whose bits follow the place: make them exact
        alone = alone.map(lambda x: x.round())
    index, length, score = pick(alone)
    offset = 70
    together = make_case(Layout.packed([offset, rows, 4], total=offset + rows + 7), seed=1, device=device)
    here = slice(offset, offset + rows)
    for name in ("q_i", "k_i", "w"):
        getattr(together, name).fill_(NAN)[here] = getattr(alone, name)
    for block_bytes in (1, 2**12, 2**30):
        keys = KeyRange(together.keys.start[here], together.keys.stop[here])
        got = select.select_keys(
            together.q_i[here], together.k_i, together.w[here], keys.start, keys.stop, 7, True, True, block_bytes
        )
        assert _same(got, (torch.where(index < 0, -1, index + offset), length, score))
    assert pick(together)[1][:offset].eq(0).all()


def test_strides_and_odd_operands(device: str) -> None:
    case = make_case(Layout.causal(9), device=device)
    assert _same(pick(case.map(strided)), pick(case))
    case.q_i[3], case.k_i[2], case.w[5] = NAN, NAN, -INF
    index, length, _ = pick(case)
    assert length[3] == 0
    assert not (index == 2).any()
    assert length[8] == 7


def test_heads_more_than_int32_apart(device: str, tmp_path: Path) -> None:
    """A turned q of many rows, in a file of holes: what lies 2^32 elements below head 2 is no operand."""
    apart, case = 2**30, make_case(Layout.causal(9), device=device).map(lambda x: x.round())
    memory = torch.from_file(str(tmp_path / "q"), shared=True, size=5 * apart, dtype=torch.float32)
    q = memory.as_strided(case.q_i.shape, (case.q_i.shape[2], apart, 1), 2 * apart).copy_(case.q_i)
    assert _same(pick(replace(case, q_i=q)), pick(case))


def test_infinite_keys_with_padded_heads(device: str) -> None:
    q, k = torch.ones(6, 1, 1, device=device), torch.tensor([1.0, INF, 2.0, -INF, INF, 3.0], device=device)[:, None]
    keys = Layout.causal(6).keys.to(device)
    for relu, top_k, expected in ((True, 3, [1, 4, 5]), (False, 5, [0, 1, 2, 4, 5]), (True, 6, [0, 1, 2, 3, 4, 5])):
        index = select.select_keys(q, k, q[..., 0], keys.start, keys.stop, top_k, relu, False, 2**30)[0]
        assert index[5].tolist() == expected


def test_fp64_beside_a_narrow_q_is_refused(device: str) -> None:
    case = make_case(Layout.causal(4), device=device)
    wide = case.map(lambda x: x.double() if x is case.w else x)
    with pytest.raises(BackendUnavailable, match="fp64 operands need backend='reference'"):
        pick(wide)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [(64, 128), (32, 64), (3, 33)])
def test_half_precision_on_a_gpu(dtype: torch.dtype, heads: int, width: int) -> None:
    """The interpreter cannot multiply bf16."""
    case = make_case(
        Layout.packed([3, 0, 500]), Sizes(index_heads=heads, index_width=width), dtype=dtype, device="cuda"
    )
    index, length, score = pick(case, top_k=40)
    exact = naive_scores(*(x.double() for x in (case.q_i, case.k_i, case.w)), case.keys)
    kept = index >= 0
    error = (score - exact.gather(1, index.clamp(min=0).long())).abs()[kept].max()
    assert error < 1e-5 * exact[exact > -INF].abs().max()
    here = slice(3, 503)
    alone = select.select_keys(
        case.q_i[here],
        case.k_i[here],
        case.w[here],
        case.keys.start[here] - 3,
        case.keys.stop[here] - 3,
        40,
        *(True, True, 1),
    )
    assert _same((torch.where(alone[0] < 0, -1, alone[0] + 3), *alone[1:]), (index[here], length[here], score[here]))


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({}, None),
        ({"dtype": "float64"}, "bfloat16, float16 or float32 operands"),
        ({"device": "cpu", "capability": 0}, "a CUDA GPU of compute capability 8.0 or above"),
        ({"heads": 65}, "at most 64 indexer heads"),
        ({"width": 129}, "an indexer width of at most 128"),
        ({"top_k": 4097}, "top_k of at most 4096"),
    ],
)
def test_requirements(change: dict, lacks: str | None) -> None:
    call = Call(**{**SERVED.__dict__, **change})
    assert select.requirements(call) == ([lacks] if lacks else [])


@pytest.mark.parametrize("block_bytes", [1, 2**20, 2**27, 2**30])
def test_blocks_of_rows_fit(block_bytes: int) -> None:
    rows, keys, top_k = 4096, 2**17, 2048
    step = select._rows_of_block(rows, keys, top_k, block_bytes, torch.device("cpu"))
    beside = 8 * select._capacity(top_k) * min(step, select._programs(torch.device("cpu")))
    assert step == 1 or step * 4 * keys + beside <= block_bytes


def test_in_the_interpreter(interpret: Callable[[str], int]) -> None:
    assert interpret(__file__) > 30
