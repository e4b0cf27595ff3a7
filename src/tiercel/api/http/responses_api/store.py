"""Responses that can be asked for again, by the key that made them. In memory; it ends with the process.

Bounded by number, by bytes (as JSON, with the events of those in the background) and by age; the oldest go first. One
that still runs in the background does not go: there is a bound for those of its own, and when bytes are short they let
old events go. Used from the event loop. Invariants: `n_bytes` is the sum over the records; one id, one record.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.api.http.responses_api.event_log import EventLog
from tiercel.base.errors import QueueFull, UnknownResponse

if TYPE_CHECKING:
    from tiercel.api.http.responses_api.answer import Answer
    from tiercel.api.http.responses_api.items import Item
    from tiercel.api.http.running import Running
    from tiercel.api.http.settings import ServerSettings


class Record:
    """One response. `log` and `running` are there for one made in the background, `running` until it has ended."""

    def __init__(
        self, owner: bytes, answer: "Answer", items: Sequence["Item"], created_s: float, log: EventLog | None = None
    ) -> None:
        self.owner = owner
        self.answer = answer
        self.items = items
        self.created_s = created_s
        self.log = log
        self.running: Running | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        self.n_item_bytes = len(msgspec.json.encode(items))
        self.n_answer_bytes = 0

    @property
    def id(self) -> str:
        """The response's id."""
        return self.answer.id

    @property
    def n_bytes(self) -> int:
        """What it counts for, its conversation included, which it may share with others."""
        return self.n_item_bytes + self.n_answer_bytes + (self.log.n_bytes if self.log is not None else 0)

    @property
    def conversation(self) -> list["Item"]:
        """What a response that follows goes on with."""
        return [*self.items, *self.answer.output.items]

    def count_answer(self) -> None:
        """Note the size of the answer, when it has ended."""
        self.n_answer_bytes = len(msgspec.json.encode(self.answer.shape()))

    def cancel(self) -> None:
        """Stop it, if it runs; it ends as cancelled, unless it has ended by itself meanwhile."""
        if self.running is not None and not self.answer.is_ended:
            self.answer.is_cancel_wanted = True
            self.running.abort()


class ResponseStore:
    """The responses of one server."""

    def __init__(self, settings: "ServerSettings", clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._records: dict[str, Record] = {}  # oldest first
        self._running_ids: dict[str, None] = {}
        self._n_ended_bytes = 0  # of those that have ended: they do not grow

    def __len__(self) -> int:
        return len(self._records)

    @property
    def n_bytes(self) -> int:
        """What all of them count for."""
        return self._n_ended_bytes + sum(record.n_bytes for record in self._running)

    @property
    def _running(self) -> list[Record]:
        return [self._records[response_id] for response_id in self._running_ids]

    def check_room(self) -> None:
        """Refuse one more in the background when there are as many as may be.

        Raises: QueueFull
        """
        n = len(self._running_ids)
        if n >= self._settings.n_background_max:
            raise QueueFull(
                f"background: {n} responses run in the background, the most there may be; try again later",
                param="background",
            )

    def put(self, record: Record) -> None:
        """Take a record, and let the oldest go for it."""
        assert record.id not in self._records, "response store: one id, two records"
        self._records[record.id] = record
        if record.running is not None:
            self._running_ids[record.id] = None
        else:
            self._n_ended_bytes += record.n_bytes
        self.keep_bounds()

    def settle(self, record: Record) -> None:
        """Note that a record that ran has ended: it may go now."""
        if self._running_ids.pop(record.id, "gone") is None:
            self._n_ended_bytes += record.n_bytes
        self.keep_bounds()

    def get(self, owner: bytes, response_id: str, param: str = "response_id") -> Record:
        """Find a response that this key made.

        Raises: UnknownResponse: there is none, or no longer, or another key made it: that is not told apart.
        """
        self.keep_bounds()
        record = self._records.get(response_id)
        if record is None or record.owner != owner:
            raise UnknownResponse(
                f"{param}: got {response_id[:80]!r}; no such response is stored; it may never have been, or be gone",
                param=param,
            )
        return record

    def delete(self, record: Record) -> None:
        """Forget a response; one that runs is stopped."""
        self._forget(record)
        record.cancel()

    def items_of(self, owner: bytes) -> dict[str, "Item"]:
        """Give what this key's responses said, by item id."""
        self.keep_bounds()
        mine = [record for record in self._records.values() if record.owner == owner]
        return {item["id"]: item for record in mine for item in record.conversation}

    def begin_drain(self) -> None:
        """Stop what nobody reads: once the server has ended, nobody can fetch it."""
        for record in self._running:
            if record.running is not None and (record.log is None or not record.log.n_readers):
                record.running.abort()

    def keep_bounds(self) -> None:
        """Let go of what is too old or too much."""
        if not self._is_over(next(iter(self._records.values()), None)):
            return
        for record in [one for one in self._records.values() if one.id not in self._running_ids]:
            if not self._is_over(record):
                return
            self._forget(record)
        if self.n_bytes > self._settings.store_bytes_max:
            for record in self._running:
                if record.log is not None:
                    record.log.drop_oldest(record.log.n_bytes // 2)

    def check(self) -> None:
        """Raise AssertionError when a bound or a count does not hold."""
        n_running = len(self._running_ids)
        assert len(self._records) <= max(self._settings.n_stored_max, n_running), "response store: too many"
        n_bytes = 0
        for response_id, record in self._records.items():
            is_running = response_id in self._running_ids
            assert response_id == record.id, "response store: a record under another's id"
            assert is_running == (record.running is not None), f"response store: {response_id} is not settled"
            assert is_running or record.answer.is_ended, f"response store: nobody runs {response_id}"
            n_bytes += 0 if is_running else record.n_bytes
            if record.log is not None:
                record.log.check()
        assert n_bytes == self._n_ended_bytes, "response store: its bytes are miscounted"

    def _is_over(self, oldest: Record | None) -> bool:
        settings = self._settings
        return oldest is not None and (
            len(self._records) > settings.n_stored_max
            or self.n_bytes > settings.store_bytes_max
            or oldest.created_s <= self._clock() - settings.store_ttl_s
        )

    def _forget(self, record: Record) -> None:
        if self._records.pop(record.id, None) is None:
            return
        if self._running_ids.pop(record.id, "gone") is not None:
            self._n_ended_bytes -= record.n_bytes


def page_of(items: Sequence[dict[str, Any]], *, after: str | None, limit: int, is_newest_first: bool) -> dict[str, Any]:
    """Give a page of items in OpenAI's shape of lists.

    Raises: LookupError: none has the id `after`.
    """
    ordered = list(reversed(items)) if is_newest_first else list(items)
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(ordered) if item["id"] == after), -1)
        if start < 0:
            raise LookupError(after)
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }
