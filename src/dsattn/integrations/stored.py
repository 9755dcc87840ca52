"""Tensors that stay on disk until one is asked for: a model of any size passes through little memory.

A checkpoint is a dict of `Stored` by name. Readers make one, mappings of names make another from it, writers ask for
its tensors one after the other.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsattn.errors import CheckpointError, InputError

INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """A tensor that `read` makes, on the CPU, each time it is called."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> "Stored":
        """The same values in `dtype`."""
        return self if dtype == self.dtype else Stored(self.shape, dtype, lambda: self.read().to(dtype))

    def lazy(self) -> Tensor:
        """A tensor of this shape and dtype that reads its values again in every operation, and keeps none."""
        return _Lazy(self)


Tensors = dict[str, Stored]


def stored(tensor: Tensor) -> Stored:
    """A tensor that is in memory already."""
    return Stored(tuple(tensor.shape), tensor.dtype, lambda: tensor)


class LastRead:
    """Keeps the tensor that was read last while something uses it, for parts that are asked for in a row."""

    def __init__(self) -> None:
        self._kept: tuple[int, Tensor] | None = None

    def read(self, whole: Stored) -> Tensor:
        """`whole.read()`, or what it gave just now."""
        if self._kept is None or self._kept[0] != id(whole):
            self._kept = None  # free the former one before the next is read
            self._kept = (id(whole), whole.read())
        return self._kept[1]

    def forget(self) -> None:
        """Drop it."""
        self._kept = None


def open_safetensors(folder: Path) -> Tensors:
    """Every tensor of a folder of safetensors files: those that its index names, or of all files where it has none.

    Raises CheckpointError where there are none, and, all at once, for what the index names and no file holds;
    InputError where the package safetensors is missing.
    """
    safe_open = _safetensors().safe_open
    index = folder / INDEX
    named: dict[str, str] | None = json.loads(index.read_text())["weight_map"] if index.is_file() else None
    files = sorted(set(named.values())) if named is not None else sorted(p.name for p in folder.glob("*.safetensors"))
    if not files:
        pickles = "; its .bin files are pickles: save them with safetensors" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder} holds no .safetensors files{pickles}")
    tensors: Tensors = {}
    problems = [f"{name} is missing" for name in files if not (folder / name).is_file()]
    for file in [folder / name for name in files if (folder / name).is_file()]:
        try:
            with safe_open(file, framework="pt") as opened:
                facts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                tensors |= {
                    name: _in_file(file, name, one) for name, one in facts.items() if _belongs(name, file, named)
                }
        except Exception as error:
            problems.append(f"{file.name} cannot be read: {error}")
    problems += [f"{name} is named by {INDEX} and in no file" for name in sorted((named or {}).keys() - tensors.keys())]
    check(f"checkpoint {folder} is not whole", problems)
    return tensors


def write_safetensors(folder: Path, tensors: Mapping[str, Stored], shard_bytes: int, metadata: dict[str, str]) -> None:
    """Write `tensors` in their order as Hugging Face's shards of at most `shard_bytes` (one tensor at least) and index.

    One shard is in memory at a time. folder: exists. Raises CheckpointError where a file cannot be written, InputError
    where the package safetensors is missing.
    """
    safetensors = _safetensors()
    shards = list(_shards(tensors, shard_bytes))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        # A copy, so that parts of one tensor do not share memory, which safetensors refuses.
        values = {name: tensors[name].read().clone(memory_format=torch.contiguous_format) for name in shard}
        try:
            safetensors.torch.save_file(values, folder / file, metadata=metadata)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{folder / file} cannot be written: {error}") from error
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(one.nbytes for one in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (folder / INDEX).write_text(text + "\n")


def digests(tensors: Mapping[str, Stored]) -> dict[str, str]:
    """SHA-256 of every tensor's values: their bytes in row-major order, little-endian. Reads them one by one."""
    return {name: _sha256(one.read()) for name, one in tensors.items()}


def check(what: str, problems: list[str]) -> None:
    """Raise CheckpointError with all of `problems`, where there are any."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"{what}, {len(problems)} problem(s):\n{listed}")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise InputError("files of safetensors need that package: pip install 'dsattn[hf]'") from error
    return safetensors


def _belongs(name: str, file: Path, named: dict[str, str] | None) -> bool:
    return named is None or named.get(name) == file.name


def _in_file(file: Path, name: str, facts: Any) -> Stored:
    safe_open = _safetensors().safe_open

    def read() -> Tensor:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)

    dtype = _DTYPES.get(facts.get_dtype())
    if dtype is None:
        raise CheckpointError(f"{name} has dtype {facts.get_dtype()}, which is not known; dequantise the weights first")
    return Stored(tuple(facts.get_shape()), dtype, read)


def _shards(tensors: Mapping[str, Stored], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, one in tensors.items():
        if names and size + one.nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += one.nbytes
    yield names


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


class _Lazy(Tensor):
    """See `Stored.lazy`. torch.distributed.checkpoint looks at shape and dtype first, and at values one by one."""

    _stored: Stored

    @staticmethod
    def __new__(cls, one: Stored) -> "_Lazy":
        device = torch.device("cpu")
        lazy = Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype, device=device)  # pyright: ignore[reportAttributeAccessIssue]
        lazy._stored = one
        return lazy

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        return func(*(one._stored.read() if isinstance(one, _Lazy) else one for one in args), **(kwargs or {}))
