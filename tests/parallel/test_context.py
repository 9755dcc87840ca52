"""Rows over two and four processes against one that has them all: losses, every gradient, selections.

Four processes run this file once, for all cases; what they saw is written to a folder, and the tests read it.
Everything is in fp64, where no two scores are ever close.
"""

import dataclasses
import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    ParallelConfig,
)
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.mtp import look_ahead
from dsattn.nn.linear_attention import KDASelfAttention
from dsattn.nn.mla import MLASelfAttention
from dsattn.nn.state import LayerCache, Pass
from dsattn.parallel import collectives
from dsattn.parallel.context import RankGroups, dynamic_ranks, ranks_of
from dsattn.parallel.gloo import one_thread_a_group
from dsattn.parallel.mesh import ParallelMesh, build_mesh
from dsattn.parallel.recompute import Checkpoints
from dsattn.training.stages import set_mode

RANKS = 4
INDEXER = IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)
HIDDEN = dataclasses.replace(INDEXER, query_from="hidden")
PLAIN = ModelConfig(
    vocab_size=300,
    hidden_size=16,
    num_layers=2,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=INDEXER, deterministic=True),
    init_std=0.3,
)
GROUPED = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4, qk_norm=True, output_gate="headwise", sink=True)
MODELS = {
    "mla": PLAIN,
    "gqa": dataclasses.replace(PLAIN, attention=GROUPED, dsa=DSAConfig(indexer=HIDDEN, deterministic=True)),
    "kpool": dataclasses.replace(PLAIN, dsa=DSAConfig(indexer=dataclasses.replace(INDEXER, pool_size=2))),
    "dense and sliding": dataclasses.replace(PLAIN, layer_types=("dense", "sliding"), sliding_window=5),
    "mtp shares, so do layers, all teach": dataclasses.replace(
        PLAIN,
        num_layers=3,
        dsa=DSAConfig(indexer=INDEXER, deterministic=True, share_every=2, multi_layer_teacher=True),
        mtp=MTPConfig(depths=2, repeated=True, shared_components=("latent_kv", "sparse_attention_index")),
    ),
}
PACKS = {  # (lengths, rows that each occupies)
    "short documents": ((1, 2, 3, 7, 0, 11), (8, 8, 8, 8, 0, 16)),
    "one document": ((48,), (48,)),
    "nothing for some": ((2, 1), (8, 8)),
    "nothing for anybody": ((0,), (8,)),
}
ROWS = 56
CASES = {  # (ranks, model, mode, pack, recompute)
    f"{cp} {model} {mode} {pack} {policy}": (cp, model, mode, pack, policy)
    for cp, model, mode, pack, policy in (
        (2, "mla", "dense", "short documents", "none"),
        (2, "mla", "warmup", "short documents", "full"),
        (2, "mla", "sparse", "short documents", "none"),
        (2, "mla", "sparse", "one document", "selective"),
        (2, "mla", "frozen", "short documents", "full"),
        (2, "gqa", "warmup", "one document", "none"),
        (2, "gqa", "sparse", "short documents", "selective"),
        (2, "kpool", "frozen", "short documents", "full"),
        (2, "dense and sliding", "dense", "one document", "none"),
        (2, "mtp shares, so do layers, all teach", "sparse", "short documents", "full"),
        (2, "mtp shares, so do layers, all teach", "warmup", "one document", "selective"),
        (2, "mla", "sparse", "nothing for anybody", "none"),
        (4, "mla", "sparse", "short documents", "selective"),
        (4, "mla", "warmup", "nothing for some", "none"),
        (4, "gqa", "sparse", "nothing for some", "full"),
        (4, "kpool", "frozen", "one document", "none"),
    )
}
EXACT = {"rtol": 1e-9, "atol": 1e-12}

Seen = dict[str, Tensor]


def new_model(name: str, mode: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(MODELS[name]).double().train()
    set_mode(model, mode)
    return model


def layout_of(pack: str, cp_size: int = 1, cp_rank: int = 0) -> Layout:
    lengths, padded = PACKS[pack]
    return Layout.packed(lengths, padded=padded, total=ROWS, cp_size=cp_size, cp_rank=cp_rank)


def once(
    model: Decoder, pack: str, layout: Layout, mode: str, policy: str = "none", ranks: Any = None, seed: int = 1
) -> Seen:
    """This rank's share of losses and gradients (added to what the parameters have), and what its rows selected."""
    torch.manual_seed(seed)
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
    seen |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for layer, selection in out.selections.items():
        chosen = torch.zeros(ROWS, selection.width, dtype=torch.int64)
        chosen[layout.rows] = selection.index.long()
        seen[f"selection of {layer}"] = chosen
    return seen


def of_all(parts: list[Seen]) -> Seen:
    """Sums over ranks; a row is selected for by one rank."""
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


# What the processes do.


def mesh_of(cp: int) -> ParallelMesh:
    return build_mesh(ParallelConfig(dp_replicate=RANKS // cp, cp=cp), "cpu")


def run_cases(rank: int, meshes: dict[int, ParallelMesh]) -> Iterator[tuple[str, Any]]:
    """Cases of two ranks are dealt to the two pairs of them."""
    for number, (name, (cp, model, mode, pack, policy)) in enumerate(CASES.items()):
        mesh = meshes[cp]
        if number % mesh.size("batch") == mesh.rank("batch"):
            layout = layout_of(pack, cp, mesh.rank("cp"))
            yield name, once(new_model(model, mode), pack, layout, mode, policy, ranks_of(mesh, check=True))


def wrong_order(mesh: ParallelMesh) -> Seen:
    layout = layout_of("short documents", RANKS, mesh.rank("cp"))
    as_gathered = torch.arange(ROWS)
    layout = dataclasses.replace(layout, key_order=as_gathered, key_order_inverse=as_gathered)
    return once(new_model("mla", "sparse"), "short documents", layout, "sparse", ranks=ranks_of(mesh))


def averaged(mesh: ParallelMesh) -> Seen:
    layout = layout_of("short documents", RANKS, mesh.rank("cp"))
    summed = collectives._reduce_scattered
    collectives._reduce_scattered = lambda x, axis: summed(x, axis) / axis.size
    try:
        return once(new_model("mla", "sparse"), "short documents", layout, "sparse", ranks=ranks_of(mesh))
    finally:
        collectives._reduce_scattered = summed


def dynamic(mesh: ParallelMesh) -> Seen:
    """A step of three micro-batches: over all ranks, over each pair, and each rank for itself."""
    ranks, model, place = dynamic_ranks(mesh), new_model("mla", "sparse"), mesh.rank("cp")
    for count in (4, 2, 1):
        layout = layout_of("short documents", count, place % count)
        seed = 10 * count + place // count
        seen = once(model, "short documents", layout, "sparse", "full", ranks[count], seed)
    return {name: value for name, value in seen.items() if name.startswith("gradient")}


class Calls(TorchDispatchMode):
    """Names of what is called, in order; products with the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1]
        self.names.append(f"mm {out.shape[1]}" if name == "mm" else name)
        return out


LAYERS = {  # (model, mode, width of the queries, launches of keys)
    "mla": ("mla", "dense", "mm 16", 1),
    "mla, with the indexer's keys": ("mla", "frozen", "mm 16", 1),
    "pools": ("kpool", "frozen", "mm 16", 1),
    "gqa, whose indexer's keys go ahead": ("gqa", "frozen", "mm 32", 2),
}


def calls(mesh: ParallelMesh) -> dict[str, tuple[list[str], list[str]]]:
    """Of a layer's forward and of its backward, without the loss, whose reference adds rows up."""
    layout, seen = layout_of("one document", RANKS, mesh.rank("cp")), {}
    for name, (model, mode, *_) in LAYERS.items():
        layer = new_model(model, mode).model.layers[0].self_attn
        hidden = torch.randn(len(layout.rows), 16, dtype=torch.float64, requires_grad=True)
        with Calls() as forward:
            out = layer(hidden, layout, Pass(mode=mode, ranks=ranks_of(mesh))).hidden.sum()
        with Calls() as backward:
            out.backward()
        seen[name] = forward.names, backward.names
    return seen


def refusals(mesh: ParallelMesh) -> list[str]:
    """What this rank says to calls that do not fit. Each is refused before anything is sent."""
    ranks, layout = ranks_of(mesh, check=True), layout_of("one document", RANKS, mesh.rank("cp"))
    layer = MLASelfAttention(16, PLAIN.attention, PLAIN.dsa)
    linear = KDASelfAttention(16, KDAConfig(heads=2, head_dim=4))
    hidden = torch.zeros(len(layout.rows), 16)
    other = layout_of("one document", RANKS, (mesh.rank("cp") + 1) % RANKS)
    run = Pass(ranks=ranks, kl_divisor=1)
    said = []
    for call in (
        lambda: layer(hidden, layout_of("one document", 2, 0).deal_rows(0, 2), run),
        lambda: layer(torch.zeros(ROWS, 16), layout_of("one document"), run),
        lambda: layer(hidden, other, run),
        lambda: layer(hidden, layout, run, cache=LayerCache()),
        lambda: layer(hidden, layout, Pass(ranks=ranks)),
        lambda: linear(hidden, layout, run),
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
    meshes = {cp: mesh_of(cp) for cp in (2, 4)}
    seen: dict[str, Any] = dict(run_cases(rank, meshes))
    for act in (wrong_order, averaged, dynamic, calls, refusals):
        seen[act.__name__] = act(meshes[4])
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
    _, model, mode, pack, policy = CASES[name]
    alone = once(new_model(model, mode), pack, layout_of(pack), mode, policy)
    torch.testing.assert_close(of_all([one[name] for one in seen if name in one]), alone, **EXACT)


@pytest.mark.parametrize("fault", ["wrong_order", "averaged"])
def test_faults_are_seen(seen, fault):
    alone = once(new_model("mla", "sparse"), "short documents", layout_of("short documents"), "sparse")
    parts = of_all([one[fault] for one in seen])
    wrong = [name for name in alone if not torch.allclose(parts[name], alone[name], rtol=1e-6)]
    assert any("kv_a_proj" in name for name in wrong)
    assert ("lm" in wrong) == (fault == "wrong_order")


def test_groups_may_change_between_micro_batches(seen):
    model = new_model("mla", "sparse")
    for count in (4, 2, 1):
        for group in range(RANKS // count):
            alone = once(model, "short documents", layout_of("short documents"), "sparse", seed=10 * count + group)
    alone = {name: value for name, value in alone.items() if name.startswith("gradient")}
    torch.testing.assert_close(of_all([one["dynamic"] for one in seen]), alone, **EXACT)


@pytest.mark.parametrize("layer", LAYERS)
def test_keys_travel_beside_the_query_projections(seen, layer):
    forward, backward = seen[0]["calls"][layer]
    *_, queries, launches = LAYERS[layer]
    launched = [at for at, name in enumerate(forward) if name.startswith("all_gather_into_tensor")]
    assert len(launched) == launches
    assert launched[-1] < forward.index(queries) < forward.index("wait_tensor")
    tensors = 2 if layer.startswith("gqa") else 1  # keys and values; of the indexer's keys nothing flows back here
    assert [name for name in backward if "reduce_scatter" in name] == ["reduce_scatter_tensor"] * tensors


def test_the_backward_of_the_order_adds_nothing_up(seen):
    _, backward = seen[0]["calls"]["mla"]
    assert "index.Tensor" in backward
    assert not [name for name in backward if name.startswith(("index_put", "index_add", "scatter_add"))]


def test_refuses(seen):
    for rank, one in enumerate(seen):
        shard, count, other, cache, divisor, linear = one["refusals"]
        build = f"build it with cp_size=4, cp_rank={rank}"
        assert "layout is a shard of rows, but these ranks share none" in shard
        assert f"layout has 56 keys for 56 rows on each of 4 context-parallel rank(s); {build}" in count
        assert f"layout holds the rows of another rank; {build}" in other
        assert "cache is given with ranks" in cache
        assert "kl_divisor=None with ranks" in divisor
        assert "a linear layer's state runs through whole ones, and is not passed from rank to rank yet" in linear


def test_one_rank_needs_no_groups():
    assert ranks_of(ParallelMesh()) is None
    assert dynamic_ranks(ParallelMesh()) == {1: None}
    assert RankGroups().tp_size == 1


def visible_pairs(lengths, cp_size, **padding):
    """Of each rank."""
    layouts = (Layout.packed(lengths, cp_size=cp_size, cp_rank=rank, **padding) for rank in range(cp_size))
    return tuple(layout.keys.num_pairs() for layout in layouts)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_visible_pairs_are_balanced_for_uniform_data(cp_size):
    generator = torch.Generator().manual_seed(cp_size)
    lengths = torch.randint(1, 2**14, (24,), generator=generator).tolist()
    padded = [-(-length // (2 * cp_size)) * 2 * cp_size for length in lengths]
    loads = visible_pairs(lengths, padded=padded, cp_size=cp_size)
    assert sum(loads) == sum(length * (length + 1) // 2 for length in lengths)
    assert max(abs(load * cp_size / sum(loads) - 1) for load in loads) < 0.02
    whole = visible_pairs([4096, 16], cp_size=cp_size)
    assert max(whole) == min(whole)


def test_visible_pairs_show_an_uneven_pack():
    assert visible_pairs([1, 0, 3], padded=[4, 0, 4], total=12, cp_size=2) == (2, 5)


if __name__ == "__main__":
    rank = next((rank for rank in range(1, RANKS) if os.fork() == 0), 0)  # forked: torch is imported once
    signal.alarm(240)
    main(rank, Path(sys.argv[1]))
    if rank == 0:
        assert not any(os.wait()[1] for _ in range(1, RANKS))
