"""Which folders are checkpoints, and what they say of themselves."""

import dataclasses
import json
from pathlib import Path

import pytest

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, RunConfig
from dsattn.errors import CheckpointError
from dsattn.integrations.checkpoints import ConvertOptions, convert
from dsattn.integrations.sources import INDEXER_STEPS, MEGATRON, format_of, open_checkpoint, open_run, read_config
from dsattn.integrations.stored import digests
from dsattn.model import Decoder
from dsattn.training import checkpoint

pytest.importorskip("transformers")

MODEL = ModelConfig(
    hidden_size=16,
    num_layers=2,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    meta = {"config": dataclasses.asdict(RunConfig(model=MODEL)), "indexer_steps": 12, "stage": 0}
    for step in (3, 9):
        state = {"model": Decoder(MODEL).state_dict(), "optimizer": None, "progress": {"tokens": step}}
        checkpoint.save(tmp_path / "run", step, state, keep=2, meta=meta)
    return tmp_path / "run"


def test_every_format_is_told_apart_and_keeps_the_steps(run_dir: Path, tmp_path: Path) -> None:
    wanted = digests(open_checkpoint(run_dir).tensors)
    assert format_of(run_dir) == "dsattn"
    for to in ("hf", "megatron"):
        convert(run_dir, tmp_path / to, ConvertOptions(to=to))
        assert format_of(tmp_path / to) == to
        opened = open_checkpoint(tmp_path / to)
        assert (opened.format, opened.indexer_steps, opened.config) == (to, 12, MODEL)
        assert digests(opened.tensors) == wanted
    assert (tmp_path / "megatron" / MEGATRON).is_file()
    assert json.loads((tmp_path / "hf/config.json").read_text())[INDEXER_STEPS] == 12


def test_a_run_is_its_newest_checkpoint_or_the_one_that_is_named(run_dir: Path) -> None:
    old, new = (digests(open_run(path)[0]) for path in checkpoint.list_checkpoints(run_dir))
    assert digests(open_checkpoint(run_dir).tensors) == new != old
    assert digests(open_checkpoint(checkpoint.list_checkpoints(run_dir)[0]).tensors) == old


def test_a_model_from_elsewhere_counts_as_trained(run_dir: Path, tmp_path: Path) -> None:
    convert(run_dir, tmp_path / "hf", ConvertOptions(to="hf"))
    fields = read_config(tmp_path / "hf")
    del fields[INDEXER_STEPS]
    (tmp_path / "hf/config.json").write_text(json.dumps(fields))
    assert open_checkpoint(tmp_path / "hf").indexer_steps == 1


def test_weights_of_another_configuration_are_an_error(tmp_path: Path) -> None:
    other = dataclasses.replace(MODEL, num_layers=1)
    meta = {"config": dataclasses.asdict(RunConfig(model=other)), "indexer_steps": 0, "stage": 0}
    checkpoint.save(tmp_path / "run", 0, {"model": Decoder(MODEL).state_dict()}, keep=1, meta=meta)
    with pytest.raises(CheckpointError, match="does not hold the weights of its own configuration"):
        open_checkpoint(tmp_path / "run")


def test_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            format_of(path)
