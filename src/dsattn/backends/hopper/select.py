"""Selection on Hopper: scores by `select_scores`, ranked as on any GPU.

Letters: T query rows, S keys, H indexer heads, D indexer width, K kept keys.
"""

import torch
import triton
from torch import Tensor

from dsattn.backends import Call
from dsattn.backends.hopper.sparse_mla import TRITON
from dsattn.backends.triton import select as portable
from dsattn.backends.triton.launch import launch
from dsattn.errors import BackendUnavailable

WIDTHS = (64, 128)
FEWEST_HEADS = 8

_COLUMNS = 256
_BAND = 16  # row tiles that read the same keys at about the same time
_CHUNK = 8192  # keys of one program at most


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here."""
    version = triton.__version__
    needs = {
        "a GPU of compute capability 9.0 (Hopper)": call.device == "cuda" and call.capability == 90,
        "bfloat16 operands": call.dtype == "bfloat16",
        "precision 'bf16'": call.precision == "bf16",
        f"an indexer width of {' or '.join(map(str, WIDTHS))}": call.width in WIDTHS,
        f"at least {FEWEST_HEADS} indexer heads": call.heads >= FEWEST_HEADS,
        f"triton {' or '.join(TRITON)}, not {version}": ".".join(version.split(".")[:2]) in TRITON,
    }
    unmet = [need for need, met in needs.items() if not met]
    return unmet or portable.requirements(call)


def slower(call: Call) -> list[str]:
    """Where the portable kernels were faster: 0.44 against 0.69 ms at 4K keys, 4.54 against 4.74 with 64 heads at 32K.

    (One H200, 4096 rows; 32 heads at 32K: 3.10 against 2.93, at 128K 11.4 against 10.7.)
    """
    needs = {"more than 8K keys": call.size_class != "8K", "at most 32 indexer heads": call.heads <= 32}
    return [f"{need} to be the faster one" for need, met in needs.items() if not met]


def select_keys(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    top_k: int,
    relu: bool,
    return_scores: bool,
    block_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(index [T, K], length [T], score [T, K] or [T, 0]): the arguments of `select_reference`.

    Raises BackendUnavailable where q or k is not bf16, or w fp64, which dispatch cannot see.
    """
    if (q.dtype, k.dtype) != (torch.bfloat16, torch.bfloat16) or w.dtype == torch.float64:
        raise BackendUnavailable(
            f"select_keys: hopper multiplies in bf16, but q is {q.dtype}, k {k.dtype} and w {w.dtype}; "
            "cast them or use backend='triton'"
        )
    q, k, start, stop = _copyable(q), _copyable(k), start.contiguous(), stop.contiguous()
    return portable.select_blocks(_score, q, k, w, start, stop, top_k, relu, return_scores, block_bytes)


def _score(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, relu: bool, scores: Tensor, first: int = 0
) -> None:
    """Fill `scores` [rows, whole tiles of keys] wherever a row may read; first: see `portable`."""
    from dsattn.backends.hopper.select_scores import scores_kernel

    (_, heads, width), rows, keys = q.shape, scores.shape[0], k.shape[0]
    if not rows or not keys:
        return
    padded = max(16, triton.next_power_of_2(heads))
    tiles = triton.cdiv(rows, _COLUMNS // padded)
    chunk, processors = _CHUNK, portable.processors(q.device)
    while chunk > 512 and tiles * triton.cdiv(keys, chunk) < 4 * processors:
        chunk //= 2
    chunks = triton.cdiv(keys, chunk)
    with torch.cuda.device_of(q):
        launch(
            scores_kernel,
            (triton.cdiv(tiles, _BAND) * _BAND * chunks,),
            *(q, k, w, start, stop, scores),
            *(first, rows, keys, tiles, chunks, chunk // 64, scores.stride(0) // 64),
            *(*q.stride()[:2], k.stride(0), *w.stride(), 0),
            H=heads,
            D=width,
            HEADS=padded,
            RELU=relu,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _copyable(x: Tensor) -> Tensor:
    """x where its rows can be copied 16 bytes at a time, as they lie or moved."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in x.stride()[:-1])
    x = x if fits else x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
