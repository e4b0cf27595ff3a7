"""What front ends use: prompts go in, outputs come out, blocking or on an event loop. Knows no HTTP.

Any number of threads and event loops may use one client at once. A prompt is turned into tokens in the thread that
sends it. The engine's thread writes what is new into a request's state and wakes who waits for it: one call a step
for each event loop, however many requests it serves. Outputs are built by their reader (`engine.outputs`).

A request passes through: opened (`submit`: refused here, with a reason, or accepted) -> its sequences run -> ended; its
sequences leave `_owners` when the engine says their last word, whether somebody still reads or not. Leaving an iterator
early, by `break`, cancellation, `close` or an error, frees the request within a step.
"""

import logging
import os
import queue
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.base.errors import EngineDead, RequestError, RequestFailed, TiercelError
from tiercel.engine.core import EngineCore
from tiercel.engine.outputs import RequestState, RequestSummary
from tiercel.engine.prompts import PreparedRequest, Prompt, PromptReader
from tiercel.engine.request import NewSequence, SequenceUpdate
from tiercel.engine.stats import EngineSnapshot
from tiercel.kv.page_keys import PageKeys, root_key
from tiercel.protocol.outputs import RequestOutput
from tiercel.protocol.params import RequestOutputKind, SamplingParams
from tiercel.protocol.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

    from tiercel.engine.beams import BeamHandle
    from tiercel.engine.pooling import Pooler
    from tiercel.protocol.beams import BeamSearchParams
    from tiercel.sampling.budget_constraint import BudgetConstraint
    from tiercel.sampling.constraint import Constraint
    from tiercel.sampling.grammar_limits import GrammarLimits
    from tiercel.sampling.grammars import Grammars
    from tiercel.text.thinking import ThinkingMarks
    from tiercel.text.thinking_budget import ReasoningConfig, ReasoningMarkers
    from tiercel.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# Sequences that `generate_many` keeps in the engine, in multiples of max_num_seqs: enough that slots never wait.
_WINDOW = 4
_INT64_SPAN = 1 << 64

ReasoningTexts = tuple[Sequence[str], Sequence[str]]  # what opens reasoning, and what closes it


class _LoopWaiter:
    """A reader on an event loop."""

    __slots__ = ("future", "loop")

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()


class _QueueWaiter:
    """A blocked thread, woken by an item in its queue."""

    __slots__ = ("item", "queue")

    def __init__(self, queue_: "queue.SimpleQueue[int]", item: int = 0) -> None:
        self.queue = queue_
        self.item = item


class RequestHandle:
    """A request that was accepted. Iterate over it, blocking or with `async for`, from one place at a time."""

    def __init__(self, client: "EngineClient", state: RequestState, sequence_ids: list[str]) -> None:
        self.request_id = state.request_id
        self._client = client
        self._state = state
        self._sequence_ids = sequence_ids
        self._waiter: _LoopWaiter | _QueueWaiter | None = None  # guarded by the state's lock
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def summary(self) -> RequestSummary:
        """Say what was asked for and what it came to so far. From any thread."""
        with self._state.lock:
            return self._state.summary()

    def abort(self) -> None:
        """Stop producing; the last output then says "abort". Without effect when the request has ended."""
        self._client.core.finish(self._sequence_ids)

    def close(self) -> None:
        """Free the request if it still runs; its remaining outputs are not wanted."""
        if not self._state.is_ended:
            self.abort()

    def __enter__(self) -> "RequestHandle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        """Wait for what is new.

        Raises: the error that ended the request; StopIteration after its last output.
        """
        while True:
            output = self._take()
            if output is not None:
                return output
            if self._state.is_read:
                raise StopIteration
            if not self._is_ready(_QueueWaiter(self._signals)):
                self._signals.get()

    def __aiter__(self) -> "RequestHandle":
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait, on the running event loop, for what is new.

        Raises: the error that ended the request; StopAsyncIteration after its last output.
        """
        import asyncio  # only who streams on a loop pays for it

        while True:
            output = self._take()
            if output is not None:
                return output
            if self._state.is_read:
                raise StopAsyncIteration
            waiter = _LoopWaiter(asyncio.get_running_loop())
            if not self._is_ready(waiter):
                await waiter.future

    def _take(self) -> RequestOutput | None:
        """Give what is new, None when nothing is."""
        with self._state.lock:
            return self._state.take()

    def _is_ready(self, waiter: _LoopWaiter | _QueueWaiter) -> bool:
        """Whether there is something to read, which is left there; else `waiter` is woken when there is."""
        with self._state.lock:
            if self._state.has_news:
                return True
            self._waiter = waiter
            return False

    # The engine's thread.

    def _apply(self, index: int, update: SequenceUpdate) -> bool:
        """Take an update; return whether the engine should stop the sequence."""
        with self._state.lock:
            try:
                return self._state.apply(index, update)
            except Exception as error:  # noqa: BLE001  a request's boundary: answered to it, others go on
                _log.error("engine: making the output of %s failed", self.request_id, exc_info=True)
                failure = RequestFailed(f"engine: the text of {self.request_id} could not be made: {error!r}")
                failure.__cause__ = error
                self._state.fail(failure)
                return update.finish_reason is None and update.error is None

    def _pop_waiter(self) -> _LoopWaiter | _QueueWaiter | None:
        """Give, once, who waits, when there is something to read."""
        with self._state.lock:
            waiter = self._waiter
            if waiter is not None and self._state.has_news:
                self._waiter = None
                return waiter
            return None


class PreparedPooling(msgspec.Struct, frozen=True):
    """A text that is to be pooled, checked and not yet sent, and how its rows become the answer."""

    request: PreparedRequest
    params: PoolingParams
    pooler: "Pooler"

    def finish(self, output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
        """Pool the rows of the request's one output.

        Raises: RequestFailed: the request was aborted.
        """
        if output.rows is None:
            raise RequestFailed(f"engine: {output.request_id} was aborted; it has no numbers; send it again")
        data = PoolingOutput(self.pooler.finish(output.rows, self.params))
        return PoolingRequestOutput(output.request_id, data, output.prompt_token_ids, output.num_cached_tokens or 0)


class EngineClient:
    """Sends requests to an engine and hands out their outputs. Owns the engine: `close` ends it."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: "Tokenizer | None" = None,
        *,
        weights_digest: str,
        kv_dtype: str,
        eos_ids: Iterable[int] | None = None,
        grammar_limits: "GrammarLimits | None" = None,
        reasoning: "ReasoningConfig | None" = None,
        reasoning_texts: Callable[[], ReasoningTexts] = lambda: ((), ()),
        pooler: "Pooler | None" = None,
    ) -> None:
        """Become the one who is told what `core` produces.

        `weights_digest` and `kv_dtype` go into the keys of KV pages (`kv.page_keys`). `eos_ids` end every sequence
        that does not ignore them; None takes the tokenizer's. `reasoning_texts` finds what opens and what closes the
        model's reasoning when a request first bounds it; `reasoning` has other words for the same.
        """
        self.core = core
        self.tokenizer = tokenizer
        self.pooler = pooler  # of a model that pools; None: it generates
        if eos_ids is None:
            eos_ids = tokenizer.eos_ids if tokenizer is not None else ()
        self.eos_ids = frozenset(eos_ids)
        self._weights_digest = weights_digest
        self._kv_dtype = kv_dtype
        self._lock = threading.Lock()  # guards the next two
        self._owners: dict[str, tuple[RequestHandle, int]] = {}
        self._requests: dict[str, RequestHandle] = {}
        seed = core.config.seed
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._grammar_limits = grammar_limits
        self._grammars: Grammars | None = None  # guarded by _lock; made when a request first asks for a form
        make_grammars = None if tokenizer is None else lambda: self.grammars
        self._reasoning_config = reasoning
        self._reasoning_texts = reasoning_texts
        self._reader = PromptReader(tokenizer, core.limits, core.config, make_grammars, self._reasoning)
        core.set_sink(self._on_updates)

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self.core.is_alive

    @property
    def grammars(self) -> "Grammars":
        """The forms that texts may have, compiled. Requires: there is a tokenizer."""
        from tiercel.sampling.grammars import Grammars

        assert self.tokenizer is not None, "engine: forms of text need a tokenizer"
        with self._lock:
            if self._grammars is None:
                vocab_size = self.core.limits.vocab_size
                self._grammars = Grammars(self.tokenizer, vocab_size, self.eos_ids, self._grammar_limits)
            return self._grammars

    def set_reasoning(self, texts: ReasoningTexts) -> None:
        """Say what opens and what closes the model's reasoning, for whoever bounds it. To be called before requests.

        Raises: ConfigError: the engine's `reasoning_config` does not fit them.
        """
        self._reasoning_texts = lambda: texts
        self._reasoning()

    @property
    def snapshot(self) -> EngineSnapshot:
        """The engine's latest numbers."""
        return self.core.snapshot

    @property
    def max_len_tokens(self) -> int:
        """Tokens of one sequence, prompt and output."""
        return self.core.limits.max_len_tokens

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        thinking: "ThinkingMarks | None" = None,
        is_bounded: bool = True,
    ) -> RequestHandle:
        """Check a request and send it to the engine; nothing waits here but for a form that must be compiled.

        `thinking`: what tells the model's reasoning apart; structured output begins behind it. `is_bounded`: it is
        refused when too many wait; for what goes on with work that was accepted, false.

        Raises:
            RequestError: it is refused (PromptTooLong, QueueFull and others); `param` names the field.
            EngineDead: there is no engine any more.
        """
        prepared = self._reader.prepare(
            prompt, params or SamplingParams(), priority=priority, cache_salt=cache_salt, thinking=thinking
        )
        return self._send(prepared, request_id, is_bounded=is_bounded, thinking=thinking)

    def prepare(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, cache_salt: str | None = None
    ) -> PreparedRequest:
        """Check a request as `submit` does; nothing is sent.

        Raises: RequestError
        """
        return self._reader.prepare(prompt, params, priority=priority, cache_salt=cache_salt)

    def beam_search(
        self,
        prompt: Prompt,
        params: "BeamSearchParams",
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> "BeamHandle":
        """Check a search for the likeliest sequences; it runs while its handle is read, on an event loop.

        Raises: RequestError: it is refused; `param` names the field.
        """
        from tiercel.engine.beams import BeamHandle, prepare_beams

        prepared = prepare_beams(self, prompt, params, priority=priority, cache_salt=cache_salt)
        return BeamHandle(self, prepared, params, request_id or os.urandom(16).hex())

    def prepare_pooled(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        second: str | None = None,
        is_framed: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> PreparedPooling:
        """Check a text that is to be pooled, or with `second` a pair.

        `is_framed`: put the tokens around it that the tokenizer puts around texts.

        Raises:
            RequestError: it is refused; `param` names the field.
        """
        pooler = self._pooler()
        resolved = pooler.check(params or PoolingParams())
        request = self._reader.prepare_pooled(
            prompt,
            resolved,
            pooler.wants(resolved),
            second=second,
            is_framed=is_framed,
            priority=priority,
            cache_salt=cache_salt,
        )
        return PreparedPooling(request, resolved, pooler)

    def submit_pooled(self, prepared: PreparedPooling, *, request_id: str | None = None) -> RequestHandle:
        """Send a text that is to be pooled; `PreparedPooling.finish` reads the handle's one output.

        Raises:
            RequestError: the queue is full, or the id is taken.
            EngineDead: there is no engine any more.
        """
        return self._send(prepared.request, request_id, is_bounded=True)

    def pool_many(
        self,
        prompts: Sequence[tuple[Prompt, str | None]],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> Iterator[tuple[int, PoolingRequestOutput[PoolingOutput] | TiercelError]]:
        """Pool many texts, each with the second of a pair or None; give each one's index and output as it ends.

        Raises: as `submit_pooled`, before anything runs; the first wrong one is named by its index.
        """
        every = _one_each("pooling_params", params or PoolingParams(), PoolingParams, len(prompts))
        prepared = []
        for i, (prompt, second) in enumerate(prompts):
            try:
                prepared.append(self.prepare_pooled(prompt, every[i], second=second))
            except RequestError as error:
                error.args = (f"prompt {i} of {len(prompts)}: {error}",)
                raise
        for i, result in self._run_many([one.request for one in prepared]):
            yield i, result if isinstance(result, TiercelError) else prepared[i].finish(result)

    def _pooler(self) -> "Pooler":
        if self.pooler is None:
            raise RequestError(
                "model: it generates and does not pool; a model that embeds or classifies is needed", param="model"
            )
        return self.pooler

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send a request and give its outputs as they come; leaving the generator frees the request.

        Raises: as `submit`, at the first step; RequestFailed or EngineDead when it ends so.
        """
        handle = self.submit(prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt)
        try:
            async for output in handle:
                yield output
        finally:
            handle.close()

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
    ) -> Iterator[tuple[int, RequestOutput | TiercelError]]:
        """Run many requests; give each one's index and final output as it ends, or the error that ended it alone.

        All are checked before any is sent. Leaving the iterator frees what still runs.

        Raises: as `submit`, before anything runs; the first wrong prompt is named by its index.
        """
        every = _one_each("params", params or SamplingParams(), SamplingParams, len(prompts))
        priorities = _one_each("priority", priority, int, len(prompts))
        prompts = self._reader.encode_together(prompts)
        prepared = []
        for i, prompt in enumerate(prompts):
            final = msgspec.structs.replace(every[i], output_kind=RequestOutputKind.FINAL_ONLY)
            try:
                prepared.append(self._reader.prepare(prompt, final, priority=priorities[i], cache_salt=cache_salt))
            except RequestError as error:
                error.args = (f"prompt {i} of {len(prompts)}: {error}",)
                raise
        return self._run_many(prepared)

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output that says "abort". Unknown ids are no error."""
        with self._lock:
            handle = self._requests.get(request_id)
        if handle is not None:
            handle.abort()

    def reset_prefix_cache(self) -> bool:
        """Forget cached pages; False, and nothing is forgotten, while anything runs. Waits for the current step."""
        return self.core.reset_prefix_cache().result()

    def close(self, *, drain_s: float | None = 0.0) -> None:
        """End the engine: let what runs go on for at most `drain_s` (None: to its end), then abort it. Idempotent."""
        self.core.shutdown(drain_s=drain_s)
        with self._lock:
            grammars = self._grammars
        if grammars is not None:
            grammars.close()

    def _reasoning(self) -> "ReasoningMarkers | None":
        from tiercel.text.thinking_budget import ReasoningConfig

        return (self._reasoning_config or ReasoningConfig()).markers(*self._reasoning_texts())

    def _run_many(self, prepared: list[PreparedRequest]) -> Iterator[tuple[int, RequestOutput | TiercelError]]:
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        window = _WINDOW * self.core.config.max_num_seqs
        running: dict[int, RequestHandle] = {}
        n_sent = n_open = 0
        try:
            while n_sent < len(prepared) or running:
                while n_sent < len(prepared) and (n_open == 0 or n_open + prepared[n_sent].params.n <= window):
                    n_open += prepared[n_sent].params.n
                    running[n_sent] = self._send(prepared[n_sent], None, is_bounded=False)
                    if running[n_sent]._is_ready(_QueueWaiter(done, n_sent)):
                        done.put(n_sent)
                    n_sent += 1
                i = done.get()
                handle = running.pop(i)
                n_open -= prepared[i].params.n
                try:
                    yield i, next(handle)
                except EngineDead:
                    raise
                except TiercelError as error:
                    yield i, error
        finally:
            for handle in running.values():
                handle.close()

    def _send(
        self,
        prepared: PreparedRequest,
        request_id: str | None,
        *,
        is_bounded: bool,
        thinking: "ThinkingMarks | None" = None,
    ) -> RequestHandle:
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(
                f"request_id: got {type(request_id).__name__}; text is needed; leave it out for one of ours",
                param="request_id",
            )
        request_id = request_id or os.urandom(16).hex()
        params = prepared.params
        arrival_s = self.core.clock()
        state = RequestState(
            request_id,
            prepared.text,
            prepared.token_ids,
            params,
            self.tokenizer,
            arrival_s,
            stream_interval=max(params.stream_interval or 1, self.core.config.stream_interval),
        )
        new = self._sequences_of(prepared, request_id, arrival_s, thinking)
        handle = RequestHandle(self, state, [one.sequence_id for one in new])
        self._register(handle)
        try:
            self.core.add(new, is_bounded=is_bounded)
        except TiercelError:
            self._unregister(handle)
            raise
        return handle

    def _sequences_of(
        self, prepared: PreparedRequest, request_id: str, arrival_s: float, thinking: "ThinkingMarks | None"
    ) -> list[NewSequence]:
        """Make one sequence for each output. Only the first scores the prompt: the others would say the same."""
        params = prepared.params
        size = self.core.limits.page_size_tokens
        root = root_key(self._weights_digest, self._kv_dtype, size, salt=prepared.cache_salt)
        seed = params.seed
        if seed is None:
            with self._lock:
                seed = self._random.getrandbits(63)
        first = msgspec.structs.replace(params, n=1)
        other = first
        if params.n > 1 and params.prompt_logprobs is not None:
            other = msgspec.structs.replace(first, prompt_logprobs=None, skip_reading_prefix_cache=None)
        new = []
        for i in range(params.n):
            keys = PageKeys(root, size)
            keys.extend(prepared.token_ids)
            new.append(
                NewSequence(
                    sequence_id=request_id if params.n == 1 else f"{i}_{request_id}",
                    prompt_token_ids=prepared.token_ids,
                    params=other if i else first,
                    seed=_wrapped(seed + i),
                    max_total_tokens=prepared.max_total_tokens,
                    eos_ids=self.eos_ids,
                    page_keys=keys,
                    arrival_s=arrival_s,
                    priority=prepared.priority,
                    constraint=_constraint_of(prepared, thinking),
                    pools=prepared.pools,
                    n_first=prepared.n_first,
                    is_private=prepared.cache_salt is not None,
                )
            )
        return new

    def _register(self, handle: RequestHandle) -> None:
        with self._lock:
            taken = [i for i in handle._sequence_ids if i in self._owners]
            if taken or handle.request_id in self._requests:
                raise RequestError(
                    f"request_id: {handle.request_id!r} is running already; one of its own is needed; choose another",
                    param="request_id",
                )
            self._requests[handle.request_id] = handle
            for index, sequence_id in enumerate(handle._sequence_ids):
                self._owners[sequence_id] = (handle, index)

    def _unregister(self, handle: RequestHandle) -> None:
        with self._lock:
            self._requests.pop(handle.request_id, None)
            for sequence_id in handle._sequence_ids:
                self._owners.pop(sequence_id, None)

    # The engine's thread.

    def _on_updates(self, updates: list[SequenceUpdate]) -> None:
        stopped: list[str] = []
        failed: list[str] = []
        touched: dict[RequestHandle, None] = {}
        for update in updates:
            found = self._owners.get(update.sequence_id)
            if found is None:
                continue
            handle, index = found
            touched[handle] = None
            if handle._apply(index, update):
                stopped.append(update.sequence_id)
            if handle._state.error is not None:
                failed += handle._sequence_ids
            if update.finish_reason is not None or update.error is not None:
                self._forget(update.sequence_id, handle)
        if stopped:
            self.core.finish(stopped, "stop")
        if failed:
            self.core.finish(failed, "abort")
        self._wake(touched)

    def _forget(self, sequence_id: str, handle: RequestHandle) -> None:
        with self._lock:
            self._owners.pop(sequence_id, None)
            if not any(i in self._owners for i in handle._sequence_ids):
                self._requests.pop(handle.request_id, None)

    def _wake(self, touched: Iterable[RequestHandle]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], RequestHandle]]] = {}
        for handle in touched:
            waiter = handle._pop_waiter()
            if isinstance(waiter, _QueueWaiter):
                waiter.queue.put(waiter.item)
            elif waiter is not None:
                by_loop.setdefault(waiter.loop, []).append((waiter.future, handle))
        for loop, waiting in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, [future for future, _ in waiting])
            except RuntimeError:  # the loop was closed under its readers: nobody will read these
                for _, handle in waiting:
                    handle.close()


def _resolve(futures: "list[asyncio.Future[None]]") -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _constraint_of(
    prepared: PreparedRequest, thinking: "ThinkingMarks | None"
) -> "Constraint | BudgetConstraint | None":
    """Begin a request's form, and the bound of its reasoning, for one sequence: each has a state of its own."""
    params = prepared.params
    form = None
    if prepared.grammar is not None:
        form = prepared.grammar.start(
            stop_ids=params.stop_token_ids or (), ignores_eos=params.ignore_eos, thinking=thinking
        )
    if prepared.budget is None:
        return form
    from tiercel.sampling.budget_constraint import BudgetConstraint

    return BudgetConstraint(prepared.budget.copy(), form)


def _wrapped(seed: int) -> int:
    """Bring a seed back into int64."""
    return (seed + _INT64_SPAN // 2) % _INT64_SPAN - _INT64_SPAN // 2


def _one_each(name: str, given: Any, kind: type, n: int) -> list[Any]:
    if isinstance(given, kind):
        return [given] * n
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__"):
        raise RequestError(
            f"{name}: got {type(given).__name__}; {kind.__name__} is needed, or a list of them, one a prompt",
            param=name,
        )
    if len(given) != n:
        raise RequestError(f"{name}: got {len(given)} for {n} prompts; one for all or one each is needed", param=name)
    return list(given)
