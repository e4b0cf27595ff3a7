"""One sequence's form: which tokens may come next, told anew after each token that came.

It has three parts in time. While the model reasons, everything but an end may come. Before a model that may reason has
begun, the form's tokens may come and those that open reasoning. Then the form decides, to its end.

A mark that opens reasoning is one token where the vocabulary has it as one, else any tokens that spell it. What has
come of it may be the beginning of an answer as well: the form takes it too, as far as it can, and is set back when the
mark is whole.

How it ends. Where the text may end, end-of-sequence may come, and the request's stop tokens; nowhere else, so that no
request ends with half of a form. When nothing else may follow, the sequence is complete at once: no token is spent on
saying so, `min_tokens` and `ignore_eos` do not matter, and a model without an end-of-sequence token ends too.

Owner: the engine's thread. A preempted sequence keeps it: it depends on the tokens that came and on nothing else.
Invariants (`check`): it is as many tokens on as it was told; what is complete, or in error, takes no more.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class MaskRow:
    """Where one mask is written: uint32 [n_mask_words(V)], its address, and itself for single words."""

    words: Words
    address: int
    each: memoryview


class MaskRows:
    """Masks of `n_rows` sequences in one array, uint32 [n_rows, n_mask_words(V)], to be filled again at each step."""

    def __init__(self, n_rows: int, vocab_size: int) -> None:
        self.words = np.zeros((n_rows, n_mask_words(vocab_size)), np.uint32)
        # Made once: asking numpy for an address takes as long as the library for a mask.
        self.rows = [MaskRow(row, row.ctypes.data, row.data.cast("B").cast("I")) for row in self.words]


class Vocabulary:
    """What all constraints of a model share. `tokenizer` is the library's. Frozen but for what `openers` keeps."""

    def __init__(self, tokenizer: Any, ours: "Tokenizer", vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.ours = ours
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.n_words = n_mask_words(vocab_size)
        self.n_bytes = 4 * self.n_words
        # The library's may be a token longer, see `Grammars._worker_start`; then it may need a word more.
        self.n_library_words = n_mask_words(tokenizer.vocab_size)
        self.last_word = (1 << vocab_size % 32) - 1 if vocab_size % 32 else 0xFFFFFFFF
        self.everything = np.full(self.n_words, 0xFFFFFFFF, np.uint32)
        self.everything[-1] = self.last_word
        self._openers: dict[tuple[str, ...], Mapping[bytes, frozenset[int]]] = {}

    def openers(self, marks: tuple[str, ...]) -> Mapping[bytes, frozenset[int]]:
        """Give for all that may be left of an opening mark the tokens that begin or complete it.

        Cost: the first time for these marks, a look at every token when one of them is no token itself.
        """
        found = self._openers.get(marks)
        if found is None:
            found = self._openers[marks] = self._find_openers(marks)
        return found

    def _find_openers(self, marks: tuple[str, ...]) -> Mapping[bytes, frozenset[int]]:
        found: dict[bytes, set[int]] = {}
        for mark in marks:
            whole = self.ours.id_of(mark)
            if whole is not None:
                found.setdefault(mark.encode(), set()).add(whole)
                continue
            data = mark.encode()
            lefts = [data[i:] for i in range(len(data))]
            for i in range(self.vocab_size):
                token = self.ours.token_bytes(i)
                if token and token[0] in data:
                    for left in lefts:
                        if left.startswith(token) or token.startswith(left):
                            found.setdefault(left, set()).add(i)
        return {left: frozenset(ids) for left, ids in found.items()}


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
        self._openers = vocabulary.openers(thinking.begins) if thinking is not None else {}
        self._is_begun = True  # the form has taken all that came, which may yet turn out to open reasoning
        # Of the library's masks, what does not count where the text may not end.
        self._excepted = _bits_of(self._stop_ids | self._ignored_ids, vocabulary.vocab_size)
        self._stops = _bits_of(self._stop_ids, vocabulary.vocab_size)
        self._thinking_mask: Words | None = None
        needs_scratch = vocabulary.n_library_words != vocabulary.n_words
        self._scratch = np.zeros(vocabulary.n_library_words, np.uint32) if needs_scratch else None
        self.n_tokens = 0
        self.is_complete = False
        self.ends_with_text = False  # it is complete, and the last token is part of its text

    def copy(self) -> "Constraint":
        """Give another that goes on from here by itself, to be asked about tokens that may not come."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._tracker = copy.copy(self._tracker)
        return other

    @property
    def may_end(self) -> bool:
        """Whether the text is one of the form as it is."""
        return self.is_complete or (self._is_at_form and self._matcher.is_accepting())

    @property
    def _is_at_form(self) -> bool:
        """Whether the form has taken what came, and something came or will not be reasoning."""
        state = self._tracker.state
        return state is Thinking.ANSWERING or (state is Thinking.OPENING and self._is_begun)

    def fill(self, row: MaskRow) -> None:
        """Write which tokens may come next, to all of `row`.

        Raises: RequestFailed: the form takes too much work at this place.
        """
        state = self._tracker.state
        if state is Thinking.THINKING:
            row.words[:] = self._while_thinking()
            return
        if self._is_begun:
            self._fill_form(row)
        else:
            row.words.fill(0)
        if state is not Thinking.ANSWERING:
            _set(row.each, _bits_of(self._opener_ids(), self._vocabulary.vocab_size))

    def _fill_form(self, row: MaskRow) -> None:
        self._ask_library(row)
        if self._matcher.is_error():
            raise self._failed()
        if not self._excepted:
            return
        each = row.each
        for i, bits in self._excepted:
            each[i] &= ~bits
        if self._matcher.is_accepting():
            if self._is_at_form:
                _set(each, self._stops)
            if self._ignored_ids and not np.count_nonzero(row.words):
                self._ask_library(row)

    def _ask_library(self, row: MaskRow) -> None:
        vocabulary, scratch = self._vocabulary, self._scratch
        if scratch is None:
            self._matcher.unsafe_compute_mask_ptr(row.address, vocabulary.n_bytes)
        else:
            self._matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
            row.words[:] = scratch[: vocabulary.n_words]
        row.each[vocabulary.n_words - 1] &= vocabulary.last_word

    def accept(self, token_id: int) -> None:
        """Take the token that came.

        Raises: RequestFailed: it is none that may; `fill` did not allow it, or it went on behind a closing mark.
        """
        assert not self.is_complete, "constraint: a token came after the end"
        self.n_tokens += 1
        tracker, matcher = self._tracker, self._matcher
        if tracker.state is not Thinking.ANSWERING and self._is_of_reasoning(token_id):
            if not self._accept_reasoning(token_id):
                return
        elif (token_id in self._eos_ids or token_id in self._stop_ids) and matcher.is_accepting():
            self.is_complete = True
            return
        elif token_id in self._eos_ids:
            self._accept_named_end(token_id)
            return
        elif not (self._is_begun and matcher.consume_token(token_id)):
            raise self._failed()
        if matcher.is_stopped():
            self.is_complete = self.ends_with_text = True

    def _accept_named_end(self, token_id: int) -> None:
        """Take an end-of-sequence token where the text may not end otherwise: a grammar names it as its last."""
        if not (self._is_begun and self._matcher.consume_token(token_id)):
            raise self._failed()
        if not (self._matcher.is_accepting() or self._matcher.is_stopped()):
            raise FormFailed("structured_outputs: the grammar goes on behind the token that ends a text; name it last")
        self.is_complete = True

    def _is_of_reasoning(self, token_id: int) -> bool:
        """Whether a token that comes before the answer is part of the reasoning or its marks, as far as one can know;
        with one that is not, the answer has begun.
        """
        if self._tracker.state is Thinking.THINKING or token_id in self._opener_ids():
            return True
        self._tracker.answer()
        return False

    def _accept_reasoning(self, token_id: int) -> bool:
        """Take a token of the reasoning or its marks; say whether the answer has begun behind it."""
        was_open = self._tracker.state is Thinking.THINKING
        rest = self._tracker.feed(token_id)
        if self._tracker.state is Thinking.OPENING:
            self._is_begun = self._is_begun and self._matcher.try_consume_tokens([token_id]) == 1
        elif not was_open:
            self._matcher.reset()
            self._is_begun = True
        if rest:
            self._accept_text(rest)
        return self._tracker.state is Thinking.ANSWERING

    def _opener_ids(self) -> frozenset[int]:
        """Give the tokens that go on with an opening mark, or begin one."""
        found: frozenset[int] = frozenset()
        for left in self._tracker.openers:
            found |= self._openers.get(left, frozenset())
        return found

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
            for i, bits in _bits_of(self._eos_ids | self._stop_ids, self._vocabulary.vocab_size):
                mask[i] &= ~np.uint32(bits)
            self._thinking_mask = mask
        return self._thinking_mask

    def _failed(self) -> FormFailed:
        why = " ".join(self._matcher.get_error().split())[:200]
        return FormFailed(
            f"structured_outputs: after {self.n_tokens} tokens the form cannot be followed on ({why}); make it simpler"
        )


def _bits_of(ids: Iterable[int], vocab_size: int) -> list[tuple[int, int]]:
    """Give the words of a mask that ids are in, and their bits of it."""
    found: dict[int, int] = {}
    for i in ids:
        if i < vocab_size:
            found[i // 32] = found.get(i // 32, 0) | 1 << i % 32
    return list(found.items())


def _set(each: memoryview, words: Iterable[tuple[int, int]]) -> None:
    for i, bits in words:
        each[i] |= bits
