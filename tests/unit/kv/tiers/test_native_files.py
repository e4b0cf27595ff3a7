"""The core's reading of files and sums of bytes: the values are zlib's, and an error is the system's own."""

import os
import random
import zlib
from pathlib import Path

import pytest

from tiercel import _native
from tiercel.kv.tiers.buffers import BufferPool

TASKS = Path("/proc/self/task")


@pytest.mark.parametrize("n_bytes", [*range(0, 200), 4095, 4096, 100_003])
def test_a_sum_is_that_of_zlib(n_bytes):
    data = random.Random(n_bytes).randbytes(n_bytes + 3)
    for begin in (0, 1, 3):
        part = memoryview(data)[begin : begin + n_bytes]
        assert _native.crc32(part, 12345) == zlib.crc32(part, 12345)
    assert _native.crc32(data) == zlib.crc32(data)
    assert _native.crc32(bytearray(data), 0xFFFFFFFF) == zlib.crc32(data, 0xFFFFFFFF)


def test_what_cannot_be_read_is_the_systems_error(tmp_path):
    buffer = BufferPool(1 << 20).take(100)
    with pytest.raises(FileNotFoundError, match="nothing"):
        _native.read_file(str(tmp_path / "nothing"), buffer, True)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="link"):
        _native.read_file(str(tmp_path / "link"), buffer, True)
    with pytest.raises(IsADirectoryError):
        _native.read_file(str(tmp_path), buffer, True)


def test_a_buffer_that_cannot_be_read_into_past_the_cache_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    buffer = BufferPool(1 << 20).take(8192)
    for wrong in (buffer[1:4097], buffer[:100]):
        with pytest.raises(ValueError, match="multiple of 4096"):
            _native.read_file(str(tmp_path / "file"), wrong, True)
    with pytest.raises(TypeError):
        _native.read_file(str(tmp_path / "file"), buffer.toreadonly(), True)
    assert _native.read_file(os.fspath(tmp_path / "file"), buffer, True) == 100


def test_what_cannot_be_written_is_the_systems_error(tmp_path):
    background = _native.Background()
    fd = background.create(str(tmp_path / "new"))
    with pytest.raises(FileExistsError, match="new"):
        background.create(str(tmp_path / "new"))
    with pytest.raises(FileNotFoundError, match="nothing"):
        background.create(str(tmp_path / "nothing" / "new"))
    assert background.write(fd, bytes(5000)) == 5000
    os.close(fd)
    with pytest.raises(OSError, match="descriptor"):
        background.write(fd, bytes(5000))
    background.rename(str(tmp_path / "new"), str(tmp_path / "named"))
    assert (tmp_path / "named").read_bytes() == bytes(5000)
    with pytest.raises(FileNotFoundError, match="new"):
        background.rename(str(tmp_path / "new"), str(tmp_path / "named"))


@pytest.mark.skipif(not TASKS.is_dir(), reason="no list of threads")
def test_what_is_written_in_the_background_gives_way_to_every_other_thread():
    before = set(TASKS.iterdir())
    background = _native.Background()
    its_tasks = set(TASKS.iterdir()) - before
    with pytest.raises(OSError, match="descriptor"):
        background.write(-1, bytes(1))  # it has begun
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in its_tasks} == {min(ours + 10, 19)}
