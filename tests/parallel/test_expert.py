"""Experts split over two processes against one that holds them all: rows that travel, gradients, loads, balance.

The processes run this file once, for all cases; what they saw is written to a folder, and the tests read it.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig, ParallelConfig
from dsattn.errors import ConfigError, InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.model.moe import MoE, sequence_balance
from dsattn.nn.state import Pass
from dsattn.parallel.expert import Exchange, split
from dsattn.parallel.gloo import one_thread_a_group
from dsattn.parallel.mesh import ParallelMesh, build_mesh
from dsattn.parallel.recompute import Checkpoints

RANKS = 2
WIDTH = 16
PLAIN = MoEConfig(experts=8, experts_per_token=3, intermediate_size=8, first_dense_layers=1)
GROUPED = dataclasses.replace(PLAIN, experts_per_token=2, groups=4, groups_per_token=2, shared_experts=0)
NOTHING = Layout.packed([], total=0)
LAYOUTS = {  # of each rank
    "packed": (Layout.packed([7, 0, 9, 1], padded=[9, 2, 9, 2], total=24), Layout.packed([5, 6])),
    "no row": (Layout.packed([7, 2]), NOTHING),
    "padding only": (Layout.packed([0], padded=[4]), Layout.packed([3], total=5)),
    "nobody": (NOTHING, Layout.packed([0], padded=[4])),
}
CASES = {
    "plain": (PLAIN, "packed", None),
    "grouped": (GROUPED, "packed", None),
    "a rank without experts to run": (PLAIN, "packed", (0, 1, 2)),
    "one expert for all": (dataclasses.replace(PLAIN, experts_per_token=1), "packed", (7,)),
    "a rank without rows": (PLAIN, "no row", None),
    "a rank of padding": (PLAIN, "padding only", None),
    "no real row anywhere": (PLAIN, "nobody", None),
}
DECODER = ModelConfig(
    vocab_size=300,
    hidden_size=WIDTH,
    num_layers=3,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6),
    dsa=DSAConfig(indexer=IndexerConfig(heads=3, head_dim=8, top_k=5, rope_dim=4), deterministic=True),
    moe=PLAIN,
    mtp=MTPConfig(depths=1),
)
POLICIES = ("none", "selective", "full")
ROWS, DIVISOR = 24, 2 * 24
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def mixture(config: MoEConfig, favoured: tuple[int, ...] | None) -> MoE:
    """In fp64, where no two experts are ever close. favoured: experts that every row goes to."""
    torch.manual_seed(3)
    moe = MoE(WIDTH, config)
    moe.reset_parameters(0.4, 0.4)
    moe.gate.e_score_correction_bias += 0.2 * torch.randn(config.experts)
    if favoured is not None:
        moe.gate.e_score_correction_bias[list(favoured)] += 9
    return moe.double()


def rows_of(layouts: tuple[Layout, ...]) -> list[torch.Tensor]:
    """Each rank's, NaN in padding."""
    torch.manual_seed(4)
    rows = [torch.randn(len(one.rows), WIDTH, dtype=torch.float64) for one in layouts]
    return [x.masked_fill(~one.real_rows[:, None], torch.nan) for x, one in zip(rows, layouts, strict=True)]


def mixture_once(moe: MoE, hidden: torch.Tensor, layout: Layout) -> SimpleNamespace:
    hidden = hidden.clone().requires_grad_()
    out, routing = moe(hidden, layout, Pass())
    torch.manual_seed(5)
    (out * torch.randn(WIDTH, dtype=out.dtype)).sum().backward()
    return SimpleNamespace(out=out.detach(), load=routing.load, of_hidden=hidden.grad)


def decoder() -> Decoder:
    torch.manual_seed(6)
    return Decoder(DECODER).double()


def decoder_once(model: Decoder, rank: int, policy: str = "none") -> dict[str, torch.Tensor]:
    """One rank's share of the losses, its gradients added; loads by layer."""
    torch.manual_seed(7)
    tokens = torch.randint(300, (RANKS, ROWS))[rank]
    run = Pass(kl_divisor=DIVISOR, with_balance=True, recompute=Checkpoints(policy))
    layout = Layout.packed([11, 13])
    out = model(tokens, layout, run)
    labels = tokens.roll(-1)
    losses = [model.lm_loss(out.hidden, labels, DIVISOR), out.kl_sum, out.balance_sum]
    losses.append(model.mtp_losses(out.ahead, labels, layout, DIVISOR).sum())
    torch.stack(losses).sum().backward()
    return {"losses": torch.stack(losses).detach()} | {str(i): one.load for i, one in out.routing.items()}


def whole(gradient: torch.Tensor | None, *, summed: bool) -> torch.Tensor | None:
    """Of all ranks together; summed: replicated parameters, of whose gradient each rank has a part."""
    if gradient is None or isinstance(gradient, DTensor):
        return None if gradient is None else gradient.full_tensor()
    gradient = gradient.clone()
    if summed:
        dist.all_reduce(gradient)
    return gradient


def gradients(model: torch.nn.Module, *, summed: bool) -> dict[str, torch.Tensor | None]:
    return {name: whole(parameter.grad, summed=summed) for name, parameter in model.named_parameters()}


def work_on_mixtures(mesh: ParallelMesh, rank: int) -> dict[str, object]:
    seen = {}
    for name, (config, layouts, favoured) in CASES.items():
        moe, layout = mixture(config, favoured), LAYOUTS[layouts][rank]
        split(moe, mesh)
        once = mixture_once(moe, rows_of(LAYOUTS[layouts])[rank], layout)
        part = moe.experts.down_proj.to_local().shape[0]
        seen[name] = vars(once) | {"grads": gradients(moe, summed=True), "part": part}
    return seen


def work_on_decoders(mesh: ParallelMesh, rank: int, folder: Path) -> dict[str, object]:
    seen, exchanges = {}, []
    counts = Exchange._counts
    Exchange._counts = lambda self, load: exchanges.append(1) or counts(self, load)
    for policy in POLICIES:
        model = decoder()
        split(model, mesh)
        exchanges.clear()
        shares = decoder_once(model, rank, policy)
        dist.all_reduce(shares["losses"])
        seen[policy] = shares | {"grads": gradients(model, summed=True), "exchanges": len(exchanges)}
    Exchange._counts = counts
    assert all(parameter.grad is not None for parameter in model.parameters())
    dcp.save(model.state_dict(), checkpoint_id=str(folder / "checkpoint"))
    return seen


def balance_shares(rank: int, sums: bool) -> dict[str, torch.Tensor]:
    """Of zigzag rows: documents of one row a chunk, an empty one, a long one; with padding."""
    layout = Layout.packed([3, 0, 17], padded=[4, 0, 20], total=28, cp_size=RANKS, cp_rank=rank)
    scores = zigzag_scores()[layout.rows].detach().requires_grad_()

    def total(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    loss = sequence_balance(scores, 3, layout, 20, total if sums else lambda x: x)
    loss.backward()
    return {"loss": loss.detach(), "grad": scores.grad, "rows": layout.rows}


def zigzag_scores() -> torch.Tensor:
    torch.manual_seed(8)
    return torch.rand(28, 8, dtype=torch.float64)


@one_thread_a_group()
def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    mesh = build_mesh(ParallelConfig(dp_shard=RANKS, ep=RANKS), "cpu")
    seen = {"mixtures": work_on_mixtures(mesh, rank), "decoders": work_on_decoders(mesh, rank, folder)}
    seen |= {"balance": balance_shares(rank, sums=True), "stranger": balance_shares(rank, sums=False)}
    three = torch.nn.ModuleDict({"mlp": MoE(WIDTH, dataclasses.replace(PLAIN, experts=3))})
    try:
        split(three, mesh)
    except InputError as error:
        seen["refused"] = str(error)
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What two processes wrote."""
    folder = tmp_path_factory.mktemp("expert")
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def seen(folder) -> list[dict]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def assert_same(got: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_a_mixture_is_that_of_one_process(name, seen):
    config, layouts, favoured = CASES[name]
    moe, layouts = mixture(config, favoured), LAYOUTS[layouts]
    alone = [mixture_once(moe, *one) for one in zip(rows_of(layouts), layouts, strict=True)]
    ranks = [one["mixtures"][name] for one in seen]
    for got, expected in zip(ranks, alone, strict=True):
        torch.testing.assert_close(got["out"], expected.out, **TOLERANCE)
        torch.testing.assert_close(got["of_hidden"], expected.of_hidden, **TOLERANCE)
        assert torch.equal(got["load"], expected.load)
        assert_same(got["grads"], gradients(moe, summed=False))
        assert got["part"] == config.experts // RANKS
    if favoured is not None:
        assert alone[0].load.nonzero().flatten().tolist() == list(favoured), "the other rank's experts have no row"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decoder_is_that_of_one_process(policy, seen):
    model = decoder()
    alone = [decoder_once(model, rank) for rank in range(RANKS)]
    for rank, expected in enumerate(alone):
        got = seen[rank]["decoders"][policy]
        torch.testing.assert_close(got["losses"], alone[0]["losses"] + alone[1]["losses"], **TOLERANCE)
        assert_same(got["grads"], gradients(model, summed=False))
        assert all(torch.equal(got[layer], load) for layer, load in expected.items() if layer != "losses")
        assert got["exchanges"] == 3, "two layers and MTP's; a replay has the counts of the first pass"


def test_a_checkpoint_of_two_ranks_loads_into_one_process(folder):
    model, expected = Decoder(DECODER).double(), decoder()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(model.state_dict(), checkpoint_id=str(folder / "checkpoint"))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_the_balance_loss_of_documents_over_two_ranks(seen):
    scores = zigzag_scores().requires_grad_()
    loss = sequence_balance(scores, 3, Layout.packed([3, 0, 17], padded=[4, 0, 20], total=28), 20)
    loss.backward()
    parts = [one["balance"] for one in seen]
    torch.testing.assert_close(parts[0]["loss"] + parts[1]["loss"], loss.detach())
    for part in parts:
        torch.testing.assert_close(part["grad"], scores.grad[part["rows"]])
    alone = sum(one["stranger"]["loss"] for one in seen)
    assert not torch.isclose(alone, loss, rtol=1e-3), "counts of one rank's rows are another function"


def test_experts_that_cannot_be_shared_evenly_are_refused(seen):
    assert all("mlp.experts has 3 experts, which 2 ranks of ep cannot share evenly" in one["refused"] for one in seen)


def test_ranks_that_hold_the_same_rows_are_refused():
    with pytest.raises(ConfigError, match="ep=2 with tp=2 needs sequence_parallel=True: else experts get rows 2 times"):
        ParallelConfig(tp=2, ep=2, sequence_parallel=False)


def test_one_rank_keeps_its_experts():
    moe = mixture(PLAIN, None)
    split(moe, ParallelMesh())
    assert moe.experts.exchange is None
    assert not isinstance(moe.experts.down_proj, DTensor)


if __name__ == "__main__":
    rank = next((rank for rank in range(1, RANKS) if os.fork() == 0), 0)  # forked: torch is imported once
    signal.alarm(120)
    main(rank, Path(sys.argv[1]))
    if rank == 0:
        assert not any(os.wait()[1] for _ in range(1, RANKS))
