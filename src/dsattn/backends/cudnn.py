"""cuDNN frontend: the DSA kernels of NVIDIA (wheel `nvidia-cudnn-frontend`, namespace `cudnn.DSA`).

Their quirks, kept here: attention heads in multiples of 64, slots in multiples of 64 (128 for the indexer's backward),
at least 64 heads in the indexer's backward, K at most 2048 in the top-k, bf16, a batch axis outside of attention. On
Hopper there is no sparse forward and no deterministic backward. Scores are for causal ranges only: query row t reads
key rows `0 .. first + t`, and the whole score matrix is written.
Letters: T query rows, S keys, H heads, C latent width, V value width, K kept keys, H_I / D indexer heads / width.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsattn.backends import Call

_SCORE_BYTES = 2**32
_SMALLEST = 1e-30  # the kernel drops the gradient where a probability is 0


def requirements(call: Call) -> list[str]:
    """What `call` of the sparse MLA backward lacks, in words; the package is looked for, not imported."""
    needs = {
        "the package cudnn (nvidia-cudnn-frontend)": importlib.util.find_spec("cudnn") is not None,
        "a Hopper or Blackwell data-centre GPU": call.device == "cuda" and call.capability in (90, 100, 103),
        "bfloat16": call.dtype == "bfloat16",
        "width 512 or 576 with 512 values": call.width in (512, 576) and call.value_width == 512,
        "gradients that need not repeat, on Hopper": not (call.deterministic and call.capability == 90),
    }
    return [need for need, met in needs.items() if not met]


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
    """(dq, dkv), argument for argument as the reference's backward. Every row must hold a key.

    Heads are padded with zeros, slots with -1. Raises ImportError without the package, NotImplementedError for a
    deterministic backward on Hopper.
    """
    if deterministic and torch.cuda.get_device_capability(q.device)[0] == 9:
        raise NotImplementedError("cuDNN's sparse backward does not repeat bit for bit on Hopper")
    heads = q.shape[1]
    more = -heads % 64
    if sink is None:
        sink = torch.full((heads,), -torch.inf, device=q.device)
    if more:
        q, out, grad_out = (pad(x, (0, 0, 0, more)) for x in (q, out, grad_out))
        lse, sink = pad(lse, (0, more)), pad(sink, (0, more), value=-torch.inf)
    grads = _dsa().sparse_attention_backward_wrapper(
        q,
        kv,
        out,
        grad_out,
        lse.float(),
        sink.float(),
        _slots(index, 64, -1),
        softmax_scale=scale,
        topk_length=length,
        deterministic=deterministic,
    )
    return grads["dq"][:, :heads], grads["dkv"]


def indexer_scores(q: Tensor, k: Tensor, w: Tensor, first: int) -> Tensor:
    """[T, S] fp32 scores of query rows `first ..` of a causal sequence, -inf above the diagonal."""
    offsets = torch.full((1,), first, dtype=torch.int32, device=q.device)
    run = _dsa().indexer_forward_wrapper
    return run(q[None], k[None, :, None], w[None], ratio=1, sm_scale=1.0, q_causal_offsets=offsets)["scores"][0]


def select_topk(scores: Tensor, stop: Tensor, top_k: int, *, ascending: bool = False) -> Tensor:
    """[T, K] int32 key rows of the best scores below `stop` [T], then -1; ties to the smaller key.

    ascending: in order of keys, else in no order, which is faster. +0 ranks above -0, and NaN anywhere.
    """
    run = _dsa().indexer_top_k_wrapper
    options = {"next_n": 1, "return_val": False, "tie_break": 1, "deterministic": ascending}
    return run(scores, stop, top_k=top_k, **options)["indices"]


def select_keys(q: Tensor, k: Tensor, w: Tensor, first: int, top_k: int, *, ascending: bool = False) -> Tensor:
    """[T, K] int32: scores, then top-k, in blocks of rows whose scores take at most 4 GiB."""
    rows, keys = q.shape[0], k.shape[0]
    step = max(1, _SCORE_BYTES // (4 * keys))
    stop = torch.arange(first + 1, first + rows + 1, dtype=torch.int32, device=q.device)
    blocks = []
    for row in range(0, rows, step):
        part = slice(row, row + step)
        scores = indexer_scores(q[part], k, w[part], first + row)
        blocks.append(select_topk(scores, stop[part], top_k, ascending=ascending))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def indexer_kl_forward(
    indexer: tuple[Tensor, Tensor, Tensor],
    attention: tuple[Tensor, Tensor, Tensor],
    index: Tensor,
    length: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum over rows of the KL, target [T, K], softmax of the scores [T, K]), both from fused kernels.

    indexer: q_i, k_i, w. attention: q, kv, lse. The target is normalised here: the kernel gives a sum over heads.
    """
    (q_i, k_i, w), (q, kv, lse) = indexer, attention
    dsa, heads, slots = _dsa(), q.shape[1], {"topk_length": length[None]}
    if more := -heads % 64:
        q, lse = pad(q, (0, 0, 0, more)), pad(lse, (0, more), value=torch.inf)
    run = dsa.sparse_attn_score_recompute_wrapper
    target = run(q[None], kv[None], lse[None].float(), index[None], scale, qhead_per_kv_head=q.shape[1], **slots)
    run = dsa.sparse_indexer_score_recompute_wrapper
    share = run(q_i[None], k_i[None], w[None], index[None], qhead_per_kv_head=q_i.shape[1], **slots)["predict"][0]
    empty = index < 0
    target, share = target["target"][0].masked_fill(empty, 0.0), share.masked_fill(empty, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp_min(_SMALLEST)
    kl = target * (target.clamp_min(_SMALLEST).log() - share.clamp_min(_SMALLEST).log())
    return kl.sum(), target, share


def indexer_kl_backward(
    indexer: tuple[Tensor, Tensor, Tensor], index: Tensor, target: Tensor, share: Tensor, divisor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_i, dk_i, dw), given what the forward returned. `target` is overwritten.

    Heads are padded to 64 and slots to a multiple of 128; an empty slot points at key 0 with no weight.
    """
    q_i, k_i, w = indexer
    rows, heads = w.shape
    if more := max(0, 64 - heads):
        q_i, w = pad(q_i, (0, 0, 0, more)), pad(w, (0, more))
    empty, one = index < 0, torch.ones((), device=w.device)
    share = torch.where(empty, 0.0, share.clamp_min(_SMALLEST))
    grads = _dsa().indexer_backward_wrapper(
        q_i[None],
        w[None],
        k_i[None],
        _slots(target, 128, 0.0)[None],
        _slots(share, 128, 0.0)[None],
        _slots(index.clamp_min(0), 128, 0)[None],
        one,
        sm_scale=1.0,
        loss_coeff=rows / divisor,
    )
    return grads["d_index_q"][0, :, :heads], grads["d_index_k"][0], grads["d_weights"][0, :, :heads]


def _slots(x: Tensor, multiple: int, value: float) -> Tensor:
    more = -x.shape[-1] % multiple
    return pad(x, (0, more), value=value).contiguous() if more else x.contiguous()


def _dsa() -> Any:
    return importlib.import_module("cudnn").DSA
