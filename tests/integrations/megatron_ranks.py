"""Our Megatron layers on two ranks beside Megatron's own on one; `megatron_parity.py` runs this in its two processes.

Each rank holds the same whole module of Megatron's and takes its shard of the same input. Gradients are brought
together as Megatron does in its finalisation: summed over context-parallel ranks, and over tensor-parallel ones where a
weight is replicated and sees only the rank's rows; the indexer's are complete on every tensor-parallel rank.
"""

from typing import Any

import megatron_core as core
import torch
import torch.distributed as dist
from megatron_parity import DRAWS, PACK, Report, once, watching_cut_offs
from torch import Tensor

from dsattn import Layout
from dsattn.integrations.megatron import with_dsattn
from dsattn.integrations.megatron_loss import attach_loss

SPARSE = {"dsa_indexer_use_sparse_loss": True}
CP_PACK = [12, 4, 8]
ROWS = 24


def context_parallel(report: Report, world: core.World, generator: torch.Generator) -> None:
    """Zigzag shards, packed and not; and a group that the micro-batch brings along."""
    for case, fields, lengths, whole, dynamic in (
        ("packed, mean over rows", SPARSE, CP_PACK, False, False),
        ("packed, per token", {**SPARSE, "calculate_per_token_loss": True}, CP_PACK, True, False),
        ("packed, group of the micro-batch", SPARSE, CP_PACK, True, True),
        ("one sample, dense loss", {}, None, True, False),
    ):
        config = core.config_of(**fields)
        spec = core.attention_spec(config)
        theirs = _same_weights(core.build(spec, config, world.groups()), world)
        changed = with_dsattn(spec, config, whole=whole)
        ours = core.build(changed, config, world.groups(cp=1 if dynamic else 2))
        ours.load_state_dict(theirs.state_dict())
        layout = Layout.packed(lengths or [ROWS], cp_size=2, cp_rank=world.rank)
        own = {} if not dynamic else {"local_cp_size": 2, "cp_group": world.both}
        hidden, grad, their_out, their_grad = _whole(theirs, {"lengths": lengths}, world, generator)
        out, mine = once(ours, hidden[layout.rows], grad[layout.rows], {"lengths": lengths, "packed": own})
        report.add("context parallel: output", case, their_out[layout.rows], out)
        report.add("context parallel: gradient of the input", case, their_grad[layout.rows], mine)
        for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            dist.all_reduce(b.grad, group=world.both)
            report.add("context parallel: gradients of the weights", f"{case}: {name}", a.grad, b.grad)


def tensor_parallel(report: Report, world: core.World, generator: torch.Generator) -> None:
    """Heads split, sequence parallel; the down-projections whole, or column-parallel as without Transformer Engine."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    for case, down, lengths, whole, fields in (
        ("packed, our core", core.Duplicated, PACK["lengths"], False, SPARSE),
        ("packed, our layer", core.Duplicated, PACK["lengths"], True, SPARSE),
        ("one sample, dense loss", core.Duplicated, None, True, {}),
        ("column-parallel down-projections", ColumnParallelLinear, None, True, SPARSE),
    ):
        config = core.config_of(**fields)
        theirs = _same_weights(core.build(core.attention_spec(config), config, world.groups()), world)
        split = core.config_of(**fields, tensor_model_parallel_size=2, sequence_parallel=True)
        changed = with_dsattn(core.attention_spec(split, down), split, whole=whole)
        ours = core.build(changed, split, world.groups(tp=2))
        for name, weight in ours.named_parameters():
            weight.data.copy_(_shard(theirs.get_parameter(name), weight, world.rank))
        hidden, grad, their_out, their_grad = _whole(theirs, {"lengths": lengths}, world, generator)
        mine = slice(world.rank * ROWS // 2, (world.rank + 1) * ROWS // 2)
        out, own_grad = once(ours, hidden[mine], grad[mine], {"lengths": lengths})
        report.add("tensor parallel: output", case, their_out[mine], out)
        report.add("tensor parallel: gradient of the input", case, their_grad[mine], own_grad)
        for name, weight in ours.named_parameters():
            a, found = theirs.get_parameter(name).grad, weight.grad.clone()
            if a.shape == found.shape and "indexer" not in name:
                dist.all_reduce(found, group=world.both)
            report.add(
                "tensor parallel: gradients of the weights", f"{case}: {name}", _shard(a, found, world.rank), found
            )


def _shard(whole: Tensor, part: Tensor, rank: int) -> Tensor:
    for axis, size in enumerate(part.shape):
        if whole.shape[axis] != size:
            return whole.narrow(axis, rank * size, size)
    return whole


def _same_weights(module: Any, world: core.World) -> Any:
    for weight in module.parameters():
        dist.broadcast(weight.data, 0, group=world.both)
    return module


def _whole(theirs: Any, run: dict[str, Any], world: core.World, generator: torch.Generator) -> tuple[Tensor, ...]:
    """(hidden, grad, output, gradient of hidden) of Megatron's module on all rows; the same on both ranks."""
    for _ in range(DRAWS):
        hidden, grad = (torch.randn(ROWS, 1, core.HIDDEN, generator=generator) for _ in "ab")
        for one in (hidden, grad):
            dist.broadcast(one, 0, group=world.both)
        with watching_cut_offs() as decided:
            out, hidden_grad = once(theirs, hidden, grad, run)
        if all(decided):
            return hidden, grad, out, hidden_grad
    raise RuntimeError("no draw had a decided cut-off")


def schedule_scale(report: Report) -> None:
    """What Megatron's schedule does to the loss's gradient: 3 and 6 with grad_scale 3, 4 ranks and 2 micro-batches."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler as Scaler

    Scaler.main_loss_backward_scale = None  # a backward before any schedule made a scalar, which takes no [1]

    for per_token, wanted in ((True, 3.0), (False, 6.0)):
        config = core.config_of(calculate_per_token_loss=per_token, grad_scale_func=lambda loss: loss * 3)
        loss, output = torch.tensor(1.0, requires_grad=True), torch.ones(2, requires_grad=True)
        attached = attach_loss(output * 1, loss)
        forward_step_calc_loss(None, attached, None, config, None, False, 2, [], cp_group_size=4, is_last_stage=False)
        attached.sum().backward()
        same = loss.grad == wanted and output.grad.equal(torch.ones(2))
        report.exact("schedules: loss scale", "per token" if per_token else "mean over rows", bool(same))
    Scaler.main_loss_backward_scale = None
