"""Shows how far a fetch is, on standard error: a bar on a terminal, else a line each tenth. Never on stdout."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from tiercel.base.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_WORDS = {"wait": "waiting for another process that fetches", "fetch": "fetching", "check": "checking"}


class FetchProgress:
    """A `hub.wheel_source.Progress` for people. Use as a context; shows nothing until something is reported."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._stream = sys.stderr if stream is None else stream
        self._bar: Bar | None = None
        self._bar_row: Any = None
        self._shown: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """Show that `phase` is at `done_bytes` of `total_bytes`."""
        label = f"{_WORDS.get(phase, phase)} {self._name}"
        if self._stream.isatty():
            self._show_bar(phase, label, done_bytes, total_bytes)
        else:
            self._show_line(phase, label, done_bytes, total_bytes)

    def _show_bar(self, phase: str, label: str, done_bytes: int, total_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        if self._bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=phase == "check")
            self._bar.start()
        if self._shown is None or self._shown[0] != phase:
            if self._bar_row is not None:
                self._bar.remove_task(self._bar_row)
            self._bar_row = self._bar.add_task(label, total=None if phase == "wait" else total_bytes)
            self._shown = (phase, 0)
        self._bar.update(self._bar_row, completed=done_bytes)

    def _show_line(self, phase: str, label: str, done_bytes: int, total_bytes: int) -> None:
        tenth = done_bytes * 10 // max(total_bytes, 1)
        if self._shown == (phase, tenth):
            return
        self._shown = (phase, tenth)
        amount = "" if phase == "wait" else f": {tenth * 10} % of {format_bytes(total_bytes)}"
        print(f"{label}{amount}", file=self._stream, flush=True)
