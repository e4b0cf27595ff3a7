"""The bytes behind a token's text, for the two decoders that are byte for byte: byte-level and SentencePiece.

With them text can be made token by token: concatenate, decode UTF-8. Other decoders give None and need the whole.

We differ from the library in two cases, both so that a stream equals the whole: an invalid run of `<0xNN>` tokens is
decoded like any other invalid UTF-8 (the library gives one U+FFFD for every byte of the run, valid ones too), and an
added token's text is its own even when its letters are in the byte-level alphabet.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final

import msgspec

_SPACE: Final = "\u2581"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteDecoding(msgspec.Struct, frozen=True):
    """How tokens become bytes."""

    bytes_of: Callable[[str], bytes]
    """The bytes of a token that is not an added one."""
    bytes_of_added: Callable[[str], bytes]
    strips_first_space: bool
    """A text that begins with a space loses it: encoding had put it there."""


def byte_decoding(decoder: Mapping[str, Any] | None) -> ByteDecoding | None:
    """Tell how the library's decoder, given as JSON, maps tokens to bytes; None when it is not byte for byte."""
    steps = _steps(decoder)
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return ByteDecoding(_from_byte_level, str.encode, strips_first_space=False)
    if names[:1] == ["Replace"] and _replaces_mark(steps[0]):
        rest = [name for name in names[1:] if name != "Fuse"]
        has_bytes = rest[:1] == ["ByteFallback"]
        ending = steps[-1] if rest[has_bytes:] == ["Strip"] and names[-1] == "Strip" else None
        strips = ending is not None and (ending.get("content"), ending.get("start"), ending.get("stop")) == (" ", 1, 0)
        # Strip works on each piece it is given: only after Fuse is that the whole text.
        if (strips and "Fuse" in names) or not rest[has_bytes:]:
            bytes_of = partial(_from_pieces, has_bytes=has_bytes)
            return ByteDecoding(bytes_of, bytes_of, strips_first_space=strips)
    return None


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else [decoder]


def _replaces_mark(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE} and step.get("content") == " "


@cache
def _alphabet() -> Mapping[str, int]:
    """Byte of each letter of the byte-level alphabet: bytes that print stand for themselves, the rest from 256 up."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(b): b for b in printed} | {chr(256 + i): b for i, b in enumerate(others)}


def _from_byte_level(token: str) -> bytes:
    alphabet = _alphabet()
    try:
        return bytes([alphabet[letter] for letter in token])
    except KeyError:
        return token.encode()


def _from_pieces(token: str, *, has_bytes: bool) -> bytes:
    if has_bytes and (match := _BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()
