"""What a request may say about the tiers of the KV cache, under vLLM's names where it has them. Knows no tier."""

import msgspec


class CacheHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request says of the worth of its prompt's pages.

    `pin`: they are stored at first sight, however short the prompt, and stay in the page pool for `ttl_s` seconds
    unless running sequences need the room. `ttl_s` None: as long as the engine keeps pins.
    """

    pin: bool = False
    ttl_s: float | None = None


class TierWishes(msgspec.Struct, frozen=True):
    """A request's say in what is loaded and stored.

    `load_kinds`: (medium, locality) of the tiers it may load from, None in a place for any; () for none at all; None:
    any tier. `n_store_tokens`: tokens of its beginning that may be stored; None: all.
    """

    load_kinds: tuple[tuple[str | None, str | None], ...] | None = None
    n_store_tokens: int | None = None
    hint: CacheHint | None = None
