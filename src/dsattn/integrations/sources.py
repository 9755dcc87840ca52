"""Checkpoints opened, whatever wrote them: configuration, and weights that stay on disk under the names of `Decoder`.

hf        config.json with a model_type, and safetensors files
dsattn    a run folder (its newest checkpoint), or one checkpoint in it
megatron  what `convert` wrote: Megatron Core's names in safetensors files, and dsattn.json
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dsattn.config import ModelConfig, MTPConfig
from dsattn.errors import CheckpointError
from dsattn.integrations.hf_config import from_hf
from dsattn.integrations.hf_names import dequantised, from_hf_names, holds_mtp, shapes
from dsattn.integrations.megatron_names import from_megatron_names
from dsattn.integrations.stored import Stored, Tensors, open_safetensors
from dsattn.training import checkpoint
from dsattn.training.runs import config_from_dict, find_checkpoint

Format = Literal["dsattn", "hf", "megatron"]
MEGATRON = "dsattn.json"
"""Beside weights with Megatron's names: the configuration, which they do not hold."""
INDEXER_STEPS = "dsattn_indexer_steps"
"""Field of a config.json: steps in which the indexers learned."""
TOKENIZER = "dsattn_tokenizer"
"""Field of a config.json or dsattn.json: the run's `data.tokenizer`, where the folder holds no tokenizer of its own."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that was opened, none of its tensors read yet.

    tensors: under the names of `Decoder(config)`. indexer_steps: those in which its indexers learned; 1 for a model
    from elsewhere, which does not say. tokenizer: as in `data.tokenizer`. fields: its config.json, and dtypes: those of
    its tensors by Hugging Face name, where it is such a checkpoint. notes: what its reader should know.
    """

    path: Path
    format: Format
    config: ModelConfig
    tensors: Tensors
    indexer_steps: int
    tokenizer: str
    notes: tuple[str, ...] = ()
    fields: dict[str, Any] | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


def format_of(path: Path) -> Format:
    """Which of the formats above. Raises CheckpointError where it is none."""
    if find_checkpoint(path) is not None:
        return "dsattn"
    if (path / MEGATRON).is_file():
        return "megatron"
    read_config(path)
    return "hf"


def open_checkpoint(path: Path, *, latent_norm_eps: float | None = None) -> Source:
    """Configuration and weights of a checkpoint of any format above.

    A Hugging Face config may speak of MTP layers that its checkpoint does not hold (transformers drops them when it
    saves): then the model has none, and a note says so. Raises CheckpointError where there is no checkpoint, it is
    damaged, or its tensors do not fit; InputError where its configuration is not expressed.
    """
    kind = format_of(path)
    if kind == "dsattn":
        tensors, meta = open_run(path)
        run = config_from_dict(meta["config"])
        config = run.model
        if shapes(config) != {name: one.shape for name, one in tensors.items()}:
            raise CheckpointError(f"checkpoint {path} does not hold the weights of its own configuration")
        return Source(path, kind, config, tensors, meta["indexer_steps"], run.data.tokenizer)
    own_tokenizer = str(path.resolve())
    if kind == "megatron":
        meta = json.loads((path / MEGATRON).read_text(encoding="utf-8"))
        config = config_from_dict(meta["config"]).model
        tensors, tokenizer = from_megatron_names(open_safetensors(path), config), meta.get(TOKENIZER, own_tokenizer)
        return Source(path, kind, config, tensors, meta["indexer_steps"], tokenizer)
    fields = read_config(path)
    config = from_hf(fields, latent_norm_eps=latent_norm_eps)
    raw = open_hf_weights(path)
    notes: tuple[str, ...] = ()
    if config.mtp.depths and not holds_mtp(raw, config):
        notes = (f"config.json names {config.mtp.depths} MTP layer(s) and no file holds one: the model has none",)
        config = dataclasses.replace(config, mtp=MTPConfig())
    steps = fields.get(INDEXER_STEPS, 1) if "dsa" in config.types else 0
    dtypes = {name: one.dtype for name, one in raw.items()}
    tensors, tokenizer = from_hf_names(raw, config), fields.get(TOKENIZER, own_tokenizer)
    return Source(path, kind, config, tensors, steps, tokenizer, notes, fields, dtypes)


def open_hf_weights(path: Path) -> Tensors:
    """A Hugging Face folder's weights under their own names; float8 in blocks as bfloat16."""
    raw = open_safetensors(path)
    return dequantised(raw) if read_config(path).get("quantization_config") else raw


def open_run(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Weights and `meta` of a run's newest checkpoint, or of one checkpoint; every byte is verified."""
    found = find_checkpoint(path)
    assert found is not None, "the caller looked"
    meta = checkpoint.verify(found)["meta"]

    def reader(name: str, shape: torch.Size, dtype: torch.dtype) -> Stored:
        def read() -> Tensor:
            state = {"model": {name: torch.empty(shape, dtype=dtype)}}
            return checkpoint.load(found, state, partial=True, verified=True)["model"][name]

        return Stored(tuple(shape), dtype, read)

    tensors: Tensors = {}
    for full, facts in checkpoint.contents(found).items():
        if full.startswith("model.") and facts is not None:
            name = full.removeprefix("model.")
            tensors[name] = reader(name, *facts)
    return tensors, meta


def read_config(path: Path) -> dict[str, Any]:
    """A Hugging Face folder's config.json. Raises CheckpointError where it has none."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is no checkpoint: neither a run of dsattn nor a folder with a config.json")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise CheckpointError(f"{file} has no model_type: it is not a Hugging Face config; a run needs a checkpoint")
    return fields
