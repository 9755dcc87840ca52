"""`dsattn doctor [RECIPE]`."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

import torch
import tyro

from dsattn import __version__, explain
from dsattn.cli.arguments import parse, pick
from dsattn.cli.tables import table
from dsattn.training.recipes import RECIPES

EXTRAS = {
    "report": ("matplotlib", "tensorboard"),
    "data": ("pyarrow",),
    "hf": ("transformers", "tokenizers"),
    "kda": ("fla-core",),
    "gpu": ("triton",),
}
"""Extra -> the packages that it brings."""
_IMPORTED_AS = {"fla-core": "fla"}
_GIB = 2**30


@dataclass(frozen=True)
class Options:
    """Versions, devices, optional packages, and which backend serves each operation of a recipe, and why."""

    recipe: tyro.conf.Positional[str] = "small"
    """Recipe whose shapes the table of backends is for."""


def run(arguments: list[str]) -> int:
    """Print everything that a bug report should hold."""
    name = parse(Options, arguments, prog="dsattn doctor").recipe
    pick("recipe", name, RECIPES, "dsattn train --list")
    sections = {
        "versions": table(["package", "version"], versions(), words=True),
        "devices": table(["device", "what it is"], devices(), words=True),
        "optional packages": table(["package", "extra", "found"], optional_packages(), words=True),
        f"backends for recipe {name}": explain(RECIPES[name]),
    }
    print("\n\n".join(f"{title}\n{_indented(text)}" for title, text in sections.items()))
    return 0


def versions() -> list[tuple[str, str]]:
    """(what, version) of everything that decides what runs."""
    return [
        ("dsattn", __version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("triton", _version("triton") or "not installed"),
        ("CUDA of torch", torch.version.cuda or "none: a CPU build"),
        ("NVIDIA driver", _driver() or "none"),
    ]


def devices() -> list[tuple[str, str]]:
    """(device, what it is): GPUs with capability and memory, then the CPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = f"{facts.total_memory / _GIB:.0f} GiB"
        found.append((f"cuda:{index}", f"{facts.name}, capability {facts.major}.{facts.minor}, {memory}"))
    if not found and _driver():
        found.append(("cuda", "a GPU is there, but this torch cannot use it: install a CUDA build of torch"))
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return [*found, ("cpu", f"{cores} cores, {threads} used by torch{_host_memory()}")]


def optional_packages() -> list[tuple[str, str, str]]:
    """(package, extra, version or the way to get it)."""
    return [
        (package, extra, _version(package) or f"missing: pip install 'dsattn[{extra}]'")
        for extra, packages in EXTRAS.items()
        for package in packages
    ]


def _version(package: str) -> str | None:
    """None where `package` cannot be imported. Nothing is imported to find out."""
    if importlib.util.find_spec(_IMPORTED_AS.get(package, package)) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "found, version unknown"


def _driver() -> str | None:
    """The driver's version by nvidia-smi; torch knows only that of CUDA."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def _host_memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return ""
    return f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / _GIB:.0f} GiB"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
