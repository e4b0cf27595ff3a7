"""The bytes of one stored object: a header that says whose they are, and the object. Knows no file and no tier.

`docs/formats/kv_disk.md` is the format, field by field. A record is believed only whole: its length, its header's
checksum, its identity, its key and its body's checksum are what they must be, or there is no object.
"""

import json
import struct
from dataclasses import asdict, dataclass
from zlib import crc32

from tiercel._native import crc32 as body_crc32  # zlib's value, several times as fast
from tiercel.kv.tiers.identity import ObjectGroup, TierIdentity, identity_name
from tiercel.kv.tiers.interface import Bytes

MAGIC = b"TIERCLKV"
VERSION = 2
# magic, version, header_bytes, key, model, weights, layout, group_idx, flags, text_bytes, expires_s, body_bytes, depth,
# the body's crc
_FIXED = struct.Struct("<8sII32s32s32s32sHHIQQII")
_CRC = struct.Struct("<I")
_ALIGN = 64
HEADER_BYTES_MAX = 4096
_PINNED = 1  # the one flag


class InvalidRecord(ValueError):
    """These bytes are not the object that was asked for; the message says which check failed."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a header says of its object. `expires_s`, of a pinned one its pin's end, is Unix time, or None: never."""

    key: bytes
    group_idx: int
    depth: int
    is_pinned: bool = False
    expires_s: int | None = None

    @property
    def ends_s(self) -> int | None:
        """When nobody gets it any more; None: never."""
        return None if self.is_pinned else self.expires_s


class RecordFormat:
    """Writes and reads the records of one identity."""

    def __init__(self, identity: TierIdentity) -> None:
        self.identity = identity
        self._digests = identity.digests()
        self._texts = [_describe(group) for group in identity.groups]
        longest = max(len(text) for text in self._texts)
        # One length for all groups, so that a record's place in its body does not depend on the group.
        self.header_bytes = -(-(_FIXED.size + longest + _CRC.size) // _ALIGN) * _ALIGN

    def record_bytes(self, group_idx: int) -> int:
        """Return the length of a record of the group."""
        return self.header_bytes + self.identity.groups[group_idx].object_bytes

    def header(self, head: RecordHead, body: Bytes) -> bytes:
        """Make the header that stands before `body`. Requires: the body has its group's length."""
        text = self._texts[head.group_idx]
        n_body = len(memoryview(body).cast("B"))
        fixed = _FIXED.pack(
            MAGIC, VERSION, self.header_bytes, head.key, *self._digests, head.group_idx, _PINNED * head.is_pinned,
            len(text), head.expires_s or 0, n_body, head.depth, body_crc32(body, crc32(head.key)),
        )  # fmt: skip
        front = (fixed + text).ljust(self.header_bytes - _CRC.size, b"\0")
        return front + _CRC.pack(crc32(front))

    def read_header(self, header: Bytes) -> RecordHead:
        """Return what a record that begins with `header` says of its object.

        Raises:
            InvalidRecord: it is damaged, of another version, or of another identity.
        """
        if len(header) < self.header_bytes:
            raise InvalidRecord(f"{len(header)} bytes, a header has {self.header_bytes}")
        front = bytes(header[: self.header_bytes])
        fields = _FIXED.unpack_from(front)
        magic, version, n_header, key, *digests, group_idx, flags, n_text, expires_s, n_body, depth, _ = fields
        if magic != MAGIC or version != VERSION:
            raise InvalidRecord(f"magic {magic!r}, version {version}; needs {MAGIC!r}, {VERSION}")
        if n_header != self.header_bytes or _CRC.unpack(front[-_CRC.size :])[0] != crc32(front[: -_CRC.size]):
            raise InvalidRecord("the header's checksum is wrong")
        for name, got, ours in zip(("model", "weights", "layout"), digests, self._digests, strict=True):
            if got != ours:
                raise InvalidRecord(f"made for another {name}")
        if group_idx >= len(self._texts) or front[_FIXED.size : _FIXED.size + n_text] != self._texts[group_idx]:
            raise InvalidRecord(f"group {group_idx} means something else")
        if flags & ~_PINNED or n_body != self.identity.groups[group_idx].object_bytes:
            raise InvalidRecord(f"a body of {n_body} bytes, flags {flags}")
        return RecordHead(key, group_idx, depth, bool(flags & _PINNED), expires_s or None)

    def open(self, record: Bytes, key: bytes, group_idx: int) -> memoryview:
        """Return the body of a whole record, which must be that object; it shares the record's memory.

        Raises:
            InvalidRecord: it is not, or a byte of it changed.
        """
        found = self.read_header(record)
        if (found.key, found.group_idx) != (key, group_idx):
            raise InvalidRecord("another object's record")
        if len(record) != self.record_bytes(group_idx):
            raise InvalidRecord(f"{len(record)} bytes; needs {self.record_bytes(group_idx)}")
        body = memoryview(record)[self.header_bytes :]
        if body_crc32(body, crc32(key)) != _FIXED.unpack_from(record)[-1]:
            raise InvalidRecord("the body's checksum is wrong")
        return body


def read_foreign(record: Bytes) -> tuple[RecordHead, str, str]:
    """Read a whole record of whatever identity; return its head, its identity's name, and its group's dtype.

    Raises:
        InvalidRecord: it is damaged, or of another version.
    """
    front = bytes(record[:HEADER_BYTES_MAX])
    if len(front) < _FIXED.size:
        raise InvalidRecord(f"{len(front)} bytes are no header")
    magic, version, n_header, key, *digests, group_idx, flags, n_text, expires_s, n_body, depth, crc = (
        _FIXED.unpack_from(front)
    )
    if magic != MAGIC or version != VERSION:
        raise InvalidRecord(f"magic {magic!r}, version {version}; needs {MAGIC!r}, {VERSION}")
    is_long_enough = _FIXED.size + n_text + _CRC.size <= n_header <= len(front)
    if not is_long_enough or _CRC.unpack_from(front, n_header - _CRC.size)[0] != crc32(front[: n_header - _CRC.size]):
        raise InvalidRecord("the header's checksum is wrong")
    if len(record) != n_header + n_body:
        raise InvalidRecord(f"{len(record)} bytes; needs {n_header + n_body}")
    if body_crc32(memoryview(record)[n_header:], crc32(key)) != crc:
        raise InvalidRecord("the body's checksum is wrong")
    group = json.loads(front[_FIXED.size : _FIXED.size + n_text])
    head = RecordHead(key, group_idx, depth, bool(flags & _PINNED), expires_s or None)
    return head, identity_name(digests), f"{group['name']} {group['dtype']}"


def peek_depth(front: Bytes) -> int:
    """Return the depth that a record's first bytes tell, unverified; 0 where they are none."""
    return _FIXED.unpack_from(front)[-2] if len(front) >= _FIXED.size and front[:8] == MAGIC else 0


def _describe(group: ObjectGroup) -> bytes:
    text = json.dumps(asdict(group), sort_keys=True, separators=(",", ":")).encode()
    if _FIXED.size + len(text) + _CRC.size > HEADER_BYTES_MAX:
        raise ValueError(f"kv.tiers: group {group.name!r} takes {len(text)} bytes to describe; shorten its words")
    return text
