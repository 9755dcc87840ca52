import json

import pytest

from dsattn.bench import records
from dsattn.bench.patterns import Pattern
from dsattn.bench.run import Refusal
from dsattn.cli import bench
from dsattn.cli.__main__ import main

FAST = ["--device", "cpu", "--seconds", "0", "--keys", "32"]


@pytest.fixture
def run(tmp_path, capsys):
    """Run `dsattn bench ARGUMENTS`: (exit code, records, what was printed, what went wrong)."""

    def run(op: str, *options: str):
        code = main(["bench", op, *FAST, "--out", str(tmp_path), *options])
        file = tmp_path / records.FILE
        return code, records.read([file]) if file.exists() else [], *capsys.readouterr()

    return run


def test_help_names_what_is_no_operation(capsys):
    """Each has options of its own, which nothing else leads to."""
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"`bench {name}" in text for name in bench._SECTIONS if name != "all")


def test_a_family_is_both_directions(run, tmp_path):
    code, found, text, _ = run("sparse_mla", "--commit", "abc", "--dirty")
    assert code == 0
    assert [(record["op"], record["deterministic"]) for record in found] == [
        ("sparse_mla.forward", False),
        ("sparse_mla.backward", False),
        ("sparse_mla.backward", True),
    ]
    assert {(record["commit"], record["dirty"]) for record in found} == {("abc", True)}
    assert text.count("sparse_mla.") == 3
    assert (tmp_path / bench.PLOT).read_text().startswith("<?xml")


def test_sizes_and_operands_are_options(run):
    options = ["--rows", "8", "--top-k", "4", "--order", "random", "recency", "--no-lengths", "--deterministic", "yes"]
    _, found, text, _ = run("sparse_mla.backward", *options)
    shapes = [record["shape"] for record in found]
    assert [(s["T"], s["S"], s["K"], s["order"], s["lengths"]) for s in shapes] == [
        (8, 32, 4, "random", False),
        (8, 32, 4, "recency", False),
    ]
    assert "random no lengths deterministic" in text


def test_peers_are_listed_with_the_reason(run):
    _, (record,), text, _ = run("select_topk", "--peers")
    assert set(record["peers"]) == set(record["ratio"]) == {"torch"}
    assert record["unavailable"] == {"cudnn": "not installed: No module named 'cudnn'"}
    assert "torch" in text
    assert "x ours)" in text
    assert "cudnn: not installed" in text


def test_a_layer_is_compared_with_dense_attention(run):
    code, found, text, _ = run("dsa_layer", "--peers", "--deterministic", "no", "--keys", "24")
    assert code == 0
    assert [record["shape"]["T"] for record in found] == [record["shape"]["S"] for record in found]
    assert "than dense attention" in text


def test_results_are_added_to(run):
    run("select_topk")
    assert len(run("select_topk")[1]) == 2


def test_a_refusal_is_exit_code_1_and_the_rest_goes_on(run, monkeypatch):
    real = bench.bench
    refuse = lambda name, *rest, **options: Refusal(name, 32, "it is wrong")  # noqa: E731
    monkeypatch.setattr(bench, "bench", lambda name, *r, **o: (refuse if "forward" in name else real)(name, *r, **o))
    code, found, _, problems = run("sparse_mla", "--deterministic", "no")
    assert code == 1
    assert [record["op"] for record in found] == ["sparse_mla.backward"]
    assert problems == "dsattn: sparse_mla.forward at 32 keys: it is wrong\n"


def test_plot_draws_records_again(run, tmp_path, capsys):
    run("select_topk")
    folder = tmp_path / "again"
    assert main(["bench", "plot", str(tmp_path / records.FILE), "--out", str(folder)]) == 0
    assert (folder / bench.PLOT).exists()
    assert "drawn in" in capsys.readouterr().out


def test_record_and_replay(run, run_dir, tmp_path, capsys):
    """A trained run's selections, measured on its held-out text, are operands of a benchmark at another size."""
    path = tmp_path / "selection.npz"
    assert main(["bench", "record", str(run_dir), "--out", str(path), "--device", "cpu", "--packs", "1"]) == 0
    assert "rows; a key stays for" in capsys.readouterr().out
    pattern = Pattern.load(path)
    assert pattern.rows > 0
    assert pattern.source == str(run_dir)
    _, (record,), _, _ = run("sparse_mla.forward", "--order", "recorded", "--pattern", str(path), "--keys", "90")
    assert (record["shape"]["order"], record["shape"]["S"]) == ("recorded", 90)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sparse_mal"], 2, "did you mean sparse_mla"),
        (["--order", "sorted"], 2, "sorted"),
        (["sparse_mla", "--shape", "gml"], 1, "shape='gml' must be one of"),
        (["sparse_mla", "--order", "recorded"], 1, "needs a pattern"),
        (["sparse_mla", "--top-k", "0"], 1, "top_k=0 must be at least 1"),
        (["sparse_mla", "--device", "gpu"], 1, "device='gpu' is no device; use auto, cpu or cuda"),
        (["select", "--device", "gpu"], 1, "device='gpu' is no device; use auto, cpu or cuda"),
        (["plot"], 2, "no files given"),
        (["plot", "missing.jsonl"], 1, "cannot be read"),
        (["record", "missing"], 1, "holds no checkpoint"),
    ],
)
def test_wrong_command_lines(arguments, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == code
    assert message in "".join(capsys.readouterr())


def test_records_hold_plain_json(run, tmp_path):
    run("select_keys")
    (line,) = (tmp_path / records.FILE).read_text().splitlines()
    assert json.loads(line)["backend"] == "reference"
