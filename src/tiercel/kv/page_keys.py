"""Page keys: what names the content of a full page of KV. Knows tokens and digests, no pool and no request.

A key is a SHA-256 chain: the root stands for everything but the tokens that changes a page's bytes, and each page's
key is the digest of the key before it and of the page's tokens. Equal keys therefore mean equal bytes, and any other
model, format, tenant or history means another key. Nothing random and nothing of the environment goes in, so that two
processes, or the same one after a restart, make the same keys.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

PageKey = bytes

# Part of every root: raise it when the meaning of a page's bytes changes.
PAGE_FORMAT_VERSION = 1


def root_key(
    weights_digest: str,
    kv_dtype: str,
    page_size_tokens: int,
    *,
    salt: str | None = None,
    version: int = PAGE_FORMAT_VERSION,
) -> bytes:
    """Make the key that stands before a sequence's first page.

    `weights_digest` names all that decides the model's numbers: weights, their format, the compute type. `salt` keeps
    tenants apart: pages made under one cannot be matched under another, nor under none.
    """
    parts = ["tiercel.page", str(version), weights_digest, kv_dtype, str(page_size_tokens)]
    if salt is not None:
        parts.append(salt)
    digest = sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))  # so that no two lists of parts read the same
        digest.update(data)
    return digest.digest()


def extend(parent: bytes, token_ids: Sequence[int], page_size_tokens: int) -> list[bytes]:
    """Make the keys of the full pages of `token_ids`, which follow the page that `parent` names."""
    data = array("i", token_ids)
    assert data.itemsize == 4, "page keys are defined over 32-bit token ids"
    if sys.byteorder == "big":
        data.byteswap()
    view = memoryview(data).cast("B")
    page_bytes = 4 * page_size_tokens
    keys = []
    for end in range(page_bytes, len(view) + 1, page_bytes):
        digest = sha256(parent)
        digest.update(view[end - page_bytes : end])
        parent = digest.digest()
        keys.append(parent)
    return keys


class PageKeys:
    """The keys of one sequence's full pages, made as its tokens become known. Owner: the sequence."""

    __slots__ = ("_page_size_tokens", "_root", "keys")

    def __init__(self, root: bytes, page_size_tokens: int) -> None:
        self._root = root
        self._page_size_tokens = page_size_tokens
        self.keys: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Add the keys that `token_ids`, the sequence's known tokens from its first on, allow; return them all.

        Requires: the tokens only ever grow at the end.
        """
        size, keys = self._page_size_tokens, self.keys
        n_keyed = len(keys) * size
        if len(token_ids) - n_keyed >= size:
            keys += extend(keys[-1] if keys else self._root, token_ids[n_keyed:], size)
        return keys

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise AssertionError when the keys are not those of the tokens."""
        expected = extend(self._root, token_ids, self._page_size_tokens)[: len(self.keys)]
        assert self.keys == expected, "page keys: not those of the sequence's tokens"
