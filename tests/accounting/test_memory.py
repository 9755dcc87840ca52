"""What is promised to be kept, against what is alive after a forward."""

import dataclasses
import itertools
from typing import get_args

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsattn import accounting
from dsattn.config import DSAConfig, GQAConfig, KDAConfig, ModelConfig, MoEConfig, MTPConfig, Recompute
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.layer import DecoderLayer
from dsattn.nn.state import Handed, Pass
from dsattn.parallel.recompute import Checkpoints
from dsattn.training.recipes import RECIPES
from dsattn.training.stages import set_mode

MODES = ("dense", "warmup", "sparse", "frozen")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TINY = RECIPES["tiny"]().model
HIDDEN = dataclasses.replace(TINY.dsa.indexer, query_from="hidden")
STILL = dataclasses.replace(TINY.dsa.indexer, rope_dim=0, hadamard=True)
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=32, rope_dim=16)


class Alive(TorchDispatchMode):
    """Every storage that a forward made, once; `bytes` counts those that something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in given:
                self.storages[key] = (StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes())
        return out

    def bytes(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


def mla(indexer=TINY.dsa.indexer, **options) -> ModelConfig:
    attention = dataclasses.replace(TINY.attention, **options)
    return dataclasses.replace(TINY, attention=attention, dsa=DSAConfig(indexer=indexer))


def gqa(**options) -> ModelConfig:
    attention, dsa = dataclasses.replace(GQA, **options), dataclasses.replace(TINY.dsa, indexer=HIDDEN)
    return dataclasses.replace(TINY, attention=attention, dsa=dsa)


def layer_measured(config: ModelConfig, role, mode, dtype, tokens: int, policy: str = "none") -> int:
    """Bytes that one layer keeps: its input, and what is alive when all of its results but the losses are gone."""
    decoder = Decoder(config).train()
    set_mode(decoder, mode)
    source, layer = decoder.model.layers[0], decoder.model.layers[1]
    if role != "selects":
        layer = DecoderLayer(config, role, 1).requires_grad_(mode != "warmup")
    layout, run, selection = Layout.causal(tokens), Pass(mode=mode, recompute=Checkpoints(policy)), None
    hidden = torch.randn(tokens, config.hidden_size).requires_grad_(mode != "warmup")
    alive = Alive()
    with torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "float32"):
        if role == "shares":
            first = source(hidden, layout, run)
            selection = first.selection
            if config.dsa.multi_layer_teacher:
                run = dataclasses.replace(run, handed=Handed(index=first.index))
        with alive:
            out = layer(hidden, layout, run, selection=selection)
    graph = (out.hidden.grad_fn, out.kl)
    runs_again = policy != "none" and out.kl is not None
    del out
    kept = alive.bytes()
    del graph
    assert alive.bytes() == 0, "the graph held all of it"
    return kept + (hidden.untyped_storage().nbytes() if mode != "warmup" or runs_again else 0)


def model_measured(config: ModelConfig, mode, dtype, tokens: int, device: str = "cpu", policy: str = "none") -> int:
    """Bytes that a training forward and its losses keep."""
    decoder = Decoder(config).to(device).train()
    set_mode(decoder, mode)
    layout = Layout.causal(tokens).to(device)
    text, labels = torch.randint(config.vocab_size, (2, tokens), device=device)
    alive = Alive()
    with torch.autocast(device, DTYPES[dtype], enabled=dtype != "float32"), alive:
        out = decoder(text, layout, Pass(mode=mode, recompute=Checkpoints(policy)))
        with torch.set_grad_enabled(mode != "warmup"):
            losses = [decoder.lm_loss(out.hidden, labels)]
            if out.ahead:
                losses.append(decoder.mtp_losses(out.ahead, labels, layout))
        losses.append(out.kl_sum)
        del out
    return alive.bytes()


VARIANTS = {
    "mla": TINY,
    "mla without query latent": mla(HIDDEN, q_lora_rank=None),
    "mla, indexer on hidden states": mla(HIDDEN),
    "mla, headwise gate, sink": mla(output_gate="headwise", sink=True),
    "mla, elementwise gate, nothing rotated": mla(STILL, output_gate="elementwise", qk_rope_head_dim=0),
    "gqa": gqa(),
    "gqa, norms, elementwise gate": gqa(qk_norm=True, output_gate="elementwise"),
    "gqa, headwise gate": gqa(output_gate="headwise"),
}
MIXTURE = {"experts": 8, "experts_per_token": 3, "intermediate_size": 64, "first_dense_layers": 1}
BOTH = ("latent_kv", "sparse_attention_index")
TEACHER = dataclasses.replace(TINY.dsa, share_every=2, multi_layer_teacher=True)
MODELS = {
    "mla": dataclasses.replace(TINY, num_layers=2),
    "gqa": dataclasses.replace(gqa(), num_layers=2),
    "mtp": dataclasses.replace(TINY, num_layers=2, mtp=MTPConfig(depths=2)),
    "repeated": dataclasses.replace(TINY, num_layers=2, mtp=MTPConfig(depths=2, repeated=True)),
    "shared": dataclasses.replace(TINY, num_layers=2, mtp=MTPConfig(depths=2, repeated=True, shared_components=BOTH)),
    "teacher": dataclasses.replace(TINY, num_layers=2, dsa=TEACHER),
    "experts": dataclasses.replace(TINY, num_layers=2, moe=MoEConfig(**MIXTURE)),
    "mixed": dataclasses.replace(TINY, num_layers=2, layer_types=("dense", "dsa"), tie_embeddings=True),
}
POLICIES = get_args(Recompute)
SCALARS = 32  # losses and their divisors: a few numbers, whatever the tokens
KEY_NORM = 2 * 4 * TINY.dsa.indexer.head_dim  # an indexer's copies of its key norm's weights, whatever the tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_keeps_what_is_promised(name, mode, dtype):
    config = dataclasses.replace(VARIANTS[name], num_layers=2)
    for role in ("selects", "shares", "dense"):
        parts = accounting.layer_memory(config, role, mode, dtype=dtype, fused_norms=False)
        copies = accounting.weight_copies(config, mode, dtype=dtype)
        kept = layer_measured(config, role, mode, dtype, tokens=96)
        copies += KEY_NORM * (role == "selects" and mode in ("warmup", "sparse"))
        assert kept == pytest.approx(96 * sum(parts.values()) + copies, abs=SCALARS), role
        assert all(parts.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_that_runs_again_keeps_what_is_promised(name, policy, dtype):
    config = dataclasses.replace(VARIANTS[name], num_layers=2)
    for role, mode in itertools.product(("selects", "shares", "dense"), MODES):
        parts = accounting.layer_memory(config, role, mode, dtype=dtype, recompute=policy)
        kept = layer_measured(config, role, mode, dtype, tokens=96, policy=policy)
        assert kept == pytest.approx(96 * sum(parts.values()), abs=SCALARS), (role, mode)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["warmup", "sparse", "frozen"])
def test_a_layer_that_teaches_another_keeps_what_its_loss_needs(mode, dtype):
    config = MODELS["teacher"]
    parts = accounting.layer_memory(config, "shares", mode, dtype=dtype, fused_norms=False)
    assert ("indexer loss" in parts) == (mode != "frozen")
    promised = 96 * sum(parts.values()) + accounting.weight_copies(config, mode, dtype=dtype)
    assert layer_measured(config, "shares", mode, dtype, tokens=96) == pytest.approx(promised, abs=SCALARS)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_a_selection_that_is_shared_keeps_its_inverse(name, mode, policy, backend):
    """Of as many bytes as its index, and 4 a key, in the layer that selects alone; the reference needs none."""
    config = VARIANTS[name]
    types = ("full", "full", "shared")
    dsa = dataclasses.replace(config.dsa, deterministic=True, indexer_types=types, backend=backend)
    config = dataclasses.replace(config, num_layers=3, dsa=dsa)
    for role in ("selects", "shares"):
        parts = accounting.layer_memory(config, role, mode, recompute=policy, fused_norms=False)
        kept = layer_measured(config, role, mode, "float32", tokens=96, policy=policy)
        copies = KEY_NORM * (policy == "none" and role == "selects" and mode in ("warmup", "sparse"))
        assert kept == pytest.approx(96 * sum(parts.values()) + copies, abs=SCALARS), role
        inverts = role == "selects" and mode in ("sparse", "frozen") and backend == "auto"
        assert parts.get("inverse") == (4 * (64 + 1) if inverts else None)


@pytest.mark.parametrize("tail", [True, False])
def test_pools_are_kept_as_the_keys_they_hold(tail):
    indexer = dataclasses.replace(TINY.dsa.indexer, pool_size=4, pool_tail=tail)
    config = dataclasses.replace(TINY, num_layers=2, dsa=DSAConfig(indexer=indexer))
    parts = accounting.layer_memory(config, "selects", "frozen", fused_norms=False)
    assert parts["selection"] == 4 * (64 + 3 * tail) + 4
    kept = layer_measured(config, "selects", "frozen", "float32", tokens=96)
    assert kept == pytest.approx(96 * sum(parts.values()), abs=SCALARS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_what_is_promised(name, mode, policy, dtype):
    config = MODELS[name]
    options = {"dtype": dtype, "recompute": policy, "fused_norms": False}
    promised = accounting.model_memory(config, 192, mode, **options)
    assert promised > 0
    assert model_measured(config, mode, dtype, tokens=192, policy=policy) == pytest.approx(promised, rel=0.05)


def test_a_later_depth_that_shares_the_selection_keeps_no_indexer():
    mtp = MTPConfig(depths=3, repeated=True, shared_components=("sparse_attention_index",))
    config = dataclasses.replace(TINY, num_layers=2, mtp=mtp)
    promised = accounting.model_memory(config, 192, "sparse", fused_norms=False)
    assert model_measured(config, "sparse", "float32", tokens=192) == pytest.approx(promised, rel=1e-3)
    alone = dataclasses.replace(config, mtp=dataclasses.replace(mtp, shared_components=None))
    assert accounting.model_memory(alone, 192, "sparse", fused_norms=False) > promised


def test_one_kernel_for_a_norm_keeps_less():
    """Negative control of the measurement: a copy of normed numbers more or less is noticed."""
    config = dataclasses.replace(TINY, num_layers=2)
    fused = accounting.layer_memory(config, "dense", "dense")
    apart = accounting.layer_memory(config, "dense", "dense", fused_norms=False)
    assert apart["attention norms"] - fused["attention norms"] == 4 * (128 + 64 + 48)
    assert apart["mlp norm"] - fused["mlp norm"] == 4 * 128
    kept = layer_measured(config, "dense", "dense", "float32", tokens=96)
    assert kept != pytest.approx(96 * sum(fused.values()), rel=0.05)


def test_unknown_policies_and_dtypes_are_refused():
    with pytest.raises(InputError, match="recompute='some' must be one of none, selective, full"):
        accounting.layer_memory(TINY, "dense", "dense", recompute="some")
    with pytest.raises(InputError, match="dtype='float16' must be one of float32, bfloat16"):
        accounting.model_memory(TINY, 8, "dense", dtype="float16")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mla", "gqa"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpu_keeps_what_is_promised(name, mode, policy):
    config = dataclasses.replace(VARIANTS[name], num_layers=2)
    promised = accounting.model_memory(config, 4096, mode, dtype="bfloat16", recompute=policy)
    assert model_measured(config, mode, "bfloat16", 4096, "cuda", policy) == pytest.approx(promised, rel=0.05)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(TINY, layer_types=("linear", "dsa", "dsa", "dsa"), kda=KDAConfig()),
        dataclasses.replace(TINY, layer_types=("dense", "dsa", "dsa", "dsa"), dense_attention=GQAConfig()),
    ],
)
def test_layers_that_are_not_counted_are_refused(config):
    with pytest.raises(InputError, match="is set, and what its layers keep is not counted; leave it out, or measure"):
        accounting.model_memory(config, 100, "sparse")
