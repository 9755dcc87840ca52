import json

import pytest

from dsattn import accounting
from dsattn.cli.__main__ import main
from dsattn.integrations.hf_config import to_hf
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


def test_lengths_stand_in_place_of_tokens(capsys):
    found = count(capsys, "tiny", "--lengths", "100", "1", "7")
    assert (found["tokens"], found["documents"]) == (108, 3)
    assert found["modes"]["sparse"] == accounting.model_work(RECIPES["tiny"]().model, [100, 1, 7], "sparse").flops


def test_megatrons_count_stands_beside_ours(capsys):
    model = RECIPES["tiny"]().model
    found = count(capsys, "tiny", "--lengths", "100", "7")
    assert found["megatron"] == {
        mode: accounting.megatron_flops(model, [100, 7], mode) for mode in ("dense", "sparse", "frozen")
    }
    pooled = ("--mode", "frozen", "--model.dsa.indexer.pool-size", "4")
    assert "dsa.indexer.pool_size=4 must be 1" in count(capsys, "tiny", *pooled)["no_megatron"]
    assert main(["flops", "tiny", *pooled]) == 0
    assert "dsa.indexer.pool_size=4 must be 1" in capsys.readouterr().out


def test_memory_is_that_of_each_stage(capsys):
    found = count(capsys, "tiny", "--parallel.pp", "2", "--recompute", "full", "--tokens", "512")["memory"]
    assert len(found) == 2
    assert all(sum(stage["parts"].values()) == stage["peak"] for stage in found)
    less = count(capsys, "tiny", "--parallel.pp", "2", "--parallel.cp", "2", "--recompute", "full", "--tokens", "512")
    assert less["memory"][0]["peak"] < found[0]["peak"]


def test_a_hugging_face_configuration(tmp_path, capsys):
    config = RECIPES["glm_5_2"]().model
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    for given in (tmp_path, tmp_path / "config.json"):
        found = count(capsys, str(given))
        assert found["parameters"] == accounting.parameter_counts(config)
        assert found["tokens"] == 32768


def test_dense_ones_get_indexers(tmp_path, capsys):
    fields = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "vocab_size": 300, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert count(capsys, str(tmp_path))["parameters"]["indexer"] > 0
    for damaged in ("{", "[]"):
        (tmp_path / "config.json").write_text(damaged)
        assert main(["flops", str(tmp_path)]) == 2
        assert "is no Hugging Face configuration" in capsys.readouterr().err
    assert main(["flops", str(tmp_path / "gone.json")]) == 2


def test_a_plot_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "cost.svg"
    assert main(["flops", "tiny", "--plot", str(file)]) == 0
    assert b"</svg>" in file.read_bytes()
    assert "fewer FLOPs than dense from" in capsys.readouterr().out


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
        (["tiny", "--tokens", "-1"], "--tokens -1 must be at least 1"),
        (["tiny", "--tokens", "3", "--documents", "4"], "--documents 4 must be between 1 and --tokens 3"),
        (["tiny", "--mode", "fast"], "fast"),
        (["tiny", "--lengths", "3", "-1"], "--lengths"),
        (["tiny", "--lengths", "3", "--tokens", "7"], "leave out --tokens and --documents"),
        (["tiny", "--lengths", "3", "--documents", "2"], "leave out --tokens and --documents"),
        (["tiny", "--parallel.tp", "3"], "parallel.tp=3 must divide the attention's heads=4"),
        (["tiny", "--model.num-layers", "0"], "model.num_layers=0 must be at least 1"),
    ],
)
def test_wrong_command_lines(arguments, message, capsys):
    assert main(["flops", *arguments]) == 2
    assert message in capsys.readouterr().err
