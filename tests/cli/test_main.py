import importlib
import subprocess
import sys
import types

import pytest

import dsattn
from dsattn.cli.__main__ import COMMANDS, main
from dsattn.errors import DataError


@pytest.fixture
def stand_in(monkeypatch):
    """Make the command `report` do something else."""

    def put(run) -> None:
        monkeypatch.setitem(sys.modules, "dsattn.cli.report", types.SimpleNamespace(run=run))

    return put


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_alone_it_prints_help(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsattn {dsattn.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert callable(importlib.import_module(f"dsattn.cli.{name}").run)
    assert main([name, "--help"]) == 0
    assert f"usage: dsattn {name}" in capsys.readouterr().out


def test_an_unknown_command_names_close_ones(capsys):
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsattn: no command 'trian'; did you mean train?")
    assert all(name in error for name in COMMANDS)


def test_options_of_tyro_that_do_not_exist_exit_with_2(capsys):
    assert main(["report", "somewhere", "--colour"]) == 2
    assert "--colour" in capsys.readouterr().err


def test_our_errors_are_one_message_without_traceback(stand_in, capsys):
    def run(arguments):
        raise DataError(f"no text in {arguments}")

    stand_in(run)
    assert main(["report", "x"]) == 1
    assert capsys.readouterr().err == "dsattn: no text in ['x']\n"


def test_a_file_that_cannot_be_read_or_written_is_one_message(stand_in, tmp_path, capsys):
    stand_in(lambda arguments: (tmp_path / "absent/plot.svg").write_bytes(b""))
    assert main(["report"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dsattn: ")
    assert "No such file or directory" in error
    assert "absent/plot.svg" in error


def test_other_errors_keep_their_traceback(stand_in):
    def run(arguments):
        raise ZeroDivisionError

    stand_in(run)
    with pytest.raises(ZeroDivisionError):
        main(["report"])


def test_an_interrupt_is_no_traceback(stand_in, capsys):
    def run(arguments):
        raise KeyboardInterrupt

    stand_in(run)
    assert main(["report"]) == 130
    assert capsys.readouterr().err == "dsattn: interrupted\n"


def test_as_a_module_and_into_a_closed_pipe():
    """`dsattn ... | head -1`: the reader went away before anything was written."""
    command = [sys.executable, "-m", "dsattn.cli", "flops", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 141
