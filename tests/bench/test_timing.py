import time
from types import SimpleNamespace

import pytest
import torch

from dsattn.bench import timing
from dsattn.bench.timing import copies, measure, peak_bytes

CPU = torch.device("cpu")


def test_takes_runs_in_turn():
    calls = []
    runs = [lambda name=name: calls.append(name) for name in "abc"]
    measure(runs, CPU, seconds=0.0, least=5)
    assert "".join(calls) == "abc" + "a" + "abcab"  # warm, one to learn how long it takes, the timed ones


@pytest.fixture
def sleep(monkeypatch):
    """Let a clock go on by so many seconds, which nothing else does."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.append(now.pop() + seconds)


def test_measures_milliseconds(sleep):
    times = measure([lambda: sleep(0.004)], CPU, seconds=0.0, least=3)
    assert (times.min, times.median, times.max) == pytest.approx((4, 4, 4))


def test_median_is_not_moved_by_one_slow_call(sleep):
    waits = iter([0, 0, 1, 2, 50, 3, 4])
    times = measure([lambda: sleep(1e-3 * next(waits))], CPU, seconds=0.0, least=5)
    assert (times.min, times.median, times.max) == pytest.approx((1, 3, 50))


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 2), (100.0, 7)])
def test_repeats_between_least_and_most(seconds, calls):
    count = []
    measure([lambda: count.append(1)], CPU, seconds=seconds, least=2, most=7)
    assert len(count) == 2 + calls


def test_long_calls_are_repeated_less(monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "_wall", lambda runs, repeats, _: asked.append(repeats) or [600.0] * repeats)
    measure([lambda: None], CPU, seconds=0.0)
    measure([lambda: None], CPU, seconds=0.0, least=2)
    measure([lambda: None], CPU, seconds=6.0)
    assert asked == [1, 3, 1, 2, 1, 10]


def test_a_cpu_has_one_set_and_no_peak():
    assert copies(1, CPU) == 1
    assert peak_bytes(lambda: pytest.fail("run"), CPU) is None


@pytest.mark.parametrize(("one_set", "count"), [(10, 8), (2**20, 8), (40 * 2**20, 4), (10**9, 2)])
def test_sets_do_not_fit_the_cache_of_a_gpu(one_set, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50 * 2**20))
    assert copies(one_set, torch.device("cuda")) == count


def test_a_gpu_waits_until_all_calls_are_enqueued(sleep, monkeypatch):
    done = []
    event = SimpleNamespace(record=lambda: done.append("event"), elapsed_time=lambda _: 20.0)
    cuda = SimpleNamespace(synchronize=lambda _: done.append("wait"), Event=lambda **_: event)
    cuda._sleep = lambda cycles: done.append(cycles)
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
    times = measure([lambda: (sleep(2e-3), done.append("call"))], torch.device("cuda"), seconds=0.06, least=2)
    assert times.median == 20.0

    def timed(calls):
        return ["wait", "call", pytest.approx(2 * 2e-3 * calls * 2e9), *["event", "call", "event"] * calls, "wait"]

    assert done == ["call", *timed(1), *timed(3)]


@pytest.mark.gpu
def test_a_gpus_calls_are_timed_without_their_launch():
    device = torch.device("cuda")
    x = torch.empty(2**10, device=device)
    times = measure([lambda: (time.sleep(2e-3), x.fill_(1.0))], device, most=20)
    assert times.median < 0.5


@pytest.mark.gpu
def test_on_a_gpu():
    device = torch.device("cuda")
    x = torch.empty(2**26, device=device)
    times = measure([lambda: x.fill_(1.0)], device)
    assert 0.01 < times.min <= times.median
    assert peak_bytes(lambda: torch.empty(2**28, dtype=torch.uint8, device=device), device) == 2**28
