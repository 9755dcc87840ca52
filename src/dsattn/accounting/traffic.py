"""What the collectives of one layer move for one micro-batch, in bytes that one rank receives.

A gather or scatter over n ranks brings (n - 1) / n of the whole to each, an exchange of rows as much of what leaves. A
recompute replay gathers again, but not what it has from the first pass. Only what grows with rows, keys or weights is
counted, not the two counts of a step.
"""

from typing import NamedTuple

from dsattn.accounting.kept import FP32, Kept
from dsattn.accounting.place import Place, Weights, learning, micro_batches
from dsattn.config import GQAConfig, Mode, RunConfig


class Collective(NamedTuple):
    """group: whose ranks. forward, backward: bytes; the backward has the replay's, too."""

    what: str
    group: str
    kind: str
    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.forward + self.backward


def layer_traffic(here: Place, number: int, kept: Kept, run: RunConfig, mode: Mode) -> list[Collective]:
    """Of the layer that is entry `number` of `here.runs`, whose memory is `kept`; groups of one rank are left out."""
    found = [*_keys(here, kept, mode), *_heads(here, kept), *_experts(here, kept)]
    chosen = _chosen(here, kept)
    if not kept.reuse:
        found, chosen = found + chosen, []
    if run.train.recompute != "none":
        found = [one._replace(backward=one.backward + one.forward * kept.runs_again) for one in found]
    found += chosen + _weights(here, number, kept, run)
    return [one for one in found if one.total]


def stage_traffic(here: Place) -> int:
    """Bytes that go from a chunk here to the next stage, at most, in fp32; as much comes back.

    The residual stream, or behind a depth of multi-token prediction hidden states of the decoder and of each depth.
    """
    if here.parallel.pp == 1:
        return 0
    states = max(chunk.leaves(with_mtp=True) for chunk in here.chunks)
    return states * FP32 * here.config.hidden_size * here.rows // here.stream_shards


def _received(whole: int, ranks: int) -> int:
    return whole * (ranks - 1) // ranks


def _keys(here: Place, kept: Kept, mode: Mode) -> list[Collective]:
    """Latents, or keys and values of the groups, and the indexer's keys, of all ranks."""
    parallel, attention, size = here.parallel, kept.config.attention, kept.itemsize
    ranks = parallel.cp * here.stream_shards
    width = 2 * attention.kv_heads * attention.head_dim if isinstance(attention, GQAConfig) else attention.latent_width
    if isinstance(attention, GQAConfig):
        ranks = parallel.cp
    of_keys = _received(size * width * here.keys, ranks) if kept.layer.own_keys else 0
    group = "cp x tp" if here.stream_shards > 1 and ranks > parallel.cp else "cp"
    learns = kept.backbone_learns
    found = [Collective("latents or keys", group, "all-gather, reduce-scatter", of_keys, of_keys if learns else 0)]
    if kept.layer.role == "selects" and mode != "dense":
        indexer = kept.config.dsa.indexer
        lanes = indexer.head_dim * (2 if indexer.pool_size > 1 else 1)
        moved = _received(size * lanes * here.keys, parallel.cp * here.stream_shards)
        back = moved if kept.indexer_learns else 0
        found.append(Collective("indexer keys", group, "all-gather, reduce-scatter", moved, back))
    return found


def _heads(here: Place, kept: Kept) -> list[Collective]:
    """Around what is split by heads and inner width. Without sequence parallelism a sum moves twice its size."""
    parallel, config, size = here.parallel, here.config, kept.itemsize
    if parallel.tp == 1:
        return []
    factor = 1 if here.stream_shards > 1 else 2
    attention = kept.config.attention
    latent = None if isinstance(attention, GQAConfig) else attention.q_lora_rank
    hidden = _received(size * config.hidden_size * here.rows, parallel.tp)
    entering = _received(size * (latent or config.hidden_size) * here.rows, parallel.tp)
    gather = 1 if here.stream_shards > 1 else 0
    back = int(kept.backbone_learns)
    parts = [
        ("into the heads", gather * entering, factor * entering),
        ("out of the heads", factor * hidden, gather * hidden),
    ]
    if not kept.layer.experts:
        parts += [
            ("into the MLP", gather * hidden, factor * hidden),
            ("out of the MLP", factor * hidden, gather * hidden),
        ]
    return [Collective(what, "tp", "gather or sum", forward, back * backward) for what, forward, backward in parts]


def _chosen(here: Place, kept: Kept) -> list[Collective]:
    """Selected indices to the ranks of all heads; the loss's target from heads to rows, or to all of them.

    In the warm-up the target of what rows read of one document, which the backward makes, and sums, once more.
    """
    found, ranks, shared = [], here.parallel.tp, here.indexer_shards > 1
    if kept.selection() and shared:
        found.append(
            Collective("selected indices", "tp", "all-gather", _received(kept.selection() * here.rows, ranks), 0)
        )
    if kept.has_loss:
        columns = kept.config.dsa.indexer.top_k if kept.sparse else here.keys // 2
        moved = (1 if shared else 2) * _received(FP32 * columns * here.rows, ranks)
        kind = "reduce-scatter" if shared else "all-reduce"
        found.append(Collective("target of the loss", "tp", kind, moved, 0 if kept.sparse else moved))
    return found


def _experts(here: Place, kept: Kept) -> list[Collective]:
    """Rows to their experts and back, with a weight each; loads are taken as equal."""
    moe = here.config.moe
    if not kept.layer.experts or moe is None or here.parallel.ep == 1:
        return []
    sent = moe.experts_per_token * here.rows // here.stream_shards
    moved = _received(sent * (2 * kept.itemsize * here.config.hidden_size + FP32), here.parallel.ep)
    return [Collective("rows to experts and back", "ep", "all-to-all", moved, moved if kept.backbone_learns else 0)]


def _weights(here: Place, number: int, kept: Kept, run: RunConfig) -> list[Collective]:
    """FSDP2: gathered for the forward and again for the backward, gradients scattered in fp32 of what learns.

    A fixed backbone is gathered again only to run again, and then up to the indexer's loss: without experts. A layer
    that depths repeat is gathered for each of them; its gradients wait for the last and are scattered once.
    In a pipeline a backward frees no unit, and the next forward finds it whole: of a step's n micro-batches each
    gathers once, the last backward once more, and gradients are scattered once. The mean of a micro-batch.
    """
    parallel, weights = here.parallel, here.weights(here.owner(number))
    first = number < len(here.layers)
    learns = learning(weights, kept.mode) if first else Weights()
    replayed = kept.runs_again and run.train.recompute != "none"
    size = 2 if run.train.dtype == "bfloat16" else FP32
    dense = parallel.dp_shard * parallel.cp
    parts = [("fsdp", weights.split + weights.whole, learns.split + learns.whole, dense)]
    if parallel.ep > 1:
        parts.append(("efsdp", weights.experts, learns.experts, dense * parallel.tp // parallel.ep))
    else:
        parts[0] = ("fsdp", parts[0][1] + weights.experts, parts[0][2] + learns.experts, dense)
    steps = micro_batches(run) if parallel.pp > 1 else 1

    def again(group: str) -> float:
        """How often for the backward."""
        if kept.backbone_learns:
            return first / steps if parallel.pp > 1 else 1
        return replayed and group == "fsdp"

    return [
        Collective(
            "weights" if group == "fsdp" else "weights of experts",
            group,
            "all-gather, reduce-scatter",
            _received(size * held, ranks),
            round(_received(size * held, ranks) * again(group)) + _received(FP32 * taught, ranks) // steps,
        )
        for group, held, taught, ranks in parts
    ]
