"""Errors on full shapes, every row, head and key against fp64: one line of JSON a case and backend.

    python results/record_full_errors.py --commit "$(git rev-parse HEAD)" > results/full_errors.jsonl

Sparse MLA, forward and backward, and a layer's attention with the indexer's loss, over 4K, 32K and 128K keys with 64
and 128 heads. The selections: `uniform` ones, rows with fewer keys than slots among them; `holes`, one key in eight
taken out of the middle of the rows, and NaN in its place; `recorded`, as a trained model was seen to select. Exact is
the formula in fp64, a block of rows after the other; plain torch's error in bf16 gives the bar, as in record_errors.py.
Selections of `select_keys` are held against fp64 scores of every row. Exits with 1 where a bar is broken.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record_errors import KL_WEIGHT, judged
from torch import Tensor

from dsattn import settings
from dsattn.bench import oracle
from dsattn.bench.cases import SHAPES, Operands, Setting, indexer, mla
from dsattn.bench.oracle import Error
from dsattn.bench.patterns import Pattern
from dsattn.bench.records import Machine
from dsattn.errors import BackendUnavailable
from dsattn.ops import dsa_attention, select_keys, sparse_mla
from dsattn.selection import Selection

PATTERN = Path(__file__).parent / "selection.npz"
HOLE, EVERY = 7, 8  # of eight keys in turn, the one that `holes` takes out
SELECTIONS = ("uniform", "holes", "recorded")
BACKENDS = (("hopper", False), ("hopper", True), ("triton", False), ("triton", True))
_BLOCK_BYTES = 2**34  # of one block of rows in fp64
Results = dict[str, Tensor]


class Exact(NamedTuple):
    """What the formulas give in one dtype: of the attention alone, and of the attention with the indexer's loss."""

    attention: Results
    layer: Results


def setting_of(shape: str, keys: int, selection: str, **rest: Any) -> Setting:
    order = "recorded" if selection == "recorded" else "ascending"
    pattern = Pattern.load(PATTERN) if selection == "recorded" else None
    return Setting(shape=SHAPES[shape], rows=min(4096, keys), keys=keys, order=order, pattern=pattern, **rest)


def operands_of(setting: Setting, selection: str) -> Operands:
    chosen = setting.selection()
    attention, own = mla(setting, 0, chosen), indexer(setting, 1000)
    given = replace(attention, q_i=own.q_i, k_i=own.k_i, w=own.w)
    return with_holes(given) if selection == "holes" else given


def with_holes(given: Operands) -> Operands:
    chosen, (k,) = given.selection, given.take("k")
    assert chosen is not None
    index = chosen.index.masked_fill(chosen.index % EVERY == HOLE, -1)
    unread = torch.arange(len(k), device=k.device) % EVERY == HOLE
    return replace(given, selection=Selection(index, chosen.length), k=k.masked_fill(unread[:, None], torch.nan))


def exact(given: Operands, setting: Setting, dtype: torch.dtype) -> Exact:
    """Every result in `dtype`, sums over rows in fp32 or better. The loss is a mean over rows."""
    shape, scale, count = setting.shape, setting.shape.width**-0.5, setting.rows
    each = 8 * shape.top_k * (3 * shape.width + 8 * shape.heads + 3 * shape.index_width + 8 * shape.index_heads)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("out", "lse", "dq", "dq_i", "dw")}
    sums: dict[str, Tensor] = {}
    for row in torch.arange(count, device=setting.device).split(max(1, _BLOCK_BYTES // each)):
        rows = oracle.candidates(given, setting.ranges, setting.keys, row)
        one = oracle.attention(given, rows, dtype, scale=scale, value_dim=shape.value_dim, wide=True)
        two = oracle.distillation(given, rows, dtype, scale=scale, wide=True)
        share = KL_WEIGHT * len(row) / count
        new = {"out": one.out, "lse": one.lse, "dq": one.dq, "dq_i": two.dq * share, "dw": two.dw * share}
        for name, part in new.items():
            parts[name].append(part)
        for name, part in {"dk": one.dk, "dk_i": two.dk * share, "loss": two.kl * share}.items():
            sums[name] = sums[name] + part if name in sums else part
    found = {name: torch.cat(part) for name, part in parts.items()}
    found |= {name: total.to(dtype) for name, total in sums.items()}
    attention = {name: found[name] for name in ("out", "lse", "dq", "dk")}
    return Exact(attention, found)


def attention_results(given: Operands, setting: Setting) -> Results:
    q, k = (x.detach().requires_grad_() for x in given.take("q", "k"))
    flags: dict[str, Any] = {"deterministic": setting.deterministic, "backend": setting.backend}
    assert given.selection is not None
    out, lse = sparse_mla(
        q, k, given.selection, scale=setting.shape.width**-0.5, value_dim=setting.shape.value_dim, **flags
    )
    dq, dk = torch.autograd.grad(out, (q, k), given.grad_out)
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk}


def layer_results(given: Operands, setting: Setting) -> Results:
    leaves = [x.detach().requires_grad_() for x in given.take("q", "k", "q_i", "k_i", "w")]
    q, k, q_i, k_i, w = leaves
    flags: dict[str, Any] = {"deterministic": setting.deterministic, "backend": setting.backend}
    flags |= {"scale": setting.shape.width**-0.5, "value_dim": setting.shape.value_dim, "kl_weight": KL_WEIGHT}
    assert given.selection is not None
    out, lse, kl = dsa_attention(q, k, given.selection, q_i, k_i, w, setting.ranges, **flags)
    grads = torch.autograd.grad((out, kl), leaves, (given.grad_out, torch.ones_like(kl)))
    results = {"out": out.detach(), "lse": lse, "loss": kl.detach()}
    return results | dict(zip(("dq", "dk", "dq_i", "dk_i", "dw"), grads, strict=True))


def lines_of(setting: Setting, selection: str, backends: Sequence[tuple[str, bool]]) -> Iterator[dict[str, Any]]:
    """A record for each backend of one case: of attention alone, and with the loss where the selection has no holes."""
    given = operands_of(setting, selection)
    right, plain = (exact(given, setting, dtype) for dtype in (torch.float64, setting.dtype))
    for backend, deterministic in backends:
        asked = replace(setting, backend=backend, deterministic=deterministic)
        runs = {"sparse_mla": (attention_results, right.attention, plain.attention)}
        if selection != "holes":
            runs["dsa_attention"] = (layer_results, right.layer, plain.layer)
        for op, (run, exactly, roughly) in runs.items():
            record = described(op, asked, selection)
            try:
                got = run(given, asked)
            except BackendUnavailable as problem:
                yield {**record, "passed": None, "unavailable": str(problem)}
                continue
            error = {name: judged(name, one, exactly[name], roughly[name]) for name, one in got.items()}
            yield {**record, "passed": not any(one["problems"] for one in error.values()), "error": error}


def selection_lines(setting: Setting, backends: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A record for each backend of `select_keys`: the worst regret over all rows."""
    given = indexer(setting, 0)
    q_i, k_i, w = given.take("q_i", "k_i", "w")
    for backend in backends:
        record = described("select_keys", replace(setting, backend=backend), None)
        try:
            index = select_keys(q_i, k_i, w, setting.ranges, setting.shape.top_k, backend=backend).index
        except BackendUnavailable as problem:
            yield {**record, "passed": None, "unavailable": str(problem)}
            continue
        worst = Error(0.0, 0.0, oracle.REGRET_LIMIT["bf16"])
        for row in torch.arange(setting.rows, device=setting.device).split(64):
            worst |= oracle.regret(index, given, setting.ranges, row=row)
        yield {**record, "passed": not worst.wrong, "error": {"regret": asdict(worst)}}


def described(op: str, setting: Setting, selection: str | None) -> dict[str, Any]:
    shape = setting.shape
    sizes = {"T": setting.rows, "S": setting.keys, "H": shape.heads, "K": shape.top_k, "H_I": shape.index_heads}
    return {
        "op": op,
        "backend": setting.backend,
        "deterministic": setting.deterministic,
        "shape": {**sizes, "C": shape.width, "V": shape.value_dim, "D": shape.index_width, "selection": selection},
        "dtype": str(setting.dtype).removeprefix("torch."),
    }


def records(seconds: float) -> Iterator[dict[str, Any]]:
    """Every case; none is begun after `seconds`, and those left out are told."""
    began, rest = time.monotonic(), {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    cases = [
        (shape, keys, chosen)
        for chosen in SELECTIONS
        for keys in (32768, 4096, 131072)
        for shape in ("glm", "deepseek")
    ]
    for shape, keys, chosen in cases:
        if time.monotonic() - began > seconds:
            print(f"left out: {shape}, {keys} keys, {chosen}", file=sys.stderr)
            continue
        setting = setting_of(shape, keys, chosen, **rest)
        yield from lines_of(setting, chosen, BACKENDS)
        if chosen == "uniform":
            yield from selection_lines(setting, ("hopper", "triton"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--seconds", type=float, default=50.0, help="begin no case later")
    options = parser.parse_args()
    machine = asdict(Machine.here(torch.device("cuda"), commit=options.commit, dirty=options.dirty))
    passed = True
    with settings(first_use_checks=False):
        for record in records(options.seconds):
            passed &= record["passed"] is not False
            print(json.dumps({**record, **machine}), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
