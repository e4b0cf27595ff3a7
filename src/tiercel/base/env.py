"""Every environment variable Tiercel reads, in one table. They are for debugging and for where files live; settings are
options.

A bad value is an error at the first read, never a silent default.
"""

import os
from dataclasses import dataclass

from tiercel.base.errors import ConfigError


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
