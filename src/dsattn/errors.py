"""Every error that dsattn raises on purpose.

DsattnError
├── InputError (ValueError)             an argument breaks a rule; says which, its value, the rule, the way out
│   └── ConfigError                     a configuration breaks rules; lists every one of them
├── BackendUnavailable (RuntimeError)   a backend asked for by name, or any at all under `strict`, cannot serve the call
├── CheckpointError (RuntimeError)      a checkpoint cannot be written, or one that was read is damaged
├── DataError (RuntimeError)            text that should be read is missing or unreadable
└── TrainingStopped (RuntimeError)      the loss is not finite; names the last good checkpoint
"""

from collections.abc import Sequence


class DsattnError(Exception):
    """Base of all errors of this package."""


class InputError(DsattnError, ValueError):
    """An argument breaks a rule."""


class ConfigError(InputError):
    """A configuration breaks one or more rules.

    `problems` holds one sentence a broken rule, each starting with the dotted name of its field.
    """

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{len(self.problems)} problem(s) in the configuration:\n{lines}")


class BackendUnavailable(DsattnError, RuntimeError):
    """A backend cannot serve a call: names the operation and every unmet requirement."""


class CheckpointError(DsattnError, RuntimeError):
    """A checkpoint cannot be written or read."""


class DataError(DsattnError, RuntimeError):
    """Training text is missing or cannot be read."""


class TrainingStopped(DsattnError, RuntimeError):
    """Training cannot go on; names the last good checkpoint."""
