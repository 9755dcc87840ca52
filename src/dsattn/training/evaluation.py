"""Held-out loss and indexer health, on one rank or many."""

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dsattn.config import StageConfig, TrainConfig
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.nn.state import Pass
from dsattn.parallel.apply import Parallel
from dsattn.parallel.fsdp import reshard
from dsattn.training.health import Health, evaluating, indexer_health
from dsattn.training.loader import micro_batches, to_device
from dsattn.training.metrics import held_out_loss
from dsattn.training.packs import IGNORED_LABEL, Pack
from dsattn.training.step import compute

_CUT = "measured where no rank has all rows, heads or layers alone; run `dsattn inspect` on a checkpoint of this run"


def evaluate(
    whole: Parallel, packs: Sequence[Pack], stage: StageConfig, train: TrainConfig
) -> tuple[float, Health | None]:
    """(loss in nats a label, attending as the stage's mode does; the indexers' health, None in mode `dense`).

    packs: the same on every rank; data-parallel ranks share them out for the loss, and all measure all for the health.
    Health needs whole rows, heads and layers: under context, tensor or pipeline parallelism it has a note alone.
    Collective. Raises InputError where no pack holds a label.
    """
    mesh, model = whole.mesh, whole.model
    cut = any(mesh.size(name) > 1 for name in ("cp", "tp", "pp"))
    health: Health | None = None
    with compute(train, mesh.device):
        if isinstance(model, Decoder) and not cut and mesh.size("batch") == 1:
            loss = held_out_loss(model, packs, stage.mode)
        else:
            loss = _shared_out(whole, packs, stage, train)
        if stage.mode != "dense":
            top_k = model.config.dsa.indexer.top_k
            health = Health([], top_k, 0, [], f"not {_CUT}") if cut else indexer_health(_whole(model), packs)
    reshard(model)
    return loss, health


def _shared_out(whole: Parallel, packs: Sequence[Pack], stage: StageConfig, train: TrainConfig) -> float:
    """Each rank takes as many packs; empty ones fill up."""
    mesh, model = whole.mesh, whole.model
    labels = sum(pack.num_labels for pack in packs)
    ranks = mesh.size("batch")
    filled = [*packs, *[_empty(packs[0])] * (-len(packs) % ranks)]
    run = Pass(mode=stage.mode, with_kl=False, with_mtp=False, ranks=whole.ranks)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    micros = [to_device(micro, mesh.device) for micro in micro_batches(filled, mesh, 1)]
    with torch.no_grad(), evaluating(model):
        if whole.pipeline is not None:
            ready = [dataclasses.replace(micro, ranks=whole.ranks) for micro in micros]
            share = whole.pipeline.evaluate(ready, run, 1, bf16=train.dtype == "bfloat16")
            assert share.lm is not None, "the last stage gives it to all"
            total += share.lm
        else:
            for micro in micros:
                out = _whole(model)(micro.tokens, micro.layout, run)
                total += _whole(model).lm_loss(out.hidden, micro.labels, 1)
    for group in (mesh.group("loss"), mesh.group("tp") if mesh.config.sequence_parallel else None):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total.item() / labels if labels else math.nan


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
