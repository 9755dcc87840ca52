from dataclasses import dataclass

import pytest

from dsattn.cli.arguments import UsageError, parse, pick, recipe_list
from dsattn.config import GQAConfig, IndexerConfig, MLAConfig, ModelConfig


@dataclass(frozen=True)
class Options:
    """Some options."""

    model: ModelConfig
    """The network."""
    steps: int = 3
    """How many."""


SMALL = ModelConfig(hidden_size=64, attention=MLAConfig(heads=2))


def test_pick_gives_back_what_is_known():
    assert pick("recipe", "tiny", ["tiny", "small"], "x") == "tiny"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tyni", "no recipe 'tyni'; did you mean tiny. There is tiny, small .see x --help."),
        ("qqq", "no recipe 'qqq'. There is tiny, small"),
        ("--train.seed", "give the recipe before options such as '--train.seed': tiny, small"),
        ("", "no recipe ''"),
    ],
)
def test_pick_names_close_matches_and_all_others(given, message):
    with pytest.raises(UsageError, match=message):
        pick("recipe", given, ["tiny", "small"], "x --help")


def test_recipe_list_is_a_line_each():
    def one():
        """First sentence.

        More.
        """

    assert recipe_list({"one": one}).split(None, 1) == ["one", "First sentence."]


def test_fields_may_have_dashes_or_underscores():
    for option in ("--model.hidden-size", "--model.hidden_size"):
        parsed = parse(Options, [option, "32"], prog="x", default=Options(SMALL))
        assert parsed.model.hidden_size == 32
        assert parsed.model.attention == SMALL.attention


def test_a_union_follows_the_defaults_type():
    indexer = IndexerConfig(query_from="hidden", rope_dim=0)
    gqa = ModelConfig(attention=GQAConfig(), dsa=type(SMALL.dsa)(indexer=indexer))
    parsed = parse(Options, ["--model.attention.kv-heads", "4"], prog="x", default=Options(gqa))
    assert parsed.model.attention == GQAConfig(kv_heads=4)
    with pytest.raises(SystemExit):
        parse(Options, ["--model.attention.kv-heads", "4"], prog="x", default=Options(SMALL))


def test_every_broken_rule_is_reported_at_once_by_its_whole_name():
    wrong = ["--model.attention.heads", "0", "--model.dsa.indexer.top-k", "0", "--model.norm-eps", "-1"]
    with pytest.raises(UsageError, match="3 problem") as caught:
        parse(Options, wrong, prog="x", default=Options(SMALL))
    for name in ("model.attention.heads=0", "model.dsa.indexer.top_k=0", "model.norm_eps=-1"):
        assert f"  - {name}" in str(caught.value)


def test_configurations_check_themselves_again_afterwards():
    parse(Options, [], prog="x", default=Options(SMALL))
    with pytest.raises(ValueError, match="heads=0"):
        MLAConfig(heads=0)
