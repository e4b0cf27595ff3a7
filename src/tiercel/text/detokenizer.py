"""Token ids to text as they come: every piece is whole characters, and the pieces together are the whole text.

The stream continues the prompt: what it gives is the text of prompt and output together, less the prompt's. So a
leading space stays where the prompt has text, and a character begun by the prompt's last token is finished.

Where tokens are bytes (byte-level and SentencePiece vocabularies), an incremental UTF-8 decoder does all of it: at
most three bytes are held back, and bytes that can no longer become a character are U+FFFD at once. For other
vocabularies a short window of tokens is decoded again for each piece, and the text held back is bounded too.

A detokenizer belongs to one sequence. States: open, then finished by `finish`, after which nothing may be pushed.
Invariant: `text` is all that `push` and `finish` have returned.
"""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tiercel.text.byte_decoding import ByteDecoding
    from tiercel.text.tokenizer import Tokenizer

_UNFINISHED: Final = "\ufffd"
_N_PRIMING_TOKENS: Final = 6  # of a prompt, when a window is decoded: enough to see what stands before the output
_N_HELD_TOKENS_MAX: Final = 6  # a character has four bytes at most; more tokens without an end are not one


class Detokenizer:
    """One sequence's stream of text.

    `spaces_between_special_tokens` is accepted for the API's sake and changes nothing: it concerns tokenizers written
    in Python, and like every tokenizer of the `tokenizers` library ours puts nothing between special tokens.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        del spaces_between_special_tokens
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        decoding = tokenizer.byte_decoding
        self._stream: _ByteStream | _WindowStream
        if decoding is not None:
            self._stream = _ByteStream(tokenizer, decoding, prompt_ids, skipped)
        else:
            self._stream = _WindowStream(tokenizer, prompt_ids, skipped)
        self._pieces: list[str] = []
        self._is_finished = False

    @property
    def text(self) -> str:
        """All text given so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text they complete. Ids outside the vocabulary have no text.

        Cost: constant for a token, whatever came before.
        """
        assert not self._is_finished, "text.detokenizer: push after finish"
        return self._keep(self._stream.push(ids))

    def finish(self) -> str:
        """End the stream; return what was held back."""
        if self._is_finished:
            return ""
        self._is_finished = True
        return self._keep(self._stream.finish())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class _ByteStream:
    """The bytes of tokens through an incremental decoder."""

    def __init__(
        self, tokenizer: "Tokenizer", decoding: "ByteDecoding", prompt_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = decoding.strips_first_space and not self._has_text(prompt_ids)
        # The last four bytes of the prompt tell which character it leaves unfinished; its text is not ours to give.
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in skipped:
                tail = self._bytes_of(token_id) + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)

    def _has_text(self, prompt_ids: Sequence[int]) -> bool:
        return any(i not in self._skipped and self._bytes_of(i) for i in prompt_ids)

    def push(self, ids: Sequence[int]) -> str:
        data = b"".join([self._bytes_of(i) for i in ids if i not in self._skipped])
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data) if data else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """The text of a window of tokens, decoded with and without the new ones; the difference is the piece."""

    def __init__(self, tokenizer: "Tokenizer", prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        for token_id in reversed(prompt_ids):
            if token_id not in skipped:
                self._window.append(token_id)
            if len(self._window) == _N_PRIMING_TOKENS:
                break
        self._window.reverse()
        self._n_done = len(self._window)

    def push(self, ids: Sequence[int]) -> str:
        pieces = []
        for token_id in ids:
            if token_id not in self._skipped:
                self._window.append(token_id)
                pieces.append(self._advance(is_last=False))
        return "".join(pieces)

    def finish(self) -> str:
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        done = self._decode(self._window[: self._n_done])
        full = self._decode(self._window)
        n_held = len(self._window) - self._n_done
        if n_held == 0 or (full.endswith(_UNFINISHED) and n_held < _N_HELD_TOKENS_MAX and not is_last):
            return ""
        piece = full[len(done) :] if full.startswith(done) else full[_n_common(done, full) :]
        # What was just given is the context of the next: a decoder may look at the token before.
        self._window = self._window[-_N_PRIMING_TOKENS:]
        self._n_done = len(self._window)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _n_common(a: str, b: str) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
