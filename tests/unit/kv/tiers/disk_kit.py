"""Disk tiers with a disk that fails when it is told to, and a virtual clock."""

import errno
from contextlib import contextmanager
from threading import Event

from tiercel.kv.tiers.disk import DiskTier
from tiercel.kv.tiers.disk_files import FileOps
from tiercel.testing.clock import VirtualClock
from tiercel.testing.tier_kit import IDENTITY, PATIENCE_S, TierDriver


class FaultyOps(FileOps):
    """Writes at most `n_room` bytes more; reads wait for `may_read`, and raise what `read_error` says."""

    def __init__(self):
        super().__init__()
        self.n_room = None
        self.write_error = errno.ENOSPC
        self.read_error = None
        self.may_read = Event()
        self.may_read.set()
        self.may_write = Event()
        self.may_write.set()
        self.is_writing = Event()
        self.is_reading = Event()
        self.crashes = False
        self.is_unmounted = False
        self.calls = []

    def device(self, path):
        return -1 if self.is_unmounted else super().device(path)

    def read(self, path, n_bytes):
        if path.suffix == ".kv":
            self._begin_read(path)
        return super().read(path, n_bytes)

    def read_object(self, path, buffer):
        self._begin_read(path)
        return super().read_object(path, buffer)

    def _begin_read(self, path):
        self.is_reading.set()
        assert self.may_read.wait(PATIENCE_S)
        self.calls.append(("read", path.stem))
        if self.read_error is not None:
            raise OSError(self.read_error, "injected")

    def write(self, fd, data):
        self.is_writing.set()
        assert self.may_write.wait(PATIENCE_S)
        if self.n_room is None:
            return super().write(fd, data)
        if self.n_room == 0:
            raise OSError(self.write_error, "injected")
        n = super().write(fd, memoryview(data)[: self.n_room])
        self.n_room -= n
        return n

    def rename(self, path, to):
        self.calls.append(("write", to.stem))
        super().rename(path, to)

    def unlink(self, path):
        if not self.crashes:
            super().unlink(path)


@contextmanager
def opened(path, *, capacity_bytes=1 << 20, ops=None, clock=None, wall=None, limits=None, identity=IDENTITY):
    """Give a driver of a tier whose first scan is over."""
    woken, clock = Event(), clock or VirtualClock()
    wall = wall or VirtualClock()
    tier = DiskTier(identity, path, capacity_bytes, woken.set, clock, wall=wall, ops=ops, limits=limits)
    try:
        assert tier.drain(PATIENCE_S)
        yield TierDriver(tier, woken, clock)
        tier.check()
    finally:
        tier.close()


def files(path):
    """Give the objects' files."""
    return sorted(path.glob("*/*/*.kv"))


def temps(path):
    """Give the temporary files."""
    return list(path.rglob("*.tmp"))
