"""Gradients of a global batch do not depend on how it is cut into micro-batches, nor on padding."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from dsattn.config import (
    DSAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.parallel import recompute
from dsattn.selection import Selection
from dsattn.training.data import IGNORED_LABEL, Pack, fold
from dsattn.training.stages import set_mode
from dsattn.training.step import Losses, accumulate_gradients

MODEL = ModelConfig(
    hidden_size=16,
    num_layers=2,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
    init_std=0.3,
)
LENGTHS = [[20, 12], [1, 0, 30], [32], [5], [9, 9, 9], [2, 3, 4], [31], [16, 16]]  # real rows differ from pack to pack


def _pack(lengths: list[int], total: int, seed: int) -> Pack:
    generator = torch.Generator().manual_seed(seed)
    layout = Layout.packed(lengths, total=total)
    tokens = torch.full((total,), 258)
    tokens[: sum(lengths)] = torch.randint(256, (sum(lengths),), generator=generator)
    labels = torch.full((total,), IGNORED_LABEL)
    labels[: sum(lengths) - 1] = tokens[1 : sum(lengths)]
    ends = torch.tensor(lengths).cumsum(0) - 1
    labels[ends[torch.tensor(lengths) > 0]] = IGNORED_LABEL
    return Pack(tokens, labels, layout, int((labels != IGNORED_LABEL).sum()))


def _gradients(
    mode: str, per_micro_batch: int, total: int = 40, depths: int = 0, mtp_weight: float = 0.4, **options: Any
) -> tuple[Losses, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Decoder(dataclasses.replace(MODEL, mtp=MTPConfig(depths=depths))).train()
    set_mode(model, mode)  # pyright: ignore[reportArgumentType]
    packs = [_pack(lengths, total, seed) for seed, lengths in enumerate(LENGTHS)]
    train = TrainConfig(packs_per_step=8, packs_per_micro_batch=per_micro_batch, **options)
    stage = StageConfig(mode=mode, kl_weight=0.7, mtp_weight=mtp_weight)  # pyright: ignore[reportArgumentType]
    losses = accumulate_gradients(model, packs, stage, train)
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
@pytest.mark.parametrize("depths", [0, 2])
def test_one_by_eight_equals_four_by_two_equals_eight_by_one(mode: str, depths: int) -> None:
    whole, expected = _gradients(mode, 8, depths=depths)
    assert expected
    assert len(whole.mtp) == depths
    for per_micro_batch in (2, 1):
        losses, got = _gradients(mode, per_micro_batch, depths=depths)
        assert losses.lm == pytest.approx(whole.lm, rel=1e-5)
        assert losses.mtp == pytest.approx(whole.mtp, rel=1e-5)
        assert losses.rows == whole.rows == sum(map(sum, LENGTHS))
        assert losses.kl == pytest.approx(whole.kl, rel=1e-5)
        assert got.keys() == expected.keys()
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
@pytest.mark.parametrize("depths", [0, 2])
def test_padding_changes_nothing(mode: str, depths: int) -> None:
    losses, expected = _gradients(mode, 8, total=32, depths=depths)
    padded, got = _gradients(mode, 8, total=57, depths=depths)
    assert padded.lm == pytest.approx(losses.lm, rel=1e-6)
    assert padded.mtp == pytest.approx(losses.mtp, rel=1e-6)
    assert padded.kl == pytest.approx(losses.kl, rel=1e-5)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recompute_changes_no_bit(mode: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, expected = _gradients(mode, 2, depths=2)
    passes: list[Any] = []
    run = recompute.Pass
    monkeypatch.setattr(recompute, "Pass", lambda **rest: passes.append(rest["recompute"]) or run(**rest))
    again, got = _gradients(mode, 2, depths=2, recompute=policy)
    assert again == losses
    assert got.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in got.items())
    assert [one.policy for one in passes] == [policy] * 4


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_nothing_of_a_micro_batch_is_held_while_the_next_runs(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its selections stand for all of it: by references alone, without the garbage collector."""
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    forward, construct = Decoder.forward, Selection.__post_init__

    def noting(self: Selection) -> None:
        construct(self)
        made.append(weakref.ref(self.index))

    def counting(*args: Any, **kwargs: Any) -> Any:
        held.append(sum(one() is not None for one in made))
        return forward(*args, **kwargs)

    monkeypatch.setattr(Selection, "__post_init__", noting)
    monkeypatch.setattr(Decoder, "forward", counting)
    gc.collect()
    gc.disable()
    try:
        _gradients("sparse", 4, recompute=policy)
    finally:
        gc.enable()
    assert len(made) >= 4
    assert held == [0, 0]


def test_a_divisor_of_each_micro_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the mean of the micro-batches' means is another number, and other gradients."""
    _, expected = _gradients("sparse", 8)
    run = recompute.Pass
    monkeypatch.setattr(recompute, "Pass", lambda kl_divisor, **rest: run(kl_divisor=None, **rest))
    _, got = _gradients("sparse", 2)
    differs = [n for n in got if "indexer" in n and not torch.allclose(got[n], expected[n], rtol=1e-3, atol=1e-6)]
    assert differs


def test_kl_is_reported_by_layer_and_weighs_the_gradient_only() -> None:
    losses, gradients = _gradients("sparse", 8)
    assert set(losses.kl) == {0, 1}
    assert losses.kl_mean == pytest.approx(sum(losses.kl.values()) / 2)
    assert all(gradients[n].abs().sum() > 0 for n in gradients if "indexer.w" in n)
    assert _gradients("dense", 8)[0].kl_mean is None


def test_pairs_say_how_uneven_ranks_are() -> None:
    losses, _ = _gradients("sparse", 8)
    assert losses.pairs == (sum(n * (n + 1) // 2 for lengths in LENGTHS for n in lengths),)
    assert losses.rank_imbalance is None
    assert dataclasses.replace(losses, pairs=(30, 10, 20)).rank_imbalance == 0.5
    assert dataclasses.replace(losses, pairs=(0, 0)).rank_imbalance == 0.0


def test_mtp_weighs_the_mean_of_its_depths() -> None:
    """The gradient is linear in the weight, and that of the losses written out."""
    (once, first), (_, second), (_, third) = (
        _gradients("frozen", 8, depths=2, mtp_weight=weight) for weight in (0.2, 0.4, 0.6)
    )
    assert all(loss > 1 for loss in once.mtp)
    assert _gradients("frozen", 8)[0].mtp == ()
    torch.manual_seed(0)
    model = Decoder(dataclasses.replace(MODEL, mtp=MTPConfig(depths=2))).train()
    micro = fold([_pack(lengths, 40, seed) for seed, lengths in enumerate(LENGTHS)])
    out = model(micro.tokens, micro.layout)
    losses = model.mtp_losses(out.ahead, micro.labels, micro.layout, micro.num_labels)
    assert losses.tolist() == pytest.approx(once.mtp, rel=1e-5)
    losses.mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("eh_proj" in name for name in wanted)
    for name, gradient in wanted.items():
        if name in first:
            torch.testing.assert_close((second[name] - first[name]) / 0.2, gradient, rtol=1e-3, atol=1e-5, msg=name)
            torch.testing.assert_close(third[name] - second[name], second[name] - first[name], rtol=1e-3, atol=1e-5)


def test_mtp_indexers_warm_up_with_the_others() -> None:
    losses, gradients = _gradients("warmup", 8, depths=2)
    assert set(losses.kl) == {0, 1, 2, 3}
    assert set(gradients) == {name for name in gradients if "indexer" in name}
    assert any(name.startswith("model.layers.3.") for name in gradients)


def test_a_batch_without_labels_has_loss_zero() -> None:
    model = Decoder(MODEL).train()
    set_mode(model, "sparse")
    packs = [_pack([1, 1, 0], 4, 0)]
    losses = accumulate_gradients(model, packs, StageConfig(), TrainConfig(packs_per_step=1, packs_per_micro_batch=1))
    assert losses.lm == 0.0
    assert losses.rows == 2
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_bfloat16_runs_and_stays_close() -> None:
    torch.manual_seed(0)
    model = Decoder(MODEL).train()
    set_mode(model, "sparse")
    packs = [_pack(lengths, 40, seed) for seed, lengths in enumerate(LENGTHS)]
    full = TrainConfig()
    half = dataclasses.replace(full, dtype="bfloat16")
    exact = accumulate_gradients(model, packs, StageConfig(), full)
    rough = accumulate_gradients(model, packs, StageConfig(), half)
    assert rough.lm == pytest.approx(exact.lm, rel=2e-2)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


HYBRID = dataclasses.replace(
    MODEL,
    num_layers=3,
    layer_types=("linear", "sliding", "dsa"),
    sliding_window=5,
    kda=KDAConfig(heads=2, head_dim=4),
    moe=MoEConfig(experts=8, experts_per_token=2, intermediate_size=8, first_dense_layers=1),
    mtp=MTPConfig(depths=2, repeated=True),
)


def _expert_gradients(per_micro_batch: int, total: int = 40, **stage: Any) -> tuple[Losses, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Decoder(HYBRID).double().train()
    set_mode(model, stage.get("mode", "sparse"))
    packs = [_pack(lengths, total, seed) for seed, lengths in enumerate(LENGTHS)]
    train = TrainConfig(packs_per_step=8, packs_per_micro_batch=per_micro_batch)
    losses = accumulate_gradients(model, packs, StageConfig(**{"balance_weight": 0.3, **stage}), train)
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("per_micro_batch", "total"), [(2, 40), (1, 40), (8, 57)])
def test_experts_see_the_global_batch(per_micro_batch: int, total: int) -> None:
    """Loads, the balance loss and its gradient change neither with the micro-batch split nor with padding."""
    whole, expected = _expert_gradients(8)
    losses, got = _expert_gradients(per_micro_batch, total)
    rows = sum(map(sum, LENGTHS))
    assert {layer: int(load.sum()) for layer, load in whole.loads.items()} == {1: 2 * rows, 2: 2 * rows, 3: 4 * rows}
    assert all(torch.equal(load, whole.loads[layer]) for layer, load in losses.loads.items())
    assert losses.max_violation == whole.max_violation
    assert losses.balance == pytest.approx(whole.balance, rel=1e-6)
    assert got.keys() == expected.keys()
    assert any(gradient.any() for name, gradient in got.items() if "mlp.gate.weight" in name)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-7, atol=1e-9, msg=name)


def test_the_balance_weight_weighs_the_gradient_of_routers() -> None:
    first, second, third = (_expert_gradients(8, balance_weight=weight)[1] for weight in (0.1, 0.2, 0.4))
    moved = {name for name in first if not torch.allclose(first[name], second[name], rtol=1e-9, atol=1e-12)}
    assert "model.layers.2.mlp.gate.weight" in moved
    assert not any("lm_head" in name or "indexer" in name for name in moved)
    for name in moved:
        doubled = 2 * (second[name] - first[name])
        torch.testing.assert_close(third[name] - second[name], doubled, rtol=1e-5, atol=1e-9)


def test_no_balance_loss_unless_asked_for() -> None:
    losses, _ = _expert_gradients(8, balance_weight=0.0)
    assert losses.balance is None
    assert losses.max_violation is not None
    assert losses.max_violation > 0
    warm, gradients = _expert_gradients(8, mode="warmup")
    assert warm.balance is None  # the backbone is fixed
    assert set(gradients) == {name for name in gradients if "indexer" in name}
    assert _gradients("sparse", 8)[0].max_violation is None


def test_max_violation_is_the_excess_of_the_busiest_expert() -> None:
    loads = {1: torch.tensor([4, 4, 4]), 2: torch.tensor([9, 0, 0])}
    assert Losses(0.0, {}, 1, loads=loads).max_violation == pytest.approx((0 + 2) / 2)
    assert Losses(0.0, {}, 1, loads={1: torch.zeros(3, dtype=torch.int64)}).max_violation == -1
