"""Who works with whom: every group of ranks that training uses, as views of one grid of ranks.

Rank order is pp, dp_replicate, dp_shard, cp, tp: the ranks of a tp group sit closest together.

view         axes, the last one fastest
grid         pp, dp_replicate, dp_shard, cp, tp
parameters   pp, dp_replicate, fsdp, tp      fsdp = dp_shard x cp: ranks that shard one set of parameters
experts      pp, dp_replicate, efsdp, ep     efsdp x ep = dp_shard x cp x tp: the same for experts
loader       pp, batch, cp, tp               batch = dp_replicate x dp_shard: ranks with different packs
counts       pp, loss, tp                    loss = dp_replicate x dp_shard x cp: ranks with different rows
readers      pp, batch, keys                 keys = cp x tp: ranks that read the same keys
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from dsattn.config import ParallelConfig
from dsattn.errors import ConfigError, InputError
from dsattn.parallel.gloo import one_thread_a_group

VIEWS = {
    "grid": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "parameters": ("pp", "dp_replicate", "fsdp", "tp"),
    "experts": ("pp", "dp_replicate", "efsdp", "ep"),
    "loader": ("pp", "batch", "cp", "tp"),
    "counts": ("pp", "loss", "tp"),
    "readers": ("pp", "batch", "keys"),
}

# Parameters that are split over tp and then by FSDP2 must be so on one view.
_VIEW_OF = {name: view for view in reversed(VIEWS) for name in VIEWS[view]}
_VIEW_OF |= {"pp": "parameters", "dp_replicate": "parameters", "tp": "parameters"}


def sizes(config: ParallelConfig) -> dict[str, int]:
    """Ranks of each group, by its name."""
    dense = config.dp_shard * config.cp
    return {
        "pp": config.pp,
        "dp_replicate": config.dp_replicate,
        "dp_shard": config.dp_shard,
        "cp": config.cp,
        "tp": config.tp,
        "ep": config.ep,
        "fsdp": dense,
        "efsdp": dense * config.tp // config.ep,
        "batch": config.batch_ranks,
        "loss": config.dp_replicate * dense,
        "keys": config.cp * config.tp,
    }


def coordinates(config: ParallelConfig, rank: int) -> dict[str, int]:
    """The place of global rank `rank` in each group, by its name. Needs no process group."""
    if not 0 <= rank < config.world_size:
        raise InputError(f"rank={rank} must be at least 0 and below the {config.world_size} ranks of the mesh")
    count = sizes(config)
    place: dict[str, int] = {}
    for names in VIEWS.values():
        rest = rank
        for name in reversed(names):
            rest, place[name] = divmod(rest, count[name])
    return place


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The groups of this rank. Make it with `build_mesh`, or with `ParallelMesh()` for one process without groups.

    Group names are those of `sizes`. device: where this rank's tensors live.
    """

    config: ParallelConfig = field(default_factory=ParallelConfig)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    views: Mapping[str, DeviceMesh] = field(default_factory=lambda: MappingProxyType({}))
    global_rank: int = 0

    def size(self, name: str) -> int:
        """Ranks of group `name`."""
        return _known(sizes(self.config), name)

    def rank(self, name: str) -> int:
        """My place in group `name`."""
        return _known(coordinates(self.config, self.global_rank), name)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The process group `name`; None where it has one rank."""
        if self.size(name) == 1:
            return None
        return self.device_mesh(name).get_group()

    def device_mesh(self, name: str, *more: str) -> DeviceMesh:
        """The mesh of group `name`, or of it and `more` of one view: ("dp_replicate", "fsdp").

        Raises InputError where there are no process groups, and where no view has all of them.
        """
        names = (name, *more)
        for one in names:
            self.size(one)
        if not self.views:
            raise InputError("one process has no device mesh; ask `size` first")
        view = _VIEW_OF[name]
        if not set(names) <= set(VIEWS[view]):
            view = next((view for view, known in VIEWS.items() if set(names) <= set(known)), "")
        if not view:
            raise InputError(f"names={names} stand in no view together; there is {'; '.join(map(str, VIEWS.values()))}")
        return self.views[view][names if more else name]


def build_mesh(config: ParallelConfig, device: torch.device | str) -> ParallelMesh:
    """The mesh of `config` over all processes of the default group, which must exist unless it would be one process.

    device: where this rank computes; its type picks the collectives (gloo on cpu, NCCL on cuda). Collective: every
    process makes the same call. Raises ConfigError where the degrees do not make as many processes.
    """
    started = dist.is_available() and dist.is_initialized()
    processes = dist.get_world_size() if started else 1
    if problems := [f"parallel: {problem}" for problem in config.world_problems(processes)]:
        raise ConfigError(problems)
    device = torch.device(device)
    if not started:
        return ParallelMesh(config, device)
    count = sizes(config)
    views = {
        view: init_device_mesh(device.type, tuple(count[name] for name in names), mesh_dim_names=names)
        for view, names in VIEWS.items()
    }
    assert all(math.prod(mesh.shape) == processes for mesh in views.values())
    return ParallelMesh(config, device, MappingProxyType(views), dist.get_rank())


@contextlib.contextmanager
def processes(device: str = "auto") -> Iterator[None]:
    """Join the processes that `torchrun` started, and leave them at the end; nothing where this one is alone.

    device: `train.device`; on GPUs each process takes the one of its local rank, and collectives of GPU tensors go
    through NCCL, those of CPU tensors through gloo, whose groups have one thread each, see `one_thread_a_group`. What
    ends this process is in torchrun's last words.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    store, rank, size = next(rendezvous("env://"))
    # torchrun may keep its store over restarts: addresses of the ranks that died must not be met again.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"restart-{restart}", store)  # pyright: ignore[reportPrivateImportUsage]
    with one_thread_a_group():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            yield
        except Exception as error:
            get_error_handler().record_exception(error)  # torchrun names the rank and says why
            if _LOST.search(str(error)):
                time.sleep(_WAIT)  # whoever is gone knows the reason: torchrun names the first that it sees end
            raise
    dist.destroy_process_group()  # not after an error: it could wait for ranks that are gone


_LOST = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe|remote process exited")  # a collective without a peer
_WAIT = 3.0  # seconds


def _known(values: dict[str, int], name: str) -> int:
    if name not in values:
        raise InputError(f"name={name!r} is no group; there is {', '.join(values)}")
    return values[name]
