"""Bytes, and Hugging Face tokenizers with and without transformers installed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsattn.errors import DataError, InputError
from dsattn.training.tokenizers import ByteTokenizer, HFTokenizer, load_tokenizer


@pytest.mark.parametrize("text", ["", "x", "naïve €𝄞\r\n\0", "<eos>", "".join(map(chr, range(0x300)))])
def test_bytes_come_back(text: str):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


def test_byte_specials_lie_behind_the_bytes():
    tokenizer = ByteTokenizer()
    assert (tokenizer.name, tokenizer.vocab_size) == ("bytes", 259)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (256, 257, 258)
    assert tokenizer.decode([256, 104, 105, 257, 258]) == "hi"


def test_bytes_that_are_no_text():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xE2, 0x82, 104]) == "\ufffdh"
    assert tokenizer.encode("\ud800").tolist() == [0xED, 0xA0, 0x80]
    for wrong in (259, -1):
        with pytest.raises(InputError, match=f"holds {wrong}, which is not below vocab_size=259"):
            tokenizer.decode([104, wrong])


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"data\.tokenizer='gpt2' needs transformers: pip install 'dsattn\[hf\]'"):
        load_tokenizer("gpt2")


def fake_transformers(monkeypatch: pytest.MonkeyPatch, **inner: Any) -> None:
    def from_pretrained(name: str) -> SimpleNamespace:
        if name != "there":
            raise OSError("no such repository")
        return SimpleNamespace(**{"get_vocab": lambda: {"a": 0, "b": 7}, "pad_token_id": None, **inner})

    auto = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))


def test_tokenizer_that_cannot_serve(monkeypatch: pytest.MonkeyPatch):
    fake_transformers(monkeypatch, eos_token_id=None)
    with pytest.raises(DataError, match=r"data\.tokenizer='gone' cannot be loaded: no such repository"):
        load_tokenizer("gone")
    with pytest.raises(DataError, match=r"data\.tokenizer='there' has no eos token"):
        load_tokenizer("there")


def test_vocab_size_bounds_ids_with_holes_and_pad_falls_to_eos(monkeypatch: pytest.MonkeyPatch):
    fake_transformers(monkeypatch, eos_token_id=7)
    tokenizer = load_tokenizer("there")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eos, tokenizer.pad) == ("there", 8, 7, 7)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A byte-level BPE tokenizer, trained here and saved the way Hugging Face does."""
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner: Any = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=270, special_tokens=["<eos>"], initial_alphabet=alphabet)
    inner.train_from_iterator(["hello world, hello tokens"] * 10, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(tmp_path)
    return str(tmp_path)


def test_hugging_face_tokenizer_from_a_folder(folder: str):
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, HFTokenizer)
    text = "hello tokens, é𝄞 <eos> \n"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert 0 < len(ids) < len(text.encode())
    assert ids.max() < tokenizer.vocab_size == 270
    assert tokenizer.eos not in ids.tolist(), "text that spells a special must not become it"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos]) == text
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode(tokenizer.encode("a\ud800")) == "a\ufffd"
