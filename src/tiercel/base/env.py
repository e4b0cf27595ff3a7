"""Every environment variable Tiercel reads, in one table. They are for debugging and for where files live; settings are
options.

A bad value is an error at the first read, never a silent default. `FOREIGN` are the names that people of vLLM have set:
those that a row of the options' table reads (`Option.env`) are honoured, those here that are not are told once a start.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tiercel.base.errors import ConfigError, UnknownOption


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: its name, what it is for, and its valid values (empty: any text)."""

    name: str
    help: str
    choices: tuple[str, ...] = ()


ISA = EnvVar("TIERCEL_ISA", "force the kernels' instruction-set level", ("scalar", "avx2", "avx512"))
HOME = EnvVar("TIERCEL_HOME", "folder of fetched models and caches (default: tiercel in the user's cache folder)")
TRACEBACK = EnvVar("TIERCEL_TRACEBACK", "print the traceback of an error that the command line reports", ("0", "1"))
LOG = EnvVar("TIERCEL_LOG", "log level on stderr", ("debug", "info", "warning", "error"))

TABLE = (ISA, HOME, TRACEBACK, LOG)

_VLLM: Final = "VLLM_"
_LEVEL: Final = "VLLM_LOGGING_LEVEL"
# vLLM's variables that are read here, and by which option or setting.
HONOURED: Final = {
    "VLLM_API_KEY": "--api-key",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes, in GiB",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--timeout-keep-alive",
    _LEVEL: "--uvicorn-log-level, where TIERCEL_LOG is not set",
    "VLLM_LOGGING_CONFIG_PATH": "--log-config-file",
    "VLLM_LOG_STATS_INTERVAL": "--log-stats-interval",
    "VLLM_MAX_COMPLETION_PROMPTS": "--n-prompts-max",
    "VLLM_MAX_N_SEQUENCES": "--n-outputs-max",
}
# Those that ask for what is so anyway.
_ALWAYS_SO: Final = frozenset(
    {
        "VLLM_BATCH_INVARIANT",
        "VLLM_DO_NOT_TRACK",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NO_USAGE_STATS",
        "VLLM_TARGET_DEVICE",
        "VLLM_WORKER_MULTIPROC_METHOD",
    }
)
# Those that mean something here, and what to do instead; any other is named without a hint.
_INSTEAD: Final = {
    "VLLM_CACHE_ROOT": "set TIERCEL_HOME",
    "VLLM_CPU_OMP_THREADS_BIND": "start under taskset, or give --threads",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "the model's own length is the most",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "the server ends with its engine",
}


def read(var: EnvVar) -> str | None:
    """Return the variable's value, or None when it is unset or empty.

    Raises: ConfigError: the value is not one of the variable's choices.
    """
    value = os.environ.get(var.name) or None
    if value is not None and var.choices and value not in var.choices:
        raise ConfigError(
            f"environment {var.name}: got {value!r}; needs one of {', '.join(var.choices)}; unset it or fix it"
        )
    return value


def refuse_removed(environ: Mapping[str, str]) -> None:
    """Refuse a variable that vLLM no longer knows.

    Raises: UnknownOption: one is set; the message says what to do instead.
    """
    names = _vllm_names(environ)
    if not names:
        return
    from tiercel.base.absent import REMOVED_VARIABLES

    for name in names:
        if name in REMOVED_VARIABLES:
            raise UnknownOption(f"environment {name}: {REMOVED_VARIABLES[name]}")


def _vllm_names(environ: Mapping[str, str]) -> list[str]:
    return sorted(name for name, value in environ.items() if name.startswith(_VLLM) and value)


def unread(environ: Mapping[str, str] | None = None) -> str | None:
    """Say in one line which of vLLM's variables are set and not read here; None: none."""
    names = _vllm_names(os.environ if environ is None else environ)
    told = [
        f"{name} ({_INSTEAD[name]})" if name in _INSTEAD else name
        for name in names
        if name not in HONOURED and name not in _ALWAYS_SO
    ]
    return f"set in the environment and not read here: {', '.join(told)}" if told else None
