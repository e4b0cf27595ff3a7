"""`tiercel env`: what this machine and installation are, to be put in a bug report. Holds no secret and no prompt."""

import os
import platform
import re
import sys
from importlib import metadata
from typing import Any

from tiercel import __version__
from tiercel.base import env as variables
from tiercel.base import machine
from tiercel.base.errors import TiercelError
from tiercel.base.units import format_bytes
from tiercel.cli.parsing import CommandParser
from tiercel.hub.store import default_folder

# Those that a kernel may be chosen by.
_FEATURES = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.ASCII)
# Set by others, and they change how this program finds files or computes.
_OTHER_VARIABLES = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "XDG_CACHE_HOME", "OMP_NUM_THREADS")


def configure(parser: CommandParser) -> None:
    """Give `parser` what `env` takes."""
    parser.add_argument("--json", action="store_true", help="write JSON")


def execute(args: Any) -> int:
    """Write the report."""
    report = describe_environment()
    if args.json:
        import json

        json.dump(report, sys.stdout, indent=2)
        print()
        return 0
    for title, rows in report.items():
        print(f"{title}:")
        width = max((len(key) for key in rows), default=0)
        for key, value in rows.items():
            print(f"  {key:<{width}}  {value}")
    return 0


def describe_environment() -> dict[str, dict[str, str]]:
    """Collect the report: title -> name -> value."""
    return {
        "tiercel": _describe_installation(),
        "machine": _describe_machine(),
        "packages": _describe_packages(),
        "environment": _describe_variables(),
    }


def _describe_installation() -> dict[str, str]:
    return {
        "version": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "kernels": _describe_kernels(),
        "models": str(default_folder()),
    }


def _describe_kernels() -> str:
    """Say which instruction-set level the native runner would take here."""
    try:
        from tiercel.runner.native import chosen_level

        return chosen_level()
    except (ImportError, TiercelError) as error:
        return f"not available: {error}"


def _describe_machine() -> dict[str, str]:
    model, flags = machine.processor()
    quota = machine.cpu_quota()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "cpu": model,
        "features": " ".join(name for name in _FEATURES if name in flags) or "none known",
        "cores": f"{os.cpu_count()} in all, {len(machine.allowed_cpus())} allowed, {machine.usable_cpus()} used",
        "cgroup limit": "none" if quota is None else f"{quota:g} cores",
        "memory": f"{format_bytes(pages)} in all, {format_bytes(machine.available_bytes())} available",
    }


def _describe_packages() -> dict[str, str]:
    """List the versions of what this installation says it needs."""
    try:
        needs = metadata.requires("tiercel") or []
    except metadata.PackageNotFoundError:
        needs = ["numpy", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "msgspec", "starlette", "uvicorn"]
    names = [re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0] for need in needs if "extra ==" not in need]
    return {name: _version(name) for name in names}


def _describe_variables() -> dict[str, str]:
    """List the variables that matter and are set; of a secret only that it is, of an address no password."""
    names = [*(variable.name for variable in variables.TABLE), *variables.HONOURED, *_OTHER_VARIABLES]
    told = {name: os.environ[name] for name in names if os.environ.get(name)}
    return {
        name: "(set)" if _SECRET.search(name) else re.sub(r"://[^/@\s]+@", "://***@", value)
        for name, value in told.items()
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
