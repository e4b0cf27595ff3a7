"""The index of a tier: what is believed to be held, and what goes when room is needed. Knows no file.

First goes what has expired, then what is worth least, and what is pinned when nothing else is left. What has expired is
not found any more, and counts until it is dropped; a pin that has ended leaves an object as others.

Invariants, verified by `check`: `used_bytes` is the sum of the objects' lengths; no object was used after `tick`.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import ceil
from zlib import crc32

import msgspec

from tiercel.kv.tiers.interface import Clock
from tiercel.kv.tiers.policy import keep_score

_HALF_LIFE_MIN = 1024
_VERSION = 2
# When room is needed, so much of the capacity is freed: scoring all objects for each store would be quadratic.
_SLACK = 1 / 64


@dataclass(frozen=True, slots=True)
class Found:
    """What a file says of its object. `expires_s`, of a pinned one its pin's end, is Unix time, or None: never."""

    n_bytes: int
    depth: int
    is_pinned: bool = False
    expires_s: int | None = None

    @property
    def ends_s(self) -> int | None:
        """When nobody gets it any more; None: never."""
        return None if self.is_pinned else self.expires_s


@dataclass(slots=True)
class Known:
    """One object. `tick` is when it was last used."""

    n_bytes: int
    depth: int
    n_uses: int
    tick: int
    is_pinned: bool
    expires_s: int | None

    @property
    def ends_s(self) -> int | None:
        """When nobody gets it any more; None: never."""
        return None if self.is_pinned else self.expires_s


class Hint(msgspec.Struct, array_like=True, frozen=True):
    """What is remembered of an object over a restart."""

    key: bytes
    n_bytes: int
    depth: int
    n_uses: int
    age: int
    is_pinned: bool
    expires_s: int | None


class DiskIndex:
    """Objects by key, with the uses that decide who stays. Owner: the tier, under its lock."""

    def __init__(self, capacity_bytes: int, wall: Clock = time.time) -> None:
        """Know nothing. `wall` gives Unix time, by which objects expire."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._wall = wall
        self._known: dict[bytes, Known] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        known = self._known.get(key)
        return known is not None and not self._is_past(known.ends_s)

    def knows(self, key: bytes) -> bool:
        """Say whether an object is counted, expired or not."""
        return key in self._known

    def has_expired(self, key: bytes, ends_s: int | None) -> bool:
        """Say whether an object is too old, by what is known of it, or else by what its file says."""
        known = self._known.get(key)
        return self._is_past(ends_s if known is None else known.ends_s)

    def expiry(self, ttl_s: float | None) -> int | None:
        """Return when an object, or its pin, ends that is stored now: a whole second of Unix time, not too early."""
        return None if ttl_s is None else max(1, ceil(self._wall() + ttl_s))

    def advance(self) -> int:
        """Let time pass by one use; return the time."""
        self._tick += 1
        return self._tick

    def add(self, key: bytes, found: Found, *, n_uses: int = 0, tick: int | None = None) -> None:
        """Note an object, last used at `tick` (or now), in place of what was known of its key."""
        self.forget(key)
        when = self._tick if tick is None else tick
        self._known[key] = Known(found.n_bytes, found.depth, n_uses, when, found.is_pinned, found.expires_s)
        self.used_bytes += found.n_bytes

    def renew(self, key: bytes, *, is_pinned: bool, expires_s: int | None) -> None:
        """Note that a known object was stored once more: a pin counts before none, and of two ends the later one."""
        known = self._known[key]
        if is_pinned is known.is_pinned:
            ends = known.expires_s, expires_s
            known.expires_s = None if None in ends else max(known.expires_s or 0, expires_s or 0)
        elif is_pinned:
            known.is_pinned, known.expires_s = True, expires_s

    def forget(self, key: bytes) -> None:
        """Drop an object, if it is known."""
        known = self._known.pop(key, None)
        if known is not None:
            self.used_bytes -= known.n_bytes

    def use(self, keys: Iterable[bytes]) -> None:
        """Note that a chain was used: all of it at the same time, so that its head never looks older than its tail."""
        self.advance()
        for key in keys:
            known = self._known.get(key)
            if known is not None:
                known.n_uses += 1
                known.tick = self._tick

    def merge(self, found: dict[bytes, Found], hints: dict[bytes, Hint]) -> None:
        """Take what a scan found for the truth; hints and what was known tell uses, pins and ends."""
        before = self._known
        self._known, self.used_bytes = {}, 0
        for key, it in found.items():
            known, hint = before.get(key), hints.get(key)
            if known is not None:
                self._known[key] = replace(known, n_bytes=it.n_bytes)
                self.used_bytes += it.n_bytes
            elif hint is not None:
                self.add(key, it, n_uses=hint.n_uses, tick=self._tick - hint.age)
            else:
                self.add(key, it)

    def drop_expired(self) -> list[bytes]:
        """Drop the objects that have expired; return their keys."""
        ended = [key for key, known in self._known.items() if self._is_past(known.ends_s)]
        for key in ended:
            self.forget(key)
        return ended

    def clear(self) -> None:
        """Drop all."""
        self._known.clear()
        self.used_bytes = 0

    def make_room(self, n_bytes: int, keep: Collection[bytes] = ()) -> list[bytes] | None:
        """Drop the objects that are worth least until `n_bytes` more fit; return their keys.

        None, and no change, when that is impossible without dropping one of `keep`. A little more than needed is freed.
        """
        excess = self.used_bytes + n_bytes - self.capacity_bytes
        if excess <= 0:
            return []
        kept_bytes = sum(self._known[key].n_bytes for key in keep if key in self._known)
        if kept_bytes + n_bytes > self.capacity_bytes:
            return None
        excess += int(self.capacity_bytes * _SLACK)
        half_life = max(_HALF_LIFE_MIN, len(self._known))
        candidates = [key for key in self._known if key not in keep]
        n_most = min(len(candidates), 1 + excess // max(1, min(k.n_bytes for k in self._known.values())))
        victims = []
        for key in nsmallest(n_most, candidates, key=lambda key: self._score(key, half_life)):
            if excess <= 0:
                break
            excess -= self._known[key].n_bytes
            self.forget(key)
            victims.append(key)
        return victims

    def dump(self, identity_name: str) -> bytes:
        """Return hints for the next start of a tier of that identity."""
        hints = [
            Hint(key, k.n_bytes, k.depth, k.n_uses, self._tick - k.tick, k.is_pinned, k.expires_s)
            for key, k in self._known.items()
        ]
        data = msgspec.msgpack.encode((_VERSION, identity_name, hints))
        return crc32(data).to_bytes(4, "little") + data

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self.used_bytes == sum(k.n_bytes for k in self._known.values()), "kv.tiers: the index is miscounted"
        assert all(k.tick <= self._tick for k in self._known.values()), "kv.tiers: an object used in the future"

    def _is_past(self, unix_s: int | None) -> bool:
        return unix_s is not None and unix_s <= self._wall()

    def _score(self, key: bytes, half_life: int) -> tuple[bool, float]:
        known = self._known[key]
        if self._is_past(known.ends_s):
            return False, -1.0
        is_kept = known.is_pinned and not self._is_past(known.expires_s)
        return is_kept, keep_score(known.n_uses, self._tick - known.tick, known.depth, half_life)


def read_hints(data: bytes | None, identity_name: str) -> dict[bytes, Hint]:
    """Return the hints that `dump` wrote, or none when they are missing, damaged, another version's or identity's."""
    if data is None or len(data) < 4 or crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        return {}
    try:
        version, name, hints = msgspec.msgpack.decode(data[4:], type=tuple[int, str, list[Hint]])
    except msgspec.DecodeError:
        return {}
    return {hint.key: hint for hint in hints} if (version, name) == (_VERSION, identity_name) else {}
