"""An operation on its operands, ready to be run, checked and counted.

FLOPs are matrix products only: attention forward 2 H (C + V) a query-key pair, backward 2 H (3 C + 2 V), the indexer's
scores 2 H_I D, its loss's target 2 H C, its backward 6 H_I D. A selection counts all T K slots, empty ones too; ranges
count their visible pairs. Bytes are those of operands, read once, and results, written once; of a ranking, the scores.
Letters: T query rows, S keys, H heads, C latent width, V value width, H_I / D indexer heads / width, K kept keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsattn.backends import Call, Choice, choose
from dsattn.bench import oracle
from dsattn.bench.cases import Operands, Setting, described, gqa, indexer, mla
from dsattn.bench.oracle import Error, Triple
from dsattn.bench.timing import Run, copies
from dsattn.ops import dense_gqa, dense_mla, indexer_kl, select_keys, select_topk, sparse_gqa, sparse_mla
from dsattn.selection import rank

Direction = Literal["forward", "backward"]
KL_WEIGHT = 1.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One benchmark.

    op: as a record names it. shape: as a record holds it. sets: operands to rotate over. choice: who serves, and why.
    prepare: makes what is timed for one set; what a backward needs of its forward is done before. check: the error.
    flops: of one call, 0 where not counted. reads: bytes of a set that a call reads.
    """

    op: str
    setting: Setting
    shape: dict[str, Any]
    sets: list[Operands]
    choice: Choice
    prepare: Callable[[Operands], Run]
    check: Callable[[], Error]
    flops: int
    reads: int

    @property
    def scale(self) -> float:
        """Of the attention's logits."""
        return scale_of(self.sets[0])


def scale_of(operands: Operands) -> float:
    """C^-1/2, or 1 where there is no attention."""
    return 1.0 if operands.q is None else operands.q.shape[2] ** -0.5


def size(tensors: Sequence[Tensor | None]) -> int:
    """Bytes of the tensors that are there."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def rotated(make: Callable[[int], Operands], setting: Setting) -> list[Operands]:
    """As many sets of operands as timings must rotate over, at least `setting.copies`."""
    first = make(0)
    count = max(setting.copies, copies(size(first.tensors), setting.device))
    return [first, *(make(seed) for seed in range(1, count))]


ATTENTION: dict[str, tuple[bool, bool]] = {
    "sparse_mla": (True, False),
    "dense_mla": (False, False),
    "sparse_gqa": (True, True),
    "dense_gqa": (False, True),
}
"""Operation -> (selects keys, has groups)."""


def attend(op: str, setting: Setting, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of one of ATTENTION."""
    (q, k), v = operands.take("q", "k"), operands.v
    flags: dict[str, Any] = {"deterministic": setting.deterministic, "backend": setting.backend}
    flags["scale"] = scale_of(operands)
    if v is None:
        flags["value_dim"] = setting.shape.value_dim
        if operands.selection is None:
            return dense_mla(q, k, setting.ranges, **flags)
        return sparse_mla(q, k, operands.selection, **flags)
    if operands.selection is None:
        return dense_gqa(q, k, v, setting.ranges, **flags)
    return sparse_gqa(q, k, v, operands.selection, **flags)


def attention_trial(op: str, direction: Direction, setting: Setting) -> Trial:
    """`sparse_mla`, `sparse_gqa`, `dense_mla` or `dense_gqa`, forward or backward."""
    selects, grouped = ATTENTION[op]
    selection = setting.selection() if selects else None
    make = gqa if grouped else mla
    sets = rotated(lambda seed: make(setting, seed, selection), setting)
    shape = described(setting, sets[0])
    pairs = setting.rows * shape["K"] if selects else setting.visible_pairs
    widths = shape["C"] + shape["V"] if direction == "forward" else 3 * shape["C"] + 2 * shape["V"]

    def prepare(operands: Operands) -> Run:
        if direction == "forward":
            return torch.no_grad()(lambda: attend(op, setting, operands))
        return gradients(lambda leaves: attend(op, setting, leaves)[0], operands, ("q", "k", "v"), operands.grad_out)

    def check() -> Error:
        return attention_error(lambda given: attend(op, setting, given), direction, setting, sets[0])

    rest = {"heads": shape["H"], "width": shape["C"], "value_width": shape["V"], "top_k": shape["K"]}
    call = Call.of(sets[0].take("q")[0], setting.keys, deterministic=setting.deterministic, **rest)
    read = [sets[0].q, sets[0].k, sets[0].v, None if selection is None else selection.index]
    return Trial(
        op=f"{op}.{direction}",
        setting=setting,
        shape=shape,
        sets=sets,
        choice=choose(f"{op}.{direction}", call, setting.backend),
        prepare=prepare,
        check=check,
        flops=2 * shape["H"] * pairs * widths,
        reads=size(read if direction == "forward" else [*read, sets[0].grad_out, sets[0].grad_out]),
    )


def gradients(
    forward: Callable[[Operands], Tensor], operands: Operands, names: Sequence[str], grad: Tensor | None
) -> Run:
    """A run of the backward alone: the forward is done here. names: of the operands that get gradients."""
    leaves = operands.map(lambda x: x.detach().requires_grad_(x.is_floating_point()))
    wanted = [leaf for name in names if (leaf := getattr(leaves, name)) is not None]
    out = forward(leaves)
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def attention_error(
    run: Callable[[Operands], tuple[Tensor, Tensor]], direction: Direction, setting: Setting, operands: Operands
) -> Error:
    """Of out and lse, or of the gradients where only the sampled rows have one, on the sampled rows and every key."""
    rows = oracle.candidates(operands, setting.ranges, setting.keys)
    options = {"scale": scale_of(operands), "value_dim": setting.shape.value_dim}
    exact = oracle.attention(operands, rows, torch.float64, **options)
    plain = oracle.attention(operands, rows, setting.dtype, **options)
    if direction == "forward":
        with torch.no_grad():
            out, lse = run(operands)
        return oracle.judge([Triple(out[rows.row], exact.out, plain.out), Triple(lse[rows.row], exact.lse, plain.lse)])
    grad = masked_grad(operands, rows.row)
    dq, dk, *dv = gradients(lambda leaves: run(leaves)[0], operands, ("q", "k", "v"), grad)()  # type: ignore[misc]
    results = [Triple(dq[rows.row], exact.dq, plain.dq), Triple(dk, exact.dk, plain.dk)]
    if exact.dv is not None and plain.dv is not None:
        results.append(Triple(dv[0], exact.dv, plain.dv))
    return oracle.judge(results)


def masked_grad(operands: Operands, row: Tensor) -> Tensor:
    """grad_out with zeros outside of the sampled rows."""
    (grad,) = operands.take("grad_out")
    return torch.zeros_like(grad).index_copy_(0, row, grad[row])


def kl_trial(direction: Direction, setting: Setting, *, dense: bool = False) -> Trial:
    """`indexer_kl` over the selected keys, or over every visible one (`dense`: K of the record is 0)."""
    selection = None if dense else setting.selection()

    def make(seed: int) -> Operands:
        attention, own = mla(setting, seed, selection), indexer(setting, seed + 1000)
        with torch.no_grad():
            _, lse = attend("dense_mla" if dense else "sparse_mla", setting, attention)
        return Operands(q=attention.q, k=attention.k, lse=lse, selection=selection, q_i=own.q_i, k_i=own.k_i, w=own.w)

    sets = rotated(make, setting)
    shape = described(setting, sets[0])
    pairs = setting.visible_pairs if dense else setting.rows * shape["K"]
    index_work = shape["H_I"] * shape["D"]
    work = 2 * (shape["H"] * shape["C"] + index_work) if direction == "forward" else 6 * index_work

    def run(operands: Operands, real: Tensor | None = None) -> Tensor:
        return distill(operands, setting, real)

    def prepare(operands: Operands) -> Run:
        if direction == "forward":
            return torch.no_grad()(lambda: run(operands))
        return gradients(run, operands, ("q_i", "k_i", "w"), None)

    rest = {"heads": shape["H_I"], "width": shape["D"], "top_k": shape["K"], "deterministic": setting.deterministic}
    call = Call.of(sets[0].take("q_i")[0], setting.keys, **rest)
    return Trial(
        op=f"indexer_kl.{direction}",
        setting=setting,
        shape=shape,
        sets=sets,
        choice=choose(f"indexer_kl.{direction}", call, setting.backend),
        prepare=prepare,
        check=lambda: kl_error(run, direction, setting, sets[0]),
        flops=pairs * work,
        reads=size(sets[0].tensors),
    )


def distill(operands: Operands, setting: Setting, real: Tensor | None = None) -> Tensor:
    """`indexer_kl`, a mean over the rows that count."""
    flags: dict[str, Any] = {"deterministic": setting.deterministic, "backend": setting.backend, "real_rows": real}
    q_i, k_i, w, q, k, lse = operands.take("q_i", "k_i", "w", "q", "k", "lse")
    flags["scale"] = scale_of(operands)
    return indexer_kl(q_i, k_i, w, q, k, lse, setting.ranges, operands.selection, **flags)


def kl_error(
    run: Callable[[Operands, Tensor], Tensor], direction: Direction, setting: Setting, operands: Operands
) -> Error:
    """Of the loss, or of its gradients, where only the sampled rows are real."""
    rows = oracle.candidates(operands, setting.ranges, setting.keys)
    real = torch.zeros(setting.rows, dtype=torch.bool, device=setting.device).index_fill_(0, rows.row, True)
    exact = oracle.distillation(operands, rows, torch.float64, scale=scale_of(operands))
    plain = oracle.distillation(operands, rows, setting.dtype, scale=scale_of(operands))
    if direction == "forward":
        with torch.no_grad():
            return oracle.judge([Triple(run(operands, real), exact.kl, plain.kl)])
    grads = gradients(lambda leaves: run(leaves, real), operands, ("q_i", "k_i", "w"), None)()
    return oracle.judge(distillation_results(grads, rows, exact, plain))  # type: ignore[arg-type]


def distillation_results(
    grads: Sequence[Tensor], rows: oracle.Rows, exact: oracle.Distillation, plain: oracle.Distillation
) -> list[Triple]:
    """The gradients to q_i, k_i and w, beside the oracle's."""
    dq, dk, dw = grads
    return [
        Triple(dq[rows.row], exact.dq, plain.dq),
        Triple(dk, exact.dk, plain.dk),
        Triple(dw[rows.row], exact.dw, plain.dw),
    ]


def select_keys_trial(setting: Setting, make: Callable[[int], Operands] | None = None) -> Trial:
    """`select_keys`: scores and ranking. make: operands of a seed; random ones without."""
    sets = rotated(make or (lambda seed: indexer(setting, seed)), setting)
    shape = described(setting, sets[0])

    def run(operands: Operands) -> Tensor:
        q_i, k_i, w = operands.take("q_i", "k_i", "w")
        options: dict[str, Any] = {"relu": setting.relu, "precision": setting.precision, "backend": setting.backend}
        return select_keys(q_i, k_i, w, setting.ranges, setting.shape.top_k, **options).index

    rest = {"heads": shape["H_I"], "width": shape["D"], "top_k": shape["K"], "precision": setting.precision}
    call = Call.of(sets[0].take("q_i")[0], setting.keys, **rest)
    return Trial(
        op="select_keys",
        setting=setting,
        shape=shape,
        sets=sets,
        choice=choose("select_keys", call, setting.backend),
        prepare=lambda operands: lambda: run(operands),
        check=lambda: oracle.regret(run(sets[0]), sets[0], setting.ranges, setting.precision, relu=setting.relu),
        flops=2 * shape["H_I"] * shape["D"] * setting.visible_pairs,
        reads=size(sets[0].tensors),
    )


def select_topk_trial(setting: Setting) -> Trial:
    """`select_topk`: the ranking of given scores."""
    sets = rotated(lambda seed: Operands(scores=setting.normal(seed)(setting.rows, setting.keys).float()), setting)
    ranges, top_k = setting.ranges, setting.shape.top_k

    def run(operands: Operands) -> Tensor:
        return select_topk(operands.take("scores")[0], ranges, top_k, backend=setting.backend).index

    def check() -> Error:
        row = torch.linspace(0, setting.rows - 1, min(setting.rows, 64), device=setting.device).long()
        column = torch.arange(setting.keys, dtype=torch.int32, device=setting.device)
        hidden = (column < ranges.start[row, None]) | (column >= ranges.stop[row, None])
        right, _, _ = rank(sets[0].take("scores")[0][row].masked_fill(hidden, -torch.inf), column, top_k)
        wrong = (run(sets[0])[row] != right).float()
        return Error(float(wrong.max()), float(wrong.mean()), 0.0)

    call = Call.of(sets[0].take("scores")[0], setting.keys, top_k=top_k)
    return Trial(
        op="select_topk",
        setting=setting,
        shape=described(setting, sets[0]),
        sets=sets,
        choice=choose("select_topk", call, setting.backend),
        prepare=lambda operands: lambda: run(operands),
        check=check,
        flops=0,
        reads=size(sets[0].tensors),
    )
