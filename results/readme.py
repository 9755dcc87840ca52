"""The section "Measured" of README.md, written anew from the newest records.

    python results/readme.py

tests/test_performance.py compares the section with what this makes.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from layer import OURS, VENDORS, crossed, layer_lines, layer_records
from newest import PEERS, clean, latest, read

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "## Measured\n", "## Command line\n"
KEYS = (4096, 32768, 131072)
ROWS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("sparse MLA forward, Hopper", "sparse_mla.forward", "hopper", {}),
    ("the same, 128 heads", "sparse_mla.forward", "hopper", {"H": 128}),
    ("the same, portable", "sparse_mla.forward", "triton", {}),
    ("sparse MLA backward, Hopper", "sparse_mla.backward", "hopper", {}),
    ("the same, bitwise repeatable (cuDNN's is not)", "sparse_mla.backward", "hopper", {"deterministic": True}),
    ("the same, 128 heads", "sparse_mla.backward", "hopper", {"H": 128}),
    ("the same, portable", "sparse_mla.backward", "triton", {}),
    ("`select_keys`, 32 indexer heads, Hopper", "select_keys", "hopper", {}),
    (
        "the same in fp8 (ours rounds q and k, DeepGEMM's come rounded; at 4K timed with its launches)",
        *("select_keys", "hopper", {"precision": "fp8"}),
    ),
    ("the same, portable", "select_keys", "triton", {}),
    ("top-k of given scores", "select_topk", "triton", {}),
    ("indexer loss forward; behind Hopper's attention it needs no pass of its own", "indexer_kl.forward", "triton", {}),
    ("indexer loss backward", "indexer_kl.backward", "triton", {}),
    ("the same, bitwise repeatable", "indexer_kl.backward", "triton", {"deterministic": True}),
)
"""What a row is called, operation, backend, and what differs from 64 heads, or 32 of the indexer, as fast as can be."""

HEAD = """\
One H200, 64 heads if not said, 4096 query rows, K = 2048, bf16, ascending keys with row lengths; medians in ms. Peers:
their time over ours, same operands, same run of `dsattn bench --peers`; below 1 they are ahead. Results were checked
against fp64. `-`: not in that run. All records: `docs/performance.md`.
"""


def main() -> None:
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")


def rewritten(text: str) -> str:
    """README.md with the section as the records have it."""
    before, _, rest = text.partition(BEGIN)
    return before + section() + END + rest.partition(END)[2]


def section() -> str:
    newest = latest(read("kernels.jsonl"))
    return "\n".join([BEGIN, *kernels(newest), "", *layer(newest), "", *others(), "", ""])


def kernels(newest: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [(name, found) for name, op, backend, change in ROWS if (found := records_of(newest, op, backend, change))]
    yield HEAD
    yield "| keys | 4K | 32K | 128K | peers at 4K, 32K, 128K | who is ahead of us | commit |"
    yield "|---|---|---|---|---|---|---|"
    for name, found in rows:
        times = [milliseconds(found[keys]["ms"]["median"]) if keys in found else "-" for keys in KEYS]
        peers = {peer: ratios_of(found, peer) for one in found.values() for peer in one["peers"]}
        told = "; ".join(f"{PEERS[peer]} {', '.join(map(shown, ratios))}" for peer, ratios in peers.items())
        if recalls := [f"{one['recall']['bf16']:.3f}" for one in found.values() if "recall" in one]:
            told += f"; recall of bf16's keys {', '.join(recalls)}"
        yield row([name, *times, told, ahead(peers), commits(found.values())])


def records_of(
    newest: Sequence[dict[str, Any]], operation: str, backend: str, change: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Keys -> the record of a row of ROWS, all of the newest commit that has one."""
    if "precision" in change:
        newest = [one for one in latest(read("recall.jsonl")) if one["inputs"] == "gaussian"]
    want = {"H": 64, "H_I": 32, "K": 2048, "T": 4096, "order": "ascending", "lengths": True, "deterministic": False}
    want |= change
    found = [
        record
        for record in newest
        if (record["op"], record["backend"]) == (operation, backend)
        and all({**record["shape"], **record}.get(name) in (None, value) for name, value in want.items())
        and record["shape"]["K"]
    ]
    made = [record["commit"] for record in read("kernels.jsonl")]
    commit = max((one["commit"] for one in found), key=lambda one: made[::-1].index(one) * -1, default=None)
    return {one["shape"]["S"]: one for one in found if one["commit"] == commit}


def ratios_of(found: dict[int, dict[str, Any]], peer: str) -> list[float | None]:
    return [found[keys]["ratio"].get(peer) if keys in found else None for keys in KEYS]


def milliseconds(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"


def ahead(peers: dict[str, list[float | None]]) -> str:
    """Which peer is ahead, where, and by how much of our time at most."""
    told = []
    for peer, ratios in peers.items():
        places = {f"{keys // 1024}K": one for keys, one in zip(KEYS, ratios, strict=True) if one and one < 1}
        if places:
            where = "everywhere" if len(places) == len(KEYS) else f"at {' and '.join(places)}"
            told.append(f"{PEERS[peer]} {where}, by {1 - min(places.values()):.0%} at most")
    return "; ".join(told) or "nobody"


def layer(newest: Sequence[dict[str, Any]]) -> Iterator[str]:
    lines = layer_lines(newest)
    tokens = [one for one, _ in lines[OURS]]
    records = layer_records(newest)
    lengths = [f"{one // 1024}K" for one in tokens]
    yield row(["one layer, T = S tokens: selection, attention, indexer loss, forward and backward", *lengths])
    yield "|---" * (1 + len(tokens)) + "|"
    again = {one["shape"]["S"]: one["ms"]["median"] for one in layer_records(newest, deterministic=True)}
    ours = f"dsattn ({commits(records)}){'; bitwise repeatable' * bool(again)}"
    names = {OURS: ours, VENDORS: f"{VENDORS} added up (cuDNN, FlashMLA)"}
    for label, line in lines.items():
        times = dict(line)
        cells = {one: milliseconds(times[one]) if one in times else "-" for one in tokens}
        if label == OURS and again:
            cells = {one: f"{cell}; {milliseconds(again[one]) if one in again else '-'}" for one, cell in cells.items()}
        yield row([names.get(label, label), *cells.values()])
    peak = max(records, key=lambda one: one["shape"]["S"])
    length = peak["shape"]["S"]
    yield ""
    picture = f"![A DSA layer and what it is compared with](results/layer.svg) {crossed(lines)}"
    memory = f"{peak['peak_bytes'] / 2**30:.1f} GiB (a `[T, S]` buffer: {length**2 * 4 // 2**30})"
    bars = "Numerical bar: `results/errors.jsonl`; memcheck: `results/sanitize.jsonl`."
    yield f"{picture} At {length // 1024}K tokens it takes {memory}. {bars}"


def others() -> Iterator[str]:
    """What is no operation."""
    yield "| what | where | figure | record |"
    yield "|---|---|---|---|"
    for tokens, backends in ((8192, ("reference", "hopper")), (32768, ("triton", "hopper"))):
        runs = {one: found for one in backends if (found := trained("small", tokens, one))}
        if runs:
            yield row(trainings(tokens, runs))
    yield row(recompute())
    if two := parallel():
        yield row(two)
    yield row(demo())


def trained(recipe: str, tokens: int, backend: str) -> dict[str, Any] | None:
    """The last record of such a run, with MFU."""
    found = [
        one
        for one in clean(read("training.jsonl"))
        if (one["recipe"], one["shape"]["T"]) == (recipe, tokens)
        and one["backend"]["sparse_mla.forward"] == backend
        and all(stage.get("mfu") for stage in one["stages"])
    ]
    return found[-1] if found else None


def trainings(tokens: int, runs: dict[str, dict[str, Any]]) -> list[str]:
    names = {"reference": "reference", "triton": "portable kernels", "hopper": "Hopper's kernels"}
    what = f"`small`, {tokens // 1024}K-token packs, {'; '.join(names[one] for one in runs)}: tokens/s (MFU) of dense, "
    what += "warm-up, sparse steps" + ". Losses: `results/small.svg`" * (tokens == 8192)
    told = (
        ", ".join(f"{one['tokens_per_second']:,.0f} ({one['mfu']:.1%})" for one in run["stages"])
        for run in runs.values()
    )
    return [what, "one H200", "; ".join(told), f"results/training.jsonl, {commits(runs.values())}"]


def recompute() -> list[str]:
    found = {
        one["recompute"]: one
        for one in clean(read("recompute.jsonl"))
        if (one["op"], one["mode"], one["T"], one.get("reuse_selection")) == ("recompute", "sparse", 32768, True)
    }
    kinds = ("none", "selective", "full")
    told = [f"{found[k]['ms']['median'] / 1000:.2f} s, {found[k]['peak_bytes'] / 2**30:.1f} GiB" for k in kinds]
    what = "`small`, 32K tokens: step and peak memory without recompute; selective; full"
    return [what, "one H200", "; ".join(told), source("recompute", found["full"])]


def parallel() -> list[str]:
    found = {
        one["case"]: one
        for one in clean(read("parallel.jsonl"))
        if (one["shape"]["T"], one["shape"]["dtype"]) == (65536, "bfloat16")
        and one["case"] != "one"
        and one.get("mode", "sparse") == "sparse"
        and not one["shape"].get("compile")
    }
    if not found:
        return []
    cases = ", ".join(f"`{one}`" for one in found)
    what = f"`small`, two packs of 64K tokens a step, {cases}: tokens/s over one GPU's"
    speeds = ", ".join(f"{one['speedup']:.2f}" for one in found.values())
    return [what, "two H200s", speeds, source("parallel", *found.values())]


def demo() -> list[str]:
    run = [one for one in read("training.jsonl") if one["recipe"] == "tiny"][-1]
    dense, _, sparse = run["stages"]
    recall = run["recall"]
    steps = ", ".join(f"{one['mode']} {one['steps']}" for one in run["stages"])
    what = (
        f"`make demo`, steps: {steps}. Held-out nats a byte, dense and sparse; recall@{run['shape']['K']} "
        "(random, recency, oracle)"
    )
    losses = f"{dense['held_out_loss']:.2f}, {sparse['held_out_loss']:.2f}"
    others = ", ".join(f"{recall[name]:.3f}" for name in ("random", "recency", "oracle"))
    figure = f"{run['seconds']:.0f} s; {losses}; {recall['recall']:.3f} ({others})"
    return [what, "2 CPU cores", figure, source("training", run)]


def source(file: str, *records: dict[str, Any]) -> str:
    return f"results/{file}.jsonl, {commits(records)}" + (" (dirty)" if any(one["dirty"] for one in records) else "")


def commits(records: Iterable[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(one["commit"][:7] for one in records))


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
