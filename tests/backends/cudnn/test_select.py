"""cuDNN's scores, ranked by the rule, on stand-ins of each generation."""

import pytest
import torch

from dsattn import Layout
from dsattn.backends import Call
from dsattn.backends.cudnn import select
from dsattn.errors import BackendUnavailable
from dsattn.ops.first_use import compare
from dsattn.ops.select import select_reference

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=32, width=128, top_k=2048)
LAYOUTS = {
    "causal": Layout.causal(40),
    "packed": Layout.packed([7, 0, 1, 32]),
    "zigzag": Layout.packed([16, 8, 16], cp_size=2, cp_rank=1),
    "decoding": Layout.continuation(37, 3),
    "wide": Layout.packed([3, 2], total=40),
}


def operands(layout, heads, weight=torch.bfloat16):
    """Whole numbers, many of them equal; NaN in what no row reads."""
    keys, num_keys = layout.keys, max(layout.num_keys, 1)
    q = torch.randn(keys.num_rows, heads, 128).round().bfloat16()
    k = (torch.randn(num_keys, 128) / 4).round().bfloat16()
    w = torch.randn(keys.num_rows, heads).round().to(weight)
    q[keys.start >= keys.stop] = torch.nan
    k[~keys.mask(num_keys).any(0)] = torch.nan
    return q, k, w, keys.start, keys.stop


@pytest.mark.parametrize("generation", ["1.25.0", "1.26.0", "1.32.0", "1.33.0"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_selects_by_the_rule(generation, name, heads, install, no_sync):
    seen = install(generation)
    given = operands(LAYOUTS[name], heads)
    for rows in (40, 6):
        rest = (5, True, True, 4 * given[1].shape[0] * rows)
        with no_sync():
            got = select.select_keys(*given, *rest)
        exact = select_reference(*given, *rest)
        assert torch.equal(got[0], exact[0])
        assert torch.equal(got[1], exact[1])
        torch.testing.assert_close(got[2], exact[2])
    if generation == "1.33.0":
        assert not any(options["clean"] for _, options in seen.calls), "nobody reads what filling would write"


def test_first_use_check_passes_and_sees_an_offset_too_small(install, monkeypatch):
    install("1.32.0")
    q = torch.empty(2, 16, 128, dtype=torch.bfloat16)
    given = (q, q[:, 0], q[..., 0], torch.empty(2), torch.empty(2), 9, True, True, 2**20)
    assert all(
        one.error <= one.limit for one in compare("select_keys", select.select_keys, select_reference, None, given)
    )
    real = select.causal_scores
    monkeypatch.setattr(select, "causal_scores", lambda q, k, w, offset: real(q, k, w, offset // 2))
    found = compare("select_keys", select.select_keys, select_reference, None, given)
    assert any(one.error > one.limit for one in found)


def test_a_frontend_that_is_causal_from_the_top_left_and_cannot_be_told_is_refused(install, monkeypatch):
    seen = install("1.25.0")
    monkeypatch.setattr(select, "version_of", lambda name: (1, 28))
    with pytest.raises(BackendUnavailable, match="causal from the top left and takes no q_causal_offsets"):
        select.select_keys(*operands(LAYOUTS["causal"], 16), 5, True, False, 2**20)
    assert seen.calls == []


@pytest.mark.parametrize(("version", "filled"), [((1, 28), True), ((1, 29), False)])
def test_filling_is_left_out_from_1_29_on_where_it_can_be(version, filled, install, monkeypatch):
    seen = install("1.33.0")
    monkeypatch.setattr(select, "version_of", lambda name: version)
    select.select_keys(*operands(LAYOUTS["causal"], 16), 5, True, False, 2**20)
    assert [options["clean"] for _, options in seen.calls] == [filled]


@pytest.mark.parametrize(("generation", "served"), [("1.29.1", False), ("1.31.0", True)])
def test_weights_in_fp32_want_1_31(generation, served, install):
    install(generation)
    given = (*operands(LAYOUTS["causal"], 16, torch.float32), 5, True, False, 2**20)
    if served:
        assert torch.equal(select.select_keys(*given)[0], select_reference(*given)[0])
        return
    with pytest.raises(BackendUnavailable, match=r"before 1.31 wants w in bfloat16, got torch.float32"):
        select.select_keys(*given)


def test_scores_without_relu_are_refused(install):
    install("1.32.0")
    with pytest.raises(BackendUnavailable, match="cudnn's scores have a relu"):
        select.select_keys(*operands(LAYOUTS["causal"], 16), 5, False, False, 2**20)


@pytest.mark.parametrize("empty", ["rows", "keys"])
def test_nothing_to_select(empty, install):
    seen = install("1.32.0")
    q, k, w, start, stop = operands(LAYOUTS["causal"], 16)
    given = (q[:0], k, w[:0], start[:0], stop[:0]) if empty == "rows" else (q, k[:0], w, start, stop)
    index, length, score = select.select_keys(*given, 5, True, True, 2**20)
    assert index.shape == score.shape == (len(given[0]), 5)
    assert (index == -1).all()
    assert not length.any()
    assert (score == -torch.inf).all()
    assert seen.calls == []


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({}, []),
        ({"heads": 8}, ["16 or 32 or 64 indexer heads"]),
        ({"heads": 8, "capability": 100}, []),
        ({"width": 64}, ["an indexer width of 128"]),
        ({"capability": 80}, ["a Hopper or Blackwell data-centre GPU"]),
        ({"dtype": "float16"}, ["bfloat16 operands, not float16"]),
    ],
)
def test_requirements(change, needs, install):
    install("1.25.0")
    assert select.requirements(Call(**{**vars(CALL), **change})) == needs
