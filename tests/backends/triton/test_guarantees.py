"""What holds of every kernel file: token counts, packings and shards compile nothing anew.

Wrappers are run without a start: their launches are only noted. A row of OPERATIONS adds an operation.
"""

import functools
import importlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import settings
from dsattn.backends import ALONE
from dsattn.keys import KeyRange, Layout
from dsattn.selection import Inverse, invert

launch = pytest.importorskip("dsattn.backends.triton.launch", exc_type=ImportError)


@dataclass(frozen=True)
class Geometry:
    """What a model fixes: all that a kernel may be compiled for."""

    heads: int = 64
    groups: int = 2
    width: int = 576
    value_dim: int = 512
    index_heads: int = 32
    index_width: int = 128
    top_k: int = 128
    dtype: torch.dtype = torch.bfloat16
    sink: bool = False


GEOMETRIES = {
    "published": Geometry(),
    "odd": Geometry(heads=6, groups=3, width=33, value_dim=21, index_heads=3, index_width=33, top_k=7, sink=True),
    "ones": Geometry(heads=1, groups=1, width=1, value_dim=1, index_heads=1, index_width=1, top_k=1),
    "single": Geometry(heads=5, groups=1, width=40, value_dim=24, index_width=20, top_k=65, dtype=torch.float32),
}


class Operands:
    """Zeros of a geometry for a layout, on a device; vectors begin anywhere in their storage."""

    def __init__(self, layout: Layout, geometry: Geometry, device: str, offset: int):
        self.rows, self.num_keys, self.geometry, self.device = len(layout.rows), layout.num_keys, geometry, device
        self.offset = offset
        keys = layout.keys.to(device)
        self.keys = KeyRange(self._moved(keys.start), self._moved(keys.stop))
        self.index = torch.full((self.rows, geometry.top_k), -1, dtype=torch.int32, device=device)
        reads = self.keys.stop > self.keys.start
        self.index[:, 0] = torch.where(reads, self.keys.start, -1)
        self.length = self._moved(reads.int())
        self.real = self._moved(reads)
        self.lse = torch.zeros(self.rows, geometry.heads, device=device)
        self.sink = self._moved(self.zeros(geometry.heads).float()) if geometry.sink else None
        self.attention = self.zeros(self.rows, geometry.heads, geometry.width)
        self.out = self.zeros(self.rows, geometry.heads, geometry.value_dim)
        self.indexer = (
            self.zeros(self.rows, geometry.index_heads, geometry.index_width),
            self.zeros(self.num_keys, geometry.index_width),
            self.zeros(self.rows, geometry.index_heads),
        )

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.geometry.dtype, device=self.device)

    def _moved(self, x: Tensor) -> Tensor:
        """The same vector, `offset` elements into a buffer."""
        return torch.cat([x.new_zeros(self.offset), x])[self.offset :]


def _module(name: str) -> Any:
    return importlib.import_module(f"dsattn.backends.triton.{name}")


def _inverses(x: Operands) -> tuple[tuple[bool, Inverse | None], ...]:
    """(deterministic, inverse) of backwards: by atomics, by contributions, and with the selection's inverse."""
    return (False, None), (True, None), (True, invert(x.index, x.length, x.num_keys))


def _sparse_mla(x: Operands) -> None:
    kernels, kv = _module("sparse_mla"), x.zeros(x.num_keys, x.geometry.width)
    operands = (x.attention, kv, x.index, x.length, x.sink)
    out, lse = kernels.sparse_mla_forward(*operands, 0.5, x.geometry.value_dim)
    for flags in _inverses(x):
        kernels.sparse_mla_backward(x.out, *operands, out, lse, 0.5, *flags)


def _select_keys(x: Operands) -> None:
    for block_bytes in (2**30, 40000):
        for flag in (False, True):
            ranges, top_k = (x.keys.start, x.keys.stop), x.geometry.top_k
            _module("select").select_keys(*x.indexer, *ranges, top_k, True, flag, block_bytes)


def _select_keys_fp8(x: Operands) -> None:
    ranges, top_k = (x.keys.start, x.keys.stop), x.geometry.top_k
    _module("select").select_keys(*x.indexer, *ranges, top_k, True, False, 2**30, "fp8")


def _select_topk(x: Operands) -> None:
    scores = torch.zeros(x.rows, x.num_keys, device=x.device)
    _module("select").select_topk(scores, x.keys.start, x.keys.stop, x.geometry.top_k)


def _invert(x: Operands) -> None:
    """In one run of rows, and in one after another; pieces of them."""
    module = _module("invert")
    whole = module.invert(x.index, x.length, x.num_keys)
    with settings(scratch_bytes=1):
        module.invert(x.index, x.length, x.num_keys)
    for first in range(0, x.rows, 7):
        module.slots_of_run(whole, x.index, x.length.contiguous(), first, min(7, x.rows - first), x.num_keys)


def _sparse_gqa(x: Operands) -> None:
    kernels, size = _module("sparse_gqa"), x.geometry
    k, v = x.zeros(x.num_keys, size.groups, size.width), x.zeros(x.num_keys, size.groups, size.value_dim)
    operands = (x.attention, k, v, x.index, x.length, x.sink)
    out, lse = kernels.sparse_gqa_forward(*operands, 0.5)
    for flags in _inverses(x):
        kernels.sparse_gqa_backward(x.out, *operands, out, lse, 0.5, *flags)


def _dense(operation: str, x: Operands) -> None:
    kernels, size = _module("dense"), x.geometry
    groups = 1 if operation == "dense_mla" else size.groups
    v = None if operation == "dense_mla" else x.zeros(x.num_keys, groups, size.value_dim)
    operands = (x.attention, x.zeros(x.num_keys, groups, size.width), v, x.keys, x.sink)
    out, lse = getattr(kernels, f"{operation}_forward")(*operands, 0.5, size.value_dim)
    getattr(kernels, f"{operation}_backward")(x.out, *operands, out, lse, 0.5)


def _indexer_kl(selected: bool, grouped: bool, x: Operands) -> None:
    kernels, size = _module("indexer_kl"), x.geometry
    kv = x.zeros(x.num_keys, *((size.groups,) if grouped else ()), size.width)
    slots = (x.index, x.length) if selected else (None, None)
    operands = (*x.indexer, x.attention, kv, x.lse, *slots, x.keys, x.real)
    _, *saved = kernels.indexer_kl_forward(*operands, torch.ones((), device=x.device), 0.5, True, ALONE)
    for flags in _inverses(x) if selected else ((False, None), (True, None)):
        kernels.indexer_kl_backward(x.real.float(), *operands, *saved, 0.5, True, ALONE, *flags)


@dataclass(frozen=True)
class Operation:
    """modules: whose kernels it starts. variants: kernel -> what a geometry may compile, one where nothing is said.

    Two `variants` are two values of a flag of `run`, or two routes that are chosen by size.
    """

    modules: tuple[str, ...]
    run: Callable[[Operands], None]
    variants: dict[str, int]


GQA = ("sparse_gqa", "sparse_mla", "invert")
KL = ("indexer_kl", "invert", "indexer_kl_rows", "indexer_kl_dense", "select", "select_scores")
OPERATIONS = {
    # Backwards scatter by atomics, or write contributions.
    "sparse_mla": Operation(("sparse_mla", "invert"), _sparse_mla, {"_backward_keys_kernel": 2}),
    # With and without the scores.
    "select_keys": Operation(("select", "select_scores"), _select_keys, {"_rank_kernel": 2}),
    # Of queries, whose weights take their scales, and of keys.
    "select_keys_fp8": Operation(("select", "select_scores", "quantize"), _select_keys_fp8, {"_to_e4m3_kernel": 2}),
    "select_topk": Operation(("select",), _select_topk, {}),
    "invert": Operation(("invert",), _invert, {}),
    # Contributions are summed for keys and for values, which differ in width.
    "sparse_gqa": Operation(GQA, _sparse_gqa, {"_backward_kernel": 2, "_sum_kernel": 2}),
    "dense_mla": Operation(("dense", "dense_backward"), functools.partial(_dense, "dense_mla"), {}),
    "dense_gqa": Operation(("dense", "dense_backward"), functools.partial(_dense, "dense_gqa"), {}),
    "indexer_kl_sparse": Operation(KL, functools.partial(_indexer_kl, True, False), {"_slot_gradient_kernel": 2}),
    "indexer_kl_sparse_gqa": Operation(KL, functools.partial(_indexer_kl, True, True), {"_slot_gradient_kernel": 2}),
    "indexer_kl_dense": Operation(KL, functools.partial(_indexer_kl, False, False), {}),
    "indexer_kl_dense_gqa": Operation(KL, functools.partial(_indexer_kl, False, True), {}),
}


def random_pack(generator: random.Random, most_rows: int) -> Layout:
    """A shard of a pack of 1 to 16 documents, of up to 9000 keys; some documents are empty or single rows."""
    cp_size = generator.choice([1, 1, 2, 64, 128])
    most = generator.randrange(1, min(9000, most_rows * cp_size))
    lengths = [generator.choice([0, 1, 15, 16, generator.randrange(most)]) for _ in range(generator.randrange(1, 17))]
    whole = 2 * cp_size if cp_size > 1 else 1
    padded, room = [], most
    for i, length in enumerate(lengths):
        lengths[i] = min(length, room // whole * whole)
        padded.append(-(-lengths[i] // whole) * whole)
        room -= padded[-1]
    total = sum(padded) + whole * generator.randrange(3)
    return Layout.packed(lengths, padded=padded, total=total, cp_size=cp_size, cp_rank=generator.randrange(cp_size))


def recorded(operation: str, geometry: Geometry, packs: int, device: str = "cpu") -> dict[str, set[str]]:
    """Kernel -> what `packs` random packs of one geometry would compile."""
    generator = random.Random(0)
    with launch.recording(start=device != "cpu") as kept:
        for _ in range(packs):
            layout = random_pack(generator, 40)
            OPERATIONS[operation].run(Operands(layout, geometry, device, generator.randrange(5)))
    return kept


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_packs_compile_nothing_anew(operation: str, geometry: str) -> None:
    kept = recorded(operation, GEOMETRIES[geometry], 50)
    assert kept
    variants = OPERATIONS[operation].variants
    again = {name: keys for name, keys in kept.items() if len(keys) > variants.get(name, 1)}
    assert not again, "\n".join(f"{name}:\n  " + "\n  ".join(sorted(keys)) for name, keys in again.items())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_another_geometry_compiles_anew(operation: str) -> None:
    """Negative control: the record tells geometries apart."""
    one = recorded(operation, GEOMETRIES["odd"], 1)
    other = recorded(operation, replace(GEOMETRIES["odd"], top_k=9000, width=48, index_width=48), 1)
    assert any(not one[name] & other[name] for name in one)


def test_packs_differ() -> None:
    generator = random.Random(0)
    layouts = [random_pack(generator, 40) for _ in range(50)]
    rows, keys = ({len(x.rows) for x in layouts}, {x.num_keys for x in layouts})
    assert len(rows) > 20
    assert len(keys) > 30
    assert any(n % 16 == 0 for n in rows)
    assert any(n % 16 for n in rows)
    assert max(keys) > 4096  # beyond what `select` ranks in registers
    assert min(keys) < 16


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
def test_packs_compile_what_was_recorded(operation: str, device: str) -> None:
    kernels = kernels_of(operation)
    for kernel in kernels:
        kernel.device_caches.clear()  # what other tests have compiled
    geometry = Geometry(heads=7, groups=7, width=72, value_dim=56, index_heads=7, index_width=24, top_k=23)
    kept = recorded(operation, geometry, 20, device)
    compiled: Counter[str] = Counter()
    for kernel in kernels:
        compiled[kernel.__name__] += launch.compilations(kernel)
    assert +compiled == {name: len(keys) for name, keys in kept.items()}


def kernels_of(operation: str) -> list[Any]:
    """What Triton compiles in the operation's modules, or is imported there."""
    named = (one for name in OPERATIONS[operation].modules for one in vars(_module(name)).values())
    return list({id(one): one for one in named if hasattr(one, "device_caches")}.values())


def test_kernels_of_an_operation_are_found() -> None:
    for operation in OPERATIONS:
        kept = recorded(operation, GEOMETRIES["odd"], 2)
        assert set(kept) <= {kernel.__name__ for kernel in kernels_of(operation)}
