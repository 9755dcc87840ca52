"""The numerical bar of every operation, worst case over layouts: one line of JSON each.

    python results/record_errors.py --commit "$(git rev-parse HEAD)" > results/errors.jsonl

Operands are rounded to the dtype; the formula over whole matrices in fp64 says what is exact, the same formula in the
dtype what plain torch errs by. The bar: at most twice that error, largest and mean; similarity above 1 - 1e-3 for
outputs, 1 - 3e-3 for gradients. Selections of whole numbers, whose scores are exact, must be those of sorted Python
numbers. Exits with 1 where a bar is broken.
"""

import argparse
import datetime
import functools
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from record_run import driver
from torch import Tensor

from dsattn import Layout, Selection, __version__, settings
from dsattn.backends import TABLE, Call, choose
from dsattn.ops import (
    dense_gqa,
    dense_mla,
    dsa_attention,
    indexer_kl,
    output_gate,
    select_keys,
    select_topk,
    sparse_gqa,
    sparse_mla,
)
from dsattn.testing import (
    SCORES,
    Case,
    Sizes,
    error_budget,
    hostile_scores,
    make_case,
    naive_attention,
    naive_kl,
    naive_ranking,
    naive_scores,
    random_selection,
    tensor_similarity,
)

Results = tuple[Tensor, ...]
Run = Callable[[Case, Selection], Results]
MLA = Sizes(heads=64, groups=1, width=576, value_dim=512, index_heads=32, index_width=128, top_k=2048)
GQA = Sizes(heads=64, groups=8, width=128, value_dim=128, index_heads=32, index_width=128, top_k=2048)
LAYOUTS = {
    "packed": lambda: Layout.packed([300, 0, 1, 211], padded=[304, 2, 1, 211], total=530),
    "context_parallel": lambda: Layout.packed([700, 64, 3, 1200], padded=[704, 64, 8, 1224], cp_size=4, cp_rank=1),
    "continuation": lambda: Layout.continuation(2300, 130),
}
KL_WEIGHT = 0.5


def _mla(case: Case) -> dict[str, Any]:
    return {"scale": case.scale, "value_dim": case.sizes.value_dim, "sink": case.sink}


def _kl(case: Case, selection: Selection | None) -> Tensor:
    with torch.no_grad():
        if selection is None:
            lse = dense_mla(case.q, case.kv, case.keys, **_mla(case))[1]
        else:
            lse = sparse_mla(case.q, case.kv, selection, **_mla(case))[1]
    return indexer_kl(case.q_i, case.k_i, case.w, case.q, case.kv, lse, case.keys, selection, scale=case.scale)


def _dsa(case: Case, selection: Selection) -> Results:
    operands = (case.q, case.kv, selection, case.q_i, case.k_i, case.w, case.keys)
    return dsa_attention(*operands, kl_weight=KL_WEIGHT, **_mla(case))[::2]


OPS: dict[str, tuple[Sizes, tuple[str, ...], Run]] = {
    "sparse_mla": (MLA, ("q", "kv", "sink"), lambda c, s: sparse_mla(c.q, c.kv, s, **_mla(c))[:1]),
    "dense_mla": (MLA, ("q", "kv", "sink"), lambda c, s: dense_mla(c.q, c.kv, c.keys, **_mla(c))[:1]),
    "sparse_gqa": (
        GQA,
        ("q", "k", "v", "sink"),
        lambda c, s: sparse_gqa(c.q, c.k, c.v, s, scale=c.scale, sink=c.sink)[:1],
    ),
    "dense_gqa": (
        GQA,
        ("q", "k", "v", "sink"),
        lambda c, s: dense_gqa(c.q, c.k, c.v, c.keys, scale=c.scale, sink=c.sink)[:1],
    ),
    "indexer_kl_sparse": (MLA, ("q_i", "k_i", "w"), lambda c, s: (_kl(c, s),)),
    "indexer_kl_dense": (MLA, ("q_i", "k_i", "w"), lambda c, s: (_kl(c, None),)),
    "dsa_attention": (MLA, ("q", "kv", "sink", "q_i", "k_i", "w"), _dsa),
    "output_gate": (GQA, ("grad_out", "q"), lambda c, s: (output_gate(c.grad_out, c.q),)),
}
"""Name -> sizes, the operands that get gradients, and the call, whose last result is the loss where it gives two."""


def _naive_out(case: Case, mask: Tensor, latent: bool) -> Tensor:
    k = case.kv[:, None] if latent else case.k
    v = k[..., : case.sizes.value_dim] if latent else case.v
    return naive_attention(case.q, k, v, mask, scale=case.scale, sink=case.sink)[0]


def _naive_kl(case: Case, mask: Tensor) -> Tensor:
    scores = naive_scores(case.q_i, case.k_i, case.w, case.keys)
    divisor = max(1, int((case.keys.stop > case.keys.start).sum()))
    return naive_kl(scores, case.q, case.kv[:, None], mask, scale=case.scale, divisor=divisor)


def naive(op: str, case: Case, selection: Selection) -> Results:
    """What OPS[op] gives, over whole matrices in the case's dtype."""
    visible, selected = case.keys.mask(case.layout.num_keys), selection.mask(case.layout.num_keys)
    if op == "output_gate":
        return (case.grad_out * case.q.sigmoid(),)
    if op == "dsa_attention":
        return _naive_out(case, selected, True), KL_WEIGHT * _naive_kl(case, selected)
    mask = visible if "dense" in op else selected
    return (_naive_kl(case, mask) if "kl" in op else _naive_out(case, mask, "mla" in op),)


def case_of(op: str, layout: str, dtype: torch.dtype, device: str) -> tuple[Case, Selection]:
    return _case(OPS[op][0], layout, dtype, device)


@functools.cache
def _case(sizes: Sizes, layout: str, dtype: torch.dtype, device: str) -> tuple[Case, Selection]:
    case = make_case(LAYOUTS[layout](), sizes, dtype=dtype, device=device)
    selection = random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)
    return replace(case, w=case.w * (case.q_i[0].numel() ** -0.5)), selection


def results_of(op: str, run: Run, case: Case, selection: Selection) -> dict[str, Tensor]:
    """Outputs and gradients by name. Seeds: the case's grad_out where something was selected, and 1 for a loss."""
    names = OPS[op][1]
    case = case.map(lambda x: x.detach().clone().requires_grad_())
    results = run(case, selection)
    seeds = [torch.ones_like(one) if one.dim() == 0 else case.grad_out.detach().nan_to_num(0.0) for one in results]
    grads = torch.autograd.grad(results, [getattr(case, name) for name in names], seeds)
    outputs = {"loss" if one.dim() == 0 else "out": one.detach() for one in results}
    return {**outputs, **{f"d{name}": grad for name, grad in zip(names, grads, strict=True)}}


def measure(op: str, layout: str, dtype: torch.dtype, device: str = "cuda") -> dict[str, dict[str, Any]]:
    """Tensor -> largest and mean error, what each may be, similarity and its limit, and what breaks the bar."""
    case, selection = case_of(op, layout, dtype, device)
    got = results_of(op, OPS[op][2], case, selection)
    clean = case.map(lambda x: x.nan_to_num(0.0)) if op == "output_gate" else case
    low = results_of(op, lambda c, s: naive(op, c, s), clean, selection)
    exact = results_of(op, lambda c, s: naive(op, c, s), clean.map(torch.Tensor.double), selection)
    if op == "output_gate":
        live = ~case.q.isnan()
        got = {name: one.masked_fill(~live, 0.0) for name, one in got.items()}
    return {name: judged(name, one, exact[name], low[name]) for name, one in got.items()}


def judged(name: str, got: Tensor, exact: Tensor, low: Tensor) -> dict[str, Any]:
    error, plain = ((x.double() - exact).abs() for x in (got, low))
    floor = torch.finfo(got.dtype).eps * float(exact.abs().max())
    similarity, limit = tensor_similarity(got, exact), 1 - (3e-3 if name.startswith("d") else 1e-3)
    problems = error_budget(got, exact, low)
    if not similarity > limit:
        problems.append(f"similarity {similarity:.6f} is not above {limit}")
    return {
        "max": float(error.max()),
        "max_limit": 2 * (float(plain.max()) + floor),
        "mean": float(error.mean()),
        "mean_limit": 2 * float(plain.mean()),
        "similarity": similarity,
        "similarity_limit": limit,
        "problems": problems,
    }


def worst(op: str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Tensor -> the layout in which it comes nearest to its bar, and the figures there."""
    found: dict[str, dict[str, Any]] = {}
    for layout in LAYOUTS:
        for name, figures in measure(op, layout, dtype).items():
            figures = {**figures, "layout": layout, "of_limit": _share(figures)}
            if name not in found or figures["of_limit"] > found[name]["of_limit"]:
                found[name] = figures
    return found


def _share(figures: dict[str, Any]) -> float:
    if figures["problems"]:
        return float("inf")
    return max(figures[name] / max(figures[f"{name}_limit"], 1e-30) for name in ("max", "mean"))


def wrong_selections(op: str, device: str = "cuda") -> int:
    """Rows whose keys are not those of sorted Python numbers."""
    wrong = 0
    for name in SCORES if op == "select_topk" else LAYOUTS:
        if op == "select_topk":
            scores, keys = hostile_scores(name, 33, 5000), Layout.packed([5000]).keys.row_slice(4960, 4993)
            found = select_topk(scores.to(device), keys.to(device), 700)
            expected = naive_ranking(scores, keys, 700)
        else:
            case = make_case(LAYOUTS[name](), replace(MLA, top_k=64), device=device).map(torch.round)
            case = case.map(lambda x: x.to(torch.bfloat16))
            found = select_keys(case.q_i, case.k_i, case.w, case.keys, 64)
            scores = naive_scores(case.q_i.double(), case.k_i.double(), case.w.double(), case.keys)
            expected = naive_ranking(scores.cpu(), case.keys.to("cpu"), 64)
        rows = zip(found.index.tolist(), found.length.tolist(), *expected, strict=True)
        wrong += sum((index, length) != (keys, count) for index, length, keys, count in rows)
    return wrong


def served(op: str, dtype: torch.dtype) -> dict[str, str]:
    """Direction -> backend, of the operation on this GPU."""
    family = "indexer_kl" if "_kl_" in op else op
    top_k = 0 if "dense" in op else 2048
    operand = torch.zeros(1, dtype=dtype, device="cuda")
    sizes = OPS[op][0] if op in OPS else MLA
    indexer = "kl" in op or "select" in op
    shape = {"heads": sizes.index_heads, "width": sizes.index_width} if indexer else {"heads": 64, "width": sizes.width}
    call = Call.of(operand, 4096, value_width=0 if indexer else sizes.value_dim, top_k=top_k, **shape)
    return {name: str(choose(name, call)) for name in TABLE if name.split(".")[0] == family}


def records() -> Iterator[dict[str, Any]]:
    for dtype in (torch.bfloat16, torch.float16):
        for op in OPS:
            found = worst(op, dtype)
            bad = any(figures["problems"] for figures in found.values())
            yield {"op": op, "dtype": str(dtype).removeprefix("torch."), "backend": served(op, dtype),
                   "passed": not bad, "error": found}  # fmt: skip
    for op in ("select_keys", "select_topk"):
        wrong = wrong_selections(op)
        yield {"op": op, "backend": served(op, torch.bfloat16), "passed": not wrong, "error": {"wrong_rows": wrong}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    options = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit,
        "dirty": options.dirty,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    passed = True
    with settings(deterministic=True):
        for record in records():
            passed &= record["passed"]
            print(json.dumps({**record, **machine}), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
