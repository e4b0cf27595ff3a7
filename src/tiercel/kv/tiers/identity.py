"""What a tier's objects are: the identity that a tier is made for, and that every stored object carries.

An object is one page of keys and values, or one snapshot of a recurrent state. Objects of one model come in groups
(full attention, a window, a state), each with its own layout and length. Bytes are canonical: the order of `layout`
over the *whole* model, so that they do not depend on how a model is split over ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256

from tiercel.base.errors import ConfigError

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ObjectGroup:
    """What the bytes of one group's objects mean.

    `layout` names the axes from the slowest to the fastest and `counts` gives their lengths, e.g.
    ("layer", "kv", "token", "head", "dim") with (30, 2, 16, 3, 64). `scales` says where a quantized type's scales are:
    "none", or words such as "float16 per token and head, after the values"; they are part of the object's bytes.
    """

    name: str
    dtype: str
    scales: str
    layout: tuple[str, ...]
    counts: tuple[int, ...]
    object_bytes: int

    def __post_init__(self) -> None:
        if self.object_bytes < 1 or len(self.layout) != len(self.counts) or min(self.counts, default=1) < 1:
            raise ConfigError(
                f"kv.tiers: group {self.name!r} has axes {self.layout}, counts {self.counts}, "
                f"{self.object_bytes} bytes; it needs one count of at least 1 an axis and at least one byte"
            )


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """All that decides whether bytes made elsewhere, or before a restart, are ours to read.

    `model_digest` names the architecture and its config, `weights_digest` the numbers, every byte of them, and what
    is done with them. A key's own chain (`kv.page_keys`) holds tokens, salt and adapter. `about` is for people (the
    model's name, as `tiercel cache stat` shows it) and decides nothing.
    """

    model_digest: str
    weights_digest: str
    page_size_tokens: int
    groups: tuple[ObjectGroup, ...]
    about: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names) or len(names) > 255:
            raise ConfigError(f"kv.tiers: groups {names}; needs 1 to 255 groups of different names")

    def digests(self) -> tuple[bytes, bytes, bytes]:
        """Return the SHA-256 of the model's name, of the weights', and of the layout of all groups."""
        layout = _hashed(
            str(self.page_size_tokens),
            *(
                part
                for group in self.groups
                for part in (
                    group.name,
                    group.dtype,
                    group.scales,
                    "\0".join(group.layout),
                    ",".join(map(str, group.counts)),
                    str(group.object_bytes),
                )
            ),
        )
        return _hashed(self.model_digest), _hashed(self.weights_digest), layout

    def name(self) -> str:
        """Return 32 hexadecimal digits that no other identity has."""
        return identity_name(self.digests())

    def longer_by(self, n_bytes: int) -> "TierIdentity":
        """Return this identity with every object `n_bytes` longer: what a tier sees of objects that are sealed."""
        return replace(self, groups=tuple(replace(g, object_bytes=g.object_bytes + n_bytes) for g in self.groups))


def identity_name(digests: Iterable[bytes]) -> str:
    """Return the name of the identity of which `TierIdentity.digests` are these."""
    return sha256(b"".join(digests)).hexdigest()[:32]


def object_key(page_key: bytes, group_name: str | None) -> bytes:
    """Return the key of a group's object at the place that `page_key` names.

    The first group, `None`, keeps the page's own key; others get a digest of key and group, so that a snapshot and a
    page after the same tokens cannot be taken for each other.
    """
    return page_key if group_name is None else sha256(page_key + group_name.encode()).digest()


def _hashed(*parts: str) -> bytes:
    digest = sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))  # so that no two lists of parts read the same
        digest.update(data)
    return digest.digest()
