import importlib.metadata
import importlib.util
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

import dsattn
from dsattn.backends.vendors import DISTRIBUTIONS, version_of
from dsattn.cli import doctor
from dsattn.cli.__main__ import main
from dsattn.training.recipes import RECIPES

ROOT = Path(__file__).parents[2]


def test_it_names_versions_devices_and_backends(capsys):
    assert main(["doctor", "tiny"]) == 0
    text = capsys.readouterr().out
    for expected in (dsattn.__version__, torch.__version__, "cores", "backends for recipe tiny", "select_keys"):
        assert expected in text
    for section in ("versions", "devices", "optional packages"):
        assert re.search(f"^{section}$", text, re.MULTILINE)


def test_missing_packages_come_with_the_way_to_get_them(monkeypatch, capsys):
    gone = {package for packages in doctor.EXTRAS.values() for package in packages} | DISTRIBUTIONS.keys()
    for package in gone:
        monkeypatch.setitem(sys.modules, package, None)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for extra, packages in doctor.EXTRAS.items():
        for package in packages:
            assert re.search(rf"{package} +{extra} +missing: pip install 'dsattn\[{extra}\]'", text)
    for build in ("sgl-flash-mla", "nvidia-cudnn-frontend", "sgl-deep-gemm", "tokenspeed-deepselect", "tilelang"):
        assert re.search(rf"{build} +missing: pip install {build}$", text, re.MULTILINE)


def test_the_build_of_a_vendor_that_is_installed_is_named(monkeypatch):
    installed = {"flash-mla": "1.0.1", "nvidia-cudnn-frontend": "1.32.0"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("flash_mla", "cudnn") or None)
    version_of.cache_clear()
    try:
        rows = {package: found for package, _, found in doctor.optional_packages()}
    finally:
        version_of.cache_clear()
    assert (rows["flash-mla"], rows["nvidia-cudnn-frontend"]) == ("1.0.1", "1.32.0")
    assert "sgl-flash-mla" not in rows


def test_a_package_without_metadata_is_found_all_the_same(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(name=name))
    rows = {package: found for package, _, found in doctor.optional_packages()}
    assert rows["triton"] == "found, version unknown" or rows["triton"][0].isdigit()
    assert not any("missing" in found for found in rows.values())


def test_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    named = {
        extra: tuple(re.match(r"[\w-]+", requirement).group() for requirement in requirements)
        for extra, requirements in declared.items()
        if extra not in ("dev", "docs")  # for work on dsattn, not for runs
    }
    assert named == doctor.EXTRAS


def test_a_gpu_is_shown_with_capability_and_memory(monkeypatch):
    facts = types.SimpleNamespace(name="H200", major=9, minor=0, total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    assert doctor.devices()[0] == ("cuda:0", "H200, capability 9.0, 139 GiB")


def test_a_gpu_that_torch_cannot_use_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "_driver", lambda: "570.1")
    assert "install a CUDA build" in doctor.devices()[0][1]


@pytest.mark.parametrize("script", ["echo 570.124.06; echo 570.124.06", "exit 9"])
def test_the_drivers_version_is_nvidia_smis(monkeypatch, tmp_path, script):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert doctor._driver() == ("570.124.06" if "570" in script else None)


def test_a_mesh_is_shown_before_anything_is_launched(capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    assert main(["doctor", "tiny", "--parallel.cp", "2", "--parallel.tp", "2"]) == 0
    text = capsys.readouterr().out
    for expected in ("mesh of 4 ranks", "what each rank holds", "memory plan of a rank", "collectives of a layer"):
        assert re.search(f"^{expected}", text, re.MULTILINE)


def test_every_problem_is_told_at_once(capsys):
    assert main(["doctor", "tiny", "--parallel.tp", "3", "--parallel.ep", "2", "--parallel.pp", "2"]) == 2
    said = capsys.readouterr().err
    for expected in (
        "tp=3 must divide the attention's heads=4",
        "ep=2 must divide",
        "pp=2 needs as many micro-batches",
    ):
        assert expected in said


def test_an_unknown_recipe_is_refused(capsys):
    assert main(["doctor", "smal"]) == 2
    assert "did you mean small" in capsys.readouterr().err


def test_the_default_recipe_exists():
    assert doctor.DEFAULT in RECIPES
