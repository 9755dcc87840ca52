"""By hand; `test_memory.py` measures."""

import pytest

from dsattn import accounting
from dsattn.accounting.kept import Kept, norm_bytes
from dsattn.accounting.model import Layer
from dsattn.training.recipes import RECIPES

TINY = RECIPES["tiny"]().model


def test_the_policies_by_hand():
    """M 128, query latent 64, C 64, K 64 of TINY, in fp32 arithmetic."""
    full = accounting.layer_memory(TINY, "selects", "sparse", recompute="full")
    assert full == {"residual stream": 4 * 128, "selection": 4 * 64 + 4, "indexer loss": 4 * 64 + 4 * 3}
    some = accounting.layer_memory(TINY, "selects", "sparse", recompute="selective")
    assert some == {**full, "residual stream": 2 * 4 * 128, "attention projections": 4 * (64 + 64)}
    frozen = accounting.layer_memory(TINY, "selects", "frozen", recompute="full")
    assert frozen == {"residual stream": 4 * 128, "selection": 4 * 64 + 4}
    assert accounting.layer_memory(TINY, "shares", "sparse", recompute="full") == {"residual stream": 4 * 128}
    assert accounting.layer_memory(TINY, "selects", "warmup", recompute="full") == {
        "residual stream": 4 * 128,
        "indexer loss": 4 * 3,
    }
    assert accounting.layer_memory(TINY, "shares", "warmup", recompute="full") == {}, "nothing goes back through it"


def test_a_stricter_policy_keeps_less():
    for role in ("selects", "shares", "dense"):
        for mode in ("dense", "sparse", "frozen"):
            full, selective, none = (
                sum(accounting.layer_memory(TINY, role, mode, recompute=policy).values())
                for policy in ("full", "selective", "none")
            )
            assert full < selective < none


@pytest.mark.parametrize(("fused", "expected"), [(True, 4 * 8 + 4), (False, 4 * 8 + 4 + 4 * 8)])
def test_a_norm_keeps_its_input_and_a_number(fused, expected):
    assert norm_bytes(8, fused) == expected
    assert norm_bytes(8, fused, read=5) == expected - 4 * 3


def test_an_indexer_hands_on_its_queries_keys_and_weights():
    """H_I 4, D 32."""
    kept = Kept(TINY, Layer("selects"), "sparse", 2, 4, True)
    assert kept.index() == 2 * (4 * 32 + 32 + 4)
    assert kept.loss_found() == 4 * 3 + 4 * 64
