"""Decoding: the prompt at once, then one token at a time on cached latents and index keys.

Every new row selects among all rows before it, as in training: the tokens are those of a full recompute.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsattn.config import Mode
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.nn.state import LayerCache, Pass


def generate(
    model: Decoder,
    tokens: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop: int | None = None,
    mode: Mode = "sparse",
) -> Iterator[int]:
    """Yield the tokens that continue `tokens`, each as soon as it is drawn.

    tokens: the prompt, [T] integers, read as the beginning of one document. stop: a token that ends the text; it is not
    yielded. temperature: 0 takes the likeliest token, 1 draws from the model's own distribution. top_p: draw only from
    the fewest tokens whose probabilities reach this sum. generator: of the draws, None for torch's own; they are made
    on its device, so that a CPU generator draws the same tokens for a GPU's probabilities.
    mode: `sparse`, or `dense` for a model whose indexers never learned.
    Raises InputError at once where an argument breaks its rule; later, where logits are not finite.
    """
    vocab = model.config.vocab_size
    prompt = _prompt(tokens, vocab)
    for name, value, least in (("max_new_tokens", max_new_tokens, 0), ("temperature", temperature, 0.0)):
        if not least <= value < float("inf"):
            raise InputError(f"{name}={value} must be finite and at least {least}")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p={top_p} must be above 0 and at most 1")
    if mode not in ("sparse", "dense"):
        raise InputError(f"mode={mode!r} must be 'sparse' or 'dense'")
    return _tokens(model, prompt, max_new_tokens, (temperature, top_p, generator), stop, Pass(mode=mode, with_kl=False))


def _prompt(tokens: Sequence[int] | Tensor, vocab: int) -> Tensor:
    if not len(tokens):
        raise InputError("tokens is empty: the model continues a text and cannot open one; give at least one token")
    prompt = torch.as_tensor(tokens)
    if prompt.dim() != 1 or prompt.is_floating_point():
        raise InputError(f"tokens must be [T] integers, got {prompt.dtype} {list(prompt.shape)}; give one prompt")
    prompt = prompt.long()
    if (wrong := (prompt < 0) | (prompt >= vocab)).any():
        raise InputError(f"tokens holds {int(prompt[wrong][0])}, which is not in the model's vocabulary of {vocab}")
    return prompt


def _tokens(
    model: Decoder,
    prompt: Tensor,
    count: int,
    sampling: tuple[float, float, torch.Generator | None],
    stop: int | None,
    run: Pass,
) -> Iterator[int]:
    caches, rows = model.empty_caches(), prompt
    for _ in range(count):
        logits, caches = _advance(model, rows, caches, run)
        token = _draw(logits, *sampling)
        if token == stop:
            return
        yield token
        rows = torch.tensor([token])


@torch.no_grad()
def _advance(
    model: Decoder, rows: Tensor, caches: tuple[LayerCache, ...], run: Pass
) -> tuple[Tensor, tuple[LayerCache, ...]]:
    """(logits [vocab] that follow the last of `rows`, caches that hold them too)."""
    device = model.model.embed_tokens.weight.device
    layout = Layout.continuation(caches[0].num_rows, rows.shape[0]).to(device)
    out = model(rows.to(device), layout, run, caches=caches)
    assert out.caches is not None, "caches were given"
    return model.logits(out.hidden[-1:])[0].float(), out.caches


def _draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> int:
    if not logits.isfinite().all():
        raise InputError("the model's logits are not finite: its weights are damaged; use an earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    device = "cpu" if generator is None else generator.device
    probabilities = ((logits - logits.max()).to(device).double() / temperature).softmax(-1)
    if top_p < 1:
        ranked, order = probabilities.sort(descending=True)
        surplus = ranked.cumsum(-1) - ranked >= top_p
        probabilities = probabilities.scatter(0, order[surplus], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
