"""A drafter on a thread of its own: late answers, none, and those of one that throws. Times are the test's."""

import sys
import threading

import pytest

from tiercel.spec.drafters.guarded import DrafterFailed, DrafterStalled, GuardedDrafter
from tiercel.spec.drafters.interface import Proposal

LONG_S = 60.0  # what is waited for in a test that works


class Inner:
    """Proposes 1, 2, 3, ... when it is let."""

    def __init__(self):
        self.may_answer, self.is_asked = threading.Event(), threading.Event()
        self.seen = []

    def begin(self, prompt_ids, *, shares):
        self.seen.append(("begin", tuple(prompt_ids), shares))
        return self

    def extend(self, token_ids):
        self.seen.append(("extend", tuple(token_ids)))

    def propose(self, n_max):
        self.is_asked.set()
        self.may_answer.wait()
        return Proposal(list(range(1, n_max + 1)), [0.9**k for k in range(1, n_max + 1)], 3)

    def end(self):
        self.seen.append(("end",))

    def check(self):
        self.seen.append(("check",))

    def close(self):
        self.seen.append(("close",))


@pytest.fixture
def inner():
    one = Inner()
    yield one
    one.may_answer.set()


def guarded(inner, now=None, **options):
    now = now if now is not None else [0.0]
    return GuardedDrafter(inner, clock=lambda: now[0], **options)


def flush(drafter):
    done = threading.Event()
    drafter.put(done.set)
    assert done.wait(LONG_S)


def test_what_is_told_arrives_in_order_and_is_answered(inner):
    drafter = guarded(inner, waits_s=LONG_S)
    inner.may_answer.set()
    sequence = drafter.begin([7, 8], shares=False)
    sequence.extend([9])
    assert sequence.propose(3).token_ids == [1, 2, 3]
    sequence.end()
    flush(drafter)
    assert inner.seen == [("begin", (7, 8), False), ("extend", (9,)), ("end",)]
    drafter.check()
    drafter.close()
    assert inner.seen[3:] == [("check",), ("close",)]
    assert not drafter.take_errors()


@pytest.mark.parametrize(("came", "left"), [([1], [2, 3, 4]), ([1, 2], [3, 4]), ([1, 9], None), ([1, 2, 3, 4], None)])
def test_a_late_answer_is_what_of_it_has_not_come_yet(inner, came, left):
    drafter = guarded(inner, waits_s=0.0)
    sequence = drafter.begin([7], shares=True)
    assert sequence.propose(4) is None
    sequence.extend(came)
    inner.may_answer.set()
    flush(drafter)
    late = sequence.propose(4)
    assert (None if late is None else late.token_ids) == left
    if left:
        assert late.probabilities == pytest.approx([0.9 ** (k + 1) for k in range(len(left))])
    drafter.close()


def test_one_that_does_not_answer_raises_and_so_does_whoever_comes_next(inner):
    now = [0.0]
    drafter = guarded(inner, now, waits_s=0.0, stalls_s=2.0)
    sequence = drafter.begin([7], shares=True)
    flush(drafter)
    assert sequence.propose(4) is None
    assert inner.is_asked.wait(LONG_S)
    now[0] = 1.9
    assert sequence.propose(4) is None
    now[0] = 2.1
    with pytest.raises(DrafterStalled, match=r"2\.1 s"):
        sequence.propose(4)
    with pytest.raises(DrafterStalled):
        drafter.begin([1], shares=True)
    drafter.close()


def test_what_it_throws_is_raised_to_who_asks(inner):
    inner.propose = lambda n_max: 1 / 0
    drafter = guarded(inner, waits_s=LONG_S)
    sequence, other = drafter.begin([7], shares=True), drafter.begin([8], shares=True)
    with pytest.raises(DrafterFailed, match="ZeroDivisionError"):
        sequence.propose(4)
    with pytest.raises(DrafterFailed, match="ZeroDivisionError"):
        sequence.extend([1])
    sequence.end()
    other.extend([1])
    drafter.check()
    drafter.close()


def test_one_that_leaves_the_process_is_one_that_failed(inner):
    inner.propose = lambda n_max: sys.exit(3)
    drafter = guarded(inner, waits_s=LONG_S)
    sequence = drafter.begin([7], shares=True)
    with pytest.raises(DrafterFailed, match=r"SystemExit\(3\)"):
        sequence.propose(4)
    sequence.end()
    flush(drafter)
    assert inner.seen[-1] == ("end",)
    assert not drafter.take_errors()  # it was raised
    drafter.check()
    drafter.close()


def test_one_whose_errors_leave_the_process_when_they_are_printed_is_one_that_failed(inner):
    class Sly(Exception):
        def __repr__(self):
            sys.exit(4)

        __str__ = __repr__

    def be_sly(n_max):
        raise Sly

    inner.propose = be_sly
    drafter = guarded(inner, waits_s=LONG_S)
    sequence = drafter.begin([7], shares=True)
    with pytest.raises(DrafterFailed, match=r"Sly.*SystemExit") as found:
        sequence.propose(4)
    assert found.value.__cause__ is found.value.__context__ is None
    sequence.end()
    flush(drafter)
    drafter.check()
    drafter.close()


def test_one_that_is_always_busy_and_never_for_long_is_given_up(inner):
    """It is late by the oldest of what it was given, not by the call it is in."""
    now, may_go_on, is_in = [0.0], threading.Semaphore(0), threading.Semaphore(0)

    def extend(token_ids):
        is_in.release()
        assert may_go_on.acquire(timeout=LONG_S)

    inner.extend = extend
    drafter = guarded(inner, now, waits_s=0.0, stalls_s=2.0)
    sequence = drafter.begin([7], shares=True)
    for token in range(4):
        sequence.extend([token])
    for now_s in (0.9, 1.8):  # when it begins the next one
        assert is_in.acquire(timeout=LONG_S)
        now[0] = now_s
        may_go_on.release()
        sequence.extend([9])
    assert is_in.acquire(timeout=LONG_S)
    now[0] = 2.1
    with pytest.raises(DrafterStalled):
        sequence.extend([9])
    sequence.end()
    for _ in range(9):
        may_go_on.release()
    flush(drafter)
    assert inner.seen[-1] == ("end",)
    other = drafter.begin([8], shares=True)  # it has caught up
    other.extend([1])
    drafter.close()


def test_one_that_slept_as_the_process_did_is_not_given_up(inner):
    """Its work is old when both threads go on, and is done in a moment."""
    now = [0.0]

    def clock():
        if now[0] > 2.0:
            inner.may_answer.set()
        return now[0]

    drafter = GuardedDrafter(inner, waits_s=0.0, stalls_s=2.0, spares_s=LONG_S, clock=clock)
    sequence = drafter.begin([7], shares=True)
    assert sequence.propose(4) is None
    now[0] = 100.0
    sequence.extend([1])
    assert sequence.propose(4).token_ids == [2, 3, 4]
    drafter.close()


def test_nothing_is_asked_twice_and_nothing_of_a_sequence_that_has_ended(inner):
    drafter = guarded(inner, waits_s=0.0)
    first, second = drafter.begin([7], shares=True), drafter.begin([8], shares=True)
    for _ in range(50):
        assert first.propose(4) is None
        assert second.propose(4) is None
    assert inner.is_asked.wait(LONG_S)
    assert len(drafter._put_s) <= 4
    second.end()
    inner.is_asked.clear()
    inner.may_answer.set()
    flush(drafter)
    assert not inner.is_asked.is_set()
    assert first.propose(4).token_ids == [1, 2, 3, 4]
    drafter.close()


def test_all_sequences_of_a_round_are_waited_for_until_one_moment(inner):
    """The first takes all the time there is; for the second, which never answers, there is none left."""
    now, is_waited = [0.0], []
    drafter = guarded(inner, now, waits_s=LONG_S, stalls_s=1e9)
    first, second = drafter.begin([7], shares=True), drafter.begin([8], shares=True)
    wait, second._answered.wait = second._answered.wait, lambda s: is_waited.append(s) or wait(s)
    propose = inner.propose

    def late(n_max):
        now[0] += LONG_S + 1.0
        inner.propose = propose
        return Proposal([1], [0.5])

    inner.propose = late
    drafter.ask_all([first, second], 4)
    assert first.propose(4).token_ids == [1]
    assert second.propose(4) is None
    assert is_waited == [0.0]
    drafter.close()


def test_close_does_not_wait_for_one_that_is_late(inner, monkeypatch):
    now = [0.0]
    drafter = guarded(inner, now, waits_s=0.0, stalls_s=2.0)
    drafter.begin([7], shares=True).propose(4)
    assert inner.is_asked.wait(LONG_S)
    now[0] = 3.0
    monkeypatch.setattr(drafter._thread, "join", lambda *_: pytest.fail("it waits"))
    drafter.close()
    monkeypatch.undo()
    inner.may_answer.set()
    drafter._thread.join(LONG_S)
    assert inner.seen[-1] == ("close",)


def test_what_goes_wrong_when_nobody_asks_is_kept_once_and_told(inner):
    told = []
    for name in ("end", "check", "close"):
        setattr(inner, name, throw)
    drafter = guarded(inner, waits_s=0.0)
    drafter.wake = lambda: told.append(True)
    for _ in range(2):
        drafter.begin([7], shares=True).end()
    flush(drafter)
    assert ["ZeroDivisionError" in str(error) for error in drafter.take_errors()] == [True] * 2
    assert len(told) == 2
    drafter.close()
    assert len(drafter.take_errors()) == 2


def throw():
    raise ZeroDivisionError


@pytest.mark.parametrize("is_list", [True, False])
def test_a_proposal_is_copied_before_the_drafter_may_touch_it_again(inner, is_list):
    ids = [5, 6, 7, 8] if is_list else (5, 6, 7, 8)
    inner.propose = lambda n_max: Proposal(ids, (1, 1, 0.5, 0.25))
    drafter = guarded(inner, waits_s=LONG_S)
    found = drafter.begin([7], shares=True).propose(3)
    if is_list:
        ids[:] = [-1] * 4
    assert found == Proposal([5, 6, 7], [1.0, 1.0, 0.5])
    assert {type(p) for p in found.probabilities} == {float}
    drafter.close()
