"""Shows how far a long piece of work is, on standard error: a bar on a terminal, else a line each tenth."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class WorkProgress:
    """One bar. Use as a context; `at` says how far the work is and what else is worth a word."""

    def __init__(self, name: str, total: float, stream: TextIO | None = None) -> None:
        self._name, self._total = name, max(total, 1e-9)
        self._stream = sys.stderr if stream is None else stream
        self._bar: Bar | None = None
        self._row: Any = None
        self._tenth = -1

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[words]}"),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._bar.start()
            self._row = self._bar.add_task(self._name, total=self._total, words="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def at(self, done: float, words: str = "") -> None:
        """Show that `done` of the total is done."""
        if self._bar is not None:
            self._bar.update(self._row, completed=min(done, self._total), words=words)
            return
        tenth = int(min(done / self._total, 1.0) * 10)
        if tenth != self._tenth:
            self._tenth = tenth
            print(f"{self._name}: {tenth * 10} %{f', {words}' if words else ''}", file=self._stream, flush=True)
