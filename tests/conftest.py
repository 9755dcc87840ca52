"""What holds in every test: seeded, poisoned, one thread a worker, and nothing left behind in torch's global state."""

import functools
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _device

ROOT = Path(__file__).parents[1]
NO_GPU = "needs a CUDA GPU; recorded runs are in results/"


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # under xdist the cores are shared already
        torch.set_num_threads(1)
    poison_uninitialised_memory()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of garbage collection, which would walk 10^5 lasting objects again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def poison_uninitialised_memory() -> None:
    """Make Python's `torch.empty` family return NaN, or the largest integer, so that a read before a write shows.

    torch can do it (`torch.utils.deterministic.fill_uninitialized_memory`), but only together with
    `use_deterministic_algorithms`, which our ops follow: every test of the default mode would quietly test the
    deterministic one. A TorchFunctionMode switches itself off inside a custom op and inside `backward`, where our
    `empty` calls are. So the functions are replaced, and once for the process: torch._dynamo keeps a table
    of torch's functions from its first use, and replacing them later, or restoring them, breaks `torch.compile`.
    Not covered: allocations by C++ (`resize_`, `empty` of Inductor's code) and processes that a test starts.
    """
    _device._device_constructors()  # cached with the original functions, by which `with torch.device(...)` knows them
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        made = make(*args, **kwargs)
        with torch.no_grad():
            if made.is_floating_point() or made.is_complex():
                return made.fill_(float("nan"))
            return made.fill_(True if made.dtype == torch.bool else torch.iinfo(made.dtype).max)

    return empty


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """Seed torch before the test; after it, put back the determinism switch and the default dtype."""
    torch.manual_seed(0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    dtype = torch.get_default_dtype()
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_default_dtype(dtype)


@pytest.fixture
def peak_bytes(capfd: pytest.CaptureFixture[str]) -> Callable[[Callable[[], object]], int]:
    """Run something; the most bytes that torch's CPU allocator held at once beyond what it held before."""

    def measure(work: Callable[[], object]) -> int:
        gc.collect()  # what goes meanwhile must not count
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            work()
        capfd.readouterr()  # the profiler tells stderr that it starts
        events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
        return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))

    return measure


@pytest.fixture
def run_python() -> Callable[[str], None]:
    """Run code in a fresh interpreter at the root of the repository; its traceback is the failure's message."""

    def run(code: str) -> None:
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    return run
