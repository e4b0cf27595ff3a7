"""The snapshot store: examples of each rule, what a state is worth, then random histories against a plain model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercel.base.errors import ConfigError
from tiercel.kv.snapshots import SnapshotStore, worth


def chain(name: str, n: int = 40) -> list[bytes]:
    """Give the keys of a text's pages: texts that begin with the same letters share them."""
    return [(name + name[-1] * n)[: i + 1].encode() for i in range(n)]


def save(store, name, n_pages, n_saved=100, **more):
    snapshot = store.reserve(4 * n_pages, n_saved, **more)
    return None if snapshot is None else store.keep(snapshot, chain(name))


def found(store, name):
    return [i + 1 for i, key in enumerate(chain(name)) if store.find(key) is not None]


@pytest.mark.parametrize(("n_places", "state_bytes"), [(0, 8), (4, 0)])
def test_a_store_without_room_for_one_state_is_refused(n_places, state_bytes):
    with pytest.raises(ConfigError, match=r"kv\.snapshots"):
        SnapshotStore(n_places, state_bytes, 4)


def test_a_state_is_found_when_it_is_kept_and_not_before():
    store = SnapshotStore(2, 8, 4)
    snapshot = store.reserve(8, 8, key=chain("a")[1])
    assert store.find(chain("a")[1]) is None
    assert store.is_known(chain("a")[1])
    assert store.keep(snapshot, chain("a")) is snapshot
    assert found(store, "a") == [2]
    assert found(store, "b") == []
    store.check()


def test_a_place_that_is_given_up_is_free_again():
    store = SnapshotStore(1, 8, 4)
    store.give_up(store.reserve(8, 8))
    assert (store.n_free, store.n_reserved, store.n_saved) == (1, 0, 0)
    store.check()


def test_a_second_state_of_the_same_tokens_gives_its_place_back():
    store = SnapshotStore(2, 8, 4)
    first = save(store, "a", 2)
    assert save(store, "a", 2) is first
    assert (store.n_free, store.n_kept, store.n_saved) == (1, 1, 1)
    store.check()


def test_what_is_worth_least_gives_way():
    store = SnapshotStore(3, 8, 4)
    for name, n_pages in (("a", 9), ("b", 2), ("c", 5)):
        save(store, name, n_pages)
    assert save(store, "d", 6) is not None
    assert [found(store, name) for name in "abcd"] == [[9], [], [5], [6]]
    assert store.n_evicted == 1
    store.check()


def test_a_new_state_does_not_displace_what_is_worth_more():
    store = SnapshotStore(1, 8, 4)
    save(store, "a", 30)
    assert not store.can_reserve(8)
    assert store.reserve(8, 8) is None
    assert found(store, "a") == [30]


def test_a_pinned_state_stays():
    store = SnapshotStore(1, 8, 4)
    snapshot = save(store, "a", 1)
    store.pin(snapshot)
    assert save(store, "b", 20, 10_000) is None
    store.unpin(snapshot)
    assert save(store, "b", 20, 10_000) is not None
    store.check()


def test_a_held_state_stays_and_half_of_the_places_can_be_held():
    store = SnapshotStore(4, 8, 4)
    states = [save(store, name, 1) for name in "abcd"]
    assert [store.hold(state) for state in states] == [True, True, False, False]
    assert store.hold(states[0])
    for name in "efgh":
        save(store, name, 20, 10_000)
    assert [found(store, name) for name in "abcd"] == [[1], [1], [], []]
    for state in (states[0], states[0], states[1]):
        store.let_go(state)
    for name in "ij":
        save(store, name, 20, 10_000)
    assert found(store, "a") == found(store, "b") == []
    store.check()


def test_a_state_that_is_forgotten_while_it_is_read_keeps_its_place_until_then():
    store = SnapshotStore(1, 8, 4)
    snapshot = save(store, "a", 1)
    store.pin(snapshot)
    store.forget(chain("a")[0])
    assert found(store, "a") == []
    assert store.reserve(4, 100) is None
    store.check()
    store.unpin(snapshot)
    assert store.n_free == 1
    store.check()


def test_a_fork_becomes_the_parent_of_what_was_there_before_it():
    """Then each of them saves only what lies behind the fork."""
    store = SnapshotStore(4, 8, 4)
    deep, other = save(store, "aab", 9), save(store, "aac", 7)
    fork = save(store, "aa", 2)
    assert deep.parent is other.parent is fork
    store.check()
    store.drop(fork)
    assert deep.parent.n_tokens == other.parent.n_tokens == 0
    store.check()


def test_inside_a_chain_a_state_is_worth_less_than_at_its_end():
    store = SnapshotStore(3, 8, 4)
    for n_pages in (4, 8, 12):
        save(store, "a", n_pages)
    save(store, "b", 4)
    assert found(store, "a") == [8, 12]


def test_a_state_is_superseded_until_it_is_used_or_two_texts_go_on_from_it():
    store = SnapshotStore(4, 8, 4)
    first, second = save(store, "aa", 2), save(store, "aa", 4)
    assert store.is_superseded(first)
    assert store.is_superseded(second)
    store.pin(second)
    store.unpin(second)
    assert not store.is_superseded(second)
    save(store, "aab", 4)
    assert not store.is_superseded(first)


counts = st.integers(0, 10**6)
sizes = st.integers(1, 10**9)


@given(counts, sizes, counts, counts, st.booleans(), st.integers(1, 1000))
def test_worth_grows_with_tokens_and_uses_and_falls_with_bytes_and_age(n_tokens, n_bytes, n_uses, age, is_passed, more):
    def value(n_tokens=n_tokens, n_bytes=n_bytes, n_uses=n_uses, age=age, is_passed=is_passed):
        return worth(n_tokens, n_bytes, n_uses=n_uses, age=age, is_passed=is_passed)

    assert value() >= 0
    assert value(n_tokens=n_tokens + more) > value()
    assert value(n_uses=n_uses + more) >= value()
    assert value(n_bytes=n_bytes + more) <= value()
    assert value(age=age + more) <= value()
    assert value(is_passed=True) <= value(is_passed=False)


@given(st.integers(1, 10**5), st.integers(1, 10**6), st.integers(1, 50), counts, counts)
def test_worth_is_a_byte_s(n_tokens, n_bytes, k, n_uses, age):
    """Half the bytes for half the tokens is as good."""
    one, many = (worth(f * n_tokens, f * n_bytes, n_uses=n_uses, age=age) for f in (1, k))
    assert many == pytest.approx(one)


class Histories(RuleBasedStateMachine):
    """Whatever happens, invariants hold, a find tells the truth, and what is worth more never gives way to less."""

    def __init__(self):
        super().__init__()
        self.store = SnapshotStore(4, 8, 4)
        self.reserved, self.pinned, self.kept = [], [], {}

    texts = st.text("ab", min_size=1, max_size=3)
    pages = st.integers(1, 6)

    @rule(text=texts, n_pages=pages, n_saved=st.integers(0, 40), knows=st.booleans())
    def reserve(self, text, n_pages, n_saved, knows):
        can = self.store.can_reserve(n_saved)
        key = chain(text)[n_pages - 1]
        snapshot = self.store.reserve(4 * n_pages, n_saved, key=key if knows else None)
        assert (snapshot is not None) == can
        self._see_what_gave_way()
        if snapshot is not None:
            self.reserved.append((snapshot, text))

    @precondition(lambda self: self.reserved)
    @rule(i=st.integers(0, 9), is_good=st.booleans())
    def collect(self, i, is_good):
        snapshot, text = self.reserved.pop(i % len(self.reserved))
        if is_good:
            kept = self.store.keep(snapshot, chain(text))
            assert self.kept.setdefault(kept.key, kept) is kept
            assert kept.key == chain(text)[snapshot.n_tokens // 4 - 1]
        else:
            self.store.give_up(snapshot)

    @precondition(lambda self: self.kept)
    @rule(i=st.integers(0, 9))
    def pin(self, i):
        snapshot = list(self.kept.values())[i % len(self.kept)]
        self.store.pin(snapshot)
        self.pinned.append(snapshot)

    @precondition(lambda self: self.pinned)
    @rule(i=st.integers(0, 9))
    def unpin(self, i):
        self.store.unpin(self.pinned.pop(i % len(self.pinned)))

    @rule(text=texts, n_pages=pages)
    def forget(self, text, n_pages):
        self.store.forget(chain(text)[n_pages - 1])
        self.kept.pop(chain(text)[n_pages - 1], None)

    @rule()
    def reset(self):
        self.store.reset()
        self.kept.clear()

    def _see_what_gave_way(self):
        gone = [key for key in self.kept if self.store.find(key) is None]
        assert len(gone) <= 1
        for key in gone:
            assert self.kept.pop(key) not in self.pinned

    @invariant()
    def everything_is_accounted_for(self):
        self.store.check()
        assert self.store.n_reserved == len(self.reserved)
        assert self.store.n_kept == len(self.kept)
        assert all(self.store.find(key) is snapshot for key, snapshot in self.kept.items())


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestHistories = Histories.TestCase
