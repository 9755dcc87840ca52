import json

import pytest

from dsattn import accounting
from dsattn.cli.__main__ import main
from dsattn.training.recipes import RECIPES


def count(capsys, *arguments: str) -> dict:
    assert main(["flops", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_what_accounting_says(capsys):
    found = count(capsys, "tiny", "--tokens", "100", "--documents", "3", "--mode", "warmup")
    config = RECIPES["tiny"]().model
    lengths = [34, 33, 33]
    assert found["parameters"] == accounting.parameter_counts(config)
    assert found["modes"] == {
        mode: accounting.model_work(config, lengths, mode).flops for mode in ("dense", "warmup", "sparse", "frozen")
    }
    parts = found["parts"].values()
    assert sum(part[way]["flops"] for part in parts for way in part) == found["modes"]["warmup"]


def test_the_network_can_be_changed(capsys):
    assert count(capsys, "tiny", "--model.num-layers", "8")["parameters"]["mlp"] == (
        2 * count(capsys, "tiny")["parameters"]["mlp"]
    )


@pytest.mark.parametrize("name", RECIPES)
def test_tables(name, capsys):
    assert main(["flops", name]) == 0
    text = capsys.readouterr().out
    parts = accounting.model_parts(RECIPES[name]().model, [10], "sparse")
    assert all(part.name in text for part in parts)
    assert f"{sum(accounting.parameter_counts(RECIPES[name]().model).values()):,} parameters" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no recipe given"),
        (["tiney"], "did you mean tiny?"),
        (["tiny", "--documents", "0"], "--documents 0 must be between 1"),
        (["tiny", "--tokens", "3", "--documents", "4"], "--documents 4 must be between 1 and --tokens 3"),
        (["tiny", "--mode", "fast"], "fast"),
        (["tiny", "--model.num-layers", "0"], "model.num_layers=0 must be at least 1"),
    ],
)
def test_wrong_command_lines(arguments, message, capsys):
    assert main(["flops", *arguments]) == 2
    assert message in capsys.readouterr().err
