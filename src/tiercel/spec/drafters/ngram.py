"""Prompt lookup: what followed the last n tokens where they came first. Knows one sequence at a time.

The longest n of `n_min .. n_max` that came before decides. An index from each run of n tokens to the end of its first
occurrence is kept as the sequence grows: only known tokens enter it, so nothing is ever taken out.

Invariant (`check`): the index of n holds the runs of n tokens that end before the last token, each with the end of its
first occurrence.

Source: prompt lookup decoding (Saxena 2023), with vLLM's names of the limits.
"""

from collections.abc import Sequence

from tiercel.base.errors import ConfigError
from tiercel.spec.drafters.interface import Proposal


class NgramDrafter:
    """See the module. `n_min` and `n_max`: vLLM's prompt_lookup_min and prompt_lookup_max."""

    def __init__(self, *, n_min: int = 5, n_max: int = 5) -> None:
        if not 1 <= n_min <= n_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={n_min}, prompt_lookup_max={n_max}; "
                "1 <= prompt_lookup_min <= prompt_lookup_max is needed"
            )
        self._n_min, self._n_max = n_min, n_max

    def begin(self, prompt_ids: Sequence[int], *, shares: bool) -> "NgramSequence":
        """Begin a sequence; nothing is shared in any case."""
        sequence = NgramSequence(self._n_min, self._n_max)
        sequence.extend(prompt_ids)
        return sequence

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold: there is no state."""

    def close(self) -> None:
        """Give back what it holds: nothing."""


class NgramSequence:
    """One sequence's index."""

    def __init__(self, n_min: int, n_max: int) -> None:
        self._ns = range(n_max, n_min - 1, -1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # a run's own length tells the index it belongs to

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens."""
        tokens, ends = self._tokens, self._ends
        for token in token_ids:
            end = len(tokens)  # runs that end here are followed by something now
            for n in self._ns:
                if n <= end:
                    ends.setdefault(tuple(tokens[end - n : end]), end)
            tokens.append(token)

    def propose(self, n_max: int) -> Proposal | None:
        """Give what followed the longest run."""
        tokens = self._tokens
        for n in self._ns:
            end = self._ends.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if end is not None:
                drafts = tokens[end : end + n_max]
                return Proposal(drafts, [1.0] * len(drafts), n) if drafts else None
        return None

    def end(self) -> None:
        """Forget the sequence."""
        self._tokens, self._ends = [], {}

    def check(self) -> None:
        """Raise AssertionError when the module's invariant does not hold."""
        first: dict[tuple[int, ...], int] = {}
        for end in range(len(self._tokens)):
            for n in self._ns:
                if n <= end:
                    first.setdefault(tuple(self._tokens[end - n : end]), end)
        assert first == self._ends, "ngram: the index is not that of its tokens"
