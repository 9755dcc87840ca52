"""The memory of one rank at its fullest moment, by part: what doctor prints before anything is launched.

    standing    parameters, gradients and AdamW's two moments, in fp32, of the rank's share (FSDP2 cuts it further)
    weights     whole layers that FSDP2 gathers, or autocast's copies where nothing is sharded
    activations what layers keep for their backward, for every micro-batch in flight
    at work     the most that one layer, or the head, needs beyond that: run again, gradients, a kernel's scratch

The fullest moment is one of: attention's backward in the last layer, its MLP's, the forward of a layer that selects,
the backward of the logits. Rows are spread evenly, experts are loaded equally. Left out: the allocator's rounding and
fragments, NCCL's buffers, the CUDA context.
"""

from dataclasses import dataclass
from typing import Literal

from dsattn.accounting.kept import FP32, Kept
from dsattn.accounting.memory import all_copies, layer_parts_kept, refuse_uncounted, row_memory
from dsattn.accounting.place import Place, Weights, learning, micro_batches, place
from dsattn.accounting.scratch import (
    attention_backward,
    dense_attention,
    indexer_loss,
    logits,
    loss_target,
    probabilities,
    selection,
)
from dsattn.accounting.weights import owning_layers
from dsattn.config import Mode, RunConfig

Device = Literal["cpu", "cuda"]

WORKSPACE = 2**25  # cuBLAS's, on a Hopper GPU
_NAMES = {"selects": "a layer that selects", "shares": "a layer that shares", "dense": "a dense layer"}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. moment: where the peak is."""

    standing: dict[str, int]
    activations: dict[str, int]
    at_work: dict[str, int]
    moment: str

    @property
    def parts(self) -> dict[str, int]:
        """Every part that is not empty."""
        every = self.standing | self.activations | self.at_work
        return {name: size for name, size in every.items() if size}

    @property
    def peak(self) -> int:
        """Bytes alive at once, at most."""
        return sum(self.parts.values())


def memory_plan(run: RunConfig, mode: Mode, *, stage: int = 0, device: Device = "cuda") -> MemoryPlan:
    """Of a rank of pipeline stage `stage`, training in `mode`, from a step's second micro-batch on.

    device: kernels' scratch differs, and torch's RMSNorm keeps more on a CPU. Raises InputError for models with linear
    layers or two kinds of attention, ConfigError where the model cannot be cut so.
    """
    refuse_uncounted(run.model)
    here = place(run, stage)
    kept = layers_kept(here, run, mode, fused_norms=device == "cuda")
    standing = _standing(here, run, mode)
    head = any(chunk.head for chunk in here.chunks)
    decoder = sum(len(chunk.layers) for chunk in here.chunks)
    a_row = row_memory(kept[:decoder], kept[decoder:], run.train.recompute, head=head)
    flights = min(here.in_flight, micro_batches(run) * len(here.chunks)) / len(here.chunks)
    activations = {name: round(flights * here.rows * size) for name, size in a_row.items()}
    moment, at_work = max(_moments(here, kept, run, device).items(), key=lambda item: sum(item[1].values()))
    if device == "cuda":
        standing["workspace"] = WORKSPACE
    return MemoryPlan(standing, activations, at_work, moment)


def layers_kept(here: Place, run: RunConfig, mode: Mode, *, fused_norms: bool = True) -> list[Kept]:
    """One entry for each layer, or depth of multi-token prediction, that runs on this rank."""
    size = 2 if run.train.dtype == "bfloat16" else FP32
    shape = (here.keys // max(here.rows, 1), here.stream_shards, here.indexer_shards, here.parallel.ep > 1)
    reuse = run.train.recompute_reuse_selection
    decoder = sum(len(chunk.layers) for chunk in here.chunks)
    return [
        Kept(here.model, layer, mode, size, FP32 if number < decoder else size, fused_norms, *shape, reuse)
        for number, layer in enumerate(here.runs)
    ]


def _standing(here: Place, run: RunConfig, mode: Mode) -> dict[str, int]:
    layers = [here.weights(layer) for layer in here.layers]
    total = sum(layers, here.around())
    around = here.around() if mode != "warmup" else Weights()
    learns = sum((learning(one, mode) for one in layers), around)
    held, taught = _share(total, here), _share(learns, here)
    standing = {"parameters": FP32 * held, "gradients": FP32 * taught, "optimiser": 2 * FP32 * taught}
    dense = here.parallel.dp_shard * here.parallel.cp
    staged = dense * here.parallel.dp_replicate > 1 and here.parallel.pp > 1
    if dense > 1 or _expert_shards(here) > 1 or staged:
        if staged:  # scattered behind the step's last backward
            standing["gradients, whole"] = FP32 * (_count(learns) - taught)
        return standing | {"gathered weights": _gathered(here, layers, run, mode)}
    owners = [owning_layers(run.model)[layer] for layer in here.layers]
    again, dtype = run.train.recompute, run.train.dtype
    copies = all_copies(here.model, owners, mode, again, dtype=dtype, expert_count=here.experts)
    return standing | {"weights in bf16": copies}


def _share(weights: Weights, here: Place) -> int:
    """Of FSDP2's shards."""
    shards = here.parallel.dp_shard * here.parallel.cp
    return -(-(weights.split + weights.whole) // shards) + -(-weights.experts // _expert_shards(here))


def _expert_shards(here: Place) -> int:
    parallel = here.parallel
    dense = parallel.dp_shard * parallel.cp
    return dense if parallel.ep == 1 else dense * parallel.tp // parallel.ep


def _gathered(here: Place, layers: list[Weights], run: RunConfig, mode: Mode) -> int:
    """A layer and the one fetched ahead, a layer's gradients as they are reduced in fp32; the root unit and its own.

    In a warm-up the gradients of all layers wait for the end of the backward, which goes on into no layer before. In a
    pipeline a backward frees no unit, so that the whole stage stands.
    """
    size = 2 if run.train.dtype == "bfloat16" else FP32
    if here.parallel.pp > 1 and mode != "warmup":
        return size * (sum(map(_count, layers)) + here.around().whole)
    largest = max(map(_count, layers), default=0)
    taught = [_count(learning(one, mode)) for one in layers] or [0]
    waiting = sum(taught) if mode == "warmup" else max(taught)
    root = here.around().whole * (1 if mode == "warmup" else 2)
    return size * (2 * largest + root + waiting) + FP32 * max(taught)


def _count(weights: Weights) -> int:
    return weights.split + weights.whole + weights.experts


def _moments(here: Place, kept: list[Kept], run: RunConfig, device: Device) -> dict[str, dict[str, int]]:
    """What is alive beyond what every layer keeps, by moment and part; a part may be below zero: already given back."""
    rows, policy = here.rows, run.train.recompute
    moments: dict[str, dict[str, int]] = {}
    behind = 0  # bytes a row of what later layers keep: not there yet in a forward, given back in a backward

    def add(name: str, parts: dict[str, int]) -> None:
        """Of layers with one name the fullest moment."""
        parts = parts | ({"given back": parts.get("given back", 0) - rows * behind} if behind else {})
        if name not in moments or sum(parts.values()) > sum(moments[name].values()):
            moments[name] = parts

    seen: set[Kept] = set()
    if any(chunk.head for chunk in here.chunks) and kept and kept[0].backbone_learns:
        moments["logits, backward"] = {"logits": logits(run.model.vocab_size, rows // here.stream_shards)}
    for one in reversed(kept):
        whole, own = sum(one.everything().values()), sum(layer_parts_kept(one, policy).values())
        if one in seen:
            behind += own
            continue
        seen.add(one)
        mlp, result = (sum(one.of_mlp().values()), one.result_norm()) if one.backbone_learns else (0, 0)
        again = {"none": 0, "full": whole - own, "selective": _attention_again(one)}[policy] - result
        name = _NAMES[one.layer.role].replace("layer", "depth" if one.layer.ahead else "layer")
        stream = 2 * FP32 * run.model.hidden_size // here.stream_shards
        if one.runs_again:
            scratch = max(attention_backward(one, here, device), indexer_loss(one, here, device))  # one after the other
            add(
                f"attention of {name}, backward",
                {
                    **_again(rows * (again - (mlp if policy != "selective" else 0))),
                    "gradients in flight": rows * (_gradients(one) + stream),
                    "scratch": scratch,
                },
            )
        if one.backbone_learns:
            again = mlp - result if policy == "selective" else again
            add(
                f"MLP of {name}, backward",
                {**_again(rows * again), "gradients in flight": rows * (_mlp_gradients(one) + stream)},
            )
        left = probabilities(one, here, device) if policy == "none" else 0  # a replay repeats no loss
        scratch = max(
            selection(one, here, device), left, loss_target(one, here, device), dense_attention(one, here, device)
        )
        if one.backbone_learns:
            first = sum(one.of_attention().values()) if policy != "none" else -mlp - result
        else:
            q, k, v, out = one.core()
            first = v + out + (0 if policy == "none" and one.has_loss else q + k) + stream
            add(f"MLP of {name}, forward", {"run again": rows * (_mlp_forward(one) + stream)})
        add(f"attention of {name}, forward", {**_again(rows * first), "scratch": scratch})
        behind += own
    return moments or {"nothing": {}}


def _again(size: int) -> dict[str, int]:
    """Below zero where the backward has given back what stood behind this place."""
    return {"run again" if size > 0 else "given back": size}


def _attention_again(one: Kept) -> int:
    """Bytes a row that selective recompute makes again of attention; norms read what is kept in the same dtype."""
    if not one.backbone_learns:
        return 0
    kept = one.to_run_again(whole=False)
    again = sum(one.of_attention().values()) + one.indexer() + one.selection() + one.loss_found()
    again -= kept.get("selection", 0) + kept.get("indexer loss", 0)
    return (
        again
        - one.stream * one.config.hidden_size // one.shards
        - (kept.get("attention projections", 0) if one.itemsize == FP32 else 0)
    )


def _gradients(one: Kept) -> int:
    """Bytes a row of the gradients that attention's backward reads and makes."""
    total = sum(one.core()) if one.backbone_learns else 0
    return total + (one.index() if one.indexer_learns else 0)


def _mlp_forward(one: Kept) -> int:
    """Bytes a row of what a fixed MLP makes: gate, up, and their product."""
    moe = one.config.moe
    if not one.layer.experts or moe is None:
        return 3 * one.itemsize * one.config.intermediate_size
    a_slot = one.config.hidden_size + 4 * moe.intermediate_size
    return one.itemsize * moe.experts_per_token * a_slot // one.shards


def _mlp_gradients(one: Kept) -> int:
    """Bytes a row of the gradients of the MLP's product and of its factors."""
    moe = one.config.moe
    if not one.layer.experts or moe is None:
        return one.itemsize * (3 * one.config.intermediate_size + one.config.hidden_size)
    slots = moe.experts_per_token
    return one.itemsize * slots * (4 * moe.intermediate_size + 2 * one.config.hidden_size) // one.shards
