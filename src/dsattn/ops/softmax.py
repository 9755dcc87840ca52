"""The softmax that every attention reference shares: rows without keys, attention sinks, saved log-sum-exp.

lse is natural, scale included, over keys only. A sink is a logit that adds to the denominator and to nothing else.
"""

import torch
from torch import Tensor


def probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse) along the last axis; exactly 0 at -inf logits, also in rows whose lse is -inf. In place."""
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    return logits.sub_(shift.unsqueeze(-1)).exp_()


def sink_share(lse: Tensor, sink: Tensor) -> Tensor:
    """exp(sink) / (exp(sink) + exp(lse)): the sink's probability. lse [T, H], sink [H]."""
    return torch.where(sink == -torch.inf, 0.0, torch.sigmoid(sink - lse))


def keys_share(lse: Tensor, sink: Tensor) -> Tensor:
    """exp(lse) / (exp(sink) + exp(lse)): what the sink leaves to the keys, exact where 1 - sink_share would cancel."""
    return torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))


def lse_with_sink(lse: Tensor, sink: Tensor | None) -> Tensor:
    """The log of the whole denominator."""
    return lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))


def sink_gradient(out: Tensor, grad_out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """dL/dsink [H] = -sum_t p_sink[t, h] (out[t, h] . grad_out[t, h]). Rows without keys have out = 0."""
    wide = lse.dtype
    share = sink_share(lse, sink.to(wide))
    return -(share * row_dot(out, grad_out, wide)).sum(0).to(sink.dtype)


def row_dot(out: Tensor, grad_out: Tensor, wide: torch.dtype) -> Tensor:
    """delta [T, H] = sum_v out grad_out; 0 where out is 0 throughout, whatever arrives there."""
    product = out.to(wide) * grad_out.to(wide)
    return torch.where(out == 0, 0.0, product).sum(-1)
