"""Mixture of experts as in DeepSeek-V3 and GLM-5 (arXiv 2412.19437, section 2.1.2), balanced without a loss.

    s      = sigmoid(W x)                                         [T, E], fp32
    chosen = the K best of s + b among the best groups; ties go to the expert that comes first
    weight = s[chosen] / sum of s[chosen] * routed_scaling
    out    = sum over chosen of weight * expert(x)  +  shared experts(x)

The bias b decides who is chosen and has no gradient: after each optimiser step it moves towards equal loads
(arXiv 2408.15664). Padding rows go to no expert, count nowhere, and come out as zeros.
Letters: T rows, E experts, K experts of a token, M model width, I inner width of an expert, N documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsattn.config import MoEConfig
from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.model.mlp import SwiGLU
from dsattn.nn.attention import without_padding
from dsattn.nn.draw import normal_
from dsattn.nn.linear import local
from dsattn.nn.state import SPARSE, Pass
from dsattn.ops import select_topk


@dataclass(frozen=True)
class Routing:
    """Where the rows of one forward of one layer went.

    load: [E] int64, tokens of each expert. balance: scalar, the sequence-wise balance loss, where it was asked for.
    """

    load: Tensor
    balance: Tensor | None = None

    def __add__(self, other: "Routing") -> "Routing":
        """Of two forwards of the same experts."""
        if self.balance is None or other.balance is None:
            return Routing(self.load + other.load)
        return Routing(self.load + other.load, self.balance + other.balance)


class Router(nn.Module):
    """Chooses experts. Parameter names are those of the Hugging Face models: weight, e_score_correction_bias."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts, dtype=torch.float32))

    def forward(self, hidden: Tensor, real_rows: Tensor, run: Pass = SPARSE) -> tuple[Tensor, Tensor, Tensor]:
        """(chosen [T, K] int32 ascending, -1 where none; weights [T, K]; scores [T, E]), in fp32 (fp64 for fp64).

        A recompute replay keeps what the first pass chose.
        """
        config = self.config
        with torch.autocast(hidden.device.type, enabled=False):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            scores = F.linear(hidden.to(wide), self.weight.to(wide)).sigmoid()
            chosen = run.value("experts", self._choose, scores.detach(), real_rows)
            weights = scores.gather(1, chosen.long().clamp(min=0)).masked_fill(chosen < 0, 0)
            if config.normalise:
                weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
            return chosen, weights * config.routed_scaling, scores

    def _choose(self, scores: Tensor, real_rows: Tensor) -> Tensor:
        """[T, K]: the best by score and bias, of the groups that a row may go to."""
        config, biased = self.config, scores + self.e_score_correction_bias
        if config.groups > 1:
            of_group = biased.unflatten(1, (config.groups, -1)).topk(2, dim=2).values.sum(2)
            allowed = _one_hot(_best(of_group, real_rows, config.groups_per_token), config.groups)
            biased = biased.masked_fill(~allowed.repeat_interleave(config.experts // config.groups, 1), -torch.inf)
        return _best(biased, real_rows, config.experts_per_token)


class Exchange(Protocol):
    """How rows reach the ranks that hold their experts: `parallel.expert.Exchange`."""

    def __call__(
        self, rows: Tensor, weight: Tensor, load: Tensor, through: Callable[[Tensor, Tensor, Tensor], Tensor], run: Pass
    ) -> Tensor:
        """rows [R, M], weight [R, 1], sorted by expert, rows of none last -> [R, M], in that order.

        load: [E] int64, rows of each expert. through: what this rank's experts make of (rows, weight, ends [E here]).
        """
        ...


class Experts(nn.Module):
    """The routed SwiGLUs, all in two tensors, named as in the Hugging Face models: gate_up_proj and down_proj.

    exchange: set where other ranks hold some of them; the two tensors are then DTensors over those ranks.
    """

    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.experts, hidden_size, config.intermediate_size))
        self.exchange: Exchange | None = None

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor, run: Pass = SPARSE) -> tuple[Tensor, Tensor]:
        """hidden [T, M], zeros where nothing is chosen -> (sum over chosen of weight * expert(x) [T, M], load [E]).

        load: of these rows. No device sync in bf16 on a GPU where this rank holds all experts, and no atomic addition:
        gradients repeat bit for bit.
        """
        device, experts = hidden.device.type, self.gate_up_proj.shape[0]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        slots = chosen.shape[1]
        expert = chosen.masked_fill(chosen < 0, experts).flatten()  # slots without an expert stand last
        order = expert.argsort(stable=True)
        place = _inverse(order)
        ids = torch.arange(experts, dtype=expert.dtype, device=expert.device)
        ends = torch.searchsorted(expert[order], ids, right=True, out_int32=True)
        load = ends.long().diff(prepend=ends.new_zeros(1, dtype=torch.int64))
        x = permute(hidden.to(dtype), order, place, slots)
        weight = permute(weights.reshape(-1, 1), order, place)
        if self.exchange is None:
            ends[-1:].fill_(len(order))  # they go to the last expert, with weight 0, so that every row has a product
            out = self._through(x, weight, ends)
        else:
            out = self.exchange(x, weight, load, self._through, run)
        return permute(out, place, order).unflatten(0, (-1, slots)).sum(1), load

    def _through(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        gate_up, down = (local(each).to(x.dtype) for each in (self.gate_up_proj, self.down_proj))
        gate, up = grouped_linear(x, gate_up, ends).chunk(2, -1)
        inner = (F.silu(gate) * up * weight).to(x.dtype)  # a weight on I channels costs less than on M
        return grouped_linear(inner, down, ends)


class MoE(nn.Module):
    """The mixture that stands in a layer's place of the MLP: gate (the router), experts, shared_experts."""

    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.gate = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        shared = config.shared_experts * config.intermediate_size
        self.shared_experts = SwiGLU(hidden_size, shared) if shared else None
        if not self.gate.weight.is_meta:
            self.reset_parameters(0.02, 0.02)

    def forward(self, hidden: Tensor, layout: Layout, run: Pass) -> tuple[Tensor, Routing]:
        """hidden [T, M] -> ([T, M], zeros in padding rows; where the rows went). Reads no padding.

        Under `run.ranks` load and balance are shares of a sum over the ranks that hold other rows. Raises InputError
        where the balance loss is asked for, and this layout holds a part of its documents' rows without such ranks.
        """
        hidden = without_padding(hidden, layout)
        chosen, weights, scores = self.gate(hidden, layout.real_rows, run)
        out, load = self.experts(hidden, chosen, weights, run)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden)
        balance = None
        if run.with_balance:
            total = None if run.ranks is None else run.ranks.total
            balance = sequence_balance(scores, self.config.experts_per_token, layout, run.kl_divisor, total)
        return out, Routing(load, balance)

    @torch.no_grad()
    def move_bias(self, load: Tensor, rate: float) -> None:
        """b += rate * sign(mean load - load). load: [E], tokens of each expert in the whole global batch of a step."""
        bias = self.gate.e_score_correction_bias
        bias += rate * (load.sum() - load * len(load)).sign().to(bias.dtype)

    @torch.no_grad()
    def reset_parameters(self, std: float, residual_std: float, generator: torch.Generator | None = None) -> None:
        """Fresh weights of router and routed experts; residual_std: of what adds to the residual stream."""
        normal_(self.gate.weight, std, generator)
        nn.init.zeros_(self.gate.e_score_correction_bias)
        normal_(self.experts.gate_up_proj, std, generator)
        normal_(self.experts.down_proj, residual_std, generator)


def sequence_balance(
    scores: Tensor,
    experts_per_token: int,
    layout: Layout,
    divisor: int | float | Tensor | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The sequence-wise balance loss of DeepSeek-V3 (eq. 17 to 20), for each document, weighed by its rows.

        sum over documents of rows * sum_i f_i P_i / divisor
        f_i = E / (K rows) * rows whose K best scores hold i,   P_i = mean of s_i / sum_j s_j

    scores: s [T, E], without the bias and whatever the groups. divisor: real rows of the whole global batch, so that
    neither the micro-batch split nor padding changes a gradient; None takes this layout's. 1 for equal loads.
    total: where other ranks hold the documents' other rows, the sum over these ranks of a tensor without gradient. The
    result is then these rows' share of the loss: P is a mean of rows, and f has no gradient.
    Raises InputError where the layout holds a part of the rows only and nothing totals; and inside a CUDA graph.
    """
    rows, experts = scores.shape
    if layout.num_keys != rows and total is None:
        raise InputError(
            f"layout has {layout.num_keys} keys for {rows} rows, but the balance loss reads whole documents; "
            "leave it out, or give each rank whole documents"
        )
    if scores.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(
            f"the balance loss counts documents on the host (here {len(layout.lengths)}), so a CUDA graph would hold "
            "for one packing; run this step without a graph, or with balance_weight=0"
        )
    if divisor is None:
        divisor = max(layout.num_real_rows, 1)
    real = layout.real_rows
    scores = scores.masked_fill(~real[:, None], 1)
    begins = torch.zeros(layout.num_keys, dtype=torch.int32, device=scores.device)
    begins[layout.rows] = (real & (layout.positions == 0)).int()
    begins = begins if total is None else total(begins)
    number = begins.cumsum(0)[layout.rows - layout.positions] - 1
    document = torch.arange(max(len(layout.lengths), 1), device=scores.device)
    member = ((number == document[:, None]) & real).to(scores.dtype)
    best = _one_hot(_best(scores.detach(), real, experts_per_token), experts).to(scores.dtype)
    share = scores / scores.sum(1, keepdim=True)
    with torch.autocast(scores.device.type, enabled=False):
        times, mass = member @ best, member @ share
    counted = torch.cat((times, member.sum(1, keepdim=True)), 1)
    times, lengths = (counted if total is None else total(counted)).split([experts, 1], 1)
    return (times * mass * (experts / experts_per_token) / lengths.clamp(min=1)).sum() / divisor


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows ends[e - 1] .. ends[e] - 1 of x [R, in] times weight[e]^T of [E, out, in] -> [R, out].

    ends: [E] int32, the last one R. One grouped product in bf16 on a GPU; elsewhere, and without rows, the reference.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return grouped_linear_reference(x, weight, ends)


def grouped_linear_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One product an expert. Reads `ends`: a device sync."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(rows, one) for rows, one in zip(x.split(sizes), weight, strict=True)])


def permute(x: Tensor, order: Tensor, place: Tensor, copies: int = 1) -> Tensor:
    """x[order // copies], place being order's inverse; both directions are gathers, without atomics."""
    return _Permute.apply(x, order, place, copies)


def _inverse(order: Tensor) -> Tensor:
    """place with place[order[i]] = i."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Permute(torch.autograd.Function):
    """index_select's own backward adds atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (place,) = ctx.saved_tensors
        return grad[place].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def _best(scores: Tensor, real_rows: Tensor, count: int) -> Tensor:
    """[T, count] int32: the library's ranking rule over the columns of real rows; padding rows get -1."""
    stop = real_rows.int() * scores.shape[1]
    return select_topk(scores, KeyRange(torch.zeros_like(stop), stop), count).index


def _one_hot(index: Tensor, count: int) -> Tensor:
    """[T, count] bool: the columns that index [T, K] names; -1 names none."""
    columns = index.masked_fill(index < 0, count).long()
    return torch.zeros(len(index), count + 1, dtype=torch.bool, device=index.device).scatter_(1, columns, True)[:, :-1]
