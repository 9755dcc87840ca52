"""cuDNN's top-k of given scores, made exact. For those who name it.

The kernel takes at most 2048 keys, an end a row and no start, ranks -0 below +0, and NaN anywhere; ties go to the
smaller key since 1.31 (`tie_break`). For a row of length 0 it writes nothing. Here out-of-range and NaN scores become
-inf and -0 becomes +0, in a copy of a launch's rows, and -inf is dropped from what comes back, with all that stands in
rows of length 0. The copy costs more than the kernel is ahead of ours.
Letters: T query rows, S keys, K kept keys.
"""

import torch
from torch import Tensor

from dsattn.backends import Call, unmet
from dsattn.backends.cudnn import frontend
from dsattn.errors import BackendUnavailable

MOST_TOP_K = 2048
TIE_BREAK = (1, 31)
_SMALLER_KEY = 1
_DTYPES = ("float32", "float16", "bfloat16")


def requirements(call: Call) -> list[str]:
    """What `call` lacks, in words; the package is not imported."""
    needs = frontend.needs_of(call, TIE_BREAK)
    needs.pop(f"bfloat16 operands, not {call.dtype}")
    needs |= {
        f"scores in {', '.join(_DTYPES)}, not {call.dtype}": call.dtype in _DTYPES,
        f"top_k of at most {MOST_TOP_K}": call.top_k <= MOST_TOP_K,
    }
    return unmet(needs)


def select_topk(scores: Tensor, start: Tensor, stop: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(index [T, K], length [T]) of scores [T, S]: the arguments of `topk_reference`, by its rule."""
    rows, keys = scores.shape
    index = torch.full((rows, top_k), -1, dtype=torch.int32, device=scores.device)
    if 0 in (rows, keys):
        return index, index.new_zeros(rows)
    column = torch.arange(keys, dtype=torch.int32, device=scores.device)
    last = torch.iinfo(torch.int32).max
    step = frontend.rows_per_launch(keys)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        read = (column >= start[part, None]) & (column < stop[part, None]) & ~scores[part].isnan()
        clean = torch.where(read, scores[part] + 0.0, -torch.inf).to(scores.dtype)
        end = stop[part].clamp(0, keys).contiguous()
        found, value = bare_topk(clean, end, top_k, values=True)
        empty = (end[:, None] == 0) | (found < 0) | ~(value > -torch.inf)
        index[part] = found.masked_fill(empty, last).sort(dim=1).values
    empty = index == last
    return index.masked_fill_(empty, -1), (~empty).sum(1, dtype=torch.int32)


def bare_topk(
    scores: Tensor, stop: Tensor, top_k: int, *, ascending: bool = False, values: bool = False
) -> tuple[Tensor, Tensor]:
    """([T, K] int32 key rows of the best scores below `stop` [T], then -1; their scores) as cuDNN has them.

    ascending: in order of keys, which 1.32 can, else in any order. values: give scores too, else an empty tensor.
    Ties go to the smaller key, +0 ranks above -0, and NaN anywhere.
    """
    run = frontend.entry("indexer_top_k")
    if not frontend.takes(run, "tie_break"):
        raise BackendUnavailable(f"select_topk: cudnn ranks ties by no rule; install {frontend.DISTRIBUTION} 1.31")
    options = {"next_n": 1, "return_val": values, "tie_break": _SMALLER_KEY}
    options |= frontend.supported(run, deterministic=ascending)
    found = run(scores.contiguous(), stop, top_k=top_k, **options)
    return found["indices"], found["values"] if values else scores.new_empty(0)
