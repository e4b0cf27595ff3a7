"""Which piece of the text each token made, where log-probabilities must go with the text. Knows no parser.

The engine gives text, tokens and log-probabilities of a step together, but holds text back that may become a stop
string. A token waits here until its text has come, so what is given does not depend on how the steps were cut.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.protocol.outputs import CompletionOutput
    from tiercel.protocol.params import SamplingParams
    from tiercel.text.tokenizer import Tokenizer

Entry = Mapping[str, Any]


class TokenPieces:
    """The tokens of one output. Nothing is fed after the last."""

    def __init__(self, params: "SamplingParams", tokenizer: "Tokenizer | None") -> None:
        hides = params.skip_special_tokens and tokenizer is not None
        self._hidden_ids = frozenset(tokenizer.special_ids) if hides and tokenizer is not None else frozenset()
        self._waiting: deque[tuple[int, Entry]] = deque()
        self._text = ""

    def feed(
        self, one: "CompletionOutput", entries: Sequence[Any], *, is_last: bool
    ) -> Iterator[tuple[str, int | None, Any, bool]]:
        """Take what is new; give, for each token whose text has come, that text, the token and its entry.

        A token that the text leaves out has no entry. The last of all is marked: text that no token accounts for.
        """
        self._text += one.text
        self._waiting.extend(zip(one.token_ids, entries, strict=True))
        while self._waiting:
            token_id, entry = self._waiting[0]
            is_hidden = token_id in self._hidden_ids
            n_chars = 0 if is_hidden else len(entry["token"])
            if n_chars > len(self._text) and not is_last:
                return
            self._waiting.popleft()
            piece, self._text = self._text[:n_chars], self._text[n_chars:]
            is_hidden = is_hidden or (n_chars > 0 and not piece)  # the token that ended the output
            yield piece, token_id, None if is_hidden else entry, False
        if is_last:
            yield self._text, None, None, True
