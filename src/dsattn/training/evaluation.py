"""Held-out loss and indexer health, on one rank or many."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.config import StageConfig, TrainConfig
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.stage import MicroBatch
from dsattn.nn.indexer import IndexerOutput
from dsattn.nn.ranks import Ranks
from dsattn.nn.state import Observation, Pass
from dsattn.parallel.apply import Parallel
from dsattn.parallel.fsdp import reshard
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training.health import Health, Survey, indexer_health
from dsattn.training.loader import micro_batches, to_device
from dsattn.training.metrics import count_labels, held_out_loss, summed_loss
from dsattn.training.observed import counted_rows, evaluating
from dsattn.training.packs import IGNORED_LABEL, Pack
from dsattn.training.step import compute


def evaluate(
    whole: Parallel, packs: Sequence[Pack], stage: StageConfig, train: TrainConfig
) -> tuple[float, Health | None]:
    """(loss in nats a label, attending as the stage's mode does; the indexers' health, None in mode `dense`).

    packs: the same on every rank; data-parallel ranks share them out. The same numbers on every rank, those of one
    process. Collective. Raises InputError where no pack holds a label.
    """
    mesh, model = whole.mesh, whole.model
    alone = isinstance(model, Decoder) and mesh.config.world_size == 1
    health: Health | None = None
    with compute(train, mesh.device):
        loss = held_out_loss(_whole(model), packs, stage.mode) if alone else _shared_loss(whole, packs, stage, train)
        if stage.mode != "dense":
            health = indexer_health(_whole(model), packs) if alone else _shared_health(whole, packs, train)
    reshard(model)
    return loss, health


def _shared_loss(whole: Parallel, packs: Sequence[Pack], stage: StageConfig, train: TrainConfig) -> float:
    """As `held_out_loss`."""
    labels, mesh = count_labels(packs), whole.mesh
    run = Pass(mode=stage.mode, with_kl=False, with_mtp=False, ranks=whole.ranks)
    total = _forward(whole, _dealt(packs, whole), run, train)
    for group in (mesh.group("loss"), mesh.group("tp") if mesh.config.sequence_parallel else None):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total.item() / labels


def _shared_health(whole: Parallel, packs: Sequence[Pack], train: TrainConfig) -> Health:
    """As `indexer_health`: every rank measures the layers that it has, for its own rows and every head."""
    mesh, config, groups = whole.mesh, whole.model.config, whole.ranks
    top_k = config.dsa.indexer.top_k
    survey = Survey(config, packs, [counted_rows(pack.layout, top_k) for pack in packs], mesh.device)
    if not survey.finds:
        return survey.finish()
    micros = _dealt(packs, whole)
    own = [_own_rows(micro.layout, mesh) for micro in micros]

    def of_every_head(seen: Observation) -> Observation:
        return seen if groups is None else _of_every_head(seen, mesh, groups)

    probe = survey.probe([(layout, counted_rows(layout, top_k)) for layout in own], of_every_head)
    run = Pass(mode="warmup", with_kl=False, with_mtp=False, ranks=groups, probe=probe)
    _forward(whole, micros, run, train)
    survey.sum_over([group for name in ("loss", "tp", "pp") if (group := mesh.group(name)) is not None])
    return survey.finish()


def _own_rows(layout: Layout, mesh: ParallelMesh) -> Layout:
    """Every tp-th of the rows that heads read: those of this rank, with sequence parallelism or without."""
    size = mesh.size("tp")
    return layout if size == 1 or layout.whole is not None else layout.deal_rows(mesh.rank("tp"), size)


def _of_every_head(seen: Observation, mesh: ParallelMesh, groups: Ranks) -> Observation:
    """My rows of every head, of what a layer saw: all rows of its heads."""
    size = mesh.size("tp")
    if size == 1:
        return seen
    assert seen.index is not None, "a probed layer runs the indexer it owns"
    mine = slice(mesh.rank("tp"), None, size)
    return dataclasses.replace(
        seen,
        q=groups.all_heads(seen.q),
        kv=seen.kv if seen.kv.dim() == 2 else groups.all_groups(seen.kv),
        lse=groups.all_heads(seen.lse),
        index=IndexerOutput(seen.index.q[mine], seen.index.k, seen.index.w[mine]),
        layout=seen.layout.deal_rows(mesh.rank("tp"), size),
    )


def _dealt(packs: Sequence[Pack], whole: Parallel) -> list[MicroBatch]:
    """This rank's, on its device: as many for each; empty packs fill up."""
    mesh, top_k = whole.mesh, whole.model.config.dsa.indexer.top_k
    filled = [*packs, *[_empty(packs[0])] * (-len(packs) % mesh.size("batch"))]
    return [to_device(micro, mesh.device) for micro in micro_batches(filled, mesh, 1, top_k=top_k)]


def _forward(whole: Parallel, micros: Sequence[MicroBatch], run: Pass, train: TrainConfig) -> Tensor:
    """The summed loss of these rows, fp64."""
    model, total = whole.model, torch.zeros((), dtype=torch.float64, device=whole.mesh.device)
    with torch.no_grad(), evaluating(model):
        if whole.pipeline is not None:
            ready = [dataclasses.replace(micro, ranks=whole.ranks) for micro in micros]
            share = whole.pipeline.evaluate(ready, run, 1, bf16=train.dtype == "bfloat16")
            assert share.lm is not None, "the last stage gives it to all"
            return total + share.lm
        for micro in micros:
            total += summed_loss(_whole(model), micro.tokens, micro.labels, micro.layout, run)
    return total


def _whole(model: object) -> Decoder:
    assert isinstance(model, Decoder), "stages go through their pipeline"
    return model


def _empty(like: Pack) -> Pack:
    """A pack of padding."""
    rows = len(like.tokens)
    return Pack(
        tokens=torch.zeros_like(like.tokens),
        labels=torch.full_like(like.labels, IGNORED_LABEL),
        layout=Layout.packed([], total=rows),
        num_labels=0,
    )
