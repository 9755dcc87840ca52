import pytest
import torch

from dsattn.errors import InputError
from dsattn.training.entries import as_json, differing, facts_of, missing, slots_of


def test_tensors_stand_alone_and_other_branches_whole() -> None:
    tree = {"a": {"weight": torch.ones(2), "rest": {"lr": 1.0}}, "b": {"x": [1, 2]}}
    slots = slots_of(tree)
    assert {name: branch[key] for name, (branch, key) in slots.items() if name != "a.weight"} == {
        "a.rest": {"lr": 1.0},
        "b": {"x": [1, 2]},
    }
    assert "a.weight" in slots


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({1: torch.ones(1)}, "must be a string"),
        ({"a": [torch.ones(1)]}, "give tensors in dicts"),
        ({"a": {"b": torch.ones(1)}, "a.b": 1}, "both named 'a.b'"),
    ],
)
def test_trees_that_cannot_be_saved(tree: dict, why: str) -> None:
    with pytest.raises(InputError, match=why):
        slots_of(tree)


def test_meta_is_json() -> None:
    assert as_json({"a": (1, 2)}) == {"a": [1, 2]}
    with pytest.raises(InputError, match="JSON-able"):
        as_json({"a": {1, 2}})


def test_what_does_not_fit_is_told() -> None:
    entries = {"a": torch.ones(2), "b": 1, "c": torch.ones(3, dtype=torch.int64)}
    saved = {"a": facts_of(torch.ones(3)), "b": None, "d": None}
    assert list(missing(entries, saved)) == ["c is missing from the checkpoint"]
    assert list(differing(entries, saved)) == ["a is torch.float32 [3] in the checkpoint, torch.float32 [2] here"]
