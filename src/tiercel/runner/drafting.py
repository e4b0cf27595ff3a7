"""What a native runner drafts with: programs over the pages of its target, and how drafts are picked from their logits.

The drafter's keys and values are layers of the pool behind the target's, at the same positions of the same pages, so
whatever is done with a page is done with them too. Knows no engine and no checkpoint. What happens in a step stands in
`native/include/tiercel/drafting.hpp`.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from tiercel import _native
from tiercel.base.errors import ShapeError
from tiercel.ops import lowered as ops
from tiercel.ops.dims import Bounds
from tiercel.ops.program import KvLayer


class Drafting(msgspec.Struct, frozen=True):
    """A drafter that is a model, ready to run beside its target; see `models.drafters.interface` for the two kinds.

    A `block`'s logits rows are those from `first_logits_row` on; it has `n_block_rows`, and fewer only where the slot's
    pages end. A `chain` takes what the target's program gives out as `hidden`; it may have several programs, those of
    its first drafts' modules, of which each takes what the one before gives out. `draws`: how drafts of a sequence that
    samples are picked: with the noise that it samples with, apart from it, or the likeliest.
    """

    programs: tuple[ops.Lowered, ...]
    kind: Literal["block", "chain"]
    n_draft_max: int
    head: _native.DraftHead
    n_block_rows: int = 1
    first_logits_row: int = 0
    mask_token_id: int = -1
    draws: Literal["coupled", "apart", "likeliest"] = "coupled"

    @property
    def reach_tokens(self) -> int:
        """Places behind a sequence's last token that a draft pass writes to."""
        return self.n_block_rows - 1 if self.kind == "block" else self.n_draft_max

    @property
    def n_unsettled_tokens(self) -> int:
        """Tokens that must be known behind a place before what the modules keep there is final; 0: written once."""
        return len(self.programs) if len(self.programs) > 1 else 0

    def bounds(self, n_slots: int, max_step_tokens: int) -> Bounds:
        """Return how large its passes are at most."""
        if self.kind == "chain":
            # In front of a step's rows each sequence's last ones are computed again; see `drafting.hpp`.
            n_again = n_slots * (len(self.programs) - 1)
            return Bounds(max(max_step_tokens, n_slots) + n_again, n_slots, n_slots)
        return Bounds(n_slots * self.n_block_rows, n_slots, n_slots * (self.n_block_rows - self.first_logits_row))

    def check(self, target: ops.Lowered) -> None:
        """Check that it fits its target.

        Raises:
            ShapeError: it does not.
        """
        for program in self.programs:
            self._check_program(program, target)

    def _check_program(self, program: ops.Lowered, target: ops.Lowered) -> None:
        given = next((op.y.width for op in program.ops if isinstance(op, ops.Given)), 0)
        if target.is_pooling or program.state_layers:
            raise ShapeError(f"runner.drafting: {program.name} drafts for {target.name}, which takes no drafts")
        if self.kind == "block":
            n_max = self.n_block_rows - self.first_logits_row
            if not 1 <= self.n_draft_max <= n_max or self.first_logits_row < 0 or given:
                raise ShapeError(
                    f"runner.drafting: {program.name}: {self.n_draft_max} drafts in {self.n_block_rows} rows, "
                    f"from row {self.first_logits_row} on; 1 to {n_max} fit, and a block takes no rows from the target"
                )
        else:
            width = 0 if target.hidden is None else target.hidden.width
            own = 0 if program.hidden is None else program.hidden.width
            if self.n_draft_max < 1 or given == 0 or given != width or (self.n_draft_max > 1 and own != given):
                raise ShapeError(
                    f"runner.drafting: {program.name} takes rows of {given} columns and gives out {own}; "
                    f"{target.name} gives out {width}; all three must be alike, and at least one draft made"
                )


def pool_layers(program: ops.Lowered, drafting: Drafting | None) -> tuple[KvLayer, ...]:
    """Return the layers of the pages: the target's, and behind them those that only the drafter has.

    Raises:
        ShapeError: a layer of the drafter is one of the target's by its number, and another by its shape.
    """
    found = {layer.index: layer for layer in program.kv_layers}
    for layer in () if drafting is None else (layer for p in drafting.programs for layer in p.kv_layers):
        other = found.setdefault(layer.index, layer)
        if _shape_of(other) != _shape_of(layer):
            raise ShapeError(f"runner.drafting: the drafter has [{layer}] where its target has [{other}]")
    return tuple(found.values())


def _shape_of(layer: KvLayer) -> tuple[int, int, int]:
    return layer.n_kv_heads, layer.head_dim, layer.latent_values


def check_policy(step_seconds: Sequence[float], chances: Sequence[float]) -> None:
    """Check what `Runner.set_draft_policy` is given.

    Raises:
        ShapeError: a time is not positive, or a number not finite.
    """
    if not all(map(math.isfinite, (*step_seconds, *chances))) or any(s <= 0.0 for s in step_seconds):
        raise ShapeError(
            f"runner.set_draft_policy: got times {list(step_seconds)} and chances {list(chances)}; finite numbers are "
            "needed, and times above 0"
        )
