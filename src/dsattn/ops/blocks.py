"""How the references cut their work: row blocks under a byte budget, runs of keys, sums of rows into shared rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

_CPU_BYTES = 16 * 2**20  # below malloc's mmap threshold: larger buffers pay page faults on every use
_GPU_BYTES = 2**30


def row_blocks(rows: int, bytes_per_row: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Slices that cover `rows` rows, each keeping its temporaries near the device's budget.

    Each has a multiple of `multiple` rows, as `rows` is one; at least one of them.
    """
    budget = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    step = max(1, budget // max(bytes_per_row * multiple, 1)) * multiple
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def key_runs(device: torch.device) -> int:
    """Keys that a block of rows meets at once."""
    return 1024 if device.type == "cpu" else 8192


def span(start: Tensor, stop: Tensor, num_keys: int) -> tuple[int, int]:
    """First key and one past the last that any of these rows may read; (0, 0) where none reads. On the host."""
    reads = stop > start
    if not bool(reads.any()):
        return 0, 0
    return max(int(start[reads].min()), 0), min(int(stop[reads].max()), num_keys)


def add_rows_(total: Tensor, index: Tensor, values: Tensor, deterministic: bool) -> None:
    """total[index[i]] += values[i], in the order of i wherever bits must repeat. total [S, C], values [..., C]."""
    index, values = index.flatten(), values.reshape(-1, total.shape[1])
    if deterministic and total.is_cuda:  # index_add_ uses atomics there
        _add_in_order_(total, index, values)
    else:
        total.index_add_(0, index, values)


def _add_in_order_(total: Tensor, index: Tensor, values: Tensor) -> None:
    """Sort by row, then sum each row's values one after the other. Does not wait for a device."""
    ordered, order = index.sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(total.shape[0] + 1, device=index.device))
    total += torch.segment_reduce(values[order], "sum", offsets=offsets, axis=0, unsafe=True, initial=0.0)
