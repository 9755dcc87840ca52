"""`dsattn inspect RUN`."""

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
    from dsattn.config import DataConfig
    from dsattn.training.data import Pack
    from dsattn.training.metrics import Health
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
    """Measure a run's indexers against dense attention on the same text, computed without them.

    recall: attention mass on the selected keys; beside it that of random keys, of the most recent keys, and of the
    heaviest keys, the most that any selection reaches. top-1: rows whose heaviest key is selected. captured: 1 - KL /
    KL of uniform weights. Only rows that see more than K keys count.
    """

    run: tyro.conf.Positional[Path]
    """Folder of the run, or one checkpoint in it."""
    source: Annotated[str | None, tyro.conf.arg(aliases=["--text"])] = None
    """Text to measure on: a file, a folder or a glob. None takes the run's held-out text."""
    packs: int | None = None
    """Packs to measure on; None takes the run's train.eval_packs."""
    pack_tokens: int | None = None
    """Tokens of a pack; None takes the run's data.pack_tokens."""
    json: Path | None = None
    """File for everything measured, as JSON; - prints it instead of the table."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""


def run(arguments: list[str]) -> int:
    """Print the table, a line a layer."""
    options = parse(Options, arguments, prog="dsattn inspect")
    for name in ("packs", "pack_tokens"):
        value = getattr(options, name)
        if value is not None and value < (2 if name == "pack_tokens" else 1):
            raise UsageError(f"--{name.replace('_', '-')} {value} is too small")
    from dsattn.training.metrics import indexer_health
    from dsattn.training.runs import load_run
    from dsattn.training.step import compute
    from dsattn.training.tokenizers import load_tokenizer

    model, config = load_run(options.run, options.device)
    data = dataclasses.replace(config.data, pack_tokens=options.pack_tokens or config.data.pack_tokens)
    packs = _packs(options, data, load_tokenizer(data.tokenizer), options.packs or config.train.eval_packs)
    with compute(config.train, next(model.parameters()).device):
        health = indexer_health(model, packs)
    text = json.dumps(health.to_dict(), indent=1, allow_nan=False)
    if options.json == Path("-"):
        print(text)
        return 0
    print(health_table(health))
    if options.json is not None:
        options.json.write_text(text + "\n")
        print(f"written to {options.json}")
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
