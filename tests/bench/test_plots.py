import math
import sys

import pytest

from dsattn.bench.plots import DENSE, crossover, draw, panels
from dsattn.errors import InputError


def record(keys: int, ms: float, op: str = "dsa_layer", **rest) -> dict:
    shape = {"T": keys, "S": keys, "H": 64, "K": 2048, "H_I": 32, "order": None, "lengths": None}
    return {"op": op, "backend": "triton", "shape": {**shape, **rest.pop("shape", {})}, "ms": {"median": ms}, **rest}


LAYERS = [
    record(keys, 2.0 * keys, peers={"torch": keys**2 / 1000, "cudnn": 3.0 * keys}) for keys in (1000, 4000, 16000)
]


def test_lines_of_a_layer():
    (lines,) = panels(LAYERS).values()
    assert lines["dsattn triton"] == [(1000, 2000.0), (4000, 8000.0), (16000, 32000.0)]
    assert lines[DENSE] == [(1000, 1000.0), (4000, 16000.0), (16000, 256000.0)]
    assert set(lines) == {"dsattn triton", DENSE, "cudnn"}


def test_crossover_is_where_power_laws_meet():
    (lines,) = panels(LAYERS).values()
    assert crossover(lines["dsattn triton"], lines[DENSE]) == pytest.approx(2000)
    assert crossover(lines["cudnn"], lines[DENSE]) == pytest.approx(3000)


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [
        ([(1, 1.0), (2, 1.0)], [(1, 2.0), (2, 2.0)], 1.0),
        ([(1, 3.0), (2, 3.0)], [(1, 2.0), (2, 2.0)], None),
        ([(1, 1.0)], [(2, 2.0)], None),
        ([], [], None),
        # Faster, slower, faster again: what counts is from where on it stays faster.
        ([(1, 1.0), (2, 4.0), (4, 1.0)], [(1, 2.0), (2, 2.0), (4, 2.0)], math.sqrt(8)),
    ],
)
def test_crossover_edges(ours, other, expected):
    found = crossover(ours, other)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_operations_shapes_and_operands_are_told_apart():
    found = panels(
        [
            record(8, 1.0, "sparse_mla.backward", shape={"order": "random", "lengths": False}, deterministic=True),
            record(8, 2.0, "sparse_mla.backward", shape={"order": "ascending", "lengths": True}),
            record(8, 3.0, "sparse_mla.backward", shape={"order": "ascending", "lengths": True, "H": 128}),
            record(8, 4.0, "sparse_mla.backward", shape={"order": "ascending", "lengths": True}),
        ]
    )
    first, second = found.values()
    assert first == {"dsattn triton deterministic, random, no lengths": [(8, 1.0)], "dsattn triton": [(8, 4.0)]}
    assert second == {"dsattn triton": [(8, 3.0)]}


def test_records_of_older_formats_are_drawn_too():
    assert panels([{"op": "select_topk", "backend": "triton", "shape": {"T": 1, "S": 2, "K": 3}, "ms": {"median": 1}}])


def test_draws_svg():
    svg = draw([*LAYERS, record(8, 1.0, "select_topk")]).decode()
    assert svg.startswith("<?xml")
    for text in ("dsattn triton is faster from 2,000 tokens on", "cudnn is faster from 3,000", DENSE, "select_topk"):
        assert text in svg


def test_refuses_nothing_and_a_missing_library(monkeypatch):
    with pytest.raises(InputError, match="there are none to draw"):
        draw([])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'dsattn\[report\]'"):
        draw(LAYERS)
