"""Beam search on top of the engine: each place of each sequence is a request of one token with log-probabilities.

`BeamSearch` is the search itself, pure: it says which sequences are to be gone on with (`asks`) and takes the likeliest
tokens of each (`take`). `BeamHandle` runs one on an event loop, `run_beams` many in the calling thread. That sequences
share what they began with is the prefix cache's doing: what a step computes again is less than a page for each.

Rules, after vLLM: of all sequences' candidates the `beam_width` best that do not end go on; one that ends with
end-of-sequence is kept; at the limit all are. With a width of 1 only the likeliest token is a candidate, so the search
is greedy. It ends as soon as none that still grows can become better than those kept. Of equal scores the one that was
followed first is the better: by its parent's place, then by the runner's order of tokens, which is by id.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tiercel.base.errors import RequestError, TiercelError
from tiercel.engine.outputs import RequestSummary, SequenceOutput, token_text
from tiercel.engine.prompts import PreparedRequest, Prompt
from tiercel.engine.request import SequenceUpdate
from tiercel.protocol.beams import BeamSearchParams
from tiercel.protocol.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from tiercel.protocol.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from tiercel.engine.client import EngineClient, RequestHandle
    from tiercel.text.tokenizer import Tokenizer

_N_CONTEXT_TOKENS = 4  # before one that ends inside a character


class Beam:
    """A sequence that was found so far. Frozen; shares its beginning with others."""

    __slots__ = ("finish_reason", "logprob", "n", "parent", "position", "token_id")

    def __init__(self, parent: "Beam | None", token_id: int, position: PositionLogprobs, logprob: float) -> None:
        self.parent = parent
        self.token_id = token_id
        self.position = position
        self.logprob = logprob  # of all its tokens
        self.n: int = 0 if parent is None else parent.n + 1
        self.finish_reason: str | None = None

    def path(self) -> "list[Beam]":
        """Give it and those it came from, the first token's first."""
        found, one = [], self
        while one.parent is not None:
            found.append(one)
            one = one.parent
        return found[::-1]

    def token_ids(self) -> list[int]:
        """Give its tokens, without the prompt's."""
        return [one.token_id for one in self.path()]


class BeamSearch:
    """One prompt's search. `n_new_max` is how many tokens a sequence may get."""

    def __init__(self, params: BeamSearchParams, eos_ids: frozenset[int], n_new_max: int) -> None:
        self.params = params
        self._eos_ids = frozenset[int]() if params.ignore_eos else eos_ids
        self._n_new_max = n_new_max
        self.live: list[Beam] = [Beam(None, -1, {}, 0.0)]
        self.ended: list[Beam] = []  # in the order they were found

    @property
    def is_done(self) -> bool:
        """Whether nothing better can be found."""
        return not self.live

    def take(self, positions: Sequence[PositionLogprobs]) -> None:
        """Take the likeliest tokens of the place after each live sequence, best first; go one place on."""
        grown: list[Beam] = []
        for beam, position in zip(self.live, positions, strict=True):
            likeliest = heapq.nlargest(self.params.n_candidates, position.items(), key=lambda pair: pair[1].logprob)
            for token_id, entry in likeliest:
                if entry.logprob == -math.inf:
                    continue
                one = Beam(beam, token_id, position, beam.logprob + entry.logprob)
                if token_id in self._eos_ids:
                    one.finish_reason = "stop"
                    self.ended.append(one)
                else:
                    grown.append(one)
        self.live = self._best(grown)
        self.ended = self._best(self.ended)
        if self.live and self.live[0].n >= self._n_new_max:
            self.stop("length")
        elif self.live and len(self.ended) >= self.params.beam_width:
            worst_kept = self._score(self.ended[-1])
            if all(self._most(beam) <= worst_kept for beam in self.live):
                self.live = []

    def stop(self, finish_reason: str) -> None:
        """End what is live where it is."""
        for beam in self.live:
            beam.finish_reason = finish_reason
        self.ended += self.live
        self.live = []

    def found(self) -> list[Beam]:
        """Give the best, the best first. Requires: it is done."""
        return self._best(self.ended)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self.params.beam_width]  # stable, in reverse too

    def _score(self, beam: Beam) -> float:
        n = beam.n - (beam.token_id in self._eos_ids)
        return self._scored(beam.logprob, n)

    def _scored(self, logprob: float, n: int) -> float:
        try:
            return logprob / float(max(n, 1) ** self.params.length_penalty)
        except (OverflowError, ZeroDivisionError):  # so long, or so short, that only the sign is left
            return -math.inf if self.params.length_penalty < 0 else 0.0

    def _most(self, beam: Beam) -> float:
        """Give a bound of what may become of it: its probability only falls, its length is at best one end of what may
        come.
        """
        return max(self._scored(beam.logprob, beam.n), self._scored(beam.logprob, self._n_new_max))


def _step_params(params: BeamSearchParams, *, max_tokens: int | None = 1) -> SamplingParams:
    """Give a step's parameters; with the search's own `max_tokens`, what its admission is asked."""
    n = max(params.n_candidates, params.logprobs or 0)
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=n,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prepare_beams(
    client: "EngineClient",
    prompt: Prompt,
    params: BeamSearchParams,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
) -> PreparedRequest:
    """Check a prompt and what is asked of it; nothing is sent.

    Raises: RequestError: it is refused; `param` names the field.
    """
    most, vocab_size = client.core.config.max_logprobs, client.core.limits.vocab_size
    most = vocab_size if most == -1 else min(most, vocab_size)
    if params.n_candidates > most:
        raise RequestError(
            f"beam_width: got {params.beam_width}; it looks at {params.n_candidates} tokens in each place, and "
            f"max_logprobs is {most}; lower it, or raise max_logprobs",
            param="beam_width",
        )
    asked = _step_params(params, max_tokens=params.max_tokens)
    return client.prepare(prompt, asked, priority=priority, cache_salt=cache_salt)


def begin_beams(client: "EngineClient", prepared: PreparedRequest, params: BeamSearchParams) -> BeamSearch:
    """Begin the search that was prepared."""
    return BeamSearch(params, client.eos_ids, prepared.max_total_tokens - len(prepared.token_ids))


def run_beams(
    client: "EngineClient", prepared: Sequence[PreparedRequest], params: BeamSearchParams
) -> Iterator[tuple[int, list[Beam]]]:
    """Search for many prompts at once, in the calling thread; give each one's index and what was found as it ends.

    Raises: the first error that ended a step.
    """
    searches = {i: begin_beams(client, one, params) for i, one in enumerate(prepared)}
    step = _step_params(params)
    while searches:
        owners = [(i, len(search.live)) for i, search in searches.items()]
        prompts: list[Prompt] = []
        for i, search in searches.items():
            prompts += [_ask(prepared[i], beam) for beam in search.live]
        positions: list[PositionLogprobs] = [{}] * len(prompts)
        for k, output in client.generate_many(prompts, step):
            if isinstance(output, TiercelError):
                raise output
            positions[k] = _position(output)
        at = 0
        for i, n in owners:
            searches[i].take(positions[at : at + n])
            at += n
            if searches[i].is_done:
                yield i, searches.pop(i).found()


def _ask(prepared: PreparedRequest, beam: Beam) -> dict[str, object]:
    ids = [*prepared.token_ids, *beam.token_ids()]
    return {"prompt_token_ids": ids} | ({"cache_salt": prepared.cache_salt} if prepared.cache_salt else {})


def _position(output: RequestOutput) -> PositionLogprobs:
    (one,) = output.outputs
    assert one.logprobs, f"beams: a step of one token ended with {one.finish_reason} and no log-probabilities"
    return one.logprobs[0]


class BeamHandle:
    """A search that was accepted: an async iterator of one output, as a `RequestHandle` with FINAL_ONLY gives.

    Its outputs are the sequences found, the best first. For one event loop.
    """

    def __init__(
        self, client: "EngineClient", prepared: PreparedRequest, params: BeamSearchParams, request_id: str
    ) -> None:
        self.request_id = request_id
        self._client = client
        self._prepared = prepared
        self._params = params
        self._search = begin_beams(client, prepared, params)
        self._running: list[RequestHandle] = []
        self._is_aborted = False
        self._is_read = False
        self._n_cached: int | None = None
        self._n_output = 0
        self._metrics = RequestMetrics(arrival_s=client.core.clock())

    def summary(self) -> RequestSummary:
        """Say what was asked for and what it came to so far."""
        params = SamplingParams(n=self._params.beam_width, max_tokens=self._params.max_tokens)
        return RequestSummary(params, len(self._prepared.token_ids), self._n_output, self._n_cached or 0, self._metrics)

    def abort(self) -> None:
        """Stop searching; the output then has what there is, and says "abort"."""
        self._is_aborted = True
        for handle in self._running:
            handle.abort()

    def close(self) -> None:
        """Free what still runs."""
        self._is_aborted = True
        for handle in self._running:
            handle.close()

    def __aiter__(self) -> "BeamHandle":
        return self

    async def __anext__(self) -> RequestOutput:
        """Search to the end.

        Raises: the error that ended a step; StopAsyncIteration after the one output.
        """
        if self._is_read:
            raise StopAsyncIteration
        self._is_read = True
        try:
            while not self._search.is_done and not self._is_aborted:
                await self._go_on()
        finally:
            self.close()
        self._search.stop("abort")
        found = self._search.found()
        outputs = outputs_of(found, self._prepared.token_ids, self._params, self._client.tokenizer)
        if self._params.logprobs is None:
            for one in outputs:
                one.logprobs = None
        self._n_output = sum(len(one.token_ids) for one in outputs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prepared.text,
            prompt_token_ids=self._prepared.token_ids,
            prompt_logprobs=None,
            outputs=outputs,
            finished=True,
            num_cached_tokens=self._n_cached,
            metrics=self._metrics,
        )

    async def _go_on(self) -> None:
        step = _step_params(self._params)
        is_first = self._metrics.first_token_s is None
        self._running = []
        for beam in self._search.live:
            # A search under way is not turned away by newer requests.
            handle = self._client.submit(
                _ask(self._prepared, beam), step, priority=self._prepared.priority, is_bounded=is_first
            )
            self._running.append(handle)
        positions = []
        for handle in self._running:
            output = await anext(handle)
            self._note(output)
            if output.outputs[0].finish_reason == "abort" and not output.outputs[0].logprobs:
                self._is_aborted = True
                return
            positions.append(_position(output))
        self._running = []
        self._search.take(positions)

    def _note(self, output: RequestOutput) -> None:
        if self._n_cached is None:
            self._n_cached = output.num_cached_tokens
        if output.metrics is None:
            return
        if self._metrics.first_token_s is None:
            self._metrics.first_scheduled_s = output.metrics.first_scheduled_s
            self._metrics.first_token_s = output.metrics.first_token_s
        self._metrics.last_token_s = output.metrics.last_token_s


def outputs_of(
    beams: Sequence[Beam], prompt_ids: list[int], params: BeamSearchParams, tokenizer: "Tokenizer | None"
) -> list[CompletionOutput]:
    """Give sequences that were found as a request's outputs, in their order."""
    shown = SamplingParams(
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    outputs = []
    for i, beam in enumerate(beams):
        text = SequenceOutput(i, prompt_ids, shown, tokenizer, 1)
        text.apply(SequenceUpdate("", beam.token_ids(), 0.0, finish_reason=beam.finish_reason))
        output = text.take(RequestOutputKind.FINAL_ONLY)
        output.logprobs = _logprobs(beam, params.logprobs, tokenizer)
        output.cumulative_logprob = beam.logprob
        outputs.append(output)
    return outputs


def _logprobs(beam: Beam, n_told: int | None, tokenizer: "Tokenizer | None") -> list[PositionLogprobs]:
    """Give each place's entries: the sequence's own token first, then the `n_told` likeliest, None for all."""
    told: list[PositionLogprobs] = []
    ids = beam.token_ids()
    for i, one in enumerate(beam.path()):
        before = ids[max(0, i - _N_CONTEXT_TOKENS) : i]
        likeliest = list(one.position.items())[:n_told]
        entries = {one.token_id: one.position[one.token_id], **dict(likeliest)}
        told.append({token_id: _in_place(token_id, entry, before, tokenizer) for token_id, entry in entries.items()})
    return told


def _in_place(token_id: int, entry: Logprob, before: list[int], tokenizer: "Tokenizer | None") -> Logprob:
    """Give an entry with the token's text after those before it, which a step of one token does not know."""
    if entry.decoded_token or not before:
        return entry
    return Logprob(entry.logprob, entry.rank, token_text(token_id, before, tokenizer))
