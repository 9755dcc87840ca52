"""`dsattn report RUN`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from dsattn.cli.arguments import parse


@dataclass(frozen=True)
class Options:
    """Write a run's report.html again, from its metrics and summary."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""


def run(arguments: list[str]) -> int:
    """Write the report and print its path."""
    options = parse(Options, arguments, prog="dsattn report")
    from dsattn.training.report import write_report

    print(write_report(options.run))
    return 0
