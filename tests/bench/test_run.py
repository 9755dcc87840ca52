import dataclasses

import pytest
import torch

from dsattn.bench import run, trials
from dsattn.bench.cases import SHAPES, Setting
from dsattn.bench.records import Machine, Record
from dsattn.bench.run import BENCHMARKS, WHOLE_SEQUENCES, Refusal, bench, family, first_line, settings_of

SETTING = Setting(shape=SHAPES["small"], rows=24, keys=24)
MACHINE = Machine.here(torch.device("cpu"), commit="abc", dirty=False)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_gives_a_record(name):
    found = bench(name, SETTING, MACHINE, peers=False, seconds=0.0)
    assert isinstance(found, Record)
    assert found.op == name.replace("dense_kl", "indexer_kl")
    assert not found.error.wrong
    assert found.backend == ("composed" if name == "dsa_layer" else "reference")
    assert (found.tflops is None) == (name == "select_topk")
    assert found.ms.min <= found.ms.median <= found.ms.max
    assert found.peers == found.ratio == found.unavailable == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", BENCHMARKS)
def test_on_a_gpu(name):
    """bf16, published widths, more keys than are kept, by whoever serves."""
    device = torch.device("cuda")
    shape = dataclasses.replace(SHAPES["glm"], top_k=128)
    setting = Setting(shape=shape, rows=512, keys=512, device=device, dtype=torch.bfloat16)
    found = bench(name, setting, Machine.here(device), peers=False, seconds=0.0)
    assert isinstance(found, Record), found
    assert found.peak_bytes is not None
    assert found.machine.gpu is not None


def test_a_wrong_operation_is_not_timed(monkeypatch):
    real = trials.sparse_mla
    monkeypatch.setattr(trials, "sparse_mla", lambda *o, **f: [x * 1.01 for x in real(*o, **f)])
    monkeypatch.setattr(run, "measure", lambda *_, **__: pytest.fail("timed"))
    found = bench("sparse_mla.forward", SETTING, MACHINE, peers=False)
    assert isinstance(found, Refusal)
    assert (found.op, found.keys) == ("sparse_mla.forward", 24)
    assert found.reason.startswith("reference is wrong: largest")


def test_too_little_memory_is_told(monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")

    monkeypatch.setitem(run.BENCHMARKS, "select_keys", no_memory)
    assert bench("select_keys", SETTING, MACHINE, peers=False).reason == "out of memory: CUDA out of memory. Tried"


def test_a_backend_that_cannot_serve_is_told():
    found = bench("select_keys", dataclasses.replace(SETTING, backend="triton"), MACHINE, peers=False)
    assert "triton needs a CUDA GPU" in found.reason


def test_peers_are_timed_or_their_absence_explained(monkeypatch):
    def absent(trial, operands):
        raise ModuleNotFoundError("No module named 'x'")

    def broken(trial, operands):
        return lambda: 1 / 0

    peers = {
        "same": lambda trial, operands: trial.prepare(operands),
        "other": lambda trial, operands: lambda: trial.prepare(operands)().roll(1, 0),
        "absent": absent,
        "broken": broken,
    }
    monkeypatch.setattr(run, "peers_of", lambda trial: peers)
    found = bench("select_keys", SETTING, MACHINE, peers=True, seconds=0.0)
    assert set(found.peers) == set(found.ratio) == {"same"}
    assert found.ratio["same"] == found.peers["same"] / found.ms.median
    assert found.unavailable["absent"] == "not installed: No module named 'x'"
    assert found.unavailable["broken"] == "ZeroDivisionError: division by zero"
    assert "other keys" in found.unavailable["other"]


def test_orders_are_for_selections_and_determinism_for_gradients():
    def kinds(name):
        found = settings_of(name, SETTING, ("ascending", "random"), (False, True))
        return [(setting.order, setting.deterministic) for setting in found]

    both = [("ascending", False), ("ascending", True)]
    assert kinds("select_keys") == both[:1]
    assert kinds("sparse_mla.forward") == [both[0], ("random", False)]
    assert kinds("indexer_kl.backward") == [*both, ("random", False), ("random", True)]
    assert kinds("dense_mla.backward") == kinds("dsa_layer") == both
    assert {family(name) for name in BENCHMARKS} >= set(WHOLE_SEQUENCES)


def test_first_line():
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 999))) == 200
