import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from shlex import split

import pytest

from dsattn.cli.__main__ import main
from dsattn.cli.train import read_config
from dsattn.config import Checked, RunConfig
from dsattn.training import loop
from dsattn.training.recipes import RECIPES


@pytest.fixture
def trained(monkeypatch):
    """What `train` was called with; nothing is trained."""
    calls = []

    def train(config, *, recipe=None, console=True):
        calls.append((recipe, config))
        return {"finished": True, "checkpoint": "runs/x/checkpoints/step-1"}

    monkeypatch.setattr(loop, "train", train)
    return calls


def sentences(kind: type) -> dict[str, str]:
    """Field -> the string under it in the class's source."""
    body = ast.parse(inspect.getsource(kind)).body[0].body
    return {
        field.target.id: ast.literal_eval(text.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def leaves(config: Checked, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """(dotted name, value, sentence) of every field that is not itself a configuration."""
    about = sentences(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for index, one in values:
            name = f"{prefix}{field.name}" if index is None else f"{prefix}{field.name}.{index}"
            if isinstance(one, Checked):
                yield from leaves(one, f"{name}.")
            elif one is not None or "Config" not in str(field.type):  # what a recipe leaves out has no options
                yield name, one, about[field.name]


def plain(text: str) -> str:
    """Text without boxes, spaces and line breaks."""
    return re.sub(r"[│─╭╮╰╯\s]", "", text)


def test_degrees_are_held_against_model_batch_and_processes_at_once(
    trained: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "tiny", "--parallel.tp", "3", "--parallel.dp-shard", "7"]) == 2
    said = capsys.readouterr().err
    assert "parallel.tp=3 must divide the attention's heads=4" in said
    assert "parallel: dp_replicate * dp_shard = 7 must divide train.packs_per_step" in said
    assert "parallel: dp_replicate * dp_shard * cp * tp * pp = 21, but 2 process(es) were started" in said
    assert not trained


def test_a_degree_of_zero_hides_no_other(trained: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", *split("--parallel.tp 0 --parallel.ep 3 --parallel.pp 7")]) == 2
    said = capsys.readouterr().err
    for problem in (
        "parallel.tp=0 must be at least 1",
        "parallel.ep=3 needs model.moe",
        "parallel: pp=7 needs as many",
    ):
        assert problem in said
    assert not trained


@pytest.mark.parametrize("name", RECIPES)
def test_help_explains_every_field_with_its_default(name, capsys):
    assert main(["train", name, "--help"]) == 0
    text = plain(capsys.readouterr().out)
    fields = list(leaves(RECIPES[name]()))
    assert len(fields) > 60
    for field, value, sentence in fields:
        option = re.escape(f"--{field.replace('_', '-')}")
        about = re.escape(plain(f"{sentence}(default: {value})"))
        assert re.search(rf"{option}[^()]{{0,100}}{about}", text), field


def test_help_lists_recipes(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and recipe.__doc__.splitlines()[0] in text for name, recipe in RECIPES.items())


@pytest.mark.parametrize("command", ["train", "doctor", "flops"])
def test_a_wrong_recipe_is_told_where_the_recipes_are(command, capsys):
    """At a command whose help has them."""
    assert main([command, "nosuch"]) == 2
    (hint,) = re.findall(r"\(see dsattn ([^)]+)\)", capsys.readouterr().err)
    assert main(hint.split()) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in RECIPES)


def test_without_options_the_recipe_is_trained_as_it_is(trained):
    assert main(["train", "tiny"]) == 0
    assert trained == [("tiny", RECIPES["tiny"]())]


def test_fields_of_every_section_can_be_set(trained):
    options = split("""--model.attention.heads 2 --model.dsa.indexer.top-k=32 --model.layer-types dense dsa dsa dsa
        --data.pack_tokens 256 --train.stages.0.steps 50 --train.stages.2.kl-weight 0.5 --train.no-tensorboard
        --train.run-dir elsewhere --train.init-from None --data.source a*b""")
    assert main(["train", "tiny", *options]) == 0
    ((_, config),) = trained
    assert config.model.attention.heads == 2
    assert config.model.dsa.indexer.top_k == 32
    assert config.model.layer_types == ("dense", "dsa", "dsa", "dsa")
    assert config.data.pack_tokens == 256
    assert config.data.source == "a*b"
    assert [stage.steps for stage in config.train.stages] == [
        50,
        *(s.steps for s in RECIPES["tiny"]().train.stages[1:]),
    ]
    assert config.train.stages[2].kl_weight == 0.5
    assert not config.train.tensorboard
    assert config.train.run_dir == "elsewhere"
    assert isinstance(config, RunConfig)


def test_every_problem_is_reported_at_once_and_nothing_is_trained(trained, capsys):
    wrong = split("""--model.dsa.indexer.top-k 0 --train.packs-per-step 3 --train.packs-per-micro-batch 2
        --train.stages.1.mode warmup --parallel.tp 2""")
    assert main(["train", "tiny", *wrong]) == 2
    error = capsys.readouterr().err
    assert "4 problem(s)" in error  # one process was started, not two
    for name in ("model.dsa.indexer.top_k=0", "train.packs_per_step=3", "parallel: train.packs_per_micro_batch=2"):
        assert f"  - {name}" in error
    assert trained == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no recipe given"),
        (["tyni"], "did you mean tiny"),
        (["--train.seed", "1", "tiny"], "give the recipe before options"),
        (["tiny", "--train.sed", "1"], "--train.sed"),
        (["tiny", "--train.seed", "one"], "--train.seed"),
        (["tiny", "--train.stages.0.mode", "fast"], "--train.stages.0.mode"),
        (["tiny", "--train.stages.9.steps", "1"], "--train.stages.9.steps"),
    ],
)
def test_wrong_command_lines_exit_with_2(trained, arguments, message, capsys):
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert trained == []


def test_a_run_that_was_stopped_says_how_to_go_on(monkeypatch, capsys):
    stopped = {"finished": False, "checkpoint": "runs/x/checkpoints/step-7"}
    monkeypatch.setattr(loop, "train", lambda config, **options: stopped)
    assert main(["train", "tiny"]) == 0
    assert "stopped and saved in runs/x/checkpoints/step-7; the same command" in capsys.readouterr().out


def test_init_takes_model_and_tokenizer_of_a_run_and_leaves_the_recipes_stages(trained, run_dir, capsys):
    options = ["--data.pack-tokens", "64", "--model.dsa.indexer.top-k", "8", f"--init={run_dir}"]
    assert main(["train", "deepseek_v32", *options]) == 0
    ((name, config),) = trained
    recipe = RECIPES["deepseek_v32"]()
    assert (name, config.model.num_layers, config.model.dsa.indexer.top_k) == ("deepseek_v32", 2, 8)
    assert (config.data.tokenizer, config.data.pack_tokens) == ("bytes", 64)
    assert config.train == dataclasses.replace(recipe.train, init_from=str(run_dir))
    assert [stage.packs_per_step for stage in config.train.stages] == [16, 480]
    assert main(["train", "tiny", "--init", "no/such/run"]) == 1
    assert "'no/such/run' holds no checkpoint" in capsys.readouterr().err


def test_read_config_gives_name_and_configuration():
    name, config = read_config(["small", "--train.seed", "7"])
    assert (name, config.train.seed) == ("small", 7)
