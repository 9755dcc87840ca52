"""cuDNN's scores of the indexer, ranked by whichever row of `select_topk` serves. For those who name it.

Scores are causal: row t of a block reads key rows 0 .. offset + t. The offset of a block is the least that covers the
ranges of all its rows, found on the device; what a row must not read is left out by the ranking. cuDNN's own ranking is
not taken: it costs more than ours once it keeps the rule (see `select_topk`). Nothing promises the same bits of a score
in another block of rows, so `auto` never takes them. Always relu, heads of width 128; w in bf16 before 1.31.
Letters: T query rows, S keys, K kept keys, R rows of a block.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsattn.backends import Call, unmet
from dsattn.backends.cudnn import frontend
from dsattn.backends.vendors import select_in_blocks, version_of
from dsattn.errors import BackendUnavailable
from dsattn.selection import selected_scores

FP32_WEIGHTS = (1, 31)
UNFILLED = (1, 29)
_HEADS = {90: (16, 32, 64), 100: (4, 8, 16, 32, 64), 103: (4, 8, 16, 32, 64)}


def requirements(call: Call) -> list[str]:
    """What `call` of `select_keys` lacks, in words; the package is not imported."""
    heads = _HEADS.get(call.capability, ())
    needs = frontend.needs_of(call, (1, 25)) | {
        "precision 'bf16'": call.precision == "bf16",
        f"{' or '.join(map(str, heads))} indexer heads": call.heads in heads or not heads,
        "an indexer width of 128": call.width == 128,
    }
    return unmet(needs)


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

    Raises BackendUnavailable without relu, and where the frontend is causal from an end that it cannot be told.
    """
    if not relu:
        raise BackendUnavailable("select_keys: cudnn's scores have a relu; use backend='triton' or 'reference'")
    if w.dtype != torch.bfloat16 and version_of(frontend.DISTRIBUTION) < FP32_WEIGHTS:
        raise BackendUnavailable(f"select_keys: cudnn before 1.31 wants w in bfloat16, got {w.dtype}")
    stop = stop.clamp(max=len(k))
    if 0 in (len(q), len(k)):
        index = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
        length = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    else:
        step = max(block_bytes // (4 * len(k)), 1)
        key = pad(k, (0, 0, 0, max(min(step, len(q)) - len(k), 0)))  # no more rows than keys
        index, length = select_in_blocks(
            lambda part: covering_scores(q[part], key, w[part], stop[part]), start, stop, top_k, step
        )
    score = selected_scores(q, k, w, index, relu) if return_scores else q.new_empty(len(q), 0, dtype=torch.float32)
    return index, length, score


def covering_scores(q: Tensor, k: Tensor, w: Tensor, stop: Tensor) -> Tensor:
    """[R, S] fp32 scores of a block of rows, right for keys below `stop` [R]; behind them anything may stand."""
    run = frontend.entry("indexer_forward")
    rows, keys = len(q), len(k)
    if frontend.takes(run, "q_causal_offsets"):
        row = torch.arange(1, rows + 1, dtype=torch.int32, device=q.device)
        return causal_scores(q, k, w, (stop - row).amax().clamp(min=0))
    if version_of(frontend.DISTRIBUTION) >= frontend.GLOBAL_IDS:
        raise BackendUnavailable(
            "select_keys: this cudnn frontend is causal from the top left and takes no q_causal_offsets; "
            f"install {frontend.DISTRIBUTION} 1.32 or use backend='triton'"
        )
    # Causal from the bottom right: rows - 1 keys more, which nobody reads, let the first row see all others.
    return causal_scores(q, pad(k, (0, 0, 0, rows - 1)), w, None)[:, :keys]


def causal_scores(q: Tensor, k: Tensor, w: Tensor, offset: Tensor | None) -> Tensor:
    """[R, S] fp32 scores of query rows whose row t reads key rows `0 .. offset + t`; anything behind.

    offset: 0-d int32, on the device; None where the frontend has none.
    """
    run = frontend.entry("indexer_forward")
    options = {} if offset is None else {"q_causal_offsets": offset.reshape(1)}
    # The ranking stops where a row's keys do: what the kernel leaves unwritten need not be filled.
    if version_of(frontend.DISTRIBUTION) >= UNFILLED:
        options |= frontend.supported(run, clean_logits=False)
    return run(q[None], k[None, :, None], w[None], ratio=1, sm_scale=1.0, **options)["scores"][0]


def indexer_scores(q: Tensor, k: Tensor, w: Tensor, first: int) -> Tensor:
    """[T, S] fp32 scores of query rows `first ..` of a causal sequence, as fast as cuDNN has them."""
    return causal_scores(q, k, w, torch.full((), first, dtype=torch.int32, device=q.device))
