import dataclasses
import re

import pytest

from dsattn import accounting
from dsattn.cli import ranks
from dsattn.config import GQAConfig, KDAConfig, MTPConfig, ParallelConfig, RunConfig
from dsattn.training.recipes import RECIPES


def run_of(recipe: str = "small", packs: int = 8, **parallel: int | str) -> RunConfig:
    run = RECIPES[recipe]()
    train = dataclasses.replace(run.train, packs_per_step=packs, packs_per_micro_batch=1)
    return dataclasses.replace(run, train=train, parallel=ParallelConfig(**parallel))


def test_one_process_has_a_memory_plan_alone():
    assert list(ranks.sections(run_of())) == ["memory plan of a rank, GiB"]


def test_every_section_of_several_ranks():
    run = run_of(pp=2, cp=2)
    found = ranks.sections(run)
    assert list(found)[:2] == ["mesh of 4 ranks", "what each rank holds"]
    assert "pp     2" in found["mesh of 4 ranks"]
    assert [line.split()[0] for line in found["mesh of 4 ranks"].splitlines()] == ["group", "pp", "cp", "fsdp"]
    assert "residual stream" in list(found.values())[-1]


def test_each_rank_says_what_it_holds():
    lines = ranks.holdings(run_of(pp=2, vpp=2, schedule="Interleaved1F1B", tp=2, cp=2)).splitlines()[1:]
    assert len(lines) == 8
    first, last = (" ".join(lines[at].split()) for at in (0, 7))
    assert first == "0 pp=0 cp=0 tp=0 0E 2 0-4 10-13 0-7 - 8,192 of 32,768, 2 of 4 chunks of each document 0 of 1"
    assert last == "7 pp=1 cp=1 tp=1 1 3L 5-9 14-17 8-15 - 8,192 of 32,768, 2 of 4 chunks of each document 0 of 1"


def test_experts_and_packs_are_named():
    lines = ranks.holdings(run_of("glm_5_2", dp_shard=4, ep=4)).splitlines()[1:]
    assert [line.split()[6] for line in lines] == ["0-63", "64-127", "128-191", "192-255"]
    assert [line.split("  ")[-1] for line in lines] == [f"{pack} of 4" for pack in range(4)]


def test_many_ranks_are_cut_short():
    lines = ranks.holdings(run_of("glm_5_2", cp=32)).splitlines()
    assert len(lines) == 1 + 16 + 1
    assert lines[-1] == "... and 16 more ranks like these"


def test_every_stage_shows_ranks_where_they_are_cut_short():
    run = run_of(packs=32, pp=2, dp_shard=16)
    lines = ranks.holdings(run).splitlines()
    shown = [line.split()[0] for line in lines[1:-1]]
    assert shown == [str(rank) for stage in (0, 16) for rank in range(stage, stage + 8)]
    assert lines[-1] == "... and 8 more ranks of each stage like these"
    assert [line.split()[1] for line in lines[1:-1]] == ["pp=0"] * 8 + ["pp=1"] * 8


def test_the_plan_is_accountings():
    run = run_of(pp=2)
    text = ranks.memory(run)
    assert text.splitlines()[0].split("  ")[-1].strip() == "sparse, stage 1"
    plan = accounting.memory_plan(run, "sparse", stage=1)
    peak = next(line for line in text.splitlines() if line.split()[0] == "peak")
    assert float(peak.split()[-1]) == pytest.approx(plan.peak / 2**30, abs=0.01)
    assert f"sparse, stage 1: fullest in {plan.moment}" in text


def test_depths_have_collectives_of_their_own():
    run = run_of(pp=2, dp_shard=2)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, mtp=MTPConfig(depths=2)))
    lines = [re.split(r"  +", line) for line in ranks.traffic(run).splitlines()]
    weights = {line[0]: float(line[-1]) for line in lines if "weights" in line}
    assert list(weights) == ["selects", "selects, MTP"]
    joins = (2 * run.model.hidden_size + 3) * run.model.hidden_size
    size = (4 + (2 if run.train.dtype == "bfloat16" else 4)) / 4  # gathered again and reduced, once in 4 micro-batches
    assert weights["selects, MTP"] - weights["selects"] == pytest.approx(size * joins / 2 / 2**20, abs=0.1)


def test_what_cannot_be_planned_is_said():
    linear = dataclasses.replace(
        RECIPES["tiny"]().model, layer_types=("linear", "dsa", "dense", "dsa"), kda=KDAConfig(heads=2, head_dim=16)
    )
    two = dataclasses.replace(
        RECIPES["tiny"]().model, layer_types=("dense", "dsa", "dense", "dsa"), dense_attention=GQAConfig(head_dim=16)
    )
    for model, name in ((linear, "kda"), (two, "dense_attention")):
        run = dataclasses.replace(run_of("tiny", dp_shard=2), model=model)
        assert f"{name} is set, and what its layers keep is not counted" in ranks.sections(run)["memory plan"]
