"""What this process may use of the machine: processors and memory, affinity and control groups honoured. Reads only."""

import math
import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # absent on other systems and in other cgroup versions
        return None


def _own_cgroup_dirs() -> list[Path]:
    """Folders of this process's cgroup (version 2), innermost first: a limit anywhere above counts."""
    line = next(
        (part for part in (_read(Path("/proc/self/cgroup")) or "").splitlines() if part.startswith("0::")), None
    )
    if line is None:
        return [_CGROUP]
    inner = _CGROUP / line[3:].lstrip("/")
    return [inner, *(p for p in inner.parents if p.is_relative_to(_CGROUP))]


def cpu_quota() -> float | None:
    """Return how many processors' time the control groups grant, or None for no limit."""
    quotas = []
    for folder in _own_cgroup_dirs():
        parts = (_read(folder / "cpu.max") or "max").split()
        if parts[0] != "max" and len(parts) == 2:
            quotas.append(int(parts[0]) / int(parts[1]))
    quota, period = _read(_CGROUP / "cpu/cpu.cfs_quota_us"), _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def allowed_cpus() -> list[int]:
    """Return the processors this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """Return how many threads can run at once: the allowed processors, less if a control group grants less time. At
    least 1.
    """
    quota = cpu_quota()
    n_allowed = len(allowed_cpus())
    return n_allowed if quota is None else max(1, min(n_allowed, math.floor(quota)))


def processor() -> tuple[str, frozenset[str]]:
    """Return the processor's name and its features, as the kernel tells them."""
    rows = [line.partition(":") for line in (_read(Path("/proc/cpuinfo")) or "").splitlines()]
    told = {key.strip(): value.strip() for key, _, value in reversed(rows)}
    flags = told.get("flags") or told.get("Features") or ""
    return told.get("model name") or platform.processor() or "unknown", frozenset(flags.split())


def available_bytes() -> int:
    """Return the memory that can be taken without swapping, control groups honoured."""
    info = dict(line.split(":", 1) for line in (_read(Path("/proc/meminfo")) or "").splitlines() if ":" in line)
    if "MemAvailable" in info:
        free = int(info["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_unused_bytes(folder, "memory.max", "memory.current") for folder in _own_cgroup_dirs()]
    limits.append(_unused_bytes(_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))  # version 1
    return max(min([free, *(limit for limit in limits if limit is not None)]), 0)


def _unused_bytes(folder: Path, limit_name: str, used_name: str) -> int | None:
    """Return how much more a control group may take, None where it sets no limit."""
    limit, used = _read(folder / limit_name), _read(folder / used_name)
    if not limit or limit == "max" or not used:
        return None
    # The group is charged for cached files too, which are given up when memory is asked for.
    lines = (_read(folder / "memory.stat") or "").splitlines()
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return int(limit) - int(used) + cached
