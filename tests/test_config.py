"""Every rule has an example that breaks it; all broken rules are told together, by dotted name."""

import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from dsattn import config
from dsattn.config import (
    Checked,
    DataConfig,
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
    RopeConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
    check,
    deferred_checks,
    parse_pipeline_layout,
    source_number,
)
from dsattn.errors import ConfigError, InputError

NAN, INF = float("nan"), float("inf")
DENSE, SPARSE = StageConfig(mode="dense"), StageConfig(mode="sparse")
REPEATED = {"depths": 2, "repeated": True}
SHARED = ("latent_kv", "sparse_attention_index")
FROM_HIDDEN = DSAConfig(indexer=IndexerConfig(query_from="hidden"))
POOLS: dict[str, Any] = {"pool_size": 4}
E4M3: dict[str, Any] = {**POOLS, "pool_e4m3": True}

HYBRID = ("sliding", "dense", "dsa", "dsa", "linear")

# (class, fields, start of the one problem that is told)
BROKEN: list[tuple[type[Checked], dict[str, Any], str]] = [
    (RopeConfig, {"base": 1.0}, "base=1.0 must be above 1"),
    (RopeConfig, {"base": INF}, "base=inf must be positive and finite"),
    (RopeConfig, {"factor": 0.5}, "factor=0.5 must be at least 1"),
    (RopeConfig, {"factor": INF}, "factor=inf must be positive and finite"),
    (RopeConfig, {"original_max_position": 0}, "original_max_position=0 must be at least 1"),
    (RopeConfig, {"beta_slow": 0.0}, "beta_slow=0.0 must be positive"),
    (RopeConfig, {"beta_fast": INF}, "beta_fast=inf must be positive and finite"),
    (RopeConfig, {"beta_fast": 1.0}, "beta_fast=1.0 must be above beta_slow=1.0"),
    (RopeConfig, {"mscale": -1.0}, "mscale=-1.0 must be at least 0"),
    (RopeConfig, {"mscale_all_dim": NAN}, "mscale_all_dim=nan must be at least 0"),
    (RopeConfig, {"scaling": "linear"}, "scaling='linear' must be one of none, yarn"),
    *[
        (MLAConfig, {name: 0}, f"{name}=0 must be at least 1")
        for name in ("heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    ],
    (MLAConfig, {"qk_rope_head_dim": -2}, "qk_rope_head_dim=-2 must be at least 0"),
    (MLAConfig, {"qk_rope_head_dim": 5}, "qk_rope_head_dim=5 must be even"),
    (MLAConfig, {"softmax_scale": 0.0}, "softmax_scale=0.0 must be positive"),
    (MLAConfig, {"norm_eps": NAN}, "norm_eps=nan must be positive"),
    (MLAConfig, {"output_gate": "yes"}, "output_gate='yes' must be one of none, headwise, elementwise"),
    (GQAConfig, {"heads": 0}, "heads=0 must be at least 1"),
    (GQAConfig, {"kv_heads": 0}, "kv_heads=0 must be at least 1"),
    (GQAConfig, {"head_dim": 0}, "head_dim=0 must be at least 1"),
    (GQAConfig, {"heads": 12}, "heads=12 must be a multiple of kv_heads=8"),
    (GQAConfig, {"rope_dim": 7}, "rope_dim=7 must be even"),
    (GQAConfig, {"rope_dim": 130}, "rope_dim=130 must not exceed head_dim=128"),
    (GQAConfig, {"rope_dim": -2}, "rope_dim=-2 must be at least 0"),
    (GQAConfig, {"head_dim": 33}, "rope_dim=33 must be even"),
    (GQAConfig, {"softmax_scale": -1.0}, "softmax_scale=-1.0 must be positive"),
    (GQAConfig, {"norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
    (GQAConfig, {"output_gate": "all"}, "output_gate='all' must be one of"),
    (IndexerConfig, {"heads": 0}, "heads=0 must be at least 1"),
    (IndexerConfig, {"top_k": 0}, "top_k=0 must be at least 1"),
    (IndexerConfig, {"head_dim": 0, "rope_dim": 0}, "head_dim=0 must be at least 1"),
    (IndexerConfig, {"rope_dim": -2}, "rope_dim=-2 must be at least 0"),
    (IndexerConfig, {"rope_dim": 3}, "rope_dim=3 must be even"),
    (IndexerConfig, {"rope_dim": 130}, "rope_dim=130 must not exceed head_dim=128"),
    (IndexerConfig, {"k_norm_eps": 0.0}, "k_norm_eps=0.0 must be positive"),
    (IndexerConfig, {"query_from": "keys"}, "query_from='keys' must be one of q_latent, hidden"),
    (IndexerConfig, {"head_dim": 96, "hadamard": True}, "head_dim=96 must be a power of two"),
    (IndexerConfig, {"pool_size": 0}, "pool_size=0 must be at least 1"),
    (IndexerConfig, {"pool_size": 3}, "top_k=2048 must be a multiple of pool_size=3: pools are kept whole"),
    (IndexerConfig, {**POOLS, "pool_arithmetic": "bf16"}, "pool_arithmetic='bf16' must be one of fp32, hf"),
    (IndexerConfig, {"pool_arithmetic": "hf"}, "pool_arithmetic='hf' needs a pool_size above 1: nothing is pooled"),
    (IndexerConfig, {"pool_e4m3": True}, "pool_e4m3=True needs a pool_size above 1: nothing is pooled"),
    (IndexerConfig, {**POOLS, "pool_arithmetic": "hf", "relu": False}, "pool_arithmetic='hf' needs relu=True"),
    (IndexerConfig, {**E4M3, "pool_arithmetic": "hf"}, "pool_e4m3=True needs pool_arithmetic='fp32'"),
    (IndexerConfig, {**E4M3, "hadamard": True}, "pool_e4m3=True needs hadamard=False"),
    (IndexerConfig, {**E4M3, "head_dim": 96}, "head_dim=96 must be a power of two for the rotation of pool_e4m3"),
    (DSAConfig, {"share_every": 0}, "share_every=0 must be at least 1"),
    (DSAConfig, {"share_offset": -1}, "share_offset=-1 must be at least 0"),
    (DSAConfig, {"block_bytes": 0}, "block_bytes=0 must be at least 1"),
    (DSAConfig, {"precision": "fp4"}, "precision='fp4' must be one of bf16, fp8, mxfp8"),
    (
        DSAConfig,
        {"precision": "mxfp8", "indexer": IndexerConfig(head_dim=80)},
        "precision='mxfp8' needs indexer.head_dim=80 to be a multiple of 32",
    ),
    (
        DSAConfig,
        {"precision": "fp8", "indexer": IndexerConfig(**E4M3)},
        "precision='fp8' needs indexer.pool_e4m3=False",
    ),
    (
        DSAConfig,
        {"precision": "fp8", "indexer": IndexerConfig(**POOLS, pool_arithmetic="hf")},
        "precision='fp8' needs indexer.pool_arithmetic='fp32'",
    ),
    (DSAConfig, {"share_numbering": "odd"}, "share_numbering='odd' must be one of dsa, layers, pattern"),
    (DSAConfig, {"indexer_types": ("full", "skip")}, "indexer_types.1='skip' must be one of full, shared"),
    (DSAConfig, {"indexer_types": ("full",), "share_every": 2}, "indexer_types names the layers that select"),
    (DSAConfig, {"multi_layer_teacher": True}, "multi_layer_teacher=True needs layers that share"),
    (
        DSAConfig,
        {"multi_layer_teacher": True, "share_every": 2, "indexer": IndexerConfig(**POOLS)},
        "multi_layer_teacher=True needs indexer.pool_size=1",
    ),
    (MTPConfig, {"depths": -1}, "depths=-1 must be at least 0"),
    (MTPConfig, {"repeated": True}, "repeated=True needs depths of at least 1"),
    (MTPConfig, {**REPEATED, "shared_components": "latent_kv"}, "shared_components='latent_kv' must be of type tuple"),
    (MTPConfig, {**REPEATED, "shared_components": ["latent_kv"]}, "shared_components=['latent_kv'] must be of type tu"),
    (
        MTPConfig,
        {**REPEATED, "shared_components": ("kv",)},
        "shared_components.0='kv' must be one of latent_kv, sparse",
    ),
    (MTPConfig, {**REPEATED, "shared_components": (1,)}, "shared_components.0=1 must be one of"),
    (
        MTPConfig,
        {**REPEATED, "shared_components": ("latent_kv",) * 2},
        "shared_components.1='latent_kv' is there twice",
    ),
    (MTPConfig, {"depths": 2, "shared_components": ("latent_kv",)}, "shared_components needs repeated=True"),
    (
        MTPConfig,
        {"depths": 1, "repeated": True, "shared_components": ("latent_kv",)},
        "shared_components needs depths of at least 2",
    ),
    *[
        (ModelConfig, {name: 0}, f"{name}=0 must be at least 1")
        for name in ("vocab_size", "hidden_size", "num_layers", "intermediate_size")
    ],
    (ModelConfig, {"norm_eps": -1.0}, "norm_eps=-1.0 must be positive"),
    (ModelConfig, {"init_std": 0.0}, "init_std=0.0 must be positive"),
    (ModelConfig, {"layer_types": ("dsa",)}, "layer_types has 1 entries for num_layers=4"),
    (ModelConfig, {"layer_types": ("dsa", "dsa", "nsa", "dsa")}, "layer_types.2='nsa' must be one of dsa, dense"),
    (ModelConfig, {"attention": MLAConfig(q_lora_rank=None)}, "dsa.indexer.query_from='q_latent' needs"),
    (
        ModelConfig,
        {"attention": GQAConfig(rope_dim=64)},
        "dsa.indexer.query_from='q_latent' needs attention.q_lora_rank; use query_from='hidden'",
    ),
    (
        ModelConfig,
        {"attention": MLAConfig(qk_rope_head_dim=32)},
        "dsa.indexer.rope_dim=64 must be 0 or the attention's 32",
    ),
    (
        ModelConfig,
        {"mtp": MTPConfig(**REPEATED, shared_components=SHARED[1:]), "layer_types": ("dsa", "dsa", "dsa", "dense")},
        "mtp.shared_components needs a dsa layer",
    ),
    (
        ModelConfig,
        {
            "mtp": MTPConfig(**REPEATED, shared_components=SHARED),
            "attention": GQAConfig(rope_dim=64),
            "dsa": FROM_HIDDEN,
        },
        "mtp.shared_components names latent_kv, which needs an MLAConfig",
    ),
    (
        ModelConfig,
        {"dsa": DSAConfig(indexer_types=("full", "shared"))},
        "dsa.indexer_types has 2 entries for num_layers=4; give one each",
    ),
    (
        ModelConfig,
        {"dsa": DSAConfig(indexer_types=("full",) * 7), "mtp": MTPConfig(depths=2)},
        "dsa.indexer_types has 7 entries for num_layers=4; give one each, or 6 with the MTP layers",
    ),
    (
        ModelConfig,
        {"dsa": DSAConfig(indexer_types=("shared", "full", "full", "full"))},
        "dsa.indexer_types: layer 0 (from 0) would share a selection that no dsa layer before it makes",
    ),
    (
        ModelConfig,
        {"dsa": DSAConfig(share_every=3, share_numbering="layers"), "layer_types": ("dense", "dsa", "dsa", "dsa")},
        "dsa.share_numbering: layer 1 (from 0) would share",
    ),
    (
        ModelConfig,
        {"dsa": DSAConfig(share_every=3, share_numbering="pattern")},  # symbols 1 3 5 7; 4, an MLP, would select
        "dsa.share_numbering: layer 2 (from 0) would share",
    ),
    (DataConfig, {"source": ""}, "source='' must name text"),
    (DataConfig, {"pack_tokens": 1}, "pack_tokens=1 must be at least 2"),
    (DataConfig, {"min_document_tokens": -1}, "min_document_tokens=-1 must be at least 0"),
    (DataConfig, {"interleave": 0}, "interleave=0 must be at least 1"),
    (DataConfig, {"seed": -1}, "seed=-1 must be at least 0"),
    (DataConfig, {"held_out": 1.0}, "held_out=1.0 must be in [0, 1)"),
    (DataConfig, {"held_out": NAN}, "held_out=nan must be in [0, 1)"),
    (StageConfig, {"mode": "fast"}, "mode='fast' must be one of dense, warmup, sparse, frozen"),
    (StageConfig, {"steps": -1}, "steps=-1 must be at least 0"),
    (StageConfig, {"lr": 0.0}, "lr=0.0 must be positive"),
    (StageConfig, {"lr_warmup": -1}, "lr_warmup=-1 must be at least 0"),
    (StageConfig, {"lr_final": 1.5}, "lr_final=1.5 must be in [0, 1]"),
    (StageConfig, {"kl_weight": 0.0}, "kl_weight=0.0 must be positive"),
    (StageConfig, {"mtp_weight": 0.0}, "mtp_weight=0.0 must be positive"),
    (TrainConfig, {"stages": ()}, "stages has no steps"),
    (TrainConfig, {"stages": (StageConfig(steps=0),)}, "stages has no steps"),
    *[
        (TrainConfig, {name: 0}, f"{name}=0 must be at least 1")
        for name in ("packs_per_micro_batch", "log_every", "eval_every", "eval_packs", "save_every", "keep_checkpoints")
    ],
    (TrainConfig, {"packs_per_step": 0}, "packs_per_step=0 must be at least 1"),
    (TrainConfig, {"run_dir": ""}, "run_dir='' must name a folder"),
    (TrainConfig, {"packs_per_micro_batch": 3}, "packs_per_step=8 must be a multiple of packs_per_micro_batch=3"),
    (
        TrainConfig,
        {"stages": (StageConfig(packs_per_step=9),)},
        "stages.0.packs_per_step=9 must be a multiple of packs",
    ),
    (StageConfig, {"packs_per_step": 0}, "packs_per_step=0 must be at least 1"),
    (TrainConfig, {"weight_decay": -0.1}, "weight_decay=-0.1 must be at least 0"),
    (TrainConfig, {"seed": -1}, "seed=-1 must be at least 0"),
    (TrainConfig, {"grad_clip": 0.0}, "grad_clip=0.0 must be positive"),
    (TrainConfig, {"beta1": 1.0}, "beta1=1.0 must be in [0, 1)"),
    (TrainConfig, {"beta2": -0.1}, "beta2=-0.1 must be in [0, 1)"),
    (DataConfig, {"long_documents": "drop"}, "long_documents='drop' must be one of cut, refuse"),
    (DataConfig, {"bad_documents": "keep"}, "bad_documents='keep' must be one of stop, skip"),
    (TrainConfig, {"dtype": "float16"}, "dtype='float16' must be one of float32, bfloat16"),
    (TrainConfig, {"recompute": "some"}, "recompute='some' must be one of none, selective, full"),
    (
        TrainConfig,
        {"recompute_reuse_selection": False},
        "recompute_reuse_selection=False needs recompute='selective' or 'full'",
    ),
    (TrainConfig, {"resume": "always"}, "resume='always' must be one of auto, never, must"),
    (TrainConfig, {"fresh_indexer": True}, "fresh_indexer=True needs init_from"),
    *[
        (ParallelConfig, {name: 0}, f"{name}=0 must be at least 1")
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "vpp", "ep")
    ],
    (ParallelConfig, {"schedule": "GPipe"}, "schedule='GPipe' must be one of 1F1B, Interleaved1F1B"),
    (ParallelConfig, {"dynamic_cp": True}, "dynamic_cp=True needs a cp above 1"),
    (ParallelConfig, {"vpp": 2}, "vpp=2 needs a pp above 1"),
    (ParallelConfig, {"pp": 2, "vpp": 2}, "schedule='1F1B' does not fit vpp=2"),
    (ParallelConfig, {"pp": 2, "schedule": "Interleaved1F1B"}, "schedule='Interleaved1F1B' does not fit vpp=1"),
    (ParallelConfig, {"ep": 2, "tp": 2, "sequence_parallel": False}, "ep=2 with tp=2 needs sequence_parallel=True"),
    (ParallelConfig, {"tp": 2, "check_ranks": True}, "check_ranks=True needs split_indexer_rows=False"),
    (ParallelConfig, {"ep": 3, "dp_shard": 2, "tp": 2}, "ep=3 must divide dp_shard * cp * tp = 4"),
    (ParallelConfig, {"pipeline_layout": "Et*2|x"}, "pipeline_layout: 'x' in 'Et*2|x' is none of E, t, m, L"),
    (ParallelConfig, {"pp": 3, "pipeline_layout": "Et*2|tL"}, "pipeline_layout has 2 chunks, but pp * vpp = 3"),
    (
        RunConfig,
        {"parallel": ParallelConfig(pp=2, pipeline_layout="Et*2|tL"), "train": TrainConfig(packs_per_micro_batch=1)},
        "parallel.pipeline_layout: the chunks hold 3 of 't', but num_layers=4",
    ),
    (
        RunConfig,
        {"parallel": ParallelConfig(dp_shard=3)},
        "parallel: dp_replicate * dp_shard = 3 must divide train.packs_per_step=8",
    ),
    (
        RunConfig,
        {
            "parallel": ParallelConfig(dp_shard=2),
            "train": TrainConfig(packs_per_step=12, packs_per_micro_batch=4),
        },
        "parallel: train.packs_per_micro_batch=4 must divide the 6 packs",
    ),
    (RunConfig, {"parallel": ParallelConfig(pp=2)}, "parallel: pp=2 needs as many micro-batches a step"),
    (
        RunConfig,
        {
            "parallel": ParallelConfig(pp=2, vpp=2, schedule="Interleaved1F1B"),
            "train": TrainConfig(packs_per_step=3, packs_per_micro_batch=1),
        },
        "parallel: vpp=2 needs a multiple of pp=2 micro-batches a step, but there are 3",
    ),
    (
        RunConfig,
        {"train": TrainConfig(recompute="full", recompute_reuse_selection=False)},
        "train.recompute_reuse_selection=False needs model.dsa.deterministic=True",
    ),
    (RunConfig, {"model": ModelConfig(vocab_size=258)}, "model.vocab_size=258 must be at least 259"),
    (
        RunConfig,
        {"model": ModelConfig(layer_types=("dense",) * 4), "train": TrainConfig(stages=(DENSE, SPARSE))},
        "train.stages.1.mode='sparse' needs a dsa layer",
    ),
    *[
        (
            RunConfig,
            {
                "model": ModelConfig(dsa=DSAConfig(indexer=IndexerConfig(**POOLS))),
                "train": TrainConfig(stages=(DENSE, StageConfig(mode="frozen"), StageConfig(mode=mode))),
            },
            f"train.stages.2.mode='{mode}' trains the indexer, but model.dsa.indexer.pool_size=4 leaves it without",
        )
        for mode in ("warmup", "sparse")
    ],
]
BROKEN += [
    (MoEConfig, {"experts": 0, "experts_per_token": 1}, "experts=0 must be at least 1"),
    (MoEConfig, {"experts_per_token": 0}, "experts_per_token=0 must be at least 1"),
    *[
        (MoEConfig, {name: 0}, f"{name}=0 must be at least 1")
        for name in ("intermediate_size", "groups", "groups_per_token")
    ],
    (MoEConfig, {"shared_experts": -1}, "shared_experts=-1 must be at least 0"),
    (MoEConfig, {"first_dense_layers": -1}, "first_dense_layers=-1 must be at least 0"),
    (MoEConfig, {"routed_scaling": 0.0}, "routed_scaling=0.0 must be positive"),
    (MoEConfig, {"intermediate_size": 12}, "intermediate_size=12 must be a multiple of 8"),
    (MoEConfig, {"groups": 3, "groups_per_token": 3}, "experts=256 must be a multiple of groups=3"),
    (MoEConfig, {"groups_per_token": 2}, "groups_per_token=2 must not exceed groups=1"),
    (MoEConfig, {"groups": 256, "groups_per_token": 8}, "groups=256 must hold 2 of the 256 experts each"),
    (MoEConfig, {"groups": 64}, "experts_per_token=8 must not exceed the 4 experts in the groups of a token"),
    (KDAConfig, {"heads": 0}, "heads=0 must be at least 1"),
    (KDAConfig, {"head_dim": 0}, "head_dim=0 must be at least 1"),
    (KDAConfig, {"conv_size": 0}, "conv_size=0 must be at least 1"),
    (KDAConfig, {"norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
    (KDAConfig, {"output_gate": "yes"}, "output_gate='yes' must be one of none, headwise, elementwise"),
    (KDAConfig, {"backend": "triton"}, "backend='triton' must be one of auto, fla, reference"),
    *[
        (KDAConfig, {"lower_bound": bound}, f"lower_bound={bound} must be negative and finite")
        for bound in (0.0, 1.0, -INF, NAN)
    ],
    (ModelConfig, {"sliding_window": 0, "layer_types": HYBRID[:4]}, "sliding_window=0 must be at least 1"),
    (ModelConfig, {"layer_types": HYBRID[:4]}, "sliding_window=None, but layer_types has a sliding layer"),
    (ModelConfig, {"layer_types": HYBRID[1:]}, "kda=None, but layer_types has a linear layer"),
    (ModelConfig, {"sliding_window": 4}, "sliding_window is set, but no layer of layer_types is sliding"),
    (ModelConfig, {"kda": KDAConfig()}, "kda is set, but no layer of layer_types is linear"),
    (ModelConfig, {"dense_attention": GQAConfig()}, "dense_attention is set, but no layer of layer_types is dense or"),
    (ModelConfig, {"moe": MoEConfig(first_dense_layers=4)}, "moe.first_dense_layers=4 must be below num_layers=4"),
    (ModelConfig, {"moe": MoEConfig(), "hidden_size": 252}, "hidden_size=252 must be a multiple of 8 with moe"),
    (
        ModelConfig,
        {
            "layer_types": HYBRID[1:],
            "kda": KDAConfig(),
            "mtp": MTPConfig(depths=2, repeated=True, shared_components=("latent_kv",)),
        },
        "mtp.shared_components needs a dsa layer: MTP layers are of the last layer's type, which is linear",
    ),
    (StageConfig, {"router_bias_rate": -1.0}, "router_bias_rate=-1.0 must be at least 0"),
    (StageConfig, {"balance_weight": NAN}, "balance_weight=nan must be at least 0"),
    (
        RunConfig,
        {"train": TrainConfig(stages=(StageConfig(), StageConfig(balance_weight=0.1)))},
        "train.stages.1.balance_weight=0.1 needs model.moe",
    ),
    (
        RunConfig,
        {"model": ModelConfig(layer_types=("linear",) * 4, kda=KDAConfig())},
        "train.stages.0.mode='sparse' needs a dsa layer",
    ),
]
CLASSES = [
    value
    for value in vars(config).values()
    if inspect.isclass(value) and issubclass(value, Checked) and value != Checked
]


@pytest.mark.parametrize(("kind", "fields", "says"), BROKEN, ids=lambda x: x.__name__ if inspect.isclass(x) else None)
def test_every_rule_speaks(kind: type[Checked], fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**fields)
    assert [problem for problem in caught.value.problems if problem.startswith(says)], caught.value.problems
    assert len(caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_defaults_are_sound_and_every_class_is_broken_above(kind: type[Checked]) -> None:
    check(kind())
    assert any(broken is kind for broken, _, _ in BROKEN)


def rules(source: str) -> Iterator[tuple[str, str]]:
    """(class, pattern of the problem it tells) of every rule that a `problems` method yields."""
    for kind in ast.parse(source).body:
        methods = kind.body if isinstance(kind, ast.ClassDef) else []
        for node in itertools.chain.from_iterable(ast.walk(method) for method in methods if _tells(method)):
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.JoinedStr | ast.Constant):
                parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
                told = "".join(re.escape(str(x.value)) if isinstance(x, ast.Constant) else ".*" for x in parts)
                yield kind.name, told
            elif isinstance(node, ast.YieldFrom) and isinstance(node.value, ast.Call):
                names = [str(x.value) for x in node.value.args if isinstance(x, ast.Constant)]
                helper = ast.unparse(node.value.func)
                names = names[:1] if helper == "self._one_of" else [name for name in names if name.isidentifier()]
                text = {"self._at_least": "at least", "self._above_zero": "positive", "self._even": "even"}
                yield from ((kind.name, f"{name}=.* must be {text.get(helper, 'one of')}") for name in names)


def _tells(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in ("problems", "_problems_of_hybrids")


def test_every_rule_is_broken_above() -> None:
    every = list(rules(inspect.getsource(config)))
    assert len(every) > 60
    told = [(kind.__name__, says) for kind, _, says in BROKEN]
    with deferred_checks():
        told += [(kind.__name__, problem) for kind, fields, _ in BROKEN for problem in kind(**fields).problems()]
    missing = [(kind, rule) for kind, rule in every if not any(kind == a and re.match(rule, b) for a, b in told)]
    assert not missing


@pytest.mark.parametrize(
    ("kind", "fields", "wanted"),
    [
        (DSAConfig, {"share_every": "2"}, "int"),
        (DSAConfig, {"share_every": 1.5}, "int"),
        (DSAConfig, {"share_offset": True}, "int"),
        (DSAConfig, {"deterministic": 1}, "bool or None"),
        (MLAConfig, {"heads": None}, "int"),
        (MLAConfig, {"softmax_scale": "0.1"}, "float or None"),
        (ModelConfig, {"layer_types": ["dsa"] * 4}, "tuple or None"),
        (ModelConfig, {"attention": None}, "MLAConfig or GQAConfig"),
        (DataConfig, {"source": Path("texts")}, "str"),
        (ParallelConfig, {"pipeline_layout": ("Et", "tL")}, "str or None"),
        (RunConfig, {"train": None}, "TrainConfig"),
    ],
)
def test_a_value_of_another_type_is_told_and_nothing_else(
    kind: type[Checked], fields: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**fields)
    ((name, value),) = fields.items()
    assert list(caught.value.problems) == [f"{name}={value!r} must be of type {wanted}"]


def test_types_are_told_for_a_whole_tree_together() -> None:
    with deferred_checks():
        model = ModelConfig(num_layers=0, dsa=DSAConfig(indexer=IndexerConfig(top_k=None), share_every=0))
    assert list(model.all_problems()) == [
        "dsa.indexer.top_k=None must be of type int",
        "dsa.share_every=0 must be at least 1",
        "num_layers=0 must be at least 1",
    ]
    assert RopeConfig(base=10000, factor=2).base == 10000, "an integer is a number"


def test_all_problems_at_once_with_dotted_names() -> None:
    with deferred_checks():
        run = RunConfig(
            model=ModelConfig(
                hidden_size=0,
                attention=MLAConfig(heads=0, rope=RopeConfig(base=0.5)),
                dsa=DSAConfig(share_every=0, indexer=IndexerConfig(top_k=0)),
            ),
            train=TrainConfig(stages=(StageConfig(), StageConfig(steps=-1, lr=-1.0))),
            parallel=ParallelConfig(tp=0),
        )
    with pytest.raises(ConfigError) as caught:
        check(run)
    assert [problem.split("=")[0] for problem in caught.value.problems] == [
        "model.attention.rope.base",
        "model.attention.heads",
        "model.dsa.indexer.top_k",
        "model.dsa.share_every",
        "model.hidden_size",
        "train.stages.1.steps",
        "train.stages.1.lr",
        "parallel.tp",
    ]
    assert str(caught.value).startswith("8 problem(s) in the configuration:\n  - model.attention.rope.base=0.5")
    assert isinstance(caught.value, InputError)


def test_rules_between_fields_stay_quiet_over_reported_ones() -> None:
    """heads % 0 and its like: the cause is told, the rule that trips over it is not."""
    with deferred_checks():
        model = ModelConfig(attention=GQAConfig(heads=0, kv_heads=0, head_dim=0), dsa=DSAConfig(block_bytes=0))
    problems = list(model.all_problems())
    assert {"attention.heads=0", "attention.kv_heads=0", "attention.head_dim=0", "dsa.block_bytes=0"} <= {
        problem.split(" ")[0] for problem in problems
    }


def test_a_batch_of_nothing_is_told_once() -> None:
    with deferred_checks():
        config = RunConfig(train=TrainConfig(packs_per_step=0))
    assert list(config.all_problems()) == ["train.packs_per_step=0 must be at least 1"]


def test_checks_are_deferred_inside_only() -> None:
    with deferred_checks():
        with deferred_checks():
            IndexerConfig(top_k=0)
        broken = IndexerConfig(top_k=0)
    assert broken.top_k == 0
    with pytest.raises(ConfigError):
        IndexerConfig(top_k=0)


def test_checks_come_back_after_an_exception() -> None:
    with pytest.raises(KeyError), deferred_checks():
        raise KeyError
    with pytest.raises(ConfigError):
        IndexerConfig(top_k=0)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_frozen_and_by_keyword_only(kind: type[Checked]) -> None:
    first = dataclasses.fields(kind)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(kind(), first, 1)
    with pytest.raises(TypeError):
        kind(1)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_replace_checks_again(kind: type[Checked]) -> None:
    assert replace(kind()) == kind()
    _, fields, _ = next(entry for entry in BROKEN if entry[0] is kind)
    with pytest.raises(ConfigError):
        replace(kind(), **fields)


def undocumented(source: str) -> list[str]:
    """`Class.field` of every annotated field that no sentence follows."""
    missing = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                text = following.value if isinstance(following, ast.Expr) else None
                if not (isinstance(text, ast.Constant) and str(text.value).rstrip().endswith(".")):
                    missing.append(f"{node.name}.{ast.unparse(statement.target)}")
    return missing


def test_every_field_has_its_sentence() -> None:
    assert not undocumented(inspect.getsource(config))
    assert undocumented("class A:\n    x: int = 1\n    y: int = 2\n    '''Said.'''") == ["A.x"]


def test_scale_golden_values() -> None:
    yarn = RopeConfig(scaling="yarn", factor=40.0, mscale_all_dim=1.0)
    assert yarn.concentration(1.0) == pytest.approx(1.3688879454, abs=5e-11)
    assert MLAConfig(rope=yarn).scale == pytest.approx(0.1352337789, abs=5e-11)
    assert MLAConfig().scale == pytest.approx(0.0721687836, abs=5e-11)
    assert GQAConfig(head_dim=192, rope_dim=64, rope=yarn).scale == pytest.approx(0.1352337789, abs=5e-11)


def test_scale_is_stretched_only_where_yarn_is_on() -> None:
    """Megatron multiplies by m^2 also without YaRN, where the unused factor stays at 40; here that factor is idle."""
    idle = RopeConfig(scaling="none", factor=40.0, mscale_all_dim=1.0)
    assert MLAConfig(rope=idle).scale == MLAConfig().scale
    assert RopeConfig(scaling="yarn", factor=1.0).concentration(1.0) == 1.0
    assert MLAConfig(rope=RopeConfig(scaling="yarn")).scale == MLAConfig().scale  # mscale_all_dim is 0


def test_explicit_scale_wins() -> None:
    yarn = RopeConfig(scaling="yarn", mscale_all_dim=1.0)
    assert MLAConfig(rope=yarn, softmax_scale=0.5).scale == 0.5
    assert GQAConfig(rope=yarn, softmax_scale=0.25).scale == 0.25


def test_derived_sizes() -> None:
    assert MLAConfig().latent_width == 576
    assert MLAConfig(qk_rope_head_dim=0).latent_width == 512
    assert GQAConfig().rotated == 128
    assert GQAConfig(rope_dim=0).rotated == 0
    assert ModelConfig(num_layers=2).types == ("dsa", "dsa")
    assert ModelConfig(num_layers=2, layer_types=("dense", "dsa")).types == ("dense", "dsa")


GLM = {"num_layers": 78, "dsa": DSAConfig(share_every=4, share_offset=3)}


@pytest.mark.parametrize(
    ("written", "chunks"),
    [
        ("Et*3|(tt|)*2mL", ("Ettt", "tt", "tt", "mL")),
        ("Ettt|(tt|)*2,m|L", ("Ettt", "tt", "tt", "m", "L")),
        ("E||t*2|t*0|L", ("E", "", "tt", "", "L")),
        ("E(t*2|)*2m*3L", ("Ett", "tt", "mmmL")),
        ("Et|*2tL", ("Et", "", "tL")),
        ("EtL", ("EtL",)),
    ],
)
def test_pipeline_layouts_are_written_out(written: str, chunks: tuple[str, ...]) -> None:
    assert parse_pipeline_layout(written) == chunks


@pytest.mark.parametrize(
    "written", ["", "tL", "Et", "EEtL", "EtLL", "EtmtL", "ELt", "EmLt", "Et*L", "E(t|*2L", "E t L"]
)
def test_pipeline_layouts_that_cannot_be_read(written: str) -> None:
    with pytest.raises(InputError, match=re.escape(repr(written))):
        parse_pipeline_layout(written)


def first_layers(model: ModelConfig, chunks: tuple[str, ...]) -> list[int]:
    """The first layer, counted from 1, of every chunk that holds one."""
    starts, layers = [], 0
    for chunk in chunks:
        own = chunk.count("t") + ("m" in chunk if model.mtp.repeated else chunk.count("m"))
        starts += [layers + 1] if own else []
        layers += own
    return starts


@pytest.mark.parametrize(
    ("layout", "starts"),
    [
        ("Et*10|t*12|t*12|t*12|t*12|t*12|t*8|m*7L", [1, 11, 23, 35, 47, 59, 71, 79]),
        ("Et*22|t*24|t*24|t*8m*7L", [1, 23, 47, 71]),
        ("Et*18|t*24|t*24|t*12m*7L", [1, 19, 43, 67]),
        ("E|t*22|t*24|t*24||t*8|m*7|L", [1, 23, 47, 71, 79]),
        ("Et|t|t*4|t*72m*7L", [1, 2, 3, 7]),
    ],
)
def test_pipeline_chunks_that_begin_with_a_selecting_layer(layout: str, starts: list[int]) -> None:
    """Published splits of 78 layers and 7 repeated MTP depths; chunks without layers and of MTP alone among them."""
    model = ModelConfig(**GLM, mtp=MTPConfig(depths=7, repeated=True))
    chunks = parse_pipeline_layout(layout)
    assert first_layers(model, chunks) == starts
    assert not list(model.pipeline_problems(chunks))
    train = TrainConfig(packs_per_step=8, packs_per_micro_batch=1)
    RunConfig(model=model, train=train, parallel=ParallelConfig(pp=len(chunks), pipeline_layout=layout))


@pytest.mark.parametrize(
    ("layout", "chunk", "layer", "source"),
    [
        ("Et*20|t*20|t*20|t*18L", 1, 20, 18),
        ("Et*39|t*39L", 1, 39, 38),
        ("E|t*3|t*75L", 2, 3, 2),
        ("Et*22||t*24|t*25|t*7L", 4, 71, 70),
    ],
)
def test_a_pipeline_chunk_that_begins_with_a_sharing_layer(layout: str, chunk: int, layer: int, source: int) -> None:
    run = {"model": ModelConfig(**GLM), "parallel": ParallelConfig(pp=layout.count("|") + 1, pipeline_layout=layout)}
    with pytest.raises(ConfigError) as caught:
        RunConfig(**run)
    assert caught.value.problems[0] == (
        f"parallel.pipeline_layout: chunk {chunk} (of {layout.count('|') + 1}, from 0) begins with layer {layer}, "
        f"which uses the selection of layer {source} in an earlier chunk; begin it with a layer that selects"
    )


def test_even_pipeline_splits_keep_the_rule_too() -> None:
    two, four = ParallelConfig(pp=2), ParallelConfig(pp=4)
    assert four.chunks(78, 0) == ("E" + "t" * 20, "t" * 20, "t" * 19, "t" * 19 + "L")
    assert two.chunks(1, 2) == ("Et", "mmL")
    glm, every = ModelConfig(**GLM), ModelConfig(num_layers=78)
    assert [problem.split(",")[0] for problem in glm.pipeline_problems(two.chunks(78, 0))] == ["chunk 1 (of 2"]
    assert not list(every.pipeline_problems(two.chunks(78, 0)))
    halves = ModelConfig(num_layers=8, dsa=DSAConfig(share_every=4))
    assert not list(halves.pipeline_problems(two.chunks(8, 0)))
    assert len(list(halves.pipeline_problems(four.chunks(8, 0)))) == 2
    with deferred_checks():
        run = RunConfig(model=glm, parallel=two)
    assert [problem.split(" ")[0] for problem in run.all_problems()] == ["parallel.pipeline_layout:", "parallel:"]


def test_degrees_that_a_model_cannot_be_cut_into_are_told_together() -> None:
    model = ModelConfig(
        num_layers=2,
        intermediate_size=500,
        attention=GQAConfig(heads=6, kv_heads=2, head_dim=16),
        dense_attention=MLAConfig(heads=4),
        dsa=DSAConfig(indexer=IndexerConfig(query_from="hidden", rope_dim=16)),
        layer_types=("dense", "dsa"),
        moe=MoEConfig(experts=6, experts_per_token=2, first_dense_layers=1),
    )
    parallel = ParallelConfig(dp_shard=2, tp=8, ep=4)
    assert [problem.split(" must")[0] + problem.split(" divide")[1] for problem in parallel.model_problems(model)] == [
        "tp=8 the attention's heads=4",
        "tp=8 the attention's heads=6",
        "tp=8 the attention's kv_heads=2",
        "tp=8 model.intermediate_size=500",
        "ep=4 model.moe.experts=6",
    ]
    (problem,) = ParallelConfig(ep=2, tp=2).model_problems(ModelConfig())
    assert problem.startswith("ep=2 needs model.moe")
    assert not list(ParallelConfig(tp=2, cp=2, dp_shard=2, dp_replicate=2).model_problems(ModelConfig()))


def test_degrees_make_the_number_of_processes() -> None:
    parallel = ParallelConfig(dp_replicate=2, dp_shard=3, cp=2, tp=2, pp=2, ep=4)
    assert (parallel.world_size, parallel.batch_ranks) == (48, 6)
    assert not list(parallel.world_problems(48))
    (problem,) = parallel.world_problems(24)
    assert "= 48, but 24 process(es) were started" in problem


def test_pipeline_chunks_of_dense_layers_need_no_selection() -> None:
    types = ("dsa", "dsa", "dense", "dense", "dsa", "dsa")
    model = ModelConfig(num_layers=6, layer_types=types, dsa=DSAConfig(share_every=2))
    assert model.selection_sources == (0, 0, None, None, 4, 4)
    assert not list(model.pipeline_problems(("Ett", "tt", "ttL")))
    assert not list(model.pipeline_problems(("Ett", "t", "t", "tt", "L")))
    assert len(list(model.pipeline_problems(("Et", "t", "tt", "tt", "L")))) == 1


def test_mtp_layers_in_the_pipeline() -> None:
    own, one = MTPConfig(depths=3), MTPConfig(depths=3, repeated=True)
    model = ModelConfig(**GLM, mtp=own)
    assert model.selection_sources[76:] == (74, 74, 78, 78, 78)
    assert not list(model.pipeline_problems(("E" + "t" * 78, "mmmL")))
    assert "chunk 2 (of 3, from 0) begins with layer 79" in next(model.pipeline_problems(("E" + "t" * 78, "m", "mmL")))
    model = ModelConfig(**{**GLM, "num_layers": 77}, mtp=one)
    assert model.selection_sources[76:] == (74, 74)
    (problem,) = model.pipeline_problems(("E" + "t" * 77, "mmmL"))
    assert "begins with layer 77, which uses the selection of layer 74" in problem
    model = ModelConfig(**GLM, mtp=one)
    (problem,) = model.pipeline_problems(("E" + "t" * 78 + "m", "mmL"))
    assert problem.startswith("MTP depths stand in several chunks")
    (problem,) = model.pipeline_problems(("E" + "t" * 78, "L"))
    assert problem == "the chunks hold 0 of 'm', but mtp.depths=3"


def test_sharing_schedules_count_what_they_say() -> None:
    types = ("dense", "dsa", "dense", "dsa", "dsa", "dsa", "dense")
    mixed = {"num_layers": 7, "layer_types": types}

    def sources(model: dict[str, Any], **dsa: Any) -> tuple[int | None, ...]:
        return ModelConfig(**model, dsa=DSAConfig(**dsa)).selection_sources

    assert sources(mixed, share_every=2) == (None, 1, None, 1, 4, 4, None)
    assert sources(mixed, share_every=2, share_offset=2, share_numbering="layers") == (None, 1, None, 3, 3, 5, None)
    plain = {"num_layers": 6}
    assert sources(plain, share_every=4) == (0, 0, 0, 0, 4, 4)
    assert sources(plain, share_every=4, share_numbering="layers") == (0, 0, 0, 0, 4, 4)
    assert sources(plain, share_every=4, share_numbering="pattern") == (0, 0, 2, 2, 4, 4)  # D-D-D-D-D-D-
    named = ("shared", "full", "full", "shared", "shared", "full", "shared")  # the first and last are not read
    assert sources(mixed, indexer_types=named) == (None, 1, None, 1, 1, 5, None)
    assert sources({"num_layers": 2}, indexer_types=("full", "shared")) == (0, 0)


def test_mtp_layers_are_numbered_behind_the_decoder() -> None:
    dsa = DSAConfig(indexer_types=("full", "shared"))
    assert ModelConfig(num_layers=2, dsa=dsa, mtp=MTPConfig(depths=2)).selection_sources == (0, 0, 2, 3)
    longer = DSAConfig(indexer_types=("full", "shared", "shared", "full"))
    assert ModelConfig(num_layers=2, dsa=longer, mtp=MTPConfig(depths=2)).selection_sources == (0, 0, 0, 3)
    model = ModelConfig(num_layers=2, layer_types=("dsa", "dense"), mtp=MTPConfig(depths=2))
    assert model.all_types == ("dsa", "dense", "dense", "dense")
    assert ModelConfig(num_layers=2, mtp=MTPConfig(depths=7, repeated=True)).all_types == ("dsa",) * 3
    assert source_number(79, 4, 3) == 79


def test_mtp_combinations_that_are_sound() -> None:
    for names in (None, (), SHARED, SHARED[::-1], SHARED[:1], SHARED[1:]):
        config = MTPConfig(**REPEATED, shared_components=names)
        ModelConfig(mtp=config)
        assert config.shares("latent_kv") == ("latent_kv" in (names or ()))
    ModelConfig(
        mtp=MTPConfig(**REPEATED, shared_components=SHARED[1:]), attention=GQAConfig(rope_dim=64), dsa=FROM_HIDDEN
    )
    MTPConfig(depths=1, shared_components=())
    assert (MTPConfig().num_layers, MTPConfig(depths=3).num_layers, MTPConfig(**REPEATED).num_layers) == (0, 3, 1)


def test_models_that_are_sound() -> None:
    indexer = IndexerConfig(query_from="hidden", rope_dim=64)
    ModelConfig(attention=GQAConfig(rope_dim=64), dsa=DSAConfig(indexer=indexer))
    ModelConfig(attention=MLAConfig(q_lora_rank=None), dsa=DSAConfig(indexer=indexer))
    ModelConfig(attention=MLAConfig(qk_rope_head_dim=32), dsa=DSAConfig(indexer=IndexerConfig(rope_dim=0)))
    RunConfig(model=ModelConfig(layer_types=("dense",) * 4), train=TrainConfig(stages=(DENSE,)))
    RunConfig(model=ModelConfig(vocab_size=100), data=DataConfig(tokenizer="gpt2"))
    TrainConfig(init_from="runs/a", fresh_indexer=True)


def test_graphs_of_single_layers_would_freeze_what_layers_share() -> None:
    shares = ModelConfig(num_layers=4, dsa=DSAConfig(share_every=2))
    mtp = MTPConfig(depths=2, repeated=True, shared_components=("latent_kv",))
    for scopes in (["full_iteration"], ["moe"], ["moe_router", "moe_preprocess"], ["mlp"]):
        assert not list(shares.graph_problems(scopes))
        assert not list(ModelConfig(mtp=mtp).graph_problems(scopes))
    for scopes in (["attn"], []):
        assert not list(ModelConfig().graph_problems(scopes)), "every layer selects for itself"
    (problem,) = shares.graph_problems(["attn", "moe"])
    says = "would freeze the selection that layer 1 takes from layer 0; use full_iteration, or name"
    assert problem.startswith(f"cuda_graph_modules=attn, moe {says}")
    (problem,) = shares.graph_problems([])
    assert problem.startswith(f"cuda_graph_modules=(), whole layers, {says}"), "no module is Megatron's whole layer"
    (problem,) = ModelConfig(mtp=mtp).graph_problems(["attn"])
    assert "freeze the latent_kv of mtp.shared_components" in problem
    (problem,) = ModelConfig().graph_problems(["full_iteration", "moe"])
    assert "give it alone" in problem
    (problem,) = ModelConfig().graph_problems(["layer"])
    assert "cuda_graph_modules='layer' must be one of full_iteration, attn" in problem


def test_experts_follow_the_first_dense_layers_into_mtp() -> None:
    model = ModelConfig(moe=MoEConfig(first_dense_layers=3), mtp=MTPConfig(depths=2))
    assert model.has_experts == (False, False, False, True, True, True)
    assert ModelConfig(mtp=MTPConfig(depths=1)).has_experts == (False,) * 5


def test_other_layers_may_have_an_attention_of_their_own() -> None:
    other = GQAConfig()
    model = ModelConfig(layer_types=HYBRID[:4], sliding_window=8, dense_attention=other)
    assert [model.attention_of(kind) for kind in model.types] == [other, other, model.attention, model.attention]
    same = replace(model, dense_attention=None)
    assert [same.attention_of(kind) for kind in model.types] == [model.attention] * 4
    assert model.selection_sources == (None, None, 2, 3)


# The guide's tables of rules

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
HELPERS = {"self._at_least": "at least {}", "self._above_zero": "positive and finite", "self._even": "even"}
METHODS = {
    "problems": "",
    "_problems_of_hybrids": "",
    "pipeline_problems": ", cut into pipeline chunks",
    "graph_problems": ", under CUDA graphs",
    "world_problems": ", when processes are counted",
    "model_problems": ", beside the model",
    "batch_problems": ", beside the batch",
}


def methods(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for kind in ast.parse(source).body:
        if isinstance(kind, ast.ClassDef) and kind.name != "Checked":
            yield from ((kind.name, node) for node in kind.body if isinstance(node, ast.FunctionDef))


def of_one_field(source: str) -> dict[str, dict[str, list[str]]]:
    """Class -> what a field must be -> the fields; choices are left out, for every option's row lists its own."""
    found: dict[str, dict[str, list[str]]] = {}
    for kind, method in methods(source):
        groups = {one.targets[0].id: one.value for one in ast.walk(method) if is_plain(one)}  # names = ("experts", ...)
        for node in ast.walk(method):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in HELPERS and method.name in METHODS:
                limits = [ast.unparse(x) for x in node.args[:1] if called == "self._at_least"]
                fields = [x for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
                for star in [x.value.id for x in node.args if isinstance(x, ast.Starred)]:
                    fields += groups[star].elts
                told = found.setdefault(kind, {}).setdefault(HELPERS[called].format(*limits), [])
                told += [f"`{field.value}`" for field in fields if f"`{field.value}`" not in told]
    return found


def is_plain(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Tuple)


def values_of(method: ast.FunctionDef, told: ast.Yield) -> dict[str, str]:
    """Local name -> the strings that it may stand for in `told`, as far as the code says them outright."""
    known: dict[str, str] = {}
    for node in ast.walk(method):
        pairs: list[tuple[ast.expr, list[ast.expr]]] = []
        if isinstance(node, ast.For) and told not in ast.walk(node):
            continue
        if isinstance(node, ast.For) and "batches" in ast.unparse(node.iter):
            known["name"] = "packs_per_step"
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            several = isinstance(node.target, ast.Tuple)
            columns = zip(*(x.elts for x in node.iter.elts), strict=True) if several else [node.iter.elts]
            pairs = list(zip(node.target.elts if several else [node.target], map(list, columns), strict=True))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            pairs = [(node.targets[0], [node.value.body, node.value.orelse])]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                pairs = [(one, [value]) for one, value in zip(target.elts, node.value.elts, strict=True)]
        for target, options in pairs:
            told = [x.value for x in options if isinstance(x, ast.Constant) and isinstance(x.value, str) and x.value]
            if isinstance(target, ast.Name) and len(told) == len(options):
                known[target.id] = " or ".join(dict.fromkeys(told))
    return known


def sentence(node: ast.expr, known: dict[str, str]) -> str:
    """A rule's words, with … for what a configuration fills in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    words = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            words.append(str(part.value))
            continue
        text = ast.unparse(part.value)
        words.append(known.get(text) or (str(eval(text, vars(config))) if "get_args" in text else "…"))
    return "".join(words)


def between_fields(source: str) -> Iterator[tuple[str, str]]:
    """(where, the words of the problem) of every rule that is told in words of its own, in the order of the code."""
    for kind, method in methods(source):
        if method.name in METHODS:
            yields = [x for x in ast.walk(method) if isinstance(x, ast.Yield)]
            for node in sorted(yields, key=lambda x: x.lineno):
                if isinstance(node.value, ast.JoinedStr | ast.Constant):
                    text = sentence(node.value, values_of(method, node))
                    if not text.endswith("…") or len(text) > 25:  # else it hands on what another rule says
                        yield f"`{kind}`{METHODS[method.name]}", text


def rule_tables() -> str:
    source = inspect.getsource(config)
    lines = ["| configuration | each value that is given must be |", "|---|---|"]
    for kind, told in of_one_field(source).items():
        cells = [f"{what}: {', '.join(fields)}" for what, fields in told.items()]
        lines.append(f"| `{kind}` | {'; '.join(cells)} |")
    lines += ["", "| where | what is told when it is broken |", "|---|---|"]
    lines += [f"| {where} | `{text}` |" for where, text in between_fields(source)]
    return "\n".join(lines) + "\n"


def rules_told() -> str:
    """The tables as they stand in the guide."""
    text = GUIDE.read_text(encoding="utf-8")
    found = re.search(r"^\| configuration \| each .*?\n(?=\n(?!\| where))", text, re.MULTILINE | re.DOTALL)
    assert found, f"{GUIDE} has no tables of rules"
    return found.group()


def test_guide_has_every_rule() -> None:
    assert rules_told() == rule_tables(), "python tests/test_config.py writes them"


def test_a_new_rule_would_be_told() -> None:
    source = (
        "class NewConfig:\n  def problems(self):\n    yield from self._at_least(3, 'a', 'b')\n"
        "    for name in ('c', 'd'):\n      yield f'{name}={self.c} must be odd'\n"
    )
    assert of_one_field(source) == {"NewConfig": {"at least 3": ["`a`", "`b`"]}}
    assert list(between_fields(source)) == [("`NewConfig`", "c or d=… must be odd")]


if __name__ == "__main__":
    GUIDE.write_text(GUIDE.read_text(encoding="utf-8").replace(rules_told(), rule_tables()), encoding="utf-8")
