"""Small cases have the geometry of the call, hostile rows, and poison wherever nobody may read."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsattn.backends import ALONE, HeadRanks
from dsattn.keys import KeyRange, Layout
from dsattn.ops import indexer_scores, select_topk
from dsattn.ops.first_use_cases import geometry, names_of, small_case
from dsattn.selection import Inverse, invert
from dsattn.testing import Sizes, make_case, random_selection


def reference_of(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"dsattn.ops.{module}"), name)


SPARSE, SPARSE_BACK = reference_of("sparse_mla", "forward_reference"), reference_of("sparse_mla", "backward_reference")
LOW_PRECISION = reference_of("select", "low_precision_reference")
SELECT, TOPK = reference_of("select", "select_reference"), reference_of("select", "topk_reference")
DENSE = reference_of("ranged", "forward_reference")
LOSS = reference_of("distill_reference", "forward_reference")
FUSED = reference_of("dsa", "shares_reference")


def arguments(reference: Callable[..., Any], lengths: list[int], sizes: Sizes | None = None, **changes: Any) -> tuple:
    """What a call over these documents hands to the reference."""
    case = make_case(Layout.packed(lengths), sizes or Sizes())
    selection = random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)
    names = ("q", "kv", "k", "v", "q_i", "k_i", "w", "sink", "grad_out", "keys", "scale")
    known = {name: getattr(case, name) for name in names} | {
        "index": selection.index,
        "length": selection.length,
        "start": case.keys.start,
        "stop": case.keys.stop,
        "real": case.layout.real_rows,
        "scores": torch.zeros(sum(lengths), 50),
        "out": torch.zeros_like(case.grad_out),
        "lse": torch.zeros(case.q.shape[:2]),
        "divisor": torch.tensor(1.0),
        "target": None,
        "value_dim": case.sizes.value_dim,
        "top_k": case.sizes.top_k,
        "relu": True,
        "return_scores": False,
        "precision": "fp8",
        "block_bytes": 2**30,
        "ranks": ALONE,
        "deterministic": False,
        "inverse": None,
    }
    if reference in (SELECT, LOW_PRECISION):
        known |= {"q": case.q_i, "k": case.k_i}
    known |= changes
    return tuple(known[name] for name in names_of(reference))


ALL = [SPARSE, SPARSE_BACK, SELECT, LOW_PRECISION, TOPK, DENSE, LOSS, FUSED]


@pytest.mark.parametrize("reference", ALL)
def test_geometry_does_not_depend_on_tokens(reference: Callable[..., Any]) -> None:
    names = names_of(reference)
    few, many = (arguments(reference, lengths) for lengths in ([5, 1], [0, 40, 23]))
    assert geometry(names, few) == geometry(names, many)
    hash(geometry(names, few))


@pytest.mark.parametrize(
    ("reference", "changes"),
    [
        (SPARSE, {"value_dim": 8}),
        (SPARSE, {"sink": None}),
        (SPARSE, {"kv": torch.zeros(6, 24, dtype=torch.bfloat16)}),
        (SPARSE, {"index": torch.zeros(6, 8, dtype=torch.int32)}),
        (SPARSE_BACK, {"deterministic": True}),
        (SPARSE_BACK, {"inverse": Inverse(torch.zeros(42), torch.zeros(7))}),
        (SELECT, {"relu": False}),
        (SELECT, {"top_k": 8}),
        (LOW_PRECISION, {"precision": "mxfp8"}),
        (TOPK, {"scores": torch.zeros(6, 50, dtype=torch.bfloat16)}),
        (LOSS, {"index": None, "length": None}),
        (LOSS, {"target": torch.zeros(6, 7)}),
        (LOSS, {"ranks": HeadRanks("heads", 2, 1)}),
    ],
)
def test_geometry_depends_on_all_else(reference: Callable[..., Any], changes: dict[str, Any]) -> None:
    names = names_of(reference)
    plain, changed = arguments(reference, [5, 1]), arguments(reference, [5, 1], **changes)
    assert geometry(names, plain) != geometry(names, changed)


@pytest.mark.parametrize("reference", ALL)
def test_a_case_has_the_geometry_of_its_call(reference: Callable[..., Any]) -> None:
    given = arguments(reference, [5, 1])
    forward = SPARSE if reference is SPARSE_BACK else None
    case = small_case(reference, forward, given)
    assert tuple(case) == names_of(reference)
    assert geometry(names_of(reference), tuple(case.values())) == geometry(names_of(reference), given)


@pytest.mark.parametrize("top_k", [1, 2, 7, 2048])
def test_gathered_rows_are_long_short_and_empty(top_k: int) -> None:
    case = small_case(SPARSE, None, arguments(SPARSE, [5, 1], Sizes(top_k=top_k)))
    index, length, keys = case["index"], case["length"], len(case["kv"])
    assert index.dtype == length.dtype == torch.int32
    assert {0, 1, top_k} <= set(length.tolist())
    assert keys > top_k
    for row, count in zip(index.tolist(), length.tolist(), strict=True):
        assert row[:count] == sorted(set(row[:count]))
        assert row[count:] == [-1] * (top_k - count)
        assert not {0, *range(keys - 13, keys)} & set(row)
    assert case["kv"].isnan().all(1).nonzero()[:, 0].tolist() == [0, *range(keys - 13, keys)]
    assert case["q"].isnan().flatten(1).all(1).equal(length == 0)


def test_an_inverse_is_that_of_the_case() -> None:
    given = arguments(SPARSE_BACK, [5, 1], inverse=Inverse(torch.zeros(42), torch.zeros(7)))
    case = small_case(SPARSE_BACK, SPARSE, given)
    expected = invert(case["index"], case["length"], len(case["kv"]))
    assert all(got.equal(one) for got, one in zip(case["inverse"], expected, strict=True))


def test_selections_meet_more_keys_than_they_keep_and_ties() -> None:
    case = small_case(SELECT, None, arguments(SELECT, [5, 1]))
    lengths = (case["stop"] - case["start"]).tolist()
    assert {0, 1, 6, 7} <= set(lengths)
    assert max(lengths) > 50
    assert case["k"].nan_to_num().frac().eq(0).all()
    score = SELECT(*(x for x in {**case, "return_scores": True}.values()))[2]
    assert len(score[0].unique()) < 7


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_low_precision_rounds_nothing(precision: str) -> None:
    """Sums in any order are exact then, and the selection is one."""
    given = arguments(LOW_PRECISION, [5, 1], Sizes(index_heads=4, index_width=32), precision=precision)
    made = small_case(LOW_PRECISION, None, given)
    assert made["k"].nan_to_num().abs().amax(1).unique().tolist() == [0, 1.75, 3.5, 7]
    keys = KeyRange(made["start"], made["stop"])
    exact = indexer_scores(made["q"].double(), made["k"].double(), made["w"].double(), keys)
    want = select_topk(exact, keys, made["top_k"])
    assert LOW_PRECISION(*made.values())[0].equal(want.index)


def test_ranges_are_those_of_documents() -> None:
    case = small_case(DENSE, None, arguments(DENSE, [5, 1], k=torch.zeros(6, 2, 24), v=torch.zeros(6, 2, 16)))
    keys: KeyRange = case["keys"]
    lengths = keys.lengths()
    assert lengths.eq(0).any()
    assert lengths.max() > 32
    assert len(keys.start.unique()) == 4
    unread = ~keys.mask(len(case["k"])).any(0)
    assert unread[0]
    assert unread[-13:].all()
    assert case["k"].isnan().flatten(1).all(1)[unread].sum() >= 14
    assert not case["k"].isnan().flatten(1).any(1)[~unread].any()


def test_the_loss_meets_the_lse_of_its_attention() -> None:
    case = small_case(LOSS, None, arguments(LOSS, [5, 1]))
    mass = LOSS(*case.values())[2]
    live = case["real"]
    assert not live.all()
    assert mass[live].sub(case["q"].shape[1]).abs().max() < 1e-4  # every head's probabilities add to one


@pytest.mark.parametrize("index", [None, torch.zeros(6, 7, dtype=torch.int32)], ids=["warmup", "sparse"])
def test_rows_that_ranks_share_out(index: torch.Tensor | None) -> None:
    """As many for each, for as many ranks as there are, and no rank is asked: the parts make the whole loss."""
    changes = {"index": index, "length": None if index is None else index[:, 0]}
    given = arguments(LOSS, [5, 1], **changes, ranks=HeadRanks("heads", 3, 1))
    case = small_case(LOSS, None, given)
    assert (case["ranks"].group, case["ranks"].shards) == ("", 3)
    assert 3 * len(case["q_i"]) == 3 * len(case["w"]) == len(case["q"]) == len(case["real"]) == len(case["lse"])
    found = LOSS(*case.values())
    kept = case["real"][2::3]
    assert found[2][kept].sub(case["q"].shape[1]).abs().max() < 1e-4
    assert found[2].shape == kept.shape


def test_numbers_are_always_the_same() -> None:
    first, again = (small_case(SPARSE, None, arguments(SPARSE, [5, 1]))["kv"] for _ in range(2))
    assert first.nan_to_num().equal(again.nan_to_num())


def test_a_target_that_is_given_is_a_sum_of_probabilities() -> None:
    """Zeros in empty slots, NaN in rows that do not count; and the loss does without lse."""
    case = small_case(LOSS, None, arguments(LOSS, [5, 1], target=torch.zeros(6, 7)))
    target, live = case["target"], case["real"]
    assert (target[live] >= 0).all()
    assert (target[live] > 0).equal(case["index"][live] >= 0)
    assert target[~live].isnan().all()
    case["lse"] = case["lse"] * torch.nan
    assert all(one[live].isfinite().all() for one in LOSS(*case.values())[2:])
