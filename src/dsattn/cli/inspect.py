"""`dsattn inspect MODEL`."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dsattn.cli.arguments import UsageError, parse
from dsattn.cli.tables import share, table

if TYPE_CHECKING:
    from dsattn.config import DataConfig, RunConfig
    from dsattn.model import Decoder
    from dsattn.training.data import Pack
    from dsattn.training.metrics import Health
    from dsattn.training.overlap import Overlap
    from dsattn.training.tokenizers import Tokenizer

_COLUMNS = {
    "recall": "recall",
    "random": "random",
    "recency": "recency",
    "oracle": "oracle",
    "top1": "top-1",
    "worst_head": "worst head",
    "captured": "captured",
}


@dataclass(frozen=True)
class Options:
    """Measure the indexers of a run or a checkpoint against dense attention on the same text, computed without them.

    recall: attention mass on the selected keys; beside it that of random keys, of the most recent keys, and of the
    heaviest keys, the most that any selection reaches. top-1: rows whose heaviest key is selected. captured: 1 - KL /
    KL of uniform weights. Only rows that see more than K keys count.
    Below stands what each layer's selection has in common with those of the layers before it, and which layers could
    share an index.
    """

    model: tyro.conf.Positional[Path]
    """Folder of a run, one checkpoint in it, or a Hugging Face folder (config.json, *.safetensors, tokenizer)."""
    source: Annotated[str | None, tyro.conf.arg(aliases=["--text"])] = None
    """Text to measure on: a file, a folder or a glob. None takes the run's held-out text; other folders have none."""
    packs: int | None = None
    """Packs to measure on; None takes the run's train.eval_packs."""
    pack_tokens: int | None = None
    """Tokens of a pack; None takes the run's data.pack_tokens, or four times the kept keys."""
    json: Path | None = None
    """File for everything measured, as JSON; - prints it instead of the tables."""
    plots: Path | None = None
    """Folder for pictures (SVG): recall by layer and by position, distances, what layers have in common."""
    share_tolerance: float = 0.02
    """Recall that a layer may lose where sharing an index is proposed."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""


def run(arguments: list[str]) -> int:
    """Print the table, a line a layer."""
    options = parse(Options, arguments, prog="dsattn inspect")
    for name, value, least in (("packs", options.packs, 1), ("pack-tokens", options.pack_tokens, 2)):
        if value is not None and value < least:
            raise UsageError(f"--{name} {value} must be at least {least}")
    from dsattn.training.metrics import indexer_health
    from dsattn.training.overlap import selection_overlap
    from dsattn.training.step import compute
    from dsattn.training.tokenizers import load_tokenizer

    model, config = _load(options)
    data = dataclasses.replace(config.data, pack_tokens=options.pack_tokens or config.data.pack_tokens)
    packs = _packs(options, data, load_tokenizer(data.tokenizer), options.packs or config.train.eval_packs)
    with compute(config.train, next(model.parameters()).device):
        health = indexer_health(model, packs)
        overlap = selection_overlap(model, packs, tolerance=options.share_tolerance)
    text = json.dumps(health.to_dict() | {"overlap": overlap.to_dict()}, indent=1, allow_nan=False)
    if options.json == Path("-"):
        print(text)
    else:
        print(health_table(health))
        print(f"\n{overlap_table(overlap)}")
        if options.json is not None:
            options.json.write_text(text + "\n")
            print(f"written to {options.json}")
    if options.plots is not None:
        _write_plots(options.plots, health, overlap)
    return 0


def health_table(health: "Health") -> str:
    """A line a layer and one of means, in per cent; under it what was measured."""
    rows = [[f"{layer.layer}", *(share(getattr(layer, name)) for name in _COLUMNS)] for layer in health.layers]
    if health.layers:
        rows.append(["mean", *(share(health.mean(name)) for name in _COLUMNS)])
    note = f"K = {health.top_k}; {health.rows:,} rows that see more than K keys"
    return "\n".join(
        [table(["layer", *_COLUMNS.values()], rows), "", note, *([f"note: {health.note}"] if health.note else [])]
    )


def overlap_table(overlap: "Overlap") -> str:
    """A line a layer: what it shares with the selecting layer before it, and what the selections of those are worth."""
    if overlap.indexer_types is None:
        return f"sharing: not measured, {overlap.note}"
    back = max(len(layer.earlier) for layer in overlap.layers)
    head = ["layer", "recall", "overlap", *(f"recall by {i} before" for i in range(1, back + 1))]
    rows = []
    for layer in overlap.layers:
        worth = [share(value) for value in layer.shared_recall] + ["-"] * (back - len(layer.earlier))
        rows.append([f"{layer.layer}", share(layer.recall), share(layer.overlap[0] if layer.overlap else None), *worth])
    kept = sum(overlap.indexer_types[layer.layer] == "full" for layer in overlap.layers)
    return (
        f"{table(head, rows)}\n\n{kept} of {len(overlap.layers)} indexers would keep every layer within "
        f"{share(overlap.tolerance)} of its recall: indexer_types {' '.join(overlap.indexer_types)}"
    )


def _load(options: Options) -> "tuple[Decoder, RunConfig]":
    from dsattn.training.runs import find_checkpoint, load_run

    if find_checkpoint(options.model) is not None or not (options.model / "config.json").is_file():
        return load_run(options.model, options.device)
    from dsattn.integrations.checkpoints import load_model

    if options.source is None:
        raise UsageError(f"{options.model} is no run of dsattn and names no text; give --text")
    return load_model(options.model, options.device)


def _write_plots(folder: Path, health: "Health", overlap: "Overlap") -> None:
    from dsattn.training import plots
    from dsattn.training.overlap import overlap_picture

    events = [{"kind": "eval", "step": 0, "stage": 0, "mode": "sparse", "health": health.to_dict()}]
    pictures = {draw.__name__: draw(events) for draw in (plots.recall, plots.recall_by_position, plots.distances)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in (pictures | {"overlap": overlap_picture(overlap)}).items():
        if picture is not None:
            (folder / f"{name}.svg").write_bytes(picture.svg)


def _packs(options: Options, data: "DataConfig", tokenizer: "Tokenizer", count: int) -> "list[Pack]":
    """The run's own held-out packs, or the first `count` packs of one pass over the given text."""
    from dsattn.training.data import PackStream, held_out_packs

    if options.source is None:
        return held_out_packs(data, tokenizer, count)
    stream = PackStream(dataclasses.replace(data, source=options.source, held_out=0.0), tokenizer)
    packs = []
    while len(packs) < count:
        pack = next(stream)
        if packs and stream.epoch:
            break  # its end would be text that was measured already
        packs.append(pack)
    if stream.epoch and len(packs) == 1:
        note = f"the text is shorter than a pack of {data.pack_tokens} tokens and is repeated in it"
        print(f"dsattn: {note}", file=sys.stderr)
    return packs
