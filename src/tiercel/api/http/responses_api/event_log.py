"""The events of one response that runs in the background, and those who read them, each from where it likes.

Used from one event loop. Invariants: `frames[i]` is the event numbered `first + i`; `n_bytes` is what they take; after
`end` nothing is added. At its bound the oldest events go, and who still wants them
is told so.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence


class EventsGone(Exception):
    """Events that a reader wants are no longer kept. `first` is the oldest that is."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first


class EventLog:
    """Frames in order, numbered from 0."""

    def __init__(self, bytes_max: int) -> None:
        self.first = 0
        self.frames: list[bytes] = []
        self.n_bytes = 0
        self.n_readers = 0
        self.is_ended = False
        self._bytes_max = bytes_max
        self._waiting: list[asyncio.Future[None]] = []

    def add(self, frame: bytes) -> None:
        """Take the next event."""
        assert not self.is_ended, "event log: an event after the end"
        self.frames.append(frame)
        self.n_bytes += len(frame)
        if self.n_bytes > self._bytes_max:
            self.drop_oldest(self._bytes_max // 2)
        self._wake()

    def drop_oldest(self, bytes_kept: int) -> None:
        """Let the oldest events go until so many bytes are left, but not the last, which may say the end."""
        n = 0
        while self.n_bytes > bytes_kept and n < len(self.frames) - 1:
            self.n_bytes -= len(self.frames[n])
            n += 1
        del self.frames[:n]
        self.first += n

    def end(self) -> None:
        """Nothing follows. Idempotent."""
        self.is_ended = True
        self._wake()

    async def read(self, after: int) -> AsyncGenerator[bytes, None]:
        """Give the events numbered more than `after`, as they come, to the end.

        Raises: EventsGone: the reader is slower than they go.
        """
        at = after + 1
        self.n_readers += 1
        try:
            while True:
                if at < self.first:
                    raise EventsGone(self.first)
                ready: Sequence[bytes] = self.frames[at - self.first :]
                if ready:
                    at += len(ready)
                    yield b"".join(ready)
                elif self.is_ended:
                    return
                else:
                    news = asyncio.get_running_loop().create_future()
                    self._waiting.append(news)
                    await news
        finally:
            self.n_readers -= 1

    def check(self) -> None:
        """Raise AssertionError when a count is wrong."""
        assert self.n_bytes == sum(map(len, self.frames)), "event log: its bytes are miscounted"
        assert self.n_readers >= 0, "event log: fewer than no readers"

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():
                news.set_result(None)
