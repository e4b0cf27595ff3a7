"""The store of responses and the log of events, alone: their bounds, their age, what is counted."""

import asyncio

import pytest

from tiercel.api.http.responses_api.event_log import EventLog, EventsGone
from tiercel.api.http.responses_api.items import read_items
from tiercel.api.http.responses_api.store import Record, ResponseStore, page_of
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError, QueueFull, UnknownResponse


class Said:
    """As much of an answer as the store looks at."""

    def __init__(self, name, is_ended=True):
        self.id = name
        self.is_ended = is_ended
        self.is_cancel_wanted = False
        self.output = self
        self.items = [{"id": f"msg_of_{name}", "text": "x" * 50}]

    def shape(self):
        return {"id": self.id, "output": self.items}


class Engine:
    """What runs, as far as it can be told to stop."""

    is_aborted = False

    def abort(self):
        self.is_aborted = True


class Shelf:
    """A store whose clock is turned by hand."""

    def __init__(self, **settings):
        self.now_s = 1000.0
        self.store = ResponseStore(ServerSettings(served_names=("m",), **settings), lambda: self.now_s)

    def put(self, name, owner=b"", *, n_chars=10, runs=False):
        items = [{"id": f"in_{name}", "text": "x" * n_chars}]
        log = EventLog(1 << 20) if runs else None
        record = Record(owner, Said(name, is_ended=not runs), items, self.now_s, log)
        if runs:
            record.running = Engine()
        else:
            record.count_answer()
        self.store.put(record)
        self.store.check()
        return record

    def end(self, record):
        record.answer.is_ended = True
        record.running = None
        record.log.end()
        record.count_answer()
        self.store.settle(record)
        self.store.check()

    def has(self, name, owner=b""):
        try:
            return self.store.get(owner, name).id == name
        except UnknownResponse:
            return False
        finally:
            self.store.check()


def test_the_oldest_go_when_there_are_too_many():
    shelf = Shelf(n_stored_max=3)
    for name in "abcde":
        shelf.put(name)
    assert [name for name in "abcde" if shelf.has(name)] == ["c", "d", "e"]


def test_the_oldest_go_when_they_take_too_many_bytes_and_a_giant_goes_itself():
    shelf = Shelf(store_bytes_max=2000)
    for name in "abcde":
        shelf.put(name, n_chars=400)
        assert shelf.store.n_bytes <= 2000
    assert not shelf.has("a")
    assert shelf.has("e")
    shelf.put("giant", n_chars=3000)
    assert len(shelf.store) == 0
    assert shelf.store.n_bytes == 0


def test_one_goes_when_it_is_too_old():
    shelf = Shelf(store_ttl_s=60.0)
    shelf.put("a")
    shelf.now_s += 59
    shelf.put("b")
    assert shelf.has("a")
    shelf.now_s += 1
    assert not shelf.has("a")
    assert shelf.has("b")


def test_what_runs_stays_whatever_comes_and_goes_like_others_when_it_has_ended():
    shelf = Shelf(n_stored_max=2, store_ttl_s=60.0)
    runs = shelf.put("runs", runs=True)
    for name in "abc":
        shelf.put(name)
    shelf.now_s += 100
    assert shelf.has("runs")
    shelf.end(runs)
    assert not shelf.has("runs")


def test_logs_let_old_events_go_when_bytes_are_short():
    shelf = Shelf(store_bytes_max=5000)
    shelf.put("old")
    runs = shelf.put("runs", runs=True)
    for _ in range(100):
        runs.log.add(b"x" * 100)
        shelf.store.keep_bounds()
        assert shelf.store.n_bytes <= 5000
    assert runs.log.first > 0
    assert not shelf.has("old")
    shelf.store.check()


def test_one_owner_does_not_find_what_another_made_and_hears_the_same_as_of_none():
    shelf = Shelf()
    shelf.put("a", b"one")
    assert shelf.has("a", b"one")
    with pytest.raises(UnknownResponse) as others:
        shelf.store.get(b"two", "a")
    with pytest.raises(UnknownResponse) as nobodys:
        shelf.store.get(b"two", "b")
    assert str(others.value).replace("'a'", "'b'") == str(nobodys.value)
    assert set(shelf.store.items_of(b"one")) == {"in_a", "msg_of_a"}
    assert shelf.store.items_of(b"two") == {}


def test_only_so_many_run_in_the_background():
    shelf = Shelf(n_background_max=2)
    first = shelf.put("a", runs=True)
    shelf.store.check_room()
    shelf.put("b", runs=True)
    with pytest.raises(QueueFull):
        shelf.store.check_room()
    shelf.end(first)
    shelf.store.check_room()


def test_deleting_what_runs_stops_it_and_takes_nothing_twice():
    shelf = Shelf()
    runs = shelf.put("a", runs=True)
    engine = runs.running
    shelf.store.delete(runs)
    assert engine.is_aborted
    shelf.end(runs)
    assert shelf.store.n_bytes == 0
    shelf.store.delete(runs)
    assert shelf.store.n_bytes == 0


def test_a_drain_stops_only_what_nobody_reads():
    shelf = Shelf()
    read, unread = shelf.put("a", runs=True), shelf.put("b", runs=True)
    read.log.n_readers = 1
    shelf.store.begin_drain()
    assert (read.running.is_aborted, unread.running.is_aborted) == (False, True)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_stored_max": -1},
        {"store_bytes_max": 0},
        {"store_ttl_s": 0.0},
        {"n_background_max": -1},
        {"event_log_bytes_max": 0},
    ],
)
def test_bounds_that_hold_nothing_are_refused(settings):
    with pytest.raises(ConfigError) as error:
        ServerSettings(served_names=("m",), **settings)
    assert next(iter(settings)) in str(error.value)


async def _read(log, after):
    return b"".join([frames async for frames in log.read(after)])


def test_readers_of_a_log_get_what_was_and_what_comes_each_from_its_number():
    async def scene():
        log = EventLog(1000)
        log.add(b"0")
        log.add(b"1")
        readers = [asyncio.create_task(_read(log, after)) for after in (-1, 0, 2, 9)]
        for frame in (b"2", b"3", b"4"):
            await asyncio.sleep(0)
            log.add(frame)
        log.end()
        log.check()
        assert [await one for one in readers] == [b"01234", b"1234", b"34", b""]
        assert await _read(log, 3) == b"4"
        assert log.n_readers == 0
        with pytest.raises(AssertionError):
            log.add(b"5")

    asyncio.run(scene())


def test_a_reader_slower_than_events_go_is_told_the_first_that_is_left():
    async def scene():
        log = EventLog(10)
        log.add(b"000")
        reader = log.read(-1)
        assert await anext(reader) == b"000"
        for _ in range(5):
            log.add(b"xxx")
        log.check()
        with pytest.raises(EventsGone) as gone:
            await anext(reader)
        assert gone.value.first == log.first > 1

    asyncio.run(scene())


def test_a_reader_that_is_cancelled_leaves_nothing():
    async def scene():
        log = EventLog(10)
        reader = asyncio.create_task(_read(log, -1))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert log.n_readers == 0
        log.add(b"0")
        log.check()

    asyncio.run(scene())


def test_pages_of_items_go_on_where_the_last_ended():
    items = read_items([{"role": "user", "content": str(i)} for i in range(5)], [], {})
    seen, after = [], None
    while True:
        page = page_of(items, after=after, limit=2, is_newest_first=False)
        seen += page["data"]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert seen == items
    assert page_of([], after=None, limit=2, is_newest_first=True)["data"] == []
    with pytest.raises(LookupError):
        page_of(items, after="none", limit=2, is_newest_first=True)
