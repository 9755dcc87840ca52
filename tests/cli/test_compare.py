import json

from dsattn.cli.__main__ import main


def test_a_run_beside_itself(run_dir, tmp_path, capsys):
    plot = tmp_path / "runs.svg"
    assert main(["compare", str(run_dir), str(run_dir / "." / ".." / run_dir.name), "--plot", str(plot)]) == 0
    assert "largest difference" in capsys.readouterr().out
    assert plot.read_bytes().lstrip().startswith(b"<?xml")


def test_json(run_dir, capsys):
    assert main(["compare", str(run_dir), str(run_dir / ".." / run_dir.name), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["difference"] == 0 for row in rows)
    assert len(rows) == 2 * len({row["stage"] for row in rows})


def test_one_run_is_an_error(run_dir, capsys):
    assert main(["compare", str(run_dir)]) == 1
    assert "must name two or more folders" in capsys.readouterr().err
