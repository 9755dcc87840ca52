"""Counts against brute force loops, built models, and the published formulas."""

import dataclasses

import pytest
import torch

from dsattn import accounting
from dsattn.accounting import Work
from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig
from dsattn.errors import InputError
from dsattn.model import Decoder
from dsattn.training.recipes import RECIPES

LENGTHS = (7, 0, 1, 12)
TOP_K = 5
INDEXER = IndexerConfig(heads=3, head_dim=8, top_k=TOP_K, rope_dim=4)
MLA = MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6)
SIZES = {"vocab_size": 300, "hidden_size": 16, "num_layers": 4, "intermediate_size": 24}
MODEL = ModelConfig(**SIZES, attention=MLA, dsa=DSAConfig(indexer=INDEXER))
HIDDEN = dataclasses.replace(INDEXER, query_from="hidden")
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4)


def gqa(**options) -> ModelConfig:
    return ModelConfig(**SIZES, attention=dataclasses.replace(GQA, **options), dsa=DSAConfig(indexer=HIDDEN))


def rows(lengths=LENGTHS) -> list[int]:
    """Visible keys of every row."""
    return [row + 1 for length in lengths for row in range(length)]


@pytest.mark.parametrize("lengths", [LENGTHS, (), (0,), (5,), (6,), (4, 5, 6)])
@pytest.mark.parametrize("top_k", [1, TOP_K, 100])
def test_pairs_are_those_of_a_loop(lengths, top_k):
    assert accounting.visible_pairs(lengths) == sum(rows(lengths))
    assert accounting.kept_pairs(lengths, top_k) == sum(min(top_k, visible) for visible in rows(lengths))


def test_wrong_sizes_are_refused():
    with pytest.raises(InputError, match=r"lengths\[1\]=-1 must be at least 0"):
        accounting.visible_pairs((3, -1))
    with pytest.raises(InputError, match="top_k=0 must be at least 1"):
        accounting.kept_pairs((3,), 0)


def test_work_adds():
    assert Work(1, 2) + Work(10, 20) == Work(11, 22)


def test_published_rules_of_one_op():
    """The rules by which kernels are compared: T K pairs, H heads, 576 and 512 wide."""
    tokens, heads, kept = 4096, 64, 2048
    pairs = tokens * kept
    sizes = (tokens, pairs, heads, 576, 512)
    forward = accounting.attention_work(*sizes, kv_bytes=0)
    backward = accounting.attention_work(*sizes, "backward", kv_bytes=0)
    assert forward.flops == 2 * tokens * heads * kept * (576 + 512)
    assert backward.flops == 2 * tokens * heads * kept * (3 * 576 + 2 * 512)
    assert accounting.indexer_scores_work(tokens, pairs, heads, 128, tokens).flops == 2 * heads * 128 * pairs
    assert accounting.indexer_kl_work(tokens, pairs, (heads, 128), (heads, 576), "backward").flops == (
        6 * tokens * kept * heads * 128
    )


def test_bytes_by_hand():
    assert accounting.linear_work(3, 4, 5).bytes == 2 * (12 + 15 + 20)
    assert accounting.linear_work(3, 4, 5, itemsize=4).bytes == 4 * (12 + 15 + 20)
    assert accounting.select_topk_work(3, 100, 8) == Work(0, 400 + 3 * 9 * 4)
    operands = 2 * (3 * 2 * 4 + 3 * 2 + 5 * 4)
    assert accounting.indexer_scores_work(3, 100, 2, 4, 5).bytes == operands + 400
    assert accounting.select_keys_work(3, 100, 2, 4, 8, 5) == Work(2 * 100 * 2 * 4, operands + 3 * 9 * 4)
    assert accounting.dense_kv_bytes(10, 6) == 120
    assert accounting.sparse_kv_bytes(10, 6) == 10 * (12 + 4)
    q, out, lse = 2 * 3 * 2 * 12, 2 * 3 * 2 * 8, 4 * 3 * 2
    assert accounting.attention_work(3, 10, 2, 12, 8, kv_bytes=7).bytes == q + out + lse + 7


@pytest.mark.parametrize(
    "config",
    [
        MODEL,
        dataclasses.replace(MODEL, tie_embeddings=True, layer_types=("dense", "dsa", "dsa", "dense")),
        dataclasses.replace(MODEL, dsa=DSAConfig(indexer=INDEXER, share_every=2, share_offset=1)),
        dataclasses.replace(MODEL, attention=dataclasses.replace(MLA, output_gate="headwise", sink=True)),
        dataclasses.replace(MODEL, attention=dataclasses.replace(MLA, output_gate="elementwise")),
        dataclasses.replace(MODEL, dsa=DSAConfig(indexer=HIDDEN)),
        dataclasses.replace(MODEL, attention=dataclasses.replace(MLA, q_lora_rank=None), dsa=DSAConfig(indexer=HIDDEN)),
        gqa(),
        gqa(output_gate="headwise", qk_norm=True),
        gqa(output_gate="elementwise", sink=True),
    ],
)
def test_parameters_are_those_of_the_built_model(config):
    counts = accounting.parameter_counts(config)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    indexers = sum(p.numel() for indexer in model.indexers() for p in indexer.parameters() if p.dim() == 2)
    assert counts["indexer"] == indexers


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_of_every_recipe(name):
    config = RECIPES[name]().model
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(accounting.parameter_counts(config).values()) == sum(p.numel() for p in model.parameters())


def brute_attention(mode, role="selects") -> tuple[int, int]:
    """(forward, backward) FLOPs of MODEL's attention, a row at a time: absorbed if sparse, else head by head."""
    sparse = mode in ("sparse", "frozen") and role != "dense"
    width, value_width = (12, 8) if sparse else (14, 6)
    forward = backward = 0
    for visible in rows():
        keys = min(TOP_K, visible) if sparse else visible
        for _ in range(MLA.heads):
            forward += 2 * keys * (width + value_width)
            backward += 2 * keys * (3 * width + 2 * value_width)
    return forward, 0 if mode == "warmup" else backward


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_one_layer_is_a_brute_force_count(mode):
    forward, backward = brute_attention(mode)
    tokens = sum(LENGTHS)
    backbone = 16 * 12 + 12 * 2 * 14 + 16 * 12 + 8 * 2 * (10 + 6) + 2 * 6 * 16 + 3 * 16 * 24
    forward += 2 * tokens * backbone
    backward += 0 if mode == "warmup" else 4 * tokens * backbone
    if mode != "dense":
        weights = 12 * 3 * 8 + 16 * 8 + 16 * 3
        forward += 2 * tokens * weights
        learns = mode != "frozen"
        backward += 2 * tokens * weights * learns
        scored = 2 * 3 * 8 * sum(rows())
        lost = 2 * 3 * 8 * sum(visible if mode == "warmup" else min(TOP_K, visible) for visible in rows())
        forward += (0 if mode == "warmup" else scored) + lost * learns
        forward += 2 * 2 * 14 * sum(rows()) * (mode == "warmup")
        backward += 3 * lost * learns
    parts = accounting.layer_parts(MODEL, "selects", LENGTHS, mode)
    assert sum(part.forward.flops for part in parts) == forward
    assert sum(part.backward.flops for part in parts) == backward
    assert accounting.layer_work(MODEL, "selects", LENGTHS, mode).flops == forward + backward


def test_gqa_attends_by_its_own_widths():
    parts = {part.name: part for part in accounting.layer_parts(gqa(), "selects", LENGTHS, "sparse")}
    kept = accounting.kept_pairs(LENGTHS, TOP_K)
    assert parts["sparse attention"].forward.flops == 2 * kept * 4 * (8 + 8)
    dense = {part.name: part for part in accounting.layer_parts(gqa(), "dense", LENGTHS, "sparse")}
    assert dense["dense attention"].forward.flops == 2 * sum(rows()) * 4 * (8 + 8)


def test_a_model_is_its_layers_and_head():
    config = dataclasses.replace(
        MODEL, layer_types=("dense", "dsa", "dsa", "dsa"), dsa=DSAConfig(indexer=INDEXER, share_every=2)
    )
    assert accounting.layer_roles(config) == ["dense", "selects", "shares", "selects"]
    layers = [accounting.layer_work(config, role, LENGTHS, "sparse") for role in accounting.layer_roles(config)]
    head = 6 * sum(LENGTHS) * 16 * 300
    assert accounting.model_work(config, LENGTHS, "sparse").flops == sum(w.flops for w in layers) + head
    names = [part.name for part in accounting.model_parts(config, LENGTHS, "sparse")]
    assert len(names) == len(set(names))


def test_a_shared_selection_costs_no_indexer():
    shares = {part.name for part in accounting.layer_parts(MODEL, "shares", LENGTHS, "sparse")}
    selects = {part.name for part in accounting.layer_parts(MODEL, "selects", LENGTHS, "sparse")}
    assert selects - shares == {"indexer projections", "indexer selection", "indexer loss"}


def test_megatrons_token_linear_golden_numbers():
    """semantics: H 512, n 8, r_q 128, r 64, d_n 48, d_r 16, d_v 64, h_i 4, d_i 32; it counts norms, we do not."""
    attention = MLAConfig(
        heads=8, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64
    )
    indexer = IndexerConfig(heads=4, head_dim=32, top_k=16, rope_dim=16)
    config = ModelConfig(hidden_size=512, attention=attention, dsa=DSAConfig(indexer=indexer))
    weights = sum(inputs * outputs for _, inputs, outputs in accounting.attention_matrices(config))
    assert 6 * (weights + 128 + 64) == 2950272
    assert 4 * sum(inputs * outputs for _, inputs, outputs in accounting.indexer_matrices(config)) == 139264


def test_padding_and_document_edges_change_the_count():
    """Negative control: one document of the same number of rows is more work than several."""
    several = accounting.model_work(MODEL, LENGTHS, "dense").flops
    assert accounting.model_work(MODEL, (sum(LENGTHS),), "dense").flops > several
    assert accounting.model_work(MODEL, (*LENGTHS, 0), "dense").flops == several
    assert accounting.model_work(MODEL, (), "sparse").flops == 0
