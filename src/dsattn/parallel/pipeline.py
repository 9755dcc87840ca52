"""Pipeline parallel: the schedules of torch.distributed.pipelining over stages of a decoder.

    pipe = Pipeline(stages, mesh, schedule)                  stages: this rank's, chunk c on pipeline rank c % pp
    losses = pipe.step(micro_batches, divisors, stage, train)

Every rank is given the same micro-batches: tokens, labels and layouts come from the loader, hidden states alone go
through the pipe. Micro-batches may differ in packing and in rows: what is sent has the rows of the longest one, which
costs traffic and no computation.
In mode `warmup` no gradient reaches a stage before, and zeros are sent in its place: the schedules want something to
wait for, and so keep few micro-batches alive.
The embedding's weights stand on several stages where it is tied to the head, or where multi-token prediction is not on
the first one. Their gradients are summed over these stages after each step, so each copy gets that of the whole.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from dsattn.config import ModelConfig, PipelineSchedule, StageConfig, TrainConfig
from dsattn.errors import DsattnError, InputError
from dsattn.model.stage import DecoderStage, MicroBatch, Share, Task
from dsattn.nn.state import Pass
from dsattn.parallel.gradients import set_aside
from dsattn.parallel.mesh import ParallelMesh
from dsattn.parallel.recompute import learning_pass


class Pipeline:
    """This rank's stages of a pipeline, and how micro-batches go through all of them.

    stages: of chunks rank, rank + pp, ... in order, as they are after sharding (FSDP2 reduces gradients once a step).
    schedule: `1F1B` for one stage a rank, `Interleaved1F1B` for more. dtype: of what goes from stage to stage; float32
    keeps what one process would compute with float32 parameters, bfloat16 parameters lose nothing in bfloat16.
    Torch keeps a buffer [rows, M] for each micro-batch, for what comes into each stage, and one for its gradient.
    Collective over the pipeline's ranks. Raises InputError where stages are missing or not this rank's.
    """

    def __init__(
        self,
        stages: Sequence[DecoderStage],
        mesh: ParallelMesh,
        schedule: PipelineSchedule = "1F1B",
        *,
        dtype: torch.dtype = torch.float32,
    ):
        group, size, rank = mesh.group("pp"), mesh.size("pp"), mesh.rank("pp")
        if group is None:
            raise InputError("mesh has one pipeline rank: run the whole model, or make the mesh with pp above 1")
        numbers = [stage.chunk.number for stage in stages]
        if not stages or numbers != list(range(rank, stages[0].chunk.count, size)):
            raise InputError(
                f"stages of chunks {numbers} were given to pipeline rank {rank} of {size}: give c % pp == rank"
            )
        if (schedule == "Interleaved1F1B") != (len(stages) > 1):
            raise InputError(f"schedule={schedule!r} does not fit {len(stages)} stages a rank: 1F1B has one")
        self.stages = tuple(stages)
        self.mesh = mesh
        self.config: ModelConfig = stages[0].config
        self._group, self._schedule, self._dtype = group, schedule, dtype
        self._made: dict[bool, _Prepared] = {}  # by whether it learns
        self._copies = _Copies(self.stages, group)
        # NCCL makes a group's communicator at its first use, by all of its ranks; schedules begin with some.
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=group)

    def step(
        self, micro_batches: Sequence[MicroBatch], divisors: tuple[int, int], stage: StageConfig, train: TrainConfig
    ) -> Share:
        """Add the gradients of these micro-batches to the parameters' `.grad`.

        micro_batches: this rank's, the same on all pipeline ranks. divisors: labels and rows of the whole global batch.
        Returns the losses of these micro-batches from all stages, summed, on every rank. Waits for the device.
        Raises InputError where the schedule cannot order so many micro-batches.
        """
        size, count = self.mesh.size("pp"), len(micro_batches)
        if count < size or (len(self.stages) > 1 and count % size):
            what = "a multiple of" if len(self.stages) > 1 else "at least"
            raise InputError(
                f"{count} micro-batches were given: {self._schedule} needs {what} pp={size}; cut them finer"
            )
        labels, rows = divisors
        run = learning_pass(stage, train, rows)
        return self._run(micro_batches, run, stage, labels, bf16=train.dtype == "bfloat16", learns=True)

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[MicroBatch], run: Pass, labels: int | Tensor, *, bf16: bool = False
    ) -> Share:
        """Losses without gradients, as `step` returns them, of any number of micro-batches from 1.

        run: as for the whole model; its `with_mtp` must be given where multi-token prediction is to run. A probe is
        called where its layer is. labels: the divisor. bf16: compute in bfloat16.
        """
        if not micro_batches:
            raise InputError("micro_batches is empty; give at least one")
        return self._run(micro_batches, run, StageConfig(mode=run.mode), labels, bf16=bf16, learns=False)

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        run: Pass,
        stage: StageConfig,
        labels: int | Tensor,
        *,
        bf16: bool,
        learns: bool,
    ) -> Share:
        """The losses of all stages, summed, on every rank."""
        with_mtp = self.config.mtp.depths > 0 and (learns or bool(run.with_mtp))
        made = self._prepared(len(micro_batches), max(len(micro.tokens) for micro in micro_batches), with_mtp, learns)
        rest = (stage, labels, with_mtp, made.rows, self._dtype, bf16)
        tasks = [Task(micro, replace(run, ranks=micro.ranks), *rest) for micro in micro_batches]
        with _gradients_aside(self.stages):
            try:
                made.run(tasks)
            except BaseException as error:
                self._made.clear()  # it holds losses of a step that will not end
                if isinstance(error.__cause__, DsattnError):
                    raise error.__cause__ from None  # torch wraps what a stage raises
                raise
            if learns:
                self._copies.sum_gradients()
        mine = Share.total(share for task in tasks for share in task.shares)
        return _all_reduced(mine, self.config, self._group, self.mesh.device)

    def _prepared(self, count: int, rows: int, with_mtp: bool, learns: bool) -> "_Prepared":
        """Torch's schedule with buffers that are large enough: the last one, unless it is a quarter too large."""
        made = self._made.get(learns)
        if made is None or (made.count, made.with_mtp) != (count, with_mtp) or not rows <= made.rows <= 1.25 * rows:
            self._made.pop(learns, None)  # its buffers go first
            parts = [self._part(stage, rows, with_mtp, learns) for stage in self.stages]
            name = self._schedule if learns else "GPipe" if len(parts) == 1 else "LoopedBFS"
            kind = get_schedule_class(name)
            first: Any = parts if issubclass(kind, PipelineScheduleMulti) else parts[0]
            schedule = kind(first, count, loss_fn=_given_loss if learns else None, scale_grads=False)
            self._made[learns] = made = _Prepared(count, rows, with_mtp, learns, schedule, parts)
        return made

    def _part(self, stage: DecoderStage, rows: int, with_mtp: bool, learns: bool) -> PipelineStage:
        chunk = stage.chunk
        sent = torch.empty(rows, self.config.hidden_size, dtype=self._dtype, device="meta", requires_grad=learns)
        wide = torch.promote_types(self._dtype, torch.float32)
        loss = torch.empty((), dtype=wide, device="meta", requires_grad=learns)
        return PipelineStage(
            stage,
            chunk.number,
            chunk.count,
            self.mesh.device,
            input_args=(sent,) * chunk.enters(with_mtp),
            output_args=(loss,) if chunk.head else (sent,) * chunk.leaves(with_mtp),
            group=self._group,
        )


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Torch's schedule and stages for `count` micro-batches of at most `rows` rows, with their buffers."""

    count: int
    rows: int
    with_mtp: bool
    learns: bool
    schedule: Any
    parts: Sequence[PipelineStage]

    def run(self, tasks: Sequence[Task]) -> None:
        """The one call of torch's that is not public: `step` of torch 2.13 and before would cut each input itself."""
        for part in self.parts:
            part.has_backward = self.learns
            part.clear_runtime_states()
        self.schedule._step_microbatches(
            arg_mbs=[()] * self.count, kwarg_mbs=[{"task": task} for task in tasks], target_mbs=[None] * self.count
        )
        for part in self.parts:
            part.clear_runtime_states()


def _given_loss(loss: Tensor, target: None) -> Tensor:
    return loss


def _all_reduced(share: Share, config: ModelConfig, group: dist.ProcessGroup, device: torch.device) -> Share:
    """The sum of all ranks' shares, on every rank, in one all-reduce."""
    places = config.num_layers + config.mtp.depths
    experts = 0 if config.moe is None else config.moe.experts
    widths = {("lm", 0): 1, ("balance", 0): 1, ("mtp", 0): config.mtp.depths}
    widths |= {("kl", layer): 1 for layer in range(places)} | {("loads", layer): experts for layer in range(places)}
    mine = share.values()
    there = torch.tensor([float(name in mine) for name in widths], dtype=torch.float64)
    parts = [
        mine[name].double().reshape(-1) if name in mine else torch.zeros(width, dtype=torch.float64, device=device)
        for name, width in widths.items()
    ]
    vector = torch.cat([there.to(device), *parts])
    dist.all_reduce(vector, group=group)
    present, *parts = vector.split([len(widths), *widths.values()])
    values = {
        name: part if name[0] in ("mtp", "loads") else part[0]
        for name, part, held in zip(widths, parts, present.tolist(), strict=True)
        if held
    }
    return Share.of({name: value.round().long() if name[0] == "loads" else value for name, value in values.items()})


class _Copies:
    """The copies of the embedding's weights on this rank, whose gradients are to be those of all uses."""

    def __init__(self, stages: Sequence[DecoderStage], group: dist.ProcessGroup):
        holders, size = stages[0].chunk.embedding_in, dist.get_world_size(group)
        self._stages = [stage for stage in stages if stage.chunk.number in holders] if len(holders) > 1 else []
        ranks = sorted({number % size for number in holders})
        self._group: Any = None
        if self._stages and len(ranks) > 1:
            others = [dist.get_global_rank(group, rank) for rank in ranks]
            self._group = group if len(ranks) == size else dist.new_group(others, use_local_synchronization=True)

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients."""
        weights = [stage.model.embed_tokens.weight for stage in self._stages]
        weights = [weight for weight in weights if weight.requires_grad]
        if not weights:
            return
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        first, *others = [_local(weight.grad) for weight in weights]
        for other in others:
            first += other
        if self._group is not None:
            dist.all_reduce(first, group=self._group)
        for other in others:
            other.copy_(first)


@contextlib.contextmanager
def _gradients_aside(stages: Sequence[DecoderStage]) -> Iterator[None]:
    """Gradients from before are added to those from inside, which torch's first pass of a schedule would drop."""
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves whole weights in place of the parameters
    with set_aside(one for stage in stages for one in stage.parameters()):
        yield


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "each copy has one"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
