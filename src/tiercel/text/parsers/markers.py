"""Finding fixed texts in a stream: what surely is none of them, which one comes, and what may still become one.

The result does not depend on how the stream is cut. Each character costs the same: a regular expression of plain
alternatives finds whole markers, a set of their beginnings the unfinished one at the end.
"""

import re
from collections.abc import Iterable
from typing import Final

WAIT: Final = "\0wait"  # no marker holds a NUL


class Markers:
    """Fixed texts to look for. Frozen: parsers of one family share it."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=lambda text: (-len(text), text)))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._beginnings = frozenset(text[:n] for text in self.texts for n in range(1, len(text)))
        self._first_letters = frozenset(text[0] for text in self.texts)
        self._n_held_max = max((len(text) for text in self.texts), default=1) - 1

    def find(self, text: str, start: int, *, is_last: bool) -> tuple[int, str | None]:
        """Look for the first marker at or after `start`.

        Returns: where the text that is no marker ends, and the marker that begins there. With None, what is behind the
        end may become a marker; with `is_last` nothing can any more.
        """
        found = self._pattern.search(text, start)
        end = found.start() if found else len(text)
        if not is_last:
            unfinished = self._unfinished(text, max(start, len(text) - self._n_held_max))
            if unfinished is not None and unfinished <= end:
                return unfinished, None
        return end, found.group() if found else None

    def find_near(self, text: str, start: int, n_chars: int, *, is_last: bool) -> tuple[int, str | None] | None:
        """Look for the first marker that begins no more than `n_chars` behind `start`; None when there is none so near.

        Cost: what is farther is not looked at.
        """
        stop = start + n_chars + self._n_held_max + 1
        found = self._pattern.search(text, start, stop)
        end = found.start() if found else min(stop, len(text))
        if not is_last and stop > len(text):
            unfinished = self._unfinished(text, max(start, len(text) - self._n_held_max))
            if unfinished is not None and unfinished <= end:
                end, found = unfinished, None
        return None if end - start > n_chars else (end, found.group() if found else None)

    def at(self, text: str, start: int, *, is_last: bool) -> str | None:
        """Give the marker that begins at `start`, None when none does, `WAIT` when that cannot be told yet."""
        # A long rest is no beginning of a marker: it is not copied to be looked up.
        is_short = len(text) - start <= self._n_held_max
        if not is_last and is_short and (start == len(text) or text[start:] in self._beginnings):
            return WAIT
        found = self._pattern.match(text, start)
        return found.group() if found else None

    def _unfinished(self, text: str, start: int) -> int | None:
        for i in range(start, len(text)):
            if text[i] in self._first_letters and text[i:] in self._beginnings:
                return i
        return None


class Hidden:
    """Takes fixed texts out of a stream: special tokens that say nothing to a reader."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._held = ""

    def feed(self, text: str) -> str:
        """Take the next piece; return what is left of it and of what was held back."""
        return self._run(text, is_last=False)

    def finish(self) -> str:
        """End the stream; return what was held back."""
        return self._run("", is_last=True)

    def _run(self, text: str, *, is_last: bool) -> str:
        text, self._held = self._held + text, ""
        kept: list[str] = []
        start = 0
        while start < len(text):
            end, marker = self._markers.find(text, start, is_last=is_last)
            kept.append(text[start:end])
            if marker is None:
                self._held = text[end:]
                break
            start = end + len(marker)
        return "".join(kept)
