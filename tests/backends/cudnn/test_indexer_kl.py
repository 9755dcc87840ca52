"""cuDNN's parts of the loss on stand-ins of each generation, each direction beside the reference's other."""

import functools

import pytest
import torch

from dsattn.backends import ALONE, Call, HeadRanks
from dsattn.backends.cudnn import indexer_kl
from dsattn.errors import BackendUnavailable
from dsattn.keys import KeyRange
from dsattn.ops.distill_reference import backward_reference, forward_reference
from dsattn.ops.first_use import compare

CALL = Call(device="cuda", capability=90, dtype="bfloat16", heads=32, width=128, top_k=2048)
BF16 = torch.bfloat16


def forward_given(heads, index_heads, slots, target=None):
    q_i, q = torch.empty(2, index_heads, 128, dtype=BF16), torch.empty(2, heads, 512, dtype=BF16)
    index = torch.empty(2, slots, dtype=torch.int32)
    keys = KeyRange(*torch.zeros(2, 2, dtype=torch.int32))
    lse, real = torch.empty(2, heads), torch.ones(2, dtype=torch.bool)
    rest = (index, index[:, 0], keys, real, torch.ones(()), 0.1, True, ALONE)
    return (q_i, q_i[:, 0], q_i[..., 0], q, q[:, 0], lse, *rest, target)


def backward_given(heads, index_heads, slots):
    given = forward_given(heads, index_heads, slots)
    saved = (torch.empty(2, 2), torch.empty(2), torch.empty(2, slots))
    return (torch.empty(2), *given[:10], *saved, 0.1, True, ALONE, False, None)


@pytest.mark.parametrize(("generation", "major"), [("1.25.0", 9), ("1.26.0", 9), ("1.32.0", 9), ("1.32.0", 10)])
@pytest.mark.parametrize(("heads", "index_heads", "slots"), [(5, 4, 20), (64, 32, 128), (72, 64, 9)])
@pytest.mark.parametrize("unwritten", [torch.nan, torch.inf, 3e38])
def test_forward_is_the_reference(generation, major, heads, index_heads, slots, unwritten, install, no_sync):
    seen = install(generation, major)
    seen.unwritten = unwritten

    def run(*case):
        with no_sync():
            return indexer_kl.indexer_kl_forward(*case)

    for finding in compare(
        "indexer_kl.forward", run, forward_reference, None, forward_given(heads, index_heads, slots)
    ):
        assert finding.error <= finding.limit, finding
    assert all(options["ids"] for _, options in seen.calls)


def test_a_target_that_is_there_is_not_made_again(install):
    seen = install("1.32.0")
    given = forward_given(64, 32, 24, target=torch.empty(2, 24))
    findings = compare("indexer_kl.forward", indexer_kl.indexer_kl_forward, forward_reference, None, given)
    assert all(one.error <= one.limit for one in findings), findings
    assert [name for name, _ in seen.calls] == ["sparse_indexer_score_recompute"]


@pytest.mark.parametrize(("generation", "major"), [("1.25.0", 9), ("1.26.0", 9), ("1.29.1", 9), ("1.32.0", 10)])
@pytest.mark.parametrize(("heads", "index_heads", "slots"), [(5, 4, 20), (64, 32, 128), (8, 64, 40)])
def test_backward_is_the_reference(generation, major, heads, index_heads, slots, install, no_sync):
    seen = install(generation, major)

    def run(*case):
        with no_sync():
            results = indexer_kl.indexer_kl_backward(*case)
        assert all(x.is_contiguous() for x in results), "as the operation's fake says"
        return results

    given = backward_given(heads, index_heads, slots)
    for finding in compare("indexer_kl.backward", run, backward_reference, forward_reference, given):
        assert finding.error <= finding.limit, finding
    for finding in compare("indexer_kl.backward", negated(run), negated(backward_reference), forward_reference, given):
        assert finding.error <= finding.limit, finding
    assert seen.calls[-1] == ("indexer_backward", {"heads": 64, "deterministic": False})


def negated(run):
    """A loss that is subtracted."""

    @functools.wraps(backward_reference)
    def call(row_scale, *rest):
        return run(-row_scale, *rest)

    return call


def test_determinism_is_handed_on_where_it_is(install):
    seen = install("1.32.0", major=10)
    given = (*backward_given(8, 32, 24)[:-2], True, None)
    findings = compare(
        "indexer_kl.backward", indexer_kl.indexer_kl_backward, backward_reference, forward_reference, given
    )
    assert all(one.error <= one.limit for one in findings)
    assert seen.calls[-1][1]["deterministic"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({12: False}, "cudnn's scores have a relu"),
        ({13: HeadRanks("ranks")}, "cannot add other ranks' heads"),
        ({2: torch.zeros(2, 32)}, "wants w in bfloat16, got torch.float32"),
        ({4: torch.zeros(2, 2, 512, dtype=BF16)}, r"target is of bf16 keys \[S, C\]"),
    ],
)
def test_refuses(change, why, install):
    install("1.32.0")
    given = [x.zero_() if isinstance(x, torch.Tensor) else x for x in forward_given(64, 32, 8)]
    with pytest.raises(BackendUnavailable, match=why):
        indexer_kl.indexer_kl_forward(*(change.get(i, x) for i, x in enumerate(given)))


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({}, []),
        ({"top_k": 0}, ["selected keys"]),
        ({"width": 64}, ["an indexer width of 128"]),
        ({"heads": 1}, ["2 to 64 indexer heads"]),
        ({"heads": 65}, ["2 to 64 indexer heads"]),
        ({"deterministic": True}, ["gradients that need not repeat, before Blackwell and 1.32"]),
        ({"deterministic": True, "capability": 100}, []),
    ],
)
def test_requirements(change, needs, install):
    install("1.32.0")
    assert indexer_kl.requirements(Call(**{**vars(CALL), **change})) == needs
