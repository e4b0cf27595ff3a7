"""Suffix decoding: what followed the sequence's end most often, in itself and in what was answered lately.

Each sequence has a tree of its prompt and its own output. All that share have one of their outputs beside it, which
outlives them; it is asked as well, and believed when it promises strictly more. The trees are the core's
(`_native.SuffixTree`).

Memory is bounded. A sequence's tree stops growing at `sequence_bytes`, and is still asked. The shared history has two
halves: when the newer is full, by bytes or by sequences, the older is dropped and a new one begun. So what goes first
is what is oldest, and nothing is ever taken out of a tree.

Invariant (`check`): the history is within its bytes, but for the tokens of one call.

Source: SuffixDecoding, arXiv 2411.04975, and vLLM's names of the limits. We differ: eviction by halves; a run of full
depth is continued as its latest occurrence was, so drafts are not cut at the tree's depth; an occurrence at the end of
a text, which nothing follows, is not counted against those that went on.
"""

from array import array
from collections.abc import Sequence

from tiercel import _native
from tiercel.base.errors import ConfigError
from tiercel.spec.drafters.interface import Proposal

_SEQUENCE_BYTES = 4 << 20  # 30,000 tokens of prose; 4,000 of a text that only repeats itself
_HISTORY_BYTES = 64 << 20  # some 500,000 tokens of prose in both halves


class SuffixDrafter:
    """See the module. All limits but the bytes have vLLM's meaning, under `suffix_decoding_*`."""

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        sequence_bytes: int = _SEQUENCE_BYTES,
        history_bytes: int = _HISTORY_BYTES,
    ) -> None:
        for name, value, least, most in (
            ("max_tree_depth", max_tree_depth, 2, 1024),
            ("max_cached_requests", max_cached_requests, 0, 1 << 31),
            ("max_spec_factor", max_spec_factor, 0, 1024),
            ("min_token_prob", min_token_prob, 0, 1),
        ):
            if not least <= value <= most:
                raise ConfigError(
                    f"speculative_config.suffix_decoding_{name}: got {value}; a number from {least} to {most} is needed"
                )
        self.depth = max_tree_depth
        self.factor, self.min_probability = max_spec_factor, min_token_prob
        self._sequence_bytes = sequence_bytes
        self.history = _History(max_tree_depth, history_bytes, max_cached_requests) if max_cached_requests else None

    def begin(self, prompt_ids: Sequence[int], *, shares: bool) -> "SuffixSequence":
        """Begin a sequence."""
        tree = _native.SuffixTree(self.depth, self._sequence_bytes)
        return SuffixSequence(self, tree, prompt_ids, self.history if shares else None)

    def check(self) -> None:
        """Raise AssertionError when the module's invariant does not hold."""
        if self.history is not None:
            self.history.check()

    def close(self) -> None:
        """Forget the history."""
        self.history = None


class _History:
    """Outputs, in two halves. `generation` tells the newer one's texts from those of halves before."""

    def __init__(self, depth: int, max_bytes: int, max_sequences: int) -> None:
        self._depth = depth
        self._half_bytes, self._half_sequences = max_bytes // 2, max(max_sequences // 2, 1)
        self.generation = 0
        self._n_sequences = 0
        self._newer = _native.SuffixTree(depth, self._half_bytes)
        self._older: _native.SuffixTree | None = None

    def begin(self) -> int:
        if self._n_sequences >= self._half_sequences:
            self._turn()
        self._n_sequences += 1
        return self._newer.begin()

    def extend(self, text: int, tokens: "array[int]") -> bool:
        """Return whether they found room; if not, the halves have been turned, and `text` is none any more."""
        if self._newer.extend(text, tokens):
            return True
        self._turn()
        return False

    def _turn(self) -> None:
        self._older, self._newer = self._newer, _native.SuffixTree(self._depth, self._half_bytes)
        self.generation += 1
        self._n_sequences = 0

    def halves(self) -> list[_native.SuffixTree]:
        return [self._newer] if self._older is None else [self._newer, self._older]

    def check(self) -> None:
        for tree in self.halves():
            # Memory grows by doubling, so the last token may take as much as all before.
            assert tree.n_bytes <= 3 * max(self._half_bytes, 1 << 12), f"suffix: a half of {tree.n_bytes} bytes"


class SuffixSequence:
    """One sequence's tree, and its part of the history."""

    def __init__(
        self, drafter: SuffixDrafter, tree: _native.SuffixTree, prompt_ids: Sequence[int], history: _History | None
    ) -> None:
        self._drafter, self._tree, self._history = drafter, tree, history
        self._text = tree.begin()
        self._recent = array("i", prompt_ids)
        tree.extend(self._text, self._recent)
        self._recent = self._recent[-drafter.depth :]
        self._generation = -1
        self._shared_text = -1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens."""
        tokens = array("i", token_ids)
        self._tree.extend(self._text, tokens)
        self._recent = (self._recent + tokens)[-self._drafter.depth :]
        history = self._history
        if history is not None:
            if self._generation != history.generation:
                self._begin_shared(history)
            if not history.extend(self._shared_text, tokens):
                self._begin_shared(history)
                history.extend(self._shared_text, tokens)

    def _begin_shared(self, history: _History) -> None:
        self._shared_text = history.begin()
        self._generation = history.generation

    def propose(self, n_max: int) -> Proposal | None:
        """Give what followed most often, from the sequence itself unless the history promises more."""
        drafter = self._drafter
        best = self._tree.propose(self._recent, n_max, drafter.factor, drafter.min_probability)
        if self._history is not None:
            for half in self._history.halves():
                found = half.propose(self._recent, n_max, drafter.factor, drafter.min_probability)
                if found[3] > best[3]:
                    best = found
        token_ids, probabilities, n_matched, _ = best
        return Proposal(token_ids, probabilities, n_matched) if token_ids else None

    def end(self) -> None:
        """Forget the sequence; the history keeps what it answered."""
        self._tree = _native.SuffixTree(2, 0)
        self._text = self._tree.begin()
