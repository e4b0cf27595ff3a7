"""What the process may use, as seen through the files that say so."""

import os
from pathlib import Path

import pytest

from tiercel.base import machine

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
MEMORY = "MemTotal: 33554432 kB\nMemFree: 1000 kB\nMemAvailable:   8388608 kB\nHugePages_Total:       0\n"


@pytest.fixture
def files(monkeypatch):
    """A machine of which only these files exist."""
    found = {"/proc/meminfo": MEMORY}
    monkeypatch.setattr(machine, "_read", lambda path: found.get(str(path), "").strip() or None)
    return found


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr(machine, "allowed_cpus", lambda: [0, 2, 4, 6])


def own_group(files, group):
    files["/proc/self/cgroup"] = f"1:name=systemd:/other\n0::{group}\n"


def test_without_control_groups_nothing_is_limited(files, four_cpus):
    assert machine.cpu_quota() is None
    assert machine.usable_cpus() == 4
    assert machine.available_bytes() == 8 * GIB


def test_the_least_quota_of_the_groups_above_counts(files, four_cpus):
    own_group(files, "/pod/box")
    files[str(CGROUP / "pod/box/cpu.max")] = "max 100000"
    files[str(CGROUP / "pod/cpu.max")] = "250000 100000"
    files[str(CGROUP / "cpu.max")] = "800000 100000"
    assert machine.cpu_quota() == 2.5
    assert machine.usable_cpus() == 2


def test_a_group_beside_the_own_does_not_count(files, four_cpus):
    own_group(files, "/pod/box")
    files[str(CGROUP / "pod/other/cpu.max")] = "100000 100000"
    assert machine.usable_cpus() == 4


def test_version_1_quotas_count(files, four_cpus):
    files[str(CGROUP / "cpu/cpu.cfs_quota_us")] = "300000"
    files[str(CGROUP / "cpu/cpu.cfs_period_us")] = "100000"
    assert machine.usable_cpus() == 3
    files[str(CGROUP / "cpu/cpu.cfs_quota_us")] = "-1"
    assert machine.usable_cpus() == 4


@pytest.mark.parametrize(("quota", "n"), [("50000", 1), ("199999", 1), ("200000", 2), ("9000000", 4)])
def test_threads_are_at_least_one_and_at_most_the_allowed(files, four_cpus, quota, n):
    files[str(CGROUP / "cpu.max")] = f"{quota} 100000"
    assert machine.usable_cpus() == n


def test_affinity_is_honoured():
    assert machine.allowed_cpus() == sorted(os.sched_getaffinity(0))


def test_the_least_memory_of_the_groups_above_counts(files):
    own_group(files, "/pod/box")
    files[str(CGROUP / "pod/box/memory.max")] = str(6 * GIB)
    files[str(CGROUP / "pod/box/memory.current")] = str(1 * GIB)
    files[str(CGROUP / "pod/memory.max")] = str(4 * GIB)
    files[str(CGROUP / "pod/memory.current")] = str(2 * GIB)
    files[str(CGROUP / "memory.max")] = "max"
    files[str(CGROUP / "memory.current")] = str(30 * GIB)
    assert machine.available_bytes() == 2 * GIB


def test_memory_that_only_caches_files_can_be_taken(files):
    own_group(files, "/box")
    files[str(CGROUP / "box/memory.max")] = str(4 * GIB)
    files[str(CGROUP / "box/memory.current")] = str(4 * GIB)
    files[str(CGROUP / "box/memory.stat")] = f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n"
    assert machine.available_bytes() == 2 * GIB


def test_version_1_memory_limits_count(files):
    files[str(CGROUP / "memory/memory.limit_in_bytes")] = str(3 * GIB)
    files[str(CGROUP / "memory/memory.usage_in_bytes")] = str(1 * GIB)
    assert machine.available_bytes() == 2 * GIB
    files[str(CGROUP / "memory/memory.limit_in_bytes")] = "9223372036854771712"  # none
    assert machine.available_bytes() == 8 * GIB


def test_a_group_over_its_limit_has_nothing_left(files):
    files[str(CGROUP / "memory.max")] = str(GIB)
    files[str(CGROUP / "memory.current")] = str(2 * GIB)
    assert machine.available_bytes() == 0


def test_without_meminfo_the_systems_own_number_is_taken(files):
    files["/proc/meminfo"] = ""
    assert machine.available_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_this_machine_can_be_read():
    assert 1 <= machine.usable_cpus() <= len(machine.allowed_cpus())
    assert machine.available_bytes() > 0
