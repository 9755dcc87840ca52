"""Reading command lines: names with close matches, tyro for everything else, configurations checked as a whole."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import tyro

from dsattn.config import Checked, RunConfig, deferred_checks
from dsattn.errors import ConfigError

Options = TypeVar("Options")


class UsageError(Exception):
    """The command line is wrong; the message says how and what is right."""


def pick(kind: str, given: str, names: Iterable[str], help_command: str) -> str:
    """`given`, which must be one of `names`. Raises UsageError with close matches and with every name."""
    known = list(dict.fromkeys(names))
    if given in known:
        return given
    if given.startswith("-"):
        raise UsageError(f"give the {kind} before options such as {given!r}: {', '.join(known)} (see {help_command})")
    close = difflib.get_close_matches(given, known, n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(close)}?" if close else "."
    raise UsageError(f"no {kind} {given!r}{meant} There is {', '.join(known)} (see {help_command})")


def recipe_list(recipes: dict[str, Callable[[], RunConfig]]) -> str:
    """A line a recipe: its name and the first sentence about it."""
    lines = (f"  {name:14s} {(recipe.__doc__ or '').strip().splitlines()[0]}" for name, recipe in recipes.items())
    return "\n".join(lines)


def parse(
    options: type[Options],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    default: Options | None = None,
    problems_with: Callable[[Options], Iterable[str]] = lambda _: (),
) -> Options:
    """What tyro makes of `arguments`: `options` is a dataclass with a sentence a field, `default` one made already.

    Dashes and underscores are the same. A union follows the default's type, so its fields are plain options.
    Raises UsageError with every broken rule of the configurations inside and of what `problems_with` tells, SystemExit
    for help and unknown options.
    """
    start = tyro.MISSING_NONPROP if default is None else default
    config = (tyro.conf.AvoidSubcommands, tyro.conf.PositionalMetavarFromFieldName)
    with deferred_checks():
        parsed = tyro.cli(options, args=arguments, prog=prog, description=description, config=config, default=start)
    whole: object = parsed
    inside = {"": whole} if isinstance(whole, Checked) else {f"{name}.": value for name, value in vars(whole).items()}
    checked = ((prefix, value) for prefix, value in inside.items() if isinstance(value, Checked))
    problems = [problem for prefix, value in checked for problem in value.all_problems(prefix)]
    if problems := [*problems, *problems_with(parsed)]:
        raise UsageError(str(ConfigError(problems)))
    return parsed
