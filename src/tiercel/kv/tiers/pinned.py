"""Which keys requests asked to keep (`cache_hint`), so that what is stored of them says so. Knows no tier.

A tier hears of a pin with the object's bytes; of one that it holds already, by storing it once more, which costs a copy
of it. So a pin that is renewed is told anew only once half of it is over.
"""

from collections.abc import Iterable

from tiercel.kv.tiers.interface import Bytes, Clock, StoreItem

_N_REMEMBERED = 65_536  # keys: 8 MiB


class PinnedKeys:
    """Keys of pages, and until when. Owner: `kv.tiers.placed.Rig`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[bytes, float] = {}  # the longest untold first

    def pin(self, keys: Iterable[bytes], ttl_s: float) -> list[bytes]:
        """Keep keys for a while from now on; return those that the tiers are to hear of."""
        now_s = self._clock()
        told = [key for key in keys if self._until_s.get(key, now_s) - now_s < ttl_s / 2]
        for key in told:
            self._until_s.pop(key, None)
            self._until_s[key] = now_s + ttl_s
        while len(self._until_s) > _N_REMEMBERED:
            del self._until_s[next(iter(self._until_s))]
        return told

    def item(
        self, page_key: bytes, key: bytes, group_idx: int, depth: int, data: Bytes, *, n_uses: int = 0
    ) -> StoreItem:
        """Make an object to store under `key`, kept as long as `page_key` is; nobody changes `data` any more."""
        left_s = self._until_s.get(page_key, 0.0) - self._clock()
        if left_s <= 0:
            return StoreItem(key, group_idx, depth, data, is_lasting=True, n_uses=n_uses)
        return StoreItem(key, group_idx, depth, data, is_pinned=True, ttl_s=left_s, is_lasting=True, n_uses=n_uses)

    def clear(self) -> None:
        """Forget all."""
        self._until_s.clear()
