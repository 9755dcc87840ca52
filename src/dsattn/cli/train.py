"""`dsattn train RECIPE [--section.field value]`."""

from dsattn.cli.arguments import UsageError, parse, pick, recipe_list
from dsattn.config import RunConfig
from dsattn.training.recipes import RECIPES

_DESCRIPTION = (
    "{} Every field of the run can be changed here. Stages run in order and are numbered from 0 "
    "(--train.stages.0.steps 10); how many there are is the recipe's. The same command again goes on where it stopped."
)


def run(arguments: list[str]) -> int:
    """Train; 0 also where SIGTERM or SIGINT stopped the run after saving it."""
    if arguments and arguments[0] in ("-h", "--help", "--list"):
        print(_help())
        return 0
    if not arguments:
        raise UsageError(f"no recipe given\n{_help()}")
    name, config = read_config(arguments)
    from dsattn.training.loop import train

    summary = train(config, recipe=name)
    if not summary["finished"]:
        print(f"stopped and saved in {summary['checkpoint']}; the same command goes on from there")
    return 0


def read_config(arguments: list[str]) -> tuple[str, RunConfig]:
    """(recipe's name, its configuration with the changes asked for)."""
    name = pick("recipe", arguments[0], RECIPES, "dsattn train --list")
    recipe = RECIPES[name]
    description = _DESCRIPTION.format((recipe.__doc__ or "").strip())
    prog = f"dsattn train {name}"
    return name, parse(RunConfig, arguments[1:], prog=prog, description=description, default=recipe())


def _help() -> str:
    return (
        "usage: dsattn train RECIPE [--section.field value ...]\n\n"
        f"recipes:\n{recipe_list(RECIPES)}\n\n"
        "`dsattn train RECIPE --help` explains every field with its default."
    )
