"""One line of JSON for each kernel that a GPU's `auto` takes: checked against fp64 first, then timed.

    python results/record_kernels.py --commit "$(git rev-parse HEAD)" > results/kernels.jsonl

T = 4096 query rows, K = 2048, bf16; keys in ascending order, drawn below each row's causal limit (duplicates dropped).
Times are medians of 12 CUDA-event timings after two warm-ups. Rates: forward 2 T H K (C + V), backward
2 T H K (3 C + 2 V), scores 2 H_I D T S. Peers: torch.topk for the ranking, the reference's one sixteenth times sixteen
for select_keys.
"""

import argparse
import datetime
import json
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from record_run import driver

from dsattn import KeyRange, Selection, __version__
from dsattn.ops import select_keys, select_topk, sparse_mla
from dsattn.selection import rank

ROWS, TOP_K, GPU = 4096, 2048, "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    options = parser.parse_args()
    torch.manual_seed(0)
    machine = {
        "backend": "triton",
        "passed_over": {},
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit,
        "dirty": options.dirty,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    for keys in (4096, 32768, 131072):
        for records in (attention(64, keys), selection(32, max(keys, 8192)), ranking(max(keys, 8192))):
            for record in records:
                print(json.dumps({**record, **machine}), flush=True)


def attention(heads: int, keys: int) -> Iterator[dict[str, Any]]:
    """Sparse MLA forward and both backwards; 64 rows against fp64."""
    width, value_dim = 576, 512
    picked = random_selection(keys)
    q = torch.randn(ROWS, heads, width, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    kv = torch.randn(keys, width, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    scale = width**-0.5
    some = torch.randint(0, ROWS, (64,), device=GPU)
    exact_q, exact_kv = q.detach()[some].double().requires_grad_(), kv.detach().double()
    exact, _ = sparse_mla(exact_q, exact_kv, Selection.from_index(picked.index[some]), scale=scale, backend="reference")
    grad = torch.randn(ROWS, heads, value_dim, device=GPU, dtype=torch.bfloat16)
    (exact_dq,) = torch.autograd.grad(exact, exact_q, grad[some].double())
    shape = {"T": ROWS, "S": keys, "H": heads, "C": width, "K": TOP_K, "order": "ascending", "lengths": True}
    flops = 2 * ROWS * heads * TOP_K
    for deterministic in (False, True):
        out, _ = sparse_mla(q, kv, picked, scale=scale, deterministic=deterministic)

        def backward(out: torch.Tensor = out) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, (q, kv), grad, retain_graph=True)

        dq, dkv = backward()
        if not deterministic:
            with torch.no_grad():
                times = median(lambda: sparse_mla(q, kv, picked, scale=scale))
            error = {"relative": relative(out[some], exact), "limit": 4e-3}
            yield record("sparse_mla.forward", shape, times, flops * (width + value_dim), error)
        error = {"relative": relative(dq[some], exact_dq), "limit": 6e-3}
        extra = {"deterministic": deterministic}
        if deterministic:
            extra["repeats_bitwise"] = all(torch.equal(backward()[1], dkv) for _ in range(5))
        times = median(backward)
        yield {**record("sparse_mla.backward", shape, times, flops * (3 * width + 2 * value_dim), error), **extra}


def selection(heads: int, keys: int) -> Iterator[dict[str, Any]]:
    """Scores and top-k; 256 rows against the reference, and against other blocks bit for bit."""
    width = 128
    q = torch.randn(ROWS, heads, width, device=GPU, dtype=torch.bfloat16)
    k = torch.randn(keys, width, device=GPU, dtype=torch.bfloat16)
    w = torch.randn(ROWS, heads, device=GPU, dtype=torch.bfloat16)
    ranges = causal(keys)
    part = ranges.row_slice(0, 256)
    whole = select_keys(q, k, w, ranges, TOP_K, return_scores=True)
    cut = select_keys(q[:256], k, w[:256], part, TOP_K, return_scores=True, block_bytes=2**24)
    same = torch.equal(whole.index[:256], cut.index) and torch.equal(whole.score[:256], cut.score)

    def reference() -> Selection:
        return select_keys(q[:256], k, w[:256], part, TOP_K, backend="reference")

    differs = (reference().mask(keys) ^ cut.mask(keys)).sum().item() / (2 * 256 * TOP_K)
    times, peer = median(lambda: select_keys(q, k, w, ranges, TOP_K)), 16 * median(reference, 3)["median"]
    shape = {"T": ROWS, "S": keys, "H_I": heads, "D": width, "K": TOP_K}
    error = {"selected_differently": differs, "limit": 1e-3, "same_bits_for_other_blocks": same}
    yield record("select_keys", shape, times, 2 * heads * width * ROWS * keys, error, {"reference": peer})


def ranking(keys: int) -> Iterator[dict[str, Any]]:
    """The ranking rule on given scores."""
    scores = torch.randn(ROWS, keys, device=GPU)
    ranges = KeyRange(*(torch.full((ROWS,), x, dtype=torch.int32, device=GPU) for x in (0, keys)))
    index, _, _ = rank(scores[:64], torch.arange(keys, dtype=torch.int32, device=GPU), TOP_K)
    right = torch.equal(select_topk(scores, ranges, TOP_K).index[:64], index)
    times = median(lambda: select_topk(scores, ranges, TOP_K))
    peer = median(lambda: torch.topk(scores, TOP_K, dim=1))["median"]
    shape = {"T": ROWS, "S": keys, "K": TOP_K}
    gbps = 4 * ROWS * keys / times["median"] / 1e6
    yield {**record("select_topk", shape, times, 0, {"exact": right}, {"torch": peer}), "gbps": gbps}


def record(
    op: str,
    shape: dict[str, Any],
    ms: dict[str, float],
    flops: int,
    error: dict[str, Any],
    peers: dict[str, float] | None = None,
) -> dict[str, Any]:
    peers = peers or {}
    ratio = {name: peer / ms["median"] for name, peer in peers.items()}
    rate = flops / ms["median"] / 1e9 if flops else None
    return {"op": op, "shape": shape, "ms": ms, "tflops": rate, "peers": peers, "ratio": ratio, "error": error}


def random_selection(keys: int) -> Selection:
    limit = causal(keys).stop[:, None]
    index = (torch.rand(ROWS, TOP_K, device=GPU) * limit).int().sort(1).values
    again = torch.zeros_like(index, dtype=torch.bool)
    again[:, 1:] = index[:, 1:] == index[:, :-1]
    return Selection.from_index(index.masked_fill(again, -1))


def causal(keys: int) -> KeyRange:
    stop = torch.arange(keys - ROWS + 1, keys + 1, dtype=torch.int32, device=GPU)
    return KeyRange(torch.zeros_like(stop), stop)


def median(run: Callable[[], object], times: int = 12) -> dict[str, float]:
    run()
    run()
    taken = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    taken.sort()
    return {"median": taken[len(taken) // 2], "min": taken[0], "max": taken[-1]}


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main()
