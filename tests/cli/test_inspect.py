import json

import pytest

from dsattn.cli.__main__ import main
from dsattn.cli.inspect import health_table, overlap_table
from dsattn.training.metrics import Health
from dsattn.training.overlap import LayerOverlap, Overlap


def test_the_table_has_a_line_a_layer(run_dir, capsys):
    assert main(["inspect", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = lines[0].replace("worst head", "worst_head").split()
    assert head == ["layer", "recall", "random", "recency", "oracle", "top-1", "worst_head", "captured"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "mean"]
    assert "K = 16;" in lines[5]
    head = next(number for number, line in enumerate(lines) if line.startswith("layer  recall  overlap"))
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["0", "1"]
    assert "of 2 indexers would keep every layer within 2.0 % of its recall: indexer_types full" in lines[-1]


def test_json_holds_what_was_measured(run_dir, tmp_path, capsys):
    path, plots = tmp_path / "health.json", tmp_path / "made" / "plots"
    assert main(["inspect", str(run_dir), "--json", str(path), "--plots", str(plots)]) == 0
    assert {file.stem for file in plots.glob("*.svg")} == {"recall", "recall_by_position", "distances", "overlap"}
    table = capsys.readouterr().out
    assert main(["inspect", str(run_dir), "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text())
    overlap = printed.pop("overlap")
    assert overlap["layers"][0]["recall"] == pytest.approx(printed["layers"][0]["recall"])
    assert overlap["layers"][1]["earlier"] == [0]
    health = Health.from_dict(printed)
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
        ([], 2, "MODEL"),
        (["nowhere"], 1, "'nowhere' holds no checkpoint"),
        (["RUN", "--packs", "0"], 2, "--packs 0 must be at least 1"),
        (["RUN", "--pack-tokens", "1"], 2, "--pack-tokens 1 must be at least 2"),
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
    assert overlap_table(Overlap([], 16, 0, 0.02, None, "why")) == "sharing: not measured, why"
    layers = [LayerOverlap(0, 0.5, [], [], []), LayerOverlap(3, 0.6, [0], [0.25], [0.59])]
    lines = overlap_table(Overlap(layers, 16, 9, 0.02, ["full", "full", "full", "shared"])).splitlines()
    assert lines[1].split() == ["0", "50.0", "%", "-", "-"]
    assert lines[-1].startswith("1 of 2 indexers")


def test_a_hugging_face_folder_is_measured_on_given_text(run_dir, text, tmp_path, capsys):
    """The same weights and text give the same numbers, whichever format they are read from."""
    pytest.importorskip("transformers")
    folder = tmp_path / "hf"
    assert main(["convert", str(run_dir), str(folder)]) == 0
    assert main(["inspect", str(folder)]) == 2
    assert "names no text; give --text" in capsys.readouterr().err
    found = []
    for model in (folder, run_dir):
        arguments = ["--text", str(text), "--packs", "2", "--pack-tokens", "64", "--json", "-"]
        assert main(["inspect", str(model), *arguments]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    fields = json.loads((folder / "config.json").read_text())
    del fields["dsattn_tokenizer"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert main(["inspect", str(folder), "--text", str(text)]) == 1  # as transformers would: there is no tokenizer
    assert "cannot be loaded" in capsys.readouterr().err
