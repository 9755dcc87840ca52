"""`dsattn train RECIPE [--init SRC] [--section.field value]`."""

import argparse
import os
from pathlib import Path

from dsattn.cli.arguments import UsageError, parse, pick, recipe_list
from dsattn.config import RunConfig, deferred_checks
from dsattn.training.recipes import RECIPES

_DESCRIPTION = (
    "{} Every field of the run can be changed here. Stages run in order and are numbered from 0 "
    "(--train.stages.0.steps 10); how many there are is the recipe's. The same command again goes on where it stopped. "
    "With --init SRC the run begins with the model of SRC, a run folder such as `dsattn convert` writes or one "
    "checkpoint in it: its shape, its tokenizer, its weights; of the recipe the stages and the batches are left."
)


def run(arguments: list[str]) -> int:
    """Train; 0 also where SIGTERM or SIGINT stopped the run after saving it."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if not arguments:
        raise UsageError(f"no recipe given\n{_help()}")
    name, config = read_config(arguments, processes=int(os.environ.get("WORLD_SIZE", "1")))
    from dsattn.parallel.mesh import processes
    from dsattn.training.loop import train

    with processes(config.train.device):
        summary = train(config, recipe=name)
    if not summary["finished"]:
        print(f"stopped and saved in {summary['checkpoint']}; the same command goes on from there")
    return 0


def read_config(arguments: list[str], *, processes: int | None = None) -> tuple[str, RunConfig]:
    """(recipe's name, its configuration with the changes asked for). processes: how many there are, where it counts."""
    name = pick("recipe", arguments[0], RECIPES, "dsattn train --help")
    recipe = RECIPES[name]
    description = _DESCRIPTION.format((recipe.__doc__ or "").strip())
    prog = f"dsattn train {name}"
    source, rest = _take_init(arguments[1:], prog)
    config = recipe()
    if source is not None:
        from dsattn.training.runs import begin_from

        with deferred_checks():
            config = begin_from(config, source)

    def world(run: RunConfig) -> list[str]:
        return [] if processes is None else [f"parallel: {one}" for one in run.parallel.world_problems(processes)]

    return name, parse(RunConfig, rest, prog=prog, description=description, default=config, problems_with=world)


def _take_init(arguments: list[str], prog: str) -> tuple[Path | None, list[str]]:
    """(what --init names, the other arguments)."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--init", type=Path)
    taken, rest = parser.parse_known_args(arguments)
    return taken.init, rest


def _help() -> str:
    return (
        "usage: dsattn train RECIPE [--init SRC] [--section.field value ...]\n\n"
        f"recipes:\n{recipe_list(RECIPES)}\n\n"
        "--init SRC trains the model of a run folder, such as `dsattn convert` writes, by the recipe's stages.\n"
        "`dsattn train RECIPE --help` explains every field with its default."
    )
