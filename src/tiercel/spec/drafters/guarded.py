"""A drafter from outside the tree, on a thread of its own, so that one that stalls or throws harms nobody.

What the engine's thread calls only puts work into a queue; a proposal is waited for once, as long as it takes to be of
use, and no longer. One that comes later still helps: what has come meanwhile is taken off its front, if it is as
proposed. A drafter that has not answered for `stalls_s` raises, as one that threw does; then the engine goes on
without it.

Plain values cross between the threads; the inner drafter is called on its own thread only.

Invariant (`check`): at most one proposal of a sequence is being waited for.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from tiercel.spec.drafters.interface import Drafter, Proposal, SequenceDrafter

_WAITS_S = 0.002  # about a step of a small model: longer, and drafting costs more than it can bring
_STALLS_S = 2.0


class DrafterStalled(RuntimeError):
    """It has not answered in time."""


class GuardedDrafter:
    """See the module."""

    def __init__(
        self,
        inner: Drafter,
        *,
        waits_s: float = _WAITS_S,
        stalls_s: float = _STALLS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.waits_s = waits_s
        self._stalls_s = stalls_s
        self._clock = clock
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None  # written by the drafter's thread
        self._thread = threading.Thread(target=self._run, name="tiercel-drafter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._busy_since = self._clock()
            work()
            self._busy_since = None

    def do(self, work: Callable[[], None]) -> None:
        """Have `work`, which does not throw, done on the drafter's thread, behind what is there.

        Raises: DrafterStalled: what is being done takes too long.
        """
        since = self._busy_since
        if since is not None and self._clock() - since > self._stalls_s:
            raise DrafterStalled(f"drafter: no answer for {self._clock() - since:.1f} s; {self._stalls_s} are allowed")
        self._work.put(work)

    def begin(self, prompt_ids: Sequence[int], *, shares: bool) -> "GuardedSequence":
        """Begin a sequence."""
        return GuardedSequence(self, list(prompt_ids), shares=shares)

    def close(self) -> None:
        """Let the thread end when it has done what is there; it is not waited for, as it may never."""
        self._work.put(None)

    def check(self) -> None:
        """Raise AssertionError when the thread is gone."""
        assert self._thread.is_alive() or self._work.empty(), "drafter: its thread has ended and work is left"


class GuardedSequence:
    """One sequence, on the engine's thread."""

    def __init__(self, drafter: GuardedDrafter, prompt_ids: list[int], *, shares: bool) -> None:
        self._drafter = drafter
        self._inner: SequenceDrafter | None = None  # of the drafter's thread
        self._error: BaseException | None = None
        self._since: list[int] = []  # tokens that came since the proposal was asked for
        self._is_asked = False
        self._answered = threading.Event()
        self._answer: Proposal | None = None

        def work() -> None:
            self._inner = drafter.inner.begin(prompt_ids, shares=shares)

        self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._error is None:
                try:
                    work()
                except BaseException as error:  # noqa: BLE001  a thread's boundary: raised to whoever asks next
                    self._error = error
                    self._answered.set()

        if self._error is not None:
            raise self._error
        self._drafter.do(guarded)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens."""
        tokens = list(token_ids)
        self._since += tokens

        def work() -> None:
            assert self._inner is not None
            self._inner.extend(tokens)

        self._do(work)

    def propose(self, n_max: int) -> Proposal | None:
        """Give the newest answer, as far as it still holds, and ask for the next."""
        if not self._is_asked:
            self._ask(n_max)
            self._answered.wait(self._drafter.waits_s)
        if self._error is not None:
            raise self._error
        if not self._answered.is_set():
            self._drafter.do(_nothing)  # which tells a stall
            return None
        answer, since = self._answer, self._since
        self._is_asked = False
        if answer is None or not since:
            return answer
        n = len(since)
        if len(answer.token_ids) <= n or answer.token_ids[:n] != since:
            return None
        before = answer.probabilities[n - 1]
        return Proposal(answer.token_ids[n:], [p / before for p in answer.probabilities[n:]], answer.n_matched)

    def _ask(self, n_max: int) -> None:
        self._is_asked, self._since = True, []
        self._answered.clear()

        def work() -> None:
            assert self._inner is not None
            self._answer = self._inner.propose(n_max)
            self._answered.set()

        self._do(work)

    def end(self) -> None:
        """Forget the sequence."""

        def work() -> None:
            if self._inner is not None:
                self._inner.end()

        if self._error is None:
            self._do(work)


def _nothing() -> None:
    pass
