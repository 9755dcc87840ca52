"""DeepSelect: DeepSeek's exact top-k of given scores. For those who name it: no record, and no promise of ties.

Two builds share the import name `deep_select`: `deep-select`, DeepSeek's own, and `tokenspeed-deepselect`. Both are for
Blackwell (sm_100a, sm_103a); DeepSelect can be built for Hopper, which nothing tells before it runs.

Quirks, kept here: scores in fp32 or bf16 with rows at multiples of some bytes; an exclusive end a row and no start; at
most 4096 keys, in any order, ties to anyone. A NaN aborts the process unless told not to, then leaves its row unwritten
but for a mark in the first slot; rows no longer than top-k are not looked at. So scores are cleaned in one copy of
aligned rows, and DeepSelect's values give each row its exact cut-off, from which the rule picks: what is above, then
the smallest keys of what equals it. The order and the ties of the kernel are not used.
Letters: T query rows, S keys, K kept keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsattn.backends import Call, scratch_bytes, unmet
from dsattn.backends.vendors import version_of
from dsattn.errors import BackendUnavailable
from dsattn.selection import take

MOST_TOP_K = 4096
_BYTES_PER_SCORE = 32  # with what the rule keeps beside it


@dataclass(frozen=True)
class Widths:
    """Rows of scores [T, S] that a build is made for: least <= S <= most, where T is at least `rows`."""

    rows: int
    least: int
    most: int


_ANY = 2**31 - 1
# Distribution -> dtype -> what its authors say it is for. The first entry whose `rows` are there counts.
BUILDS: dict[str, dict[str, tuple[Widths, ...]]] = {
    "deep-select": {"bfloat16": (Widths(1, 1, _ANY),), "float32": (Widths(1, 2**16, 2**18),)},
    "tokenspeed-deepselect": {"bfloat16": (Widths(1, 1, _ANY),), "float32": (Widths(1, 2**16, 2**18),)},
}


def requirements(call: Call) -> list[str]:
    """What `call` of `select_topk` lacks, in words; the package is not imported."""
    needs = {
        "a Blackwell data-centre GPU": call.capability in (100, 103),
        f"scores in float32 or bfloat16, not {call.dtype}": call.dtype in ("float32", "bfloat16"),
        f"top_k of at most {MOST_TOP_K}": call.top_k <= MOST_TOP_K,
    }
    return unmet(needs)


def select_topk(scores: Tensor, start: Tensor, stop: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(index [T, K], length [T]) of scores [T, S]: the arguments of `topk_reference`, by its rule.

    Raises BackendUnavailable for a width that the build is not made for, ImportError without the package.
    """
    import deep_select

    rows, keys = scores.shape
    index = torch.full((rows, top_k), -1, dtype=torch.int32, device=scores.device)
    length = index.new_zeros(rows)
    if 0 in (rows, keys):
        return index, length
    check_width(scores.dtype, rows, keys)
    column = torch.arange(keys, dtype=torch.int32, device=scores.device)
    end, alignment = stop.clamp(0, keys).contiguous(), deep_select.get_stride_requirement()[0]
    step = max(scratch_bytes() // (_BYTES_PER_SCORE * keys), 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        hidden = (column < start[part, None]) | (column >= stop[part, None]) | scores[part].isnan()
        clean = aligned_rows(scores[part], hidden, alignment)
        options = {"indices_type": torch.int32, "abort_when_nan_found": False}
        value, _ = deep_select.topk(clean, min(top_k, keys), end=end[part], **options)
        cutoff = value.amin(dim=1, keepdim=True)  # unfilled slots hold -inf: all that is finite is above
        index[part], length[part], _ = take(clean, column, cutoff, top_k)
    return index, length


def check_width(dtype: torch.dtype, rows: int, keys: int) -> None:
    """Raise BackendUnavailable where the installed build is not made for scores [rows, keys]."""
    build = next((name for name in BUILDS if version_of(name)), "deep-select")
    kind = str(dtype).removeprefix("torch.")
    widths = next((one for one in BUILDS[build].get(kind, ()) if rows >= one.rows), None)
    if widths is None or not widths.least <= keys <= widths.most:
        made = f"{widths.least} to {widths.most} keys" if widths else "no such scores"
        raise BackendUnavailable(
            f"select_topk: {build} is made for {made} in {kind}, got {rows} rows of {keys}; use backend='auto'"
        )


def aligned_rows(scores: Tensor, hidden: Tensor, alignment: int) -> Tensor:
    """A copy of scores [T, S] whose rows are at multiples of `alignment` bytes, with -inf where hidden."""
    rows, keys = scores.shape
    unit = max(alignment // scores.element_size(), 1)
    clean = scores.new_empty(rows, -(-keys // unit) * unit)[:, :keys]
    return clean.copy_(scores).masked_fill_(hidden, -torch.inf)
