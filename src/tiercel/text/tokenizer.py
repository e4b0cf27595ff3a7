"""One model's tokenizer: text to ids, ids to text, and the facts about its vocabulary that others ask for.

It wraps a tokenizer of the `tokenizers` library, which does the encoding; decoding is done here, over each token's
bytes, so that a stream of pieces and the whole are made in one way. It is frozen once built: threads may share it.
Read `gguf_vocab` and `folder` for where one comes from, `detokenizer` for streams, `compiled` for the cache.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiercel.base.errors import RequestError
from tiercel.text.backend import Traits, library_errors
from tiercel.text.byte_decoding import ByteDecoding, byte_decoding

if TYPE_CHECKING:
    import tokenizers

# From here on the library's way for several texts is taken for one too: it lets other threads run and notes no offsets.
# 4,095 tokens of 30,000 characters: 5.7 ms rather than 7.7 (benchmarks/loop_lag.py has such a chat).
_LONG_CHARS: Final = 2048
_ID_END: Final = 1 << 32  # the library's ids are 32 bits wide


class Tokenizer:
    """A vocabulary and the rules that cut text into it.

    The only thing that changes after construction is a memo of tokens' bytes, which holds at most the vocabulary.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", traits: Traits) -> None:
        self._backend = backend
        self._traits = traits
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self.byte_decoding: ByteDecoding | None = byte_decoding(json.loads(state))

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint's folder.

        Raises:
            ModelFileError: there is no tokenizer.json, or a file is malformed.
        """
        from tiercel.text import folder

        return cls(*folder.read(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer that a GGUF file's `tokenizer.ggml.*` metadata describes.

        Raises:
            ModelFileError: the metadata is inconsistent.
            UnsupportedModel: a kind of vocabulary or a pre-tokenizer that Tiercel does not implement.
        """
        from tiercel.text import gguf_vocab

        return cls(*gguf_vocab.build(metadata))

    @classmethod
    def from_json(cls, text: str, extras: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer from what `to_json` and `extras` gave.

        Raises:
            ModelFileError: either is malformed.
        """
        from tokenizers import Tokenizer as Backend

        with library_errors("text.tokenizer"):
            return cls(Backend.from_str(text), Traits.from_plain(extras))

    def to_json(self) -> str:
        """Give the vocabulary and rules as a `tokenizer.json`."""
        return self._backend.to_str()

    @property
    def extras(self) -> dict[str, Any]:
        """What a `tokenizer.json` does not hold, as plain values."""
        return self._traits.to_plain()

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return self._traits.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text or a turn, the tokenizer's own first."""
        return self._traits.eos_ids

    @property
    def pad_id(self) -> int | None:
        """The token that fills."""
        return self._traits.pad_id

    @property
    def add_bos(self) -> bool:
        """Whether `encode` with special tokens puts `bos_id` first."""
        return self._traits.add_bos

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has one."""
        return self._traits.chat_template

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All chat templates by name: `default`, which is `chat_template`, and others such as `tool_use`."""
        return self._traits.chat_templates

    @cached_property
    def max_chars_per_token(self) -> int:
        """Characters of text that one token can stand for, at most."""
        if self._traits.n_chars_max is not None:
            return self._traits.n_chars_max
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Cut a text into token ids. Text that spells a special token becomes that token.

        Raises:
            RequestError: the text is not Unicode (it holds half of a surrogate pair).
        """
        return self.encode_many([text], add_special_tokens=add_special_tokens)[0]

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Cut several texts, on the library's threads when there are many.

        Raises:
            RequestError: a text is not Unicode (it holds half of a surrogate pair).
        """
        for text in texts:
            _check_unicode(text)
        with library_errors("text.tokenizer"):
            if len(texts) == 1 and len(texts[0]) < _LONG_CHARS:
                return [self._backend.encode(texts[0], add_special_tokens=add_special_tokens).ids]
            done = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [one.ids for one in done]

    def encode_framed(
        self,
        text: str,
        second: str | None = None,
        *,
        n_max: int | None = None,
        side: str = "right",
        is_framed: bool = True,
    ) -> tuple[list[int], int | None]:
        """Cut a text, or a pair, into ids with what frames it (`is_framed`), and keep at most `n_max` of them.

        The longer text is cut first, at its `side` ("left" | "right"), and the frame stays.

        Returns: the ids, and how many come before the second text's; None when its tokens are of no other segment.

        Raises:
            RequestError: a text is not Unicode, or n_max leaves it no token.
        """
        for one in (text, second or ""):
            _check_unicode(one)
        with library_errors("text.tokenizer"):
            parts = [self._backend.encode(one, add_special_tokens=False) for one in (text, second) if one is not None]
            if n_max is not None:
                n_left = n_max - (self._backend.num_special_tokens_to_add(len(parts) == 2) if is_framed else 0)
                if n_left < len(parts):
                    raise RequestError(
                        f"truncate_prompt_tokens: got {n_max}; what frames a text leaves it no token; raise it",
                        param="truncate_prompt_tokens",
                    )
                lengths = _longest_first([len(part.ids) for part in parts], n_left)
                for part, n in zip(parts, lengths, strict=True):
                    part.truncate(n, direction=side)
            whole = self._backend.post_process(parts[0], parts[1] if len(parts) > 1 else None, is_framed)
        types = whole.type_ids
        return whole.ids, types.index(1) if 1 in types else None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Give the text of ids. Ids outside the vocabulary have none; invalid UTF-8 becomes U+FFFD."""
        if self.byte_decoding is None:
            known = [i for i in ids if 0 <= i < _ID_END and self._backend.id_to_token(i) is not None]
            return self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skipped])
        if self.byte_decoding.strips_first_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes that one token adds to a text; none for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._find_bytes(token_id)
            if found:
                self._bytes[token_id] = found
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < _ID_END else None
        if token is None:
            return b""
        raw = self._traits.raw_bytes.get(token_id)
        if raw is not None:
            return raw
        if self.byte_decoding is None:
            return token.encode()
        is_added = token_id in self._added
        return (self.byte_decoding.bytes_of_added if is_added else self.byte_decoding.bytes_of)(token)

    def token_text(self, token_id: int) -> str:
        """Give one token as text, with U+FFFD where it holds only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens, by their texts."""
        return {self.token_text(i): i for i in sorted(self.special_ids)}

    def id_of(self, token: str) -> int | None:
        """Find a token by its text in the vocabulary, such as `<|im_end|>`."""
        return self._backend.token_to_id(token)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "prompt: half of a surrogate pair; text that UTF-8 can hold is needed; send the whole character",
            param="prompt",
        ) from error


def _longest_first(lengths: list[int], n_left: int) -> list[int]:
    """Cut lengths to `n_left` together, always the longer, and of equals the second."""
    if len(lengths) == 1:
        return [min(lengths[0], n_left)]
    a, b = lengths
    if a + b <= n_left:
        return lengths
    half = -(-n_left // 2)
    if b <= n_left - half:
        return [n_left - b, b]
    return [min(a, half), n_left - min(a, half)]
