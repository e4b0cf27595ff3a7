"""One sequence's form: which tokens may come next, told anew after each token that came.

It has three parts in time. While the model reasons, everything but an end may come. Before a model that may reason has
begun, the form's tokens may come and the one that opens reasoning. Then the form decides, to its end.

How it ends. Where the text may end, end-of-sequence may come, and the request's stop tokens; nowhere else, so that no
request ends with half of a form. When nothing else may follow, the sequence is complete at once: no token is spent on
saying so, `min_tokens` and `ignore_eos` do not matter, and a model without an end-of-sequence token ends too.

Owner: the engine's thread. A preempted sequence keeps it: it depends on the tokens that came and on nothing else.
Invariants (`check`): it is as many tokens on as it was told; what is complete, or in error, takes no more.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import FormFailed, RequestFailed
from tiercel.text.thinking import Thinking, ThinkingMarks, ThinkingTracker

if TYPE_CHECKING:
    from tiercel.text.tokenizer import Tokenizer

Words = npt.NDArray[np.uint32]


def n_mask_words(vocab_size: int) -> int:
    """Words of a mask: token i is bit i % 32 of word i // 32."""
    return -(-vocab_size // 32)


class Vocabulary:
    """What all constraints of a model share. `tokenizer` is the library's. Frozen."""

    def __init__(self, tokenizer: Any, ours: "Tokenizer", vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.ours = ours
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.n_words = n_mask_words(vocab_size)
        # The library's may be a token longer: see `Grammars._worker_start`.
        self.n_library_words = n_mask_words(tokenizer.vocab_size)
        self.everything = np.full(self.n_words, 0xFFFFFFFF, np.uint32)
        if vocab_size % 32:
            self.everything[-1] = (1 << vocab_size % 32) - 1


class Constraint:
    """One sequence's. See `CompiledGrammar.start`."""

    def __init__(
        self,
        matcher: Any,
        vocabulary: Vocabulary,
        *,
        stop_ids: Iterable[int],
        ignores_eos: bool,
        thinking: ThinkingMarks | None,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos_ids = vocabulary.eos_ids
        stop_ids = frozenset(stop_ids)
        self._stop_ids = stop_ids - self._eos_ids
        self._ignored_ids = self._eos_ids - stop_ids if ignores_eos else frozenset()
        self._tracker = ThinkingTracker(thinking or ThinkingMarks(), vocabulary.ours.token_bytes)
        self._opener_ids = frozenset(
            i for text in (thinking.begins if thinking else ()) if (i := vocabulary.ours.id_of(text)) is not None
        )
        self._kept = vocabulary.everything  # what of the library's masks counts where the text may not end
        if self._stop_ids or self._ignored_ids:
            self._kept = vocabulary.everything.copy()
            _set(self._kept, self._stop_ids | self._ignored_ids, is_on=False)
        self._thinking_mask: Words | None = None
        self._library_row = np.zeros(vocabulary.n_library_words, np.uint32)
        self._library_address = (self._library_row.ctypes.data, self._library_row.nbytes)
        self.n_tokens = 0
        self.is_complete = False
        self.ends_with_text = False  # it is complete, and the last token is part of its text

    @property
    def may_end(self) -> bool:
        """Whether the text is one of the form as it is."""
        return self.is_complete or (self._tracker.state is Thinking.ANSWERING and self._matcher.is_accepting())

    def fill(self, row: Words) -> None:
        """Write which tokens may come next.

        Shapes: row  uint32 [n_mask_words(V)], written whole

        Raises: RequestFailed: the form takes too much work at this place.
        """
        state = self._tracker.state
        if state in (Thinking.THINKING, Thinking.OPENING):
            row[:] = self._while_thinking()
            return
        library, words = self._library_row, self._vocabulary.n_words
        self._matcher.unsafe_compute_mask_ptr(*self._library_address)
        if self._matcher.is_error():
            raise self._failed()
        np.bitwise_and(library[:words], self._kept, out=row)
        if (self._ignored_ids or self._stop_ids) and self._matcher.is_accepting():
            if state is Thinking.ANSWERING:
                _set(row, self._stop_ids, is_on=True)
            if self._ignored_ids and not row.any():
                np.bitwise_and(library[:words], self._vocabulary.everything, out=row)
        if state is Thinking.UNDECIDED:
            _set(row, self._opener_ids, is_on=True)

    def accept(self, token_id: int) -> None:
        """Take the token that came.

        Raises: RequestFailed: it is none that may; `fill` did not allow it, or it went on behind a closing mark.
        """
        assert not self.is_complete, "constraint: a token came after the end"
        self.n_tokens += 1
        state = self._tracker.state
        if state is Thinking.UNDECIDED and token_id not in self._opener_ids:
            self._tracker.answer()
            state = Thinking.ANSWERING
        if state is not Thinking.ANSWERING:
            rest = self._tracker.feed(token_id)
            if rest:
                self._accept_text(rest)
        elif token_id in self._eos_ids or (token_id in self._stop_ids and self._matcher.is_accepting()):
            self.is_complete = True
            return
        elif not self._matcher.consume_token(token_id):
            raise self._failed()
        if self._tracker.state is Thinking.ANSWERING and self._matcher.is_stopped():
            self.is_complete = self.ends_with_text = True

    def check(self) -> None:
        """Raise AssertionError when an invariant of the module's docstring does not hold."""
        assert self.n_tokens >= 0, "constraint: fewer than no tokens"
        is_answering = self._tracker.state is Thinking.ANSWERING
        assert is_answering or not self.is_complete, "constraint: it is complete, and its text has not begun"

    def _accept_text(self, data: bytes) -> None:
        """Take what stood behind a closing mark in the same token; how it is cut into tokens does not matter."""
        text = data.decode("utf-8", "replace")
        if not self._matcher.consume_tokens(self._vocabulary.tokenizer.greedy_tokenize(text)):
            raise RequestFailed(
                f"structured_outputs: the token that ended the reasoning began the answer with {text[:20]!r}, which "
                "its form does not allow; send it again"
            )

    def _while_thinking(self) -> Words:
        """Everything but an end, after which there would be no answer."""
        if self._thinking_mask is None:
            mask = self._vocabulary.everything.copy()
            _set(mask, self._eos_ids | self._stop_ids, is_on=False)
            self._thinking_mask = mask
        return self._thinking_mask

    def _failed(self) -> FormFailed:
        why = " ".join(self._matcher.get_error().split())[:200]
        return FormFailed(
            f"structured_outputs: after {self.n_tokens} tokens the form cannot be followed on ({why}); make it simpler"
        )


def _set(row: Words, ids: Iterable[int], *, is_on: bool) -> None:
    for i in ids:
        if i // 32 < len(row):
            bit = np.uint32(1 << i % 32)
            row[i // 32] = row[i // 32] | bit if is_on else row[i // 32] & ~bit
