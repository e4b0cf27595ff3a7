"""What `tiercel run` is asked: which model, which prompt. Reads words and piped text; starts nothing.

One word is a model if it names one, else the prompt; two are model and prompt. Text piped in is the prompt, or follows
the one that was written, after an empty line.
"""

import contextlib
import select
import stat
from collections.abc import Sequence
from os import fstat
from typing import TextIO

import msgspec

from tiercel.base.errors import ConfigError
from tiercel.base.units import format_bytes
from tiercel.hub.resolve import is_model_name, meant_model

# No model's context holds this much text; a pipe that never ends must not fill the memory.
_MOST_PIPED_CHARS = 64 << 20
_SILENCE_S = 1.0


class RunRequest(msgspec.Struct, frozen=True):
    """The model's name (None: the default) and the prompt (None: chat). `is_guess`: it stood where a prompt may."""

    model: str | None
    prompt: str | None
    is_guess: bool = False


def read_request(words: Sequence[str], model: str | None, stdin: TextIO | None, notices: TextIO) -> RunRequest:
    """Tell model and prompt apart, and add what is piped into `stdin` to the prompt.

    Raises:
        ConfigError: too many words, the first of two is no model, or there is no prompt and no terminal to chat on.
    """
    if len(words) > (2 if model is None else 1):
        raise ConfigError(f"run: got {len(words)} words; need at most MODEL and PROMPT; put the prompt in quotes")
    prompt, is_guess = None, False
    if len(words) == 2:
        model, prompt = words
        if not is_model_name(model):
            meant = meant_model(model)
            raise ConfigError(
                f"run: got {model!r} before the prompt, which names no model{f' ({meant})' if meant else ''}; need a "
                "folder, a .gguf file, org/name or a name that `tiercel list` shows; put a prompt of several words in "
                "quotes"
            )
    elif words and model is None and is_model_name(words[0]):
        model, is_guess = words[0], True
    elif words:
        prompt = words[0]
        meant = meant_model(prompt) if model is None else None
        if meant is not None:
            raise ConfigError(
                f"run: got {prompt!r}, which looks like a model and names none ({meant}); `tiercel list` shows what "
                f"there is; if it is a prompt: tiercel run -m MODEL {prompt!r}"
            )
    has_terminal = stdin is not None and stdin.isatty()
    if stdin is not None and not has_terminal and not (prompt is not None and _is_nothing(stdin)):
        piped = read_piped(stdin, notices)
        if piped:
            prompt = piped if prompt is None else f"{prompt}\n\n{piped}"
    if prompt is None and not has_terminal:
        taken = f" ({model!r} was taken as the model)" if is_guess else ""
        raise ConfigError(
            f"run: got no prompt{taken}, and standard input is empty; need a prompt, or a terminal to chat on"
        )
    return RunRequest(model, prompt, is_guess)


def read_piped(stdin: TextIO, notices: TextIO) -> str:
    """Read `stdin` to its end, without the last line's end. Says so on `notices` when nothing comes for a second.

    Raises:
        ConfigError: it is not UTF-8, or longer than any model can read.
    """
    # A pipe that someone else holds open would otherwise look like a program that hangs.
    with contextlib.suppress(OSError, ValueError):
        if not select.select([stdin], [], [], _SILENCE_S)[0]:
            print("tiercel: reading the prompt from standard input (`< /dev/null` to not)", file=notices, flush=True)
    try:
        text = stdin.read(_MOST_PIPED_CHARS + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(f"run: standard input is not {error.encoding} text (byte {error.start}); need text") from None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # In the C locale Python reads any bytes, and marks those that are no text.
        raise ConfigError(f"run: standard input is not UTF-8 text (character {error.start}); need text") from None
    if len(text) > _MOST_PIPED_CHARS:
        raise ConfigError(
            f"run: more than {format_bytes(_MOST_PIPED_CHARS)} are piped in; need a prompt a model can read"
        )
    return text.removesuffix("\n")


def _is_nothing(stdin: TextIO) -> bool:
    """Whether `stdin` is a device such as /dev/null, which has nothing to add to a prompt."""
    try:
        return stat.S_ISCHR(fstat(stdin.fileno()).st_mode)
    except (OSError, ValueError):
        return False
