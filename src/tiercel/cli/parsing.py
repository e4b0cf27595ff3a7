"""A subcommand's argument parser: argparse, stricter and more helpful about what it does not know.

Flags are written with `-` or `_`; an unknown one names its nearest neighbour; a removed one says what to do instead;
one given twice counts as the last and says so. Everything after `--` is taken as it stands.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tiercel.base.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """The parser of one subcommand. Owned by `main`, filled by the subcommand's `configure`.

    `removed` maps a flag's name, with `-` and without the dashes in front, to the hint that refuses it.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.removed: dict[str, str] = {}

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Read `words`; end the process's command with exit code 2 and the usage if they are wrong.

        Raises:
            SystemExit: after usage or help was printed.
        """
        words = list(words)
        cut = words.index("--") if "--" in words else len(words)
        flags, verbatim = [_with_dashes(word) for word in words[:cut]], words[cut + 1 :]
        self._refuse_removed(flags)
        self._warn_repeated(flags)
        # Flags may stand between positional words, which argparse's plain parse does not take.
        args, unknown = self.parse_known_intermixed_args(flags)
        strange = next((word for word in unknown if word.startswith("-")), None)
        if strange is not None:
            self.error(self._unknown_flag(strange))
        if unknown:
            self.error(f"got one word too many: {unknown[0]!r}; put a text of several words in quotes")
        self._add_verbatim(args, verbatim)
        return args

    def error(self, message: str) -> NoReturn:
        """Print the usage and `message`, and end with exit code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")

    @property
    def flags(self) -> list[str]:
        """Every long flag of this command, in order."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def _refuse_removed(self, words: list[str]) -> None:
        for word in words:
            name = word.partition("=")[0].removeprefix("--") if word.startswith("--") else None
            if name in self.removed:
                self.error(f"--{name}: {self.removed[name]}")

    def _warn_repeated(self, words: list[str]) -> None:
        once = {flag for action in self._actions if _takes_one(action) for flag in action.option_strings}
        names = [word.partition("=")[0] for word in words]
        for name in sorted({name for name in names if name in once and names.count(name) > 1}):
            print(f"{self.prog}: {name} is given {names.count(name)} times; the last one counts", file=sys.stderr)

    def _unknown_flag(self, word: str) -> str:
        import difflib

        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, self.flags, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}?" if near else f"`{self.prog} --help` lists what there is"
        return f"unknown flag {name}; {meant}"

    def _add_verbatim(self, args: argparse.Namespace, verbatim: list[str]) -> None:
        for action in self._actions:
            if action.option_strings or not verbatim:
                continue
            given = getattr(args, action.dest, None)
            if action.nargs == "*":
                setattr(args, action.dest, [*(given or []), *verbatim])
                return
            if given is None:
                setattr(args, action.dest, verbatim.pop(0))
        if verbatim:
            self.error(f"got one word too many: {verbatim[0]!r}; put a text of several words in quotes")


def checked(parse: Any) -> Any:
    """Make a parser of text that raises `ConfigError` one that argparse reports with its flag's name."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _takes_one(action: argparse.Action) -> bool:
    return action.nargs is None and type(action).__name__ == "_StoreAction"


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    # argparse takes a text with a space in it as no flag, whatever it begins with.
    if not name.startswith("--") or " " in name:
        return word
    return name.replace("_", "-") + equals + value
