"""The command line's entry: finds the subcommand, and turns what it raises into one line and an exit code.

Exit codes: 0 done; 1 it failed, and the reason is the last line on standard error; 2 the command was wrong (unknown
flag, wrong value); 130 stopped by Ctrl-C; 141 nobody reads the output. Subcommands are imported when they are called.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tiercel import __version__
from tiercel.base import env
from tiercel.base.errors import ConfigError, TiercelError

# Name -> (module, what it does). A subcommand's module has `configure(parser)` and `execute(args) -> int`;
# that of a family of commands has `main(words) -> int`.
COMMANDS = {
    "run": ("tiercel.cli.run", "answer a prompt, or chat, with a model on this machine"),
    "serve": ("tiercel.cli.serve", "serve a model over HTTP, with OpenAI's routes"),
    "run-batch": ("tiercel.cli.run_batch", "answer a file of requests, without a server"),
    "pull": ("tiercel.cli.pull", "fetch a model to this machine"),
    "list": ("tiercel.cli.list_", "list the models that have a short name, and those that are here"),
    "show": ("tiercel.cli.show", "describe a model: its shape, program, and kernels"),
    "cache": ("tiercel.cli.cache", "look after the keys and values that are kept on disk"),
    "train-drafter": ("tiercel.cli.train_drafter", "make a draft model that speeds a target up"),
    "bench": ("tiercel.cli.bench", "measure speed, memory and start-up, beside other engines"),
    "env": ("tiercel.cli.env", "describe this machine and installation, for a bug report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (without the program's name) writes, and return the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _replace_closed_streams()
    # Start-up makes some 300,000 objects that live to the end; collections while they come only cost time.
    gc.set_threshold(100_000, 50, 100)
    has_traceback = False
    try:
        has_traceback = env.read(env.TRACEBACK) == "1"
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except SystemExit as end:
        # argparse ends this way, having said why.
        return end.code if isinstance(end.code, int) else 2
    except KeyboardInterrupt:
        print("", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _end_quietly()
    except TiercelError as error:
        if has_traceback:
            import traceback

            traceback.print_exc()
        print(f"tiercel: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        if has_traceback:
            raise
        needed = "a path that exists" if isinstance(error, FileNotFoundError) else "room and rights"
        print(f"tiercel: {error.filename or 'output'}: {error.strerror or error}; need {needed}", file=sys.stderr)
        _end_quietly()
        return 1


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_help(), file=sys.stderr)
        return 2
    first, rest = words[0], words[1:]
    if first == "help" and rest[:1] and rest[0] in COMMANDS:
        first, rest = rest[0], [*rest[1:], "--help"]
    if first in ("-h", "--help", "help"):
        print(_help())
        return 0
    if first in ("-v", "-V", "--version"):
        print(f"tiercel {__version__}")
        return 0
    if first not in COMMANDS:
        raise ConfigError(_unknown_command(first))
    import importlib

    from tiercel.cli.parsing import CommandParser

    module = importlib.import_module(COMMANDS[first][0])
    if hasattr(module, "main"):
        code: int = module.main(rest)
        return code
    parser = CommandParser(f"tiercel {first}", COMMANDS[first][1])
    module.configure(parser)
    code = module.execute(parser.parse(rest))
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {does}" for name, (_, does) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tiercel COMMAND [...]",
            "",
            "Run and serve language models on this machine.",
            "",
            *lines,
            "",
            'Start with: tiercel run "Why is the sky blue?"',
            "`tiercel COMMAND --help` says what a command takes; `tiercel --version` says which version this is.",
        ]
    )


def _unknown_command(word: str) -> str:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    shown = word if len(word) <= 60 else f"{word[:57]}..."
    meant = f"did you mean `tiercel {near[0]}`?" if near else f"to ask a model something: tiercel run {shown!r}"
    return f"command: got {shown!r}; need one of {', '.join(COMMANDS)}; {meant}"


def _replace_closed_streams() -> None:
    """Let go of what is written to a stream that was closed for us: Python has None there, which `print` takes for
    standard output.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 stays open to the end


def _end_quietly() -> int:
    # The interpreter flushes standard output once more at its end, which would complain again.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


if __name__ == "__main__":
    sys.exit(main())
