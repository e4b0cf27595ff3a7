"""Shows one answer while it is made: text as it arrives, stopped by Ctrl-C, safe to print on a terminal.

The first Ctrl-C stops the answer at its next piece of text, so that the engine is never cut off inside a step; the
second one ends it where it stands. Does not know what is asked.
"""

import signal
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TextIO

import msgspec

# On a terminal these could move the cursor, change its title or type for the user; a model's text may hold any of them.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class TextEngine(Protocol):
    """What the command line needs of `tiercel.llm.llm.LLM`. Closing a stream aborts its request."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's files say how a conversation is written."""

    def stream_chat(self, messages: Sequence[Mapping[str, str]], params: Any) -> Generator[str, None, None]:
        """Answer a conversation, piece by piece."""

    def stream(self, prompt: str, params: Any) -> Generator[str, None, None]:
        """Continue a text, piece by piece."""

    def stats(self) -> Mapping[str, Any]:
        """Return counts and rates so far."""

    def close(self) -> None:
        """End the engine and free what it holds."""


class Answer(msgspec.Struct, frozen=True):
    """What was shown: the whole text, whether Ctrl-C cut it, and when its first piece and its end came."""

    text: str
    is_stopped: bool
    first_s: float | None
    whole_s: float


class Interruption:
    """Whether Ctrl-C was pressed while the context was held. The second press raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.is_asked = False

    def note(self, signal_number: int, frame: FrameType | None) -> None:
        """Take one press; a `signal` handler."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


@contextmanager
def noting_interrupts() -> Iterator[Interruption]:
    """Turn Ctrl-C into a note for as long as the context is held. On the main thread only."""
    interruption = Interruption()
    before = signal.signal(signal.SIGINT, interruption.note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


def show_answer(stream: Generator[str, None, None], out: TextIO) -> Answer:
    """Write `stream` to `out` piece by piece, ending with a line's end, and close it."""
    is_terminal = out.isatty()
    pieces: list[str] = []
    started_s = time.monotonic()
    first_s = None
    with noting_interrupts() as interruption:
        try:
            for piece in stream:
                if piece and first_s is None:
                    first_s = time.monotonic() - started_s
                out.write(piece.translate(_CONTROLS) if is_terminal else piece)
                out.flush()
                pieces.append(piece)
                if interruption.is_asked:
                    break
        except KeyboardInterrupt:
            interruption.is_asked = True
        finally:
            stream.close()
    text = "".join(pieces)
    if not text.endswith("\n"):
        out.write("\n")
    out.flush()
    return Answer(text, interruption.is_asked, first_s, time.monotonic() - started_s)


def show_stats(engine: TextEngine, answer: Answer, out: TextIO) -> None:
    """Write how long `answer` took and what the engine counted."""
    first = "no text" if answer.first_s is None else f"first text after {answer.first_s:.3f} s"
    print(f"{first}, all after {answer.whole_s:.3f} s", file=out)
    stats = dict(engine.stats())
    told = _told_of_drafts(stats)
    for name, value in stats.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {_shown(one)}" for key, one in value.items() if one)
        print(f"{name}: {_shown(value)}", file=out)
    if told is not None:
        print(told, file=out)


def _told_of_drafts(stats: dict[str, Any]) -> str | None:
    """Take what is counted of drafts out of `stats`, and say it in a line; None: nothing is speculated."""
    if "n_drafts" not in stats:
        return None
    names = ("n_drafts", "n_draft_tokens", "n_accepted_tokens", "n_verify_steps", "n_chosen_rows", "n_failures")
    n_drafts, n_drafted, n_accepted, n_steps, n_rows, n_failures = (stats.pop(name, 0) for name in names)
    draft_s, verify_s = stats.pop("drafter_s", 0.0), stats.pop("verify_s", 0.0)
    by_position, n_off = stats.pop("n_accepted_by_position", []), stats.pop("n_switched_off", 0)
    n_passed = stats.pop("n_passed_over", 0)
    stats.pop("is_drafting", None)
    failed = f"; it stopped {n_off} times, as it did not pay" if n_off else ""
    failed += f"; {n_passed} drafts were not worth a row" if n_passed else ""
    failed += f"; {n_failures} drafters failed" if n_failures else ""
    if not n_drafts:
        return f"speculation: nothing was drafted; guessing took {draft_s:.4g} s{failed}"
    positions = " ".join(f"{n / n_drafts:.2f}" for n in by_position if n)
    return (
        f"speculation: {n_accepted} of {n_drafted} drafted tokens accepted in {n_steps} steps, "
        f"{1 + n_accepted / n_drafts:.2f} tokens a draft; accepted by position {positions or 'none'}; guessing took "
        f"{draft_s:.4g} s, computing the steps {verify_s:.4g} s; {n_rows} draft rows in the last{failed}"
    )


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
