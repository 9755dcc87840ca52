"""`dsattn flops RECIPE`."""

import json
from dataclasses import dataclass
from typing import Any, get_args

from dsattn.accounting import model_parts, model_work, parameter_counts
from dsattn.cli.arguments import UsageError, parse, pick, recipe_list
from dsattn.cli.tables import amount, share, table
from dsattn.config import Mode, ModelConfig
from dsattn.training.recipes import RECIPES


@dataclass(frozen=True)
class Options:
    """What is counted."""

    model: ModelConfig
    """The recipe's network; every field can be changed."""
    tokens: int
    """Tokens of the pack."""
    documents: int = 1
    """Documents, as equal as can be, that the pack holds: attention stays inside each."""
    mode: Mode = "sparse"
    """Training mode of the table of parts."""
    json: bool = False
    """Print one JSON object instead of tables."""


def run(arguments: list[str]) -> int:
    """Print parameters, the work of one training step over one pack by part, and every mode beside the dense one."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if not arguments:
        raise UsageError(f"no recipe given\n{_help()}")
    name = pick("recipe", arguments[0], RECIPES, "dsattn flops --help")
    config = RECIPES[name]()
    description = "Count parameters, and FLOPs of one training step (forward and backward) over one pack of tokens."
    default = Options(model=config.model, tokens=config.data.pack_tokens)
    options = parse(Options, arguments[1:], prog=f"dsattn flops {name}", description=description, default=default)
    if not 1 <= options.documents <= options.tokens:
        raise UsageError(f"--documents {options.documents} must be between 1 and --tokens {options.tokens}")
    print(json.dumps(_count(name, options), indent=1) if options.json else _tables(name, options))
    return 0


def _lengths(options: Options) -> list[int]:
    each, longer = divmod(options.tokens, options.documents)
    return [each + (index < longer) for index in range(options.documents)]


def _count(name: str, options: Options) -> dict[str, Any]:
    lengths = _lengths(options)
    parts = model_parts(options.model, lengths, options.mode)
    return {
        "recipe": name,
        "tokens": options.tokens,
        "documents": options.documents,
        "mode": options.mode,
        "parameters": parameter_counts(options.model),
        "parts": {part.name: {"forward": vars(part.forward), "backward": vars(part.backward)} for part in parts},
        "modes": {mode: model_work(options.model, lengths, mode).flops for mode in get_args(Mode)},
    }


def _tables(name: str, options: Options) -> str:
    lengths = _lengths(options)
    parameters = parameter_counts(options.model)
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
    works = {mode: model_work(options.model, lengths, mode) for mode in get_args(Mode)}
    dense = works["dense"].flops
    modes = [
        [mode, amount(work.flops, "FLOP"), amount(work.flops / options.tokens, "FLOP"), f"{work.flops / dense:.3f}"]
        for mode, work in works.items()
    ]
    pack = f"{options.tokens:,} tokens in {options.documents} document{'s' if options.documents > 1 else ''}"
    return "\n\n".join(
        (
            f"{name}: {sum(parameters.values()):,} parameters ({counts})",
            f"one training step over {pack}, mode {options.mode}, matrix products only:",
            table(["part", "forward", "backward", "both", "share", "moved at least"], parts),
            table(["mode", "one step", "per token", "of dense"], modes),
        )
    )


def _help() -> str:
    return (
        "usage: dsattn flops RECIPE [--tokens N] [--documents N] [--mode MODE] [--json] [--model.field value ...]\n\n"
        f"recipes:\n{recipe_list(RECIPES)}\n\n"
        "`dsattn flops RECIPE --help` explains every option."
    )
