"""Text to token ids and back: raw bytes, or any Hugging Face tokenizer."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from dsattn.errors import DataError, InputError


class Tokenizer(Protocol):
    """What training and generation need of a tokenizer."""

    @property
    def name(self) -> str:
        """What `load_tokenizer` was given."""
        ...

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        ...

    @property
    def eos(self) -> int:
        """Id that ends every document."""
        ...

    @property
    def pad(self) -> int:
        """Id that fills padding rows; it is never read or learned."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] ids of `text`, without specials; the names of specials in the text are plain text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as they are: ids 0 .. 255, then bos, eos and pad. Lone surrogates are encoded like characters."""

    name = "bytes"
    vocab_size = 259
    bos = 256
    eos = 257
    pad = 258

    def encode(self, text: str) -> np.ndarray:
        """int32 [n]: one id a byte of the UTF-8 text."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; specials vanish, bytes that are not UTF-8 become U+FFFD. Other ids raise InputError."""
        listed = [int(i) for i in ids]
        if wrong := [i for i in listed if not 0 <= i < self.vocab_size]:
            raise InputError(f"ids holds {wrong[0]}, which is not below vocab_size={self.vocab_size}; mask such logits")
        return bytes(i for i in listed if i < 256).decode("utf-8", "replace")


class HFTokenizer:
    """A Hugging Face tokenizer by name on the Hub or by folder; needs the `hf` extra.

    Raises DataError where transformers is missing, the tokenizer cannot be loaded, or it has no end-of-text token.
    """

    def __init__(self, name: str):
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                f"data.tokenizer={name!r} needs transformers: pip install 'dsattn[hf]', or use data.tokenizer='bytes'"
            ) from error
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # transformers raises many kinds for a wrong name, a damaged file, no network
            raise DataError(f"data.tokenizer={name!r} cannot be loaded: {error}") from error
        if self._inner.eos_token_id is None:
            raise DataError(f"data.tokenizer={name!r} has no eos token to end documents with; give it an eos_token")
        self.name = name
        self.vocab_size = 1 + max(self._inner.get_vocab().values())
        self.eos = int(self._inner.eos_token_id)
        self.pad = self.eos if self._inner.pad_token_id is None else int(self._inner.pad_token_id)

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] ids of `text`, without specials; the names of specials in the text are plain text.

        Lone surrogates become U+FFFD.
        """
        sound = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._inner.encode(sound, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return np.asarray(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, specials left out."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the name or folder of a Hugging Face tokenizer. Raises DataError where it cannot be had."""
    return ByteTokenizer() if name == "bytes" else HFTokenizer(name)
