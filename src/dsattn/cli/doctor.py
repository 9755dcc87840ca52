"""`dsattn doctor [RECIPE] [--section.field value]`."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess

import torch

from dsattn import __version__, explain
from dsattn.backends.vendors import DISTRIBUTIONS, version_of
from dsattn.cli.arguments import parse, pick
from dsattn.cli.ranks import sections
from dsattn.cli.tables import table
from dsattn.config import RunConfig
from dsattn.training.recipes import RECIPES

EXTRAS = {
    "report": ("matplotlib", "tensorboard"),
    "data": ("pyarrow",),
    "hf": ("transformers", "tokenizers"),
    "kda": ("fla-core",),
    "gpu": ("triton",),
    "megatron": ("megatron-core",),
}
"""Extra -> the packages that it brings."""
_IMPORTED_AS = {"fla-core": "fla", "megatron-core": "megatron"}
_IMPORTED_AS |= {package: name for name, packages in DISTRIBUTIONS.items() for package in packages}
_GIB = 2**30


DEFAULT = "small"
_DESCRIPTION = (
    "Versions, devices, optional packages; and of the recipe, with the changes asked for (as in `dsattn train`), which "
    "backend serves each operation and why, the mesh of --parallel, what each rank holds, and its memory. Nothing is "
    "launched."
)


def run(arguments: list[str]) -> int:
    """Print everything that a bug report should hold, and what a run would need. Starts no process group."""
    given = bool(arguments) and not arguments[0].startswith("-")
    name = pick("recipe", arguments[0], RECIPES, "dsattn train --help") if given else DEFAULT
    prog = f"dsattn doctor {name}"
    config = parse(RunConfig, arguments[given:], prog=prog, description=_DESCRIPTION, default=RECIPES[name]())
    parts = {
        "versions": table(["package", "version"], versions(), words=True),
        "devices": table(["device", "what it is"], devices(), words=True),
        "optional packages": table(["package", "extra", "found"], optional_packages(), words=True),
        f"backends for recipe {name}": explain(config),
        **sections(config),
    }
    print("\n\n".join(f"{title}\n{_indented(text)}" for title, text in parts.items()))
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
    """(package, extra, version or the way to get it). Vendors' kernels have no extra; of their builds one is named."""
    extras = [
        (package, extra, _version(package) or f"missing: pip install 'dsattn[{extra}]'")
        for extra, packages in EXTRAS.items()
        for package in packages
    ]
    builds = [next((one for one in packages if version_of(one)), packages[0]) for packages in DISTRIBUTIONS.values()]
    return extras + [(one, "", _version(one) or f"missing: pip install {one}") for one in builds]


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
