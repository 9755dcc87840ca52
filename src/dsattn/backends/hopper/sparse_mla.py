"""Sparse absorbed MLA on Hopper: what a call must be like, and how the kernels are started.

The kernels are in `sparse_mla_forward` and `sparse_mla_backward`; what stands behind the backward in
`sparse_mla_reduce`. They are imported when they are first needed: Gluon changes from one Triton to the next.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dsattn.backends import Call, contribution_dtype, scratch_bytes, unmet
from dsattn.backends.triton.invert import GROUP_ROWS, bytes_of_places, places_of_runs, record_bytes
from dsattn.backends.triton.launch import launch
from dsattn.backends.vendors import positive_scale
from dsattn.errors import BackendUnavailable
from dsattn.selection import Inverse

WIDTHS = (512, 576)
VALUE_WIDTH = 512
HEADS = 64  # of one block of threads

# From so many keys on dkv is so much larger than the L2 that writing contributions and summing them beats atomics: 3 %
# slower at 32768 keys, 28 % faster at 65536, a third at 131072; and the same bits every time.
CONTRIBUTIONS_FROM = 40960

# Of the scratch, what places of several runs may take that are found together.
PLACES_SHARE = 1 / 32

# Whose Gluon these kernels compile with.
TRITON = ("3.6", "3.7")


def needs_of(call: Call) -> dict[str, bool]:
    """What every kernel in this folder needs: need in words -> whether it is met."""
    version = triton.__version__
    return {
        "a GPU of compute capability 9.0 (Hopper)": call.device == "cuda" and call.capability == 90,
        f"triton {' or '.join(TRITON)}, not {version}": ".".join(version.split(".")[:2]) in TRITON,
    }


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here, forward or backward."""
    needs = needs_of(call) | {
        "bfloat16 operands": call.dtype == "bfloat16",
        f"a latent width of {' or '.join(map(str, WIDTHS))}": call.width in WIDTHS,
        f"a value width of {VALUE_WIDTH}": call.value_width == VALUE_WIDTH,
    }
    return unmet(needs)


def sparse_mla_forward(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in bf16, lse [T, H] fp32) as `dsattn.ops.sparse_mla` promises them.

    q: [T, H, C], kv: [S, C], bf16, C of 512 or 576; value_dim: 512. Online softmax over tiles of 64 gathered keys, fp32
    sums; rows stop at `length`. Raises BackendUnavailable where q or kv is not bf16.
    """
    rows, heads, _ = q.shape
    out = q.new_empty(rows, heads, value_dim)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    attend(q, kv, index, length, sink, scale, (out, lse), (None, None))
    return out, lse


def attend(
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    scale: float,
    results: tuple[Tensor, Tensor],
    left: tuple[Tensor | None, Tensor | None],
) -> None:
    """Fill results: out and lse; and left, unless it is None: P and its tops, see `forward_kernel`."""
    from dsattn.backends.hopper.sparse_mla_forward import forward_kernel

    _check_dtypes(q, kv)
    rows, heads, width = q.shape
    tasks = rows * blocks_of_heads(heads)
    if tasks == 0:
        return
    q, scale, _ = positive_scale(q, scale)
    operands = (aligned(q), aligned(kv), index.contiguous(), length.contiguous(), _contiguous(sink), *results, *left)
    grid = (min(tasks, _processors(q.device)),)
    with torch.cuda.device_of(q):
        launch(forward_kernel, grid, *operands, scale, 0, tasks, index.shape[1], H=heads, C=width, num_warps=4)


def sparse_mla_backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    length: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, dkv): probabilities come back from lse, dkv is summed in fp32.

    Fewer than CONTRIBUTIONS_FROM keys: by atomics, in any order. More, or `deterministic`: run of rows after run of
    rows writes what its slots contribute, in bf16 or as `settings` ask, and these are summed by key in the order of
    rows. inverse: not read; runs sort their own slots, which is as fast (docs/decisions/008). A row's keys are
    distinct, as a Selection promises. Raises BackendUnavailable where kv is not bf16.
    """
    from dsattn.backends.hopper import sparse_mla_reduce as reduce
    from dsattn.backends.hopper.sparse_mla_backward import backward_kernel

    _check_dtypes(q, kv)
    (rows, heads, width), (keys, slots) = q.shape, (kv.shape[0], index.shape[1])
    blocks = blocks_of_heads(heads)
    dq, dkv = torch.empty_like(q, memory_format=torch.contiguous_format), kv.new_empty(keys, width)
    if 0 in (rows, heads, keys, slots):
        return dq.zero_(), dkv.zero_()
    q, scale, sign = positive_scale(q, scale)
    grad_out, out = (aligned(x.to(q.dtype)) for x in (grad_out, out))
    index, length, lse, sink = index.contiguous(), length.contiguous(), lse.contiguous(), _contiguous(sink)
    with torch.cuda.device_of(q):
        before = (grad_out, aligned(q), aligned(kv), index, length)
        atomic = by_atomics(keys, deterministic)
        constants = {"H": heads, "C": width, "ATOMIC": atomic, "num_warps": 4}

        def run(first: int, count: int, line: Tensor, target: Tensor) -> None:
            after = (line, out, lse, sink, dq, target, scale, first, 0, slots)
            launch(backward_kernel, (count * blocks,), *before, *after, **constants)

        if atomic:
            additions = torch.zeros(keys, width, dtype=torch.float32, device=kv.device)
            run(0, rows, index, additions)
            reduce.gather_additions(additions, dkv)
        else:
            dtype = contribution_dtype(q.dtype)
            most, together = runs_of_rows(rows, heads, width, slots, keys, dtype.itemsize)
            buffer = q.new_empty(most * slots, blocks, width, dtype=dtype)
            total = torch.empty(keys if most < rows else 0, width, dtype=torch.float32, device=kv.device)
            for begin in range(0, rows, most * together):
                first = begin
                for places in places_of_runs(index, length, begin, min(most * together, rows - begin), most, keys):
                    count = places.line.shape[0]
                    run(first, count, places.line, buffer)
                    reduce.add_contributions(buffer, places.start, total, dkv, first == 0, first + count == rows)
                    first += count
                del places  # the next ones are made in their memory
    return dq if sign == 1 else dq.mul_(sign), dkv


def blocks_of_heads(heads: int) -> int:
    """Blocks of threads that share a row."""
    return -(-heads // HEADS)


def by_atomics(keys: int, deterministic: bool) -> bool:
    """Whether dkv is summed by atomics."""
    return not deterministic and keys < CONTRIBUTIONS_FROM


class Runs(NamedTuple):
    """How a backward is cut."""

    rows: int  # of a run, whose contributions the scratch holds at a time
    together: int  # runs whose places are found at once


def runs_of_rows(rows: int, heads: int, width: int, slots: int, keys: int, itemsize: int) -> Runs:
    """Runs whose contributions, with the places of those that are found together, fit into the scratch.

    A run has a row at least. An int32 names each contribution, however much scratch there is.
    """
    scratch, group = scratch_bytes(), record_bytes(keys)
    a_row = slots * itemsize * width * blocks_of_heads(heads)
    named = (2**31 - 1) // slots
    # The last group of a run may have a row alone.
    most = (scratch - group) // (a_row + 4 * slots + -(-group // GROUP_ROWS))
    most = min(rows, max(1, min(most, named)))
    places = bytes_of_places(most, slots, keys)
    together = max(1, min(-(-rows // most), named // most, int(PLACES_SHARE * scratch) // places))
    if together > 1:
        most = max(1, min(most, (scratch - together * places) // a_row))
    return Runs(most, together)


def aligned(x: Tensor) -> Tensor:
    """x in one piece from a multiple of 16 bytes on, the unit of the kernels' copies."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _check_dtypes(q: Tensor, kv: Tensor) -> None:
    if q.dtype != torch.bfloat16 or kv.dtype != torch.bfloat16:
        raise BackendUnavailable(
            f"hopper computes in bf16, but q is {q.dtype} and kv {kv.dtype}; cast them or use backend='triton'"
        )


def _contiguous(sink: Tensor | None) -> Tensor | None:
    return None if sink is None else sink.contiguous()


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; those of an H200 where torch does not tell."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
