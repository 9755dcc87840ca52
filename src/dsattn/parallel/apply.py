"""A model on a mesh: every kind of parallelism, put on from outside in one order.

    1. pipeline     this rank's stages, or the whole model, on the meta device
    2. tensor       heads and widths split over tp                              parallel/tensor.py
    3. experts      routed experts split over ep                                parallel/expert.py
    4. recompute    by each pass, around a layer's parts (`Pass.recompute`)     parallel/recompute.py
    5. compile      what those parts call: the MLPs                             parallel/compiled.py
    6. sharding     every layer over dp_shard x cp, replicas over dp_replicate  parallel/fsdp.py
    7. weights      this rank's parts of those that one process would draw      nn/draw.py
    8. schedule     stages joined to a pipeline                                 parallel/pipeline.py

The ranks of a micro-batch come with its pass, too (`Pass.ranks`).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsattn.config import ModelConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.model.stage import DecoderStage, cut
from dsattn.nn import LightningIndexer
from dsattn.nn.ranks import Ranks
from dsattn.parallel import context, expert, fsdp, tensor
from dsattn.parallel.compiled import compile_mlps
from dsattn.parallel.gradients import clip, set_aside
from dsattn.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from dsattn.parallel.pipeline import Pipeline


class Stages(nn.Module):
    """Several pipeline stages of one rank as one model: parameters have the whole model's names."""

    def __init__(self, stages: Sequence[DecoderStage]):
        super().__init__()
        self.config = stages[0].config
        self.stages = nn.ModuleList(stages)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of each stage; a name comes twice where two stages hold copies."""
        for stage in self.stages:
            yield from stage.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Those of all stages in one; copies are equal."""
        return {name: value for stage in self.stages for name, value in stage.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Each stage takes its own."""
        for stage in self.stages:
            own = {name: state_dict[name] for name in stage.state_dict()} if strict else state_dict
            stage.load_state_dict(own, strict=strict, assign=assign)

    def indexers(self) -> list[LightningIndexer]:
        """Of all stages."""
        return [module for module in self.modules() if isinstance(module, LightningIndexer)]

    def reset_indexers(self, generator: torch.Generator | None = None) -> None:
        """Fresh weights for every indexer, nothing else."""
        for stage in self.stages:
            stage.reset_indexers(generator)  # pyright: ignore[reportCallIssue]

    def move_routing_biases(self, loads: Mapping[int, Tensor], rate: float) -> None:
        """As `Decoder.move_routing_biases`; each stage takes its layers' loads."""
        for stage in self.stages:
            stage.move_routing_biases(loads, rate)  # pyright: ignore[reportCallIssue]

    @property
    def copies(self) -> frozenset[str]:
        """See `DecoderStage.copies`; none where a stage here has the one that counts."""
        stages = [stage for stage in self.stages if isinstance(stage, DecoderStage)]
        copies = frozenset[str]().union(*(stage.copies for stage in stages))
        counted = {name for stage in stages for name, _ in stage.named_parameters() if name not in stage.copies}
        return copies - counted


@dataclass(frozen=True, eq=False)
class Parallel:
    """A model as it lies on this rank, and who it works with.

    model: the whole decoder with its parameters split, or this rank's stages. pipeline: None without pp. groups:
    `Pass.ranks` by number of context-parallel ranks that may share a micro-batch; None where no other rank does.
    """

    model: Decoder | Stages
    mesh: ParallelMesh
    pipeline: "Pipeline | None" = None
    groups: Mapping[int, Ranks | None] = field(default_factory=lambda: {1: None})

    @property
    def ranks(self) -> Ranks | None:
        """Of a micro-batch that all context-parallel ranks share."""
        return self.groups[max(self.groups)]

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters that another pipeline rank counts in norms and totals."""
        return self.model.copies if isinstance(self.model, DecoderStage | Stages) else frozenset()

    @contextlib.contextmanager
    def backwards(self) -> Iterator[None]:
        """Around a step's backwards. Behind the last one what replicated parameters saw in parts is summed over tp, and
        gradients from before are added.
        """
        partial = tensor.partial_parameters(self.model, sequence_parallel=self.mesh.config.sequence_parallel)
        with set_aside(one for _, one in partial if self.mesh.size("tp") > 1):
            yield
            tensor.reduce_replicated(self.model, self.mesh)

    def clip_gradients(self, most: float) -> float:
        """Scale gradients down where their global norm is above `most`; the norm before, equal on all ranks."""
        if not self.mesh.views:
            learning = [one for one in self.model.parameters() if one.requires_grad]
            return nn.utils.clip_grad_norm_(learning, most).item()
        return clip(self.model.named_parameters(), most, self.mesh, self.copies)

    def count_parameters(self) -> int:
        """Of the whole model. Collective."""
        return self.of_all_stages([sum(one.numel() for _, one in self.named_parameters())])[0]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each on one pipeline rank, once."""
        copies = self.copies
        yield from {name: one for name, one in self.model.named_parameters() if name not in copies}.items()

    def of_all_stages(self, counts: Sequence[int]) -> list[int]:
        """Sums over the pipeline ranks. Collective."""
        group = self.mesh.group("pp")
        if group is None:
            return list(counts)
        total = torch.tensor(counts, device=self.mesh.device)
        dist.all_reduce(total, group=group)
        return total.tolist()


def apply(config: ModelConfig, mesh: ParallelMesh, train: TrainConfig) -> Parallel:
    """Make the model and put it on the mesh. The same seed must be set on every rank.

    Weights are cut before there are any: each rank draws its own parts of those that one process would draw, and holds
    no other at any time, but for one block of `nn.draw`. Collective.
    """
    parts = _parts(config, mesh)
    state = torch.get_rng_state()
    for part in parts:
        tensor.split(part, mesh)
        expert.split(part, mesh)
        if train.compile:
            compile_mlps(part)
        fsdp.shard(part, mesh, train)
        torch.set_rng_state(state)
        part.to_empty(device=mesh.device).reset_parameters()
    check = mesh.config.check_ranks
    groups: Mapping[int, Ranks | None] = {mesh.size("cp"): context.ranks_of(mesh, check=check)}
    if mesh.config.dynamic_cp:
        groups = context.dynamic_ranks(mesh, check=check)
    stages = [part for part in parts if isinstance(part, DecoderStage)]
    if not stages:
        return Parallel(parts[0], mesh, groups=groups)
    from dsattn.parallel.pipeline import Pipeline  # torch's schedules take a second to import

    pipeline = Pipeline(stages, mesh, mesh.config.schedule)
    return Parallel(stages[0] if len(stages) == 1 else Stages(stages), mesh, pipeline, groups)


def _parts(config: ModelConfig, mesh: ParallelMesh) -> list[Decoder]:
    """The whole model, or this rank's stages, on the meta device."""
    with torch.device("meta"):
        if mesh.size("pp") == 1:
            return [Decoder(config)]
        chunks = cut(config, mesh.config.chunks(config.num_layers, config.mtp.depths))
        return [DecoderStage(config, chunk) for chunk in chunks[mesh.rank("pp") :: mesh.size("pp")]]
