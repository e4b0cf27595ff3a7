"""How long a model may reason, and the tokens that end its reasoning when that is used up. Knows no mask.

A budget counts the tokens that follow the newest mark that opens reasoning, those of the prompt included. Once they are
as many as it allows, `forced_id` names the token that must come next, one token of the forced end after the other,
until a mark that closes reasoning stands at the end: a forced end may begin with a sentence, and ends with such a mark.
Another opening mark, wherever it comes, begins a new count. Marks are found in the tokens' bytes, as in
`text.thinking`, so they may be cut into tokens in any way.

Source: vLLM's `thinking_token_budget`. We differ in two things: marks are texts and not token ids, and in a chat whose
prompt opens no reasoning, marks of the prompt count for nothing, as they are the words of a user.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from tiercel.base.errors import ConfigError, RequestError

_KEYS: Final = ("reasoning_start_str", "reasoning_end_str")
_MARK_CHARS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class ReasoningConfig:
    """The server's own words for what opens reasoning and what ends it by force; None: the model's."""

    reasoning_start_str: str | None = None
    reasoning_end_str: str | None = None

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """Build it from an engine's option.

        Raises: ConfigError: a name is unknown, or a value is no text.
        """
        for name, value in given.items():
            if name not in _KEYS:
                raise ConfigError(f"reasoning_config.{name[:40]}: unknown; known are {', '.join(_KEYS)}")
            if not isinstance(value, str) or not 0 < len(value) <= _MARK_CHARS_MAX:
                raise ConfigError(
                    f"reasoning_config.{name}: got {value!r:.40}; a text of 1 to {_MARK_CHARS_MAX} characters is needed"
                )
        return cls(**given)

    def markers(self, begins: Sequence[str], ends: Sequence[str]) -> "ReasoningMarkers | None":
        """Give what reasoning is bounded by, for a model with these marks; None: nothing opens it, or nothing ends it.

        Raises: ConfigError: the forced end ends with none of the model's marks, so nothing would know it for an end.
        """
        if self.reasoning_start_str is not None:
            begins = (self.reasoning_start_str,)
        forced = self.reasoning_end_str
        if forced is None:
            forced = ends[0] if ends else None
        elif not ends:
            ends = (forced,)
        if not begins or forced is None:
            return None
        if not forced.endswith(tuple(ends)):
            raise ConfigError(
                f"reasoning_config.reasoning_end_str: got {forced!r:.80}; a text that ends with {' or '.join(ends)} is "
                "needed, by which this model's reasoning is known to be over"
            )
        if any(one in other or other in one for one in begins for other in ends):
            raise ConfigError(
                "reasoning_config: of what opens reasoning and what ends it, one holds the other; others are needed"
            )
        return ReasoningMarkers(tuple(begins), tuple(ends), forced)


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What opens reasoning, what closes it, and what is forced to close it: a text that ends with one of `ends`."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    forced_end: str


class ThinkingBudget:
    """One sequence's. Depends on the tokens it was told, and on nothing else. See `start`."""

    def __init__(
        self,
        markers: ReasoningMarkers,
        n_tokens_max: int,
        forced_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self.n_tokens_max = n_tokens_max
        self.forced_ids = tuple(forced_ids)
        self._begins = tuple(text.encode() for text in markers.begins)
        self._ends = tuple(text.encode() for text in markers.ends)
        self._n_held_max = max(map(len, (*self._begins, *self._ends))) - 1
        self._token_bytes = token_bytes
        self._failure = _failures(self.forced_ids)
        self._tail = b""  # what may be the beginning of a mark
        self._n_matched = 0  # of the forced end, at the end of the reasoning so far
        self.is_thinking = False
        self.n_tokens = 0  # since the newest opening mark

    @classmethod
    def start(
        cls,
        markers: ReasoningMarkers,
        n_tokens_max: int,
        prompt_ids: Sequence[int],
        *,
        encode: Callable[[str], list[int]],
        token_bytes: Callable[[int], bytes],
    ) -> Self:
        """Begin a count behind a prompt, whose own reasoning counts; `prompt_ids` empty: it has none.

        Raises: RequestError: the tokenizer cannot write the forced end.
        """
        forced_ids = encode(markers.forced_end)
        written = b"".join(map(token_bytes, forced_ids))
        if not written.endswith(tuple(text.encode() for text in markers.ends)):
            raise RequestError(
                "thinking_token_budget: this model's tokens cannot write the end of its reasoning; leave it out",
                param="thinking_token_budget",
            )
        budget = cls(markers, n_tokens_max, forced_ids, token_bytes)
        budget._read(prompt_ids)
        return budget

    @property
    def forced_id(self) -> int | None:
        """The token that must come next; None: any may."""
        if self.is_thinking and self.n_tokens >= self.n_tokens_max:
            return self.forced_ids[self._n_matched]
        return None

    def copy(self) -> Self:
        """Give another that goes on from here by itself."""
        return copy.copy(self)

    def push(self, token_id: int) -> None:
        """Take the next token."""
        self._tail += self._token_bytes(token_id)
        begin, end = _last_end(self._tail, self._begins), _last_end(self._tail, self._ends)
        if begin > end:
            self.is_thinking, self.n_tokens, self._n_matched = True, 0, 0
        elif end > 0:
            self.is_thinking = False
        elif self.is_thinking:
            self.n_tokens += 1
            self._match(token_id)
        # What was found is not found again.
        self._tail = self._tail[max(begin, end, len(self._tail) - self._n_held_max, 0) :]

    def check(self) -> None:
        """Raise AssertionError when the state cannot be."""
        assert 0 <= self._n_matched < len(self.forced_ids), "budget: all of the forced end, and it is no end"
        assert len(self._tail) <= self._n_held_max, "budget: more is held than a mark needs"
        assert self.n_tokens >= 0, "budget: fewer than no tokens"

    def _read(self, prompt_ids: Sequence[int]) -> None:
        """Find the prompt's last mark from its end, and take only what follows it token by token."""
        pieces = list(map(self._token_bytes, prompt_ids))
        text = b"".join(pieces)
        begin, end = _last_end(text, self._begins), _last_end(text, self._ends)
        if begin <= end:
            self._tail = text[max(end, len(text) - self._n_held_max) :]
            return
        self.is_thinking = True
        n_after = len(text) - begin
        first = len(pieces)
        while first and len(pieces[first - 1]) <= n_after:
            first -= 1
            n_after -= len(pieces[first])
        self._tail = text[begin : begin + n_after]  # of the token in which the mark ended
        for token_id in prompt_ids[first:]:
            self.push(token_id)

    def _match(self, token_id: int) -> None:
        """Follow how much of the forced end stands at the end (Knuth, Morris and Pratt 1977)."""
        n = self._n_matched
        while n and self.forced_ids[n] != token_id:
            n = self._failure[n - 1]
        n += self.forced_ids[n] == token_id
        self._n_matched = self._failure[n - 1] if n == len(self.forced_ids) else n


def _last_end(text: bytes, marks: tuple[bytes, ...]) -> int:
    """Give where the last of some marks ends; 0: there is none."""
    return max(at + len(mark) if (at := text.rfind(mark)) >= 0 else 0 for mark in marks)


def _failures(ids: tuple[int, ...]) -> list[int]:
    """Give, for each beginning of `ids`, the longest shorter one that it ends with."""
    table = [0] * len(ids)
    n = 0
    for i in range(1, len(ids)):
        while n and ids[i] != ids[n]:
            n = table[n - 1]
        n += ids[i] == ids[n]
        table[i] = n
    return table
