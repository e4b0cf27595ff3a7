"""Finds out that a sequence only repeats itself. Depends on its output's tokens; a preempted sequence keeps it."""

from collections.abc import Sequence

from tiercel.protocol.repetition import RepetitionDetectionParams


class RepetitionWatch:
    """One sequence's. For each size of a pattern, how many of the last tokens equal the one a pattern before."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self._n_more = params.min_count - 1
        self._runs = [0] * len(self._sizes)

    def push(self, token_ids: Sequence[int], n_prompt: int) -> bool:
        """Take the newest token, the last of `token_ids`; return whether a pattern now stands there often enough."""
        last, n_output, runs = token_ids[-1], len(token_ids) - n_prompt, self._runs
        is_met = False
        for i, size in enumerate(self._sizes):
            if size >= n_output:
                break
            if token_ids[-1 - size] != last:
                runs[i] = 0
                continue
            runs[i] += 1
            is_met = is_met or runs[i] >= size * self._n_more
        return is_met
