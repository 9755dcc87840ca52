"""TileLang: the DSA kernels that come with Megatron Core (wheels `tilelang` and `megatron-core`).

Their quirks, kept here: log-sum-exp to base 2, latents of 512 + 64, a power of two of at least 16 heads, bf16; rows
without keys have log-sum-exp 0. The indexer writes the whole score matrix, and `torch.topk` ranks it.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys, H_I / D indexer heads / width.
"""

import importlib
import importlib.util
import math
from types import ModuleType

import torch
from torch import Tensor

from dsattn.backends import Call

_LN2 = math.log(2)


def requirements(call: Call) -> list[str]:
    """What `call` of sparse MLA lacks, in words; the packages are looked for, not imported."""
    needs = {
        "the packages tilelang and megatron-core": all(map(importlib.util.find_spec, ("tilelang", "megatron"))),
        "a CUDA GPU": call.device == "cuda",
        "bfloat16": call.dtype == "bfloat16",
        "width 576 with 512 values": (call.width, call.value_width) == (576, 512),
        "a power of two of at least 16 heads": call.heads >= 16 and call.heads.bit_count() == 1,
        "gradients that need not repeat": not call.deterministic,
    }
    return [need for need, met in needs.items() if not met]


def sparse_mla_forward(
    q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V], lse [T, H]), argument for argument as the reference's forward. `sink` must be None.

    Every one of the K slots is read; `length` matters only where it is 0. Raises ImportError without the packages.
    """
    if sink is not None:
        raise NotImplementedError("TileLang's sparse MLA has no sink")
    run = _megatron("tilelang_sparse_mla_fwd").sparse_mla_fwd_interface
    out, lse = run(q.contiguous(), kv.contiguous()[:, None], index.contiguous()[:, None], sm_scale=scale, d_v=value_dim)
    return out, (lse * _LN2).masked_fill(length[:, None] == 0, -torch.inf)


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
) -> tuple[Tensor, Tensor]:
    """(dq, dkv), argument for argument as the reference's backward. fp32 atomics: it cannot be deterministic."""
    if sink is not None or deterministic:
        raise NotImplementedError("TileLang's sparse MLA backward has no sink and does not repeat bit for bit")
    run = _megatron("tilelang_sparse_mla_bwd").sparse_mla_bwd
    base2 = (lse / _LN2).masked_fill(length[:, None] == 0, 0.0)
    index = index.contiguous()[:, None]
    dq, dkv = run(q.contiguous(), kv.contiguous()[:, None], out, grad_out, index, base2, sm_scale=scale)
    return dq, dkv[:, 0]


def indexer_scores(q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """[T, S] fp32 scores, -inf outside of the ranges."""
    run = _megatron("tilelang_indexer_fwd").indexer_fwd_interface
    return run(q.contiguous(), k.contiguous(), w, start, stop, clean_logits=True)


def select_keys(q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, top_k: int) -> Tensor:
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
