"""What a row says of the machine it was made on, and of the program that made it. Names no host, user or folder."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import tiercel
from tiercel.base import machine

# Those that decide which kernels can run.
_FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_BUILD_INPUTS = ("src", "native", "CMakeLists.txt", "pyproject.toml", "benchmarks/peers", "benchmarks/cases")


def describe() -> dict[str, Any]:
    """Return what is known of this machine, with how busy it was when asked."""
    name, flags = machine.processor()
    quota = machine.cpu_quota()
    return {
        "cpu": name,
        "features": [feature for feature in _FEATURES if feature in flags],
        "n_cpus": os.cpu_count(),
        "n_cpus_usable": machine.usable_cpus(),
        "cpu_quota": quota,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": machine.available_bytes(),
        "is_virtual": "hypervisor" in flags,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions(packages: Iterable[str] = ("numpy",)) -> dict[str, str]:
    """Return the versions of this program, its Python and of `packages` that are installed."""
    told = {"tiercel": tiercel.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            told[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return told


def checkout() -> Path | None:
    """Return the checkout this program belongs to: the one it is imported from, else the working folder's."""
    for folder in (Path(tiercel.__file__).resolve().parents[2], Path.cwd()):
        if (folder / "src/tiercel/__init__.py").is_file() and (folder / "native").is_dir():
            return folder
    return None


def commit(folder: Path | None) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout at `folder`, and whether what runs is anything else than that commit."""
    if folder is None:
        return None, None
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None, None
    changes = _git(folder, "status", "--porcelain", "--", *_BUILD_INPUTS)
    is_same_code = _code_digest(Path(tiercel.__file__).parent) == _code_digest(folder / "src/tiercel")
    return head, changes is None or bool(changes) or not is_same_code


def command(words: Sequence[str]) -> str:
    """Return the command line that `words` write, without the paths of this machine.

    A path becomes its last part, and a peer's interpreter PYTHON: whoever repeats the command fills in their own.
    """
    import shlex

    shown = []
    for word in words:
        head, equals, path = word.rpartition("=")
        if equals and "/" in path:
            is_peer = not head.startswith("--") or "=" in head
            shown.append(f"{head}=PYTHON" if is_peer else f"{head}={Path(path).name}")
        else:
            shown.append(Path(word).name if word.startswith(("/", "./", "../", "~")) else word)
    return shlex.join(["tiercel", *shown])


def _git(folder: Path, *words: str) -> str | None:
    try:
        ended = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _code_digest(package: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        whole.update(f"{path.relative_to(package)}\0".encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()


def without_paths(text: str) -> str:
    """Return `text` with the last part of each absolute path in the path's place."""
    return re.sub(r"(?<![\w/])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)
