"""What one rank of a parallel run holds: its chunks and layers, its part of each weight, its rows.

Ranks of one pipeline stage hold as much as each other, so the stage says it all. Weights split over tp are those of the
heads and of the MLP's inner width; latent projections, indexers, routers, shared experts, embedding and head stay whole
on every tp rank.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dsattn.accounting.weights import (
    Layer,
    attention_matrices,
    depths,
    expert_matrices,
    indexer_matrices,
    join_matrices,
    layer_vectors,
    mlp_matrices,
    owning_layers,
)
from dsattn.config import GQAConfig, MLAConfig, Mode, ModelConfig, ParallelConfig, RunConfig
from dsattn.model.stage import Chunk, cut


@dataclass(frozen=True)
class Weights:
    """Parameters of a rank. split: over tp. whole: as on every tp rank. experts: over ep. indexer: part of `whole`."""

    split: int = 0
    whole: int = 0
    experts: int = 0
    indexer: int = 0

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))


@dataclass(frozen=True)
class Place:
    """A pipeline stage's ranks.

    chunks: in order of execution. layers: indices of the layers whose weights stand here, those of multi-token
    prediction behind the decoder's. runs: what runs for one micro-batch, a layer for each depth of a repeated one.
    rows: that attention heads read, a micro-batch; of these `rows // stream_shards` stand in the residual stream.
    keys: rows of keys, padded as the loader pads one document a micro-batch: short ones cost more, 2 * cp rows each.
    model: with the heads and the inner width of one rank.
    """

    config: ModelConfig
    parallel: ParallelConfig
    chunks: tuple[Chunk, ...]
    layers: tuple[int, ...]
    runs: tuple[Layer, ...]
    rows: int
    keys: int
    model: ModelConfig

    @property
    def stream_shards(self) -> int:
        """Parts that sequence parallelism cuts a rank's rows into."""
        return self.parallel.tp if self.parallel.sequence_parallel else 1

    @property
    def indexer_shards(self) -> int:
        """Parts of these rows that each rank's indexer works on."""
        return self.parallel.tp if self.parallel.split_indexer_rows else 1

    @property
    def experts(self) -> int:
        """Routed experts of each layer."""
        return 0 if self.config.moe is None else self.config.moe.experts // self.parallel.ep

    @property
    def in_flight(self) -> int:
        """Chunks whose micro-batch waits for its backward, at most: what a schedule of many micro-batches reaches."""
        pp, vpp, stage = self.parallel.pp, self.parallel.vpp, self.chunks[0].number % self.parallel.pp
        return pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1

    def owner(self, number: int) -> int:
        """Which of `layers` has the weights of entry `number` of `runs`; a layer that is repeated is the last one."""
        return self.layers[min(number, len(self.layers) - 1)]

    def weights(self, layer: int) -> Weights:
        """Of one of `layers`, on this rank before sharding by FSDP2: a unit of its own."""
        return layer_weights(self.config, owning_layers(self.config)[layer], self.parallel)

    def around(self) -> Weights:
        """Of embedding, last norm and head: FSDP2's root unit."""
        config = self.config
        table = config.vocab_size * config.hidden_size
        embeds = any(chunk.number in chunk.embedding_in for chunk in self.chunks)
        head = any(chunk.head for chunk in self.chunks) and not config.tie_embeddings
        norms = any(chunk.norms for chunk in self.chunks) * config.hidden_size
        return Weights(whole=(embeds + head) * table + norms)


def place(run: RunConfig, stage: int = 0) -> Place:
    """What the ranks of pipeline stage `stage` (from 0) hold. Raises ConfigError where the model cannot be cut so."""
    config, parallel = run.model, run.parallel
    every = cut(config, parallel.chunks(config.num_layers, config.mtp.depths))
    chunks = tuple(chunk for chunk in every if chunk.number % parallel.pp == stage)
    owners, ahead = owning_layers(config), depths(config)
    layers = [index for chunk in chunks for index in chunk.layers]
    runs = [owners[index] for index in layers]
    for chunk in chunks:
        runs += [ahead[depth] for depth in chunk.depths]
        own = [config.num_layers + (0 if config.mtp.repeated else depth) for depth in chunk.depths]
        layers += dict.fromkeys(own)
    _, keys = padded_rows([run.data.pack_tokens * run.train.packs_per_micro_batch], parallel.cp, parallel.tp)
    local = local_model(config, parallel)
    return Place(config, parallel, chunks, tuple(layers), tuple(runs), keys // parallel.cp, keys, local)


def padded_rows(lengths: Sequence[int], cp: int, tp: int) -> tuple[list[int], int]:
    """(rows of each document, rows of all) of a micro-batch whose documents `cp` ranks share, each with `tp` ranks."""
    slots = [_up(length, 2 * cp) if cp > 1 else length for length in lengths]
    return slots, max(_up(sum(slots), cp * tp), cp * tp)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def micro_batches(run: RunConfig) -> int:
    """Of a rank in one step."""
    own = max(run.train.packs_per_step // run.parallel.batch_ranks, 1)
    return max(own // run.train.packs_per_micro_batch, 1)


def local_model(config: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """The model with one tp rank's heads and inner width, for counting its activations."""
    attention = config.attention
    if isinstance(attention, GQAConfig):
        mine = dataclasses.replace(
            attention, heads=attention.heads // parallel.tp, kv_heads=attention.kv_heads // parallel.tp
        )
    else:
        mine = dataclasses.replace(attention, heads=attention.heads // parallel.tp)
    return dataclasses.replace(config, attention=mine, intermediate_size=config.intermediate_size // parallel.tp)


def layer_weights(config: ModelConfig, layer: Layer, parallel: ParallelConfig) -> Weights:
    """Parameters of one layer on one rank of tp and ep."""
    whole = config.hidden_size * _latent_width(config, layer)
    attention = sum(i * o for _, i, o in attention_matrices(config, layer.kind))
    whole = attention if layer.kind == "linear" else whole
    split = attention - whole
    mlp, experts = sum(i * o for _, i, o in mlp_matrices(config, experts=layer.experts)), 0
    if layer.experts and config.moe is not None:
        experts = config.moe.experts // parallel.ep * sum(i * o for _, i, o in expert_matrices(config))
        whole += mlp
    else:
        split += mlp
    indexer = 0
    if layer.role == "selects":
        geometry = config.dsa.indexer
        places = geometry.pool_size * geometry.head_dim if geometry.pool_size > 1 else 0
        indexer = sum(i * o for _, i, o in indexer_matrices(config)) + places + 2 * geometry.head_dim
    if layer.ahead:
        whole += sum(i * o for _, i, o in join_matrices(config))
    whole += layer_vectors(config, layer) + indexer
    return Weights(-(-split // parallel.tp), whole, experts, indexer)


def learning(weights: Weights, mode: Mode) -> Weights:
    """Those that get a gradient."""
    if mode == "warmup":
        return Weights(whole=weights.indexer, indexer=weights.indexer)
    if mode == "sparse":
        return weights
    return dataclasses.replace(weights, whole=weights.whole - weights.indexer, indexer=0)


def _latent_width(config: ModelConfig, layer: Layer) -> int:
    """Of what hidden states are projected to before heads are split: MLA's latents."""
    attention = None if layer.kind == "linear" else config.attention_of(layer.kind)
    return attention.latent_width + (attention.q_lora_rank or 0) if isinstance(attention, MLAConfig) else 0
