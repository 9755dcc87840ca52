"""Stages one behind the other are the whole model: losses, gradients, names, fresh weights."""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from dsattn.config import (
    DSAConfig,
    IndexerConfig,
    MLAConfig,
    Mode,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    StageConfig,
    parse_pipeline_layout,
)
from dsattn.errors import ConfigError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.moe import MoE
from dsattn.model.mtp import look_ahead
from dsattn.model.stage import DecoderStage, MicroBatch, Share, Task, cut
from dsattn.nn.state import Pass
from dsattn.parallel.recompute import Checkpoints
from dsattn.training.stages import set_mode

PLAIN = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=4,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4), deterministic=True),
    init_std=0.3,
)
BOTH = ("latent_kv", "sparse_attention_index")


def variant(dsa: dict | None = None, **changes: object) -> ModelConfig:
    return dataclasses.replace(PLAIN, dsa=dataclasses.replace(PLAIN.dsa, **dsa or {}), **changes)


TWO = variant(mtp=MTPConfig(depths=2))
REPEATED = variant(mtp=MTPConfig(depths=3, repeated=True, shared_components=BOTH))
EXPERTS = MoEConfig(experts=4, experts_per_token=2, intermediate_size=8, first_dense_layers=1)
CASES = {
    "even": (PLAIN, "Ett|ttL"),
    "uneven, an empty chunk, head alone": (PLAIN, "Ettt||t|L"),
    "embedding alone": (PLAIN, "E|ttttL"),
    "mtp before the head": (TWO, "Ett|ttm|m|L"),
    "repeated mtp before the head": (REPEATED, "E|tttt|m*3|L"),
    "tied": (variant(tie_embeddings=True, mtp=MTPConfig(depths=1)), "Ett|tt|m|L"),
    "shared selections, all teach": (variant({"share_every": 2, "multi_layer_teacher": True}), "Ett|ttL"),
    "experts": (variant(moe=EXPERTS, mtp=MTPConfig(depths=1)), "Ett|ttmL"),
    "a dense stage": (variant(layer_types=("dense", "dense", "dsa", "dense")), "Ett|t|tL"),
}
MODES: tuple[Mode, ...] = ("dense", "warmup", "sparse", "frozen")
LAYOUTS = (Layout.packed([13, 0, 1, 9], total=26), Layout.packed([7, 12], padded=[9, 12], side="left"))
LABELS, ROWS = 37, 41


def micro_batches(config: ModelConfig) -> Iterator[MicroBatch]:
    for number, layout in enumerate(LAYOUTS):
        generator = torch.Generator().manual_seed(number)
        tokens, labels = torch.randint(config.vocab_size, (2, len(layout.rows)), generator=generator)
        yield MicroBatch(tokens, labels.masked_fill(~layout.real_rows, -100), layout)


def made(config: ModelConfig, mode: Mode) -> Decoder:
    model = Decoder(config)
    model.reset_parameters(torch.Generator().manual_seed(5))
    set_mode(model, mode)
    return model.double()


def stages_of(model: Decoder, text: str) -> list[DecoderStage]:
    stages = [DecoderStage(model.config, chunk).double() for chunk in cut(model.config, parse_pipeline_layout(text))]
    for stage in stages:
        loaded = stage.load_state_dict(model.state_dict(), strict=False)
        assert not loaded.missing_keys
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(model.get_parameter(name).requires_grad)
    return stages


def tasks_of(config: ModelConfig, run: Pass, stage: StageConfig) -> list[Task]:
    rows = max(len(layout.rows) for layout in LAYOUTS)
    rest = {"labels": LABELS, "with_mtp": config.mtp.depths > 0, "rows": rows, "dtype": torch.float64}
    return [Task(micro, run, stage, **rest) for micro in micro_batches(config)]


def one_by_one(stages: Sequence[DecoderStage], tasks: Sequence[Task]) -> None:
    """Every micro-batch forward through all stages, then backward in the same order: all are in flight together."""
    trails = []
    for task in tasks:
        entering: tuple[Tensor, ...] = ()
        trail = []
        for stage in stages:
            entering = tuple(one.detach().requires_grad_() for one in entering)
            assert len(entering) == stage.chunk.enters(task.with_mtp)
            left = stage(*entering, task=task)
            left = (left,) if isinstance(left, Tensor) else left
            trail.append((entering, left))
            entering = left
        trails.append(trail)
    for trail in trails:
        gradients: tuple[Tensor | None, ...] = (None,)
        for entering, left in reversed(trail):
            learning = [pair for pair in zip(left, gradients, strict=True) if pair[0].requires_grad]
            torch.autograd.backward([one for one, _ in learning], [one for _, one in learning])
            gradients = tuple(one.grad for one in entering)
            assert all(one is not None for one in gradients)


def whole(model: Decoder, run: Pass, stage: StageConfig) -> list[Share]:
    shares = []
    for micro in micro_batches(model.config):
        out = model(micro.tokens, micro.layout, run)
        lm, mtp, losses = model.lm_loss(out.hidden, micro.labels, LABELS), None, []
        if out.ahead:
            mtp = model.mtp_losses(out.ahead, micro.labels, micro.layout, LABELS)
        if run.mode != "warmup":
            losses += [lm] if mtp is None else [lm, stage.mtp_weight * mtp.mean()]
        losses += [] if out.kl_sum is None else [stage.kl_weight * out.kl_sum]
        losses += [] if out.balance_sum is None else [stage.balance_weight * out.balance_sum]
        torch.stack(losses).sum().backward()
        shares.append(Share(lm, mtp, out.kl, out.balance_sum, {i: one.load for i, one in out.routing.items()}))
    return shares


def gradients_of(stages: Sequence[Decoder]) -> dict[str, Tensor]:
    """Of all stages; those of copies are summed."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad or "experts" in name, name
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


def assert_equal_to_the_whole(case: str, mode: Mode, recompute: str = "none") -> None:
    config, text = CASES[case]
    stage = StageConfig(mode=mode, kl_weight=0.7, mtp_weight=0.3, balance_weight=0.2 if config.moe else 0)
    run = Pass(mode=mode, kl_divisor=ROWS, with_balance=config.moe is not None and mode != "warmup")
    model = made(config, mode)
    shares = whole(model, run, stage)
    if recompute != "none":
        run = dataclasses.replace(run, recompute=Checkpoints(recompute))
    stages, tasks = stages_of(model, text), tasks_of(config, run, stage)
    one_by_one(stages, tasks)
    for task, share in zip(tasks, shares, strict=True):
        assert len(task.shares) == len(stages)
        assert [one.lm is not None for one in task.shares] == [False] * (len(stages) - 1) + [True]
        torch.testing.assert_close(task.shares[-1].lm, share.lm)
        if share.mtp is not None:
            torch.testing.assert_close(task.shares[-1].mtp, share.mtp)
        for name in ("kl", "loads"):
            parts = {layer: value for one in task.shares for layer, value in getattr(one, name).items()}
            torch.testing.assert_close(parts, dict(getattr(share, name)))
        balance = [one.balance for one in task.shares if one.balance is not None]
        assert bool(balance) == (share.balance is not None)
        if balance:
            torch.testing.assert_close(sum(balance), share.balance)
    wanted = gradients_of([model])
    got = gradients_of(stages)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", CASES)
def test_stages_in_a_row_are_the_whole_model(case):
    """Micro-batches of other layouts and fewer rows, padding among them, in flight together."""
    assert_equal_to_the_whole(case, "sparse")


@pytest.mark.parametrize("mode", ["dense", "warmup", "frozen"])
@pytest.mark.parametrize("case", ["mtp before the head", "a dense stage"])
def test_in_every_mode(mode, case):
    assert_equal_to_the_whole(case, mode)


@pytest.mark.parametrize(("mode", "policy"), [("sparse", "selective"), ("sparse", "full"), ("warmup", "full")])
def test_recompute(mode, policy):
    assert_equal_to_the_whole("repeated mtp before the head", mode, policy)


def test_a_copy_of_the_embedding_has_a_part_of_its_gradient():
    """Control: the parts must be summed over the stages."""
    config, text = CASES["tied"]
    model, run, stage = made(config, "sparse"), Pass(mode="sparse", kl_divisor=ROWS), StageConfig(mtp_weight=0.3)
    whole(model, run, stage)
    stages = stages_of(model, text)
    one_by_one(stages, tasks_of(config, run, stage))
    parts = [one.model.embed_tokens.weight.grad for one in stages if one.model.embed_tokens is not None]
    wanted = model.model.embed_tokens.weight.grad
    assert len(parts) == 3
    assert all((part - wanted).norm() > 0.01 * wanted.norm() for part in parts)
    torch.testing.assert_close(torch.stack(parts).sum(0), wanted)


def test_a_fixed_backbone_sends_zeros_and_learns_nothing():
    config, text = CASES["even"]
    run, stage = Pass(mode="warmup"), StageConfig(mode="warmup")
    _, second = stages_of(made(config, "warmup"), text)
    task = tasks_of(config, run, stage)[0]
    entering = torch.randn(task.rows, 16, dtype=torch.float64, requires_grad=True)
    second(entering, task=task).backward()
    assert torch.equal(entering.grad, torch.zeros_like(entering))
    assert all((one.grad is not None) == ("indexer" in name) for name, one in second.named_parameters())


@pytest.mark.parametrize("case", ["repeated mtp before the head", "tied"])
def test_names_and_fresh_weights_are_those_of_the_whole_model(case):
    config, text = CASES[case]
    torch.manual_seed(3)
    expected = Decoder(config).state_dict()
    seen = set()
    for chunk in cut(config, parse_pipeline_layout(text)):
        torch.manual_seed(3)
        stage = DecoderStage(config, chunk)
        own = stage.state_dict()
        for name, value in own.items():
            assert torch.equal(value, expected[name]), name
        assert stage.copies == own.keys() & seen
        seen |= own.keys()
        stage.reset_indexers(torch.Generator().manual_seed(4))
        model = Decoder(config)
        model.reset_indexers(torch.Generator().manual_seed(4))
        for name, value in stage.state_dict().items():
            assert torch.equal(value, model.state_dict()[name] if "indexer" in name else expected[name]), name
    assert seen == expected.keys()


def test_a_stage_on_the_meta_device_waits_for_its_weights():
    config, text = CASES["experts"]
    with torch.device("meta"):
        stage = DecoderStage(config, cut(config, parse_pipeline_layout(text))[1])
    assert all(value.is_meta for value in stage.state_dict().values())
    stage.to_empty(device="cpu")
    stage.reset_parameters(torch.Generator().manual_seed(3))
    model = Decoder(config)
    model.reset_parameters(torch.Generator().manual_seed(3))
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in stage.state_dict().items())


def test_routing_biases_of_other_stages_are_passed_over():
    config, text = CASES["experts"]
    stage = DecoderStage(config, cut(config, parse_pipeline_layout(text))[0])
    stage.move_routing_biases({layer: torch.tensor([4, 0, 0, 0]) for layer in (1, 2, 3, 4)}, 0.5)
    assert [module.gate.e_score_correction_bias[0].item() for module in stage.modules() if isinstance(module, MoE)] == [
        -0.5
    ]


def test_without_gradients_the_last_stage_gives_the_loss():
    config, text = CASES["mtp before the head"]
    model, run = made(config, "sparse"), Pass(mode="sparse", with_kl=False)
    stages, tasks = stages_of(model, text), tasks_of(config, run, StageConfig())
    task = dataclasses.replace(tasks[0], with_mtp=False)
    with torch.no_grad():
        states: tuple[Tensor, ...] = ()
        for stage in stages[:-1]:
            states = stage(*states, task=task)
            assert len(states) == 1
        loss = stages[-1](*states, task=task)
        micro = task.micro
        hidden = model(micro.tokens, micro.layout, dataclasses.replace(run, with_mtp=False)).hidden
    torch.testing.assert_close(loss, model.lm_loss(hidden, micro.labels, LABELS))


def test_rows_of_a_part_need_their_tokens_ahead():
    """What a context-parallel rank holds: the loader shifts the whole pack, each stage takes its rows of it."""
    config, text = CASES["mtp before the head"]
    model = made(config, "dense")
    stages, task = stages_of(model, text), tasks_of(config, Pass(mode="dense"), StageConfig())[0]
    micro = task.micro
    ahead = [look_ahead(values, micro.layout, 2) for values in (micro.tokens, micro.labels)]
    wrong = dataclasses.replace(micro, tokens_ahead=ahead[0].roll(1, 1), labels_ahead=ahead[1])
    losses = []
    for one in (micro, dataclasses.replace(micro, tokens_ahead=ahead[0], labels_ahead=ahead[1]), wrong):
        own = dataclasses.replace(task, micro=one, shares=[])
        one_by_one(stages, [own])
        losses.append(own.shares[-1].mtp)
    assert torch.equal(losses[0], losses[1])
    assert not torch.allclose(losses[0], losses[2])


def test_chunks():
    chunks = cut(REPEATED, ("E", "tttt", "mmm", "L"))
    assert [(chunk.layers, chunk.depths) for chunk in chunks] == [
        (range(0), range(0)),
        (range(4), range(0)),
        (range(4, 4), range(3)),
        (range(4, 4), range(3, 3)),
    ]
    assert [chunk.norms for chunk in chunks] == [False, False, True, False]
    assert [(chunk.enters(True), chunk.leaves(True)) for chunk in chunks] == [(0, 1), (1, 1), (1, 4), (4, 0)]
    assert [(chunk.enters(False), chunk.leaves(False)) for chunk in chunks] == [(0, 1), (1, 1), (1, 1), (1, 0)]
    assert chunks[0].embedding_in == (0, 2)


@pytest.mark.parametrize(
    ("config", "chunks", "problem"),
    [
        (PLAIN, ("Ett", "tL"), "the chunks hold 3 of 't', but num_layers=4"),
        (variant({"share_every": 2}), ("Ettt", "tL"), "chunk 1.*begins with layer 3.*selection of layer 2"),
        (variant(mtp=MTPConfig(depths=2, repeated=True)), ("Ettttm", "mL"), "keep them in one"),
        (PLAIN, ("tt", "EttL"), "must begin with E and end with L"),
    ],
)
def test_refuses(config, chunks, problem):
    with pytest.raises(ConfigError, match=problem):
        cut(config, chunks)
