"""Which checkpoint a run goes on from, whose weights it begins with, and how a saved configuration comes back."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    ParallelConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.errors import CheckpointError, InputError
from dsattn.model.decoder import Decoder
from dsattn.model.stage import DecoderStage, cut
from dsattn.parallel.apply import Stages
from dsattn.training import checkpoint, state
from dsattn.training.recipes import RECIPES
from dsattn.training.runs import (
    begin_from,
    checkpoint_to_resume,
    config_from_dict,
    find_checkpoint,
    init_weights,
    load_run,
    pick_device,
    write_json,
)

MODEL = ModelConfig(
    hidden_size=8,
    num_layers=1,
    intermediate_size=8,
    attention=MLAConfig(heads=1, q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=1, head_dim=4, top_k=2, rope_dim=2)),
)


def _config(run_dir: Path, **train: object) -> RunConfig:
    stages = (StageConfig(mode="dense", steps=4), StageConfig(mode="sparse", steps=4))
    settings = {"stages": stages, "run_dir": str(run_dir), **train}
    return RunConfig(model=MODEL, train=TrainConfig(**settings))  # pyright: ignore[reportArgumentType]


def _saved(config: RunConfig, *, stage: int = 0, indexer_steps: int = 0) -> tuple[Decoder, Path]:
    model = Decoder(config.model)
    meta = {"config": dataclasses.asdict(config), "stage": stage, "indexer_steps": indexer_steps, "recipe": None}
    tree = {"model": model.state_dict(), "progress": {"step": 3}}
    return model, checkpoint.save(Path(config.train.run_dir), 3, tree, keep=2, meta=meta)


@pytest.mark.parametrize("name", RECIPES)
def test_a_configuration_survives_json(name: str) -> None:
    config = RECIPES[name]()
    assert config_from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_the_kind_of_attention_survives_json() -> None:
    indexer = IndexerConfig(query_from="hidden", rope_dim=0)
    model = ModelConfig(attention=GQAConfig(), dsa=DSAConfig(indexer=indexer), layer_types=("dsa", "dense") * 2)
    config = RunConfig(model=model)
    assert config_from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_an_unknown_field_is_an_error() -> None:
    tree = dataclasses.asdict(RunConfig())
    tree["model"]["colour"] = "red"
    with pytest.raises(CheckpointError, match="does not fit this version"):
        config_from_dict(tree)


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(InputError, match=r"^train\.device='toaster'"):
        pick_device("toaster", "train.device")
    with pytest.raises(InputError, match=r"^device='toaster'"):
        pick_device("toaster")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(InputError, match="torch sees no GPU"):
        pick_device("cuda")


def test_load_run_takes_a_run_or_one_checkpoint(tmp_path: Path) -> None:
    config = _config(tmp_path / "run")
    model, saved = _saved(config)
    for path in (tmp_path / "run", saved):
        loaded, read = load_run(path, "cpu")
        assert read == config
        assert not loaded.training
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
        assert find_checkpoint(path) == saved
    with pytest.raises(CheckpointError, match="holds no checkpoint; give a run folder"):
        load_run(tmp_path / "nowhere")


def test_resume_follows_the_setting(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert checkpoint_to_resume(_config(run_dir)) is None
    with pytest.raises(InputError, match=r"train\.resume='must'.*holds no checkpoint; name the folder of a run"):
        checkpoint_to_resume(_config(run_dir, resume="must"))
    _, saved = _saved(_config(run_dir))
    assert checkpoint_to_resume(_config(run_dir)) == saved
    assert checkpoint_to_resume(_config(run_dir, resume="must")) == saved
    with pytest.raises(InputError, match=r"train\.resume='never'.*holds step-00000003; name another folder"):
        checkpoint_to_resume(_config(run_dir, resume="never"))


def test_another_run_in_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _saved(config, stage=1)
    wider = dataclasses.replace(config, model=dataclasses.replace(MODEL, intermediate_size=16))
    other_text = dataclasses.replace(wider, data=dataclasses.replace(config.data, seed=5))
    with pytest.raises(InputError, match="holds a run of another model and another data"):
        checkpoint_to_resume(other_text)
    swapped = _config(tmp_path, stages=(StageConfig(mode="sparse", steps=4), StageConfig(mode="sparse", steps=4)))
    with pytest.raises(InputError, match=r"another train\.stages"):
        checkpoint_to_resume(swapped)
    shifted = _config(tmp_path, stages=(StageConfig(mode="dense", steps=5), StageConfig(mode="sparse", steps=4)))
    with pytest.raises(InputError, match=r"another train\.stages"):
        checkpoint_to_resume(shifted)
    longer = _config(
        tmp_path,
        stages=(StageConfig(mode="dense", steps=4), StageConfig(mode="sparse", steps=9), StageConfig(mode="frozen")),
    )
    assert checkpoint_to_resume(longer) is not None


def test_a_stage_cannot_become_shorter_than_it_was_trained(tmp_path: Path) -> None:
    """Or the stages behind it would lose the steps that it did too many."""
    _saved(_config(tmp_path))
    sparse = StageConfig(mode="sparse", steps=4)
    assert checkpoint_to_resume(_config(tmp_path, stages=(StageConfig(mode="dense", steps=3), sparse))) is not None
    with pytest.raises(InputError, match=r"train\.stages\.0\.steps=2, but .* has done 3 of that stage; give at least"):
        checkpoint_to_resume(_config(tmp_path, stages=(StageConfig(mode="dense", steps=2), sparse)))


def test_weights_of_another_run(tmp_path: Path) -> None:
    source, saved = _saved(_config(tmp_path / "a"))
    torch.manual_seed(1)
    model = Decoder(MODEL)
    init_weights(model, _config(tmp_path / "b", init_from=str(saved)).train)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"train\.init_from=.*holds no checkpoint"):
        init_weights(model, _config(tmp_path / "b", init_from=str(tmp_path / "none")).train)


def test_a_fresh_indexer_on_a_dense_checkpoint_changes_the_indexer_alone(tmp_path: Path) -> None:
    source, _ = _saved(_config(tmp_path / "a"))
    torch.manual_seed(1)
    model = Decoder(MODEL)
    init_weights(model, _config(tmp_path / "b", init_from=str(tmp_path / "a"), fresh_indexer=True).train)
    before = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        fresh = "indexer" in name and "k_norm" not in name
        assert torch.equal(parameter, before[name]) is not fresh, name


def test_a_trained_indexer_is_never_thrown_away(tmp_path: Path) -> None:
    _saved(_config(tmp_path / "a"), indexer_steps=7)
    train = _config(tmp_path / "b", init_from=str(tmp_path / "a"), fresh_indexer=True).train
    with pytest.raises(InputError, match="throw away an indexer trained for 7 steps"):
        init_weights(Decoder(MODEL), train)


def test_weights_arrive_one_at_a_time(tmp_path: Path, peak_bytes: Callable[[Callable[[], object]], int]) -> None:
    """A rank that has room for its parts and one whole weight can begin from any checkpoint."""
    model = dataclasses.replace(MODEL, hidden_size=256, intermediate_size=256, num_layers=4)
    config = dataclasses.replace(_config(tmp_path / "a"), model=model)
    source, _ = _saved(config)
    target = Decoder(model)
    train = _config(tmp_path / "b", init_from=str(tmp_path / "a")).train
    peak = peak_bytes(lambda: init_weights(target, train))
    sizes = [one.nbytes for one in source.parameters()]
    assert peak <= 2 * max(sizes) < sum(sizes) / 4, (peak, max(sizes), sum(sizes))
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@pytest.fixture
def copies() -> Callable[[int], Stages]:
    """Seed -> two stages of one rank, of a pipeline's four; both hold the embedding."""
    model = dataclasses.replace(MODEL, num_layers=4, mtp=MTPConfig(depths=2))
    layout = ParallelConfig(pp=2, vpp=2, schedule="Interleaved1F1B", pipeline_layout="Et|tt|tm|mL").chunks(4, 2)

    def make(seed: int) -> Stages:
        torch.manual_seed(seed)
        return Stages([DecoderStage(model, chunk) for chunk in cut(model, layout)[::2]])

    return make


def test_both_copies_of_an_embedding_are_filled(tmp_path: Path, copies: Callable[[int], Stages]) -> None:
    source, target = copies(0), copies(1)
    config = dataclasses.replace(_config(tmp_path / "a"), model=source.config)
    meta = {"config": dataclasses.asdict(config), "stage": 0, "indexer_steps": 0, "recipe": None}
    checkpoint.save(tmp_path / "a", 3, {"model": source.state_dict(), "progress": {"step": 3}}, keep=2, meta=meta)
    init_weights(target, _config(tmp_path / "b", init_from=str(tmp_path / "a")).train)
    wanted = source.state_dict()
    found = list(target.named_parameters())
    assert len(found) == len(wanted) + 1
    assert all(torch.equal(value, wanted[name]) for name, value in found)


def test_both_copies_of_an_embedding_have_a_state_of_their_own(tmp_path: Path, copies: Callable[[int], Stages]) -> None:
    """Else each step would move one state twice."""
    model = copies(0)
    model.load_state_dict(model.state_dict())

    def step(model: Stages, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    path = checkpoint.save(tmp_path, 1, state.capture(model, optimizer), keep=1)
    resumed = copies(1)
    fresh = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    state.restore(path, resumed, fresh)
    for pair in ((model, optimizer), (resumed, fresh)):
        step(*pair)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_write_json_leaves_no_half_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", RunConfig())
    write_json(tmp_path / "a.json", {"x": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_recipe_takes_the_model_of_a_checkpoint(tmp_path: Path) -> None:
    before = _config(tmp_path / "before")
    before = dataclasses.replace(before, data=dataclasses.replace(before.data, tokenizer="of/the/model"))
    _, path = _saved(before)
    recipe = RECIPES["deepseek_v32"]()
    for source in (path, tmp_path / "before"):
        config = begin_from(recipe, source)
        assert config.model == MODEL
        assert config.data == dataclasses.replace(recipe.data, tokenizer="of/the/model")
        assert config.train == dataclasses.replace(recipe.train, init_from=str(source))
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"`dsattn convert {hf} RUN` makes one"):
        begin_from(recipe, hf)
    with pytest.raises(CheckpointError, match=r"--init '.*nowhere' holds no checkpoint"):
        begin_from(recipe, tmp_path / "nowhere")
