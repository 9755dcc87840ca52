"""docs/performance.md, from the records: the newest of each operation, shape and backend.

    python results/performance.py > docs/performance.md

tests/test_performance.py compares the page with what this prints.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from layer import crossed, layer_lines
from newest import PEERS, TITLES, clean, latest, latest_cases, read

HEAD = """# Performance

Made by `python results/performance.py` from `results/*.jsonl`; do not edit. A line is one NVIDIA H200 (132 SMs), bf16
operands, and was checked against fp64 before it was timed (`error`: of a budget of 2, twice the error of plain bf16
torch). `ms`: median of calls timed with CUDA events, on rotating operands. Peers: their ms on the same operands in the
same run and how many times as long as ours they take: below 1 they are ahead. `dsattn bench --peers` makes such lines.
Letters: T query rows, S keys, H heads, K kept keys, H_I indexer heads.
"""

LOW_PRECISION = """## Selection in low precision

`dsattn bench select --precision fp8 --peers`. Recall: the share of the keys that bf16 operands, or fp32 ones, select
which the rounded ones select too; mean over rows that see more than K keys, and the worst row. `hadamard`: q and k
rotated before. Our time holds the rounding of q and k, DeepGEMM's operands come rounded. `error`: how far below the
K-th best a selected score lies, of scores of the rounded operands in fp64, over the row's largest.
Records of commits before 8938fdc hold the launches that the GPU waited for, a good part of them at 4K keys.

"""
FULL_ERRORS = """## Errors on full shapes

`python results/record_full_errors.py`: every row, head and key against fp64. A cell is the tensor that comes nearest to
its bar, largest and mean error in units of the bar (1: twice the error of plain bf16 torch), and the least similarity;
of `select_keys` the regret, as above, of its limit.

"""
PARALLEL = """## Two GPUs beside one

`python results/record_parallel.py`: the recipe `small`, the same packs and weights, two H200s over NCCL, in sparse
training but where a warm-up is named. `x`: times one GPU's tokens/s. `apart`: the largest relative distance to one GPU
in any step. Of the time that a GPU's kernels take in a profiled step: what NCCL's wait for the other GPU, what they
move data for, and what of that its other kernels cover. A step is two packs: a pipeline of two idles for a third of it.

"""


def main() -> None:
    print(page(), end="")


def page() -> str:
    """The whole page."""
    newest = latest(read("kernels.jsonl"))
    sections = [HEAD]
    for family, title in TITLES.items():
        records = [record for record in newest if record["op"].partition(".")[0] == family]
        if records:
            sections.append(f"## {title}\n\n" + "\n".join(table(records)) + "\n" + "".join(behind(records)))
        if family == "dsa_layer" and (lines := layer_lines(records))["dsattn"]:
            sections.append(f"{crossed(lines)} Drawn in `results/layer.svg`.\n")
    if low := latest(read("recall.jsonl")):
        sections.append(LOW_PRECISION + "\n".join(low_precision(low)) + "\n" + "".join(behind(low)))
    if full := clean(read("full_errors.jsonl")):
        sections.append(FULL_ERRORS + "\n".join(full_errors(full)) + "\n")
    if two := latest_cases(read("parallel.jsonl")):
        sections.append(PARALLEL + "\n".join(parallel(two)) + "\n")
    sections.append("## Whole training runs\n\n" + "\n".join(training(read("training.jsonl"))) + "\n")
    return "\n".join(sections)


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| operation | S | shape | backend | ms | TFLOP/s | GB/s | extra memory | error | peers: ms (x) | record |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for record in records:
        rates = [f"{record[name]:.0f}" if record.get(name) else "" for name in ("tflops", "gbps")]
        memory = record.get("peak_bytes")
        error = record["error"].get("max")
        cells = [
            record["op"],
            f"{record['shape']['S']:,}",
            shape_of(record),
            record["backend"],
            f"{record['ms']['median']:.2f}",
            *rates,
            "" if memory is None else f"{memory / 2**30:.2f} GiB",
            "" if error is None else f"{error:.2g}",
            peers(record),
            f"{record['date']}, {record['commit'][:7]}",
        ]
        yield "| " + " | ".join(cells) + " |"


def shape_of(record: dict[str, Any]) -> str:
    shape = record["shape"]
    parts = [f"{name}={shape[name]}" for name in ("T", "H", "H_I", "K") if shape.get(name)]
    parts += [shape["order"]] if shape.get("order") else []
    parts += ["no lengths"] if shape.get("lengths") is False else []
    parts += [record["precision"]] if record.get("precision") not in (None, "bf16") else []
    parts += ["deterministic"] if record.get("deterministic") else []
    return ", ".join(parts)


def peers(record: dict[str, Any]) -> str:
    named = ((PEERS.get(name, name), ms, record["ratio"][name]) for name, ms in record["peers"].items())
    return ", ".join(f"{name} {ms:.2f} ({ratio:.2f} x)" for name, ms, ratio in named)


def behind(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A sentence for each peer that is ahead somewhere."""
    ahead: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        for name, ratio in record["ratio"].items():
            if ratio < 1:
                kind = ", deterministic" if record["deterministic"] else ""
                where = f"S={record['shape']['S']:,}{kind} ({ratio:.2f} x)"
                ahead.setdefault((str(PEERS.get(name, name)), record["op"], record["backend"]), []).append(where)
    for (peer, operation, backend), places in ahead.items():
        yield f"\n{peer} is ahead of `{backend}` in `{operation}` at {', '.join(places)}.\n"


def low_precision(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| inputs | S | shape | backend | ms | recall@K of bf16 | of fp32 | error | peers: ms (x) | record |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for record in records:
        cells = [
            record["inputs"],
            f"{record['shape']['S']:,}",
            shape_of(record),
            record["backend"],
            f"{record['ms']['median']:.2f}",
            *(f"{record['recall'][name]:.4f} ({record['least'][name]:.4f})" for name in ("bf16", "fp32")),
            f"{record['error']['max']:.1g}",
            peers(record),
            f"{record['date']}, {record['commit'][:7]}",
        ]
        yield "| " + " | ".join(cells) + " |"


def full_errors(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row for each operation and shape, a column for each backend, of the newest lines."""
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for record in records:
        if record["passed"] is not None:
            shape = record["shape"]
            row = record["op"], shape["S"], shape["H"], shape["H_I"], shape["selection"] or ""
            kind = " deterministic" if record["deterministic"] else ""
            cells.setdefault(row, {})[f"{record['backend']}{kind}"] = nearest_to_bar(record["error"])
    columns = sorted({name for found in cells.values() for name in found})
    yield "| operation | S | H | H_I | selection | " + " | ".join(columns) + " |"
    yield "|---|---|---|---|---|" + "---|" * len(columns)
    for (op, keys, *rest), found in sorted(cells.items()):
        yield "| " + " | ".join([op, f"{keys:,}", *map(str, rest), *(found.get(one, "") for one in columns)]) + " |"


def nearest_to_bar(error: dict[str, dict[str, Any]]) -> str:
    if "regret" in error:
        return f"{error['regret']['max']:.1g} of {error['regret']['limit']:g}"
    shares = {
        name: [one[kind] / max(one[f"{kind}_limit"], 1e-30) for kind in ("max", "mean")] for name, one in error.items()
    }
    name = max(shares, key=lambda one: max(shares[one]))
    least = min(one["similarity"] for one in error.values())
    broken = " BROKEN" if any(one["problems"] for one in error.values()) else ""
    return f"{name} {shares[name][0]:.2f}, {shares[name][1]:.2f}; 1 - {1 - least:.1g}{broken}"


def parallel(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| GPUs | T | dtype | layers | tokens/s | x | GiB | waits | moves (covered) | loss, KL, norm apart | record |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for record in records:
        shape, talk, apart = record["shape"], record["communication"], record.get("apart")
        talk = [one for one in talk or () if one["moving_ms"]]
        cells = [
            record["case"],
            f"{shape['T']:,}",
            shape["dtype"],
            str(shape["layers"]),
            f"{record['tokens_per_second']:,.0f}",
            f"{record['speedup']:.2f}" if "speedup" in record else "",
            ", ".join(f"{peak / 2**30:.1f}" for peak in record["peak_bytes"]),
            ", ".join(f"{one['waiting_ms'] / one['kernel_ms']:.1%}" for one in talk),
            ", ".join(
                f"{one['moving_ms'] / one['kernel_ms']:.1%} ({one['moving_covered_ms'] / one['moving_ms']:.0%})"
                for one in talk
            ),
            ", ".join(f"{apart[name]:.1g}" for name in ("losses", "kl", "grad_norms")) if apart else "",
            f"{record['date']}, {record['commit'][:7]}",
        ]
        yield "| " + " | ".join(cells) + " |"


def training(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| recipe | T | backends of sparse MLA | stage | tokens/s | TFLOP/s | MFU | record |"
    yield "|---|---|---|---|---|---|---|---|"
    for record in records:
        if record["gpu"] == "cpu" or record["dirty"]:
            continue
        served = record["backend"]
        served = served.get("sparse_mla.forward", "") if isinstance(served, dict) else served
        for stage in record["stages"]:
            mfu = stage.get("mfu")
            cells = [
                record["recipe"],
                f"{record['shape']['T']:,}",
                served,
                stage["mode"],
                f"{stage['tokens_per_second']:,.0f}",
                f"{stage['tflops']:.1f}" if stage.get("tflops") else "",
                f"{100 * mfu:.1f} %" if mfu else "",
                f"{record['date']}, {record['commit'][:7]}",
            ]
            yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
