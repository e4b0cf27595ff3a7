"""One response on its way: the engine's outputs become items and events, and at each moment the response's object.

States: in_progress -> completed | incomplete | failed | cancelled, by `take` of the last output, or by `fail`; then
nothing changes. Used by one at a time. Event numbers rise by one from 0.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tiercel.api import errors
from tiercel.api.http import logprobs
from tiercel.api.http.answer import Tally
from tiercel.api.http.parsing import ParsedOutput
from tiercel.api.http.responses_api.output import COMPLETED, IN_PROGRESS, INCOMPLETE, Output
from tiercel.api.http.responses_api.token_pieces import Entry, TokenPieces
from tiercel.base.errors import TiercelError

if TYPE_CHECKING:
    from tiercel.api.http.responses_api.asking import Asked
    from tiercel.api.http.service import Service
    from tiercel.protocol.outputs import CompletionOutput, RequestOutput

FAILED, CANCELLED = "failed", "cancelled"
Sink = Callable[[bytes], None]
_encoder: Final = msgspec.json.Encoder()


def event_frame(kind: str, event: Mapping[str, Any]) -> bytes:
    """Give one event as clients of this route read it: with its name on a line of its own."""
    return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


class Answer:
    """Makes one response. `sink` takes the frames of its events; None: nobody reads any."""

    def __init__(self, service: "Service", asked: "Asked", echo: Mapping[str, Any], sink: Sink | None) -> None:
        self.id: str = echo["id"]
        self.status = IN_PROGRESS
        self.n_events = 0
        self.is_cancel_wanted = False
        self.output = Output(self._emit)
        self._service = service
        self._echo = echo
        self._sink = sink
        self._tally = Tally(len(asked.chat.token_ids))
        plan = asked.chat.parsing
        self._parsed = None if plan is None else ParsedOutput(service, plan, self.id)
        self._n_top = asked.ask.top_logprobs or 0
        self._texts = logprobs.TokenTexts(service.engine.tokenizer, as_ids=False)
        self._pieces = TokenPieces(asked.params, service.engine.tokenizer) if asked.has_logprobs else None
        self._waiting: list[Entry] = []  # log-probabilities of tokens whose text is not told yet
        self._error: dict[str, Any] | None = None
        self._completed_s: int | None = None
        self._usage: dict[str, Any] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether nothing changes any more."""
        return self.status != IN_PROGRESS

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._tally.n_completion

    def begin(self) -> None:
        """Tell the first events."""
        self._emit("response.created", {"response": self.shape()})
        self._emit("response.in_progress", {"response": self.shape()})

    def take(self, output: "RequestOutput") -> None:
        """Take what is new; at the last output, end."""
        self._tally.add(0, output, 1)
        (one,) = output.outputs
        is_last = one.finish_reason is not None
        if self._pieces is not None:
            self._take_tokens(self._pieces, one, is_last=is_last)
        elif self._parsed is not None:
            is_cut = one.finish_reason == "length"
            self.output.push(self._parsed.push(one.text, one.token_ids, is_last=is_last, is_cut=is_cut))
        elif one.text:
            self.output.push([{"content": one.text}])
        if is_last:
            self._end(one.finish_reason)

    def fail(self, message: str) -> None:
        """End by an error: what there is stays."""
        if not self.is_ended:
            self._error = {"code": "server_error", "message": message}
            self._close(FAILED)

    def shape(self) -> dict[str, Any]:
        """Give the response's object as it is now."""
        is_cut = self.status == INCOMPLETE
        return {
            **self._echo,
            "status": self.status,
            "output": list(self.output.items),
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": self._completed_s,
            "usage": self._usage,
        }

    def _take_tokens(self, pieces: TokenPieces, one: "CompletionOutput", *, is_last: bool) -> None:
        """Take the tokens one by one, so that each one's log-probabilities go with the text that it makes sure of."""
        entries = logprobs.chat_logprobs(one.logprobs or [], self._n_top, self._texts)["content"]
        for text, token_id, entry, is_end in pieces.feed(one, entries, is_last=is_last):
            ids = () if token_id is None else (token_id,)
            if self._parsed is not None:
                deltas = self._parsed.push(text, ids, is_last=is_end)
            else:
                deltas = [{"content": text}] if text else []
            if entry is not None:
                self._waiting.append(entry)
            if deltas:
                entries_told, rest = entries_of(deltas, self._waiting)
                self.output.push(deltas, entries_told)
                self._waiting = list(rest)

    def _end(self, reason: str | None) -> None:
        if reason == "abort" and not self.is_cancel_wanted:
            self.fail("server: it is shutting down; send the request to another, or later")
        elif reason == "abort":
            self._close(CANCELLED)
        else:
            self._close(INCOMPLETE if reason == "length" else COMPLETED)

    def _close(self, status: str) -> None:
        self.output.close(status)
        self.status = status
        if status == COMPLETED:
            self._completed_s = int(self._service.clock())
        self._usage = self._count()
        # What is stored keeps no second copy of the text.
        self._parsed = self._pieces = None
        self._waiting = []
        self._emit(f"response.{status}", {"response": self.shape()})

    def _count(self) -> dict[str, Any]:
        tally = self._tally
        engine = self._service.engine
        n_full = tally.n_prompt - tally.n_prompt % engine.client.core.limits.page_size_tokens
        n_reasoning = 0 if self._parsed is None else self._parsed.n_reasoning
        return {
            "input_tokens": tally.n_prompt,
            "input_tokens_details": {
                "cached_tokens": tally.n_cached,
                # Whole pages of the prompt can be found again; those that were found are not written.
                "cache_write_tokens": max(0, n_full - tally.n_cached)
                if engine.client.core.config.enable_prefix_caching
                else 0,
                **({"cached_tokens_by_tier": tally.by_tier()} if tally.has_tiers else {}),
            },
            "output_tokens": tally.n_completion,
            "output_tokens_details": {"reasoning_tokens": n_reasoning},
            "total_tokens": tally.n_prompt + tally.n_completion,
        }

    def _emit(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._sink is not None:
            self._sink(event_frame(kind, {"type": kind, "sequence_number": self.n_events, **fields}))
        self.n_events += 1


def entries_of(
    deltas: Sequence[Mapping[str, Any]], waiting: Sequence[Entry]
) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Give, of the tokens that were waiting, those that the deltas' content is made of, and those that wait on.

    The others are marks of reasoning and calls, which no text shows. A token without a character of its own, part of
    one, goes with the token after it.
    """
    text = next((delta["content"] for delta in deltas if "content" in delta), None)
    if text is None:
        return (), ()
    said = "".join(entry["token"] for entry in waiting)
    ends = set(accumulate(len(entry["token"]) for entry in waiting))
    # Content comes first, and what may still become a mark after it; or a mark was before it.
    start = 0 if said.startswith(text) and len(text) in ends else said.rfind(text)
    if start < 0:
        return waiting, ()
    end = start + len(text)
    found, rest, at = [], [], 0
    for entry in waiting:
        begin, at = at, at + len(entry["token"])
        if begin >= end:
            rest.append(entry)
        elif at > start or begin == at == start:
            found.append(entry)
    return found, rest if "content" in deltas[-1] else ()


def told(error: Exception, request_id: str) -> str:
    """Give the message of an error for a response: of one that was raised on purpose its own."""
    if isinstance(error, TiercelError):
        return errors.cleaned(str(error))
    return errors.UNEXPECTED.format(request_id)
