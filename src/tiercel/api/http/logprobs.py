"""Log-probabilities in OpenAI's two shapes and in vLLM's for prompts. Knows no request; one object follows one text.

A token's entry says its text after the tokens before it ("" while a character is unfinished) and its true bytes.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tiercel.protocol.outputs import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from tiercel.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI and vLLM say so.
LEAST: Final = -9999.0


class TokenTexts:
    """How tokens are written in an answer: as text, or as `token_id:N` when asked or when there is no tokenizer."""

    def __init__(self, tokenizer: "Tokenizer | None", *, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None

    def text(self, token_id: int, entry: Logprob) -> str:
        """Give a token's text in an answer."""
        return f"token_id:{token_id}" if self.as_ids else entry.decoded_token or ""

    def bytes(self, token_id: int) -> list[int]:
        """Give the bytes a token adds to the text."""
        return list(self.tokenizer.token_bytes(token_id)) if self.tokenizer is not None else []

    def key(self, token_id: int, entry: Logprob) -> str:
        """Give a token's text where it must tell tokens apart: parts of characters are written as bytes."""
        text = self.text(token_id, entry)
        if text or self.tokenizer is None:
            return text
        data = self.tokenizer.token_bytes(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if data else f"token_id:{token_id}"


def chat_logprobs(
    positions: Sequence[PositionLogprobs], n_top: int, texts: TokenTexts, *, named: Sequence[int] | None = None
) -> dict[str, Any]:
    """Give positions in the shape of chats: with the likeliest `n_top` (-1: every entry), or the named tokens, in their
    order.
    """
    content = []
    for position in positions:
        (token_id, chosen), *_ = position.items()
        likeliest = sorted(position.items(), key=lambda pair: -pair[1].logprob)
        shown = likeliest if n_top == -1 else likeliest[:n_top]
        if named is not None:
            shown = [(i, position[i]) for i in dict.fromkeys(named)]
        content.append({**_entry(token_id, chosen, texts), "top_logprobs": [_entry(i, one, texts) for i, one in shown]})
    return {"content": content, "refusal": None}


def _entry(token_id: int, entry: Logprob, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts.text(token_id, entry),
        "logprob": max(entry.logprob, LEAST),
        "bytes": texts.bytes(token_id),
    }


class CompletionLogprobs:
    """One choice's log-probabilities in the shape of completions. Offsets go on from call to call.

    An offset is where in the choice's text the token's first character is, its unfinished one for part of a character.
    `hidden_ids` are tokens that the text leaves out: they take no place in it.
    """

    def __init__(self, texts: TokenTexts, hidden_ids: frozenset[int]) -> None:
        self._texts = texts
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, text: str, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> dict[str, Any]:
        """Give the prompt's tokens; the first has no log-probability, as nothing is before it."""
        done = _empty()
        tokenizer = self._texts.tokenizer
        for token_id, position in zip(token_ids, positions, strict=True):
            if position is not None:
                self._add(done, token_id, position[token_id], position)
            else:
                alone = Logprob(0.0, None, tokenizer.token_text(token_id) if tokenizer is not None else None)
                self._add(done, token_id, alone, None)
        if not text.startswith(" ") and self._puts_space_before(token_ids):
            done["text_offset"] = [max(0, offset - 1) for offset in done["text_offset"]]
            self._offset -= 1
        return done

    def output(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        """Give the next tokens of the answer."""
        done = _empty()
        for position in positions:
            (token_id, chosen), *_ = position.items()
            self._add(done, token_id, chosen, position)
        return done

    def _puts_space_before(self, token_ids: Sequence[int]) -> bool:
        """Whether the vocabulary began the text with a space of its own."""
        tokenizer = self._texts.tokenizer
        shown = (tokenizer.token_bytes(i) for i in token_ids if i not in self._hidden_ids) if tokenizer else ()
        return next((data for data in shown if data), b"").startswith(b" ")

    def _add(self, done: dict[str, Any], token_id: int, chosen: Logprob, position: PositionLogprobs | None) -> None:
        done["tokens"].append(self._texts.key(token_id, chosen))
        done["text_offset"].append(self._offset)
        if token_id not in self._hidden_ids and self._texts.tokenizer is not None:
            self._offset += len(self._decoder.decode(self._texts.tokenizer.token_bytes(token_id)))
        if position is None:
            done["token_logprobs"].append(None)
            done["top_logprobs"].append(None)
            return
        done["token_logprobs"].append(max(chosen.logprob, LEAST))
        top: dict[str, float] = {}
        for i, one in position.items():
            top.setdefault(self._texts.key(i, one), max(one.logprob, LEAST))
        done["top_logprobs"].append(top)


def _empty() -> dict[str, Any]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Put two runs of completion log-probabilities together."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None, texts: TokenTexts
) -> list[Mapping[str, Any] | None] | None:
    """Give the prompt's log-probabilities in vLLM's shape: a map from token id for each position, the first null."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": max(one.logprob, LEAST),
                "rank": one.rank,
                "decoded_token": texts.text(token_id, one),
            }
            for token_id, one in position.items()
        }
        for position in positions
    ]
