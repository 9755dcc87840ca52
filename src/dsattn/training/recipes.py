"""Recipes: functions that return a whole run. `RECIPES` names those that the command line offers."""

from collections.abc import Callable

from dsattn.config import (
    DataConfig,
    DSAConfig,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
)


def tiny() -> RunConfig:
    """A laptop CPU, a few minutes: 4 layers, 1024-token packs, 64 of up to 1024 keys kept; dense, warm-up, sparse."""
    indexer = IndexerConfig(heads=4, head_dim=32, top_k=64, rope_dim=16)
    attention = MLAConfig(
        heads=4, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    )
    return RunConfig(
        model=ModelConfig(
            hidden_size=128, num_layers=4, intermediate_size=352, attention=attention, dsa=DSAConfig(indexer=indexer)
        ),
        data=DataConfig(pack_tokens=1024),
        train=TrainConfig(
            stages=(
                StageConfig(mode="dense", steps=260, lr=3e-3, lr_warmup=20),
                StageConfig(mode="warmup", steps=80, lr=5e-3, lr_warmup=10),
                StageConfig(mode="sparse", steps=140, lr=1e-3, lr_warmup=10),
            ),
            packs_per_step=1,
            packs_per_micro_batch=1,
            eval_every=200,
            eval_packs=4,
            run_dir="runs/tiny",
        ),
    )


def small() -> RunConfig:
    """One GPU: 0.3 B parameters, 32K-token packs, 2048 keys kept, bfloat16; dense, warm-up, sparse."""
    indexer = IndexerConfig(heads=16, head_dim=64, top_k=2048, rope_dim=64)
    attention = MLAConfig(heads=16, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128)
    return RunConfig(
        model=ModelConfig(
            hidden_size=1024,
            num_layers=18,
            intermediate_size=2816,
            attention=attention,
            dsa=DSAConfig(indexer=indexer),
        ),
        data=DataConfig(pack_tokens=32768),
        train=TrainConfig(
            stages=(
                StageConfig(mode="dense", steps=2000, lr=6e-4, lr_warmup=100),
                StageConfig(mode="warmup", steps=200, lr=1e-3, lr_warmup=20),
                StageConfig(mode="sparse", steps=2000, lr=3e-4, lr_warmup=50),
            ),
            packs_per_step=8,
            packs_per_micro_batch=1,
            dtype="bfloat16",
            run_dir="runs/small",
            eval_packs=2,
        ),
    )


def deepseek_v32() -> RunConfig:
    """The shape and the two stages of DeepSeek-V3.2: 671 B parameters, 256 experts; with --init the stages alone.

    Source: arXiv 2512.02556. Warm-up: 1000 steps of 16 sequences of 128K at 1e-3, 2.1 B tokens. Sparse training, 2048
    keys kept: 15000 steps of 480 sequences of 128K at 7.3e-6, 943.7 B tokens.
    """
    rope = RopeConfig(scaling="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    attention = MLAConfig(heads=128, q_lora_rank=1536, rope=rope)
    indexer = IndexerConfig(heads=64, head_dim=128, top_k=2048, rope_dim=64, rope_interleaved=False)
    model = ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        intermediate_size=18432,
        attention=attention,
        dsa=DSAConfig(indexer=indexer),
        moe=MoEConfig(groups=8, groups_per_token=4),
    )
    stages = (
        StageConfig(mode="warmup", steps=1000, lr=1e-3, lr_final=1.0, packs_per_step=16),
        StageConfig(mode="sparse", steps=15000, lr=7.3e-6, lr_final=1.0, packs_per_step=480),
    )
    train = TrainConfig(
        stages=stages, dtype="bfloat16", run_dir="runs/deepseek_v32", packs_per_step=16, packs_per_micro_batch=1
    )
    return RunConfig(model=model, data=DataConfig(pack_tokens=131072), train=train)


def glm_5_2() -> RunConfig:
    """The shape of GLM-5.2 and the two stages of GLM-5: 744 B parameters, 256 experts; with --init the stages alone.

    Source: arXiv 2602.15763. Warm-up: 1000 steps of 14 sequences of 202752, at most 5e-3, 2.8 B tokens. Sparse training
    has 20 B tokens and the settings of mid-training, which are not given: its batch is the warm-up's here, and its
    rate of 1e-5 is ours.
    """
    attention = MLAConfig(
        heads=64,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        v_head_dim=256,
        rope=RopeConfig(base=8e6),
    )
    indexer = IndexerConfig(heads=32, head_dim=128, top_k=2048, rope_dim=64, rope_interleaved=True)
    model = ModelConfig(
        vocab_size=154880,
        hidden_size=6144,
        num_layers=78,
        intermediate_size=12288,
        attention=attention,
        dsa=DSAConfig(indexer=indexer, share_every=4, share_offset=3),
        moe=MoEConfig(),
        norm_eps=1e-5,
    )
    stages = (
        StageConfig(mode="warmup", steps=1000, lr=5e-3),
        StageConfig(mode="sparse", steps=7050, lr=1e-5),
    )
    train = TrainConfig(
        stages=stages, dtype="bfloat16", run_dir="runs/glm_5_2", packs_per_step=14, packs_per_micro_batch=1
    )
    return RunConfig(model=model, data=DataConfig(pack_tokens=202752), train=train)


RECIPES: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe for recipe in (tiny, small, deepseek_v32, glm_5_2)
}
