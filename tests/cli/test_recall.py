import json

from dsattn.cli.__main__ import main


def test_lines_of_drawn_inputs_and_of_a_run(run_dir, tmp_path, capsys):
    arguments = ["--device", "cpu", "--keys", "60", "--rows", "20", "--seconds", "0", "--out", str(tmp_path)]
    assert main(["bench", "select", "--precision", "fp8", "--run", str(run_dir), *arguments]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()] == printed
    names = [line["inputs"] for line in printed]
    assert names[:4] == ["gaussian", "gaussian hadamard", "outliers", "outliers hadamard"]
    assert any(" layer " in name for name in names[4:])
    assert all(0 < line["recall"]["bf16"] <= 1 for line in printed)


def test_wrong_command_lines(capsys, tmp_path):
    assert main(["bench", "select", "--precision", "fp4"]) == 2
    arguments = ["--keys", "40", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(["bench", "select", "--run", str(tmp_path / "none"), *arguments]) == 1
    assert "none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing is measured before the run is read"
