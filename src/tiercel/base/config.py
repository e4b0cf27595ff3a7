"""The settings of one engine: one frozen tree, validated as a whole, printable, stored with every bench row.

Names are vLLM's where the meaning is the same. Knows no part: what a value means is decided where it is used.
"""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from tiercel.base.errors import ConfigError, UnknownOption

# Options people may bring along that are gone or elsewhere, with what to do instead.
REMOVED = {
    "calculate_kv_scales": "removed: scales of keys and values come from the checkpoint; calibrate before loading",
    "override_attention_dtype": "removed: use dtype or compute_dtype",
    "swap_space": "removed: a preempted request is recomputed, mostly from the prefix cache",
    "num_lookahead_slots": "removed: the engine plans ahead by itself",
    "disable_log_requests": "removed: requests are not logged unless TIERCEL_LOG=debug",
    "gpu_memory_utilization": "not for the CPU: set kv_cache_memory_bytes",
    "tensor_parallel_size": "not there yet: one process uses all the processors it may",
    "enforce_eager": "removed: there is one way to run a program",
    "trust_remote_code": "refused: no code of a model repository is ever run",
}

_KV_DTYPES = ("auto", "float16", "float32", "int8")
_KV_DTYPE_ALIASES = {"fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_COMPUTE_DTYPES = ("auto", "int8", "float32")
_DTYPES = ("auto", "float32", "float16", "bfloat16")
THREADS_MAX = 1024  # more than any machine has; each costs a stack and a place in every barrier
_QUANTIZATIONS = (None, "none", "q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a person may set about an engine. Every default has its reason here.

    model                   folder, .gguf file, catalogue name or org/name; None is the catalogue's default
    tokenizer               folder or .gguf to take the tokenizer from; None is the model itself
    skip_tokenizer_init     serve token ids only
    dtype                   "auto": weights stay as the file has them; a named type must be what the file has
    compute_dtype           "auto": quantised weights meet int8 activations; "float32": activations are never rounded
    kv_cache_dtype          "auto" is float16: half the memory traffic of float32; "int8" halves it again, rounding
                            each token's keys and values by head ("fp16" and "fp32" are other names)
    quantization            None | "none": as the file is; "q8_0" | "q4_0": quantise a float checkpoint while loading
    max_model_len           None: the model's own, or what fits; -1: the largest that fits
    max_num_seqs            None: 64, or max_num_batched_tokens if that is less
    max_num_batched_tokens  512: a step of about 0.2 s for a 135M model on two cores; more delays running requests
    kv_cache_memory_bytes   None: enough for max_num_seqs full requests, at most a quarter of the free memory
    block_size              tokens a page; 16 is the finest that attention reads: least waste, most prefix hits
    enable_prefix_caching   on: a hit is bitwise the same as computing
    seed                    of requests that bring none: None takes fresh ones
    threads                 None: the processors this process may use
    scheduling_policy       "fcfs" | "priority"
    async_scheduling        on: the next step is planned while one runs
    max_logprobs            20: OpenAI's limit; -1: the whole vocabulary
    structured_outputs_config   JSON of limits of structured output (`sampling.grammar_limits`); None: their defaults
    max_waiting             bound of the waiting queue; None: the engine's own
    revision                of a hub model
    """

    model: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    compute_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 512
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    seed: int | None = None
    threads: int | None = None
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True
    max_logprobs: int = 20
    structured_outputs_config: str | None = None
    max_waiting: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_dtype", _KV_DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype))
        for name, choices in (
            ("dtype", _DTYPES),
            ("compute_dtype", _COMPUTE_DTYPES),
            ("kv_cache_dtype", _KV_DTYPES),
            ("quantization", _QUANTIZATIONS),
            ("scheduling_policy", ("fcfs", "priority")),
        ):
            value = getattr(self, name)
            if value not in choices:
                shown = ", ".join("None" if c is None else c for c in choices)
                raise ConfigError(f"{name}: got {value!r}; needs one of {shown}")
        for name, least, may_be_none in (
            ("max_num_seqs", 1, True),
            ("max_num_batched_tokens", 1, False),
            ("block_size", 16, False),
            ("kv_cache_memory_bytes", 1, True),
            ("threads", 1, True),
            ("max_waiting", 0, True),
            ("max_logprobs", -1, False),
            ("max_model_len", -1, True),
        ):
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}: got {value!r}; needs a whole number of {least} or more")
        if self.threads is not None and self.threads > THREADS_MAX:
            raise ConfigError(
                f"threads: got {self.threads}; at most {THREADS_MAX} are started; lower it or leave it out"
            )
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}; at least max_num_seqs, which is "
                f"{self.max_num_seqs}, is needed, one token a sequence; raise it or lower max_num_seqs"
            )
        for name in ("skip_tokenizer_init", "enable_prefix_caching", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: got {getattr(self, name)!r}; needs True or False")
        if self.seed is not None and (
            not isinstance(self.seed, int) or isinstance(self.seed, bool) or not -(2**63) <= self.seed < 2**63
        ):
            raise ConfigError(f"seed: got {self.seed!r}; needs a 64-bit whole number, or None for fresh ones")


def engine_options(**given: Any) -> EngineOptions:
    """Build the options from keywords.

    Raises:
        UnknownOption: a keyword is unknown or removed; the message names the nearest one or the reason.
        ConfigError: a value is out of its range.
    """
    known = [f.name for f in dataclasses.fields(EngineOptions)]
    for name in given:
        if name in REMOVED:
            raise UnknownOption(f"option {name}: {REMOVED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise UnknownOption(f"option {name}: unknown; {hint}")
    if str(given.get("quantization")) == "bitsandbytes":
        raise UnknownOption(
            "option quantization: bitsandbytes is not in the core; use q8_0 or q4_0, or a checkpoint that is quantised"
        )
    return EngineOptions(**given)
