"""What these tests need: a Hopper GPU, Triton's interpreter, or a compiler that writes for Hopper without a GPU.

Gluon has no interpreter: its kernels run on a GPU only (mark `gpu`, fixture `hopper`). Everywhere they are compiled for
sm_90 as the wrappers would launch them, and what the assembler says of them is read. Tests of plain Triton kernels
(fixture `device`) run on any GPU, or without one in the interpreter, in a process of its own.
"""

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# The fixtures of plain Triton kernels, `device` and `interpret`, are those of the neighbour.
_path = Path(__file__).parents[1] / "triton" / "conftest.py"
_spec = importlib.util.spec_from_file_location("triton_conftest", _path)
assert _spec is not None
assert _spec.loader is not None
_neighbour = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_neighbour)
device, interpret = _neighbour.device, _neighbour.interpret


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if INTERPRETING:
        dropped = [item for item in here if "device" not in getattr(item, "fixturenames", ())]
    elif torch.cuda.is_available():
        dropped = []
    else:
        dropped = [item for item in here if "device" in getattr(item, "fixturenames", ())]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture
def hopper() -> str:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return "cuda"


class Launch(NamedTuple):
    """What a wrapper hands to `launch`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class Compiled(NamedTuple):
    """shared: bytes. spills: bytes stored, a thread. complaints: lines of the assembler that say what was lost."""

    shared: int
    registers: int
    spills: int
    complaints: list[str]
    ptx: str


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Kernels are noted here and not started: wrappers can be called with tensors on the CPU."""
    from dsattn.backends.hopper import dsa_attention, select, sparse_mla, sparse_mla_reduce
    from dsattn.backends.triton import invert, select_scores
    from dsattn.backends.triton import select as portable

    noted: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        noted.append(Launch(kernel, grid, arguments, constants))

    for module in (dsa_attention, invert, portable, select, select_scores, sparse_mla, sparse_mla_reduce):
        monkeypatch.setattr(module, "launch", note)
    return noted


@pytest.fixture
def assemble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Launch], Compiled]:
    """Compile a launch for sm_90, as Triton would before it starts the kernel."""

    def run(launch: Launch) -> Compiled:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.experimental.gluon._runtime import GluonASTSource
        from triton.runtime.jit import create_function_from_signature

        kernel, target = launch.kernel, GPUTarget("cuda", 90, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, _ = binder(*launch.arguments, **launch.constants)
        packed = kernel._pack_args(backend, dict(launch.constants), bound, specialization, {})
        options, signature, constants, attributes = packed
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
        path, logs = tmp_path / "kernel.ptx", []

        def make_cubin(_self: Any, ptx: str, _metadata: Any, _options: Any, _capability: int) -> bytes:
            path.write_text(ptx)
            command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(path) + ".cubin"]
            logs.append(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
            return Path(f"{path}.cubin").read_bytes()

        # The assembler is the slow part: it runs once, in Triton's place, and what it made goes into no one's cache.
        monkeypatch.setattr(type(backend), "make_cubin", make_cubin)
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(tmp_path / "cache")
            compiled = triton.compile(source, target=target, options=options.__dict__)
        (log,) = logs
        registers, spills = _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill stores", log)
        return Compiled(compiled.metadata.shared, registers, spills, _complaints(log), path.read_text())

    return run


@pytest.fixture
def complaints() -> Callable[[str], list[str]]:
    return _complaints


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found is not None, log
    return int(found[1])


def _complaints(log: str) -> list[str]:
    """Lines of ptxas that tell of serialised wgmma, an ignored setmaxnreg, or anything else it warns of."""
    marks = r"\(C\d{4}\)|warning|Potential Performance Loss|ignored|serialized"
    return [line for line in log.splitlines() if re.search(marks, line)]
