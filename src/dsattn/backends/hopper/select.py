"""Selection on Hopper: scores by `select_scores`, in bf16 or E4M3, ranked as on any GPU.

`auto` prefers it to the portable kernels: at 4K, 32K and 128K keys, with 32 and 64 heads, it takes 0.79 to 0.94 of
their time in bf16 and 0.89 to 0.97 in fp8 (docs/decisions/012).

Letters: T query rows, S keys, H indexer heads, D indexer width, K kept keys.
"""

import functools

import torch
import triton
from torch import Tensor

from dsattn.backends import Call, unmet
from dsattn.backends.hopper.sparse_mla import needs_of
from dsattn.backends.triton import select as portable
from dsattn.backends.triton.launch import launch
from dsattn.backends.triton.quantize import to_e4m3
from dsattn.errors import BackendUnavailable

WIDTHS = (64, 128)
PRECISIONS = ("bf16", "fp8")
FEWEST_HEADS = 8

_COLUMNS = 256
_BAND = 16  # row tiles that read the same keys at about the same time
_CHUNK = 8192  # keys of one program at most


def requirements(call: Call) -> list[str]:
    """What `call` lacks to be served here."""
    needs = needs_of(call) | {
        f"precision {' or '.join(map(repr, PRECISIONS))}": call.precision in PRECISIONS,
        "bfloat16 operands, or precision 'fp8'": call.dtype == "bfloat16" or call.precision == "fp8",
        f"an indexer width of {' or '.join(map(str, WIDTHS))}": call.width in WIDTHS,
        f"at least {FEWEST_HEADS} indexer heads": call.heads >= FEWEST_HEADS,
    }
    return unmet(needs) or portable.requirements(call)


def untimed(call: Call) -> list[str]:
    """Heads are padded to 16, 32 or 64, and with 16 it was never timed."""
    return [] if call.heads > 16 else ["more than 16 indexer heads, with which it was seen to be the faster one"]


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
    precision: str = "bf16",
) -> tuple[Tensor, Tensor, Tensor]:
    """(index [T, K], length [T], score [T, K] or [T, 0]): the arguments of `low_precision_reference`.

    Raises BackendUnavailable where an operand is fp64, and in bf16 where q or k is anything else.
    """
    wrong = {q.dtype, k.dtype} != {torch.bfloat16} if precision == "bf16" else torch.float64 in (q.dtype, k.dtype)
    if wrong or w.dtype == torch.float64:
        raise BackendUnavailable(
            f"select_keys: hopper does not multiply q in {q.dtype}, k in {k.dtype} and w in {w.dtype} with "
            f"precision={precision!r}; cast them or use backend='triton'"
        )
    start, stop, score = start.contiguous(), stop.contiguous(), _score
    if precision == "fp8":
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        (q, w), (k, key_scale) = to_e4m3(q, w), to_e4m3(k)
        score = functools.partial(_score, key_scale=key_scale)
    else:
        q, k = _copyable(q), _copyable(k)
    return portable.select_blocks(score, q, k, w, start, stop, top_k, relu, return_scores, block_bytes)


def _score(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    stop: Tensor,
    relu: bool,
    scores: Tensor,
    first: int = 0,
    key_scale: Tensor | None = None,
) -> None:
    """Fill `scores` [rows, whole tiles of keys] wherever a row may read: the arguments of `portable`'s `score_rows`."""
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
            *(q, k, w, w if key_scale is None else key_scale, start, stop, scores),
            *(first, rows, keys, tiles, chunks, chunk // 64, scores.stride(0) // 64),
            *(*q.stride()[:2], k.stride(0), *w.stride(), 0),
            H=heads,
            D=width,
            HEADS=padded,
            RELU=relu,
            KEY_SCALE=key_scale is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _copyable(x: Tensor) -> Tensor:
    """bf16 x whose rows can be copied 16 bytes at a time, as they lie or moved. Heads together span less than 2^31."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in x.stride()[:-1])
    if x.dim() == 3:  # the kernel multiplies head and stride in int32
        fits = fits and x.shape[1] * x.stride(1) < 2**31
    x = x if fits else x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
