"""`dsattn convert SRC DST`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from dsattn.cli.arguments import UsageError, parse


@dataclass(frozen=True)
class Options:
    """Turn a Hugging Face folder into a run to train from, or a run into a Hugging Face folder."""

    source: tyro.conf.Positional[Path]
    """A Hugging Face folder (config.json, *.safetensors), a run folder, or one checkpoint in it."""
    target: tyro.conf.Positional[Path]
    """A folder that does not exist yet, or is empty."""
    to: Literal["auto", "dsattn", "hf", "megatron"] = "auto"
    """What to write; `auto` is the other format. `megatron` names weights as Megatron Core does, unsharded."""
    dense: bool = False
    """Keep a dense model dense; otherwise its dense layers get fresh indexers."""
    index_heads: int = 64
    """Heads of fresh indexers."""
    index_head_dim: int | None = None
    """Width of a head of fresh indexers; none means 128, or what the attention rotates where that is more."""
    index_top_k: int = 2048
    """Keys that fresh indexers keep."""
    index_rope_interleaved: bool = False
    """Fresh indexers rotate neighbouring lanes, as in GLM-5; otherwise halves, as in DeepSeek-V3.2."""
    seed: int = 0
    """Seed of fresh indexers."""
    latent_norm_eps: float | None = None
    """Epsilon of MLA's latent norms; none means 1e-6, as in transformers (other engines run GLM-5 with 1e-5)."""
    like: Path | None = None
    """To hf: a Hugging Face folder whose dtypes, tokenizer and other files are taken over, such as the original."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """To hf or megatron: dtype of the weights; `auto` is that of `--like`, of a Hugging Face source, else float32."""
    shard_gb: float = 5.0
    """To hf or megatron: most gigabytes (10^9 bytes) of one file."""
    sha256: Path | None = None
    """Write the SHA-256 of every tensor, as the new folder holds it, to this JSON file."""


def run(arguments: list[str]) -> int:
    """Convert and say what was done."""
    options = parse(Options, arguments, prog="dsattn convert")
    if not options.shard_gb > 0:
        raise UsageError(f"--shard-gb={options.shard_gb} must be above 0")
    from dsattn.integrations.checkpoints import ConvertOptions, convert
    from dsattn.integrations.sources import format_of

    source = format_of(options.source)
    to = ("dsattn" if source == "hf" else "hf") if options.to == "auto" else options.to
    indexer = {
        "heads": options.index_heads,
        "head_dim": options.index_head_dim,
        "top_k": options.index_top_k,
        "rope_interleaved": options.index_rope_interleaved,
    }
    changed = {name: value for name, value in indexer.items() if value != getattr(Options, f"index_{name}")}
    done = convert(
        options.source,
        options.target,
        ConvertOptions(
            to=to,
            dense=options.dense,
            indexer=changed or None,
            seed=options.seed,
            like=options.like,
            dtype=None if options.dtype == "auto" else options.dtype,
            shard_bytes=int(options.shard_gb * 1e9),
            latent_norm_eps=options.latent_norm_eps,
            digests=options.sha256 is not None,
        ),
    )
    for note in done.notes:
        print(f"note: {note}")
    if done.fresh:
        print(f"fresh indexers: {len(done.fresh)} tensors (seed {options.seed}); train them in mode warmup")
    if done.rounded:
        print(f"rounded: {len(done.rounded)} tensors do not fit their dtype exactly, {done.rounded[0]} first")
    if options.sha256 is not None:
        options.sha256.write_text(json.dumps(done.digests, indent=1) + "\n")
    print(f"{done.tensors} tensors of {options.source} ({source}) are in {options.target} ({to})")
    return 0
