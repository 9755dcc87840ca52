import math

import numpy as np
import pytest
import torch

from dsattn.config import RopeConfig
from dsattn.errors import InputError
from dsattn.nn.rope import RotaryTable, inverse_frequencies, rotary_table, rotate


def table_at(*positions: int, lanes: int = 4, rope: RopeConfig | None = None, dtype=torch.float64) -> RotaryTable:
    return rotary_table(torch.tensor(positions), rope or RopeConfig(), lanes, dtype=dtype)


@pytest.mark.parametrize(("interleaved", "dot"), [(True, math.cos(1)), (False, math.cos(0.01))])
def test_pairing_is_told_apart_by_one_product(interleaved, dot):
    x = torch.tensor([[0.0, 1, 0, 0]] * 2, dtype=torch.float64)
    q, k = rotate(x, table_at(1, 0), interleaved=interleaved)
    assert (q @ k).item() == pytest.approx(dot, abs=1e-12)


def test_interleaved_lanes_keep_their_stored_order():
    x = torch.randn(5, 3, 6, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 7, 100_000])
    angle = positions.double()[:, None] * 10_000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    turned = torch.view_as_complex(x.reshape(5, 3, 3, 2)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    got = rotate(x, rotary_table(positions, RopeConfig(), 6, dtype=x.dtype), interleaved=True)
    torch.testing.assert_close(got, torch.view_as_real(turned).reshape(5, 3, 6), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
def test_first_and_last_lanes(interleaved):
    x = torch.randn(3, 10, dtype=torch.float64)
    table = table_at(3, 4, 5)
    first = rotate(x, table, interleaved=interleaved)
    last = rotate(x, table, interleaved=interleaved, first=False)
    assert torch.equal(first[:, 4:], x[:, 4:])
    assert torch.equal(last[:, :6], x[:, :6])
    assert torch.equal(first[:, :4], rotate(x[:, :4], table, interleaved=interleaved))
    assert torch.equal(last[:, 6:], rotate(x[:, 6:], table, interleaved=interleaved))
    assert not torch.allclose(first[:, :4], x[:, :4])


def test_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 8, dtype=torch.float64)

    def dot(m: int, n: int) -> torch.Tensor:
        a = rotate(q[None], table_at(m, lanes=8), interleaved=True)
        return (a * rotate(k[None], table_at(n, lanes=8), interleaved=True)).sum()

    torch.testing.assert_close(dot(7, 3), dot(1007, 1003), rtol=0, atol=1e-9)
    assert abs(dot(7, 3) - dot(8, 3)) > 1e-4


def test_bf16_is_rotated_in_fp32():
    x = torch.randn(64, 8).bfloat16()
    positions = torch.arange(1000, 1064)
    got = rotate(x, rotary_table(positions, RopeConfig(), 8, dtype=x.dtype), interleaved=False)
    want = rotate(x.double(), rotary_table(positions, RopeConfig(), 8, dtype=torch.float64), interleaved=False)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want.bfloat16(), rtol=2**-7, atol=2**-9)
    # Tables of bf16 angles would be off by whole radians here.
    assert (got.double() - want).abs().max() < 0.02


def yarn_frequencies_by_the_paper(rope: RopeConfig, lanes: int) -> np.ndarray:
    """theta_d blended by how often lane d turns in the original context, the ramp taken over whole lanes."""
    index = np.arange(lanes // 2)
    theta = rope.base ** (-2 * index / lanes)

    def lane(turns: float) -> float:  # solves original * base^(-2d/lanes) / 2 pi = turns for d
        return lanes / 2 * np.log(rope.original_max_position / (2 * np.pi * turns)) / np.log(rope.base)

    low, high = max(np.floor(lane(rope.beta_fast)), 0), min(np.ceil(lane(rope.beta_slow)), lanes - 1)
    gamma = 1 - np.clip((index - low) / (high - low), 0, 1)
    return (1 - gamma) * theta / rope.factor + gamma * theta


def test_yarn_frequencies():
    rope = RopeConfig(scaling="yarn", factor=40.0)
    got = inverse_frequencies(rope, 64, dtype=torch.float64).numpy()
    plain = inverse_frequencies(RopeConfig(), 64, dtype=torch.float64).numpy()
    np.testing.assert_allclose(got, yarn_frequencies_by_the_paper(rope, 64), rtol=1e-12)
    np.testing.assert_allclose(got[0], plain[0], rtol=0)
    np.testing.assert_allclose(got[-1], plain[-1] / 40, rtol=1e-12)
    assert (np.diff(got) < 0).all()


def test_yarn_survives_a_ramp_of_no_width():
    rope = RopeConfig(scaling="yarn", original_max_position=64, beta_fast=2.0, beta_slow=1.999)
    assert inverse_frequencies(rope, 4).isfinite().all()


def test_concentration_multiplies_cos_and_sin():
    rope = RopeConfig(scaling="yarn", factor=40.0, mscale=1.0)
    assert table_at(0, rope=rope).cos[0, 0].item() == pytest.approx(1.3688879454, abs=1e-9)
    both = RopeConfig(scaling="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    assert table_at(0, rope=both).cos[0, 0].item() == 1.0


def test_no_rotated_lanes_change_nothing():
    x = torch.randn(3, 2, 8)
    table = table_at(0, 1, 2, lanes=0, rope=RopeConfig(scaling="yarn"))
    assert rotate(x, table, interleaved=True) is x


@pytest.mark.parametrize(("rows", "width"), [(2, 8), (3, 2)])
def test_a_table_that_does_not_fit_is_an_error(rows, width):
    with pytest.raises(InputError, match=f"3 rows and 4 lanes, x has {rows} rows and {width} lanes"):
        rotate(torch.zeros(rows, width), table_at(0, 1, 2), interleaved=True)


def test_meta_device():
    table = rotary_table(torch.arange(6, device="meta"), RopeConfig(scaling="yarn"), 4, dtype=torch.bfloat16)
    out = rotate(torch.empty(6, 2, 8, device="meta", dtype=torch.bfloat16), table, interleaved=True)
    assert (out.shape, out.dtype, table.cos.dtype) == ((6, 2, 8), torch.bfloat16, torch.float32)
