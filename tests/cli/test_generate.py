import pytest

from dsattn.cli.__main__ import main
from dsattn.cli.generate import stream_text
from dsattn.errors import InputError
from dsattn.model import generate as generation
from dsattn.training.tokenizers import ByteTokenizer


class Words:
    """A tokenizer whose decoder drops the first word's leading space, as sentencepiece does."""

    name, vocab_size, eos, pad = "words", 100, 99, 98

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


def printed(capsys, *arguments: str) -> str:
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def test_prompt_and_continuation_are_printed(run_dir, capsys):
    out = printed(capsys, str(run_dir), "--prompt", "the quick", "--tokens", "5")
    assert out.startswith("the quick")
    assert out.endswith("\n")
    assert len(out) > len("the quick\n")


def test_a_seed_repeats_the_text_and_another_changes_it(run_dir, capsys):
    one, again, other = (
        printed(capsys, str(run_dir), "--prompt", "a", "--tokens", "20", "--temperature", "1", "--seed", seed)
        for seed in "112"
    )
    assert one == again != other


def modes_used(monkeypatch) -> list[str]:
    """The mode of every generation from now on."""
    modes, inner = [], generation.generate

    def record(*args, mode, **options):
        modes.append(mode)
        return inner(*args, mode=mode, **options)

    monkeypatch.setattr(generation, "generate", record)
    return modes


def test_attention_is_sparse_where_indexers_have_learned(run_dir, dense_run_dir, monkeypatch, capsys):
    modes = modes_used(monkeypatch)
    for folder, arguments in ((run_dir, []), (dense_run_dir, []), (dense_run_dir, ["--mode", "sparse"])):
        printed(capsys, str(folder), "--prompt", "a", "--tokens", "1", *arguments)
    assert modes == ["sparse", "dense", "sparse"]


def test_one_checkpoint_can_be_named(run_dir, capsys):
    newest = max((run_dir / "checkpoints").glob("step-*"))
    arguments = ("--prompt", "fox", "--tokens", "4")
    assert printed(capsys, str(newest), *arguments) == printed(capsys, str(run_dir), *arguments)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["RUN"], 2, "--prompt"),
        (["RUN", "--prompt", ""], 2, "--prompt is empty"),
        (["RUN", "--prompt", "a", "--temperature", "-1"], 1, "temperature=-1"),
        (["RUN", "--prompt", "a", "--top-p", "0"], 1, "top_p=0"),
        (["RUN", "--prompt", "a", "--tokens", "-1"], 1, "max_new_tokens=-1"),
        (["nowhere", "--prompt", "a"], 1, "'nowhere' holds no checkpoint"),
    ],
)
def test_wrong_arguments(run_dir, arguments, code, message, capsys):
    given = [str(run_dir) if word == "RUN" else word for word in arguments]
    assert main(["generate", *given]) == code
    assert message in capsys.readouterr().err


def test_text_streams_in_whole_characters():
    text = "aé漢😀b" * 40
    tokenizer = ByteTokenizer()
    pieces = list(stream_text(tokenizer, tokenizer.encode(text).tolist()))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == 1
    assert pieces[0] == "a"


def test_bytes_that_are_no_text_are_shown_and_lose_nothing_after_them():
    tokenizer = ByteTokenizer()
    assert "".join(stream_text(tokenizer, [0xFF, 0xFE, 97, 0xE6])) == "\ufffd\ufffda\ufffd"
    many = [0x80] * 300 + [97]
    assert "".join(stream_text(tokenizer, many)) == tokenizer.decode(many)


def test_ids_that_the_tokenizer_lacks_are_shown_too():
    assert "".join(stream_text(ByteTokenizer(), [97, 300, 98])) == "a\ufffdb"
    with pytest.raises(InputError):
        ByteTokenizer().decode([300])


def test_spaces_between_words_survive():
    ids = [i % 90 for i in range(300)]
    assert "".join(stream_text(Words(), ids)) == Words().decode(ids)
    assert "".join(stream_text(Words(), [])) == ""
