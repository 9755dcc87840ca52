import pytest

from dsattn.accounting.lengths import crossover, variants
from dsattn.cli.lengths import LENGTHS, cost_table, costs, picture
from dsattn.training.recipes import RECIPES

SMALL = RECIPES["small"]().model


@pytest.fixture(scope="module")
def found() -> dict:
    return costs(SMALL, "sparse")


def test_costs_are_those_of_accounting(found):
    assert found["lengths"] == list(LENGTHS)
    compared = variants(SMALL)
    assert found["crossover"] == {
        name: crossover(compared[name], compared["dense"]) for name in ("DSA", "DSA, shared selection")
    }
    assert all(len(line) == len(LENGTHS) for line in found["flops_per_token"].values())


def test_the_table_says_where_dense_attention_is_overtaken(found):
    text = cost_table(found)
    assert text.count("\n") == len(LENGTHS) + 2
    assert f"DSA: fewer FLOPs than dense from {found['crossover']['DSA']:,} tokens on" in text
    never = {**found, "crossover": {"DSA": None}}
    assert cost_table(never).endswith("DSA: dense attention stays cheaper")


def test_the_picture_shows_three_lines_and_the_crossovers(found):
    pytest.importorskip("matplotlib")
    drawn = picture("small", found)
    assert drawn.svg.startswith(b"<?xml")
    assert f"DSA from {found['crossover']['DSA']:,} tokens" in drawn.alt
    never = picture("small", {**found, "crossover": {"DSA": None}})
    assert never.alt.endswith("Cheaper than dense: nowhere.")
    assert len(never.svg) < len(drawn.svg)
