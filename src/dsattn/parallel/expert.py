"""Expert parallel: each rank of a group holds E / ep of a layer's routed experts, and rows travel to theirs and back.

    rows, sorted by expert -> all-to-all -> sorted by expert of here -> experts -> sorted back -> all-to-all -> rows

The group `ep` lies inside dp_shard x cp x tp: its ranks hold different rows, so every expert sees all rows of its group
and its gradient needs no sum over `ep`; over `efsdp`, the ranks that hold the same experts, FSDP2 sums it. The router
and the shared experts stay whole on every rank and work on its own rows.
Letters: E experts, R rows that leave this rank (one a row and expert that it chose), M model width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dsattn.errors import InputError
from dsattn.model.moe import Experts, permute
from dsattn.nn.state import Pass
from dsattn.parallel.mesh import ParallelMesh


def split(model: nn.Module, mesh: ParallelMesh) -> None:
    """Leave each rank of `ep` its experts of every layer, in place; nothing where the group has one rank.

    Expert weights become DTensors, sharded by expert over `ep`: FSDP2 may shard them further over `efsdp` (on dimension
    1, as a rank may hold few experts), and checkpoints know them. Call it before FSDP2, with the same weights on every
    rank. Raises InputError where the group does not divide the experts.
    """
    group = mesh.group("ep")
    if group is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            _split(module, name, mesh.device_mesh("ep"), group)


@dataclass(frozen=True)
class Exchange:
    """Sends rows to the ranks of `group` that hold their experts, and the results home: `model.moe.Exchange`.

    One exchange of counts and one device sync a layer; a recompute replay has the counts of the first pass.
    """

    group: dist.ProcessGroup

    def __call__(
        self, rows: Tensor, weight: Tensor, load: Tensor, through: Callable[[Tensor, Tensor, Tensor], Tensor], run: Pass
    ) -> Tensor:
        """See `model.moe.Exchange`. A rank may send nothing, or receive nothing: it takes part all the same."""
        counts, sent, received = run.value("expert_counts", self._counts, load)
        real = sum(sent)
        here = self._move(rows[:real], received, sent)
        weight_here = self._move(weight[:real], received, sent)
        expert = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
        expert = expert.repeat_interleave(counts.flatten(), output_size=sum(received))
        order = expert.argsort(stable=True)
        place = order.argsort()
        ends = counts.sum(0).cumsum(0, dtype=torch.int32)
        out = through(permute(here, order, place), permute(weight_here, order, place), ends)
        home = self._move(permute(out, place, order), sent, received)
        return home if real == len(rows) else torch.cat((home, home.new_zeros(len(rows) - real, home.shape[1])))

    def _counts(self, load: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """([ep, experts here] rows that each rank sends to each, rows to each rank, rows from each rank)."""
        leaving = load.unflatten(0, (dist.get_world_size(self.group), -1))
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.group)
        sent, received = torch.stack((leaving.sum(1), coming.sum(1))).tolist()
        return coming, sent, received

    def _move(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return funcol.all_to_all_single_autograd(rows.contiguous(), received, sent, self.group)


def _split(experts: Experts, name: str, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    count, size = experts.gate_up_proj.shape[0], mesh.size()
    if count % size:
        raise InputError(f"{name} has {count} experts, which {size} ranks of ep cannot share evenly; take a divisor")
    for weight in ("gate_up_proj", "down_proj"):
        whole = getattr(experts, weight)
        part = whole.detach().chunk(size)[mesh.get_local_rank()].clone()
        sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        setattr(experts, weight, nn.Parameter(sharded, requires_grad=whole.requires_grad))
    experts.exchange = Exchange(group)
