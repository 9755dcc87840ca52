"""One line of JSON for each figure of the plain-torch reference on this machine's CPU.

    python results/record_reference.py --commit "$(git rev-parse HEAD)" > results/reference.jsonl

Times are medians of eleven for the layout and of three for attention; selection is one reading. Memory is the growth of
the process's peak resident size, so each operation runs in a process of its own.
"""

import argparse
import datetime
import json
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dsattn import Layout, __version__
from dsattn.ops import dense_mla, indexer_kl, select_keys, sparse_mla


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    options = parser.parse_args()
    for measure in (layout, select_in_32_mib, select_in_1_gib, attention):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for record in pool.apply(measure):
                print(json.dumps({**record, **machine(), "commit": options.commit, "dirty": options.dirty}), flush=True)


def layout() -> list[dict[str, Any]]:
    """Building a rank's tables for a large batch."""
    lengths, cp_size = [2048] * 512, 64

    def build(rank: int) -> Layout:
        return Layout.packed(lengths, cp_size=cp_size, cp_rank=rank)

    build(0)
    ms = [timed(lambda rank=rank: build(rank)) for rank in range(1, 12)]
    return [{"op": "layout", "shape": {"S": sum(lengths), "documents": 512, "cp": cp_size}, "ms": spread(ms)}]


def select_in_32_mib() -> list[dict[str, Any]]:
    return select_peak(2**25)


def select_in_1_gib() -> list[dict[str, Any]]:
    return select_peak(2**30)


def select_peak(block_bytes: int) -> list[dict[str, Any]]:
    """Selection over 16384 x 16384, whose scores would take 1 GiB; its result takes `result_bytes` of the peak."""
    rows, heads, width, top_k = 16384, 4, 64, 2048
    torch.manual_seed(0)
    q, k, w = torch.randn(rows, heads, width), torch.randn(rows, width), torch.randn(rows, heads)
    keys = Layout.causal(rows).keys
    select_keys(q[:512], k[:512], w[:512], Layout.causal(512).keys, top_k)
    before = peak()
    ms = spread([timed(lambda: select_keys(q, k, w, keys, top_k, block_bytes=block_bytes))])
    memory = {"peak_bytes": peak() - before, "result_bytes": rows * (top_k + 1) * 4}
    shape = {"T": rows, "S": rows, "H_I": heads, "D": width, "K": top_k, "block_bytes": block_bytes}
    return [{"op": "select_keys", "shape": shape, "ms": ms, **memory}]


def attention() -> list[dict[str, Any]]:
    """Forward and backward at 8192 tokens: no [T, S] and no [T, H, S] tensor."""
    rows, heads, width, top_k = 8192, 8, 576, 512
    torch.manual_seed(0)
    q, kv = torch.randn(rows, heads, width, requires_grad=True), torch.randn(rows, width, requires_grad=True)
    q_i, k_i, w = (torch.randn(*s, requires_grad=True) for s in ((rows, 4, 64), (rows, 64), (rows, 4)))
    keys, scale = Layout.causal(rows).keys, width**-0.5
    selection = select_keys(q_i, k_i, w, keys, top_k)
    _, lse = sparse_mla(q, kv, selection, scale=scale)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "sparse_mla": lambda: sparse_mla(q, kv, selection, scale=scale)[0],
        "dense_mla": lambda: dense_mla(q, kv, keys, scale=scale)[0],
        "indexer_kl": lambda: indexer_kl(q_i, k_i, w, q, kv, lse, keys, selection, scale=scale),
    }
    records = []
    for op, run in runs.items():
        forward, backward = [], []
        for _ in range(3):
            begin = time.perf_counter()
            out = run()
            middle = time.perf_counter()
            out.sum().backward()
            forward.append(1e3 * (middle - begin))
            backward.append(1e3 * (time.perf_counter() - middle))
        shape = {"T": rows, "S": rows, "H": heads, "C": width, "K": 0 if op == "dense_mla" else top_k}
        records += [
            {"op": f"{op}.forward", "shape": shape, "ms": spread(forward)},
            {"op": f"{op}.backward", "shape": shape, "ms": spread(backward)},
        ]
    return records


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def spread(ms: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ms), "min": min(ms), "max": max(ms)}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine() -> dict[str, Any]:
    return {
        "backend": "reference",
        "gpu": None,
        "cpu": {"cores": multiprocessing.cpu_count(), "threads": torch.get_num_threads(), "arch": platform.machine()},
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
