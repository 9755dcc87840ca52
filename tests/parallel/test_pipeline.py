"""Two pipeline ranks against one process: losses and gradients of every schedule, with several micro-batches in flight.

The processes run this file once, for all cases; what they saw is written to a folder, and the tests read it.
"""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.config import (
    DSAConfig,
    IndexerConfig,
    MLAConfig,
    Mode,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
    PipelineSchedule,
    Recompute,
    StageConfig,
    TrainConfig,
    parse_pipeline_layout,
)
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.stage import DecoderStage, MicroBatch, Share, cut
from dsattn.nn.state import Pass
from dsattn.parallel.gloo import one_thread_a_group
from dsattn.parallel.mesh import ParallelMesh, build_mesh
from dsattn.parallel.pipeline import Pipeline
from dsattn.selection import Selection
from dsattn.training.stages import set_mode

RANKS = 2
PLAIN = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=4,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4), deterministic=True),
    init_std=0.3,
)
SHARING = dataclasses.replace(PLAIN, dsa=dataclasses.replace(PLAIN.dsa, share_every=2, multi_layer_teacher=True))
REPEATED = MTPConfig(depths=2, repeated=True, shared_components=("latent_kv", "sparse_attention_index"))
EXPERTS = MoEConfig(experts=4, experts_per_token=2, intermediate_size=8, first_dense_layers=1)


class Case(NamedTuple):
    config: ModelConfig
    layout: str
    mode: Mode = "sparse"
    recompute: Recompute = "none"
    batches: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def schedule(self) -> PipelineSchedule:
        return "1F1B" if self.layout.count("|") < RANKS else "Interleaved1F1B"


def variant(config: ModelConfig = PLAIN, **changes: Any) -> ModelConfig:
    return dataclasses.replace(config, **changes)


CASES = {
    "1F1B": Case(PLAIN, "Ett|ttL", batches=4),
    "interleaved": Case(PLAIN, "Et|t|t|tL", batches=4),
    "shared selections, full recompute": Case(SHARING, "Ett|ttL", recompute="full", batches=3),
    "mtp alone on the last, full recompute": Case(variant(SHARING, mtp=REPEATED), "Et*4|m*2L", recompute="full"),
    "mtp before the head, interleaved": Case(variant(mtp=MTPConfig(depths=2)), "E|tttt|m|mL", recompute="selective"),
    "tied": Case(variant(tie_embeddings=True), "Ett|ttL"),
    "tied, mtp, interleaved": Case(variant(tie_embeddings=True, mtp=MTPConfig(depths=1)), "E|tttt|m|L", batches=4),
    "experts": Case(variant(moe=EXPERTS, mtp=MTPConfig(depths=1)), "Ettt|tmL"),
    "warm-up": Case(variant(tie_embeddings=True, mtp=REPEATED), "Ettt|tmmL", "warmup", batches=3),
    "warm-up, interleaved, nothing to learn in a stage": Case(PLAIN, "E|tt|tt|L", "warmup", "full"),
    "dense": Case(variant(mtp=MTPConfig(depths=1)), "Ett|ttmL", "dense"),
    "frozen": Case(PLAIN, "Ettt|tL", "frozen"),
    "bfloat16": Case(variant(mtp=MTPConfig(depths=1)), "Ett|ttmL", dtype="bfloat16"),
}
LAYOUTS = (
    Layout.packed([13, 0, 1, 9], total=26),
    Layout.packed([7, 12], padded=[9, 12], side="left"),
    Layout.causal(24),
    Layout.packed([2, 5, 3, 16]),
)
LABELS, ROWS = 67, 71
WEIGHTS = {"kl_weight": 0.7, "mtp_weight": 0.3}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def micro_batches(count: int) -> list[MicroBatch]:
    """Of unequal rows."""
    made = []
    for number, layout in enumerate(LAYOUTS[:count]):
        generator = torch.Generator().manual_seed(number)
        tokens, labels = torch.randint(PLAIN.vocab_size, (2, len(layout.rows)), generator=generator)
        made.append(MicroBatch(tokens, labels.masked_fill(~layout.real_rows, -100), layout))
    return made


def whole_model(case: Case) -> Decoder:
    model = Decoder(case.config)
    model.reset_parameters(torch.Generator().manual_seed(5))
    set_mode(model, case.mode)
    return model


def stage_config(case: Case) -> StageConfig:
    return StageConfig(mode=case.mode, balance_weight=0.2 if case.config.moe else 0.0, **WEIGHTS)


def pipeline_of(case: Case, mesh: ParallelMesh) -> Pipeline:
    model = whole_model(case)
    chunks = cut(case.config, parse_pipeline_layout(case.layout))
    stages = []
    for chunk in chunks[mesh.rank("pp") :: RANKS]:
        stage = DecoderStage(case.config, chunk)
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(model.get_parameter(name).requires_grad)
        stages.append(stage)
    return Pipeline(stages, mesh, case.schedule)


def gradients_of(stages: tuple[DecoderStage, ...]) -> dict[str, Tensor | None]:
    """By chunk and name: a copy has a gradient of its own."""
    return {
        f"{stage.chunk.number} {name}": parameter.grad
        for stage in stages
        for name, parameter in stage.named_parameters()
    }


def train(case: Case, mesh: ParallelMesh) -> dict[str, Any]:
    pipe, batch = pipeline_of(case, mesh), micro_batches(case.batches)
    settings = TrainConfig(recompute=case.recompute, dtype=case.dtype)
    gc.disable()
    share = pipe.step(batch, (LABELS, ROWS), stage_config(case), settings)
    left = sum(type(one) is Selection for one in gc.get_objects())
    gc.enable()
    return {"share": share, "gradients": gradients_of(pipe.stages), "left": left}


def train_and_evaluate_in_turn(mesh: ParallelMesh) -> dict[str, Any]:
    """Buffers are used again, gradients added, and evaluation may have one micro-batch, and an odd number of them."""
    seen = {}
    for name in ("tied", "tied, mtp, interleaved"):
        case = CASES[name]
        pipe = pipeline_of(case, mesh)
        losses = []
        for batches in (case.batches, 1, 3, case.batches):
            if batches == case.batches:
                pipe.step(micro_batches(batches), (LABELS, ROWS), stage_config(case), TrainConfig())
            for stage in pipe.stages:
                stage.eval()
            probed: list[int] = []
            run = Pass(mode="sparse", probe=lambda layer, _, probed=probed: probed.append(layer))
            losses.append((batches, pipe.evaluate(micro_batches(batches), run, LABELS), probed))
            for stage in pipe.stages:
                stage.train()
        seen[name] = {"losses": losses, "gradients": gradients_of(pipe.stages)}
    return seen


def errors(mesh: ParallelMesh) -> list[str]:
    one, four = pipeline_of(CASES["1F1B"], mesh), pipeline_of(CASES["interleaved"], mesh)
    rest = ((LABELS, ROWS), StageConfig(), TrainConfig())
    attempts = (
        lambda: one.step(micro_batches(1), *rest),
        lambda: four.step(micro_batches(3), *rest),
        lambda: one.evaluate([], Pass(), LABELS),
        lambda: Pipeline(one.stages, mesh, "Interleaved1F1B"),
        lambda: Pipeline(four.stages[::-1], mesh, "Interleaved1F1B"),
        lambda: Pipeline((), mesh),
        lambda: Pipeline(one.stages, ParallelMesh()),
        lambda: failing_step(one),
    )
    said = []
    for attempt in attempts:
        try:
            attempt()
        except InputError as error:
            said.append(str(error))
    return said


class Fails:
    """A schedule in which a stage raises; torch wraps that."""

    def _step_microbatches(self, **_: Any) -> None:
        raise RuntimeError("failed to run forward") from InputError("what the stage said")


def failing_step(pipe: Pipeline) -> None:
    rest = (micro_batches(2), (LABELS, ROWS), StageConfig(), TrainConfig())
    pipe.step(*rest)
    pipe._made[True] = dataclasses.replace(pipe._made[True], schedule=Fails())
    try:
        pipe.step(*rest)
    finally:
        pipe.step(*rest)  # nothing is left of it


@one_thread_a_group()
def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    mesh = build_mesh(ParallelConfig(pp=RANKS), "cpu")
    seen = {name: train(case, mesh) for name, case in CASES.items()}
    torch.save(
        {"cases": seen, "turns": train_and_evaluate_in_turn(mesh), "errors": errors(mesh)}, folder / f"{rank}.pt"
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes wrote."""
    folder = tmp_path_factory.mktemp("pipeline")
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def one_process(case: Case) -> tuple[Decoder, Share]:
    """Gradients, and the sums of the losses."""
    model, stage = whole_model(case), stage_config(case)
    balances = case.config.moe is not None and case.mode != "warmup"
    run = Pass(mode=case.mode, kl_divisor=ROWS, with_balance=balances)
    lm, mtp, balance, kl, loads = 0.0, 0.0, 0.0, {}, {}
    for micro in micro_batches(case.batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
            out = model(micro.tokens, micro.layout, run)
            losses = [model.lm_loss(out.hidden, micro.labels, LABELS)]
            if out.ahead:
                ahead = model.mtp_losses(out.ahead, micro.labels, micro.layout, LABELS)
                mtp = mtp + ahead.detach()
                losses.append(stage.mtp_weight * ahead.mean())
        lm = lm + losses[0].detach()
        if case.mode == "warmup":
            losses = []
        if out.kl_sum is not None:
            losses.append(stage.kl_weight * out.kl_sum)
        if out.balance_sum is not None:
            losses.append(stage.balance_weight * out.balance_sum)
            balance = balance + out.balance_sum.detach()
        torch.stack(losses).sum().backward()
        kl = {layer: kl.get(layer, 0) + value.detach() for layer, value in out.kl.items()}
        loads = {layer: loads.get(layer, 0) + one.load for layer, one in out.routing.items()}
    return model, Share(lm, mtp, kl, balance, loads)


def assert_gradients(seen: list[dict[str, Tensor | None]], model: Decoder, factor: int = 1) -> None:
    held = set()
    for name, gradient in (item for rank in seen for item in rank.items()):
        whole = model.get_parameter(name.split()[1])
        held.add(name.split()[1])
        assert (gradient is None) == (whole.grad is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, factor * whole.grad, msg=lambda text: f"{name}: {text}", **TOLERANCE)  # noqa: B023
    assert held == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_process(seen, name):
    case = CASES[name]
    model, share = one_process(case)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert learning
    assert all(parameter.grad is not None for parameter in learning)
    assert_gradients([rank["cases"][name]["gradients"] for rank in seen], model)
    for rank in seen:
        got = rank["cases"][name]["share"]
        assert rank["cases"][name]["left"] == 0, "a step leaves selections behind"
        for field in ("kl", "loads"):
            torch.testing.assert_close(getattr(got, field), getattr(share, field), check_dtype=False, **TOLERANCE)
        assert got.lm.item() == pytest.approx(share.lm.item(), rel=1e-5)
        assert (got.mtp is None) == (case.config.mtp.depths == 0)
        if case.config.mtp.depths:
            torch.testing.assert_close(got.mtp, share.mtp, check_dtype=False, **TOLERANCE)
        assert (got.balance is None) == (case.config.moe is None)
        if case.config.moe:
            assert got.balance.item() == pytest.approx(share.balance.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["tied", "tied, mtp, interleaved"])
def test_copies_of_the_embedding_have_the_same_bits(seen, name):
    """So one optimiser step after the other keeps them equal."""
    found = [gradient for rank in seen for one, gradient in rank["cases"][name]["gradients"].items() if "embed" in one]
    assert len(found) == (2 if name == "tied" else 3)
    assert all(torch.equal(gradient, found[0]) for gradient in found)


@pytest.mark.parametrize("name", ["tied", "tied, mtp, interleaved"])
def test_steps_and_evaluations_in_turn(seen, name):
    case = CASES[name]
    model, _ = one_process(case)
    assert_gradients([rank["turns"][name]["gradients"] for rank in seen], model, factor=2)
    model.eval()
    probed = [[probed for _, _, probed in rank["turns"][name]["losses"]] for rank in seen]
    for number, (batches, share, _) in enumerate(seen[0]["turns"][name]["losses"]):
        loss = torch.zeros(())
        with torch.no_grad():
            for micro in micro_batches(batches):
                loss += model.lm_loss(model(micro.tokens, micro.layout).hidden, micro.labels, LABELS)
        assert share.lm.item() == pytest.approx(loss.item(), rel=1e-5)
        assert share.mtp is None
        assert not share.kl
        assert seen[1]["turns"][name]["losses"][number][1].lm.item() == share.lm.item()
        assert sorted(probed[0][number] + probed[1][number]) == sorted(batches * [0, 1, 2, 3])


def test_errors(seen):
    for rank in seen:
        for said, wanted in zip(
            rank["errors"],
            (
                "1 micro-batches were given: 1F1B needs at least pp=2",
                "3 micro-batches were given: Interleaved1F1B needs a multiple of pp=2",
                "micro_batches is empty",
                "schedule='Interleaved1F1B' does not fit 1 stages",
                "give c % pp == rank",
                "stages of chunks []",
                "mesh has one pipeline rank",
                "what the stage said",
            ),
            strict=True,
        ):
            assert wanted in said


if __name__ == "__main__":
    warnings.simplefilter("error")
    rank = next((rank for rank in range(1, RANKS) if os.fork() == 0), 0)  # forked: torch is imported once
    signal.alarm(240)
    main(rank, Path(sys.argv[1]))
    if rank == 0:
        assert not any(os.wait()[1] for _ in range(1, RANKS))
