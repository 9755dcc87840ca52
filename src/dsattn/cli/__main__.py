"""`dsattn COMMAND`: finds the command's module, turns our own errors into one message and an exit code.

Exit codes: 0 done, 1 an error that dsattn raised on purpose or a file that cannot be read or written, 2 a wrong command
line or configuration, 130 interrupted, 141 nobody reads the output any more (as a shell says it).
Other exceptions keep their traceback: they are bugs.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from dsattn import __version__
from dsattn.cli.arguments import UsageError, pick
from dsattn.errors import DsattnError

COMMANDS = {
    "train": "train a recipe: dsattn train tiny",
    "inspect": "measure a run's indexers against dense attention on held-out or given text",
    "generate": "continue a prompt with a run's model",
    "report": "write a run's report.html again",
    "compare": "lay runs over each other: losses, speeds, differences",
    "doctor": "versions, devices, backends and why; of a mesh what each rank holds, and its memory",
    "bench": "check and time every operation, beside installed peers if asked to",
    "convert": "Hugging Face checkpoint to a run to train from, and back",
    "flops": "count parameters, FLOPs and memory of a recipe or a Hugging Face configuration",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. argv: without the program's name; None takes the process's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"dsattn {__version__}")
        return 0
    try:
        name = pick("command", arguments[0], COMMANDS, "dsattn --help")
        code = importlib.import_module(f"dsattn.cli.{name}").run(arguments[1:])
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"dsattn: {error}", file=sys.stderr)
        return 2
    except DsattnError as error:
        print(f"dsattn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dsattn: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) went away; without this, Python complains once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a path that was given, a full disk
        print(f"dsattn: {error}", file=sys.stderr)
        return 1
    except SystemExit as error:  # tyro's, after it has printed help or what is wrong
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 2


def _help() -> str:
    commands = "\n".join(f"  {name:10s} {line}" for name, line in COMMANDS.items())
    return (
        "usage: dsattn COMMAND ...\n\n"
        "Train language models with DeepSeek Sparse Attention.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        "  -h, --help  this text; `dsattn COMMAND --help` explains every option of a command\n"
        "  --version   print the version"
    )


if __name__ == "__main__":
    sys.exit(main())
