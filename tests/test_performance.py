"""docs/performance.md, README.md and results/layer.svg say what the records say."""

import importlib
import json
import re
import xml.etree.ElementTree as xml
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]
MACHINE = {"gpu": "NVIDIA H200", "dirty": False, "commit": "0123456789", "date": "2026-11-30"}


@pytest.fixture
def script(monkeypatch):
    """A module of results/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return importlib.import_module


@pytest.fixture
def made(script, monkeypatch, tmp_path):
    """Write records, which are read in place of those in results/."""
    monkeypatch.setattr(script("newest"), "RESULTS", tmp_path)

    def write(**files):
        for name, lines in files.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return write


def kernel(op="dsa_layer", keys=8192, ms=10.0, ratio=None, **rest):
    rows = keys if op == "dsa_layer" else 4096
    shape = {"T": rows, "S": keys, "H": rest.pop("heads", 64), "H_I": 32, "K": 2048, "order": None, "lengths": None}
    line = {"op": op, "backend": "hopper", "shape": shape, "deterministic": False, "ms": {"median": ms}, **MACHINE}
    peers = {name: ms * one for name, one in (ratio or {}).items()}
    return line | {"error": {"max": 0.1}, "peak_bytes": 2**30, "peers": peers, "ratio": ratio or {}} | rest


def test_the_page_is_made_from_the_records(script):
    written = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert written == script("performance").page(), "run: python results/performance.py > docs/performance.md"


def test_the_readmes_figures_are_those_of_the_records(script):
    written = (ROOT / "README.md").read_text(encoding="utf-8")
    assert written == script("readme").rewritten(written), "run: python results/readme.py"
    stale = written.replace("| dsattn (", "| dsattn, 1 (")
    assert script("readme").rewritten(stale) == written != stale


def test_the_list_of_records_tells_which_are_missing() -> None:
    rows = re.findall(r"^\| (\S.*?) \| (.*?) \|", (ROOT / "results" / "README.md").read_text(), re.MULTILINE)[2:]
    files = {name: told for names, told in rows for name in names.split(", ")}
    assert "kernels.jsonl" in files
    for name, told in files.items():
        assert (ROOT / "results" / name).exists() != ("no record yet" in told), name


def test_the_layers_picture_is_drawn_from_the_records(script):
    newest, layer = script("newest"), script("layer")
    lines = layer.layer_lines(newest.latest(newest.read("kernels.jsonl")))
    picture = (ROOT / "results" / "layer.svg").read_bytes()
    assert shown(picture) == json.loads(json.dumps(lines)), "run: python results/layer.py > results/layer.svg"
    drawn = layer.draw(lines)
    assert shown(drawn) == shown(picture)
    if f"Matplotlib v{matplotlib.__version__}," in picture.decode():
        assert drawn == picture


def shown(picture):
    """The data in a picture's description."""
    (found,) = xml.fromstring(picture).iter("{http://purl.org/dc/elements/1.1/}description")
    return json.loads(found.text)


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ((0.5, 2.0), "from 11,600 tokens on"),
        ((1.0, 2.0), "at every length measured"),
        ((2.0, 0.9), "not at the greatest length"),
    ],
)
def test_a_layer_and_its_crossovers(script, ratios, told):
    layer = script("layer")
    times = [kernel(keys=size, ratio={"torch": one}) for size, one in zip((8192, 16384), ratios, strict=True)]
    others = [kernel(backend="composed", ms=1.0), kernel(heads=128, ms=1.0), kernel("select_keys")]
    lines = layer.layer_lines([*times, *others])
    assert lines[layer.OURS] == [(8192, 10.0), (16384, 10.0)]
    assert lines[layer.DENSE] == [(8192, 10 * ratios[0]), (16384, 10 * ratios[1])]
    assert layer.crossed(lines) == f"A DSA layer on Hopper is faster than dense attention {told}."
    assert told.encode() in layer.draw(lines)


def test_the_readme_says_where_a_peer_is_ahead(script, made):
    """A row is of one commit; where a record or a peer is not there is a dash."""
    old = {"commit": "abcdef0", "ms": 1.0}
    made(
        kernels=[
            kernel("select_keys", 4096, **old),
            kernel("select_keys", 32768, **old),
            kernel("select_keys", 32768, 30.0, {"cudnn": 0.9, "tilelang": 12.0}),
            kernel("select_keys", 131072, 120.4, {"cudnn": 1.5}),
        ]
    )
    newest = script("newest")
    *_, line = script("readme").kernels(newest.latest(newest.read("kernels.jsonl")))
    assert line == (
        "| `select_keys`, 32 indexer heads, Hopper | - | 30.0 | 120 | cuDNN -, 0.90, 1.50; TileLang -, 12, - "
        "| cuDNN at 32K, by 10% at most | 0123456 |"
    )


def test_the_readme_has_a_row_for_runs_that_were_recorded(script, made):
    stages = [{"tokens_per_second": 1000.0 * speed, "mfu": speed / 100} for speed in (3, 2, 1)]
    run = {"recipe": "small", "shape": {"T": 32768}, "stages": stages, **MACHINE}
    runs = [run | {"backend": {"sparse_mla.forward": name}} for name in ("triton", "hopper")]
    made(training=[*runs, runs[0] | {"stages": [one | {"mfu": None} for one in stages]}])
    readme = script("readme")
    assert readme.trained("small", 8192, "hopper") is None
    row = readme.trainings(32768, {name: readme.trained("small", 32768, name) for name in ("triton", "hopper")})
    assert row[0].startswith("`small`, 32K-token packs, portable kernels; Hopper's kernels: tokens/s (MFU)")
    assert row[2] == "; ".join(["3,000 (3.0%), 2,000 (2.0%), 1,000 (1.0%)"] * 2)


def test_two_gpus_have_a_table(script, made):
    shape = {"T": 65536, "dtype": "bfloat16", "layers": 18}
    one = {"case": "one", "shape": shape, "tokens_per_second": 1000.0, "peak_bytes": [2**31], "communication": None}
    talk = {"kernel_ms": 200.0, "waiting_ms": 4.0, "moving_ms": 20.0, "moving_covered_ms": 10.0}
    talks = [talk, talk | {"waiting_ms": 0.0}]
    two = {"case": "cp 2", "peak_bytes": [2**30, 2**30], "communication": talks, "speedup": 1.5}
    two |= {"apart": {"losses": 1e-5, "kl": 2e-5, "grad_norms": 3e-3}, "tokens_per_second": 1500.0}
    made(kernels=[], training=[], parallel=[one | MACHINE, one | two | MACHINE | {"speedup": 9.9}, one | two | MACHINE])
    page = script("performance").page()
    assert "| one | 65,536 | bfloat16 | 18 | 1,000 |  | 2.0 |  |  |  | 2026-11-30, 0123456 |" in page
    assert "| cp 2 | 65,536 | bfloat16 | 18 | 1,500 | 1.50 | 1.0, 1.0 | 2.0%, 0.0% | 10.0% (50%), 10.0% (50%) |" in page
    assert " | 1e-05, 2e-05, 0.003 |" in page
    assert "9.9" not in page


def test_low_precision_and_full_errors_have_sections(script, made, tmp_path):
    """Made records: what a session without such records would not see."""
    shape = {"T": 4096, "S": 32768, "H": 64, "H_I": 32, "K": 2048, "selection": "holes"}
    low = {"op": "select_keys", "backend": "triton", "inputs": "gaussian", "precision": "fp8", "shape": shape}
    low |= {"ms": {"median": 2.0}, "recall": {"bf16": 0.98, "fp32": 0.97}, "least": {"bf16": 0.9, "fp32": 0.8}}
    low |= {"error": {"max": 1e-4}, "peers": {"deep_gemm": 1.5}, "ratio": {"deep_gemm": 0.75}, "deterministic": False}
    bar = {"max": 1.0, "max_limit": 2.0, "mean": 1.0, "mean_limit": 4.0, "similarity": 0.9999, "problems": []}
    full = {"op": "sparse_mla", "backend": "hopper", "deterministic": True, "shape": shape, "passed": True}
    full |= {"error": {"out": bar, "dk": {**bar, "mean": 3.0}}}
    made(
        kernels=[],
        training=[],
        recall=[low | MACHINE, low | MACHINE | {"dirty": True, "ms": {"median": 9.0}}],
        full_errors=[full | MACHINE, full | MACHINE | {"passed": None, "backend": "triton"}],
    )
    page = script("performance").page()
    assert "| gaussian | 32,768 | T=4096, H=64, H_I=32, K=2048, fp8 | triton | 2.00 | 0.9800 (0.9000) |" in page
    assert "DeepGEMM (fp8) is ahead of `triton` in `select_keys` at S=32,768 (0.75 x)" in page
    assert "| operation | S | H | H_I | selection | hopper deterministic |" in page
    assert "| sparse_mla | 32,768 | 64 | 32 | holes | dk 0.50, 0.75; 1 - 0.0001 |" in page
    (tmp_path / "recall.jsonl").unlink()
    assert "low precision" not in script("performance").page()
