"""What a request's form may cost: the limits of structured output. Knows no grammar."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tiercel.base.errors import ConfigError

# vLLM's names, with the values that say what is so anyway.
_VLLM: Final[Mapping[str, tuple[object, ...]]] = {
    "backend": ("auto", "guidance"),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "disable_fallback": (False, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Limits of one engine's structured output; each has its reason.

    schema_depth_max     32: schemas in schemas, counted before anything recurses over them
    n_schema_nodes_max   10,000: values in a schema's JSON
    n_choices_max        5,000: entries of one enum or choice
    regex_bytes_max      8 KiB, of an expression or pattern; n_repeats_max 1,000: the bounds of its {m,n}
    grammar_bytes_max    1 MiB, of a grammar or structural tag: as much as tools may have
    compile_cpu_s        10, of processor time in the worker; regex_cpu_s 5, whole seconds both
    compile_wall_s       60: in case the worker does not even run
    worker_bytes         2 GiB of address space of a worker: a tokenizer's trie takes some 100 MiB
    n_workers            2: so that one slow grammar does not hold up the others
    cache_bytes          64 MiB of compiled grammars, the least recently used leave first
    n_lexer_states_max   50,000: 1 to 2 KiB each, for as long as a grammar is cached or in use
    """

    schema_depth_max: int = 32
    n_schema_nodes_max: int = 10_000
    n_choices_max: int = 5_000
    regex_bytes_max: int = 8 << 10
    n_repeats_max: int = 1_000
    grammar_bytes_max: int = 1 << 20
    compile_cpu_s: int = 10
    regex_cpu_s: int = 5
    compile_wall_s: int = 60
    worker_bytes: int = 2 << 30
    n_workers: int = 2
    cache_bytes: int = 64 << 20
    n_lexer_states_max: int = 50_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"structured_outputs_config.{field.name}: got {value!r}; needs a whole number above 0"
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build the limits from an engine's option. Of vLLM's names, the values that change nothing are taken.

        Raises: ConfigError: a name is unknown or a value out of its range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        limits = {}
        for name, value in options.items():
            if name in _VLLM:
                if value not in _VLLM[name]:
                    taken = ", ".join(map(str, _VLLM[name]))
                    raise ConfigError(f"structured_outputs_config.{name}: got {value!r}; only {taken} is there")
            elif name not in known:
                raise ConfigError(f"structured_outputs_config.{name}: unknown; known are {', '.join(known)}")
            else:
                limits[name] = value
        return cls(**limits)
