"""What holds for the whole process: settings, and what is asked of them."""

import dataclasses
import math

import pytest
import torch

from dsattn.backends import Settings, contribution_dtype, current, resolve_deterministic, scratch_bytes, settings
from dsattn.errors import InputError


def test_every_setting_can_be_set() -> None:
    changed = {"strict": True, "deterministic": True, "first_use_checks": False}
    changed |= {"fp32_contributions": True, "scratch_bytes": 2**20}
    assert changed.keys() == {field.name for field in dataclasses.fields(Settings)}
    assert all(value != getattr(Settings(), name) for name, value in changed.items())
    with settings(**changed) as now:
        assert dataclasses.asdict(now) == dataclasses.asdict(current()) == changed
        with settings():
            assert current() == now


def test_settings_nest_and_come_back() -> None:
    assert not resolve_deterministic(None)
    with settings(deterministic=True) as outer:
        assert resolve_deterministic(None)
        assert not resolve_deterministic(False)
        with settings(strict=True) as inner:
            assert (inner.strict, inner.deterministic) == (True, True)
            with settings(deterministic=False):
                assert not resolve_deterministic(None)
            assert resolve_deterministic(None)
        assert (outer.strict, outer.deterministic) == (False, True)
    assert not resolve_deterministic(None)


def test_settings_come_back_after_an_exception() -> None:
    with pytest.raises(KeyError), settings(strict=True, deterministic=True):
        raise KeyError
    assert current() == Settings()


def test_first_use_is_checked_unless_switched_off() -> None:
    assert current().first_use_checks
    with settings(first_use_checks=False):
        assert not current().first_use_checks
        with settings(strict=True):
            assert not current().first_use_checks
    assert current().first_use_checks


def test_determinism_follows_torch() -> None:
    torch.use_deterministic_algorithms(True)
    assert resolve_deterministic(None)
    assert not resolve_deterministic(False)
    with settings(deterministic=False):  # torch's switch is the user's too: it is not overruled by silence
        assert resolve_deterministic(None)


@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float16, torch.float32])
def test_contributions_are_in_the_dtype_of_the_operands_unless_asked_for(operands: torch.dtype) -> None:
    assert contribution_dtype(operands) == operands
    with settings(fp32_contributions=True):
        assert contribution_dtype(operands) == torch.float32


def test_scratch_is_bounded_by_the_smaller_budget() -> None:
    assert (scratch_bytes(), scratch_bytes(2**30)) == (2**31, 2**30)
    with settings(scratch_bytes=2**20):
        assert (scratch_bytes(), scratch_bytes(2**30), scratch_bytes(7)) == (2**20, 2**20, 7)


@pytest.mark.parametrize("size", [0, -1, math.inf, math.nan, 2.5, True, "2 GiB"])
def test_scratch_must_be_positive_and_finite(size: object) -> None:
    message = r"scratch_bytes=.* must be positive and finite, .* 2\*\*31 is the default"
    with pytest.raises(InputError, match=message), settings(scratch_bytes=size):
        raise AssertionError
    assert current() == Settings()
