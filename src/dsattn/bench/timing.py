"""Times and memory of a call: CUDA events on a GPU, the wall clock on a CPU."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]
_CYCLES = 2e9  # of a GPU a second, about
_LONGEST_WAIT = 0.5  # seconds


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call."""

    median: float
    min: float
    max: float


def copies(one_set: int, device: torch.device) -> int:
    """How many sets of operands, of `one_set` bytes each, timings rotate over so that the L2 cache holds none of them.

    2 at least on a GPU, 1 on a CPU.
    """
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(8, max(2, -(-3 * cache // max(one_set, 1))))


def measure(
    runs: Sequence[Run], device: torch.device, *, seconds: float = 1.0, least: int = 5, most: int = 50
) -> Times:
    """Median, fastest and slowest of repeated calls, taking `runs` in turn.

    Each of `runs` is called once before, untimed: it compiles, and fills caches of memory. seconds: about how long to
    repeat, between `least` and `most` times; calls of half a second and more three times at least. A GPU is made to
    wait until all calls are enqueued, so that none is timed with its own launch, unless it waits for the GPU itself or
    a thousand launches wait already.
    """
    for run in runs:
        run()
    clock = _events if device.type == "cuda" else _wall
    (once,) = clock(runs[:1], 1, device)
    repeats = max(least if once < 500 else min(least, 3), min(most, int(1e3 * seconds / max(once, 1e-3))))
    taken = sorted(clock(runs, repeats, device))
    return Times(median=taken[len(taken) // 2], min=taken[0], max=taken[-1])


def peak_bytes(run: Run, device: torch.device) -> int | None:
    """Bytes of GPU memory that `run` needs at its worst moment beside what is there already; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = run()
    torch.cuda.synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def _events(runs: Sequence[Run], repeats: int, device: torch.device) -> list[float]:
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    runs[0]()
    launch = time.perf_counter() - started
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(int(_CYCLES * min(2 * launch * repeats, _LONGEST_WAIT)))
    for number, (begin, end) in enumerate(pairs):
        begin.record()
        runs[number % len(runs)]()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in pairs]


def _wall(runs: Sequence[Run], repeats: int, device: torch.device) -> list[float]:
    taken = []
    for number in range(repeats):
        begin = time.perf_counter()
        runs[number % len(runs)]()
        taken.append(1e3 * (time.perf_counter() - begin))
    return taken
