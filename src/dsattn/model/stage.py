"""A part of the decoder for one stage of a pipeline: what its chunk holds, under the whole model's parameter names.

    first chunk            chunks between               last chunk
    embedding, layers  ->  layers                   ->  layers, norm, head, losses
                                                        or the depths of MTP before the head

One tensor [T, M] goes from stage to stage: the residual stream. Where depths of multi-token prediction stand before the
last chunk, the decoder's normed hidden states and those of each depth so far do. Tokens, labels and layout do not go
through the pipe: every stage gets its micro-batch from the loader. No selection goes through either, so every chunk
begins with a layer that selects (`ModelConfig.pipeline_problems`).
Losses of inner layers (the indexers' KL, the experts' balance) join the backward of their own stage.
Letters: T rows, M model width, N depths of multi-token prediction, E experts.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsattn.config import ModelConfig, StageConfig
from dsattn.errors import ConfigError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder, DecoderOutput
from dsattn.model.moe import Routing
from dsattn.model.mtp import shifted
from dsattn.model.sharing import Sharing
from dsattn.nn.ranks import Ranks
from dsattn.nn.state import Pass


@dataclass(frozen=True)
class Chunk:
    """What one pipeline chunk holds.

    number: from 0, in order of execution, of `count`. embeds: opens with the embedding. layers: of the decoder. depths:
    of multi-token prediction, from 0; an empty range begins at the depths before it. head: ends with head and losses.
    embedding_in: the chunks that read the embedding's weights: the first, those with MTP, the last if they are tied.
    """

    number: int
    count: int
    embeds: bool
    layers: range
    depths: range
    head: bool
    embedding_in: tuple[int, ...]

    @property
    def norms(self) -> bool:
        """Whether the decoder's last norm stands here: before the first depth of MTP, or before the head."""
        return self.depths.start == 0 and (len(self.depths) > 0 or self.head)

    def enters(self, with_mtp: bool) -> int:
        """Tensors [T, M] that come from the chunk before."""
        return 0 if self.number == 0 else 1 + self.depths.start * with_mtp

    def leaves(self, with_mtp: bool) -> int:
        """Tensors [T, M] that go to the next chunk."""
        return 0 if self.head else 1 + self.depths.stop * with_mtp


def cut(config: ModelConfig, chunks: Sequence[str]) -> tuple[Chunk, ...]:
    """The chunks of `ParallelConfig.chunks`, numbered through. Raises ConfigError where `config` cannot be cut so."""
    if problems := list(config.pipeline_problems(chunks)):
        raise ConfigError([f"parallel.pipeline_layout: {problem}" for problem in problems])
    tied = config.tie_embeddings
    embedding_in = tuple(
        number for number, held in enumerate(chunks) if "E" in held or "m" in held or (tied and "L" in held)
    )
    made: list[Chunk] = []
    layer = depth = 0
    for number, held in enumerate(chunks):
        layers, depths = range(layer, layer + held.count("t")), range(depth, depth + held.count("m"))
        layer, depth = layers.stop, depths.stop
        made.append(Chunk(number, len(chunks), "E" in held, layers, depths, "L" in held, embedding_in))
    if not made[0].embeds or not made[-1].head:
        raise ConfigError([f"parallel.pipeline_layout: chunks={tuple(chunks)} must begin with E and end with L"])
    return tuple(made)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch as every stage gets it, on the device.

    tokens, labels: [T] int64, labels -100 for none. tokens_ahead, labels_ahead: [N, T], `look_ahead` of the whole pack;
    needed with multi-token prediction where these rows are a part of it. ranks: `Pass.ranks`.
    """

    tokens: Tensor
    labels: Tensor
    layout: Layout
    tokens_ahead: Tensor | None = None
    labels_ahead: Tensor | None = None
    ranks: Ranks | None = None


@dataclass(frozen=True)
class Share:
    """A share of a global batch's losses, detached: what some layers added for some micro-batches.

    lm, mtp [N]: over the labels of the global batch; None where no head ran. kl: by layer, over its real rows. balance:
    of the experts, summed over layers. loads: [E] by layer, tokens of each expert.
    """

    lm: Tensor | None = None
    mtp: Tensor | None = None
    kl: Mapping[int, Tensor] = field(default_factory=dict)
    balance: Tensor | None = None
    loads: Mapping[int, Tensor] = field(default_factory=dict)

    def values(self) -> "Values":
        """What is there, flat."""
        single = {"lm": self.lm, "mtp": self.mtp, "balance": self.balance}
        by_layer = {"kl": self.kl, "loads": self.loads}
        return {(name, 0): value for name, value in single.items() if value is not None} | {
            (name, layer): value for name, values in by_layer.items() for layer, value in values.items()
        }

    @classmethod
    def of(cls, values: "Values") -> "Share":
        """The inverse of `values`."""
        kl, loads = ({key[1]: value for key, value in values.items() if key[0] == name} for name in ("kl", "loads"))
        return cls(values.get(("lm", 0)), values.get(("mtp", 0)), kl, values.get(("balance", 0)), loads)

    @classmethod
    def total(cls, shares: Iterable["Share"]) -> "Share":
        """Their sum; what no share has is missing."""
        given: dict[tuple[str, int], list[Tensor]] = {}
        for share in shares:
            for key, value in share.values().items():
                given.setdefault(key, []).append(value)
        return cls.of({key: torch.stack(values).sum(0) for key, values in given.items()})


Values = Mapping[tuple[str, int], Tensor]
"""By (field of `Share`, layer; 0 where it has none)."""


def losses_of(
    model: Decoder, out: DecoderOutput, micro: MicroBatch, stage: StageConfig, labels: float | Tensor, *, head: bool
) -> tuple[list[Tensor], Share]:
    """(weighted losses that learn, all of them for the record), of what `model` or a chunk of it gave for `micro`.

    labels: real labels of the global batch. head: whether the language model's losses are due here.
    """
    learns = stage.mode != "warmup"
    losses: list[Tensor] = []
    lm = mtp = None
    if head:
        with contextlib.nullcontext() if learns else torch.no_grad():
            lm = model.lm_loss(out.hidden, micro.labels, labels)
            if out.ahead:
                ahead = (out.ahead, micro.labels, micro.layout, labels)
                mtp = model.mtp_losses(*ahead, labels_ahead=micro.labels_ahead)
        if learns:
            losses += [lm] if mtp is None else [lm, stage.mtp_weight * mtp.mean()]
    kl, balance = out.kl_sum, out.balance_sum
    if kl is not None:
        losses.append(stage.kl_weight * kl)
    if balance is not None:
        losses.append(stage.balance_weight * balance)
    share = Share(
        lm=None if lm is None else lm.detach(),
        mtp=None if mtp is None else mtp.detach(),
        kl={layer: value.detach() for layer, value in out.kl.items()},
        balance=None if balance is None else balance.detach(),
        loads={layer: one.load for layer, one in out.routing.items()},
    )
    return losses, share


@dataclass(frozen=True, eq=False)
class Task:
    """What a stage does with one micro-batch.

    run: mode, divisor of the KL, recompute. stage: the losses' weights. labels: real labels of the global batch.
    with_mtp: whether the depths of multi-token prediction run. rows, dtype: of the tensors between stages; rows is at
    least T. bf16: whether the layers compute in bfloat16. shares: every stage that runs here appends its own.
    """

    micro: MicroBatch
    run: Pass
    stage: StageConfig
    labels: int | float | Tensor
    with_mtp: bool
    rows: int
    dtype: torch.dtype = torch.float32
    bf16: bool = False
    shares: list[Share] = field(default_factory=list)


class DecoderStage(Decoder):
    """The parts of a `Decoder` that `chunk` holds; the others are None, layers keep their index.

    Fresh weights are those of the whole model, of which no other part is drawn.
    """

    def __init__(self, config: ModelConfig, chunk: Chunk):
        nn.Module.__init__(self)
        device = torch.get_default_device()
        with torch.device("meta"):
            whole = Decoder(config)
        self.config, self.chunk, self.model, self.lm_head = config, chunk, whole.model, whole.lm_head
        ahead = range(1) if config.mtp.repeated and chunk.depths else chunk.depths
        held = {*chunk.layers, *(config.num_layers + depth for depth in ahead)}
        for index in range(len(self.model.layers)):
            if index not in held:
                setattr(self.model.layers, str(index), None)
        for name, here in (("embed_tokens", chunk.number in chunk.embedding_in), ("norm", chunk.norms)):
            if not here:
                setattr(self.model, name, None)
        if not chunk.head:
            self.lm_head = None
        if device.type != "meta":
            self.to_empty(device=device).reset_parameters()

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters that an earlier chunk holds, too: equal in value and gradient, to be counted once."""
        return frozenset({"model.embed_tokens.weight"} if self.chunk.number in self.chunk.embedding_in[1:] else ())

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *entering: Tensor, task: Task
    ) -> tuple[Tensor, ...] | Tensor:
        """One micro-batch through this chunk.

        entering: what the stage before left, [rows, M] each; their first T rows are read.
        Returns what goes to the next stage, with zeros behind row T; from the last stage the sum of all weighted losses
        that it knows. The backward of either is that of this stage's own losses, too. In mode `warmup` no gradient
        comes from behind, for the backbone is fixed: `entering` gets zeros.
        """
        learns = task.stage.mode != "warmup"
        with torch.autocast(task.micro.tokens.device.type, torch.bfloat16, enabled=task.bf16):
            states, out = self._advance(entering if learns else tuple(one.detach() for one in entering), task)
            losses, share = losses_of(self, out, task.micro, task.stage, task.labels, head=self.chunk.head)
        task.shares.append(share)
        if self.chunk.head and not torch.is_grad_enabled():
            assert share.lm is not None, "the head gives it"
            return share.lm
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=states[0].device, requires_grad=True)
        *before, last = [loss.detach()] if self.chunk.head else [_sent(one, task) for one in states]
        if torch.is_grad_enabled():
            last = _Joined.apply(last, loss, *(() if learns else entering))
            # Of what entered they may be views, and FSDP's hooks warn of those.
            before = [one.clone() for one in before]
        return last if self.chunk.head else (*before, last)

    def _advance(self, entering: tuple[Tensor, ...], task: Task) -> tuple[tuple[Tensor, ...], DecoderOutput]:
        """(hidden states behind this chunk, what its layers gave)."""
        config, chunk, micro, run, backbone = self.config, self.chunk, task.micro, task.run, self.model
        layout, rows = micro.layout, micro.tokens.shape[0]
        sharing = Sharing(config.selection_sources, teach=config.dsa.multi_layer_teacher)
        routing: dict[int, Routing] = {}
        *before, hidden = [one[:rows] for one in entering] or [backbone.embed(micro.tokens, layout)]
        hidden, _ = backbone.run_layers(chunk.layers, hidden, layout, run, sharing, routing)
        if chunk.norms:
            hidden = backbone.norm(hidden)
        states = (*before, hidden)
        if chunk.depths and task.with_mtp:
            tokens = shifted("tokens_ahead", micro.tokens_ahead, micro.tokens, layout, config.mtp.depths)
            states += backbone.run_depths(chunk.depths, hidden, tokens, layout, run, sharing, routing)
        return states, DecoderOutput(states[0], sharing.selections, sharing.kl, None, states[1:], routing)

    @torch.no_grad()
    def move_routing_biases(self, loads: Mapping[int, Tensor], rate: float) -> None:
        """As for the whole model; loads of layers that are elsewhere are passed over."""
        here = {index: load for index, load in loads.items() if self.model.layers[index] is not None}
        super().move_routing_biases(here, rate)

    def _drawn(self) -> Iterator[tuple[str, nn.Module]]:
        """The whole model's modules; those that are elsewhere, on the meta device, take their seeds alone."""
        own = dict(self.named_modules())
        with torch.device("meta"):
            whole = Decoder(self.config)
        yield from ((name, own.get(name, module)) for name, module in Decoder._drawn(whole))


def _sent(hidden: Tensor, task: Task) -> Tensor:
    """[T, M] -> [rows, M], zeros behind row T."""
    hidden, behind = hidden.to(task.dtype), task.rows - hidden.shape[0]
    return F.pad(hidden, (0, 0, 0, behind)) if behind else hidden


class _Joined(torch.autograd.Function):
    """`output` as it is; its backward gives `loss` the gradient 1, and zeros to tensors that get none otherwise."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(loss, *others)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss, *others = ctx.saved_tensors
        return (grads[0], torch.ones_like(loss), *(torch.zeros_like(one) for one in others))
