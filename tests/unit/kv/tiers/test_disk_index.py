"""The index of a disk tier: who goes when room is needed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.kv.tiers.disk_index import DiskIndex, Found, read_hints
from tiercel.testing.clock import VirtualClock

CHAINS = 5


def held(index, chain):
    return [depth for depth in range(12) if (chain, depth) in index]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, CHAINS - 1), st.integers(1, 12), st.sampled_from(["store", "touch", "room"])),
        max_size=60,
    )
)
def test_no_object_outlives_the_one_before_it_in_its_chain(history):
    """As far as the owner touches the whole prefix that it uses, and stores chains from their heads on."""
    index = DiskIndex(400)
    for chain, n, what in history:
        if what == "touch":
            index.use([(chain, depth) for depth in range(n)])
        elif what == "store":
            tick = index.advance()
            known = len(held(index, chain))
            index.use([(chain, depth) for depth in range(known)])
            for depth in range(known, max(n, known)):
                index.make_room(10, {(chain, d) for d in range(depth)})
                index.add((chain, depth), Found(10, depth), tick=tick)
        else:
            assert index.make_room(10 * n) is not None
            assert index.used_bytes + 10 * n <= 400
        index.check()
        assert index.used_bytes <= 400
        for c in range(CHAINS):
            assert held(index, c) == list(range(len(held(index, c)))), (c, what)


def test_what_is_used_more_outlives_what_is_used_less():
    index = DiskIndex(100)
    for key in (b"a", b"b", b"c"):
        index.add(key, Found(30, 0))
    index.use([b"a"])
    index.use([b"c"])
    assert index.make_room(30) == [b"b"]


def test_a_use_long_ago_counts_less_than_one_just_now():
    index = DiskIndex(100)
    index.add(b"old", Found(40, 0))
    index.add(b"new", Found(40, 0))
    for _ in range(3):
        index.use([b"old"])
    for _ in range(5000):
        index.advance()
    index.use([b"new"])
    assert index.make_room(40) == [b"old"]


def test_what_must_stay_is_not_dropped_and_nothing_else_is_then():
    index = DiskIndex(100)
    index.add(b"a", Found(60, 0))
    index.add(b"b", Found(30, 5))
    assert index.make_room(50, {b"a"}) is None
    assert len(index) == 2
    assert index.make_room(101) is None
    assert index.make_room(40, {b"a"}) == [b"b"]


def test_hints_come_back_as_they_were_written():
    index = DiskIndex(100)
    index.add(bytes(32), Found(30, 2))
    index.add(b"\1" * 32, Found(40, 0))
    index.use([bytes(32)])
    hints = read_hints(index.dump("x"), "x")
    assert {k: (h.n_bytes, h.depth, h.n_uses, h.age) for k, h in hints.items()} == {
        bytes(32): (30, 2, 1, 0),
        b"\1" * 32: (40, 0, 0, 1),
    }
    again = DiskIndex(100)
    again.merge({bytes(32): Found(30, 2), b"\2" * 32: Found(10, 1)}, hints)
    again.check()
    assert (len(again), again.used_bytes) == (2, 40)
    assert again.make_room(61) == [b"\2" * 32]


@pytest.mark.parametrize("data", [None, b"", b"1234", b"\0" * 50])
def test_hints_that_cannot_be_read_are_none(data):
    assert read_hints(data, "x") == {}


def test_hints_of_another_identity_or_with_a_changed_byte_are_none():
    index = DiskIndex(100)
    index.add(bytes(32), Found(30, 2))
    data = index.dump("x")
    assert read_hints(data, "y") == {}
    for i in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[i // 8] ^= 1 << i % 8
        assert read_hints(bytes(damaged), "x") == {}


def test_what_has_expired_goes_first_and_is_not_found():
    clock = VirtualClock(1000.0)
    index = DiskIndex(100, clock)
    index.add(b"short", Found(30, 0, expires_s=index.expiry(10.5)), n_uses=9)
    index.add(b"pinned", Found(30, 0, is_pinned=True, expires_s=index.expiry(20)))
    index.add(b"plain", Found(30, 5))
    clock.advance(10.5)
    assert b"short" in index, "an end is a whole second, and not before its time"
    clock.advance(0.5)
    assert b"short" not in index
    assert (len(index), index.used_bytes) == (3, 90)
    assert index.make_room(20) == [b"short"]
    index.add(b"short", Found(30, 0, expires_s=index.expiry(1)))
    clock.advance(9.0)
    assert index.drop_expired() == [b"short"]
    index.check()
    assert b"pinned" in index, "only its pin has ended"
    assert (len(index), index.used_bytes) == (2, 60)


def test_what_is_pinned_goes_when_nothing_else_is_left():
    index = DiskIndex(100)
    index.add(b"pinned", Found(40, 9, is_pinned=True))
    index.add(b"plain", Found(40, 0), n_uses=100)
    assert index.make_room(40) == [b"plain"]
    assert index.make_room(90) == [b"pinned"]


@pytest.mark.parametrize(
    ("first_s", "then_s", "end_s"),
    [(10, 20, 1020), (20, 10, 1020), (None, 10, None), (10, None, None), (None, None, None)],
)
@pytest.mark.parametrize("is_pinned", [True, False])
def test_storing_again_keeps_the_later_end(first_s, then_s, end_s, is_pinned):
    index = DiskIndex(100, VirtualClock(1000.0))
    index.add(b"a", Found(10, 0, is_pinned, index.expiry(first_s)))
    index.renew(b"a", is_pinned=is_pinned, expires_s=index.expiry(then_s))
    hints = read_hints(index.dump("x"), "x")
    assert [(h.is_pinned, h.expires_s) for h in hints.values()] == [(is_pinned, end_s)]


@pytest.mark.parametrize(
    ("first", "then", "end"),
    [
        ((True, 10), (False, 20), (True, 1010)),
        ((True, None), (False, 20), (True, None)),
        ((False, None), (True, 20), (True, 1020)),
        ((False, 10), (True, None), (True, None)),
    ],
)
def test_a_pin_counts_before_none_and_ends_at_its_own_time(first, then, end):
    index = DiskIndex(100, VirtualClock(1000.0))
    index.add(b"a", Found(10, 0, first[0], index.expiry(first[1])))
    index.renew(b"a", is_pinned=then[0], expires_s=index.expiry(then[1]))
    hints = read_hints(index.dump("x"), "x")
    assert [(h.is_pinned, h.expires_s) for h in hints.values()] == [end]


def test_what_was_pinned_goes_like_others_once_its_pin_has_ended():
    clock = VirtualClock(1000.0)
    index = DiskIndex(100, clock)
    index.add(b"pinned", Found(40, 9, is_pinned=True, expires_s=index.expiry(20)))
    index.add(b"plain", Found(40, 0), n_uses=100)
    clock.advance(20.0)
    assert b"pinned" in index
    assert index.make_room(40) == [b"pinned"]
