"""One whole DSA layer at T = S tokens: selection, sparse attention and the indexer's loss, forward and backward.

Projections are left out, on both sides: dense attention, which it is measured against, is one call of torch's attention
with heads that are not absorbed, forward and backward.
"""

from typing import Any

import torch
from torch import Tensor

from dsattn.backends import Call
from dsattn.bench import oracle
from dsattn.bench.cases import Operands, Setting, described, indexer, mla
from dsattn.bench.oracle import Error, Triple
from dsattn.bench.timing import Run
from dsattn.bench.trials import (
    KL_WEIGHT,
    Trial,
    distillation_results,
    masked_grad,
    rotated,
    scale_of,
    size,
)
from dsattn.ops import dsa_attention, select_keys
from dsattn.ops.dsa import choose_whole
from dsattn.selection import Selection

_LEARNS = ("q", "k", "q_i", "k_i", "w")


def layer_trial(setting: Setting) -> Trial:
    """`dsa_layer`. The selection is the operands' own: of independent normal numbers, so all but uniform."""

    def make(seed: int) -> Operands:
        attention, own = mla(setting, seed, None), indexer(setting, seed + 1000)
        return Operands(**{**vars(attention), "q_i": own.q_i, "k_i": own.k_i, "w": own.w})

    sets = rotated(make, setting)
    shape = {**described(setting, sets[0]), "K": setting.shape.top_k}
    rest = {"heads": shape["H"], "width": shape["C"], "value_width": shape["V"], "top_k": shape["K"]}
    call = Call.of(sets[0].take("q")[0], setting.keys, deterministic=setting.deterministic, **rest)
    pairs, index_work = setting.rows * shape["K"], shape["H_I"] * shape["D"]
    attention_work = 2 * shape["H"] * (4 * shape["C"] + 3 * shape["V"])
    loss_work = 2 * shape["H"] * shape["C"] + 8 * index_work
    return Trial(
        op="dsa_layer",
        setting=setting,
        shape=shape,
        sets=sets,
        choice=choose_whole("forward", call, setting.backend),
        prepare=lambda operands: _step(setting, operands),
        check=lambda: layer_error(setting, sets[0]),
        flops=pairs * (attention_work + loss_work) + 2 * index_work * setting.visible_pairs,
        reads=size(sets[0].tensors),
    )


def _step(setting: Setting, operands: Operands) -> Run:
    leaves = operands.map(lambda x: x.detach().requires_grad_())
    wanted = [getattr(leaves, name) for name in _LEARNS]

    def run() -> tuple[Tensor, ...]:
        _, out, _, kl = forward(setting, leaves)
        return torch.autograd.grad((out, kl), wanted, (leaves.grad_out, torch.ones_like(kl)))

    return run


def forward(
    setting: Setting, operands: Operands, real: Tensor | None = None
) -> tuple[Selection, Tensor, Tensor, Tensor]:
    """(selection, out, lse, kl)."""
    q, k, q_i, k_i, w = (getattr(operands, name) for name in _LEARNS)
    flags: dict[str, Any] = {"deterministic": setting.deterministic, "value_dim": setting.shape.value_dim}
    selection = select_keys(q_i, k_i, w, setting.ranges, setting.shape.top_k, backend=setting.backend)
    own = (q, k, selection, q_i, k_i, w, setting.ranges)
    weights = {"scale": scale_of(operands), "kl_weight": KL_WEIGHT, "real_rows": real, "backend": setting.backend}
    return selection, *dsa_attention(*own, **weights, **flags)


def layer_error(setting: Setting, operands: Operands) -> Error:
    """Of output, loss and every gradient, where only the sampled rows have one; infinite for a wrong selection."""
    leaves = operands.map(lambda x: x.detach().requires_grad_())
    with torch.no_grad():
        selection = forward(setting, operands)[0]
    if oracle.regret(selection.index, operands, setting.ranges).wrong:
        return Error(torch.inf, torch.inf, oracle.LIMIT)
    given = Operands(**{**vars(operands), "selection": selection})
    rows = oracle.candidates(given, setting.ranges, setting.keys)
    real = torch.zeros(setting.rows, dtype=torch.bool, device=setting.device).index_fill_(0, rows.row, True)
    _, out, lse, kl = forward(setting, leaves, real)
    grads = (masked_grad(operands, rows.row), torch.ones_like(kl))
    dq, dk, *of_loss = torch.autograd.grad((out, kl), [getattr(leaves, name) for name in _LEARNS], grads)
    scale, results = scale_of(operands), []
    exact, plain = (
        oracle.attention(given, rows, dtype, scale=scale, value_dim=setting.shape.value_dim)
        for dtype in (torch.float64, setting.dtype)
    )
    results += [Triple(out.detach()[rows.row], exact.out, plain.out), Triple(lse[rows.row], exact.lse, plain.lse)]
    results += [Triple(dq[rows.row], exact.dq, plain.dq), Triple(dk, exact.dk, plain.dk)]
    right, rough = (oracle.distillation(given, rows, dtype, scale=scale) for dtype in (torch.float64, setting.dtype))
    results.append(Triple(kl.detach(), right.kl, rough.kl))
    return oracle.judge([*results, *distillation_results(of_loss, rows, right, rough)])
