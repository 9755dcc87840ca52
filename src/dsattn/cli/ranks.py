"""Tables of a parallel run before it is launched: the mesh, what each rank holds, its memory, its collectives."""

from collections.abc import Iterator

from dsattn.accounting import Place, layer_traffic, layers_kept, memory_plan, place, stage_traffic
from dsattn.cli.tables import table
from dsattn.config import Mode, RunConfig
from dsattn.errors import InputError
from dsattn.parallel.mesh import coordinates, sizes

_GIB, _MIB = 2**30, 2**20
_MOST_RANKS = 16
_GROUPS = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas of everything",
    "dp_shard": "different packs, sharded weights",
    "cp": "rows of each document",
    "tp": "heads and the MLP's width",
    "ep": "routed experts",
    "fsdp": "shards of weights: dp_shard x cp",
    "efsdp": "shards of experts' weights: dp_shard x cp x tp / ep",
}


def sections(run: RunConfig) -> dict[str, str]:
    """Title -> text: mesh and holdings where there are several ranks, the memory plan in any case. Starts nothing."""
    found = {}
    if run.parallel.world_size > 1:
        found[f"mesh of {run.parallel.world_size} ranks"] = mesh(run)
        found["what each rank holds"] = holdings(run)
    try:
        found["memory plan of a rank, GiB"] = memory(run)
        if run.parallel.world_size > 1:
            found["collectives of a layer, MiB received by a rank for one micro-batch"] = traffic(run)
    except InputError as error:
        found["memory plan"] = str(error)
    return found


def mesh(run: RunConfig) -> str:
    """Groups with more than one rank; those of experts where there are some."""
    count = sizes(run.parallel)
    if run.model.moe is None:
        count |= {"ep": 1, "efsdp": 1}
    rows = [[name, str(count[name]), what] for name, what in _GROUPS.items() if count[name] > 1]
    return table(["group", "ranks", "split or differ in"], rows, words=True)


def holdings(run: RunConfig) -> str:
    """One row a rank; where there are many, the first ones of each pipeline stage."""
    world, stages = run.parallel.world_size, run.parallel.pp
    each = world // stages  # ranks of a stage are neighbours
    shown = min(each, max(_MOST_RANKS // stages, 1))
    rows = [_holding(run, stage * each + rank) for stage in range(stages) for rank in range(shown)]
    text = table(["rank", "place", "stages", "layers", "heads", "experts", "rows", "packs"], rows, words=True)
    if shown == each:
        return text
    return f"{text}\n... and {each - shown} more ranks{' of each stage' if stages > 1 else ''} like these"


def _holding(run: RunConfig, rank: int) -> list[str]:
    parallel = run.parallel
    at = coordinates(parallel, rank)
    here = place(run, at["pp"])
    named = [name for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if sizes(parallel)[name] > 1]
    heads, tp = run.model.attention.heads // parallel.tp, at["tp"]
    experts = "-" if not here.experts else _span(here.experts * at["ep"], here.experts)
    rows = f"{here.rows // here.stream_shards:,} of {here.keys:,}"
    if parallel.cp > 1:
        rows += f", 2 of {2 * parallel.cp} chunks of each document"
    packs = f"{at['batch']} of {parallel.batch_ranks}"
    stages = " ".join(f"{chunk.number}{'E' * chunk.embeds}{'L' * chunk.head}" for chunk in here.chunks)
    place_of = " ".join(f"{name}={at[name]}" for name in named)
    return [str(rank), place_of, stages, _layers(here), _span(heads * tp, heads), experts, rows, packs]


def _layers(here: Place) -> str:
    """Runs of layers: 0-3 8-11."""
    runs: list[list[int]] = []
    for layer in here.layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][-1] = layer
        else:
            runs.append([layer, layer])
    return " ".join(_span(first, last - first + 1) for first, last in runs) or "-"


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def modes(run: RunConfig) -> list[Mode]:
    """Of the run's stages of training, each once."""
    return list(dict.fromkeys(stage.mode for stage in run.train.stages))


def memory(run: RunConfig) -> str:
    """A column for each mode of the run and stage of its pipeline."""
    columns = {
        f"{mode}{f', stage {stage}' if run.parallel.pp > 1 else ''}": memory_plan(run, mode, stage=stage)
        for mode in modes(run)
        for stage in range(run.parallel.pp)
    }
    names = dict.fromkeys(name for plan in columns.values() for name in plan.parts)
    rows = [[name, *(_gib(plan.parts.get(name)) for plan in columns.values())] for name in names]
    rows.append(["peak", *(_gib(plan.peak) for plan in columns.values())])
    moments = [f"{name}: fullest in {plan.moment}" for name, plan in columns.items()]
    return "\n".join([table(["", *columns], rows), *moments])


def traffic(run: RunConfig) -> str:
    """For each kind of layer of the last mode, on the first pipeline stage that has it."""
    return table(["layer", "collective", "over", "forward", "backward"], list(_traffic(run)), words=True)


def _traffic(run: RunConfig) -> Iterator[list[str]]:
    mode, seen = modes(run)[-1], set()
    for stage in range(run.parallel.pp):
        here = place(run, stage)
        for number, kept in enumerate(layers_kept(here, run, mode)):
            kind = f"{kept.layer.role}{', experts' * kept.layer.experts}{', MTP' * kept.layer.ahead}"
            if kind in seen:
                continue
            seen.add(kind)
            for one in layer_traffic(here, number, kept, run, mode):
                yield [kind, one.what, one.group, *(f"{size / _MIB:.1f}" for size in (one.forward, one.backward))]
    if moved := max(stage_traffic(place(run, stage)) for stage in range(run.parallel.pp)):
        yield ["between stages", "residual stream", "pp", *(f"{moved / _MIB:.1f}",) * 2]


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / _GIB:.3f}" if size < _GIB / 10 else f"{size / _GIB:.2f}"
