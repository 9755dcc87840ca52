"""Heads over two and four processes against one that has them all, with rows split too: losses, gradients, selections.

Four processes run this file once, for all cases; what they saw is written to a folder, and the tests read it.
Everything is in fp64, where no two scores are ever close.
"""

import dataclasses
import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn.backends import HeadRanks
from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
)
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.mtp import look_ahead
from dsattn.nn.state import Observation, Pass
from dsattn.parallel.context import ranks_of
from dsattn.parallel.gloo import one_thread_a_group
from dsattn.parallel.mesh import ParallelMesh, build_mesh
from dsattn.parallel.recompute import Checkpoints
from dsattn.parallel.tensor import is_split, partial_parameters, reduce_replicated, split
from dsattn.training.stages import set_mode

RANKS = 4
INDEXER = IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)
HIDDEN = dataclasses.replace(INDEXER, query_from="hidden")
PLAIN = ModelConfig(
    vocab_size=300,
    hidden_size=16,
    num_layers=2,
    intermediate_size=24,
    attention=MLAConfig(heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=INDEXER, deterministic=True),
    init_std=0.3,
)
GROUPED = GQAConfig(heads=8, kv_heads=4, head_dim=8, rope_dim=4, qk_norm=True, output_gate="elementwise", sink=True)
MODELS = {
    "mla": PLAIN,
    "no query latent, a gate, sinks": dataclasses.replace(
        PLAIN,
        attention=dataclasses.replace(PLAIN.attention, q_lora_rank=None, output_gate="headwise", sink=True),
        dsa=DSAConfig(indexer=HIDDEN, deterministic=True),
    ),
    "gqa": dataclasses.replace(PLAIN, attention=GROUPED, dsa=DSAConfig(indexer=HIDDEN, deterministic=True)),
    "attention and loss at once": dataclasses.replace(PLAIN, dsa=DSAConfig(indexer=INDEXER, deterministic=False)),
    "kpool": dataclasses.replace(PLAIN, dsa=DSAConfig(indexer=dataclasses.replace(INDEXER, pool_size=2))),
    "linear, sliding, experts": dataclasses.replace(
        PLAIN,
        num_layers=3,
        layer_types=("linear", "sliding", "dsa"),
        sliding_window=5,
        kda=KDAConfig(heads=2, head_dim=4),
        moe=MoEConfig(experts=4, experts_per_token=2, intermediate_size=8, first_dense_layers=1),
    ),
    "mtp shares, so do layers, all teach": dataclasses.replace(
        PLAIN,
        num_layers=3,
        dsa=DSAConfig(indexer=INDEXER, deterministic=True, share_every=2, multi_layer_teacher=True),
        mtp=MTPConfig(depths=2, repeated=True, shared_components=("latent_kv", "sparse_attention_index")),
    ),
}
PACKS = {  # (lengths, rows that each occupies)
    "packed": ((1, 2, 3, 7, 0, 11), (8, 8, 8, 8, 0, 16)),
    "one document": ((56,), (56,)),
    "nothing for some": ((2,), (8,)),
}
ROWS = 56
WHOLE, SHARDS, SHARED = "whole rows", "row shards", "row shards, whole indexer"
FLAGS = {
    WHOLE: {"sequence_parallel": False},
    SHARDS: {},
    SHARED: {"split_indexer_rows": False},
}
CASES = {  # (cp, tp, rows, model, mode, pack, recompute)
    f"cp{cp} tp{tp} {rows}: {model} {mode} {pack} {policy}": (cp, tp, rows, model, mode, pack, policy)
    for cp, tp, rows, model, mode, pack, policy in (
        (1, 2, WHOLE, "mla", "sparse", "packed", "none"),
        (1, 2, SHARDS, "mla", "sparse", "one document", "none"),
        (1, 2, WHOLE, "mla", "warmup", "one document", "full"),
        (1, 2, SHARDS, "mla", "warmup", "packed", "selective"),
        (1, 2, SHARED, "mla", "sparse", "packed", "selective"),
        (1, 2, SHARED, "mla", "warmup", "packed", "none"),
        (1, 2, SHARDS, "attention and loss at once", "sparse", "packed", "none"),
        (1, 2, SHARED, "attention and loss at once", "sparse", "one document", "none"),
        (1, 2, WHOLE, "gqa", "sparse", "packed", "full"),
        (1, 2, SHARDS, "gqa", "sparse", "packed", "none"),
        (1, 2, SHARED, "gqa", "warmup", "one document", "none"),
        (1, 2, SHARDS, "gqa", "warmup", "packed", "none"),
        (1, 2, SHARDS, "kpool", "frozen", "one document", "full"),
        (1, 2, WHOLE, "no query latent, a gate, sinks", "sparse", "packed", "none"),
        (1, 2, SHARDS, "no query latent, a gate, sinks", "dense", "packed", "none"),
        (1, 2, WHOLE, "linear, sliding, experts", "sparse", "packed", "none"),
        (1, 2, SHARDS, "linear, sliding, experts", "sparse", "packed", "full"),
        (1, 2, SHARDS, "linear, sliding, experts", "sparse", "one document", "none"),
        (1, 2, SHARDS, "mtp shares, so do layers, all teach", "sparse", "packed", "selective"),
        (1, 2, WHOLE, "mtp shares, so do layers, all teach", "warmup", "packed", "none"),
        (1, 2, SHARDS, "mtp shares, so do layers, all teach", "warmup", "packed", "full"),
        (2, 2, WHOLE, "mla", "sparse", "packed", "full"),
        (2, 2, SHARDS, "mla", "sparse", "packed", "none"),
        (2, 2, SHARED, "gqa", "sparse", "one document", "none"),
        (2, 2, SHARDS, "gqa", "warmup", "packed", "selective"),
        (2, 2, SHARDS, "mtp shares, so do layers, all teach", "warmup", "one document", "full"),
        (2, 2, SHARDS, "attention and loss at once", "sparse", "packed", "selective"),
        (1, 4, SHARDS, "mla", "sparse", "nothing for some", "selective"),
        (1, 4, WHOLE, "gqa", "sparse", "packed", "none"),
        (1, 4, SHARDS, "mtp shares, so do layers, all teach", "sparse", "packed", "full"),
    )
}
EXACT = {"rtol": 1e-9, "atol": 1e-12}

Seen = dict[str, Tensor]


def new_model(name: str, mode: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(MODELS[name]).double().train()
    set_mode(model, mode)
    return model


def layout_of(pack: str, mesh: ParallelMesh | None = None) -> Layout:
    mesh = mesh or ParallelMesh()
    lengths, padded = PACKS[pack]
    layout = Layout.packed(lengths, padded=padded, total=ROWS, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"))
    return layout.deal_rows(mesh.rank("tp"), mesh.size("tp")) if sharded(mesh) else layout


def sharded(mesh: ParallelMesh) -> bool:
    return mesh.size("tp") > 1 and mesh.config.sequence_parallel


def once(model: Decoder, pack: str, layout: Layout, mode: str, policy: str = "none", ranks: Any = None) -> Seen:
    """This rank's share of losses, gradients left in the model, and what was selected for the rows its heads read."""
    torch.manual_seed(1)
    whole = layout_of(pack)
    tokens = torch.randint(300, (ROWS,))
    labels = look_ahead(tokens, whole, 1)[0]
    depths = model.config.mtp.depths
    tokens_ahead, labels_ahead = (look_ahead(one, whole, depths)[:, layout.rows] for one in (tokens, labels))
    count, rows = (labels >= 0).sum().clamp(min=1), max(whole.num_real_rows, 1)
    recompute = None if policy == "none" else Checkpoints(policy)
    run = Pass(mode=mode, kl_divisor=rows, recompute=recompute, ranks=ranks)
    out = model(tokens[layout.rows], layout, run, tokens_ahead=tokens_ahead)
    losses = {"lm": model.lm_loss(out.hidden, labels[layout.rows], count)}
    losses |= {f"kl of {layer}": value for layer, value in out.kl.items()}
    if out.ahead:
        more = model.mtp_losses(out.ahead, labels[layout.rows], layout, count, labels_ahead=labels_ahead)
        losses["mtp"] = more.mean()
    torch.stack([one for one in losses.values() if one.requires_grad]).sum().backward()
    seen = {name: value.detach() for name, value in losses.items()}
    for layer, selection in out.selections.items():
        chosen = torch.zeros(ROWS, selection.width, dtype=torch.int64)
        chosen[(layout.whole or layout).rows] = selection.index.long()
        seen[f"selection of {layer}"] = chosen
    return seen


def gradients(model: Decoder) -> Seen:
    """By name, whole."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        f"gradient of {name}": (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in found.items()
    }


# What the processes do.


def run_cases(meshes: dict[tuple[int, int, str], ParallelMesh]) -> Iterator[tuple[str, Any]]:
    """Cases of two ranks are dealt to the two pairs of them."""
    for number, (name, (cp, tp, rows, model, mode, pack, policy)) in enumerate(CASES.items()):
        mesh = meshes[cp, tp, rows]
        if number % mesh.size("batch") == mesh.rank("batch"):
            made = new_model(model, mode)
            split(made, mesh)
            seen = once(made, pack, layout_of(pack, mesh), mode, policy, ranks_of(mesh, check=True))
            reduce_replicated(made, mesh)
            places = {one: mesh.rank(one) for one in ("cp", "tp")}
            yield name, seen | gradients(made) | places


def averaged(mesh: ParallelMesh) -> Seen:
    """Gradients of replicated weights, averaged where they must be summed."""
    model = new_model("mla", "sparse")
    split(model, mesh)
    once(model, "packed", layout_of("packed", mesh), "sparse", ranks=ranks_of(mesh))
    reduce_replicated(model, mesh)
    for _, parameter in partial_parameters(model, sequence_parallel=True):
        parameter.grad /= mesh.size("tp")
    return gradients(model)


def unequal(mesh: ParallelMesh) -> str:
    """What the check says where one rank's indexer differs. With row shards all would gather the same keys."""
    model = new_model("mla", "frozen")
    split(model, mesh)
    if mesh.rank("tp") == 1:
        torch.nn.init.normal_(model.indexers()[0].wk.weight)
    with pytest.raises(InputError) as caught:
        once(model, "one document", layout_of("one document", mesh), "frozen", ranks=ranks_of(mesh, check=True))
    return str(caught.value)


def observed(mesh: ParallelMesh) -> list[tuple[int, ...]]:
    """Sizes in what a probe sees: rows of q, rows of the indexer's q, rows of the selection, heads."""
    model = new_model("mla", "sparse")
    split(model, mesh)
    sizes = []

    def probe(_: int, what: Observation) -> None:
        rows = (what.layout.rows, what.q, what.index.q, what.index.w, what.selection.index)
        sizes.append((*map(len, rows), what.q.shape[1]))

    layout = layout_of("packed", mesh)
    with torch.no_grad():
        model(torch.zeros_like(layout.rows), layout, Pass(probe=probe, ranks=ranks_of(mesh)))
    return sizes


class Sent(TorchDispatchMode):
    """Names of the collectives that layers begin; those inside an operation are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.names.add(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


def targets(meshes: dict[str, ParallelMesh]) -> dict[tuple[str, str, str], tuple[set[str], list[tuple[int, ...]]]]:
    """What travels in a step of two layers, and each sum of a target: (ranks that share rows, rows in, rows out)."""
    found, begin = {}, HeadRanks.begin
    for rows, mesh in meshes.items():
        for mode in ("warmup", "sparse"):
            for policy in ("none", "full"):
                model = new_model("mla", mode)
                split(model, mesh)
                sums: list[tuple[int, ...]] = []

                def noted(ranks: HeadRanks, x: Tensor, sums: list[tuple[int, ...]] = sums) -> Callable[[], Tensor]:
                    out = begin(ranks, x)()
                    sums.append((ranks.shards, len(x), len(out)))
                    return lambda: out

                with pytest.MonkeyPatch.context() as patch, Sent() as sent:
                    patch.setattr(HeadRanks, "begin", noted)
                    once(model, "packed", layout_of("packed", mesh), mode, policy, ranks_of(mesh))
                found[rows, mode, policy] = sent.names, sums
    return found


def parts(mesh: ParallelMesh) -> dict[str, Any]:
    """Shapes of the parts of split weights; a model on no device; names of what is reduced without row shards."""
    model = new_model("gqa", "sparse")
    split(model, mesh)
    with torch.device("meta"):
        elsewhere = Decoder(PLAIN)
    split(elsewhere, mesh)
    return {
        "shapes": {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if is_split(p)},
        "meta": elsewhere.model.layers[0].self_attn.kv_b_proj.weight.to_local().shape[0],
        "partial": [name for name, _ in partial_parameters(model, sequence_parallel=False)],
    }


def refusals(mesh: ParallelMesh, whole_rows: ParallelMesh) -> list[str]:
    """What this rank says to calls that do not fit. Each is refused before anything is sent."""
    model, three = new_model("mla", "sparse"), new_model("mla", "sparse")
    split(model, mesh)
    three.model.layers[1].self_attn.config = dataclasses.replace(PLAIN.attention, heads=3)
    three.model.layers[0].mlp.gate_proj.out_features = 7
    layout, ranks = layout_of("packed", mesh), ranks_of(mesh)
    said = []
    for call in (
        lambda: model(torch.zeros(ROWS, dtype=torch.long), layout_of("packed"), Pass(ranks=ranks, kl_divisor=1)),
        lambda: model(torch.zeros_like(layout.rows), layout, Pass(ranks=ranks_of(whole_rows), kl_divisor=1)),
        lambda: model(torch.zeros(ROWS, dtype=torch.long), layout_of("packed"), Pass()),
        lambda: split(three, mesh),
    ):
        try:
            call()
        except InputError as error:
            said.append(str(error))
    return said


@one_thread_a_group()
def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    meshes = {}
    for cp, tp in ((1, 2), (2, 2), (1, 4)):
        mesh = build_mesh(ParallelConfig(dp_replicate=RANKS // (cp * tp), cp=cp, tp=tp), "cpu")
        for rows, flags in FLAGS.items():
            meshes[cp, tp, rows] = dataclasses.replace(mesh, config=dataclasses.replace(mesh.config, **flags))
    seen: dict[str, Any] = dict(run_cases(meshes))
    pair, whole_rows = meshes[1, 2, SHARDS], meshes[1, 2, WHOLE]
    seen |= {"averaged": averaged(pair), "unequal": unequal(whole_rows), "observed": observed(pair)}
    seen |= {"parts": parts(pair), "refusals": refusals(pair, whole_rows)}
    seen |= {"targets": targets({rows: meshes[1, 2, rows] for rows in FLAGS})}
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()


# The tests.


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the four processes saw."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(seen, name):
    cp, tp, rows, model, mode, pack, policy = CASES[name]
    whole = new_model(model, mode)
    alone = once(whole, pack, layout_of(pack), mode, policy) | gradients(whole)
    found = [one[name] for one in seen if name in one]
    assert len(found) == cp * tp
    for what, right in alone.items():
        parts = torch.stack([one[what] for one in sorted(found, key=lambda one: (one["cp"], one["tp"]))])
        parts = parts.unflatten(0, (cp, tp))
        if what.startswith(("gradient", "selection")) or rows == WHOLE:  # the same on every tp rank
            assert (parts == parts[:, :1]).all() or torch.allclose(parts, parts[:, :1], **EXACT)
            parts = parts[:, :1]
        torch.testing.assert_close(parts.sum((0, 1)), right, **EXACT, msg=lambda said, what=what: f"{what}: {said}")
    assert {*found[0]} - {"cp", "tp"} == {*alone}


def test_an_average_is_seen(seen):
    whole = new_model("mla", "sparse")
    once(whole, "packed", layout_of("packed"), "sparse")
    wrong = [what for what, right in gradients(whole).items() if not torch.allclose(seen[0]["averaged"][what], right)]
    assert len(wrong) > 20
    assert not [what for what in wrong if "o_proj" in what or "q_b_proj" in what]


def test_ranks_that_select_different_keys_are_found(seen):
    for one in seen:
        assert "tensor-parallel ranks selected different keys in" in one["unequal"]
        assert "row(s)" in one["unequal"]


def test_a_probe_sees_all_rows_and_the_heads_here(seen):
    assert seen[0]["observed"] == [(ROWS,) * 5 + (2,)] * 2


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("mode", ["warmup", "sparse"])
@pytest.mark.parametrize("rows", FLAGS)
def test_the_target_is_summed_from_heads_to_rows(seen, rows, mode, policy):
    """One sum a layer, and where the target is not kept another for the backward; never once more for a replay.

    Queries stay where they are.
    """
    names, sums = seen[0]["targets"][rows, mode, policy]
    assert "all_to_all_single" not in names
    times = 2 * (2 if mode == "warmup" else 1)
    assert sums == [(2, ROWS, ROWS // 2) if rows == SHARDS else (1, ROWS, ROWS)] * times


def test_weights_are_split_by_heads_and_channels(seen):
    shapes = {name.removeprefix("model.layers.0."): shape for name, shape in seen[3]["parts"]["shapes"].items()}
    assert {name: shape for name, shape in shapes.items() if not name.startswith("model")} == {
        "self_attn.sinks": (4,),
        "self_attn.q_proj.weight": (32, 16),
        "self_attn.k_proj.weight": (16, 16),
        "self_attn.v_proj.weight": (16, 16),
        "self_attn.gate_proj.weight": (32, 16),
        "self_attn.o_proj.weight": (16, 32),
        "mlp.gate_proj.weight": (12, 16),
        "mlp.up_proj.weight": (12, 16),
        "mlp.down_proj.weight": (16, 12),
    }
    assert seen[0]["parts"]["meta"] == 4 * (4 + 4) // 2
    norms = [name for name in seen[0]["parts"]["partial"] if name.startswith("model.layers.0.")]
    assert norms == ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"]


def test_refuses(seen):
    for rank, one in enumerate(seen):
        no_shard, a_shard, no_ranks, uneven = one["refusals"]
        assert "layout has 56 rows and is no shard of 2; with sequence parallelism give" in no_shard
        assert f"layout.deal_rows({rank % 2}, 2)" in no_shard
        assert "layout is a shard of rows, but these ranks share none" in a_shard
        assert "layer 0 holds 2 of 4 heads, but the pass has 1 tensor-parallel rank(s)" in no_ranks
        assert "tp=2 must divide the heads and channels that it splits" in uneven
        assert "model.layers.0.mlp: channels=7; model.layers.1.self_attn: heads=3" in uneven


def test_one_rank_splits_and_reduces_nothing():
    model = new_model("mla", "sparse")
    split(model, ParallelMesh())
    reduce_replicated(model, ParallelMesh())
    assert not any(map(is_split, model.parameters()))


def test_rows_that_a_tp_group_does_not_divide_are_an_error():
    with pytest.raises(InputError, match="size=4 must divide the 6 rows; pad the pack"):
        Layout.packed([3], total=6).deal_rows(0, 4)


if __name__ == "__main__":
    rank = next((rank for rank in range(1, RANKS) if os.fork() == 0), 0)  # forked: torch is imported once
    signal.alarm(240)
    main(rank, Path(sys.argv[1]))
    if rank == 0:
        assert not any(os.wait()[1] for _ in range(1, RANKS))
