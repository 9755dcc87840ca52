"""The package's generations and its scratch."""

import gc
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsattn import backends
from dsattn.backends import Call, cudnn, settings
from dsattn.backends.cudnn import frontend

CALL = Call(device="cuda", capability=90, dtype="bfloat16")
SERVED = replace(CALL, heads=64, width=576, value_width=512, top_k=2048)
GENERATIONS = ["1.25.0", "1.26.0", "1.29.1", "1.31.0", "1.32.0", "1.33.0"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_generation_is_told_by_its_number_and_its_features_by_its_signatures(generation, install):
    install(generation)
    version = tuple(map(int, generation.split(".")))[:2]
    for least in ((1, 25), (1, 29), (1, 32)):
        met = frontend.needs_of(CALL, least)[f"nvidia-cudnn-frontend {least[0]}.{least[1]} or newer"]
        assert met == (version >= least)
    features = {
        ("indexer_forward", "q_causal_offsets"): (1, 26),
        ("indexer_forward", "clean_logits"): (1, 33),
        ("indexer_backward", "topk_indices_global"): (1, 26),
        ("indexer_top_k", "tie_break"): (1, 31),
        ("indexer_top_k", "deterministic"): (1, 32),
    }
    for (name, parameter), since in features.items():
        assert frontend.takes(frontend.entry(name), parameter) == (version >= since), (name, parameter)


@pytest.fixture
def collects(monkeypatch):
    """Install a generation; what its namespace is asked for, and collections among that, in order."""

    def watch(found):
        monkeypatch.setattr(gc, "collect", lambda: found.namespace.seen.append("collect"))
        return found.namespace.seen

    return watch


@pytest.mark.parametrize("generation", GENERATIONS)
def test_entry_points_are_found_once_with_one_collection(generation, install, collects):
    """All of them, whoever is asked for first, and the collection behind the last."""
    found = install(generation)
    seen = collects(found)
    first = frontend.entry("sparse_attention_backward")
    assert first is found.sparse_attention_backward_wrapper
    assert seen == [*frontend.ENTRIES, "collect"]
    for name in frontend.ENTRIES:
        assert frontend.entry(name) is getattr(found, f"{name}_wrapper")
    cudnn.prepare()
    assert seen == [*frontend.ENTRIES, "collect"]


def test_nothing_is_collected_while_a_graph_is_captured(install, collects, monkeypatch):
    seen = collects(install("1.32.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert frontend.entry("indexer_top_k")
    assert seen == list(frontend.ENTRIES)


@pytest.mark.parametrize("name", frontend.ENTRIES)
@pytest.mark.parametrize("error", [None, ImportError("needs cutlass"), RuntimeError("needs a driver")])
def test_an_entry_point_that_is_missing_leaves_the_others(name, error, install, collects):
    """It raises what the package says, each time, and costs the others nothing."""
    found = install("1.32.0")
    del found.namespace.functions[f"{name}_wrapper"]
    if error is not None:
        found.namespace.functions[f"{name}_wrapper"] = error
    seen = collects(found)
    for _ in range(2):
        with pytest.raises(AttributeError if error is None else type(error), match=f"{name}_wrapper|needs"):
            frontend.entry(name)
    for other in set(frontend.ENTRIES) - {name}:
        assert frontend.entry(other) is getattr(found, f"{other}_wrapper")
    assert seen == [*frontend.ENTRIES, "collect", name, name]


def test_every_entry_point_that_is_asked_for_is_listed():
    package = Path(frontend.__file__).parent
    sources = [*package.glob("*.py"), *(package.parents[1] / "bench").glob("*.py")]
    asked = {name for path in sources for name in re.findall(r'entry\("(\w+)"\)', path.read_text())}
    assert asked == set(frontend.ENTRIES)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    frontend.entries.cache_clear()
    with pytest.raises(ImportError):
        frontend.entry("indexer_forward")


@pytest.mark.parametrize(
    ("operation", "changes", "backend", "prepared"),
    [
        ("sparse_mla.backward", {}, "auto", True),  # by its record
        ("sparse_mla.backward", {"heads": 16}, "auto", False),
        ("sparse_mla.backward", {"heads": 16}, "cudnn", True),
        ("sparse_mla.backward", {"deterministic": True}, "auto", False),
        ("sparse_mla.forward", {}, "cudnn", False),  # which it has not
        ("select_topk", {"dtype": "float32"}, "auto", False),
        ("select_topk", {"dtype": "float32"}, "cudnn", True),
        ("sparse_mla.backward", {"device": "cpu", "capability": 0}, "auto", False),
    ],
)
def test_entry_points_are_found_before_training_where_they_will_serve(
    operation, changes, backend, prepared, install, collects
):
    pytest.importorskip("triton")
    seen = collects(install("1.32.0"))
    backends._choose.cache_clear()
    backends.prepare(operation, replace(SERVED, **changes), backend)
    assert seen == ([*frontend.ENTRIES, "collect"] if prepared else [])
    backends._choose.cache_clear()


@pytest.mark.parametrize(
    ("columns", "scratch", "rows"),
    [
        (131072, None, 2048),  # the settings' budget
        (131072, 2 * 2**30, 2048),
        (131072, 2**40, 8192),  # int32 offsets
        (8, 2**10, 16),
        (8, 2**10 - 1, 15),
        (6, 2**10, 20),  # 24 bytes a row: four rows are a multiple of 32
        (7, 2**10, 16),  # 28 bytes: eight
        (7, 1, 8),  # one group at least
        (2**31, 1, 1),
        (0, 64, 8),
    ],
)
def test_rows_of_a_launch(columns, scratch, rows):
    assert frontend.rows_per_launch(columns, scratch) == rows
    assert (rows * max(columns, 1) * 4) % 32 == 0


def test_scratch_is_what_settings_allow():
    for size, rows in ((2**20, 16384), (1, 1), (2**50, 2**27)):
        with settings(scratch_bytes=size):
            assert frontend.rows_per_launch(8) == rows


def test_slots_are_padded_and_left_alone():
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(frontend.padded_slots(x, 4, -1), torch.tensor([[0, 1, 2, -1], [3, 4, 5, -1.0]]))
    assert frontend.padded_slots(x, 3, 0).data_ptr() == x.data_ptr()
    assert frontend.padded_slots(x.t(), 2, 0).is_contiguous()
