"""The formulas in plain torch, on a few rows of a benchmark's own operands, and the judgement of what a kernel gave.

A kernel's error is its distance to fp64, in units of the distance of plain torch in the kernel's own dtype: 1 is as
good as plain torch, above LIMIT is wrong. Both the largest and the mean error count, over every result.
Letters: R sampled rows, N candidate keys of a row, S keys, H heads, G groups, C key width, V value width.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsattn.bench.cases import Operands
from dsattn.config import Precision
from dsattn.keys import KeyRange
from dsattn.quantize import from_mxfp8, to_e4m3, to_mxfp8

LIMIT = 2.0
"""Of an error in units of plain torch's."""
REGRET_LIMIT = {"bf16": 1e-4, "fp8": 5e-4, "mxfp8": 5e-4}
"""Of a selection in a precision: how far below the K-th best score a selected one may lie, of the row's largest
magnitude. Hopper adds products of fp8 in about 14 bits: 2.2e-4 was seen."""
_BUDGET = 2**29  # bytes of gathered keys in fp64


@dataclass(frozen=True)
class Error:
    """max, mean: of a result, over all values; see the head of this file. limit: what neither may pass."""

    max: float
    mean: float
    limit: float

    @property
    def wrong(self) -> bool:
        """NaN is wrong too."""
        return not (self.max <= self.limit and self.mean <= self.limit)

    def __or__(self, other: "Error") -> "Error":
        """The worse of two under the same limit."""
        return Error(max(self.max, other.max), max(self.mean, other.mean), self.limit)

    def __str__(self) -> str:
        return f"largest {self.max:.3g}, mean {self.mean:.3g}, limit {self.limit:.3g}"


class Triple(NamedTuple):
    """One result three times: the kernel's, fp64's, and plain torch's in the kernel's dtype."""

    got: Tensor
    exact: Tensor
    plain: Tensor


def judge(results: Iterable[Triple]) -> Error:
    """The worst of the results. To plain torch's error is added one rounding of the largest, or mean, value: it may
    happen to be exact. Eight in fp32, whose error is that of sums: in another order they differ by several.

    A value that is not finite where fp64's is makes the error infinite.
    """
    worst = Error(0.0, 0.0, LIMIT)
    for got, exact, plain in results:
        if got.shape != exact.shape or not torch.equal(got.isfinite(), exact.isfinite()):
            return Error(torch.inf, torch.inf, LIMIT)
        finite, rounding = exact.isfinite(), torch.finfo(got.dtype).eps * (1 if got.itemsize < 4 else 8)
        got, exact, plain = (x.double()[finite] for x in (got, exact, plain))
        if not exact.numel():
            continue
        ours, theirs = (got - exact).abs(), (plain - exact).abs()
        for_max = theirs.max() + rounding * exact.abs().max()
        for_mean = theirs.mean() + rounding * exact.abs().mean()
        worst |= Error(_ratio(ours.max(), for_max), _ratio(ours.mean(), for_mean), LIMIT)
    return worst


def _ratio(ours: Tensor, allowed: Tensor) -> float:
    return float(ours / allowed) if allowed > 0 else float(ours)


def sampled_rows(operands: Operands, ranges: KeyRange, num_keys: int) -> Tensor:
    """Rows to check: the first, the last, and others at random, as many as fit 512 MiB of gathered keys. At most 32."""
    candidates = num_keys if operands.selection is None else operands.selection.width
    widths = [x.shape[1:].numel() for x in (operands.k, operands.v, operands.k_i) if x is not None]
    heads = max(x.shape[1] for x in (operands.q, operands.q_i) if x is not None)
    most = max(2, min(32, _BUDGET // (8 * candidates * (sum(widths) + heads))))
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(0, ranges.num_rows, (most - 2,), generator=generator)
    return torch.cat((torch.tensor([0, ranges.num_rows - 1]), some)).unique().to(ranges.start.device)


class Rows(NamedTuple):
    """The candidate keys of the sampled rows: key [R, N] int64 (0 where hidden), hidden [R, N] bool."""

    row: Tensor
    key: Tensor
    hidden: Tensor


def candidates(operands: Operands, ranges: KeyRange, num_keys: int, row: Tensor | None = None) -> Rows:
    """What the sampled rows, or those of `row`, read: their selected keys, or every visible one."""
    row = sampled_rows(operands, ranges, num_keys) if row is None else row
    if operands.selection is not None:
        index = operands.selection.index[row]
        return Rows(row, index.clamp(min=0).long(), index < 0)
    key = torch.arange(num_keys, device=row.device)
    hidden = (key < ranges.start[row, None]) | (key >= ranges.stop[row, None])
    return Rows(row, key.expand(len(row), -1), hidden)


class Attention(NamedTuple):
    """out: [R, H, V]. lse: [R, H]. dq: [R, H, C]. dk, dv: [S, ...], of the sampled rows alone; dv None for MLA."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor | None


def attention(
    operands: Operands, rows: Rows, dtype: torch.dtype, *, scale: float, value_dim: int, wide: bool = False
) -> Attention:
    """Attention of the sampled rows and its gradient, all arithmetic in `dtype`, sums over rows in fp32 or better.

    wide: leave these sums as they are, for more rows to be added, instead of rounding them to `dtype`.
    """
    q, k, grad_out = operands.take("q", "k", "grad_out")
    num_keys = k.shape[0]
    q = q[rows.row].to(dtype).requires_grad_()
    k = k.to(dtype)[rows.key].requires_grad_()
    v = None if operands.v is None else operands.v.to(dtype)[rows.key].requires_grad_()
    keys = k[:, :, None] if v is None else k
    values = k[:, :, None, :value_dim] if v is None else v
    logits = logits_of(q, keys, rows.hidden, scale)
    share = logits.softmax(-1)
    out = torch.einsum("rgjn,rngv->rgjv", share, values).flatten(1, 2)
    lse = logits.detach().logsumexp(-1).flatten(1)
    leaves = [leaf for leaf in (q, k, v) if leaf is not None]
    dq, dk, *dv = torch.autograd.grad(out, leaves, grad_out[rows.row].to(dtype))
    dv = _summed(dv[0], rows.key, num_keys, wide) if dv else None
    return Attention(out.detach(), lse, dq, _summed(dk, rows.key, num_keys, wide), dv)


def logits_of(q: Tensor, keys: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """[R, G, H / G, N] logits, -inf where hidden. q: [R, H, C], keys: [R, N, G, C]."""
    grouped = q.unflatten(1, (keys.shape[2], -1))
    return (torch.einsum("rgjc,rngc->rgjn", grouped, keys) * scale).masked_fill(hidden[:, None, None], -torch.inf)


class Distillation(NamedTuple):
    """kl: 0-d, a mean over the sampled rows. dq, dk, dw: of q_i [R, H_I, D], k_i [S, D], w [R, H_I]."""

    kl: Tensor
    dq: Tensor
    dk: Tensor
    dw: Tensor


def distillation(
    operands: Operands, rows: Rows, dtype: torch.dtype, *, scale: float, wide: bool = False
) -> Distillation:
    """The indexer's loss on the sampled rows and its gradient, in `dtype`; rows must have a key. wide: as there."""
    q, k, q_i, k_i, w = operands.take("q", "k", "q_i", "k_i", "w")
    keys, num_keys = k.to(dtype)[rows.key], k.shape[0]
    keys = keys[:, :, None] if keys.dim() == 3 else keys
    target = logits_of(q[rows.row].to(dtype), keys, rows.hidden, scale).softmax(-1).mean((1, 2))
    q, w = (x[rows.row].to(dtype).requires_grad_() for x in (q_i, w))
    k = k_i.to(dtype)[rows.key].requires_grad_()
    scores = torch.einsum("rhn,rh->rn", torch.einsum("rhd,rnd->rhn", q, k).relu(), w)
    log_share = scores.masked_fill(rows.hidden, -torch.inf).log_softmax(-1).masked_fill(rows.hidden, 0.0)
    kl = (torch.special.xlogy(target, target) - target * log_share).sum() / len(rows.row)
    dq, dk, dw = torch.autograd.grad(kl, (q, k, w))
    return Distillation(kl.detach(), dq, _summed(dk, rows.key, num_keys, wide), dw)


def rounded(x: Tensor, precision: Precision) -> Tensor:
    """x [..., D] in fp64, after it was rounded as a selection in `precision` rounds it."""
    if precision == "bf16":
        return x.double()
    if precision == "mxfp8":
        return from_mxfp8(*to_mxfp8(x)).double()
    value, scale = to_e4m3(x)
    return value.double() * scale[..., None].double()


def regret(
    index: Tensor,
    operands: Operands,
    ranges: KeyRange,
    precision: Precision = "bf16",
    *,
    relu: bool = True,
    row: Tensor | None = None,
) -> Error:
    """How much worse than the best a selection [T, K] is, on sampled rows or those of `row`, against scores of the
    rounded operands in fp64.

    Of a row: how far its lowest selected score lies below the K-th best, over the largest magnitude of its scores.
    Infinite where indices are not distinct, ascending, visible keys followed by -1, as many as there can be.
    """
    q_i, k_i, w = operands.take("q_i", "k_i", "w")
    limit = REGRET_LIMIT[precision]
    row = sampled_rows(operands, ranges, k_i.shape[0]) if row is None else row
    q, k, w = rounded(q_i[row], precision), rounded(k_i, precision), w[row].double()
    dots = (one @ k.T for one in q)
    scores = torch.stack([(dot.relu() if relu else dot).T @ weight for dot, weight in zip(dots, w, strict=True)])
    key = torch.arange(k.shape[0], device=k.device)
    scores.masked_fill_((key < ranges.start[row, None]) | (key >= ranges.stop[row, None]), -torch.inf)
    chosen = index[row].long()
    wanted = ranges.lengths()[row].clamp(max=index.shape[1])
    filled = torch.arange(index.shape[1], device=k.device) < wanted[:, None]
    ascending = (chosen[:, 1:] > chosen[:, :-1]) | ~filled[:, 1:]
    if not (torch.equal(chosen >= 0, filled) and ascending.all()):
        return Error(torch.inf, torch.inf, limit)
    lowest = scores.gather(1, chosen.clamp(min=0)).masked_fill(~filled, torch.inf).amin(1)
    best = scores.topk(min(index.shape[1], k.shape[0]), dim=1).values
    cutoff = best.gather(1, (wanted[:, None].long() - 1).clamp(min=0))[:, 0]
    size = scores.masked_fill(scores == -torch.inf, 0.0).abs().amax(1).clamp(min=1e-30)
    lost = ((cutoff - lowest) / size).masked_fill(wanted == 0, 0.0)
    return Error(float(lost.max()), float(lost.mean()), limit)


def _summed(grad: Tensor, key: Tensor, num_keys: int, wide: bool) -> Tensor:
    """[S, ...]: gradients of gathered keys [R, N, ...] summed key by key; hidden keys hold zeros."""
    summand = grad.double() if grad.dtype == torch.float64 else grad.float()
    total = summand.new_zeros(num_keys, *grad.shape[2:])
    total.index_add_(0, key.flatten(), summand.flatten(0, 1))
    return total if wide else total.to(grad.dtype)
