"""The one table of the options that set up an engine or sample a token. Names and meanings are vLLM's.

`run`, `serve` and `show` make their flags from it, and the chat's `/set` its names. Holds no default: an option that is
not given is not passed on, so that a default lives in one place, the engine's. Does not judge values beyond their form.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tiercel.base.config import REMOVED
from tiercel.base.errors import ConfigError
from tiercel.base.units import parse_bytes, parse_int_human
from tiercel.cli.parsing import CommandParser, checked


@dataclass(frozen=True, slots=True)
class Option:
    """An option: its keyword name, how its text is read (None: it is a switch), what it does, and its short flag."""

    name: str
    parse: Callable[[str], Any] | None
    metavar: str
    help: str
    short: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The long flag, with dashes."""
        return "--" + self.name.replace("_", "-")


def parse_float(text: str) -> float:
    """Read a finite decimal number.

    Raises:
        ConfigError: `text` is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"got {text!r}; need a number such as 0.7")
    return value


def parse_max_model_len(text: str) -> int:
    """Read a number of tokens; `auto` is -1, the largest that fits in memory.

    Raises:
        ConfigError: `text` is neither.
    """
    return -1 if text.lower() == "auto" else parse_int_human(text)


ENGINE_OPTIONS = (
    Option("tokenizer", str, "PATH", "take the tokenizer from this folder instead of the model's"),
    Option("skip_tokenizer_init", None, "", "load no tokenizer; prompts and answers are token ids"),
    Option("dtype", str, "TYPE", "the type dense weights are kept in: auto, float32, float16, bfloat16"),
    Option("compute_dtype", str, "TYPE", "float32 switches the rounding of activations off"),
    Option("kv_cache_dtype", str, "TYPE", "the type of cached keys and values: auto, float16, float32, int8"),
    Option("quantization", str, "FORMAT", "quantise a dense model while loading: q8_0, q4_0", short="-q"),
    Option("max_model_len", parse_max_model_len, "TOKENS", "the most tokens a sequence may have; auto: what fits"),
    Option("max_num_seqs", parse_int_human, "N", "the most sequences computed together"),
    Option("max_num_batched_tokens", parse_int_human, "TOKENS", "the most tokens computed in one step"),
    Option("kv_cache_memory_bytes", parse_bytes, "SIZE", "memory for cached keys and values, as in 2GiB"),
    Option("block_size", parse_int_human, "TOKENS", "tokens a page of cached keys and values"),
    Option("enable_prefix_caching", None, "", "reuse the computed beginning of earlier prompts"),
    Option("seed", parse_int_human, "N", "makes sampling repeat itself"),
    Option("threads", parse_int_human, "N", "threads that compute; default: the cores this process may use"),
    Option("scheduling_policy", str, "POLICY", "which request goes first", choices=("fcfs", "priority")),
    Option("async_scheduling", None, "", "plan the next step while one runs"),
    Option(
        "max_logprobs", parse_int_human, "N", "the most alternatives a request may ask for; -1: the whole vocabulary"
    ),
    Option("structured_outputs_config", str, "JSON", 'limits of structured output, as in {"compile_cpu_s": 5}'),
    Option("max_waiting", parse_int_human, "N", "the most requests that may wait; more are refused"),
)

SAMPLING_OPTIONS = (
    Option("max_tokens", parse_int_human, "N", "end the answer after so many tokens"),
    Option("min_tokens", parse_int_human, "N", "do not end the answer before so many tokens"),
    Option("temperature", parse_float, "X", "0 always takes the likeliest token; higher is more varied"),
    Option("top_p", parse_float, "X", "sample from the likeliest tokens that together have this probability"),
    Option("top_k", parse_int_human, "N", "sample from this many likeliest tokens; 0 is all"),
    Option("min_p", parse_float, "X", "drop tokens below this fraction of the likeliest one's probability"),
    Option("seed", parse_int_human, "N", "makes sampling repeat itself"),
    Option("repetition_penalty", parse_float, "X", "above 1 makes tokens that were seen less likely"),
    Option("presence_penalty", parse_float, "X", "above 0 makes tokens that were answered less likely"),
    Option("frequency_penalty", parse_float, "X", "above 0 makes tokens less likely each time they are answered"),
)

# Flags of vLLM that are gone, and what to do instead: those that are keywords too, and those that are only flags.
REMOVED_FLAGS = {name.replace("_", "-"): hint for name, hint in REMOVED.items()} | {
    "best-of": "removed: ask for n answers and choose among them",
    "cpu-offload-gb": "weights are in host memory already; leave it out",
    "device": "removed: the backend follows from the machine; leave it out",
    "guided-decoding-backend": "removed: llguidance keeps answers to their form; leave it out",
    "tokenizer-mode": "the tokenizer follows from the model's files; leave it out",
    "use-v2-block-manager": "removed: there is one page pool; leave it out",
}


def add_options(parser: CommandParser, options: Iterable[Option], *, title: str) -> None:
    """Give `parser` a flag for each of `options`; a switch also gets `--no-<flag>`."""
    group = parser.add_argument_group(title)
    for option in options:
        names = [name for name in (option.short, option.flag) if name]
        if option.parse is None:
            group.add_argument(
                *names, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=option.help
            )
            continue
        group.add_argument(
            *names,
            type=checked(option.parse),
            metavar=None if option.choices else option.metavar,
            choices=option.choices or None,
            default=argparse.SUPPRESS,
            help=option.help,
        )


def given_options(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """Collect the values of `options` that were written on the command line, by keyword name."""
    return {option.name: getattr(args, option.name) for option in options if hasattr(args, option.name)}
