"""What vendors' packages share. Preference is data that cites records: here the data is laid beside the records."""

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsattn import Layout
from dsattn.backends import TABLE, Call, deep_select, flash_mla, size_class, vendors
from dsattn.backends.cudnn import frontend
from dsattn.backends.vendors import DISTRIBUTIONS, FASTER, Faster, lacks_record, recorded
from dsattn.ops.select import topk_reference

RECORDS = [
    json.loads(line) for line in (Path(__file__).parents[2] / "results" / "kernels.jsonl").read_text().splitlines()
]
ONE = FASTER[1]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Every distribution, at version 9.9."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.0")
    vendors.version_of.cache_clear()
    yield
    vendors.version_of.cache_clear()


def call_of(record: dict) -> Call:
    shape = record["shape"]
    sizes = {"heads": shape["H"], "width": shape["C"], "value_width": shape["V"], "top_k": shape["K"]}
    return Call(
        device="cuda",
        capability={"NVIDIA H200": 90}[record["gpu"]],
        dtype="bfloat16",
        size_class=size_class(shape["S"]),
        deterministic=record["deterministic"],
        **sizes,
    )


def records_of(one: Faster) -> list[dict]:
    """The newest of every size and determinism: ascending keys, as selections have them, with row lengths."""
    newest = {}
    for record in RECORDS:
        shape = record["shape"]
        if (record["op"], record["backend"]) != (one.operation, one.over) or one.backend not in record["ratio"]:
            continue
        if (shape["order"], shape["lengths"], shape["H"]) == ("ascending", True, one.heads):
            newest[shape["S"], record["deterministic"]] = record
    return list(newest.values())


@pytest.mark.parametrize("one", FASTER, ids=lambda one: f"{one.backend}-{one.heads}")
def test_auto_prefers_a_vendor_where_a_record_says_so_and_nowhere_else(one):
    records = records_of(one)
    assert len(records) >= 3
    for record in records:
        call, ratio = call_of(record), record["ratio"][one.backend]
        asked = one.deterministic in (None, call.deterministic)
        assert (one.lacks(call) == []) == (ratio < 1 and asked), (call, ratio)
        if ratio < 1 and asked:
            assert one.ratio[call.size_class] == pytest.approx(ratio, abs=0.006)
            found = tuple(map(int, record["versions"][one.distribution].split(".")))
            assert found >= one.version
    assert {size_class(r["shape"]["S"]) for r in records} >= one.ratio.keys(), "every ratio has a record"


@pytest.mark.parametrize("one", FASTER, ids=lambda one: f"{one.backend}-{one.heads}")
def test_such_a_row_stands_before_ours(one):
    names = [row.name for row in TABLE[one.operation]]
    assert names.index(one.backend) == names.index(one.over) - 1


def test_every_vendor_is_for_auto_by_record_or_behind_ours_or_by_name():
    for operation, rows in TABLE.items():
        names = [row.name for row in rows]
        for row in rows:
            if row.name in ("flash_mla", "cudnn", "deep_gemm", "deep_select", "tilelang"):
                recorded = any((one.operation, one.backend) == (operation, row.name) for one in FASTER)
                behind = names.index(row.name) > names.index("triton")
                assert recorded != (behind or bool(row.by_name)), (operation, row.name)


def test_adapters_know_the_distributions_that_doctor_names():
    for adapter, name in ((flash_mla, "flash_mla"), (deep_select, "deep_select")):
        assert adapter.BUILDS.keys() == set(DISTRIBUTIONS[name])
    assert DISTRIBUTIONS["cudnn"] == (frontend.DISTRIBUTION,)
    assert {one.distribution for one in FASTER} <= {build for builds in DISTRIBUTIONS.values() for build in builds}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"heads": 128}, "heads 64"),
        ({"width": 512}, "width 576"),
        ({"top_k": 1024}, "top_k 2048"),
        ({"capability": 100}, "capability 90"),
        ({"dtype": "float32"}, "dtype bfloat16"),
        ({"deterministic": True}, "deterministic False"),
        ({"size_class": "64K"}, None),
        ({"size_class": "above"}, "keys of 8K or 64K"),
        ({"heads": 32, "top_k": 7}, "heads 64, top_k 2048"),
    ],
)
def test_records_speak_for_their_calls_alone(change, why):
    call = replace(call_of(records_of(ONE)[0]), **change)
    wanted = [] if why is None else [f"a record in which it is faster (there is one for {why})"]
    assert ONE.lacks(call) == wanted
    served = not wanted or change == {"heads": 128}  # that has a record of its own
    assert (lacks_record(ONE.operation, ONE.backend)(call) == []) == served
    told = recorded(ONE.operation, ONE.backend)(call)
    assert bool(told) == served
    if wanted == []:
        assert told == f"recorded at {ONE.ratio[call.size_class]:.2f} x the time of hopper"


def test_an_older_package_is_not_that_of_the_record(monkeypatch):
    call = call_of(records_of(ONE)[0])
    for version, right in (("1.31.0", False), ("1.32.0", True), ("1.32", True), ("1.4", False), ("dev", False)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        vendors.version_of.cache_clear()
        wanted = [] if right else ["nvidia-cudnn-frontend 1.32 or newer, which the record is of"]
        assert ONE.lacks(call) == wanted
    assert lacks_record("select_keys", "nobody")(call) == ["a record"]


def test_versions(monkeypatch):
    def version(name):
        if name == "absent":
            raise importlib.metadata.PackageNotFoundError
        return name

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = [vendors.version_of(name) for name in ("1.0.0.post20260924", "1.32", "absent", "odd")]
    assert found == [(1, 0, 0), (1, 32), (), ()]
    assert vendors.dotted((1, 32)) == "1.32"
    assert vendors.is_installed("torch", "pytest")
    assert not vendors.is_installed("torch", "no_such_package")


@pytest.mark.parametrize(("scale", "sign"), [(2.0, 1), (-2.0, -1), (0.0, 0)])
def test_scales_above_zero_give_the_same_logits(scale, sign):
    q = torch.tensor([1.0, -3.0])
    turned, positive, found = vendors.positive_scale(q, scale)
    assert positive > 0
    assert found == sign
    assert torch.equal(turned * positive, q * scale)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_selection_from_a_vendors_scores(rows, no_sync):
    keys = Layout.packed([9, 0, 31]).keys
    scores = torch.randn(40, 40).round()
    exact = topk_reference(scores, keys.start, keys.stop, 5)
    garbage = scores.masked_fill(~keys.mask(40), torch.nan)
    with no_sync():
        got = vendors.select_in_blocks(lambda part: garbage[part], keys.start, keys.stop, 5, rows)
    for mine, right in zip(got, exact, strict=True):
        assert torch.equal(mine, right)
