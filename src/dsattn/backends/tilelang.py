"""TileLang: the DSA kernels that come with Megatron Core (wheels `tilelang` and `megatron-core`). For comparison.

By name only: every record is behind ours. Their quirks, kept here: log-sum-exp to base 2, latents of 512 + 64, a power
of two of at least 16 heads, bf16; rows without keys have log-sum-exp 0. Every one of the K slots is read, and what
it reads must be finite: an empty one reads the first key, so a key of zeros is put before the others, and rows without
keys are made zeros. The indexer writes the whole score matrix; Megatron ranks it by `torch.topk`, whose ties are
anyone's, the row here by the rule.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys, H_I / D indexer heads / width.
"""

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor

from dsattn.backends import Call, unmet
from dsattn.backends.vendors import select_in_blocks
from dsattn.errors import BackendUnavailable
from dsattn.selection import Inverse, selected_scores

_LN2 = math.log(2)
_INDEXER_HEADS = 8  # in multiples


def requirements(call: Call) -> list[str]:
    """What `call` of sparse MLA, or of `select_keys` where it has no values, lacks; the packages are not imported."""
    needs = {
        f"bfloat16 operands, not {call.dtype}": call.dtype == "bfloat16",
        "precision 'bf16'": call.precision == "bf16",
    }
    if call.value_width:
        needs |= {
            "width 576 with 512 values": (call.width, call.value_width) == (576, 512),
            "a power of two of at least 16 heads": call.heads >= 16 and call.heads.bit_count() == 1,
            "slots in multiples of 64": call.top_k % 64 == 0,
            "gradients that need not repeat": not call.deterministic,
        }
    else:
        needs["at most 64 indexer heads, in multiples of 8"] = call.heads <= 64 and call.heads % _INDEXER_HEADS == 0
    return unmet(needs)


def sparse_mla_forward(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V], lse [T, H]), argument for argument as the reference's forward. `sink` must be None.

    Raises BackendUnavailable with a sink, ImportError without the packages.
    """
    if sink is not None:
        raise BackendUnavailable("sparse_mla.forward: tilelang has no sink; use backend='auto'")
    kv, index, empty = _with_a_key_of_zeros(kv, index)
    out, lse = bare_forward(q.masked_fill(empty[:, None, None], 0), kv, index, scale, value_dim)
    return out.masked_fill(empty[:, None, None], 0), lse.masked_fill(empty[:, None], -torch.inf)


def bare_forward(q: Tensor, kv: Tensor, index: Tensor, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
    """(out, lse) where every row has a key and the first key is finite."""
    run = _megatron("tilelang_sparse_mla_fwd").sparse_mla_fwd_interface
    out, lse = run(q.contiguous(), kv.contiguous()[:, None], index.contiguous()[:, None], sm_scale=scale, d_v=value_dim)
    return out, lse * _LN2


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
    """(dq, dkv), argument for argument as the reference's backward. fp32 atomics: it cannot be deterministic."""
    if sink is not None or deterministic:
        raise BackendUnavailable("sparse_mla.backward: tilelang has no sink and does not repeat bit for bit")
    kv, index, empty = _with_a_key_of_zeros(kv, index)
    empty = empty[:, None, None]
    grad_out, q, out = (x.masked_fill(empty, 0) for x in (grad_out, q, out))
    dq, dkv = bare_backward((grad_out, out, lse.masked_fill(empty[..., 0], 0)), q, kv, index, scale)
    return dq.masked_fill(empty, 0), dkv[1:]


def bare_backward(
    saved: tuple[Tensor, Tensor, Tensor], q: Tensor, kv: Tensor, index: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(dq, dkv) where every row has a key and the first key is finite. saved: grad_out, out, lse."""
    grad_out, out, lse = saved
    run = _megatron("tilelang_sparse_mla_bwd").sparse_mla_bwd
    index = index.contiguous()[:, None]
    dq, dkv = run(q.contiguous(), kv.contiguous()[:, None], out, grad_out, index, lse / _LN2, sm_scale=scale)
    return dq, dkv[:, 0]


def _with_a_key_of_zeros(kv: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(kv [1 + S, C], its first row zeros, index [T, K] into that, -1 in empty slots, whether a row has no key [T])."""
    live = index >= 0
    kv = torch.cat([kv.new_zeros(1, kv.shape[1]), kv])
    return kv, torch.where(live, index + 1, -1), ~live.any(1)


def indexer_scores(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, *, relu: bool = True, clean: bool = True
) -> Tensor:
    """[T, S] fp32 scores; outside of the ranges -inf, or anything where not `clean`."""
    run = _megatron("tilelang_indexer_fwd").indexer_fwd_interface
    ranges = (start.contiguous(), stop.contiguous())
    return run(q.contiguous(), k.contiguous(), w.contiguous(), *ranges, clean_logits=clean, use_relu=relu)


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
    """(index [T, K], length [T], score [T, K] or [T, 0]): the arguments of `select_reference`."""

    def score_rows(part: slice) -> Tensor:
        return indexer_scores(q[part], k, w[part], start[part], stop[part], relu=relu, clean=False)

    rows = max(block_bytes // (4 * max(len(k), 1)), 1)
    index, length = select_in_blocks(score_rows, start, stop.clamp(max=len(k)), top_k, rows)
    score = selected_scores(q, k, w, index, relu) if return_scores else q.new_empty(len(q), 0, dtype=torch.float32)
    return index, length, score


def topk_of_megatron(q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, top_k: int) -> Tensor:
    """[T, min(K, S)] int32 key rows in torch.topk's order, -1 in slots that a row cannot fill."""
    scores = indexer_scores(q, k, w, start, stop)
    best = scores.topk(min(top_k, scores.shape[1]), sorted=False)
    return best.indices.int().masked_fill(best.values == -torch.inf, -1)


def indexer_kl_forward(q: Tensor, kv: Tensor, index: Tensor, score: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(sum over rows of the KL, its gradient [T, K] to the selected scores). K must be a multiple of 256.

    score: [T, K], the selected scores: the indexer kept them, nothing is scored again here. The kernel of the target
    computes its own log-sum-exp of q [T, H, C] and kv [S, C].
    """
    losses = _megatron("tilelang_indexer_loss")
    target = losses.sparse_indexer_target_interface(q.contiguous(), kv.contiguous(), index.contiguous(), scale)
    return losses.sparse_indexer_kl_interface(target, score, index >= 0)


def indexer_kl_backward(
    indexer: tuple[Tensor, Tensor, Tensor], index: Tensor, grad_score: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_i, dk_i, dw), given the gradient to the selected scores [T, K]."""
    q_i, k_i, w = indexer
    dq, dw, dk = _megatron("tilelang_indexer_bwd").indexer_bwd_interface(q_i, w, k_i, index, grad_score)
    return dq, dk, dw


def _megatron(file: str) -> ModuleType:
    importlib.import_module("tilelang")
    return importlib.import_module(f"megatron.core.transformer.experimental_attention_variant.ops.{file}")
