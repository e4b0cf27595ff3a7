"""From token updates to what a client reads: text, stop strings, log-probabilities, `RequestOutput`. Knows no threads'
waiting (that is `engine.client`) and no scheduling.

A request has one `RequestState`. The engine's thread writes to it with `apply`; a client's thread reads with `take`;
`lock` is between them. An output is built when it is read, from all that is new, so a slow reader gets fewer and larger
outputs and nothing queues up: what one request holds is bounded by its own tokens.

States of an output sequence: open, then ended, once, by a stop string found here or by the engine's final update;
whatever the engine still sends after that is dropped.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercel.base.errors import TiercelError
from tiercel.engine.request import SequenceUpdate, TokenLogprobs
from tiercel.protocol.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from tiercel.protocol.params import RequestOutputKind, SamplingParams
from tiercel.text.detokenizer import Detokenizer
from tiercel.text.stop_strings import StopStrings

if TYPE_CHECKING:
    import numpy as np

    from tiercel.text.tokenizer import Tokenizer

_N_CONTEXT_TOKENS_MAX = 4  # tokens before one that ends inside a character; no character needs more
_UNFINISHED = "\ufffd"


class OutputText:
    """One output's text as its tokens come, up to a stop string."""

    def __init__(self, tokenizer: "Tokenizer", prompt_ids: list[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        stops = params.stop_strings
        self._stops = StopStrings(stops, include_in_output=params.include_stop_str_in_output) if stops else None

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, str | None]:
        """Take a token; return the text it makes sure of, and the stop string that ends the output, if one does.

        Text of tokens that may not stop is not looked at, then or later.
        """
        piece = self._detokenizer.push((token_id,))
        if self._stops is None or not may_stop:
            return piece, None
        return self._stops.feed(piece)

    def finish(self, *, may_stop: bool) -> tuple[str, str | None]:
        """End the output; return what was held back."""
        tail = self._detokenizer.finish()
        if self._stops is None:
            return tail, None
        if not may_stop:
            return self._stops.finish() + tail, None
        text, matched = self._stops.feed(tail)
        return text + self._stops.finish(), matched


class SequenceOutput:
    """One of a request's outputs: what has come, and how much of it has been read."""

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: "Tokenizer | None",
        stream_interval: int,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.has_news = False
        self._stream_interval = stream_interval
        self._params = params
        self._tokenizer = tokenizer
        has_text = tokenizer is not None and params.detokenize
        self._text = OutputText(tokenizer, prompt_ids, params) if tokenizer is not None and has_text else None
        self._new_text: list[str] = []
        self._read_text = ""
        self._cumulative_logprob = 0.0
        self._raw_logprobs: list[TokenLogprobs] = []
        self._logprobs: list[PositionLogprobs] = []
        self._n_read = 0

    def apply(self, update: SequenceUpdate) -> bool:
        """Take an update; return whether a stop string ended the output while the engine still goes on with it."""
        if self.finish_reason is not None:
            return False
        self._take_logprobs(update)
        is_stopped_here = self._take_tokens(update)
        n_new = len(self.token_ids) - self._n_read
        self.has_news = self._n_read == 0 or n_new >= self._stream_interval or self.finish_reason is not None
        return is_stopped_here

    def _take_tokens(self, update: SequenceUpdate) -> bool:
        last = len(update.token_ids) - 1
        is_stop_token = update.finish_reason == "stop" and not self._params.include_stop_str_in_output
        is_stop_token = is_stop_token and not update.is_complete
        for i, token_id in enumerate(update.token_ids):
            self.token_ids.append(token_id)
            if self._text is None or (is_stop_token and i == last):
                continue
            piece, matched = self._text.push(token_id, may_stop=self._may_stop)
            if piece:
                self._new_text.append(piece)
            if matched is not None:
                self._stop_at(matched)
                self.token_ids += update.token_ids[i + 1 :]
                return update.finish_reason is None
        if update.finish_reason is not None:
            self._finish(update)
        return False

    @property
    def _may_stop(self) -> bool:
        n_least = self._params.min_tokens
        return n_least == 0 or len(self.token_ids) > n_least

    def _stop_at(self, matched: str) -> None:
        self.finish_reason, self.stop_reason = "stop", matched

    def _finish(self, update: SequenceUpdate) -> None:
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        if self._text is None:
            return
        tail, matched = self._text.finish(may_stop=self._may_stop)
        if tail:
            self._new_text.append(tail)
        if matched is not None and update.finish_reason != "abort":
            self._stop_at(matched)

    def _take_logprobs(self, update: SequenceUpdate) -> None:
        for entry in update.logprobs or ():
            self._cumulative_logprob += entry.logprob
            self._raw_logprobs.append(entry)

    def take(self, kind: RequestOutputKind) -> CompletionOutput:
        """Give the output so far, or with DELTA what is new in it, and count it as read."""
        new_text = "".join(self._new_text)
        self._new_text.clear()
        self.has_news = False
        is_delta = kind is RequestOutputKind.DELTA
        if is_delta:
            text, token_ids = new_text, self.token_ids[self._n_read :]
        else:
            self._read_text = text = self._read_text + new_text
            token_ids = self.token_ids.copy()
        has_logprobs = self._params.logprobs is not None
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=self._read_logprobs(is_delta=is_delta) if has_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self._n_read = len(self.token_ids)
        return output

    def _read_logprobs(self, *, is_delta: bool) -> list[PositionLogprobs]:
        first = len(self.token_ids) - len(self._raw_logprobs)
        new = [
            position_logprobs(
                entry,
                self.token_ids[max(0, first + i - _N_CONTEXT_TOKENS_MAX) : first + i],
                self._tokenizer,
                has_ranks=self._params.logprob_token_ids is None,
            )
            for i, entry in enumerate(self._raw_logprobs)
        ]
        self._raw_logprobs.clear()
        if is_delta:
            return new
        self._logprobs += new
        return self._logprobs.copy()


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """What a request asked for, and what it came to so far."""

    params: SamplingParams
    n_prompt_tokens: int
    n_output_tokens: int  # of all its outputs
    n_cached_tokens: int
    metrics: RequestMetrics


class RequestState:
    """A request from its acceptance to the reading of its last output."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: "Tokenizer | None",
        arrival_s: float,
        *,
        stream_interval: int = 1,
    ) -> None:
        self.request_id = request_id
        self.lock = threading.Lock()
        self.outputs = [SequenceOutput(i, prompt_ids, params, tokenizer, stream_interval) for i in range(params.n)]
        self.n_open = params.n
        self.error: TiercelError | None = None
        self.is_read = False  # its last output, or its error, has been taken
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._params = params
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._n_cached: int | None = None
        self._cached_by_tier: dict[str, int] | None = None
        self._rows: np.ndarray | None = None
        self._metrics = RequestMetrics(arrival_s=arrival_s)

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.n_open == 0 or self.error is not None

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to give."""
        if self.is_read:
            return False
        if self.is_ended:
            return True
        if self._params.output_kind is not RequestOutputKind.FINAL_ONLY:
            for output in self.outputs:  # asked twice a token: `any` of a generator takes four times as long
                if output.has_news:
                    return True
        return False

    def apply(self, index: int, update: SequenceUpdate) -> bool:
        """Take an update of one output; return whether the engine should stop producing it.

        Requires: `lock` is held.
        """
        if self.error is not None:
            return update.finish_reason is None and update.error is None
        output = self.outputs[index]
        if output.finish_reason is not None:
            return False
        self._note(update)
        if update.error is not None:
            self.error = update.error
            return False
        is_stopped_here = output.apply(update)
        self.n_open -= output.finish_reason is not None
        return is_stopped_here

    def fail(self, error: TiercelError) -> None:
        """End the request with an error, unless it has ended.

        Requires: `lock` is held.
        """
        if not self.is_ended:
            self.error = error

    def take(self) -> RequestOutput | None:
        """Give what is new, None when nothing is.

        Requires: `lock` is held.
        Raises: the error that ended the request, once.
        """
        if not self.has_news:
            return None
        kind = self._params.output_kind
        self.is_read = self.is_ended
        if self.error is not None:
            raise self.error
        is_whole = self.is_ended and kind is not RequestOutputKind.DELTA
        outputs = [output.take(kind) for output in self.outputs if is_whole or output.has_news]
        prompt_logprobs = self._prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            self._prompt_logprobs = None  # told once
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self.is_ended,
            num_cached_tokens=self._n_cached,
            cached_by_tier=self._cached_by_tier,
            metrics=self._metrics.copy(),
            rows=self._rows,
        )

    def summary(self) -> RequestSummary:
        """Say what it came to so far.

        Requires: `lock` is held.
        """
        return RequestSummary(
            params=self._params,
            n_prompt_tokens=len(self._prompt_ids),
            n_output_tokens=sum(len(output.token_ids) for output in self.outputs),
            n_cached_tokens=self._n_cached or 0,
            metrics=self._metrics.copy(),
        )

    def _note(self, update: SequenceUpdate) -> None:
        metrics = self._metrics
        if update.rows is not None:
            self._rows = update.rows
        if update.token_ids:
            if metrics.first_token_s is None:
                metrics.first_token_s = update.time_s
            metrics.last_token_s = update.time_s
        if update.first_scheduled_s is not None:
            if metrics.first_scheduled_s is None or update.first_scheduled_s < metrics.first_scheduled_s:
                metrics.first_scheduled_s = update.first_scheduled_s
            if self._n_cached is None:
                self._n_cached = update.n_cached_tokens  # of the output that came first
                self._cached_by_tier = update.cached_by_tier
        metrics.n_preemptions += update.n_preemptions
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
            for i, entry in enumerate(update.prompt_logprobs, start=1):
                before = self._prompt_ids[max(0, i - _N_CONTEXT_TOKENS_MAX) : i]
                self._prompt_logprobs.append(position_logprobs(entry, before, self._tokenizer))


def position_logprobs(
    entry: TokenLogprobs, before_ids: list[int], tokenizer: "Tokenizer | None", *, has_ranks: bool = True
) -> PositionLogprobs:
    """Give one position's log-probabilities in vLLM's shape: the token's own first, then the likeliest, or those that
    were named, whose ranks nobody counted (`has_ranks` false).
    """
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, token_text(entry.token_id, before_ids, tokenizer))}
    for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        if token_id not in found:
            found[token_id] = Logprob(logprob, rank if has_ranks else None, token_text(token_id, before_ids, tokenizer))
    return found


def token_text(token_id: int, before_ids: list[int], tokenizer: "Tokenizer | None") -> str | None:
    """Give a token's text after the tokens before it; "" while it only begins or continues a character."""
    if tokenizer is None:
        return None
    text = tokenizer.token_text(token_id)
    if not text.endswith(_UNFINISHED):
        return text
    for n in range(1, min(len(before_ids), _N_CONTEXT_TOKENS_MAX) + 1):
        context = before_ids[-n:]
        longer = tokenizer.decode([*context, token_id], skip_special_tokens=False)
        if not longer.endswith(_UNFINISHED):
            done = tokenizer.decode(context, skip_special_tokens=False).rstrip(_UNFINISHED)
            return longer.removeprefix(done)
    return ""
