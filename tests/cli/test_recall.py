import json

from dsattn.cli.__main__ import main


def test_lines_of_drawn_inputs_and_of_a_run(run_dir, tmp_path, capsys):
    arguments = ["--device", "cpu", "--keys", "60", "--rows", "20", "--seconds", "0", "--out", str(tmp_path)]
    options = ["--precision", "fp8", "--run", str(run_dir), "--commit", "abc", "--peers"]
    assert main(["bench", "select", *options, *arguments]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()]
    assert len(printed) == 1 + len(lines) * 4, "a line each, and one of each peer"
    names = [line["inputs"] for line in lines]
    assert names[:4] == ["gaussian", "gaussian hadamard", "outliers", "outliers hadamard"]
    assert any(" layer " in name for name in names[4:])
    assert all(0 < line["recall"]["bf16"] <= 1 for line in lines)
    assert {(line["commit"], line["dirty"], line["precision"]) for line in lines} == {("abc", False, "fp8")}


def test_what_cannot_serve_is_told_and_exit_code_1(tmp_path, capsys):
    arguments = ["--device", "cpu", "--keys", "40", "--out", str(tmp_path), "--backend", "deep_gemm"]
    assert main(["bench", "select", *arguments]) == 1
    assert capsys.readouterr().err.count("deep_gemm needs a CUDA GPU") == 4
    assert not list(tmp_path.iterdir())


def test_wrong_command_lines(capsys, tmp_path):
    assert main(["bench", "select", "--precision", "fp4"]) == 2
    arguments = ["--keys", "40", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(["bench", "select", "--run", str(tmp_path / "none"), *arguments]) == 1
    assert "none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing is measured before the run is read"
