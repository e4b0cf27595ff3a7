"""A subcommand's argument parser: argparse, stricter and more helpful about what it does not know.

Flags are written with `-` or `_`; an unknown one names its nearest neighbour; one of vLLM's that is gone or means
nothing here says what to do instead; one given twice counts as the last and says so. A flag that takes a JSON object
also takes its parts: `--flag.key value`. `--config FILE` stands for the flags written in it (`config_file`); those of
the command line win over them. Everything after `--` is taken as it stands.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tiercel.base.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.base.options import Option

_LEVEL = re.compile(r"-O([0-9])", re.ASCII)


class RepeatedAction(argparse.Action):
    """Collects the values of a flag that may be given several times; the first one replaces those of a file."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Take one more value."""
        before = getattr(namespace, self.dest, None)
        is_first = before is None or before is self.default
        setattr(namespace, self.dest, [*([] if is_first else before or []), values])


class CommandParser(argparse.ArgumentParser):
    """The parser of one subcommand. Owned by `main`, filled by the subcommand's `configure`.

    `removed` maps a flag's name, with `-` and without the dashes in front, to the hint that refuses it. `rows` are the
    rows of the table that have a flag here, by flag. `knows_vllm`: flags of vLLM's that are none here are told apart.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="store_true", help="show this; --help=all shows every flag")
        self.removed: dict[str, str] = {}
        self.rows: dict[str, Option] = {}
        self.knows_vllm = False
        self._of_file: dict[str, Any] = {}
        self.titles: dict[str, argparse._ArgumentGroup] = {}

    def group(self, title: str) -> Any:
        """Give the group of flags with this title."""
        if title not in self.titles:
            self.titles[title] = self.add_argument_group(title)
        return self.titles[title]

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Read `words`; end the process's command with exit code 2 and the usage if they are wrong.

        Raises:
            SystemExit: after usage or help was printed.
            ConfigError: the file that `--config` names cannot be read; the message names file and key.
        """
        words = list(words)
        cut = words.index("--") if "--" in words else len(words)
        flags, verbatim = [_with_dashes(word) for word in words[:cut]], words[cut + 1 :]
        self._show_help(flags)
        self._refuse_removed(flags)
        if self.knows_vllm:
            flags = self._without_absent(flags)
            flags = self._with_objects(flags)
            self._take_file(flags)
        self._warn_repeated(flags)
        # Flags may stand between positional words, which argparse's plain parse does not take.
        args, unknown = self.parse_known_intermixed_args(flags)
        strange = next((word for word in unknown if word.startswith("-")), None)
        if strange is not None:
            self.error(self._unknown_flag(strange))
        if unknown:
            self.error(f"got one word too many: {unknown[0]!r}; put a text of several words in quotes")
        self._add_verbatim(args, verbatim)
        # A value that no word replaced is the file's own object, and no other user sees it in a list of processes.
        args.of_file = {dest for dest, value in self._of_file.items() if getattr(args, dest, None) is value}
        return args

    def error(self, message: str) -> NoReturn:
        """Print the usage and `message`, and end with exit code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")

    def format_usage(self) -> str:
        """Give the usage: that of the command if it has one, since the list of all flags fills a screen."""
        if self.usage is None and self.rows:
            words = " ".join(f"[{a.metavar or a.dest}]" for a in self._actions if not a.option_strings)
            return f"usage: {' '.join(f'{self.prog} {words}'.split())} [flags]\n"
        return super().format_usage()

    @property
    def flags(self) -> list[str]:
        """Every long flag of this command, in order."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def action_of(self, key: str) -> argparse.Action | None:
        """Give the action of a flag by its long flag, or of a positional word by its name."""
        for action in self._actions:
            if f"--{key}" in action.option_strings:
                return action
        return next((a for a in self._actions if not a.option_strings and a.dest == key.replace("-", "_")), None)

    def _show_help(self, words: list[str]) -> None:
        for word in words:
            if word in ("-h", "--help") or word.startswith("--help="):
                from tiercel.cli.help import help_text

                print(help_text(self, word.partition("=")[2]), end="")
                self.exit(0)

    def _refuse_removed(self, words: list[str]) -> None:
        for word in words:
            name = word.partition("=")[0].removeprefix("--") if word.startswith("--") else None
            if name in self.removed:
                self.error(f"--{name}: {self.removed[name]}")

    def _without_absent(self, words: list[str]) -> list[str]:
        """Take out the flags of vLLM's that would change nothing here, and refuse those that would."""
        kept, rest = [], list(words)
        while rest:
            word = rest.pop(0)
            flag, equals, value = word.partition("=")
            if not word.startswith("-") or " " in flag or flag in self._option_string_actions:
                kept.append(word)
                continue
            from tiercel.base import absent

            level = _LEVEL.fullmatch(word)
            if level is not None:
                flag, equals, value = "-O", "=", level[1]
            stem = flag.partition(".")[0]
            name = absent.SHORT.get(stem) or stem.removeprefix("--").replace("-", "_")
            is_off = name.startswith("no_") and not absent.is_listed(name)
            name = name.removeprefix("no_") if is_off else name
            if not (stem.startswith("--") or stem in absent.SHORT) or not absent.is_listed(name):
                kept.append(word)
                continue
            given: Any = value
            if absent.is_switch(name):
                given = not is_off
            elif not equals:
                # Without its value a removed flag is as gone as with it.
                given = rest.pop(0) if rest and not rest[0].startswith("--") else ""
            why = absent.why_not(name, given)
            if why is not None:
                self.error(f"--{name.replace('_', '-')}: {why}")
        return kept

    def _with_objects(self, words: list[str]) -> list[str]:
        """Gather `--flag.key value` into `--flag {json}`; keys go over those of the flag itself."""
        dotted = [flag for flag, row in self.rows.items() if row.keys is not None]
        if not any(word.startswith(f"{flag}.") for word in words for flag in dotted):
            return words
        from tiercel.cli.dotted import gather

        try:
            return gather(words, dotted)
        except ConfigError as error:
            self.error(str(error))

    def _take_file(self, words: list[str]) -> None:
        named = [i for i, word in enumerate(words) if word == "--config" or word.startswith("--config=")]
        if not named:
            return
        if len(named) > 1:
            self.error(f"--config: got {len(named)} files; one is taken; put them together")
        word = words[named[0]]
        path = word.partition("=")[2] if "=" in word else next(iter(words[named[0] + 1 :]), "")
        if not path or path.startswith("-"):
            self.error("--config: got no file; need one that ends in .yaml or .yml")
        from tiercel.cli.config_file import apply

        self._of_file = apply(self, path)

    def _warn_repeated(self, words: list[str]) -> None:
        once = {flag for action in self._actions if _takes_one(action) for flag in action.option_strings}
        names = [word.partition("=")[0] for word in words]
        for name in sorted({name for name in names if name in once and names.count(name) > 1}):
            print(f"{self.prog}: {name} is given {names.count(name)} times; the last one counts", file=sys.stderr)

    def _unknown_flag(self, word: str) -> str:
        import difflib

        name = word.partition("=")[0]
        if self.knows_vllm:
            from tiercel.cli.help import command_of

            other = command_of(name)
            if other is not None:
                return f"{name} is a flag of `{other}`; leave it out here"
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
    # What follows a dot is a key of an object, and is spelt as it is.
    flag, dot, key = name.partition(".")
    return flag.replace("_", "-") + dot + key + equals + value
