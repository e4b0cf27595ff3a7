"""The masks of one sequence's rows in a step, draft rows included. Runs on the engine's thread."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from tiercel.engine.request import Sequence
    from tiercel.sampling.budget_constraint import BudgetConstraint
    from tiercel.sampling.constraint import Constraint, MaskRow

_ALL_BITS = 0xFFFFFFFF


def fill_masks(rows: "Rows[MaskRow]", sequence: "Sequence", foretold: tuple[int, list[int]] | None) -> None:
    """Write which tokens may come in each row of a step, of which all steps before are collected.

    The first row follows the known tokens; each further one follows a draft, as the runner will find it. A copy of the
    constraint walks over the drafts. Nobody believes rows behind a draft that may not come or ends the text, nor those
    of drafts that are not made as what came is not as foretold: they allow nothing. So if the runner took a draft for
    right that this walk does not know, the request would end here, and not go on outside of its form.

    Raises: RequestFailed: the form takes too much work at the known tokens.
    """
    constraint = sequence.constraint
    assert constraint is not None
    constraint.fill(rows[0])
    if foretold is None or len(rows) == 1:
        return
    first, tokens = foretold
    n_past = len(sequence.token_ids) - first
    drafts: list[int] = []
    if n_past >= 0 and sequence.token_ids[first:] == tokens[:n_past]:
        drafts = tokens[n_past : n_past + len(rows) - 1]
    walked = _walk(rows, drafts, constraint.copy()) if drafts else 1
    for row in rows[walked:]:
        row.words.fill(0)


def fill_with_all(rows: "Rows[MaskRow]") -> None:
    """Allow everything, for a sequence that has ended; bits beyond the vocabulary are never read."""
    for row in rows:
        row.words.fill(_ALL_BITS)


def _walk(rows: "Rows[MaskRow]", drafts: list[int], constraint: "Constraint | BudgetConstraint") -> int:
    """Fill the rows behind drafts as far as these may come; return how many rows have their masks."""
    for i, token in enumerate(drafts):
        if not rows[i].each[token // 32] >> token % 32 & 1:
            return i + 1
        try:
            constraint.accept(token)
            if constraint.is_complete:
                return i + 1
            constraint.fill(rows[i + 1])
        except Exception:  # noqa: BLE001  only this far: what a form cannot take would fail the request if it came
            rows[i + 1].words.fill(0)
            return i + 2
    return len(drafts) + 1
