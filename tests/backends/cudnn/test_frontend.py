"""The package's generations and its scratch."""

import gc

import pytest
import torch

from dsattn.backends import Call, settings
from dsattn.backends.cudnn import frontend

CALL = Call(device="cuda", capability=90, dtype="bfloat16")


@pytest.mark.parametrize("generation", ["1.25.0", "1.26.0", "1.29.1", "1.31.0", "1.32.0", "1.33.0"])
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


def test_entry_points_are_found_once_with_one_collection(install, monkeypatch):
    install("1.32.0")
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    first = frontend.entry("indexer_forward")
    assert frontend.entry("indexer_forward") is first
    assert collected == [1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    frontend.entry("indexer_top_k")
    assert collected == [1], "never while a graph is captured"


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
