import dataclasses

import pytest

from dsattn import accounting
from dsattn.accounting.lengths import crossover, flops_per_token, variants
from dsattn.config import GQAConfig
from dsattn.errors import InputError
from dsattn.training.recipes import RECIPES

TINY = RECIPES["tiny"]().model


def test_variants_differ_in_who_selects_alone():
    glm = RECIPES["glm_5_2"]().model
    for config, selecting in ((TINY, (4, 4, 3)), (glm, (21, 78, 21))):
        dense, alone, shared = variants(config).values()
        assert (dense[1], alone[1], shared[1]) == ("dense", "sparse", "sparse")
        found = tuple(accounting.layer_roles(one).count("selects") for one, _ in (shared, alone, dense))
        assert found == (selecting[2], selecting[1], accounting.layer_roles(config).count("selects"))
        assert all(dataclasses.replace(one, dsa=config.dsa) == config for one, _ in (dense, alone, shared))


def test_a_tokens_cost_is_that_of_its_document():
    assert flops_per_token(TINY, "dense", 1000) == accounting.model_work(TINY, [1000], "dense").flops / 1000


@pytest.mark.parametrize("name", ["DSA", "DSA, shared selection"])
@pytest.mark.parametrize("recipe", ["tiny", "small", "glm_5_2"])
def test_the_crossover_is_where_the_costs_meet(recipe, name):
    found = variants(RECIPES[recipe]().model)
    length = crossover(found[name], found["dense"])
    assert length is not None
    assert flops_per_token(*found[name], length) < flops_per_token(*found["dense"], length)
    assert flops_per_token(*found[name], length - 1) >= flops_per_token(*found["dense"], length - 1)


def test_sharing_crosses_earlier():
    found = variants(TINY)
    alone, shared = (crossover(found[name], found["dense"]) for name in ("DSA", "DSA, shared selection"))
    assert shared < alone


def test_where_dense_attention_stays_cheaper_there_is_none():
    found = variants(TINY)
    assert crossover(found["dense"], found["dense"]) is None


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match="mode='warmup' reads every key"):
        variants(TINY, "warmup")
    dense = dataclasses.replace(
        TINY,
        attention=GQAConfig(heads=4, kv_heads=2, head_dim=16),
        layer_types=("dense",) * 4,
        dsa=dataclasses.replace(TINY.dsa, indexer=dataclasses.replace(TINY.dsa.indexer, query_from="hidden")),
    )
    with pytest.raises(InputError, match="no dsa layer"):
        variants(dense)
    with pytest.raises(InputError, match="length=0 must be at least 1"):
        flops_per_token(TINY, "dense", 0)
