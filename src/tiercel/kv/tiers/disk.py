"""The disk tier: objects as files in one folder, which outlive the process. Knows no request.

Two kinds of threads do all that touches the disk; the owner's calls only move entries between queues. **Readers** look
keys up and load; the **writer** opens and scans the folder, stores, evicts, and removes. A store begins only while no
load is queued. Queues are bounded: what does not fit is REFUSED at once. A load of what is being loaded joins it, and
one of what is not written yet is answered from memory: writing gives way to the engine, and takes its time.

Loading never trusts: a file that is not whole, or not of this identity, is removed and its key is absent. Whatever goes
wrong with the disk while storing (full, read-only, gone) stops storing for `retry_s`; loads go on, and fail one by one
if they must. A full disk gets a little back each time, so that what is new finds room in place of what is old. If the
folder itself is gone, everything is a miss, and every `retry_s` it is looked for. One that was deleted is made again;
where the disk under it was taken away, nothing is made in its place, and it is used when it is back.

Any number of processes may share a folder: files appear whole, and one that another process removed is ABSENT. Each
looks for what others wrote when it is asked for an unknown key, and counts the folder anew after each eighth of its
capacity that it wrote; so n processes may together hold (1 + n / 8) times the capacity, for a while. Each identity has
a folder of its own; the capacity is that of all (`disk_neighbours`). Files are readable by their owner only; nothing
is encrypted.
"""

import errno
import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import perf_counter, thread_time

from tiercel.kv.tiers.disk_files import FileOps, ObjectFolder
from tiercel.kv.tiers.disk_index import Found, Hint, read_hints
from tiercel.kv.tiers.disk_neighbours import Neighbours
from tiercel.kv.tiers.disk_state import DiskLimits, DiskState, QueuedLoad, QueuedStore
from tiercel.kv.tiers.identity import TierIdentity
from tiercel.kv.tiers.interface import Clock, Outcome, Usage, Wake
from tiercel.kv.tiers.record import InvalidRecord, RecordHead

_log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTier(DiskState):
    """Meets `kv.tiers.interface.Tier`."""

    def __init__(
        self,
        identity: TierIdentity,
        path: Path,
        capacity_bytes: int,
        wake: Wake,
        clock: Clock,
        *,
        wall: Clock = time.time,
        limits: DiskLimits | None = None,
        ops: FileOps | None = None,
    ) -> None:
        """Start the threads, which make the folder if need be. `capacity_bytes` bounds all that is under `path`.

        `wall` is Unix time, by which objects expire, also over restarts.
        """
        super().__init__(identity, capacity_bytes, wake, clock, wall, limits or DiskLimits())
        ops = ops or FileOps()
        self._folder = ObjectFolder(path, self._format, ops, self._buffers)
        self._neighbours = Neighbours(self._folder.path, capacity_bytes, ops)
        self._hints: dict[bytes, Hint] = {}  # the writer's, from opening until the first scan
        self._hinted_ns = 0  # when they were written
        self._is_found = False  # what was found is told once
        self._claim: int | None = None  # the writer's
        self._threads = [Thread(target=self._write_loop, name="tiercel-kv-write", daemon=True)]
        self._threads += [
            Thread(target=self._read_loop, name=f"tiercel-kv-read-{i}", daemon=True)
            for i in range(self._limits.n_readers)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, but leave behind one that a disk does not let go."""
        with self._changed:
            self._is_closed = True
            for load in self._loads:
                self._finish_load(load, Outcome.CANCELLED, "closed")
            for store in self._stores:
                self._finish_store(store, Outcome.CANCELLED, "closed")
            self._loads.clear()
            self._stores.clear()
            self._queued_store_bytes = [0] * len(self._queued_store_bytes)
            self._tell_all()
        until_s = time.monotonic() + self._limits.close_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._changed:
            self._generation += 1
            self._cancel_all("closed")
        self._wake()

    # The threads. Each takes one thing under the lock, does it without, and notes under the lock how it ended.

    def _read_loop(self) -> None:
        while True:
            with self._changed:
                self._to_read.wait_for(lambda: self._is_closed or self._probes or self._loads)
                if self._is_closed:
                    return
                self._n_busy += 1
                generation = self._generation
                probe = self._probes.popleft() if self._probes else None
                loads = [] if probe is not None else self._next_loads()
            if probe is not None:
                self._probe(probe, generation)
            self._load(loads, generation)
            self._rest()

    def _rest(self) -> None:
        with self._changed:
            self._n_busy -= 1
            self._changed.notify_all()
            if self._stores and not self._loads:
                self._to_write.notify()
        self._wake()

    def _probe(self, key: bytes, generation: int) -> None:
        found, victims = None, None
        try:
            found = self._folder.head(key)
        except InvalidRecord as error:
            self._discard(key, str(error))
        except OSError as error:
            self._note_missing(error)
        with self._changed:
            if generation != self._generation:
                return
            self._probing.discard(key)
            if found is None:
                self._note_absent(key)
            elif key not in self._index and key not in self._storing:
                n_bytes = self._format.record_bytes(found.group_idx)
                victims = None if self._index.has_expired(key, found.ends_s) else self._index.make_room(n_bytes)
                if victims is None:
                    self._note_absent(key)  # too old, or written by somebody with more room than we may use
                else:
                    self._index.add(key, Found(n_bytes, found.depth, found.is_pinned, found.expires_s))
                    self._counters.n_evicted += len(victims)
        self._remove(victims or [])

    def _load(self, loads: list[QueuedLoad], generation: int) -> None:
        ends = [(load, *self._read(load)) for load in loads]
        with self._changed:
            if generation != self._generation:
                return
            for load, head, data, outcome, reason, time_s in ends:
                if head is not None and self._index.has_expired(load.key, head.ends_s):
                    data, outcome = None, Outcome.ABSENT
                elif data is None:
                    self._index.forget(load.key)
                    self._note_absent(load.key)
                    self._counters.n_load_failures += outcome is Outcome.FAILED
                else:
                    self._counters.n_loaded += 1
                    self._counters.read_bytes += len(data)
                    self._counters.read_s += time_s
                self._finish_load(load, outcome, reason, data)

    def _read(self, load: QueuedLoad) -> tuple[RecordHead | None, memoryview | None, Outcome, str, float]:
        """Read an object; return head and data (if it is DONE), outcome, reason, and how long it took."""
        start_s = perf_counter()
        try:
            head, data = self._folder.read(load.key, load.group_idx)
        except FileNotFoundError as error:
            self._note_missing(error)
            return None, None, Outcome.ABSENT, "", 0.0
        except InvalidRecord as error:
            self._discard(load.key, str(error))
            return None, None, Outcome.FAILED, str(error), 0.0
        except Exception as error:  # noqa: BLE001  a thread's boundary: a reader that ended would leave every load open
            reason = getattr(error, "strerror", None) or type(error).__name__
            return None, None, Outcome.FAILED, reason, 0.0
        return head, data, Outcome.DONE, "", perf_counter() - start_s

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._to_write.wait_for(self._has_writing)
                if self._is_closed:
                    break
                self._n_busy += 1
                must_clear, must_scan = self._must_clear, self._must_scan
                generation = self._generation
                store = None if must_clear or must_scan else self._stores.popleft()
                if store is not None:
                    self._queued_store_bytes[store.head.group_idx] -= len(store.data)
            if must_clear:
                self._clear()
            elif must_scan:
                self._scan(generation)
            elif store is not None:
                self._store(store, generation)
            self._rest()
        if self._must_clear:
            self._clear()
        self._save_hints()
        if self._claim is not None:
            os.close(self._claim)

    def _has_writing(self) -> bool:
        return self._is_closed or self._must_clear or self._must_scan or bool(self._stores and not self._loads)

    def _store(self, store: QueuedStore, generation: int) -> None:
        key, n_bytes = store.head.key, self._format.record_bytes(store.head.group_idx)
        if not self._is_open and (self._stores_again_s is None or self._clock() >= self._stores_again_s):
            self._scan(generation)
        with self._changed:
            if all(deadline_s <= self._clock() for _, deadline_s in store.waiters):
                return self._finish_store(store, Outcome.LATE)
            if self._stores_again_s is not None and self._clock() < self._stores_again_s:
                return self._finish_store(store, Outcome.REFUSED, "the disk failed before")
            short_bytes = self._index.used_bytes + n_bytes - self._index.capacity_bytes
        self._displace(short_bytes)
        with self._changed:
            victims = self._index.make_room(n_bytes, {key for key, _ in self._loading})
            if victims is None:
                return self._finish_store(store, Outcome.REFUSED, "what could make room is being loaded, or others'")
            self._counters.n_evicted += len(victims)
        self._remove(victims)
        start_s, start_cpu_s = perf_counter(), self._cpu_s()
        try:
            self._folder.write(store.head, store.data)
        except OSError as error:
            self._note_missing(error)
            with self._changed:
                self._degrade(error)
                self._counters.n_store_failures += 1
                self._note_absent(key)
                self._finish_store(store, Outcome.FAILED, error.strerror or type(error).__name__)
                victims = self._give_way(n_bytes) if error.errno in _FULL else []
            self._remove(victims)
            return None
        with self._changed:
            if generation == self._generation:
                self._stores_again_s = None
                self._absent.pop(key, None)
                found = Found(n_bytes, store.head.depth, store.head.is_pinned, store.head.expires_s)
                self._index.add(key, found, n_uses=store.n_uses, tick=store.tick)
                self._counters.n_stored += 1
                self._counters.written_bytes += n_bytes
                self._counters.write_s += perf_counter() - start_s
                self._counters.write_cpu_s += self._cpu_s() - start_cpu_s
                self._unscanned_bytes += n_bytes
                self._must_scan |= self._unscanned_bytes > self._capacity_bytes // 8
                self._finish_store(store, Outcome.DONE)
                victims = self._index.make_room(0, {key}) or []  # a reader may have found more meanwhile
                self._counters.n_evicted += len(victims)
            else:
                victims = [key]
        self._remove(victims)
        return None

    # Small steps of the threads.

    def _cpu_s(self) -> float:
        """Return how long a processor has worked for this thread, and for the writing that it waits for."""
        return thread_time() + self._folder.writer_cpu_s()

    def _remove(self, keys: Iterable[bytes]) -> None:
        """Remove files; what cannot be removed is found again by the next scan."""
        for key in keys:
            with suppress(OSError):
                self._folder.remove(key)

    def _discard(self, key: bytes, reason: str) -> None:
        """Remove a file that is not what its name says."""
        self._remove([key])
        with self._changed:
            self._counters.n_invalid += 1
            if self._counters.n_invalid == 1:
                _log.warning("KV disk tier: removed a file that cannot be trusted: %s; more are counted", reason)

    def _note_missing(self, error: OSError) -> None:
        """See whether the folder itself is gone when a file is."""
        if not isinstance(error, FileNotFoundError) or not self._is_open or self._folder.is_there():
            return
        with self._changed:
            if not self._is_gone:
                self._is_gone, self._is_open = True, False
                self._index.clear()
                self._absent.clear()
                self._degrade(error)

    def _degrade(self, error: OSError) -> None:
        """Stop storing for a while. The lock is held."""
        was_well = self._stores_again_s is None
        self._stores_again_s = self._clock() + self._limits.retry_s
        if was_well:
            self._counters.n_degraded += 1
            why = "its folder is gone" if self._is_gone else error.strerror or type(error).__name__
            _log.warning("KV disk tier: %s; stores nothing for %.0f s", why, self._limits.retry_s)

    def _give_way(self, n_bytes: int) -> list[bytes]:
        """Drop what is worth least, as the disk has less room than the tier may take. The lock is held."""
        loading = {key for key, _ in self._loading}
        unused_bytes = self._index.capacity_bytes - self._index.used_bytes
        victims = self._index.make_room(max(0, unused_bytes) + n_bytes, loading) or []
        self._counters.n_evicted += len(victims)
        return victims

    def _displace(self, short_bytes: int) -> None:
        """Take room from other models, if some must give way, and note what they leave."""
        if short_bytes > 0 and self._neighbours.used_bytes:
            n_removed, _ = self._neighbours.free(short_bytes + self._capacity_bytes // 64)
            with self._changed:
                self._counters.n_evicted += n_removed
        with self._changed:
            self._index.capacity_bytes = self._capacity_bytes - self._neighbours.used_bytes

    def _clear(self) -> None:
        """Remove every object's file."""
        try:
            self._remove([key for key, _, _ in self._folder.scan()])
        except OSError as error:
            self._note_missing(error)
        with self._changed:
            self._must_clear = False

    def _scan(self, generation: int) -> None:
        """Open the folder if that was not done, and count what is in it."""
        try:
            if not self._is_open:
                self._open()
                data, self._hinted_ns = self._folder.read_index()
                self._hints = read_hints(data, self._identity.name())
            found = self._examine_all(list(self._folder.scan()))
            self._neighbours.count()
        except OSError as error:
            self._note_missing(error)
            with self._changed:
                self._must_scan = False
                self._degrade(error)
            return
        if self._is_closed:
            return  # it may have ended early
        own_bytes = sum(it.n_bytes for it in found.values())
        self._displace(own_bytes + self._neighbours.used_bytes - self._capacity_bytes)
        with self._changed:
            self._must_scan = False
            self._unscanned_bytes = 0
            if not self._is_open:
                return  # it is gone again
            if self._is_gone:
                self._is_gone, self._stores_again_s = False, None
                _log.info("KV disk tier: its folder is there again, and used: %s", self._folder.path)
            if generation != self._generation:
                return
            whole = {key: it for key, it in found.items() if key not in self._storing}
            self._index.merge(whole, self._hints)
            self._hints = {}
            for key in whole:
                self._absent.pop(key, None)
            victims = self._index.drop_expired() + (self._index.make_room(0) or [])
            self._counters.n_evicted += len(victims)
            usage = Usage(len(self._index), self._index.used_bytes, self._capacity_bytes)
        self._remove(victims)
        if not self._is_found:
            self._is_found = True
            mib = 1 << 20
            _log.info(
                "KV disk tier: %d objects, %.0f of %.0f MiB, found in %s; %.0f MiB of other models beside",
                usage.n_objects, usage.used_bytes / mib, usage.capacity_bytes / mib, self._folder.path,
                self._neighbours.used_bytes / mib,
            )  # fmt: skip

    def _open(self) -> None:
        """Open the folder, for the first time or after it was gone. Raises OSError."""
        if not self._folder.may_be_opened():
            raise FileNotFoundError(errno.ENOENT, "the folder is gone")
        self._folder.open()
        if self._claim is not None:
            os.close(self._claim)  # of the folder that is gone
        self._claim = self._folder.claim()
        self._is_open = True

    def _examine_all(self, files: list[tuple[bytes, int, int]]) -> dict[bytes, Found]:
        """Return what the files that a scan found (key, length, time) say, without those that had to be removed."""
        with self._changed:
            found = {key: Found(n_bytes, 0) for key, n_bytes, _ in files if self._index.knows(key)}
        for key, n_bytes, written_ns in files:
            hint = self._hints.get(key)
            if key in found:
                continue  # what is known of it stays
            # A file that is younger was written by a process that was killed, and may be pinned since.
            if hint is not None and hint.n_bytes == n_bytes and written_ns <= self._hinted_ns:
                found[key] = Found(n_bytes, hint.depth, hint.is_pinned, hint.expires_s)
            else:
                # One by one: of 100,000 files that are not cached (12 s) threads save nothing, and cost if they are.
                it = self._examine(key, n_bytes)
                if it is not None:
                    found[key] = it
        return found

    def _examine(self, key: bytes, n_bytes: int) -> Found | None:
        """Return what a file's header says, or None when it was removed, or the tier is being closed."""
        if self._is_closed:
            return None
        try:
            head = self._folder.head(key)
            if n_bytes != self._format.record_bytes(head.group_idx):
                raise InvalidRecord(f"{n_bytes} bytes; needs {self._format.record_bytes(head.group_idx)}")
        except InvalidRecord as error:
            self._discard(key, str(error))
            return None
        except OSError:
            return None  # another process removed it meanwhile
        return Found(n_bytes, head.depth, head.is_pinned, head.expires_s)

    def _save_hints(self) -> None:
        with self._changed:
            is_worth_it = self._is_found and not self._is_gone
            data = self._index.dump(self._identity.name())
        if is_worth_it:
            with suppress(OSError):  # hints only: without them the next start scans
                self._folder.write_index(data)
