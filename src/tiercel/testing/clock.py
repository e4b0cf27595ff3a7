"""A clock that moves when it is told to."""


class VirtualClock:
    """Stands in for `time.monotonic`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Give the time."""
        return self.now_s

    def advance(self, by_s: float) -> None:
        """Let time pass."""
        assert by_s >= 0, "clock: time does not go back"
        self.now_s += by_s
