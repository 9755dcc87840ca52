"""Where kernels run: on the GPU, or without one in Triton's interpreter, in a process of its own.

A test that takes `device` launches kernels. Without a GPU it is left out here; the fixture `interpret` runs a file's
left-out tests, and no others, in a fresh interpreter, because Triton reads TRITON_INTERPRET only when it is first
imported.
"""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from dsattn import settings
from dsattn.backends import HeadRanks

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[3]


def pytest_report_header() -> list[str]:
    return [] if HAS_TRITON else ["tests/backends/triton is left out: it needs triton, which is made for Linux"]


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
def device() -> Iterator[str]:
    """cuda, or cpu in the interpreter, where infinities are as ordinary as on a GPU."""
    if not INTERPRETING:
        yield "cuda"
        return
    _let_numbers_be_bounds()
    _patch_the_language_once()
    _leave_out_what_nobody_reads()
    with numpy.errstate(all="ignore"):
        yield "cpu"


@pytest.fixture
def interpret() -> Callable[..., int]:
    """Run the kernel tests of files in Triton's interpreter; returns how many passed."""

    def run(*paths: str) -> int:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *paths]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        passed = re.search(r"(\d+) passed", done.stdout)
        return int(passed[1]) if passed else 0

    return run


@pytest.fixture
def parts_add_up() -> Callable[..., None]:
    """`check(functions, operands, scale, shards, scratch_bytes)`: ranks that share the loss's rows find the whole loss.

    functions: run, exact_run and assert_right of a file. operands: of the loss's forward, up to `real`; those that
    count are four of five. Rank i of n has all rows of attention, here with every head, and rows i, i + n, ... of the
    indexer. scratch_bytes: that a part may use. Rows at the end that n does not divide are left out.
    """

    def check(
        functions: tuple[Callable[..., Any], ...], operands: tuple, scale: float, shards: int, scratch_bytes: int
    ) -> None:
        run, exact_run, assert_right = functions
        q_i, k_i, w, q, kv, lse, index, length, keys, real = operands
        row = torch.arange(len(real), device=real.device)
        real = real & (row % 5 != 3)
        rows = slice(0, len(real) // shards * shards)
        index, length = (None if x is None else x[rows] for x in (index, length))
        rest = (q[rows], kv, lse[rows], index, length, keys.row_slice(0, rows.stop), real[rows])
        row_scale = torch.where(real, 1 + row % 3, 0.0)[rows]
        whole = run((q_i[rows], k_i, w[rows], *rest), scale, row_scale=row_scale)
        parts = []
        for shard in range(shards):
            ranks = HeadRanks("", shards, shard)
            part = (ranks.own(q_i[rows]), k_i, ranks.own(w[rows]), *rest)
            flags = {"row_scale": ranks.own(row_scale), "ranks": ranks}
            with settings(scratch_bytes=scratch_bytes):
                parts.append(run(part, scale, **flags))
            assert_right(parts[-1], exact_run(part, scale, **flags))
        got = {name: torch.stack([part[name] for part in parts]).sum(0) for name in ("loss", "k_i")}
        for name in whole.keys() - got.keys():
            got[name] = torch.stack([part[name] for part in parts], 1).flatten(0, 1)
        assert_right(got, {name: x.double() for name, x in whole.items()})

    return check


def _let_numbers_be_bounds() -> None:
    """triton 3.6's interpreter gives `int` arrays of one element, which numpy 2.4 refuses: loop bounds need it."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "lets_numbers_be_bounds", False):
        return

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patched.lets_numbers_be_bounds = True
    interpreter._patch_lang_tensor = patched


def _patch_the_language_once() -> None:
    """triton 3.6's interpreter patches all of its language anew at every launch and call: a third of its time."""
    from triton import language
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()
    if getattr(patch, "patches_once", False):
        return

    def patch_once(function):
        scopes = {name for name in (language, language.core) if name in function.__globals__.values()}
        if not scopes <= patched:
            patch(function)  # what would undo it is dropped: this process does nothing but interpret
            patched.update(scopes)
        return interpreter._LangPatchScope()

    patch_once.patches_once = True
    interpreter._patch_lang = patch_once


def _leave_out_what_nobody_reads() -> None:
    """Half of the interpreter's time: overflow checks whose assertions only a debug build makes, shapes made anew."""
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.sanitize_overflow:
        return
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    find, make_tensor, make_block = interpreter._get_np_dtype, language.tensor.__init__, language.block_type.__init__
    found, tensors, blocks = {}, {}, {}

    def plain(value):
        return value.value if isinstance(value, language.constexpr) else value

    def numpy_type(kind):
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    def tensor(self, handle, kind):
        shape = (*kind.shape,) if kind.is_block() else ()
        if shape not in tensors:
            make_tensor(self, handle, kind)
            tensors[shape] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = tensors[shape]

    def block(self, element, shape):
        key = element.name, *map(plain, plain(shape))
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element
        self.shape, self.numel, self.name = blocks[key]

    interpreter._get_np_dtype = numpy_type
    language.tensor.__init__, language.block_type.__init__ = tensor, block
