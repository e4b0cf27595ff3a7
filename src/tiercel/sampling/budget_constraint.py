"""One sequence's bounded reasoning as masks: anything until its budget is used up, then one token of its end at a time.

Knows no text: `text.thinking_budget` counts and says which token. A form of the request's is kept to as well, and goes
before: a token that it forbids is not forced, as its text has no reasoning to end there.

Owner: the engine's thread. Like a form's constraint, a preempted sequence keeps it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercel.sampling.constraint import Constraint, MaskRow
    from tiercel.text.thinking_budget import ThinkingBudget

_ALL_BITS = 0xFFFFFFFF


class BudgetConstraint:
    """One sequence's. `inner` is its form."""

    def __init__(self, budget: "ThinkingBudget", inner: "Constraint | None" = None) -> None:
        self._budget = budget
        self._inner = inner

    def copy(self) -> "BudgetConstraint":
        """Give another that goes on from here by itself."""
        return BudgetConstraint(self._budget.copy(), None if self._inner is None else self._inner.copy())

    @property
    def may_end(self) -> bool:
        """Whether the text is one of the form as it is; never so without a form."""
        return self._inner is not None and self._inner.may_end

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._inner is not None and self._inner.is_complete

    @property
    def ends_with_text(self) -> bool:
        """Whether it is complete, and the last token is part of its text."""
        return self._inner is not None and self._inner.ends_with_text

    def fill(self, row: "MaskRow") -> None:
        """Write which tokens may come next, to all of `row`.

        Raises: RequestFailed: the form takes too much work at this place.
        """
        if self._inner is None:
            row.words.fill(_ALL_BITS)  # bits beyond the vocabulary are never read
        else:
            self._inner.fill(row)
        token_id = self._budget.forced_id
        if token_id is None:
            return
        bit = 1 << token_id % 32
        if row.each[token_id // 32] & bit:
            row.words.fill(0)
            row.each[token_id // 32] = bit

    def accept(self, token_id: int) -> None:
        """Take the token that came.

        Raises: RequestFailed: it is none that the form allows.
        """
        self._budget.push(token_id)
        if self._inner is not None:
            self._inner.accept(token_id)

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        self._budget.check()
        if self._inner is not None:
            self._inner.check()
