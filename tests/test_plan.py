"""The table that `explain` prints is of the calls that a model makes."""

import dataclasses
import functools
import sys
from types import ModuleType

import pytest
import torch

from dsattn import backends
from dsattn.backends import REFERENCE, Call, Row
from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.nn.state import Pass
from dsattn.plan import explain, model_calls, prepare, run_calls
from dsattn.training.recipes import RECIPES

MLA = MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4)
INDEXER = IndexerConfig(heads=3, head_dim=8, top_k=5, rope_dim=4, query_from="hidden")
POOLED = dataclasses.replace(INDEXER, top_k=6, pool_size=3)


def model(attention: MLAConfig | GQAConfig = MLA, indexer: IndexerConfig = INDEXER, **dsa) -> ModelConfig:
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "intermediate_size": 24}
    return ModelConfig(**sizes, attention=attention, dsa=DSAConfig(indexer=indexer, **dsa))


@pytest.fixture(autouse=True)
def bare_table(monkeypatch):
    """The table without kernels."""
    for operation, rows in list(backends.TABLE.items()):
        monkeypatch.setitem(backends.TABLE, operation, rows[-1:])
    remembered = backends._choose
    remembered.cache_clear()
    yield
    remembered.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def picky(monkeypatch):
    """A table in which `fast` would serve sparse MLA's forward on Hopper alone."""

    def needs_hopper(call: Call) -> list[str]:
        return [] if call.capability == 90 else [f"capability 9.0, got {call.capability / 10}"]

    row = Row("fast", None, needs_hopper)
    monkeypatch.setitem(backends.TABLE, "sparse_mla.forward", (row, REFERENCE))
    backends._choose.cache_clear()
    yield
    backends._choose.cache_clear()


@pytest.fixture
def seen(monkeypatch):
    """(operation, call) of everything dispatched."""
    calls: set[tuple[str, Call]] = set()
    choose = backends._choose

    def record(operation, call, backend):
        calls.add((operation, call))
        return choose(operation, call, backend)

    monkeypatch.setattr(backends, "_choose", record)
    return calls


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
@pytest.mark.parametrize(
    "attention",
    [MLA, GQA, dataclasses.replace(MLA, output_gate="headwise"), dataclasses.replace(GQA, output_gate="elementwise")],
)
def test_calls_are_those_that_a_model_makes(seen, attention, mode):
    config = model(attention)
    decoder = Decoder(config).train()
    layout = Layout.causal(12)
    out = decoder(torch.randint(0, 300, (12,)), layout, Pass(mode=mode))
    kl = [out.kl_sum] if out.kl_sum is not None else []
    torch.stack([decoder.lm_loss(out.hidden, torch.randint(0, 300, (12,))), *kl]).sum().backward()
    promised = set(model_calls(config, Call(), {mode}).items())
    assert promised == seen


@pytest.mark.parametrize(("deterministic", "backend"), [(False, "auto"), (True, "auto"), (True, "reference")])
@pytest.mark.parametrize("attention", [MLA, GQA])
def test_a_selection_that_is_shared_is_inverted(seen, attention, deterministic, backend):
    """Unless it is for the reference, which does not read an inverse."""
    made = model(attention, share_every=2, deterministic=deterministic, backend=backend)
    config = dataclasses.replace(made, num_layers=2)
    out = Decoder(config).train()(torch.randint(0, 300, (12,)), Layout.causal(12), Pass(mode="frozen"))
    out.hidden.sum().backward()
    calls = model_calls(config, Call(deterministic=deterministic), {"frozen"})
    assert set(calls.items()) == seen
    assert ("invert" in calls) == (deterministic and backend == "auto")


@pytest.mark.parametrize("mode", ["dense", "frozen"])
@pytest.mark.parametrize(
    "indexer",
    [
        POOLED,
        dataclasses.replace(POOLED, pool_tail=False),
        dataclasses.replace(POOLED, pool_arithmetic="hf"),
        dataclasses.replace(POOLED, pool_e4m3=True),
    ],
)
@pytest.mark.parametrize("attention", [MLA, GQA])
def test_pools_are_selected_and_whole_ones_read(seen, attention, indexer, mode):
    config = model(attention, indexer)
    decoder = Decoder(config).train()
    decoder(torch.randint(0, 300, (12,)), Layout.causal(12), Pass(mode=mode)).hidden.sum().backward()
    calls = model_calls(config, Call(), {mode}, 12)
    assert set(calls.items()) == seen
    if mode == "frozen":
        sparse = calls["sparse_gqa.forward" if attention is GQA else "sparse_mla.forward"]
        assert sparse.top_k == 6 + 2 * indexer.pool_tail


def test_a_call_shows_every_operation():
    text = explain(Call())
    assert all(operation in text for operation in backends.OPERATIONS)


def test_a_model_names_device_dtype_and_every_operation_it_runs(no_gpu):
    lines = explain(model()).splitlines()
    assert lines[0] == "on cpu, float32, up to 8K keys:"
    assert [line.split() for line in lines[1:]] == [
        [operation, "composed" if operation.startswith("dsa_attention") else "reference", "serves"]
        for operation in (
            "dense_gqa.forward",
            "dense_gqa.backward",
            "select_keys",
            "sparse_mla.forward",
            "sparse_mla.backward",
            "indexer_kl.forward",
            "indexer_kl.backward",
            "dsa_attention.forward",
            "dsa_attention.backward",
        )
    ]


def test_what_was_passed_over_is_shown_with_its_reason(no_gpu, picky):
    lines = [" ".join(line.split()) for line in explain(model()).splitlines()]
    assert "sparse_mla.forward fast needs capability 9.0, got 0.0" in lines
    assert "sparse_mla.forward reference serves" in lines


def test_on_hopper_the_preferred_row_serves_and_the_reference_can(monkeypatch, picky):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backends, "_load", lambda operation, row: None)
    lines = [" ".join(line.split()) for line in explain(model()).splitlines()]
    assert lines[0] == "on cuda (capability 9.0), bfloat16, up to 8K keys:"
    assert "sparse_mla.forward fast serves" in lines
    assert "sparse_mla.forward reference can serve" in lines


def test_a_named_backend_that_cannot_serve_is_said_to_raise(no_gpu, picky):
    text = explain(model(backend="fast"))
    assert "backend 'fast' asked for" in text
    assert "raises: fast needs capability 9.0, got 0.0" in text
    assert "select_keys              none         raises: no backend named 'fast'; there is auto, reference" in text
    backward = next(line for line in text.splitlines() if "sparse_mla.backward" in line)
    assert backward.endswith("serves")  # a forward's name leaves the backward to auto


def test_strict_falls_to_the_reference_raise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with backends.settings(strict=True):
        assert "raises: strict forbids the reference on cuda" in explain(model())


def test_a_run_counts_its_stages_pack_size_and_device():
    train = TrainConfig(stages=(StageConfig(mode="dense"),), device="cpu", dtype="bfloat16", packs_per_micro_batch=2)
    config = RunConfig(model=model(), train=train)
    wide = dataclasses.replace(config, data=dataclasses.replace(config.data, pack_tokens=32768))
    assert explain(config).splitlines()[0] == "on cpu, bfloat16, up to 8K keys:"
    assert explain(wide).splitlines()[0] == "on cpu, bfloat16, up to 64K keys:"
    assert "select_keys" not in explain(config)
    assert "dense_gqa.forward" in explain(config)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_explain_themselves(name):
    assert explain(RECIPES[name]) == explain(RECIPES[name]())
    assert "select_keys" in explain(RECIPES[name])


def test_pools_have_a_size_class_of_their_own():
    pooled = model(indexer=dataclasses.replace(POOLED, top_k=64, pool_size=16))
    train = TrainConfig(stages=(StageConfig(mode="frozen"),), device="cpu", packs_per_micro_batch=1)
    config = RunConfig(model=pooled, train=train)
    wide = dataclasses.replace(config, data=dataclasses.replace(config.data, pack_tokens=131072))
    calls = run_calls(wide)
    assert calls["select_keys"].size_class == "8K"
    assert calls["sparse_mla.forward"].size_class == "above"
    assert "indexer_kl.forward" not in calls


def test_pools_have_no_loss_to_explain(no_gpu):
    operations = {line.split()[0] for line in explain(DSAConfig(indexer=POOLED)).splitlines()[1:]}
    assert operations == {"select_keys"}
    assert "indexer_kl" not in explain(model(indexer=POOLED))


def test_a_dsa_config_shows_the_indexer_alone(no_gpu):
    operations = {line.split()[0] for line in explain(DSAConfig()).splitlines()[1:]}
    assert operations == {"select_keys", "indexer_kl.forward", "indexer_kl.backward"}


@pytest.mark.parametrize("subject", [3, "tiny", None, MLA, RunConfig])
def test_other_subjects_are_refused(subject):
    with pytest.raises(InputError, match="give a Call, DSAConfig"):
        explain(subject)


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_a_hybrid_calls_what_each_of_its_layers_calls(seen, mode):
    config = dataclasses.replace(
        model(),
        num_layers=4,
        layer_types=("linear", "sliding", "dense", "dsa"),
        sliding_window=3,
        dense_attention=dataclasses.replace(GQA, output_gate="headwise"),
        kda=KDAConfig(heads=2, head_dim=4),
        moe=MoEConfig(experts=8, experts_per_token=2, intermediate_size=8),
    )
    decoder = Decoder(config).train()
    out = decoder(torch.randint(0, 300, (12,)), Layout.causal(12), Pass(mode=mode))
    kl = [out.kl_sum] if out.kl_sum is not None else []
    torch.stack([decoder.lm_loss(out.hidden, torch.randint(0, 300, (12,))), *kl]).sum().backward()
    promised = set(model_calls(config, Call(), {mode}).items())
    assert {operation for operation, _ in promised} == {operation for operation, _ in seen}
    assert promised <= seen
    text = explain(config)
    assert "kda " in text
    assert "select_topk " in text


def test_layers_other_than_dsa_show_what_they_call():
    linear = dataclasses.replace(model(), layer_types=("linear",), kda=KDAConfig(heads=2, head_dim=4))
    assert set(model_calls(linear, Call(), {"dense"})) == {"kda", "output_gate.forward", "output_gate.backward"}
    sliding = dataclasses.replace(model(), layer_types=("sliding",), sliding_window=2, dense_attention=GQA)
    calls = model_calls(sliding, Call(), {"sparse"})
    assert set(calls) == {"dense_gqa.forward", "dense_gqa.backward"}
    assert calls["dense_gqa.forward"].heads == GQA.heads


def test_what_will_serve_is_prepared_and_nothing_else(monkeypatch):
    """A row's package that has a `prepare`; for the calls of one rank, in the modes of the run's stages."""
    prepared = []
    for name in ("ready", "other"):
        package = ModuleType(f"dsattn.backends.{name}")
        package.prepare = functools.partial(prepared.append, name)
        package.sparse_mla_forward = package.sparse_mla_backward = len
        monkeypatch.setitem(sys.modules, package.__name__, package)
    one_head = Row("ready", "ready", lambda call: [] if call.heads == 1 else ["one head"])
    never = Row("other", "other", lambda _: [], by_name="a test")
    monkeypatch.setitem(backends.TABLE, "sparse_mla.backward", (one_head, never, REFERENCE))
    whole, rank = model(), model(dataclasses.replace(MLA, heads=1))
    stages = (StageConfig(mode="dense", steps=1), StageConfig(mode="sparse", steps=1))
    run = RunConfig(model=whole, train=TrainConfig(stages=stages, device="cpu"))
    prepare(run, whole)
    assert prepared == []
    prepare(run, rank)
    assert prepared == ["ready"]
    prepare(run, model(backend="other"))
    assert prepared == ["ready", "other"]
    prepare(dataclasses.replace(run, train=dataclasses.replace(run.train, stages=stages[:1])), rank)
    assert prepared == ["ready", "other"]


def test_what_nobody_serves_is_left_to_the_call(monkeypatch):
    monkeypatch.setitem(backends.TABLE, "sparse_mla.backward", (Row("none", "none", lambda _: ["a miracle"]),))
    prepare(RunConfig(model=model(), train=TrainConfig(device="cpu")), model())
    prepare(RunConfig(model=model(), train=TrainConfig(device="cpu")), model(backend="nobody"))
