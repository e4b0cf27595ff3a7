"""The settings of one engine: one frozen tree, validated as a whole, printable, stored with every bench row.

Names are vLLM's where the meaning is the same. Knows no part: what a value means is decided where it is used.
`base.options` says what follows from a row.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tiercel.base.env import refuse_removed
from tiercel.base.errors import ConfigError, UnknownOption
from tiercel.base.options import (
    Option,
    from_environment,
    option,
    options_of,
    parse_float,
    parse_object,
    parse_objects,
)
from tiercel.base.units import GIB, parse_bytes, parse_int_human

THREADS_MAX = 1024  # more than any machine has; each costs a stack and a place in every barrier
# What a model may recommend (generation_config.json) and a person may overrule.
_RECOMMENDATIONS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def parse_max_model_len(text: str) -> int:
    """Read a number of tokens; `auto` is -1, the largest that fits in memory.

    Raises:
        ConfigError: `text` is neither.
    """
    return -1 if text.lower() == "auto" else parse_int_human(text)


def _parse_gib(text: str) -> int:
    return int(parse_float(text) * GIB)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a person may set about an engine. Each row says what it does and why its default is what it is.

    `model` is a folder, a .gguf file, a catalogue name or org/name; None is the catalogue's default.
    """

    model: str | None = None
    revision: str | None = option(
        None, metavar="REV", group="source", help="branch, tag or commit of a hub repository", why="the hub's own: main"
    )
    hf_token: str | None = option(
        None,
        is_shown=False,
        metavar="TOKEN",
        group="source",
        help="key for gated and private repositories of the hub; HF_TOKEN is not seen by other users",
        why="what the hub's own library knows: HF_TOKEN, or a login",
    )
    download_dir: str | None = option(
        None,
        metavar="DIR",
        group="source",
        help="folder that fetched models are kept in",
        why="TIERCEL_HOME for the catalogue's models, HF_HOME for the hub's",
    )
    tokenizer: str | None = option(
        None,
        metavar="MODEL",
        group="model",
        help="take the tokenizer from this folder, file or hub repository instead of the model's",
        why="a model brings its own",
    )
    skip_tokenizer_init: bool = option(
        False,
        parse=None,
        group="model",
        help="load no tokenizer; prompts and answers are token ids",
        why="text is wanted",
    )
    dtype: str = option(
        "auto",
        metavar="TYPE",
        group="model",
        choices=("auto", "float32", "float16", "bfloat16"),
        aliases={"half": "float16", "float": "float32"},
        help="the type dense weights are kept in; a named type must be what the file has",
        why="weights stay as the file has them",
    )
    compute_dtype: str = option(
        "auto",
        metavar="TYPE",
        group="model",
        choices=("auto", "int8", "float32"),
        help="float32 switches the rounding of activations off",
        why="quantised weights meet activations rounded to int8, as in other engines",
    )
    quantization: str | None = option(
        None,
        short="-q",
        metavar="FORMAT",
        group="model",
        is_common=True,
        choices=(None, "none", "q8_0", "q4_0"),
        refused={
            "bitsandbytes": "bitsandbytes is not in the core; use q8_0 or q4_0, or a checkpoint that is quantised"
        },
        help="quantise a dense model while loading: q8_0 or q4_0",
        why="a file is used as it is",
    )
    runner: str = option(
        "auto",
        metavar="KIND",
        group="model",
        choices=("auto", "generate", "pooling"),
        help="what the model does; pooling makes an embedder of one that would generate",
        why="the model's files say it",
    )
    seed: int | None = option(
        None,
        parse=parse_int_human,
        metavar="N",
        group="model",
        help="of requests that bring none: makes sampling repeat itself",
        why="fresh seeds, so that two requests differ",
    )
    max_logprobs: int = option(
        20,
        parse=parse_int_human,
        least=-1,
        metavar="N",
        group="model",
        help="the most alternatives a request may ask for; -1: the whole vocabulary",
        why="OpenAI's limit, and vLLM's default",
    )
    structured_outputs_config: Mapping[str, Any] = option(
        {},
        parse=parse_object,
        keys=(),
        metavar="JSON",
        group="model",
        help="limits of structured output, as in '{\"compile_cpu_s\": 5}'",
        why="those of `sampling.grammar_limits`",
    )
    reasoning_config: Mapping[str, Any] = option(
        {},
        parse=parse_object,
        keys=("reasoning_start_str", "reasoning_end_str"),
        metavar="JSON",
        group="model",
        help='what thinking_token_budget ends reasoning with, as in \'{"reasoning_end_str": "So:</think>"}\'',
        why="the model's own marks",
    )
    speculative: str = option(
        "auto",
        metavar="HOW",
        group="model",
        choices=("auto", "off", "ngram", "suffix"),
        help="tokens guessed from the text so far are computed along; no answer changes. auto: suffix, where it pays",
        why="a text that repeats itself comes several times as fast, and others lose nothing",
    )
    speculative_config: Mapping[str, Any] = option(
        {},
        short="-sc",
        parse=parse_object,
        keys=(),
        metavar="JSON",
        group="model",
        help='how tokens are guessed, in vLLM\'s words, as in \'{"method": "ngram", "num_speculative_tokens": 8}\', '
        '\'{"model": DRAFTER}\' or \'{"method": "mtp"}\'; methods: ngram, suffix, draft_model, mtp, eagle3, dflash, '
        "dflash2, dspark, custom",
        why="vLLM's defaults of suffix decoding, and only what pays",
    )
    generation_config: str = option(
        "auto",
        metavar="auto|vllm|DIR",
        group="model",
        help="whose sampling defaults count: auto: the model's; vllm: none; DIR: those of another folder",
        why="a model's authors know how it is to be sampled",
    )
    override_generation_config: Mapping[str, Any] = option(
        {},
        parse=parse_object,
        keys=_RECOMMENDATIONS,
        metavar="JSON",
        group="model",
        help="sampling defaults that win over the model's, as in '{\"temperature\": 0.5}'",
        why="nothing to overrule",
    )
    max_model_len: int | None = option(
        None,
        parse=parse_max_model_len,
        least=-1,
        metavar="TOKENS",
        group="model",
        is_common=True,
        help="the most tokens a sequence may have; auto or -1: what fits",
        why="the model's own, or what fits",
    )
    threads: int | None = option(
        None,
        parse=parse_int_human,
        least=1,
        most=THREADS_MAX,
        metavar="N",
        group="model",
        is_common=True,
        help="threads that compute",
        why="the processors this process may use",
    )
    kv_cache_dtype: str = option(
        "auto",
        metavar="TYPE",
        group="cache",
        choices=("auto", "float16", "float32", "int8"),
        aliases={"fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
        help="the type of cached keys and values; int8 rounds each token's by head, and takes half the memory",
        why="auto is float16: half the memory traffic of float32",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        parse=parse_bytes,
        least=1,
        metavar="SIZE",
        group="cache",
        is_common=True,
        env=(("VLLM_CPU_KVCACHE_SPACE", _parse_gib),),
        help="memory for cached keys and values, and kept recurrent states, as in 2GiB",
        why="enough for max_num_seqs full requests, at most a quarter of the free memory",
    )
    block_size: int = option(
        16,
        parse=parse_int_human,
        least=16,
        metavar="TOKENS",
        group="cache",
        help="tokens a page of cached keys and values, a multiple of 16",
        why="the finest that attention reads: least waste, most prefix hits",
    )
    enable_prefix_caching: bool | None = option(
        None,
        parse=None,
        group="cache",
        help="reuse the computed beginning of earlier prompts",
        why="on, as a hit is bitwise the same as computing; off where recurrent states do not fit beside the pages",
    )
    kv_tiers: Sequence[Mapping[str, Any]] = option(
        (),
        parse=parse_objects,
        many="objects",
        metavar="JSON",
        group="cache",
        help='where pages are kept beyond memory, as in \'[{"type": "disk", "path": "kv", "capacity": "20GiB"}]\'',
        why="a person says what may be written, and where",
    )
    kv_offloading_size: float | None = option(
        None,
        parse=parse_float,
        least=0.0,
        metavar="GIB",
        group="cache",
        help="GiB of host memory for pages of ended requests: on a CPU more pages in the pool, which is host memory",
        why="the pool's own size",
    )
    max_num_seqs: int | None = option(
        None,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="scheduler",
        is_common=True,
        help="the most sequences computed together",
        why="64, or max_num_batched_tokens if that is less: a step is bound by computing long before",
    )
    max_num_batched_tokens: int = option(
        512,
        parse=parse_int_human,
        least=1,
        metavar="TOKENS",
        group="scheduler",
        help="the most tokens computed in one step",
        why="a step of about 0.2 s for a 135M model on two cores; more delays running requests",
    )
    long_prefill_token_threshold: int = option(
        0,
        parse=parse_int_human,
        least=0,
        metavar="TOKENS",
        group="scheduler",
        help="the most tokens of one prompt in a step while others wait for theirs; 0: no bound but the step's",
        why="running answers come first anyway",
    )
    scheduling_policy: str = option(
        "fcfs",
        metavar="POLICY",
        group="scheduler",
        choices=("fcfs", "priority"),
        help="which request goes first: the one that came first, or the one with the lowest priority number",
        why="vLLM's",
    )
    async_scheduling: bool = option(
        True, parse=None, group="scheduler", help="plan the next step while one runs", why="computing never waits"
    )
    max_waiting: int | None = option(
        None,
        parse=parse_int_human,
        least=0,
        metavar="N",
        group="scheduler",
        help="the most sequences that may wait for their first step; more are refused",
        why="4096: minutes of work for any machine",
    )
    stream_interval: int = option(
        1,
        parse=parse_int_human,
        least=1,
        metavar="TOKENS",
        group="scheduler",
        help="tokens a streamed piece holds at least, but the first and the last",
        why="each token is shown as soon as it is there",
    )

    def __post_init__(self) -> None:
        for row in options_of(EngineOptions):
            value = getattr(self, row.name)
            if isinstance(value, str) and value in row.aliases:
                object.__setattr__(self, row.name, row.aliases[value])
            row.check(getattr(self, row.name))
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}; at least max_num_seqs, which is "
                f"{self.max_num_seqs}, is needed, one token a sequence; raise it or lower max_num_seqs"
            )
        if self.seed is not None and (
            not isinstance(self.seed, int) or isinstance(self.seed, bool) or not -(2**63) <= self.seed < 2**63
        ):
            raise ConfigError(f"seed: got {self.seed!r}; needs a 64-bit whole number, or None for fresh ones")


def engine_rows(*groups: str) -> tuple[Option, ...]:
    """Give the engine's rows of some groups; of none: all but those that say where a model comes from."""
    rows = options_of(EngineOptions)
    return tuple(row for row in rows if (row.group in groups if groups else row.group != "source"))


def engine_options(*, environ: Mapping[str, str] | None = None, **given: Any) -> EngineOptions:
    """Build the options from keywords, then the environment, then defaults.

    Raises:
        UnknownOption: a keyword is unknown or removed; the message names the nearest one or the reason.
        ConfigError: a value is out of its range.
    """
    environ = os.environ if environ is None else environ
    refuse_removed(environ)
    rows = {row.name: row for row in options_of(EngineOptions)}
    taken: dict[str, Any] = {}
    for name, value in given.items():
        row = rows.get(name)
        if row is not None or name == "model":
            taken[name] = value
        else:
            _refuse_unknown(name, value, ["model", *rows])
    return EngineOptions(**from_environment(tuple(rows.values()), environ) | taken)


def _refuse_unknown(name: str, value: Any, known: list[str]) -> None:
    """Let an option of vLLM's pass that changes nothing, and refuse any other."""
    from tiercel.base import absent

    if absent.is_listed(name):
        absent.refuse(name, value)
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise UnknownOption(f"option {name}: unknown; {hint}")
