"""`dsattn generate RUN --prompt TEXT`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from dsattn.cli.arguments import UsageError, parse

if TYPE_CHECKING:
    from dsattn.training.tokenizers import Tokenizer

_KEPT = 16
"""Tokens that stay before new ones, so that a tokenizer sees where words join."""
_LONGEST_CHARACTER = 4
"""Bytes, and so byte tokens, of one UTF-8 character."""


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a run's model, decoding sparsely on cached latents and index keys."""

    run: tyro.conf.Positional[Path]
    """Folder of the run, or one checkpoint in it."""
    prompt: str
    """Text to continue; the model cannot open one by itself."""
    tokens: int = 200
    """Most tokens to add; the end of a document ends earlier."""
    temperature: float = 0.0
    """0 takes the likeliest token, 1 draws from the model's own distribution."""
    top_p: float = 1.0
    """Draw only from the fewest tokens whose probabilities reach this sum."""
    seed: int = 0
    """Seed of the draws."""
    mode: Literal["auto", "sparse", "dense"] = "auto"
    """Attention: `auto` is sparse where the checkpoint's indexers have learned, else dense."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""


def run(arguments: list[str]) -> int:
    """Print the prompt and what follows it, as it comes."""
    options = parse(Options, arguments, prog="dsattn generate")
    if not options.prompt:
        raise UsageError("--prompt is empty: the model continues a text and cannot open one; give at least a character")
    import torch

    from dsattn.model.generate import generate
    from dsattn.training.runs import load_run
    from dsattn.training.step import compute
    from dsattn.training.tokenizers import load_tokenizer

    model, config = load_run(options.run, options.device)
    tokenizer = load_tokenizer(config.data.tokenizer)
    new = generate(
        model,
        tokenizer.encode(options.prompt).tolist(),
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        generator=torch.Generator().manual_seed(options.seed),
        stop=tokenizer.eos,
        mode=_mode(options),
    )
    print(options.prompt, end="", flush=True)
    with compute(config.train, next(model.parameters()).device):
        for text in stream_text(tokenizer, new):
            print(text, end="", flush=True)
    print()
    return 0


def stream_text(tokenizer: "Tokenizer", tokens: Iterable[int]) -> Iterator[str]:
    """Pieces of text as soon as their characters are complete; ids that the tokenizer lacks become U+FFFD."""
    window: list[int] = []
    shown = ""
    waiting = 0
    for token in tokens:
        if token >= tokenizer.vocab_size:
            yield tokenizer.decode(window)[len(shown) :] + "\ufffd"
            window, shown, waiting = [], "", 0
            continue
        window.append(token)
        waiting += 1
        text = tokenizer.decode(window)
        if text.endswith("\ufffd") and waiting < _LONGEST_CHARACTER:
            continue
        yield text[len(shown) :]
        if len(window) > 4 * _KEPT:
            window = window[-_KEPT:]
            text = tokenizer.decode(window)
        shown, waiting = text, 0
    yield tokenizer.decode(window)[len(shown) :]


def _mode(options: Options) -> Literal["sparse", "dense"]:
    if options.mode != "auto":
        return options.mode
    from dsattn.training import checkpoint
    from dsattn.training.runs import find_checkpoint

    found = find_checkpoint(options.run)
    assert found is not None, "load_run found one"
    return "sparse" if checkpoint.load_meta(found)["indexer_steps"] else "dense"
