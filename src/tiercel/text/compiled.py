"""A cache of built tokenizers: one file for each digest of what they were built from.

Deriving the merges of a SentencePiece vocabulary of 262,144 tokens takes longer than everything else about it, and
the library reads its own JSON more slowly than it takes a vocabulary from memory. The compiled form holds a BPE
vocabulary as a list and its merges as pairs of ids. A file that is not exactly what was written is built again.
"""

import contextlib
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from tiercel import __version__
from tiercel.base.errors import ConfigError, ModelFileError
from tiercel.text.backend import Traits, collector_paused, library_errors
from tiercel.text.tokenizer import Tokenizer

_DIGEST: Final = re.compile(r"[0-9a-f]{32,128}")


class _Compiled(msgspec.Struct):
    source: str
    """Digest of what the tokenizer was built from: a renamed file is not taken for another's."""
    extras: dict[str, Any]
    pipeline: str
    """The `tokenizer.json`, its vocabulary and added tokens taken out if they are below."""
    tokens: list[str] | None = None
    merges: bytes = b""
    added: list[dict[str, Any]] = []


def cached(build: Callable[[], Tokenizer | None], cache_dir: Path, digest: str) -> Tokenizer | None:
    """Load the tokenizer compiled from the source of this digest, or build it and store it, if there is one.

    The cache only saves time: one that cannot be written is done without.

    Raises:
        ConfigError: `digest` is not a hexadecimal digest, which it must be to name a file.
    """
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(f"text.compiled: digest {digest[:40]!r}; 32 to 128 hexadecimal digits are needed; use sha256")
    path = cache_dir / f"{digest}.tokenizer"
    try:
        return _unpack(path.read_bytes(), digest)
    except (OSError, ModelFileError):
        tokenizer = build()
    if tokenizer is None:
        return None
    with contextlib.suppress(OSError):
        _store(path, _pack(tokenizer, digest))
    return tokenizer


def _store(path: Path, data: bytes) -> None:
    """Write the file whole or not at all: another process may read or write it now."""
    import tempfile

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _pack(tokenizer: Tokenizer, digest: str) -> bytes:
    text = tokenizer.to_json()
    compiled = _Compiled(digest, tokenizer.extras, text)
    pipeline = json.loads(text)
    model = pipeline["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__) if model.get("type") == "BPE" else []
    # Ids with gaps cannot be a list; such a tokenizer stays JSON.
    if tokens and model["vocab"][tokens[-1]] == len(tokens) - 1:
        ids = model["vocab"]
        pairs = [ids[part] for merge in model["merges"] for part in merge]
        compiled.tokens, compiled.added = tokens, pipeline["added_tokens"]
        compiled.merges = struct.pack(f"<{len(pairs)}i", *pairs)
        model["vocab"], model["merges"], pipeline["added_tokens"] = {}, [], []
        compiled.pipeline = json.dumps(pipeline)
    payload = msgspec.msgpack.encode(compiled)
    return _beginning() + hashlib.sha256(payload).digest() + payload


def _beginning() -> bytes:
    """Give what a file begins with. Another version may build another tokenizer of the same source: its file is not
    read.
    """
    import tokenizers

    return f"tiercel tokenizer 1, {__version__}, tokenizers {tokenizers.__version__}\n".encode()


def _unpack(data: bytes, digest: str) -> Tokenizer:
    beginning = _beginning()
    start = len(beginning) + hashlib.sha256().digest_size
    payload = memoryview(data)[start:]
    if data[: len(beginning)] != beginning or data[len(beginning) : start] != hashlib.sha256(payload).digest():
        raise ModelFileError("text.compiled: a damaged cache file; what `cached` wrote is needed; it is built again")
    compiled = msgspec.msgpack.decode(payload, type=_Compiled)
    if compiled.source != digest:
        raise ModelFileError("text.compiled: another source's cache file; it is built again")
    if compiled.tokens is None:
        return Tokenizer.from_json(compiled.pipeline, compiled.extras)
    with library_errors("text.compiled"), collector_paused():
        return _assemble(compiled, compiled.tokens)


def _assemble(compiled: _Compiled, tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    shell = Backend.from_str(compiled.pipeline)
    settings = json.loads(compiled.pipeline)["model"]
    flags = {name: settings[name] for name in _BPE_SETTINGS if settings.get(name) is not None}
    parts = _integers(compiled.merges)
    # `itemgetter` of two or more gives a tuple, in one call: a loop in Python takes three times as long.
    texts = itemgetter(*parts)(tokens) if parts else ()
    merges = list(zip(texts[::2], texts[1::2], strict=True))
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    backend = Backend(models.BPE(vocab, merges, **flags))
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(shell, name)) is not None:
            setattr(backend, name, part)
    for special in (True, False):
        chosen = [one for one in compiled.added if one["special"] == special]
        if chosen:
            add = backend.add_special_tokens if special else backend.add_tokens
            add([AddedToken(**{key: value for key, value in one.items() if key != "id"}) for one in chosen])
    if any(backend.token_to_id(one["content"]) != one["id"] for one in compiled.added):
        raise ModelFileError("text.compiled: added tokens with gaps between their ids; it is built again")
    return Tokenizer(backend, Traits.from_plain(compiled.extras))


def _integers(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


_BPE_SETTINGS: Final = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
