"""Step time and memory of a recipe by recompute policy, and of a replayed CUDA graph beside eager steps.

    python results/record_recompute.py --commit "$(git rev-parse HEAD)" > results/recompute.jsonl

One line of JSON for each policy, with the first pass's selections reused and without; then one for each pack size that
is run as a graph. A step is one pack of random tokens, in four documents: forward, backward, AdamW; backwards are
deterministic. The losses of every policy must have the bits of those without recompute, and what is kept must be within
5 % of what `dsattn.accounting` tells; exits with 1 where they do not. A CPU (`--recipe tiny`) checks losses.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from record_run import driver
from torch import Tensor

from dsattn import Layout, __version__
from dsattn.accounting import model_memory
from dsattn.accounting.memory import Dtype
from dsattn.config import Mode, ModelConfig, Recompute
from dsattn.model.decoder import Decoder
from dsattn.nn.state import Pass
from dsattn.parallel.graphs import GraphedStep
from dsattn.parallel.recompute import Checkpoints
from dsattn.training.recipes import RECIPES
from dsattn.training.stages import set_mode

RUNS: tuple[tuple[Mode, Recompute, bool], ...] = (
    ("sparse", "none", True),
    ("sparse", "selective", True),
    ("sparse", "selective", False),
    ("sparse", "full", True),
    ("sparse", "full", False),
    ("frozen", "none", True),
    ("frozen", "full", True),
    ("frozen", "full", False),
)
Inputs = tuple[Tensor, Tensor, Layout]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--recipe", default="small", choices=RECIPES)
    parser.add_argument("--tokens", type=int, help="of a pack; default: the recipe's")
    parser.add_argument("--graph-tokens", type=int, nargs="*", default=[4096, 32768])
    parser.add_argument("--no-policies", dest="policies", action="store_false", help="graphs alone")
    parser.add_argument("--steps", type=int, default=2, help="that are timed, after one; of graphs after three")
    options = parser.parse_args()
    recipe = RECIPES[options.recipe]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = dataclasses.replace(recipe.model, dsa=dataclasses.replace(recipe.model.dsa, deterministic=True))
    tokens = options.tokens or recipe.data.pack_tokens
    dtype = recipe.train.dtype
    about = {
        "recipe": options.recipe,
        "dtype": dtype,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "driver": driver(),
        "versions": {"dsattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit,
        "dirty": options.dirty,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    broken = []
    expected: dict[str, list[float]] = {}
    for mode, policy, reuse in RUNS if options.policies else ():
        record = measured(config, mode, Checkpoints(policy, reuse), tokens, dtype, device, options.steps)
        losses = record.pop("losses")
        same = losses == expected.setdefault(mode, losses)
        both = reuse and device.type == "cuda"
        off = abs(record["kept_bytes"] / record["promised_bytes"] - 1) if both else 0.0
        if not same or off > 0.05:
            broken.append(f"{mode} {policy} reuse={reuse}: same losses {same}, memory off by {off:.3f}")
        line = {"op": "recompute", "mode": mode, "recompute": policy, "reuse_selection": reuse, "T": tokens}
        print(json.dumps({**line, **record, "same_losses": same, **about}), flush=True)
    for size in options.graph_tokens if device.type == "cuda" else ():
        record = graphed(config, Checkpoints("full"), size, dtype, device, options.steps)
        if not record["same_losses"]:
            broken.append(f"graph of {size} tokens: other losses than eager steps")
        print(
            json.dumps({"op": "graph", "mode": "sparse", "recompute": "full", "T": size, **record, **about}), flush=True
        )
    for one in broken:
        print(one, file=sys.stderr)
    sys.exit(bool(broken))


def measured(
    config: ModelConfig, mode: Mode, recompute: Checkpoints, tokens: int, dtype: Dtype, device: torch.device, steps: int
) -> dict[str, Any]:
    """ms of a step, the most memory it takes, and what its forward keeps beside what was there before."""
    _, step, forward = new_step(config, mode, recompute, dtype, device)
    given = inputs(config, tokens, device, 0)
    losses, ms = timed(step, [given] * (steps + 1), device, 1)
    record: dict[str, Any] = {
        "ms": ms,
        "losses": losses,
        "peak_bytes": None,
        "kept_bytes": None,
        "promised_bytes": None,
    }
    if recompute.reuse_selection:
        record["promised_bytes"] = model_memory(config, tokens, mode, dtype=dtype, recompute=recompute.policy)
    if device.type == "cuda":
        record["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        loss = forward(*given)
        record["kept_bytes"] = torch.cuda.memory_allocated(device) - before
        del loss
    return record


def graphed(
    config: ModelConfig, recompute: Checkpoints, tokens: int, dtype: Dtype, device: torch.device, steps: int
) -> dict[str, Any]:
    """ms of eager steps and of replays, each pack with documents of its own."""
    packs = [inputs(config, tokens, device, number) for number in range(steps + 3)]
    _, step, _ = new_step(config, "sparse", recompute, dtype, device)
    losses, eager = timed(step, packs, device, 3)
    _, step, _ = new_step(config, "sparse", recompute, dtype, device)
    again, replay = timed(GraphedStep(step), packs, device, 3)
    off = max(abs(a - b) / abs(b) for a, b in zip(again, losses, strict=True))
    return {"eager_ms": eager, "replay_ms": replay, "largest_loss_error": off, "same_losses": off < 1e-3}


def new_step(
    config: ModelConfig, mode: Mode, recompute: Checkpoints, dtype: Dtype, device: torch.device
) -> tuple[Decoder, Callable[..., Tensor], Callable[..., Tensor]]:
    """A fresh model, always the same; a training step of it; and the step's forward."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    with torch.device(device):  # drawn there: on the host it takes longer than the steps
        model = Decoder(config).train()
    set_mode(model, mode)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=3e-4, fused=True, capturable=device.type == "cuda")

    def forward(tokens: Tensor, labels: Tensor, layout: Layout) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            out = model(tokens, layout, Pass(mode=mode, recompute=recompute))
            loss = model.lm_loss(out.hidden, labels)
        return loss if out.kl_sum is None else loss + out.kl_sum

    def step(*given: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(*given)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step, forward


def inputs(config: ModelConfig, tokens: int, device: torch.device, number: int) -> Inputs:
    """Random tokens in four documents, whose lengths differ from number to number."""
    generator = torch.Generator().manual_seed(number)
    cuts = sorted(torch.randint(1, tokens, (3,), generator=generator).tolist())
    lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]
    text, labels = torch.randint(config.vocab_size, (2, tokens), generator=generator)
    return text.to(device), labels.to(device), Layout.packed(lengths).to(device)


def timed(
    step: Callable[..., Tensor], packs: list[Inputs], device: torch.device, untimed: int
) -> tuple[list[float], dict[str, float]]:
    """(loss of each step, ms of the steps behind the first `untimed`: a graph is captured in the third)."""
    losses, ms = [], []
    for given in packs:
        start = time.perf_counter()
        losses.append(step(*given).item())  # waits for the device
        ms.append(1000 * (time.perf_counter() - start))
    ms = ms[untimed:]
    return losses, {"median": statistics.median(ms), "min": min(ms), "max": max(ms)}


if __name__ == "__main__":
    main()
