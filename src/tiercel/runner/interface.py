"""The contract between the engine and whatever computes steps. The native runner, the reference runner and the fakes in
`tiercel.testing` all meet it; `tiercel.testing.runner_kit` tests them.

Thread rule: all calls but `hurry` come from one thread (the engine's). `submit` returns at once; steps run one after
the other in the order of submission, so a later step may read what an earlier one writes without waiting for it.

A slot passes through: free -> `admit` -> (in any number of steps) -> `release` -> free. A slot may be released, or
admitted again, only when no submitted step that names it is still running: the engine holds it back until then.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import RunnerLimits, StepPlan, StepResult

if TYPE_CHECKING:
    import numpy as np

    from tiercel.kv.tiers.identity import ObjectGroup
    from tiercel.kv.tiers.interface import Bytes


N_STEPS_MAX = 8  # steps that may be submitted and not collected


class Runner(Protocol):
    """Computes steps over slots and pages."""

    @property
    def limits(self) -> RunnerLimits:
        """What the runner can hold."""
        ...

    def admit(
        self,
        slot: int,
        token_ids: Sequence[int],
        n_prompt_tokens: int,
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
        n_first: int | None = None,
    ) -> None:
        """Put a sequence's known tokens into a free slot.

        `token_ids` may hold generated tokens after the first `n_prompt_tokens` (a preempted sequence that returns).
        `seed` is the request's resolved seed. `stop_ids` are the ids that `min_tokens` forbids. Stop strings,
        max_tokens and n are not the runner's. `n_first` tokens come before a pair's second text; None: there is one.
        """
        ...

    def set_pages(self, slot: int, first_idx: int, page_ids: Sequence[int]) -> None:
        """Write entries `first_idx ..` of the slot's page table row. Entries already used by a submitted step never
        change.
        """
        ...

    def save_state(self, slot: int, snapshot_idx: int) -> None:
        """Copy the slot's recurrent state to a place for snapshots, as all steps submitted so far leave it.

        Ordered as `submit` is: it may return before the copy is made, and the slot may be released and used again at
        once. For models with `RunnerLimits.n_snapshots`.

        Raises: ShapeError when there is no such place.
        """
        ...

    def load_state(self, slot: int, snapshot_idx: int) -> None:
        """Copy a saved state to an admitted slot, whose next step begins where the saved one stood.

        Ordered as `submit` is, so the place may be saved into again at once.

        Raises: ShapeError when there is no such place, or nothing was saved in it.
        """
        ...

    def release(self, slot: int) -> None:
        """Make the slot free."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Queue a step. At most N_STEPS_MAX may be submitted and not collected.

        Raises: ShapeError, and nothing is queued, when the plan exceeds the limits.
        """
        ...

    def set_draft_policy(self, step_seconds: Sequence[float], chances: Sequence[float]) -> None:
        """Say what steps submitted from now on know when they choose how many of their slots' own drafts to compute:
        as many as make the most tokens a second.

        `step_seconds[i]` is what a step of i + 1 rows takes; beyond the table it goes on by the table's mean slope.
        `chances[i]` is a factor on what the drafter says of draft i; the last holds for those behind it. Of drafts,
        the likeliest to come, all before them included, are computed first. An empty `step_seconds`: all that is
        planned, as before the first call. For runners with `RunnerLimits.n_draft_max`.

        Raises: ShapeError, and nothing changes, when a time is not positive or a number is not finite.
        """
        ...

    def set_masks(self, step_id: int, masks: "np.ndarray") -> None:
        """Bring a submitted step its masks: to be called once for each step that has masked sequences, in any state.

        A step computes its logits without them and waits for them before it samples; one that never gets them never
        ends. Given as late as this, they may depend on the tokens of the step before. The array is the caller's again
        when this returns.

        Shapes: masks  uint32 [masked sequences, ceil(V / 32)], in the plan's order; bit i % 32 of word i // 32 is set
        if token i may be chosen
        """
        ...

    def wait(self, n_steps: int) -> int:
        """Wait, waking up once, until the oldest `n_steps` submitted steps have ended. Releases the GIL.

        If `hurry` is called meanwhile, or was since the last wait, until the oldest has.

        Requires: none of them lacks its masks.
        Returns: how many of them have ended.
        """
        ...

    def hurry(self) -> None:
        """Shorten a wait, see there. From any thread, before `close`."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step and return its rows. Releases the GIL while it waits.

        Raises: RequestFailed when the step could not be computed; later steps still run.
        """
        ...

    @property
    def page_group(self) -> "ObjectGroup | None":
        """What the bytes of one page mean; None: nothing of a sequence is in its pages."""
        ...

    def read_pages(self, page_ids: Sequence[int]) -> "list[Bytes]":
        """Copy the bytes of pages. They are the same whoever computed them, with the same tokens before. A copy never
        changes while anybody looks at it.

        Requires: no submitted step that was not collected writes to them.
        Cost: a copy in memory, by the calling thread.
        """
        ...

    def write_pages(self, page_ids: Sequence[int], data: "Sequence[Bytes]") -> None:
        """Fill pages with bytes that `read_pages` gave, perhaps in another process. Later steps read them.

        Requires: no submitted step that was not collected reads them or writes to them, the rows of sequences that
        ended meanwhile included.
        Raises: ShapeError, and nothing is written, when a length is not a page's.
        """
        ...

    @property
    def state_group(self) -> "ObjectGroup | None":
        """What the bytes of a saved state mean; None: the model has no state."""
        ...

    def read_states(self, snapshot_idxs: Sequence[int]) -> "list[Bytes]":
        """Copy what was saved in places. The same tokens leave the same bytes, whoever computed them.

        Requires: the step behind which each was saved was collected.
        """
        ...

    def write_states(self, snapshot_idxs: Sequence[int], n_tokens: Sequence[int], data: "Sequence[Bytes]") -> None:
        """Fill places with what `read_states` gave, perhaps in another process; each state stands after `n_tokens`.

        Requires: a step that was submitted after the last `save_state` and `load_state` of each was collected, or the
        step before it was.
        Raises: ShapeError, and nothing is written, when a length is not a state's or a place is none.
        """
        ...

    def close(self) -> None:
        """Stop the threads and give back memory. Idempotent."""
        ...
