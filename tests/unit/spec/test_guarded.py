"""A drafter on a thread of its own: late answers, none, and those of one that throws. Times are the test's."""

import threading

import pytest

from tiercel.spec.drafters.guarded import DrafterStalled, GuardedDrafter
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
        pass


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
    drafter.do(done.set)
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
    with pytest.raises(ZeroDivisionError):
        sequence.propose(4)
    with pytest.raises(ZeroDivisionError):
        sequence.extend([1])
    sequence.end()
    other.extend([1])
    drafter.check()
    drafter.close()
