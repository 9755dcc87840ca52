import json

import pytest

from dsattn.cli.__main__ import main
from dsattn.cli.inspect import health_table
from dsattn.training.metrics import Health


def test_the_table_has_a_line_a_layer(run_dir, capsys):
    assert main(["inspect", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = lines[0].replace("worst head", "worst_head").split()
    assert head == ["layer", "recall", "random", "recency", "oracle", "top-1", "worst_head", "captured"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "mean"]
    assert "K = 16;" in lines[5]


def test_json_holds_what_was_measured(run_dir, tmp_path, capsys):
    path = tmp_path / "health.json"
    assert main(["inspect", str(run_dir), "--json", str(path)]) == 0
    table = capsys.readouterr().out
    assert main(["inspect", str(run_dir), "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    health = Health.from_dict(printed)
    assert printed == json.loads(path.read_text())
    assert health.top_k == 16
    assert health.rows > 0
    assert health_table(health) in table
    for layer in health.layers:
        assert 0 < layer.random < layer.oracle <= 1
        assert layer.recall <= layer.oracle + 1e-6


def test_given_text_is_measured_once(run_dir, text, tmp_path, capsys):
    one = tmp_path / "one.txt"
    one.write_text("x" * 127)  # and its eos: two packs of 64
    assert main(["inspect", str(run_dir), "--text", str(one), "--packs", "9", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 2 * (64 - 16)
    assert main(["inspect", str(run_dir), "--source", str(text), "--packs", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] <= 64 - 16


def test_held_out_text_is_the_default(run_dir, text, capsys):
    rows = {}
    for arguments in ([], ["--packs", "1"], ["--pack-tokens", "128"]):
        assert main(["inspect", str(run_dir), *arguments, "--json", "-"]) == 0
        rows[" ".join(arguments)] = json.loads(capsys.readouterr().out)["rows"]
    assert rows["--packs 1"] < rows[""] < rows["--pack-tokens 128"]


def test_text_shorter_than_a_pack_is_said(run_dir, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    assert main(["inspect", str(run_dir), "--text", str(short)]) == 0
    said = capsys.readouterr()
    assert "shorter than a pack of 64 tokens" in said.err
    assert "note: no row sees more than top_k=16 keys" in said.out
    assert "nan" not in said.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "RUN"),
        (["nowhere"], 1, "'nowhere' holds no checkpoint"),
        (["RUN", "--packs", "0"], 2, "--packs 0 is too small"),
        (["RUN", "--pack-tokens", "1"], 2, "--pack-tokens 1 is too small"),
        (["RUN", "--text", "no/such/file"], 1, "no/such/file"),
        (["RUN", "--device", "abacus"], 1, "abacus"),
    ],
)
def test_wrong_arguments(run_dir, arguments, code, message, capsys):
    given = [str(run_dir) if word == "RUN" else word for word in arguments]
    assert main(["inspect", *given]) == code
    assert message in capsys.readouterr().err


def test_missing_numbers_are_dashes():
    health = Health([], 16, 0, [], "no layer owns an indexer")
    assert health_table(health).endswith("note: no layer owns an indexer")
