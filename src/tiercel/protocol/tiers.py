"""What a request may say about the tiers of the KV cache, under vLLM's names where it has them. Knows no tier."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tiercel.base.errors import RequestError

_MEDIA = ("cpu", "storage")
_LOCALITIES = ("local", "remote")
# A day: who wants to keep a prompt for longer sends it again.
TTL_MAX_S = 86_400.0


class TierKindName(msgspec.Struct, frozen=True):
    """Which tiers are meant: those of a medium, a locality, or both; None is any."""

    medium: str | None = None
    locality: str | None = None


class KvTransferParams(msgspec.Struct, frozen=True):
    """What is loaded for a request and what is stored of it.

    kv_load_tiers: the kinds of tiers below the page pool that it may load from; () for none; None: all. Medium is "cpu"
    or "storage", locality "local" or "remote", in any case. max_offload_tokens: tokens of its beginning that may be
    stored; None: all.
    """

    kv_load_tiers: tuple[TierKindName, ...] | None = None
    max_offload_tokens: int | None = None


class CacheHint(msgspec.Struct, frozen=True):
    """What a request says of the worth of its prompt.

    pin: its pages are stored at first sight, however short it is, and stay in the page pool for `ttl_s` seconds after
    it began, unless running sequences need the room. For as long, tiers give up all that is not pinned before them;
    then they are as others. ttl_s: needs pin; None: 300 seconds. What outlives the process: an object on disk, and the
    pin that it was first stored with. A later pin of it is on disk once the engine was closed; a kill loses that.
    """

    pin: bool = False
    ttl_s: float | None = None


def as_transfer(got: object) -> KvTransferParams:
    """Read `kv_transfer_params`.

    Raises: RequestError: a key is unknown, or a value is none that it takes.
    """
    name = "kv_transfer_params"
    if isinstance(got, KvTransferParams):
        return got
    fields = _fields(name, got, KvTransferParams.__struct_fields__)
    tiers, most = fields.get("kv_load_tiers"), fields.get("max_offload_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        raise _refused(f"{name}.max_offload_tokens", most, "a number of tokens, 0 and up")
    if tiers is not None and not isinstance(tiers, list | tuple):
        raise _refused(f"{name}.kv_load_tiers", tiers, 'a list such as [{"medium": "storage", "locality": "local"}]')
    kinds = None if tiers is None else tuple(_kind(f"{name}.kv_load_tiers[{i}]", one) for i, one in enumerate(tiers))
    return KvTransferParams(kinds, most)


def as_hint(got: object) -> CacheHint:
    """Read `cache_hint`.

    Raises: RequestError: a key is unknown, or a value is none that it takes.
    """
    if isinstance(got, CacheHint):
        return got
    fields = _fields("cache_hint", got, CacheHint.__struct_fields__)
    pin, ttl_s = fields.get("pin", False), fields.get("ttl_s")
    if not isinstance(pin, bool):
        raise _refused("cache_hint.pin", pin, "true or false")
    if ttl_s is None:
        return CacheHint(pin)
    if not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or not 0 < ttl_s <= TTL_MAX_S:
        raise _refused("cache_hint.ttl_s", ttl_s, f"seconds above 0, up to {TTL_MAX_S:.0f}")
    if not pin:
        raise _refused("cache_hint.ttl_s", ttl_s, "pin true with it, as it says how long a pin lasts")
    return CacheHint(pin, float(ttl_s))


def _kind(where: str, got: object) -> TierKindName:
    if isinstance(got, TierKindName):
        return got
    fields = _fields(where, got, TierKindName.__struct_fields__)
    found: dict[str, str | None] = {}
    for name, known in (("medium", _MEDIA), ("locality", _LOCALITIES)):
        value = fields.get(name)
        if value is not None and (not isinstance(value, str) or value.lower() not in known):
            raise _refused(f"{where}.{name}", value, f"one of {', '.join(known)}")
        found[name] = None if value is None else str(value).lower()
    return TierKindName(**found)


def _fields(where: str, got: object, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(got, Mapping):
        raise _refused(where, got, f"an object with {', '.join(known)}")
    for key in got:
        if key not in known:
            raise _refused(where, key, f"keys of {', '.join(known)}")
    return got


def _refused(where: str, got: object, needed: str) -> RequestError:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return RequestError(f"{where}: got {shown}; needs {needed}", param=where.split(".")[0].split("[")[0])
