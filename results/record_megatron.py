"""One absorbed self-attention of Megatron Core beside ours: errors of both against fp32, ms of forward and backward.

    python results/record_megatron.py --commit "$(git rev-parse HEAD)" >> results/megatron.jsonl
    python results/record_megatron.py --table results/megatron.jsonl     # the table of docs/megatron.md

One line of JSON for each of Megatron's backends and packing, in bf16 at DeepSeek-V3.2's widths. The oracle is
Megatron's plain-torch layer in fp32, with the same weights. An error is |x - exact| / |exact|; of the weights'
gradients the largest is told. Ours may be at most 1.2 times as wrong as Megatron's, or below LIMITS; exits with 1 where
it is not. A backend that Megatron refuses, or that fails inside Megatron, is recorded with the reason. Needs
megatron-core on the path.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from record_run import driver
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "integrations"))
import megatron_core as core  # noqa: E402

TOKENS, HIDDEN = 4096, 2048
FIELDS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "init_method_std": 0.02,
    "dsa_indexer_n_heads": 64,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 1024,
    "dsa_indexer_loss_coeff": 1.0,
    "dsa_indexer_use_sparse_loss": True,
}
HALF: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}
BACKENDS = ("none", "tilelang", "cudnn")
PACKINGS = ((TOKENS,), (2500, 96, 1500))
# Hooks that a fused backend must take: Megatron falls back to plain torch without a word where one declines.
HOOKS = {"run_fused_qk_topk_with_loss", "run_fused_absorbed_sparse_attention"}
LIMITS = {"output": 2e-2, "input": 5e-2, "weights": 5e-2, "indexer": 1e-1}
Results = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit")
    parser.add_argument("--dirty", action="store_true", help="the tree differs from that commit")
    parser.add_argument("--table", type=Path, help="print the table of these records, and do nothing else")
    options = parser.parse_args()
    if options.table is not None:
        print("\n".join(table([json.loads(line) for line in options.table.read_text().splitlines()])))
        return
    if options.commit is None:
        parser.error("--commit says which tree is recorded")
    torch.manual_seed(0)
    join(tempfile.mkdtemp())
    about = {"commit": options.commit, "dirty": options.dirty, "date": datetime.datetime.now(datetime.UTC).date()}
    broken = []
    for backend in BACKENDS:
        for lengths in PACKINGS:
            record = compare(backend, lengths)
            print(json.dumps(record | about | environment(), default=str), flush=True)
            broken += [f"{backend}, {lengths}: {one}" for one in worse(record)]
    for one in broken:
        print(one, file=sys.stderr)
    sys.exit(bool(broken))


def join(folder: str) -> None:
    """Import Megatron, with one process joined."""
    core.import_megatron(on_cpu=False)
    core.world = core.start(0, 1, f"{folder}/rendezvous")  # pyright: ignore[reportAttributeAccessIssue]


def compare(backend: str, lengths: tuple[int, ...], *, device: str = "cuda", **fields: Any) -> dict[str, Any]:
    """The record of one case; fields: that differ from FIELDS."""
    record: dict[str, Any] = {"op": "megatron_layer", "backend": backend, "lengths": lengths, "shape": shape(fields)}
    theirs_or_why = megatrons(backend, device, fields)
    if isinstance(theirs_or_why, str):
        return record | {"refused": theirs_or_why}
    theirs, given = theirs_or_why, inputs(lengths, device, FIELDS | fields)
    declined = watch_hooks()
    try:
        found = {"megatron": step(theirs, *given)}
    except Exception as error:  # inside Megatron's backend: not ours to judge
        return record | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    if backend != "none" and HOOKS & declined.keys():
        return record | {"failed": f"fell back to plain torch: {declined}"}
    ours = dsattns(device, fields)
    ours.load_state_dict(theirs.state_dict())
    found["dsattn"] = step(ours, *given)
    exact = oracle(theirs, given, device, fields)
    record["error"] = {name: errors(one, exact) for name, one in found.items()}
    if device == "cuda":
        record["ms"] = {name: milliseconds(one, *given) for name, one in (("megatron", theirs), ("dsattn", ours))}
    return record


def shape(fields: dict[str, Any]) -> dict[str, int]:
    every = FIELDS | fields
    names = {"H": "num_attention_heads", "H_I": "dsa_indexer_n_heads", "K": "dsa_indexer_topk", "M": "hidden_size"}
    return {letter: every[name] for letter, name in names.items()}


def megatrons(backend: str, device: str, fields: dict[str, Any]) -> nn.Module | str:
    """Megatron's layer in bf16, or why it refuses this backend."""
    try:
        config = core.config_of(**FIELDS | HALF | fields, dsa_kernel_backend=backend)
    except (ValueError, AssertionError) as error:
        return str(error)
    spec = core.attention_spec(core.config_of(**FIELDS | HALF | fields))
    return core.build(spec, config, core.world.groups()).to(device, torch.bfloat16).train()


def dsattns(device: str, fields: dict[str, Any]) -> nn.Module:
    from dsattn.integrations.megatron import Options, with_dsattn

    config = core.config_of(**FIELDS | HALF | fields)
    spec = with_dsattn(core.attention_spec(config), config, whole=True, options=Options(rows="megatron"))
    return core.build(spec, config, core.world.groups()).to(device, torch.bfloat16).train()


def inputs(lengths: tuple[int, ...], device: str, fields: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
    """(hidden, gradient of the output, packed parameters), the same in every call."""
    generator = torch.Generator().manual_seed(1)
    hidden, grad = torch.randn(2, sum(lengths), 1, fields["hidden_size"], generator=generator).to(device)
    micro_batch = core.packed(list(lengths))
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        setattr(micro_batch, name, getattr(micro_batch, name).to(device))
    return hidden.bfloat16(), grad.bfloat16(), micro_batch


def watch_hooks() -> dict[str, str]:
    """Grows by each hook that Megatron's fused backend declines, with its reason."""
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    declined: dict[str, str] = {}
    dsa_kernels._log_declined_hook = lambda config, hook, reason: declined.setdefault(hook, reason)
    return declined


def step(module: nn.Module, hidden: Tensor, grad: Tensor, micro_batch: Any) -> Results:
    """Output and gradients, by name."""
    module.zero_grad(set_to_none=True)
    hidden = hidden.clone().requires_grad_()
    out = module(hidden, None, packed_seq_params=micro_batch)[0]
    out.backward(grad)
    learned = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "input": hidden.grad, **learned}


def oracle(theirs: nn.Module, given: tuple[Tensor, Tensor, Any], device: str, fields: dict[str, Any]) -> Results:
    """Megatron's own plain torch in fp32."""
    config = core.config_of(**FIELDS | fields)
    exact = core.build(core.attention_spec(config), config, core.world.groups()).to(device).train()
    exact.load_state_dict({name: x.float() for name, x in theirs.state_dict().items() if isinstance(x, Tensor)})
    hidden, grad, micro_batch = given
    return step(exact, hidden.float(), grad.float(), micro_batch)


def errors(got: Results, exact: Results) -> dict[str, float]:
    """By LIMITS's names: the largest of the weights of each kind."""
    found = dict.fromkeys(LIMITS, 0.0)
    for name, one in exact.items():
        kind = name if name in LIMITS else "indexer" if "indexer" in name else "weights"
        far = ((got[name].double() - one.double()).norm() / one.double().norm()).item()
        found[kind] = max(found[kind], far if far == far else float("inf"))
    return found


def worse(record: dict[str, Any]) -> list[str]:
    """Where ours is too far from the oracle, in words."""
    error = record.get("error", {"dsattn": {}, "megatron": {}})
    return [
        f"{kind}: {ours:.1e}, Megatron's {error['megatron'][kind]:.1e}"
        for kind, ours in error["dsattn"].items()
        if not ours <= max(LIMITS[kind], 1.2 * error["megatron"][kind])
    ]


def milliseconds(module: nn.Module, *given: Any) -> dict[str, float]:
    """Of a forward and backward: 5 after a warm-up."""
    times = []
    for _ in range(6):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        step(module, *given)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return {"median": statistics.median(times[1:]), "min": min(times[1:]), "max": max(times[1:])}


@functools.cache
def environment() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "megatron-core", "tilelang", "nvidia-cudnn-frontend"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"gpu": torch.cuda.get_device_name(), "driver": driver(), "versions": versions}


def table(records: list[dict[str, Any]]) -> list[str]:
    """Of the newest record of each case, as docs/megatron.md has it."""
    newest = {(one["backend"], tuple(one["lengths"])): one for one in records}
    lines = [
        "| Megatron's backend | documents | ms, its own | ours | output's error, its own / ours | weights | indexer |",
        "|---|---|---|---|---|---|---|",
    ]
    for (backend, lengths), one in newest.items():
        where = f"| `{backend}` | {', '.join(map(str, lengths))} |"
        if "error" not in one:
            lines.append(f"{where} {'refused' if 'refused' in one else 'failed'} | | | | |")
            continue
        ms = [f"{one['ms'][name]['median']:.1f}" for name in ("megatron", "dsattn")]
        pairs = (
            f"{one['error']['megatron'][kind]:.1e} / {one['error']['dsattn'][kind]:.1e}"
            for kind in ("output", "weights", "indexer")
        )
        lines.append(f"{where} {' | '.join([*ms, *pairs])} |")
    return lines


if __name__ == "__main__":
    main()
