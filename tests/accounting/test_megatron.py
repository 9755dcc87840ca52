"""Megatron's formula: its golden integers, and what it counts otherwise than `model_work`."""

import dataclasses
import math
from typing import Any

import pytest

from dsattn.accounting import megatron_flops, model_work
from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from dsattn.errors import InputError

MLA = MLAConfig(heads=8, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64)
DSA = DSAConfig(indexer=IndexerConfig(heads=4, head_dim=32, top_k=16, rope_dim=16))
SIZES: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 4, "intermediate_size": 2048}
MODEL = ModelConfig(**SIZES, attention=MLA, dsa=DSA)
LENGTHS = (256, 256)
T, S2 = 512, 2 * 256**2
EXPERTS = MoEConfig(experts=8, experts_per_token=2, intermediate_size=64, first_dense_layers=1)


def with_dsa(**changes) -> ModelConfig:
    return dataclasses.replace(MODEL, dsa=dataclasses.replace(DSA, **changes))


def test_golden_integers():
    """A published model's totals; our MLPs have a gate, so one without is 6 T M F a layer less."""
    gate = 6 * T * 4 * 512 * 2048
    assert megatron_flops(MODEL, LENGTHS) == 47013429248
    assert megatron_flops(MODEL, LENGTHS) - gate == 34128527360
    assert megatron_flops(MODEL, LENGTHS, "frozen") - gate == 33851703296


@pytest.mark.parametrize(
    ("length", "scale"),
    [
        (256, 1.0),
        (4096, 0.75),
        (8192, 0.4375),
        (32768, 0.12109375),
        (131072, 0.031005859375),
        (262144, 0.015563965),
        (1048576, 0.003902435),
    ],
)
def test_selection_scales_attention_as_published(length, scale):
    """At K = 2048. What K changes is attention alone; without a selection half of the pairs are read."""
    kept, least = (
        megatron_flops(with_dsa(indexer=dataclasses.replace(DSA.indexer, top_k=k)), [length], "frozen")
        for k in (2048, 1)
    )
    mean_of_one = (1 - 1 / (2 * length)) / (length / 2)
    pairs = 6 * 4 * 8 * (80 + 64) / 2 * length**2
    printed = 5e-10 if length > 131072 else 0  # the last two are rounded to nine places
    assert (kept - least) / pairs + mean_of_one == pytest.approx(scale, rel=1e-12, abs=printed)


def test_documents_count_by_their_mean():
    """S2 / T is a mean that long documents dominate."""
    lengths = (300, 100, 0, 1)
    tokens, squares = 401, 300**2 + 100**2 + 1
    mean = squares / tokens
    kept = min(16, math.floor(mean))
    core = 3 * 4 * squares * 8 * (80 + 64) * kept * (1 - kept / (2 * mean)) / (mean / 2)
    linear = 4 * (2950272 + 6 * 3 * 512 * 2048) + 6 * 512 * 1024
    indexer = 2 * 139264 * tokens + 4 * squares * 4 * 32
    assert megatron_flops(MODEL, lengths, "frozen") == round(core + linear * tokens + indexer)
    assert megatron_flops(MODEL, ()) == megatron_flops(MODEL, (0,)) == 0


def test_dense_is_expanded_mla_without_an_indexer():
    linear = 4 * (2950272 + 6 * 3 * 512 * 2048) + 6 * 512 * 1024
    assert megatron_flops(MODEL, LENGTHS, "dense") == linear * T + 6 * 4 * 8 * (64 + 64) // 2 * S2


@pytest.mark.parametrize(("mode", "linear", "core"), [("sparse", 4, 6), ("frozen", 2, 2)])
def test_layers_that_share_have_no_indexer(mode, linear, core):
    """Layers of a hybrid pattern, too: `D-` pairs whose numbers are places in the pattern."""
    one = linear * (128 * 128 + 512 * 32 + 512 * 4) * T + core * 4 * 32 // 2 * S2
    every = megatron_flops(MODEL, LENGTHS, mode)
    assert every - megatron_flops(with_dsa(share_every=4), LENGTHS, mode) == 3 * one
    assert every - megatron_flops(with_dsa(share_every=2, share_offset=2), LENGTHS, mode) == one
    assert every == megatron_flops(with_dsa(share_every=2, share_numbering="pattern"), LENGTHS, mode)


def test_depths_are_layers_joints_and_heads():
    ahead = dataclasses.replace(MODEL, mtp=MTPConfig(depths=2))
    more = dataclasses.replace(MODEL, num_layers=6)
    joint = 6 * T * (2 * 512 * 512 + 3 * 512 + 512 * 1024)
    assert megatron_flops(ahead, LENGTHS) == megatron_flops(more, LENGTHS) + 2 * joint
    repeated = dataclasses.replace(MODEL, mtp=MTPConfig(depths=2, repeated=True))
    assert megatron_flops(repeated, LENGTHS) == megatron_flops(ahead, LENGTHS)
    keys, index = (
        dataclasses.replace(MODEL, mtp=MTPConfig(depths=2, repeated=True, shared_components=(name,)))
        for name in ("latent_kv", "sparse_attention_index")
    )
    assert megatron_flops(repeated, LENGTHS) - megatron_flops(keys, LENGTHS) == 6 * T * (512 * 80 + 64)
    assert megatron_flops(repeated, LENGTHS) - megatron_flops(index, LENGTHS) == 4 * 34816 * T + 6 * 64 * S2


def test_experts_count_for_their_tokens_without_the_router():
    mixed = dataclasses.replace(MODEL, moe=EXPERTS)
    swiglu, experts = 3 * 512 * 2048, 3 * (2 + EXPERTS.shared_experts) * 512 * 64
    assert megatron_flops(MODEL, LENGTHS) - megatron_flops(mixed, LENGTHS) == 3 * 6 * T * (swiglu - experts)


def test_it_differs_from_what_runs():
    """Negative control: short rows and diagonals; the latents' norms, 6 T (128 + 64) a layer."""
    ours, theirs = (
        count(MODEL, LENGTHS, "dense") for count in (lambda *given: model_work(*given).flops, megatron_flops)
    )
    again = 4 * 2 * 8 * 64  # logits, made again in the backward: 2 H C a pair and layer
    pairs = sum(length * (length + 1) // 2 for length in LENGTHS)
    diagonals = 4 * 6 * 8 * (64 + 64) * T // 2
    assert ours == theirs - 6 * T * 4 * (128 + 64) + again * pairs + diagonals


@pytest.mark.parametrize(
    ("config", "lengths", "mode", "message"),
    [
        (MODEL, (8,), "warmup", "mode='warmup' must be dense, sparse or frozen"),
        (MODEL, (8, -1), "sparse", r"lengths\[1\]=-1 must be at least 0"),
        (dataclasses.replace(MODEL, layer_types=("dense", "dsa", "dsa", "dsa")), (8,), "sparse", "must all be dsa"),
        (
            dataclasses.replace(MODEL, attention=dataclasses.replace(MLA, output_gate="headwise")),
            (8,),
            "sparse",
            "output_gate='headwise' must be 'none'",
        ),
        (with_dsa(indexer=dataclasses.replace(DSA.indexer, pool_size=4)), (8,), "frozen", "pool_size=4 must be 1"),
        (with_dsa(share_every=2, multi_layer_teacher=True), (8,), "sparse", "multi_layer_teacher=True must be False"),
    ],
)
def test_what_the_formula_does_not_know_is_refused(config, lengths, mode, message):
    with pytest.raises(InputError, match=message):
        megatron_flops(config, lengths, mode)


def test_all_of_it_is_told_at_once():
    gqa = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4)
    indexer = dataclasses.replace(DSA.indexer, query_from="hidden", rope_dim=4)
    config = ModelConfig(**SIZES, attention=gqa, dsa=DSAConfig(indexer=indexer))
    with pytest.raises(InputError, match=r"mode='warmup'.*; attention must be an MLAConfig"):
        megatron_flops(config, (8,), "warmup")
