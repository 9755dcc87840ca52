"""DeepSelect on a stand-in made from its documents: any order, any tie, NaN marks, garbage in what is unwritten."""

import importlib.metadata
import sys
from types import ModuleType

import pytest
import torch

from dsattn.backends import Call, deep_select, settings, vendors
from dsattn.backends.deep_select import Widths
from dsattn.errors import BackendUnavailable
from dsattn.ops.first_use import compare
from dsattn.ops.select import topk_reference
from dsattn.testing import LAYOUTS

INF, NAN = torch.inf, torch.nan
CALL = Call(device="cuda", capability=100, dtype="float32", top_k=2048)
ALIGNED = 256


@pytest.fixture
def build(monkeypatch):
    """Made for anything. What it was given, as (rows, keys, row stride in bytes)."""
    seen = []

    def topk(input, topk, end, indices_type, abort_when_nan_found, return_value=True):
        rows, keys = input.shape
        assert input.dtype in (torch.float32, torch.bfloat16)
        assert input.stride(1) == 1
        assert input.stride(0) * input.element_size() % ALIGNED == 0
        assert topk <= min(keys, 4096)
        assert end.dtype == torch.int32
        assert end.is_contiguous()
        assert indices_type == torch.int32
        assert not abort_when_nan_found
        assert not input.isnan().any(), "a NaN leaves its row unwritten"
        seen.append((rows, keys, input.stride(0) * input.element_size()))
        column = torch.arange(keys)
        order = input.masked_fill(column >= end[:, None], -INF)
        best = order.flip(1).topk(topk, dim=1)  # the larger key first among equals
        filled = torch.arange(topk) < end[:, None]
        value = torch.where(filled, best.values, -INF).roll(1, 1)
        index = torch.where(filled, keys - 1 - best.indices, 2**31 - 1).int().roll(1, 1)
        return value, index

    module = ModuleType("deep_select")
    module.topk, module.get_stride_requirement = topk, lambda: (ALIGNED, 32)
    monkeypatch.setitem(sys.modules, "deep_select", module)
    anything = {"bfloat16": (Widths(1, 1, 2**31),), "float32": (Widths(1, 1, 2**31),)}
    monkeypatch.setattr(deep_select, "BUILDS", {"deep-select": anything})
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3, 9])
def test_ranks_by_the_rule(dtype, top_k, build):
    scores = torch.tensor(
        [
            [1.0, 2, 2, 2, 0],
            [0.0, -0.0, 0, 0, 1],
            [-INF, 5, -INF, -INF, -INF],
            [INF, INF, 1, INF, INF],
            [NAN, 1, 2, NAN, 0.5],
            [NAN] * 5,
            [9.0, 9, 1, 2, 9],
            [1.0, 2, 3, 4, 5],
            [1.0, 2, 3, 4, 5],
        ],
        dtype=dtype,
    )
    start = torch.tensor([0, 0, 0, 0, 0, 0, 2, 3, -4], dtype=torch.int32)
    stop = torch.tensor([5, 4, 5, 5, 5, 5, 4, 3, 99], dtype=torch.int32)
    for got, exact in zip(
        deep_select.select_topk(scores, start, stop, top_k), topk_reference(scores, start, stop, top_k), strict=True
    ):
        assert torch.equal(got, exact)
    assert build == [(9, 5, ALIGNED)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name, build, no_sync):
    layout = LAYOUTS[name]()
    keys = layout.keys
    scores = torch.randn(keys.num_rows, max(layout.num_keys, 1)).round()
    scores = scores.masked_fill(~keys.mask(scores.shape[1]), NAN)
    exact = topk_reference(scores, keys.start, keys.stop, 6)
    with no_sync():
        column = torch.arange(scores.shape[1])
        hidden = (column < keys.start[:, None]) | (column >= keys.stop[:, None])
        deep_select.aligned_rows(scores, hidden, ALIGNED)
    for rows in (2**20, 5):
        with settings(scratch_bytes=32 * scores.shape[1] * rows):
            found = deep_select.select_topk(scores, keys.start, keys.stop, 6)
        for got, right in zip(found, exact, strict=True):
            assert torch.equal(got, right)


def test_first_use_check_passes(build):
    given = (torch.empty(3, 4), torch.empty(3), torch.empty(3), 33)
    assert all(one.error == 0 for one in compare("select_topk", deep_select.select_topk, topk_reference, None, given))


def test_strided_scores_are_copied_once(build):
    scores = torch.randn(4, 130)[:, ::2]
    clean = deep_select.aligned_rows(scores, torch.zeros(4, 65, dtype=torch.bool), ALIGNED)
    assert clean.stride() == (128, 1)
    assert torch.equal(clean, scores)
    assert deep_select.aligned_rows(scores.bfloat16(), clean > 9, 8).stride() == (68, 1)


@pytest.mark.parametrize(
    ("rows", "keys", "served"),
    [(1, 99, False), (1, 100, True), (1, 200, True), (1, 201, False), (64, 10, True), (63, 10, False)],
)
def test_widths_are_data_and_both_edges_count(rows, keys, served, monkeypatch):
    few, many = Widths(1, 100, 200), Widths(64, 10, 200)
    monkeypatch.setattr(deep_select, "BUILDS", {"deep-select": {"float32": (many, few)}})
    if served:
        deep_select.check_width(torch.float32, rows, keys)
        return
    with pytest.raises(BackendUnavailable, match=rf"made for \d+ to 200 keys in float32, got {rows} rows of {keys}"):
        deep_select.check_width(torch.float32, rows, keys)


def test_published_builds(monkeypatch):
    with pytest.raises(BackendUnavailable, match="deep-select is made for 65536 to 262144 keys in float32"):
        deep_select.check_width(torch.float32, 8, 65535)
    deep_select.check_width(torch.bfloat16, 8, 1)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.0.post20260910")
    vendors.version_of.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="no such scores in float16"):
            deep_select.check_width(torch.float16, 8, 9)
    finally:
        vendors.version_of.cache_clear()


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({}, []),
        ({"dtype": "bfloat16"}, []),
        ({"capability": 103}, []),
        ({"capability": 90}, ["a Blackwell data-centre GPU"]),
        ({"top_k": 4096}, []),
        ({"top_k": 4097}, ["top_k of at most 4096"]),
        ({"dtype": "float16"}, ["scores in float32 or bfloat16, not float16"]),
    ],
)
def test_requirements(change, needs):
    assert deep_select.requirements(Call(**{**vars(CALL), **change})) == needs
