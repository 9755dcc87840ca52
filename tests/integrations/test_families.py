import importlib
import importlib.metadata

import pytest
from torch import nn

from dsattn.errors import InputError
from dsattn.integrations.families import FAMILIES, NOT_YET, SOURCES, class_names, family_of, fingerprint


@pytest.mark.parametrize("model_type", FAMILIES)
def test_classes_are_those_of_transformers(model_type) -> None:
    pytest.importorskip("transformers")
    family, folder = FAMILIES[model_type], model_type.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for name in (family.body, family.attention, *family.heads):
        assert issubclass(getattr(modeling, name), nn.Module)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_installed_release_has_the_code_that_was_read(model_type) -> None:
    pytest.importorskip("transformers")
    family, folder = FAMILIES[model_type], model_type.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    genuine = getattr(modeling, family.body)
    body = genuine.__new__(type("Wrapped", (genuine,), {}))
    assert family.sources.keys() == SOURCES.keys()
    assert fingerprint(family, body) == family.sources[importlib.metadata.version("transformers")]


def test_a_body_is_found_below_wrappers_and_behind_a_class_in_front() -> None:
    body = type("FSDPHYV4Model", (type("HYV4Model", (nn.Module,), {}),), {})()
    assert "HYV4Model" in class_names(body)
    assert family_of(nn.Sequential(nn.Sequential(body))) == (FAMILIES["hy_v4"], [body])


@pytest.mark.parametrize("model_type", [*NOT_YET, "minimax_m3_vl_text", "llama"])
def test_other_models_are_refused_by_name(model_type) -> None:
    model = nn.Linear(1, 1)
    model.config = type("Config", (), {"model_type": model_type})()
    match = "has no attention that dsattn knows" if model_type == "llama" else "is not supported yet: it selects"
    with pytest.raises(InputError, match=f"model_type='{model_type}' {match}.*deepseek_v32"):
        family_of(model)
    with pytest.raises(InputError, match="model_type='Linear'"):
        family_of(nn.Linear(1, 1))
