"""Buffers are used again once nobody has a view of them, and not before."""

import gc
import random

from tiercel.kv.tiers.buffers import ALIGN, BufferPool
from tiercel.kv.tiers.disk_files import FileOps


def address(buffer):
    import ctypes

    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))


def test_a_buffer_is_whole_pages_and_begins_at_one():
    pool = BufferPool(1 << 20)
    for n_bytes in (0, 1, ALIGN, ALIGN + 1, 9 << 20):
        buffer = pool.take(n_bytes)
        assert len(buffer) == max(1, -(-n_bytes // ALIGN)) * ALIGN
        assert address(buffer) % ALIGN == 0
        pool.check()


def test_a_buffer_comes_back_with_the_last_view_of_any_part_of_it():
    pool = BufferPool(1 << 30)
    buffer = pool.take(ALIGN)
    where = address(buffer)
    part = buffer[100:200].toreadonly()
    del buffer
    assert address(pool.take(ALIGN)) != where
    del part
    assert address(pool.take(ALIGN)) == where
    pool.check()


def test_buffers_in_use_never_share_a_byte():
    rng, pool, held = random.Random(5), BufferPool(1 << 20), {}
    for step in range(3000):
        if held and rng.random() < 0.5:
            key = rng.choice(list(held))
            view = held.pop(key)
            assert view == bytes([key % 251]) * len(view)
        else:
            view = pool.take(rng.choice([100, 5000, 70_000]))
            view[:] = bytes([step % 251]) * len(view)
            held[step] = view
    assert all(view == bytes([key % 251]) * len(view) for key, view in held.items())
    pool.check()


def test_free_memory_beyond_what_is_kept_is_given_back():
    pool = BufferPool(kept_bytes=20 << 20)
    held = [pool.take(1 << 20) for _ in range(100)]
    pool.check()
    held.clear()
    gc.collect()
    pool.trim()
    pool.check()
    assert 0 < pool._free_bytes <= 28 << 20, "what is kept, and less than a slab"


def test_a_file_is_read_whole_cached_or_not_and_its_length_told(tmp_path):
    ops, pool, path = FileOps(), BufferPool(1 << 20), tmp_path / "file"
    for n_bytes in (0, 1, ALIGN - 1, ALIGN, 3 * ALIGN, 100_001):
        data = random.Random(n_bytes).randbytes(n_bytes)
        path.write_bytes(data)
        for is_cached in (True, False):
            if not is_cached:
                drop(path)
            buffer = pool.take(n_bytes)
            assert ops.read_object(path, buffer) == n_bytes
            assert buffer[:n_bytes] == data
    assert ops.read_object(path, pool.take(100)) == 100_001, "what does not fit is told by its length"


def drop(path):
    """Take a file out of the page cache."""
    import os

    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
