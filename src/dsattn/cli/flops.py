"""`dsattn flops RECIPE|HF_CONFIG`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from dsattn.accounting import MemoryPlan, megatron_flops, memory_plan, model_parts, model_work, parameter_counts
from dsattn.accounting.memory import Dtype
from dsattn.cli.arguments import UsageError, parse, pick, recipe_list
from dsattn.cli.lengths import cost_table, costs, picture
from dsattn.cli.tables import amount, share, table
from dsattn.config import (
    DataConfig,
    Mode,
    ModelConfig,
    ParallelConfig,
    Recompute,
    RunConfig,
    TrainConfig,
    deferred_checks,
)
from dsattn.errors import ConfigError, InputError
from dsattn.training.recipes import RECIPES


@dataclass(frozen=True)
class Options:
    """What is counted."""

    model: ModelConfig
    """The network of the recipe or of the Hugging Face configuration; every field can be changed."""
    tokens: int
    """Tokens of the pack, which is one micro-batch."""
    documents: int = 1
    """Documents, as equal as can be, that the pack holds: attention stays inside each."""
    lengths: tuple[int, ...] = ()
    """Tokens of each document, in place of tokens and documents."""
    mode: Mode = "sparse"
    """Training mode of the table of parts, of the memory and of the costs by length."""
    dtype: Dtype = "bfloat16"
    """Arithmetic of the layers, for the memory."""
    recompute: Recompute = "none"
    """What runs again in the backward, for the memory."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The mesh, for the memory of one rank."""
    json: bool = False
    """Print one JSON object instead of tables."""
    plot: Path | None = None
    """Write the cost of a token against document length to this SVG file: dense, DSA, DSA with shared selections."""


def run(arguments: list[str]) -> int:
    """Print parameters, work by part and mode, memory of a rank, and the cost of a token by document length.

    Beside our count of a step stands that of Megatron Core's formula, where it knows the model.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if not arguments:
        raise UsageError(f"no recipe given, and no configuration\n{_help()}")
    name, default = _subject(arguments[0])
    description = "Count parameters, FLOPs of one training step (forward and backward) over one pack, and memory."
    options = parse(Options, arguments[1:], prog=f"dsattn flops {name}", description=description, default=default)
    if options.lengths and (options.tokens, options.documents) != (default.tokens, default.documents):
        raise UsageError("--lengths says how many tokens and documents there are: leave out --tokens and --documents")
    found = _count(name, options)
    if options.plot is not None:
        if "by_length" not in found:
            raise UsageError(f"--plot compares selections with dense attention: {found['no_lengths']}")
        options.plot.write_bytes(picture(name, found["by_length"]).svg)
    print(json.dumps(found, indent=1) if options.json else _tables(name, options, found))
    return 0


def _subject(given: str) -> tuple[str, Options]:
    """(name, what is counted unless options say otherwise) of a recipe, or of a config.json or its folder."""
    path = Path(given)
    file = path / "config.json" if path.is_dir() else path
    if given not in RECIPES and (path.is_dir() or path.suffix == ".json"):
        from dsattn.integrations.hf_config import from_hf, with_indexers

        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise ValueError("it holds no object")
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} is no Hugging Face configuration: {error}") from error
        model = from_hf(fields)
        if "dense" in model.types and "dsa" not in model.types:
            model = with_indexers(model)
        return given, Options(model=model, tokens=32768)
    name = pick("recipe", given, RECIPES, "dsattn flops --help")
    config = RECIPES[name]()
    train = config.train
    return name, Options(
        config.model, config.data.pack_tokens, dtype=train.dtype, recompute=train.recompute, parallel=config.parallel
    )


def _lengths(options: Options) -> list[int]:
    if options.lengths:
        if min(options.lengths) < 0 or sum(options.lengths) < 1:
            raise UsageError(
                f"--lengths {' '.join(map(str, options.lengths))} must be tokens of documents, one at least"
            )
        return list(options.lengths)
    if options.tokens < 1:
        raise UsageError(f"--tokens {options.tokens} must be at least 1")
    if not 1 <= options.documents <= options.tokens:
        raise UsageError(f"--documents {options.documents} must be between 1 and --tokens {options.tokens}")
    each, longer = divmod(options.tokens, options.documents)
    return [each + (index < longer) for index in range(options.documents)]


def _plans(options: Options, tokens: int) -> list[MemoryPlan]:
    """One a pipeline stage. Raises UsageError with whatever the model cannot be cut into."""
    parallel = options.parallel
    with deferred_checks():
        train = TrainConfig(
            packs_per_step=parallel.batch_ranks * parallel.pp,
            packs_per_micro_batch=1,
            dtype=options.dtype,
            recompute=options.recompute,
        )
        data = DataConfig(pack_tokens=max(tokens, 2))
        whole = RunConfig(model=options.model, data=data, train=train, parallel=parallel)
    if problems := list(parallel.model_problems(options.model)):
        raise UsageError(str(ConfigError([f"parallel.{problem}" for problem in problems])))
    return [memory_plan(whole, options.mode, stage=stage) for stage in range(parallel.pp)]


def _count(name: str, options: Options) -> dict[str, Any]:
    lengths = _lengths(options)
    parts = model_parts(options.model, lengths, options.mode)
    found: dict[str, Any] = {
        "recipe": name,
        "tokens": sum(lengths),
        "documents": len(lengths),
        "mode": options.mode,
        "parameters": parameter_counts(options.model),
        "parts": {part.name: {"forward": vars(part.forward), "backward": vars(part.backward)} for part in parts},
        "modes": {mode: model_work(options.model, lengths, mode).flops for mode in get_args(Mode)},
    }
    try:
        counted = [mode for mode in get_args(Mode) if mode != "warmup"]
        found["megatron"] = {mode: megatron_flops(options.model, lengths, mode) for mode in counted}
    except InputError as error:
        found["no_megatron"] = str(error)
    try:
        plans = _plans(options, sum(lengths))
        found["memory"] = [{"parts": plan.parts, "peak": plan.peak, "moment": plan.moment} for plan in plans]
    except InputError as error:
        found["no_memory"] = str(error)
    try:
        found["by_length"] = costs(options.model, options.mode if options.mode in ("sparse", "frozen") else "sparse")
    except InputError as error:
        found["no_lengths"] = str(error)
    return found


def _tables(name: str, options: Options, found: dict[str, Any]) -> str:
    lengths = _lengths(options)
    parameters = found["parameters"]
    counts = ", ".join(f"{part} {amount(count, '').strip()}" for part, count in parameters.items() if count)
    total = model_work(options.model, lengths, options.mode)
    parts = [
        [
            part.name,
            *(amount(work.flops, "FLOP") for work in (part.forward, part.backward, part.total)),
            share(part.total.flops / total.flops),
            amount(part.total.bytes, "B"),
        ]
        for part in model_parts(options.model, lengths, options.mode)
    ]
    parts.append(["all", "", "", amount(total.flops, "FLOP"), share(1.0), amount(total.bytes, "B")])
    tokens, dense = found["tokens"], found["modes"]["dense"]
    theirs = found.get("megatron", {})
    modes = [
        [
            mode,
            *(amount(flops, "FLOP"), amount(flops / tokens, "FLOP"), f"{flops / dense:.3f}"),
            amount(theirs[mode], "FLOP") if mode in theirs else "-",
        ]
        for mode, flops in found["modes"].items()
    ]
    pack = f"{tokens:,} tokens in {len(lengths)} document{'s' if len(lengths) > 1 else ''}"
    return "\n\n".join(
        (
            f"{name}: {sum(parameters.values()):,} parameters ({counts})",
            f"one training step over {pack}, mode {options.mode}, matrix products only:",
            table(["part", "forward", "backward", "both", "share", "moved at least"], parts),
            table(["mode", "one step", "per token", "of dense", "by Megatron's formula"], modes)
            + (f"\n{found['no_megatron']}" if "no_megatron" in found else ""),
            _memory(options, found),
            f"a token by document length:\n{cost_table(found['by_length'])}"
            if "by_length" in found
            else f"no costs by length: {found['no_lengths']}",
        )
    )


def _memory(options: Options, found: dict[str, Any]) -> str:
    """A column a pipeline stage."""
    if "memory" not in found:
        return f"no memory plan: {found['no_memory']}"
    plans = found["memory"]
    names = dict.fromkeys(name for plan in plans for name in plan["parts"])
    rows = [[name, *(_signed(plan["parts"].get(name, 0)) for plan in plans)] for name in names]
    rows.append(["peak", *(amount(plan["peak"], "B") for plan in plans)])
    head = [f"stage {stage}" for stage in range(len(plans))] if len(plans) > 1 else ["bytes"]
    moments = dict.fromkeys(plan["moment"] for plan in plans)
    ranks = f"a rank of {options.parallel.world_size}, " if options.parallel.world_size > 1 else ""
    said = f"memory on a GPU, {ranks}mode {options.mode}, {options.dtype}, recompute {options.recompute}:"
    return f"{said}\n{table(['part', *head], rows)}\nfullest in {', '.join(moments)}"


def _signed(size: int) -> str:
    return f"-{amount(-size, 'B')}" if size < 0 else amount(size, "B")


def _help() -> str:
    return (
        "usage: dsattn flops RECIPE|HF_CONFIG [--tokens N] [--documents N | --lengths N ...] [--mode MODE] [--json]\n"
        "                    [--parallel.cp N ...] [--recompute POLICY] [--plot FILE.svg] [--model.field value ...]\n\n"
        f"recipes:\n{recipe_list(RECIPES)}\n\n"
        "HF_CONFIG is a Hugging Face config.json or its folder; dense models get DeepSeek-V3.2's indexers.\n"
        "`dsattn flops RECIPE --help` explains every option."
    )
