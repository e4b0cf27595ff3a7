"""Reasoning between marks, before the answer: `<think>...</think>` and its kin.

Only what stands first is reasoning: a mark inside of the answer is the answer's. What opens the reasoning may stand in
the prompt. A mark that begins a tool call may end it, where models forget to. What follows the reasoning is content,
which another parser may look through for calls.
"""

from dataclasses import dataclass
from functools import cached_property

from tiercel.text.parsers.interface import Content
from tiercel.text.parsers.machine import Machine
from tiercel.text.parsers.markers import WAIT, Markers


@dataclass(frozen=True)
class ThinkTexts:
    """The marks around reasoning; any of several may open or close it. `name`: what people call the parser."""

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    is_default: bool = False  # without a mark, and if not told otherwise, the text begins inside of the reasoning

    @cached_property
    def first(self) -> Markers:
        """What may stand before all else."""
        return Markers([*self.begins, *self.ends])

    @cached_property
    def closing(self) -> Markers:
        """What ends the reasoning."""
        return Markers(self.ends)

    def is_open_at_end(self, prompt: str) -> bool | None:
        """Whether a prompt ends inside of reasoning; None when it says nothing about it.

        Only its very end counts: what a user wrote about marks opens nothing.
        """
        tail = prompt[-1024:].rstrip()
        if tail.endswith(self.begins):
            return True
        return False if tail.endswith(self.ends) else None

    def is_open_in(self, text: str) -> bool:
        """Whether the beginning of a message ends inside of its reasoning."""
        return text.lstrip().startswith(self.begins) and not any(end in text for end in self.ends)


class Think(Machine):
    """One output's parser. `calls` are the marks that end reasoning because a call begins."""

    def __init__(self, texts: ThinkTexts, *, is_open: bool, calls: Markers | None = None) -> None:
        super().__init__()
        self._texts = texts
        self._ends = Markers([*texts.ends, *(calls.texts if calls is not None else ())])
        self._state = self._opened if is_open else self._first

    def _first(self) -> bool:
        """Read what may open the reasoning."""
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.first)
        if marker == WAIT:
            return False
        if marker is None:
            return self._answer()
        self._take(len(marker))
        self._attempt.clear()
        return self._to(self._thinking if marker in self._texts.begins else self._behind)

    def _opened(self) -> bool:
        """Read the beginning of reasoning that the prompt opened: some models open it again."""
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.first)
        if marker == WAIT:
            return False
        self._attempt.clear()
        if marker in self._texts.begins:
            self._take(len(marker))
        return self._to(self._thinking)

    def _thinking(self) -> bool:
        text, marker = self._before(self._ends)
        self._think(text)
        if marker is None:
            return False
        if marker in self._texts.ends:
            return self._to(self._behind)
        self._pos -= len(marker)
        return self._to(self._content)

    def _behind(self) -> bool:
        """Read what stands between reasoning and answer: blanks, and the end once more."""
        if not self._skip_blank():
            return False
        self._attempt.clear()
        marker = self._next_is(self._texts.closing)
        if marker == WAIT:
            return False
        if marker is None:
            return self._to(self._content)
        self._take(len(marker))
        return True

    def _answer(self) -> bool:
        """Begin an answer without reasoning: its first blanks are its own."""
        self._events.append(Content("".join(self._attempt)))
        self._attempt.clear()
        return self._to(self._content)

    def _content(self) -> bool:
        self._events.append(Content(self._take(len(self._text) - self._pos)))
        return True

    def _at_end(self) -> None:
        if self._state in (self._opened, self._behind):
            self._attempt.clear()


THINK = ThinkTexts()
THINK_FIRST = ThinkTexts(is_default=True)
MISTRAL = ThinkTexts(("[THINK]",), ("[/THINK]",))
GRANITE = ThinkTexts(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)
SEED = ThinkTexts(("<seed:think>",), ("</seed:think>",))
MINIMAX = ThinkTexts(("<mm:think>", "<think>"), ("</mm:think>", "</think>"))
