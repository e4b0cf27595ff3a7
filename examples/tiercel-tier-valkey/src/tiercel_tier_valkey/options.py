"""What an entry of `kv_tiers` may say of a Valkey tier, beside what it may say of any tier."""

import re
from dataclasses import dataclass, field

from valkey.connection import parse_url

from tiercel.base.units import parse_bytes
from tiercel.kv.tiers.registry import tier_option

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class ValkeyOptions:
    """The options. Times are seconds.

    `url`: valkey://, redis://, their forms with TLS (valkeys://, rediss://), or unix://; a password in it is not shown.
    `namespace`: tiers with the same one, in the same server, share objects and one bound: that of who stores.
    `batch_objects`, `batch_size`: what goes to the server, or comes from it, in one round trip.
    `queue_size`: bytes that wait to be stored; a queue that is not full takes one more object, whatever its length.
    `n_faults`: so many round trips in a row that fail, and the server is left alone for `retry_s`.
    """

    url: str = field(repr=False)
    namespace: str = "tiercel"
    n_threads: int = 2
    batch_objects: int = 64
    batch_size: int = tier_option(parse=parse_bytes, default=8 << 20)
    queue_size: int = tier_option(parse=parse_bytes, default=64 << 20)
    connect_timeout_s: float = 1.0
    timeout_s: float = 5.0
    n_faults: int = 3
    retry_s: float = 5.0

    def __post_init__(self) -> None:
        try:
            parse_url(self.url)
        except ValueError as error:
            raise ValueError(f"url: {error}") from None
        if not _NAME.fullmatch(self.namespace):
            raise ValueError(f"namespace: got {self.namespace!r}; need 1 to 64 letters, digits, '.', '_' or '-'")
        for name in ("n_threads", "batch_objects", "batch_size", "queue_size", "n_faults"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; need at least 1")
        for name in ("connect_timeout_s", "timeout_s", "retry_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ValueError(f"{name}: got {getattr(self, name)}; need more than 0 and less than an hour")
