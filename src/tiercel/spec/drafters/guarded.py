"""A drafter from outside the tree, on a thread of its own, so that one that stalls or throws harms nobody.

What the engine's thread calls only puts work into a queue; the proposals of a round are waited for together, once, as
long as it takes to be of use, and no longer. One that comes later still helps: what has come meanwhile is taken off its
front, if it is as proposed. A drafter that has left work undone for `stalls_s`, be it in one call or because it is slow
in each, raises, as one that threw does; then the engine goes on without it.

Plain values cross between the threads: a proposal is copied, and looked at, before the drafter's thread gives it away
(`Proposal.plain`), and whatever is thrown is raised as an `Exception`. The inner drafter is called on its own thread
only. What goes wrong when nobody asks any more, in an `end` as a rule, is kept for `take_errors`.

Invariants: at most one proposal of a sequence is being waited for; each sequence that the inner drafter began it ends,
once; the thread lives until it is closed (`check`).
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tiercel.spec.drafters.interface import Drafter, Proposal, SequenceDrafter

_WAITS_S = 0.002  # about a step of a small model: longer, and drafting costs more than it can bring
_STALLS_S = 2.0
_SPARES_S = 0.05  # what the engine's thread leaves the drafter's before it gives it up, should the process have slept
_CLOSES_S = 0.5  # what the engine's end may wait for, so that a process does not go before its plug-in has closed


class DrafterStalled(RuntimeError):
    """It has not answered in time."""


class DrafterFailed(RuntimeError):
    """It threw; this says what, in a text made on its own thread."""


class GuardedDrafter:
    """See the module."""

    def __init__(
        self,
        inner: Drafter,
        *,
        waits_s: float = _WAITS_S,
        stalls_s: float = _STALLS_S,
        spares_s: float = _SPARES_S,
        closes_s: float = _CLOSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.wake: Callable[[], None] | None = None  # called on the drafter's thread when there are errors to take
        self.is_closing = False
        self._waits_s = waits_s
        self._stalls_s = stalls_s
        self._spares_s = spares_s
        self._closes_s = closes_s
        self._clock = clock
        self._until_s = 0.0  # how long this round waits for proposals
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._spared_s = -math.inf  # when it was spared last
        self._put_s: deque[float] = deque()  # when each piece of work was put that is not done, the oldest first
        self._errors: deque[Exception] = deque()
        self._thread = threading.Thread(target=self._run, name="tiercel-drafter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            self._put_s.popleft()
        for call in ("check", "close"):
            try:
                getattr(self.inner, call)()
            except BaseException as error:  # noqa: BLE001  a thread's boundary
                self.keep(_told(error))

    def put(self, work: Callable[[], None]) -> None:
        """Have `work`, which does not throw, done on the drafter's thread, behind what is there."""
        self._put_s.append(self._clock())
        self._work.put(work)

    def stalled(self) -> DrafterStalled | None:
        """Say so if what it was given takes too long.

        A process that was stopped finds all its work old: once in a while it is given a moment to do it.
        """
        if self._oldest_s() > self._stalls_s and self._clock() - self._spared_s > self._stalls_s:
            self._spared_s = self._clock()
            is_done = threading.Event()
            self.put(is_done.set)
            is_done.wait(self._spares_s)
        took_s = self._oldest_s()
        if took_s <= self._stalls_s:
            return None
        return DrafterStalled(f"drafter: no answer for {took_s:.1f} s; {self._stalls_s} are allowed")

    def _oldest_s(self) -> float:
        """How old the oldest work is that is not done."""
        try:
            return self._clock() - self._put_s[0]
        except IndexError:
            return 0.0

    def begin(self, prompt_ids: Sequence[int], *, shares: bool) -> "GuardedSequence":
        """Begin a sequence.

        Raises: DrafterStalled: it would not come to that.
        """
        stalled = self.stalled()
        if stalled is not None:
            raise stalled
        return GuardedSequence(self, list(prompt_ids), shares=shares)

    def ask_all(self, sequences: "Iterable[GuardedSequence]", n_max: int) -> None:
        """Begin a round: ask for the proposals of all these, which are then waited for until one moment."""
        for sequence in sequences:
            sequence.ask(n_max)
        self._until_s = self._clock() + self._waits_s

    @property
    def left_s(self) -> float:
        """How long this round still waits."""
        return max(self._until_s - self._clock(), 0.0)

    def keep(self, error: Exception) -> None:
        """Keep what no call will raise. On the drafter's thread."""
        self._errors.append(error)
        if self.wake is not None:
            self.wake()

    def take_errors(self) -> list[Exception]:
        """Give, once, what went wrong and was raised to nobody: one error for each sequence at most."""
        return [self._errors.popleft() for _ in range(len(self._errors))]

    def close(self) -> None:
        """Have the inner drafter checked and closed when it has done what is there.

        Waits for that a moment, and not at all for one that is late: it may never come.
        """
        self.is_closing = True
        is_late = self.stalled() is not None
        self._work.put(None)
        if not is_late:
            self._thread.join(self._closes_s)

    def check(self) -> None:
        """Raise AssertionError when the thread is gone."""
        assert self._thread.is_alive() or not self._put_s, "drafter: its thread has ended and work is left"


class GuardedSequence:
    """One sequence, on the engine's thread."""

    def __init__(self, drafter: GuardedDrafter, prompt_ids: list[int], *, shares: bool) -> None:
        self._drafter = drafter
        self._inner: SequenceDrafter | None = None  # of the drafter's thread
        self._error: Exception | None = None  # after which nothing but its end is done
        self._is_raised = False
        self._is_ended = False
        self._since: list[int] = []  # tokens that came since the proposal was asked for
        self._is_asked = self._is_new = False
        self._answered = threading.Event()
        self._answer: Proposal | None = None

        def work() -> None:
            self._inner = drafter.inner.begin(prompt_ids, shares=shares)

        self._put(work)

    def _put(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._error is not None:
                return
            try:
                work()
            except BaseException as error:  # noqa: BLE001  a thread's boundary: raised to whoever asks next
                self._error = _told(error)
                self._answered.set()

        self._drafter.put(guarded)

    def _raise_if_failed(self) -> None:
        if self._error is None:
            self._error = self._drafter.stalled()
        if self._error is not None:
            self._is_raised = True
            raise self._error

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens."""
        self._raise_if_failed()
        tokens = list(token_ids)
        self._since += tokens

        def work() -> None:
            assert self._inner is not None
            self._inner.extend(tokens)

        self._put(work)

    def ask(self, n_max: int) -> None:
        """Ask for a proposal, unless one is being waited for."""
        if self._is_asked:
            return
        self._is_asked, self._is_new, self._since = True, True, []
        self._answered.clear()

        def work() -> None:
            assert self._inner is not None
            if self._is_ended or self._drafter.is_closing:
                return
            answer = self._inner.propose(n_max)
            self._answer = None if answer is None else Proposal.plain(answer, n_max)
            self._answered.set()

        self._put(work)

    def propose(self, n_max: int) -> Proposal | None:
        """Give the newest answer, as far as it still holds; it may be one to an older question."""
        if not self._is_asked:
            self._drafter.ask_all([self], n_max)
        if self._is_new:
            self._is_new = False
            self._answered.wait(self._drafter.left_s)
        if self._error is not None or not self._answered.is_set():
            self._raise_if_failed()
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

    def end(self) -> None:
        """Forget the sequence; what is still asked of it is not answered."""
        self._is_ended = True

        def work() -> None:
            error = self._error
            if self._inner is not None:
                try:
                    self._inner.end()
                except BaseException as thrown:  # noqa: BLE001  a thread's boundary
                    error = error or _told(thrown)
            if error is not None and not self._is_raised:
                self._drafter.keep(error)

        self._drafter.put(work)


def _told(error: BaseException) -> Exception:
    """Give what may be raised and printed on any thread, and ends none: no object of a drafter's, nor `SystemExit`."""
    try:
        text = repr(error)
    except BaseException as worse:  # noqa: BLE001  it is a drafter's own, too
        text = f"{type(error).__name__}, whose text cannot be had ({type(worse).__name__})"
    return DrafterFailed(text)
