"""cuDNN's top-k on stand-ins, against the ranking rule: ties, signed zeros, infinities, NaN, garbage behind rows."""

import pytest
import torch

from dsattn.backends import Call
from dsattn.backends.cudnn import frontend, select_topk
from dsattn.errors import BackendUnavailable
from dsattn.ops.first_use import compare
from dsattn.ops.select import topk_reference

CALL = Call(device="cuda", capability=90, dtype="float32", top_k=2048)
INF, NAN = torch.inf, torch.nan
ROWS = [
    ([1.0, 2, 2, 2, 0], 0, 5),  # ties go to the smaller key
    ([0.0, -0.0, 0, 0, 1], 0, 4),  # signed zeros are equal
    ([-0.0, -0.0, 0, -1, 0], 0, 5),
    ([-INF, 5, -INF, -INF, -INF], 0, 5),  # -inf is never selected
    ([INF, INF, 1, INF, INF], 0, 5),
    ([NAN, 1, 2, NAN, 0.5], 0, 5),  # NaN neither, and its slot goes to the next best
    ([NAN] * 5, 0, 5),
    ([9.0, 9, 1, 2, 9], 2, 4),  # a start and an end
    ([1.0, 2, 3, 4, 5], 3, 3),  # empty
    ([1.0, 2, 3, 4, 5], 4, 2),
    ([1.0, 2, 3, 4, 5], 0, 0),  # where the kernel writes nothing
    ([1.0, 2, 3, 4, 5], -3, 99),
    ([3e38, INF, NAN, -INF, 3e38], 1, 1),  # garbage all around nothing
]


@pytest.mark.parametrize("generation", ["1.31.0", "1.32.0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_ranks_by_the_rule(generation, dtype, top_k, install, no_sync, monkeypatch):
    seen = install(generation)
    scores = torch.tensor([row for row, _, _ in ROWS], dtype=dtype)
    start, stop = (torch.tensor([row[i] for row in ROWS], dtype=torch.int32) for i in (1, 2))
    before = scores.clone()
    exact = topk_reference(scores, start, stop, top_k)
    for rows in (99, 8):
        monkeypatch.setattr(frontend, "rows_per_launch", lambda columns, rows=rows: rows)
        with no_sync():
            got = select_topk.select_topk(scores, start, stop, top_k)
        assert torch.equal(got[0], exact[0])
        assert torch.equal(got[1], exact[1])
    assert torch.equal(scores.nan_to_num(7.0), before.nan_to_num(7.0)), "scores are the caller's"
    assert [options["rows"] for _, options in seen.calls] == [13, 8, 5]


def test_the_bare_kernel_does_not_keep_the_rule(install):
    """What the repair is for, and that these rows would see it missing."""
    install("1.32.0")
    scores = torch.tensor([row for row, _, _ in ROWS])
    stop = torch.full((len(ROWS),), 5, dtype=torch.int32)
    bare, _ = select_topk.bare_topk(scores, stop, 3, ascending=True)
    exact, _ = topk_reference(scores, torch.zeros_like(stop), stop, 3)
    assert [i for i in range(7) if not torch.equal(bare[i], exact[i])] == [1, 2, 3, 5, 6]


def test_first_use_check_passes(install):
    install("1.32.0")
    given = (torch.empty(3, 4), torch.empty(3), torch.empty(3), 33)
    assert all(one.error == 0 for one in compare("select_topk", select_topk.select_topk, topk_reference, None, given))


def test_strided_scores_and_nothing(install):
    install("1.32.0")
    scores, stop = torch.randn(6, 20)[:, ::2], torch.full((6,), 10, dtype=torch.int32)
    exact = topk_reference(scores, stop * 0, stop, 4)
    assert torch.equal(select_topk.select_topk(scores, stop * 0, stop, 4)[0], exact[0])
    for empty in (scores[:0], scores[:, :0]):
        rows = len(empty)
        index, length = select_topk.select_topk(empty, stop[:rows] * 0, stop[:rows], 4)
        assert (index == -1).all()
        assert index.shape == (rows, 4)
        assert not length.any()


def test_without_a_tie_rule_it_is_refused(install):
    install("1.29.1")
    assert select_topk.requirements(CALL) == ["nvidia-cudnn-frontend 1.31 or newer"]
    with pytest.raises(BackendUnavailable, match="cudnn ranks ties by no rule"):
        select_topk.bare_topk(torch.zeros(1, 4), torch.ones(1, dtype=torch.int32), 2)


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({}, []),
        ({"top_k": 2049}, ["top_k of at most 2048"]),
        ({"dtype": "float64"}, ["scores in float32, float16, bfloat16, not float64"]),
        ({"dtype": "bfloat16"}, []),
        ({"capability": 80}, ["a Hopper or Blackwell data-centre GPU"]),
    ],
)
def test_requirements(change, needs, install):
    install("1.31.0")
    assert select_topk.requirements(Call(**{**vars(CALL), **change})) == needs
