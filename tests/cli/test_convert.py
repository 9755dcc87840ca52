"""`dsattn convert` on a run of the tiny recipe, and on what it makes of it."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsattn.cli.__main__ import main
from dsattn.training.data import held_out_packs
from dsattn.training.metrics import Health, indexer_health
from dsattn.training.runs import load_run
from dsattn.training.tokenizers import load_tokenizer

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")


def test_run_to_hugging_face_and_back(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, again, sums = tmp_path / "hf", tmp_path / "again", tmp_path / "sums.json"
    assert main(["convert", str(run_dir), str(hf), "--sha256", str(sums)]) == 0
    assert f"tensors of {run_dir} (dsattn) are in {hf} (hf)" in capsys.readouterr().out
    assert json.loads((hf / "config.json").read_text())["model_type"] == "deepseek_v32"
    assert main(["convert", str(hf), str(again)]) == 0
    assert main(["convert", str(again), str(tmp_path / "hf2"), "--sha256", str(tmp_path / "sums2.json")]) == 0
    assert sums.read_text() == (tmp_path / "sums2.json").read_text()
    one, two = ((folder / "model.safetensors").read_bytes() for folder in (hf, tmp_path / "hf2"))
    assert hashlib.sha256(one).digest() == hashlib.sha256(two).digest()


@pytest.mark.parametrize("to", ["hf", "megatron", "dsattn"])
def test_a_run_keeps_its_tokenizer_there_and_back(
    run_dir: Path, text: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No folder of Hugging Face says `bytes`: config.json has to."""
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert main(["convert", str(run_dir), there, "--to", to]) == 0
    assert main(["convert", there, back, "--to", "dsattn"]) == 0
    assert load_run(Path(back), "cpu")[1].data.tokenizer == "bytes"
    if to == "hf":
        assert main(["inspect", there, "--text", str(text), "--packs", "1", "--json", "-"]) == 0
        assert main(["convert", back, str(tmp_path / "like"), "--like", there]) == 0
        assert json.loads((tmp_path / "like/config.json").read_text())["dsattn_tokenizer"] == "bytes"
        capsys.readouterr()
        assert main(["generate", back, "--prompt", "the quick", "--tokens", "2"]) == 0
        assert capsys.readouterr().out.startswith("the quick")


def test_without_the_extra_hf_its_name_is_told(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    for arguments in (["flops", str(tmp_path)], ["convert", str(run_dir), str(tmp_path / "hf")]):
        assert main(arguments) == 1
        assert capsys.readouterr().err.endswith("need transformers: pip install 'dsattn[hf]'\n")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main(["convert", str(run_dir), str(tmp_path / "megatron"), "--to", "megatron"]) == 1
    assert "files of safetensors need that package: pip install 'dsattn[hf]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_full_disk_leaves_nothing_behind(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(values: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert main(["convert", str(run_dir), str(tmp_path / "hf")]) == 1
    assert "model.safetensors cannot be written: No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_trains_on_from_a_converted_checkpoint(run_dir: Path, text: Path, tmp_path: Path) -> None:
    hf, start, config = tmp_path / "hf", tmp_path / "start", tmp_path / "run"
    assert main(["convert", str(run_dir), str(hf)]) == 0
    assert main(["convert", str(hf), str(start)]) == 0
    words = """--model.num-layers 2 --model.hidden-size 32 --model.intermediate-size 48 --model.attention.heads 2
        --model.dsa.indexer.top-k 16 --data.pack-tokens 64 --train.eval-packs 2 --train.device cpu"""
    steps = [word for stage in range(3) for word in (f"--train.stages.{stage}.steps", "1")]
    source = ["--data.source", str(text), "--data.held-out", "0.3", "--train.run-dir", str(config)]
    arguments = ["train", "tiny", *words.split(), *steps, *source, "--train.init-from", str(start)]
    assert main([*arguments, "--train.fresh-indexer"]) == 1  # its indexers were trained
    assert main(arguments) == 0


def test_a_dense_model_is_converted_warmed_up_and_trained(
    text: Path, tiny_options: Callable[[Path, Path], list[str]], tmp_path: Path
) -> None:
    """The recipe of results/record_conversion.py, in seconds: what warm-up teaches shows in recall."""
    dense, hf, dsa, run = (tmp_path / name for name in ("dense", "hf", "dsa", "run"))
    modes = [word for index in range(3) for word in (f"--train.stages.{index}.mode", "dense")]
    more = ["--train.stages.0.steps", "40", "--train.stages.0.lr", "1e-2", "--model.layer-types", "dense", "dense"]
    assert main(["train", "tiny", *tiny_options(dense, text), *modes, *more]) == 0
    assert main(["convert", str(dense), str(hf)]) == 0
    assert json.loads((hf / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert (
        main(["convert", str(hf), str(dsa), *["--index-heads", "4", "--index-head-dim", "32", "--index-top-k", "16"]])
        == 0
    )
    assert main(["train", "deepseek_v32", "--init", str(hf)]) == 1
    words = f"""--init {dsa} --train.run-dir {run} --data.source {text} --data.held-out 0.3
        --data.pack-tokens 64 --train.eval-packs 4 --train.dtype float32 --train.device cpu --train.packs-per-step 2
        --train.stages.0.packs-per-step 2 --train.stages.0.steps 30 --train.stages.0.lr 1e-2
        --train.stages.1.packs-per-step 4 --train.stages.1.steps 4 --train.stages.1.lr 1e-3"""
    assert main(["train", "deepseek_v32", *words.split()]) == 0
    summary = json.loads((run / "summary.json").read_text())
    model, config = load_run(dsa, "cpu")
    data = load_run(run, "cpu")[1].data
    packs = held_out_packs(data, load_tokenizer("bytes"), 4)
    fresh = indexer_health(model, packs)
    assert load_run(run, "cpu")[1].model == config.model
    assert [stage["mode"] for stage in summary["stages"]] == ["warmup", "sparse"]
    assert summary["tokens"] == 64 * (30 * 2 + 4 * 4)
    warm, sparse = (Health.from_dict(stage["health"]) for stage in summary["stages"])
    assert warm.mean("recall") > fresh.mean("recall") + 0.03
    assert sparse.mean("recall") > fresh.mean("recall") + 0.03
    assert sparse.mean("captured") > 0.3


def test_dense_model_gets_indexers_of_the_size_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    options = ["--index-heads", "3", "--index-head-dim", "16", "--index-top-k", "5", "--seed", "4"]
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "run"), *options]) == 0
    assert "fresh indexers: 10 tensors (seed 4)" in capsys.readouterr().out

    from dsattn.integrations.sources import open_checkpoint

    opened = open_checkpoint(tmp_path / "run")
    indexer = opened.config.dsa.indexer
    assert (indexer.heads, indexer.head_dim, indexer.top_k, indexer.rope_dim) == (3, 16, 5, 16)
    assert opened.indexer_steps == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back")]) == 1
    assert "no family of transformers" in capsys.readouterr().err
    assert (
        main(["convert", str(tmp_path / "hf"), str(tmp_path / "b"), "--to", "hf", "--dense", "--dtype", "bfloat16"])
        == 0
    )
    assert "rounded: " in capsys.readouterr().out


def test_errors_have_their_codes(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "absent"), str(tmp_path / "x")]) == 1
    assert "is no checkpoint" in capsys.readouterr().err
    assert main(["convert", str(run_dir), str(tmp_path / "x"), "--shard-gb", "0"]) == 2
    assert "--shard-gb=0.0 must be above 0" in capsys.readouterr().err
    assert main(["convert", str(run_dir), str(run_dir)]) == 1
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["convert", str(run_dir), str(tmp_path / "x"), "--index-heads", "3"]) == 1
    assert "would throw them away" in capsys.readouterr().err
