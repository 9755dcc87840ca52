"""docs/scaling.md holds what accounting gives: `python tests/test_scaling.py` writes its tables anew."""

import dataclasses
import re
from pathlib import Path

import pytest

from dsattn import accounting
from dsattn.accounting.scratch import logits
from dsattn.cli.ranks import traffic
from dsattn.config import Mode, ParallelConfig, RunConfig
from dsattn.training.recipes import RECIPES

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
GIB, MIB = 2**30, 2**20
MESHES = {
    "128K, cp 32": (2**17, ParallelConfig(cp=32, dp_shard=8, ep=64)),
    "1M, cp 64": (2**20, ParallelConfig(cp=64, dp_shard=4, ep=64)),
}
MODES: tuple[Mode, Mode] = ("warmup", "sparse")
Table = list[list[str]]


def run_of(name: str, recompute: str = "full") -> RunConfig:
    tokens, parallel = MESHES[name]
    glm = RECIPES["glm_5_2"]()
    train = dataclasses.replace(
        glm.train, recompute=recompute, packs_per_step=parallel.batch_ranks, packs_per_micro_batch=1, dtype="bfloat16"
    )
    data = dataclasses.replace(glm.data, pack_tokens=tokens)
    return dataclasses.replace(glm, parallel=parallel, data=data, train=train)


def memory() -> Table:
    plans = {
        f"{name}, {mode}": accounting.memory_plan(run_of(name), mode)
        for name in MESHES
        for mode in ("warmup", "sparse")
    }
    names = dict.fromkeys(part for plan in plans.values() for part in plan.parts)
    lines = [[part, *(f"{plan.parts.get(part, 0) / GIB:.2f}" for plan in plans.values())] for part in names]
    lines.append(["**peak**", *(f"**{plan.peak / GIB:.1f}**" for plan in plans.values())])
    lines.append(["fullest in", *(plan.moment for plan in plans.values())])
    return [["GiB", *plans], *lines]


def policies() -> Table:
    lines = []
    for policy in ("none", "selective", "full"):
        peaks = [accounting.memory_plan(run_of(name, policy), mode).peak for name in MESHES for mode in MODES]
        lines.append([f"`{policy}`", *(f"{peak / GIB:.1f}" for peak in peaks)])
    return [["peak, GiB", *(f"{name}, {mode}" for name in MESHES for mode in MODES)], *lines]


def sizes() -> Table:
    """Of one layer and rank."""
    found: dict[str, list[str]] = {}
    for name in MESHES:
        run = run_of(name)
        here, model = accounting.place(run), run.model
        rows, keys, attention, indexer = here.rows, here.keys, model.attention, model.dsa.indexer
        selecting = accounting.layer_roles(model).count("selects")
        for what, size in {
            "rows of hidden states, fp32": 4 * rows * model.hidden_size,
            "absorbed queries of 64 heads": 2 * rows * attention.heads * attention.latent_width,
            "latents of all keys, gathered": 2 * keys * attention.latent_width,
            "indexer keys of all keys, gathered": 2 * keys * indexer.head_dim,
            "expanded keys and values of all keys (warm-up)": accounting.layers_kept(here, run, "warmup")[0].core()[1]
            * rows
            + accounting.layers_kept(here, run, "warmup")[0].core()[2] * rows,
            "selected indices": 4 * rows * (indexer.top_k + 1),
            f"selected indices of {selecting} layers that select": 4 * rows * (indexer.top_k + 1) * selecting,
            "indexer scores of all rows, were they whole": 4 * rows * keys,
            "indexer scores that are alive": min(model.dsa.block_bytes, 4 * rows * keys),
            "contributions to the keys' gradient": min(2**31, 2 * rows * indexer.top_k * attention.latent_width),
            "one chunk of logits, backward": logits(model.vocab_size, rows),
        }.items():
            found.setdefault(what, []).append(f"{size / MIB:,.0f}")
    return [["MiB", *MESHES], *([what, *values] for what, values in found.items())]


def collectives() -> Table:
    """Both meshes side by side."""
    columns = [[re.split(r"  +", line) for line in traffic(run_of(name)).splitlines()[1:]] for name in MESHES]
    lines = []
    for one, other in zip(*columns, strict=True):
        assert one[:3] == other[:3]
        lines.append([*one[:3], *(f"{float(cells[at]):,.0f}" for cells in (one, other) for at in (3, 4))])
    heads = [f"{name}, {way}" for name in MESHES for way in ("forward", "backward")]
    return [["layer", "collective", "over", *heads], *lines]


def totals() -> Table:
    """Of all layers, for one micro-batch."""
    found: dict[str, list[str]] = {}
    for name in MESHES:
        run = run_of(name)
        here, moved = accounting.place(run), dict.fromkeys(("cp", "ep", "fsdp", "efsdp"), 0)
        for number, kept in enumerate(accounting.layers_kept(here, run, "sparse")):
            for one in accounting.layer_traffic(here, number, kept, run, "sparse"):
                moved[one.group] += one.total
        for group, size in moved.items():
            found.setdefault(f"received over {group}, GiB", []).append(f"{size / GIB:.0f}")
        work = {mode: accounting.model_work(run.model, [here.keys], mode).flops for mode in ("dense", "sparse")}
        for mode, flops in work.items():
            found.setdefault(f"work in mode {mode}, PFLOP", []).append(f"{flops / here.parallel.cp / 1e15:.2f}")
        again = sum(part.forward.flops for part in accounting.model_parts(run.model, [here.keys], "sparse"))
        seconds = (work["sparse"] + again) / here.parallel.cp / 400e12
        found.setdefault("seconds at 400 TFLOP/s, replay included", []).append(f"{seconds:.1f}")
        network = sum(moved.values()) / 50e9
        found.setdefault("seconds at 50 GB/s", []).append(f"{network:.1f}")
    return [["one micro-batch, one rank", *MESHES], *([what, *values] for what, values in found.items())]


def published() -> Table:
    glm = RECIPES["glm_5_2"]().model
    counted = sum(accounting.parameter_counts(glm).values())
    roles = accounting.layer_roles(glm)
    top_k = glm.dsa.indexer.top_k
    kept = [accounting.kept_pairs([n], top_k) / accounting.visible_pairs([n]) for n in (2**17, 2**20)]
    return [
        ["what", "published", "counted here"],
        ["parameters of GLM-5.2 (technical report)", "744 B", f"{counted / 1e9:.0f} B without MTP"],
        [
            "layers that select, that share (config.json)",
            "21, 57",
            f"{roles.count('selects')}, {roles.count('shares')}",
        ],
        ["pairs kept of those visible, 128K (Megatron Core's FLOPs)", "0.031005859375", f"{kept[0]:.6f}"],
        ["the same, 1M", "0.003902435", f"{kept[1]:.9f}"],
        ["scores of 4,096 rows over 128K keys (every peer writes them)", "2 GiB", gib(4 * 4096 * 2**17)],
        ["scores of 16,384 rows over 1M keys (cuDNN, packed)", "64 GiB", gib(4 * 16384 * 2**20)],
        ["scores of 8,192 rows over 1M keys (Megatron Core's TileLang)", "32 GiB", gib(4 * 8192 * 2**20)],
        ["indices kept for recompute, 32K rows", "256 MiB", f"{4 * 2**15 * top_k // MIB} MiB"],
        ["indices kept for recompute, a layer at 128K, cp 8 (PaddleFleet)", "0.125 GB", gib(4 * 2**14 * top_k)],
    ]


def gib(size: int) -> str:
    return f"{size / GIB:g} GiB"


TABLES = {
    "memory": memory,
    "policies": policies,
    "sizes": sizes,
    "collectives": collectives,
    "totals": totals,
    "published": published,
}


def markdown(table: Table) -> str:
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *lines])


def told(page: str, name: str) -> str:
    """The table behind the comment that names it."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n\n", page + "\n\n", re.DOTALL)
    assert found, f"docs/scaling.md has no table {name}"
    return found[1]


@pytest.mark.parametrize("name", TABLES)
def test_the_page_says_what_accounting_gives(name):
    assert told(PAGE.read_text(), name) == markdown(TABLES[name]())


def test_counts_are_those_that_were_published():
    for _, said, counted in published()[1:]:
        number, other = (float(re.search(r"[\d.]+", text)[0]) for text in (said, counted))
        assert other == pytest.approx(number, rel=2e-3), said


def test_the_runs_fit_the_gpu_that_the_page_names():
    for name in MESHES:
        assert all(accounting.memory_plan(run_of(name), mode).peak < 139 * GIB for mode in MODES)


def main() -> None:
    page = PAGE.read_text()
    for name, table in TABLES.items():
        mark = f"<!-- {name} -->\n"
        page = page.replace(mark + told(page, name), mark + markdown(table()))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
