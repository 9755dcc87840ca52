"""cuDNN's parts of the indexer's loss over selected keys: score recompute, and the sparse indexer's backward.

The forward has the softmax of the scores from one kernel and the target from another, which sums heads and normalises;
where somebody has the heads' sum already, the second does not run. The backward scores once more, so that either
direction may meet ours. By name only: the records of the bare kernels are ahead of ours in the forward above 64K keys,
by less than what is added here.

Quirks, kept here: w in bf16, always relu, widths 128 and 512 + 64 or 512, one group of keys, attention heads in
multiples of 64, indexer heads padded to 64 in the backward, slots in multiples of 128, a batch axis. The target is
overwritten. The gradient of a slot is dropped where its probability is below e^-100. What is in empty slots of a result
is undefined. On Hopper the gradient to k sums by atomics. On one process: the target of other ranks' heads cannot be
added before it is normalised.
Letters: T query rows, S keys, H heads, C latent width, H_I / D indexer heads / width, K kept keys.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsattn.backends import ALONE, Call, HeadRanks, unmet
from dsattn.backends.cudnn import frontend
from dsattn.backends.vendors import version_of
from dsattn.errors import BackendUnavailable
from dsattn.keys import KeyRange
from dsattn.selection import Inverse

_SMALLEST = 1e-30
_SLOTS = 128
_REPEATS = (1, 32)


def requirements(call: Call) -> list[str]:
    """What `call` of either direction lacks, in words; the package is not imported."""
    repeats = call.capability >= 100 and version_of(frontend.DISTRIBUTION) >= _REPEATS
    needs = frontend.needs_of(call, (1, 25)) | {
        "selected keys": call.top_k > 0,
        "an indexer width of 128": call.width == 128,
        "2 to 64 indexer heads": 2 <= call.heads <= 64,
        "gradients that need not repeat, before Blackwell and 1.32": not call.deterministic or repeats,
    }
    return unmet(needs)


def indexer_kl_forward(
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index: Tensor,
    length: Tensor,
    keys: KeyRange,
    real: Tensor,
    divisor: Tensor,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, score_lse [2, T], mass [T], dscore [T, K]): the arguments of the reference's forward.

    The mass is that of heads whose `lse` is over the selected keys: one each.
    """
    _check((q_i, k_i, w), relu, ranks)
    empty = index < 0
    share = shares_of_scores((q_i, k_i, w), index, length)
    if target is None:
        mass = torch.where(empty.all(1), 0.0, float(q.shape[1]))
        target = shares_of_attention((q, kv, lse), index, length, scale)
    else:
        mass = target.sum(1)
        target = target / mass[:, None].clamp_min(_SMALLEST)
    live = real & (mass != 0)
    dead = empty | ~live[:, None]
    target, share = target.masked_fill(dead, 0.0), share.masked_fill(dead, 0.0)
    kl = target * (target.clamp_min(_SMALLEST).log() - share.clamp_min(_SMALLEST).log())
    score_lse = _score_lse((q_i, k_i, w), index, share, live)
    return kl.sum() / divisor, score_lse, torch.where(live, mass, 0.0), share - target


def indexer_kl_backward(
    row_scale: Tensor,
    q_i: Tensor,
    k_i: Tensor,
    w: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index: Tensor,
    length: Tensor,
    keys: KeyRange,
    real: Tensor,
    score_lse: Tensor,
    mass: Tensor,
    dscore: Tensor,
    scale: float,
    relu: bool,
    ranks: HeadRanks,
    deterministic: bool,
    inverse: Inverse | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_i, dk_i, dw): the arguments of the reference's backward.

    The kernel's gradient is linear in the target: a row's scale goes there, and the sign that all rows have in common
    into the gradient of the loss. Rows that give nothing hold no key.
    """
    _check((q_i, k_i, w), relu, ranks)
    live = (row_scale != 0) & (mass != 0)
    index = index.masked_fill(~live[:, None], -1)
    empty = index < 0
    share = shares_of_scores((q_i, k_i, w), index, length).masked_fill(empty, 0.0)
    target = (share - dscore).clamp_min(0.0) * row_scale.abs()[:, None]
    share = torch.where(empty, 0.0, share.clamp_min(_SMALLEST))
    sign = torch.where((row_scale < 0).any(), -1.0, 1.0).reshape(1)
    q_i, w = q_i.masked_fill(~live[:, None, None], 0), w.masked_fill(~live[:, None], 0)
    grads = bare_backward((q_i, k_i, w), index, target.masked_fill(empty, 0.0), share, sign, deterministic)
    return grads[0], grads[1], grads[2]


def shares_of_scores(indexer: tuple[Tensor, Tensor, Tensor], index: Tensor, length: Tensor) -> Tensor:
    """[T, K] fp32: softmax of the selected scores; anything in empty slots. indexer: q_i, k_i, w."""
    q_i, k_i, w = (x.contiguous() for x in indexer)
    run = frontend.entry("sparse_indexer_score_recompute")
    slots = frontend.padded_slots(index, _SLOTS, -1)
    options = {"qhead_per_kv_head": q_i.shape[1], "topk_length": length.contiguous()[None]}
    options |= frontend.supported(run, topk_indices_global=True)
    return run(q_i[None], k_i[None], w[None], slots[None], **options)["predict"][0, :, : index.shape[1]]


def shares_of_attention(
    attention: tuple[Tensor, Tensor, Tensor], index: Tensor, length: Tensor, scale: float
) -> Tensor:
    """[T, K] fp32: the heads' probabilities, summed and normalised; 0 in empty slots. attention: q, kv, lse."""
    q, kv, lse = attention
    if kv.dim() != 2 or q.dtype != torch.bfloat16 or kv.dtype != torch.bfloat16:
        raise BackendUnavailable(f"indexer_kl: cudnn's target is of bf16 keys [S, C], got {kv.dtype} {list(kv.shape)}")
    if more := -q.shape[1] % 64:
        q, lse = pad(q, (0, 0, 0, more)), pad(lse, (0, more), value=torch.inf)
    run = frontend.entry("sparse_attn_score_recompute")
    slots = frontend.padded_slots(index, _SLOTS, -1)
    options = {"qhead_per_kv_head": q.shape[1], "topk_length": length.contiguous()[None]}
    options |= frontend.supported(run, topk_indices_global=True)
    operands = (q.contiguous()[None], kv.contiguous()[None], lse.float().contiguous()[None], slots[None])
    found = run(*operands, scale, **options)["target"][0, :, : index.shape[1]]
    found = found.masked_fill(index < 0, 0.0)
    return found / found.sum(-1, keepdim=True).clamp_min(_SMALLEST)  # Blackwell's gives the bare sum over heads


def bare_backward(
    indexer: tuple[Tensor, Tensor, Tensor],
    index: Tensor,
    target: Tensor,
    share: Tensor,
    grad_loss: Tensor,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_i, dk_i, dw) of grad_loss [1] times the sum over rows of the KL. `target` may be overwritten."""
    q_i, k_i, w = indexer
    heads = q_i.shape[1]
    if more := max(0, 64 - heads):
        q_i, w = pad(q_i, (0, 0, 0, more)), pad(w, (0, more))
    run = frontend.entry("indexer_backward")
    slots = [frontend.padded_slots(x, _SLOTS, value)[None] for x, value in ((target, 0.0), (share, 0.0), (index, -1))]
    options = frontend.supported(run, topk_indices_global=True, deterministic=deterministic)
    grads = run(
        *(x.contiguous()[None] for x in (q_i, w, k_i)),
        *slots,
        grad_loss=grad_loss,
        sm_scale=1.0,
        loss_coeff=float(len(q_i)),  # the kernel takes the mean over rows
        **options,
    )
    dq, dw = grads["d_index_q"][0, :, :heads], grads["d_weights"][0, :, :heads]
    return dq.contiguous(), grads["d_index_k"][0], dw.contiguous()


def _score_lse(indexer: tuple[Tensor, Tensor, Tensor], index: Tensor, share: Tensor, live: Tensor) -> Tensor:
    """[2, T]: the score of each row's likeliest key, and the rest of the log-sum-exp, which its share tells."""
    q_i, k_i, w = indexer
    best = share.argmax(1, keepdim=True)
    key = k_i[index.gather(1, best)[:, 0].clamp(min=0).long()].float()
    dot = torch.einsum("thd,td->th", q_i.float(), key).relu()
    score = (dot * w.float()).sum(1)
    rest = -share.gather(1, best)[:, 0].log()
    return torch.stack([torch.where(live, score, 0.0), torch.where(live, rest, -math.inf)])


def _check(indexer: tuple[Tensor, Tensor, Tensor], relu: bool, ranks: HeadRanks) -> None:
    if not relu:
        raise BackendUnavailable("indexer_kl: cudnn's scores have a relu; use backend='triton' or 'reference'")
    if ranks != ALONE:
        raise BackendUnavailable("indexer_kl: cudnn cannot add other ranks' heads to the target; use backend='triton'")
    if indexer[2].dtype != torch.bfloat16:
        raise BackendUnavailable(f"indexer_kl: cudnn wants w in bfloat16, got {indexer[2].dtype}")
