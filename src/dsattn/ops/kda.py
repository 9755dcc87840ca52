"""The delta rule with a decay for each channel: Kimi Delta Attention (arXiv 2510.26692, eq. 1).

    S[t]   = (I - beta[t] k[t] k[t]^T) Diag(exp(g[t])) S[t - 1] + beta[t] k[t] v[t]^T          [d, V] a head
    out[t] = S[t]^T q[t] / sqrt(d)                         q, k of length 1; S restarts in every document

Letters: T rows, H heads, d key width, V value width, N documents, L rows of the longest one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsattn.backends import Call, choose
from dsattn.errors import BackendUnavailable, InputError

_EPS = 1e-6  # under the root of the squared length, as in fla


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
    *,
    state: Tensor | None = None,
    bounded: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Documents laid end to end, each with a state of its own.

    q, k: [T, H, d]. v: [T, H, V]. log_decay: g, [T, H, d], at most 0. beta: [T, H], in 0 .. 1. lengths: rows of each
    document, host integers above 0 that sum to T. state: [N, H, d, V] fp32 that documents begin with; None for zeros.
    bounded: no log decay is below -5, which a kernel may use. backend: `fla` on a GPU, `reference`, or `auto`.
    Returns (out [T, H, V] in v's dtype, the documents' last states, fp32 or fp64). Differentiable in all tensors.
    Raises InputError on shapes that do not fit; BackendUnavailable where `backend` cannot serve, and on a GPU without
    fla unless the reference is named: row by row it is thousands of times slower.
    """
    _check(q, k, v, log_decay, beta, lengths, state)
    if not lengths:  # no rows; every operand has its gradient of zeros, as with rows: FSDP2's ranks reduce as many
        nothing = torch.stack([one.sum().to(v.dtype) for one in (q, k, log_decay, beta)]).sum()
        return v + nothing, v.new_zeros(0, *q.shape[1:], v.shape[2], dtype=_wide(q, v))
    call = Call.of((q, k, v), q.shape[0], heads=q.shape[1], width=q.shape[2], value_width=v.shape[2])
    choice = choose("kda", call, backend)
    if choice.function is not None:
        return choice.function(q, k, v, log_decay, beta, lengths, state, bounded)
    if call.device != "cpu" and backend == "auto":
        reasons = "; ".join(f"{name} needs {why}" for name, why in choice.passed_over)
        raise BackendUnavailable(
            f"kda: {reasons}; install dsattn[kda], or name backend='reference', which goes row by row"
        )
    return kda_reference(q, k, v, log_decay, beta, lengths, state)


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Row by row in plain torch, in fp32 (fp64 for fp64), all documents side by side."""
    wide = _wide(q, v)
    with torch.autocast(q.device.type, enabled=False):
        q, k, *rest = (_side_by_side(x.to(wide), lengths) for x in (q, k, v, log_decay, beta))
        values, log_decay, beta = rest
        q, k = (x / (x.square().sum(-1, keepdim=True) + _EPS).sqrt() for x in (q, k))
        q, decay = q * q.shape[-1] ** -0.5, log_decay.exp()
        if state is None:
            state = q.new_zeros(len(lengths), *q.shape[2:], values.shape[-1])
        state, outs = state.to(wide), []
        for row in range(q.shape[1]):
            state = state * decay[:, row, :, :, None]
            wrong = values[:, row] - torch.einsum("nhd,nhdv->nhv", k[:, row], state)
            state = state + torch.einsum("nhd,nhv->nhdv", k[:, row] * beta[:, row, :, None], wrong)
            outs.append(torch.einsum("nhd,nhdv->nhv", q[:, row], state))
        padded = torch.stack(outs, 1)
    return torch.cat([padded[index, :length] for index, length in enumerate(lengths)]).to(v.dtype), state


def _side_by_side(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T, ...] -> [N, L, ...]; zeros behind a document's end: there decay is 1 and beta 0, so its state stays."""
    return torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), batch_first=True)


def _wide(q: Tensor, v: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, lengths: Sequence[int], state: Tensor | None
) -> None:
    if q.dim() != 3:
        raise InputError(f"q must be [T, H, d], got {list(q.shape)}")
    rows, heads, width = q.shape
    value_width = v.shape[-1]
    wanted = {
        "k": (k, (rows, heads, width)),
        "v": (v, (rows, heads, value_width)),
        "log_decay": (log_decay, (rows, heads, width)),
        "beta": (beta, (rows, heads)),
        "state": (state, (len(lengths), heads, width, value_width)),
    }
    for name, (given, shape) in wanted.items():
        if given is not None and given.shape != shape:
            raise InputError(f"{name} must be {list(shape)}, got {list(given.shape)}")
    for index, length in enumerate(lengths):
        if length < 1:
            raise InputError(f"lengths[{index}]={length} must be at least 1; leave empty documents out")
    if sum(lengths) != rows:
        raise InputError(f"lengths sum to {sum(lengths)}, but q has {rows} rows")
