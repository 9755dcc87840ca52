"""Errors are found by their family and by the builtin they stand for."""

import pytest

from dsattn import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InputError, ValueError),
        (errors.ConfigError, ValueError),
        (errors.BackendUnavailable, RuntimeError),
        (errors.CheckpointError, RuntimeError),
        (errors.DataError, RuntimeError),
        (errors.TrainingStopped, RuntimeError),
    ],
)
def test_families(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, errors.DsattnError)
    assert issubclass(error, builtin)


def test_every_error_is_in_the_picture() -> None:
    assert errors.__doc__ is not None
    made = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert set(made) == {line.strip("│├└─ ").split(" ")[0] for line in errors.__doc__.splitlines()[2:] if line.strip()}


def test_config_error_lists_every_problem() -> None:
    error = errors.ConfigError(["a.b=1 must be 2", "c=3 must be 4"])
    assert isinstance(error, errors.InputError)
    assert error.problems == ("a.b=1 must be 2", "c=3 must be 4")
    assert str(error) == "2 problem(s) in the configuration:\n  - a.b=1 must be 2\n  - c=3 must be 4"
