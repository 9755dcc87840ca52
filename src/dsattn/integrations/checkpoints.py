"""Checkpoints converted: of Hugging Face, Megatron Core and dsattn, each into the others or into a new one of its kind.

    open_checkpoint      folder -> configuration and weights under the names of `Decoder`, none of them read yet
    with fresh indexers  where a dense model becomes one that selects
    write                under the target's names, tensor after tensor

A tensor, or one shard, is in memory at a time. Values are kept exactly; a narrower dtype is asked for or follows the
original, and what it rounds is counted.
"""

import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dsattn.config import DataConfig, ModelConfig, RunConfig, StageConfig, TrainConfig
from dsattn.errors import InputError
from dsattn.integrations.hf_config import fresh_indexer, from_hf, to_hf, with_indexers
from dsattn.integrations.hf_names import shapes, to_hf_names
from dsattn.integrations.megatron_names import to_megatron_names
from dsattn.integrations.sources import (
    INDEXER_STEPS,
    MEGATRON,
    TOKENIZER,
    Format,
    Source,
    open_checkpoint,
    open_hf_weights,
    open_run,
    read_config,
)
from dsattn.integrations.stored import Stored, Tensors, digests, open_safetensors, write_safetensors
from dsattn.model import Decoder
from dsattn.training import checkpoint
from dsattn.training.runs import pick_device


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What `convert` does beyond changing names."""

    to: Format = "dsattn"
    """`hf`: a Hugging Face folder. `dsattn`: a run folder, as its step 0. `megatron`: see `megatron_names`."""
    dense: bool = False
    """Keep the dense layers of a Hugging Face model dense; otherwise they get fresh indexers."""
    indexer: Mapping[str, Any] | None = None
    """Fields of fresh indexers' IndexerConfig, in place of those that `hf_config.fresh_indexer` chooses. A dense
    model of another format gets indexers only where this is given."""
    seed: int = 0
    """Seed of fresh indexers."""
    like: Path | None = None
    """To hf: a Hugging Face folder whose dtypes, tokens, lengths and other files (tokenizer, ...) are taken over."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """To hf and megatron: dtype of all but routing biases, which stay float32. None: that of `like`, of an hf source,
    or float32."""
    shard_bytes: int = 5 * 10**9
    """To hf and megatron: most bytes of one file."""
    latent_norm_eps: float | None = None
    """From hf: epsilon of the norms on MLA's latents, where it is not transformers' 1e-6; see `from_hf`."""
    digests: bool = False
    """Read the new checkpoint again and give the SHA-256 of every tensor in it."""

    def __post_init__(self) -> None:
        if self.dense and self.indexer is not None:
            raise InputError("dense=True keeps dense layers, and indexer gives them one; leave one of the two out")


@dataclass(frozen=True)
class Conversion:
    """What was written. fresh: tensors of fresh indexers. rounded: names whose values a narrower dtype changed."""

    path: Path
    config: ModelConfig
    tensors: int
    fresh: tuple[str, ...]
    rounded: tuple[str, ...]
    notes: tuple[str, ...]
    digests: dict[str, str]


def convert(source: Path, target: Path, options: ConvertOptions | None = None) -> Conversion:
    """Write the checkpoint `source` as `target`, a folder that must not exist or be empty.

    source: see `sources`. A dense Hugging Face model gets fresh indexers: normal with `config.init_std`, the key norm
    the identity, each tensor drawn from `seed` and its name. Layers that select keep their indexers, those of MTP
    layers too.
    Raises InputError, before anything is written, where indexers that exist would be replaced or the target cannot say
    what the model is, and CheckpointError with everything that does not fit.
    """
    options = options or ConvertOptions()
    source, target = Path(source), Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not an empty folder; nothing is overwritten, give another")
    opened = open_checkpoint(source, latent_norm_eps=options.latent_norm_eps)
    config, tensors = opened.config, opened.tensors
    if "dsa" in config.types and (options.indexer is not None or options.dense):
        raise InputError(
            f"{source} has indexers ({opened.indexer_steps} steps trained, or more elsewhere), and "
            f"{'dense=True' if options.dense else 'indexer'} would throw them away; leave it out"
        )
    fresh: Tensors = {}
    if "dsa" not in config.types and not options.dense and (opened.format == "hf" or options.indexer is not None):
        config = with_indexers(config, fresh_indexer(config, **(options.indexer or {})))
        fresh = _fresh(config, tensors, options.seed)
    tensors = {name: (tensors | fresh)[name] for name in shapes(config)}
    opened = dataclasses.replace(opened, config=config, tensors=tensors)
    rounded: list[str] = []
    if options.to == "dsattn":
        _write_run(opened, target)
    else:
        _write_folder(opened, target, options, rounded)
    summed: dict[str, str] = {}
    if options.digests:
        summed = digests(open_run(target)[0] if options.to == "dsattn" else open_safetensors(target))
    return Conversion(target, config, len(tensors), tuple(fresh), tuple(rounded), opened.notes, summed)


def load_model(path: Path, device: str = "auto") -> tuple[Decoder, RunConfig]:
    """The model (in eval mode) of a Hugging Face or Megatron folder, in float32, and a configuration to measure it by.

    Its tokenizer is the folder's own, or the one that it names; packs are four times as long as the keys that are kept.
    Raises CheckpointError where the folder is none or does not fit, InputError where its model is not expressed.
    """
    opened = open_checkpoint(path)
    with torch.device("meta"):
        model = Decoder(opened.config)
    model = model.to_empty(device=pick_device(device))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(opened.tensors[name].read())
    run = _run(opened, path, opened.tokenizer)
    data = dataclasses.replace(run.data, pack_tokens=4 * opened.config.dsa.indexer.top_k)
    return model.eval(), dataclasses.replace(run, data=data)


def _fresh(config: ModelConfig, held: Mapping[str, Stored], seed: int) -> Tensors:
    """Weights of the indexers that `held` lacks."""
    fresh: Tensors = {}
    for name, shape in shapes(config).items():
        if name not in held and ".indexer." in name:
            fresh[name] = Stored(shape, torch.float32, _drawn(name, shape, config.init_std, seed))
    return fresh


def _drawn(name: str, shape: tuple[int, ...], std: float, seed: int) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if ".k_norm." in name:
            return torch.full(shape, float(name.endswith("weight")))
        if ".index_kpool_" in name:
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        return torch.empty(shape).normal_(std=std, generator=generator)

    return read


def _write_folder(source: Source, target: Path, options: ConvertOptions, rounded: list[str]) -> None:
    """Safetensors files and what stands beside them; under a hidden name until all is there, gone where that fails."""
    fields, dtypes = source.fields, source.dtypes
    if options.like is not None:
        fields = read_config(options.like)
        dtypes = {name: one.dtype for name, one in open_hf_weights(options.like).items()}
    most = _most(dtypes) if options.dtype is None else getattr(torch, options.dtype)
    if options.to == "megatron":
        named, file = to_megatron_names(source.tensors, source.config), MEGATRON
        run = _run(source, target, source.tokenizer)
        described = {"config": dataclasses.asdict(run), "indexer_steps": source.indexer_steps}
    else:
        named, file = to_hf_names(source.tensors, source.config), "config.json"
        described = to_hf(source.config, _same_family(fields, source.config), like=fields)
        described |= {"dtype": str(most).removeprefix("torch.")}
        described |= {INDEXER_STEPS: source.indexer_steps} if "dsa" in source.config.types else {}
    tokenizer = _folder_of_tokenizer(source)
    beside = options.like or (source.path if source.format == "hf" else tokenizer)
    if options.like is None and tokenizer is None:
        described[TOKENIZER] = source.tokenizer
    written: Tensors = {}
    for name, one in named.items():
        bias = name.endswith(("e_score_correction_bias", "expert_bias"))
        otherwise = torch.float32 if bias else most
        wanted = otherwise if options.dtype is not None else dtypes.get(name, otherwise)
        written[name] = _narrowed(name, one, wanted, rounded)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_safetensors(partial, written, options.shard_bytes, {"format": "pt"})
        for other in _other_files(beside):
            shutil.copy2(other, partial / other.name)
        (partial / file).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        target.rmdir()
    partial.rename(target)


def _write_run(source: Source, target: Path) -> None:
    folder, tokenizer = _folder_of_tokenizer(source), target / "tokenizer"
    run = _run(source, target, source.tokenizer if folder is None else str(tokenizer.resolve()))
    meta = {
        "config": dataclasses.asdict(run),
        "stage": 0,
        "indexer_steps": source.indexer_steps,
        "converted_from": str(source.path),
    }
    lazy = {name: one.lazy() for name, one in source.tensors.items()}
    checkpoint.save(target, 0, {"model": lazy}, keep=1, meta=meta)
    if folder is not None:
        tokenizer.mkdir()
        for file in (*_other_files(folder), *folder.glob("config.json")):
            shutil.copy2(file, tokenizer / file.name)


def _folder_of_tokenizer(source: Source) -> Path | None:
    """The folder whose files the tokenizer is; None where it is `bytes`, or a name on the Hub."""
    folder = Path(source.tokenizer)
    return folder if source.tokenizer != "bytes" and folder.is_dir() else None


def _run(source: Source, target: Path, tokenizer: str) -> RunConfig:
    mode = "sparse" if "dsa" in source.config.types else "dense"
    return RunConfig(
        model=source.config,
        data=DataConfig(tokenizer=tokenizer),
        train=TrainConfig(stages=(StageConfig(mode=mode),), run_dir=str(target)),
    )


def _same_family(fields: Mapping[str, Any] | None, config: ModelConfig) -> str | None:
    """The model type of `fields` where the model still is one of that kind: with indexers, or without."""
    if fields is None:
        return None
    described = from_hf({name: value for name, value in fields.items() if name != INDEXER_STEPS})
    return fields["model_type"] if ("dsa" in described.types) == ("dsa" in config.types) else None


def _most(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The dtype of most tensors; float32 where there are none."""
    counted = list(dtypes.values())
    return max(set(counted), key=counted.count) if counted else torch.float32


def _narrowed(name: str, one: Stored, dtype: torch.dtype, rounded: list[str]) -> Stored:
    if one.dtype == dtype:
        return one

    def read() -> Tensor:
        value = one.read()
        narrow = value.to(dtype)
        if not torch.equal(narrow.to(value.dtype), value):
            rounded.append(name)
        return narrow

    return Stored(one.shape, dtype, read)


def _other_files(folder: Path | None) -> Iterator[Path]:
    """Files beside the weights: tokenizer, templates, generation settings."""
    for file in sorted(folder.iterdir()) if folder is not None else ():
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json" and not file.name.startswith("."):
            yield file
