"""What dispatch may know of a call."""

import pytest
import torch

from dsattn.backends import Call, size_class


@pytest.mark.parametrize(
    ("keys", "name"), [(0, "8K"), (8192, "8K"), (8193, "64K"), (65536, "64K"), (65537, "above"), (2**31, "above")]
)
def test_size_classes(keys: int, name: str) -> None:
    assert size_class(keys) == name


def test_call_of_a_tensor() -> None:
    call = Call.of(torch.zeros(3, 5, dtype=torch.bfloat16), 9000, heads=5, top_k=7, deterministic=True)
    assert call == Call(dtype="bfloat16", heads=5, top_k=7, size_class="64K", deterministic=True)
    assert hash(call) == hash(
        Call.of(torch.ones(9, 5, dtype=torch.bfloat16), 9001, heads=5, top_k=7, deterministic=True)
    )


def test_the_dtypes_of_a_call_meet_above() -> None:
    half, single = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3)
    assert Call.of((half, half), 9).dtype == "bfloat16"
    assert Call.of((half, single), 9).dtype == "float32"
    assert Call.of((half, half.half()), 9).dtype == "float32"
    assert Call.of(half, 9, (single, single.half())).dtype == "bfloat16"
    assert Call.of(half, 9, (single, single.double())).dtype == "float64"
