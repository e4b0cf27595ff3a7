"""Whether a thread still answers: it is asked to, and nobody waits for it. Knows no thread.

States: not asked -> asked (`is_answering`) -> answered, on that thread, which is not asked again. A thread that has not
answered for `stall_s` since it was asked is stuck or gone.
"""

import time
from collections.abc import Callable


class Probe:
    """Probes one thread. `send` hands a function over to it; asked from one other thread."""

    def __init__(
        self,
        send: Callable[[Callable[[], None]], object],
        stall_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._stall_s = stall_s
        self._clock = clock
        self._asked_s: float | None = None

    def is_answering(self) -> bool:
        """Ask, unless an answer is still due; say whether none has been due for too long."""
        asked_s = self._asked_s
        if asked_s is not None:
            return self._clock() - asked_s <= self._stall_s
        self._asked_s = self._clock()
        self._send(self._answer)
        return True

    def _answer(self) -> None:
        self._asked_s = None
