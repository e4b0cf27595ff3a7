"""The commands that a Valkey tier sends: objects, one index, one sum. Knows no job and no queue.

    {NS}:IDENTITY:GROUP:CHARGE:KEY   one object. CHARGE is what it counts for, so that whoever evicts it can tell
    {NS}:index                       a sorted set of those names; the lowest score goes first
    {NS}:used                        the sum of their charges

`NS` in braces is a hash tag: all of it lies in one slot. Index, sum and objects change together, in scripts that the
server runs whole; so any number of engines may share them, and a server that is emptied is empty and not confused.
A score is the server's time of the last use less a millisecond for each page before the object in its chain: of one
chain the tail goes first. A pin is a use at the time when it ends: until then all that is not pinned goes before it.
Requires: the server's own eviction takes no key without an expiry (`maxmemory-policy` `noeviction` or one of
`volatile-*`), else the sum may be lost, and with it the bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from valkey import Valkey
from valkey.backoff import NoBackoff
from valkey.retry import Retry

from tiercel.kv.tiers.interface import StoreItem
from tiercel_tier_valkey.options import ValkeyOptions

# An object's name is kept twice; the rest is what the server was seen to take for an entry of its table and the index.
_ENTRY_BYTES = 160

_PIN_S = 10**10  # what a pin without an end adds to a score: more than any time

# Where nothing is given up, SET is the first to write: a server without memory refuses a script's first write only.
_STORE = """
local used = tonumber(redis.call('GET', KEYS[2]) or '0')
local capacity, charge = tonumber(ARGV[1]), tonumber(ARGV[2])
local now = redis.call('TIME')
local score = now[1] + now[2] / 1e6 - tonumber(ARGV[3]) / 1000
local n_evicted = 0
if redis.call('EXISTS', KEYS[3]) == 0 then
    if redis.call('ZSCORE', KEYS[1], KEYS[3]) then used = used - charge end
    while used + charge > capacity do
        local first = redis.call('ZPOPMIN', KEYS[1])
        if not first[1] then used = 0 break end
        if first[1] ~= KEYS[3] then
            redis.call('UNLINK', first[1])
            used = used - tonumber(string.match(first[1], ':(%d+):%x+$'))
            n_evicted = n_evicted + 1
        end
    end
    if ARGV[6] == '0' then redis.call('SET', KEYS[3], ARGV[4])
    else redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[6]) end
    used = used + charge
elseif ARGV[6] == '0' then redis.call('PERSIST', KEYS[3])
else
    local left = redis.call('PTTL', KEYS[3])
    if left >= 0 and left < tonumber(ARGV[6]) then redis.call('PEXPIRE', KEYS[3], ARGV[6]) end
end
redis.call('ZADD', KEYS[1], 'GT', score + tonumber(ARGV[5]), KEYS[3])
redis.call('SET', KEYS[2], used)
return {redis.call('ZCARD', KEYS[1]), used, n_evicted}
"""

_TOUCH = """
local now = redis.call('TIME')
for i = 1, #ARGV, 2 do
    redis.call('ZADD', KEYS[1], 'XX', 'GT', now[1] + now[2] / 1e6 - tonumber(ARGV[i]) / 1000, ARGV[i + 1])
end
"""

_REMOVE = """
local used = tonumber(redis.call('GET', KEYS[2]) or '0')
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 then
    used = used - tonumber(string.match(ARGV[1], ':(%d+):%x+$'))
end
redis.call('UNLINK', ARGV[1])
redis.call('SET', KEYS[2], used)
"""


@dataclass(frozen=True, slots=True)
class Held:
    """What a namespace holds, as the server last told."""

    n_objects: int = 0
    used_bytes: int = 0
    n_evicted: int = 0


class ValkeyServer:
    """One identity's view of a server. Any thread may call; each call is one round trip. Raises `ValkeyError`."""

    def __init__(self, options: ValkeyOptions, identity_name: str, object_bytes: Sequence[int]) -> None:
        """Connect to nothing yet. `object_bytes` are the lengths of the groups' objects."""
        # Any: the client's types know text only, and these are bytes and numbers.
        self._client: Any = Valkey.from_url(
            options.url,
            socket_connect_timeout=options.connect_timeout_s,
            socket_timeout=options.timeout_s,
            retry=Retry(NoBackoff(), 0),  # the tier counts faults; a retry here would double each deadline
            max_connections=options.n_threads,
        )
        namespace = f"{{{options.namespace}}}:"
        self._index, self._used = f"{namespace}index", f"{namespace}used"
        self._mine = f"{namespace}{identity_name}:"
        name_bytes = len(self._mine) + 84
        self._charges = [n + 2 * name_bytes + _ENTRY_BYTES for n in object_bytes]

    def charge(self, group_idx: int) -> int:
        """Return what an object of the group counts for."""
        return self._charges[group_idx]

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return each key's group, or None where no group has it."""
        groups = range(len(self._charges))
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                for group_idx in groups:
                    pipe.exists(self._name(key, group_idx))
            there = pipe.execute()
        rows = [there[i * len(groups) : (i + 1) * len(groups)] for i in range(len(keys))]
        return [next((group_idx for group_idx in groups if row[group_idx]), None) for row in rows]

    def load(self, items: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
        """Return the objects (key and group each), None where there is none."""
        found: list[bytes | None] = self._client.mget([self._name(key, group_idx) for key, group_idx in items])
        return found

    def store(self, items: Sequence[StoreItem], capacity_bytes: int) -> Held:
        """Store objects, giving up others for them."""
        with self._client.pipeline(transaction=False) as pipe:
            for item in items:
                name, charge = self._name(item.key, item.group_idx), self._charges[item.group_idx]
                ttl_s = 0.0 if item.ttl_s is None else max(0.001, item.ttl_s)
                pin_s = (ttl_s or _PIN_S) if item.is_pinned else 0
                ttl_ms = 0 if item.is_pinned else ceil(ttl_s * 1000)
                words = (capacity_bytes, charge, item.depth, item.data, pin_s, ttl_ms)
                pipe.eval(_STORE, 3, self._index, self._used, name, *words)
            told = pipe.execute()
        return Held(told[-1][0], told[-1][1], sum(one[2] for one in told))

    def touch(self, items: Sequence[tuple[int, bytes, int]]) -> None:
        """Note that objects (depth, key, group each) were used."""
        words = [word for depth, key, group_idx in items for word in (depth, self._name(key, group_idx))]
        self._client.eval(_TOUCH, 1, self._index, *words)

    def clear(self) -> Held:
        """Remove every object of this identity."""
        for name, _ in self._client.zscan_iter(self._index, match=f"{self._mine}*", count=1000):
            self._client.eval(_REMOVE, 2, self._index, self._used, name)
        return self.held()

    def held(self) -> Held:
        """Ask what the namespace holds."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.zcard(self._index)
            pipe.get(self._used)
            n_objects, used = pipe.execute()
        return Held(n_objects, int(used or 0))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _name(self, key: bytes, group_idx: int) -> str:
        return f"{self._mine}{group_idx}:{self._charges[group_idx]}:{key.hex()}"
