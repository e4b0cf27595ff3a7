"""Memory that objects are read into: used again once nobody looks at it, as its first touch costs as much as the read.

A buffer belongs to whoever has a view of it, or of a part of it; with the last view it comes back by itself. Buffers
begin at a page of the machine, as reading past the page cache needs. Any thread may call. Knows no object.

Invariant, verified by `check`: what is free was taken before, and no piece of a slab is free twice.
"""

import ctypes
import mmap
import weakref
from collections import deque
from threading import Lock

ALIGN = 4096
_SLAB_BYTES = 8 << 20  # of which the kernel makes huge pages: one fault for 2 MiB


class _Slab:
    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.n_pieces = max(1, _SLAB_BYTES // piece_bytes)
        self.memory = mmap.mmap(-1, self.n_pieces * piece_bytes)
        self.free = list(range(self.n_pieces))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                return  # a kernel without them


class BufferPool:
    """Buffers of whatever length. Keeps `kept_bytes` of free memory, and gives the rest back to the machine."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._lock = Lock()  # guards the two below
        self._slabs: dict[int, list[_Slab]] = {}  # by the length of their pieces
        self._free_bytes = 0
        # What came back. No lock is taken where it does: that may be anywhere, also where this one is held.
        self._returned: deque[tuple[_Slab, int]] = deque()

    def take(self, n_bytes: int) -> memoryview:
        """Return a writable buffer of `n_bytes` or up to a page more, with whatever is in it. Raises MemoryError."""
        piece_bytes = -(-max(n_bytes, 1) // ALIGN) * ALIGN
        with self._lock:
            self._take_back()
            slabs = self._slabs.setdefault(piece_bytes, [])
            slab = next((slab for slab in slabs if slab.free), None)
            if slab is None:
                try:
                    slab = _Slab(piece_bytes)
                except OSError as error:
                    raise MemoryError(f"kv.tiers: no memory to read {n_bytes} bytes into") from error
                slabs.append(slab)
                self._free_bytes += slab.n_pieces * piece_bytes
            i = slab.free.pop()
            self._free_bytes -= piece_bytes
        piece = (ctypes.c_ubyte * piece_bytes).from_buffer(slab.memory, i * piece_bytes)
        weakref.finalize(piece, self._returned.append, (slab, i)).atexit = False
        return memoryview(piece).cast("B")

    def trim(self) -> None:
        """Give back to the machine what is free beyond what is kept."""
        if self._returned:
            with self._lock:
                self._take_back()

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        with self._lock:
            self._take_back()
            slabs = [slab for slabs in self._slabs.values() for slab in slabs]
            assert all(len(set(slab.free)) == len(slab.free) <= slab.n_pieces for slab in slabs), (
                "a piece is free twice"
            )
            n_free = sum(len(slab.free) * slab.piece_bytes for slab in slabs)
            assert n_free == self._free_bytes, "kv.tiers: free buffers are miscounted"

    def _take_back(self) -> None:
        while self._returned:
            slab, i = self._returned.popleft()
            slab.free.append(i)
            self._free_bytes += slab.piece_bytes
            if len(slab.free) == slab.n_pieces and self._free_bytes > self._kept_bytes:
                self._slabs[slab.piece_bytes].remove(slab)
                self._free_bytes -= slab.n_pieces * slab.piece_bytes
