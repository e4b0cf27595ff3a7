"""What the routes share: the engine, the names it is served under, threads for slow work, and what is under way.

States: serving -> draining (`begin_drain`: new requests are refused, those under way go on) -> aborting (`abort_all`:
those under way end with "abort"). Invariant: every `Running` that `start` gave is in `_running` until it is closed.
"""

import asyncio
import contextvars
import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import msgspec

from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.metrics import Metrics
from tiercel.api.http.params import usable_defaults
from tiercel.api.http.probe import Probe
from tiercel.api.http.request_log import RequestLog
from tiercel.api.http.responses_api.store import ResponseStore
from tiercel.api.http.running import Handle, Running
from tiercel.api.http.settings import ServerSettings
from tiercel.api.http.tracing import make_tracer, note_running
from tiercel.base.errors import ConfigError, ModelFileError, RequestError, TiercelError, UnknownModel
from tiercel.engine.client import PreparedPooling
from tiercel.protocol.beams import BeamSearchParams
from tiercel.protocol.params import RequestOutputKind, SamplingParams
from tiercel.text.chat_template import ChatTemplate, default_template
from tiercel.text.parsers.registry import ParserChoice, choose_of
from tiercel.text.thinking import ThinkingMarks
from tiercel.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_N_NAMES_SHOWN: Final = 5
_N_OWN_TEMPLATES: Final = 8  # of requests: who brings one along brings the same one again


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One prompt, ready for the engine."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    thinking: ThinkingMarks | None = None
    beams: BeamSearchParams | None = None  # a search, in place of `params`
    pooled: PreparedPooling | None = None  # it is to be pooled


class Service:
    """One server's shared state. Owned by the app; used from its event loop, but for what `in_thread` runs."""

    def __init__(
        self, engine: EngineFacade, settings: ServerSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics(engine, settings.model_id)
        endpoint = settings.otlp_traces_endpoint
        self.tracer = make_tracer(endpoint, settings.model_id) if endpoint is not None else None
        self.defaults = usable_defaults(engine.generation_defaults)
        self.created_s = int(clock())
        self.responses = ResponseStore(settings, clock)
        self.log = RequestLog(settings)
        self.n_open = 0  # generation requests under way, written by `gate`, and by responses in the background
        self.n_connections = 0  # written by `connection`
        self.is_draining = False
        self._is_aborting = False
        self._running: set[Running] = set()
        self._pool = ThreadPoolExecutor(settings.n_threads, "tiercel-api")
        self._probes = {
            "engine": Probe(engine.client.core.call_soon, settings.thread_stall_s),
            "api": Probe(self._pool.submit, settings.thread_stall_s),
        }
        # Forms may take seconds to compile: other requests do not wait for them.
        self._form_pool = ThreadPoolExecutor(settings.n_threads, "tiercel-forms")
        self.parsers = _choose_parsers(engine.tokenizer, settings)
        engine.client.set_reasoning(self.parsers.reasoning_texts)
        given = settings.chat_template
        plain, source = (
            given or _template_source(engine.tokenizer, has_tools=has_tools) for has_tools in (False, True)
        )
        self._template = _compile_template(engine.tokenizer, plain, is_given=given is not None)
        self._tool_template = self._template if source == plain else _compile_template(engine.tokenizer, source)
        self._own_lock = threading.Lock()  # guards the next
        self._own_templates: dict[str, ChatTemplate] = {}
        # Without a place for them in the template, tools are told in words, and a developer is the system.
        self.template_takes_tools = "tools" in (source or "")
        self.template_knows_developer = "developer" in (source or "")

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now would be served."""
        return self.engine.client.is_alive and not self.is_draining

    def silent_threads(self) -> list[str]:
        """Name the threads that ended or are stuck; asks each, and waits for none. For the event loop, which answers
        for itself.
        """
        if not self.engine.client.is_alive:
            return ["engine"]
        return [name for name, probe in self._probes.items() if not probe.is_answering()]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises: RequestError: the model has none.
        """
        if self.engine.tokenizer is None:
            raise RequestError(
                "prompt: got text; this model is served without a tokenizer; send token ids to /v1/completions",
                param="prompt",
            )
        return self.engine.tokenizer

    def template(self, *, has_tools: bool = False) -> ChatTemplate:
        """Give the model's chat template, for chats with tools the one that is made for them.

        Raises: RequestError: it has none; ModelFileError: it is broken.
        """
        template = self._tool_template if has_tools else self._template
        if isinstance(template, TiercelError):
            raise template
        return template

    def own_template(self, source: str) -> ChatTemplate:
        """Compile a template that a request brings along; the last few are kept.

        Raises: RequestError: it cannot be compiled.
        """
        with self._own_lock:
            found = self._own_templates.pop(source, None)
            if found is not None:
                self._own_templates[source] = found
                return found
        try:
            made = _compile(self.tokenizer, source)
        except ModelFileError as error:
            said = str(error).partition("; give another")[0]
            raise RequestError(f"{said}; or leave it out", param="chat_template") from None
        with self._own_lock:
            self._own_templates[source] = made
            while len(self._own_templates) > _N_OWN_TEMPLATES:
                del self._own_templates[next(iter(self._own_templates))]
        return made

    def check_generates(self) -> None:
        """Refuse a request for text of a model that pools.

        Raises: RequestError
        """
        if self.engine.client.pooler is not None:
            raise RequestError(
                f"model: {self.settings.model_id} pools and does not generate; ask /v1/embeddings, /classify, "
                "/score or /pooling",
                param="model",
            )

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here; no name means the one that is.

        Raises: UnknownModel
        """
        if name and name not in self.settings.served_names:
            shown = ", ".join(self.settings.served_names[:_N_NAMES_SHOWN])
            raise UnknownModel(f"model: got {name[:200]!r}; {shown} is served here; ask for that", param="model")

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on one of the server's threads, where the log knows the request too."""
        call = functools.partial(contextvars.copy_context().run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def start(
        self,
        prepare: Callable[[], tuple[T, Sequence[Submission]]],
        request_id: str,
        *,
        is_stream: bool,
        has_form: bool = False,
    ) -> tuple[T, Running]:
        """Prepare a request's prompts on a thread and send them to the engine: all, or none.

        `has_form`: a form of its text may have to be compiled.

        Raises: RequestError: one is refused. The caller closes what it is given.
        """
        kind = RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
        pool = self._form_pool if has_form else self._pool
        submit = functools.partial(contextvars.copy_context().run, self._submit, prepare, request_id, kind)
        work = pool.submit(submit)
        try:
            prepared, handles = await asyncio.shield(asyncio.wrap_future(work))
        except asyncio.CancelledError:
            # A thread cannot be cancelled: what it still submits it closes itself, for the loop may be gone by then.
            work.add_done_callback(_close_unwanted)
            raise
        running = Running(handles, self.log.output_log(request_id))
        running.on_close = self._running.discard
        self._running.add(running)
        note_running(running)
        if self._is_aborting:
            running.abort()
        return prepared, running

    def begin_drain(self) -> None:
        """Refuse new requests; let those under way go on."""
        self.is_draining = True
        self.responses.begin_drain()

    def abort_all(self) -> None:
        """End what is under way: its readers get what there is, and "abort"."""
        self._is_aborting = True
        for running in list(self._running):
            running.abort()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self.tracer is not None:
            self.tracer.close()
        for pool in (self._pool, self._form_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Raise AssertionError when something is under way that no request stands for."""
        assert self.n_open >= 0, "service: fewer than no requests are open"
        assert self.n_open or not self._running, f"service: {len(self._running)} engine requests were left behind"
        self.responses.check()

    def _submit(
        self, prepare: Callable[[], tuple[T, Sequence[Submission]]], request_id: str, kind: RequestOutputKind
    ) -> tuple[T, list[Handle]]:
        prepared, submissions = prepare()
        # Clients may send one id twice at once; the engine's ids are unique.
        stem = f"{request_id}-{uuid.uuid4().hex[:8]}"
        handles: list[Handle] = []
        self.log.asked(request_id, submissions)
        try:
            for i, one in enumerate(submissions):
                if one.pooled is not None:
                    handles.append(self.engine.client.submit_pooled(one.pooled, request_id=f"{stem}-{i}"))
                    continue
                prompt: dict[str, Any] = {"prompt": one.text, "prompt_token_ids": one.token_ids}
                if one.beams is not None:
                    found = self.engine.client.beam_search(
                        prompt, one.beams, request_id=f"{stem}-{i}", priority=one.priority, cache_salt=one.cache_salt
                    )
                    handles.append(found)
                    continue
                params = msgspec.structs.replace(one.params, output_kind=kind)
                handles.append(
                    self.engine.client.submit(
                        prompt,
                        params,
                        request_id=f"{stem}-{i}",
                        priority=one.priority,
                        cache_salt=one.cache_salt,
                        thinking=one.thinking,
                    )
                )
        except BaseException:
            for handle in handles:
                handle.close()
            raise
        return prepared, handles


def _close_unwanted(work: "Future[tuple[Any, list[Handle]]]") -> None:
    if work.cancelled():
        return
    error = work.exception()
    if error is not None:
        _log.debug("a request that nobody waits for any more was refused: %s", error)
        return
    for handle in work.result()[1]:
        handle.close()


def _choose_parsers(tokenizer: Tokenizer | None, settings: ServerSettings) -> ParserChoice:
    if tokenizer is None:
        return ParserChoice()
    return choose_of(
        tokenizer,
        template=settings.chat_template,
        calls=settings.tool_call_parser,
        reasoning=settings.reasoning_parser,
    )


def _template_source(tokenizer: Tokenizer | None, *, has_tools: bool) -> str | None:
    if tokenizer is None:
        return None
    named = default_template(tokenizer.chat_templates, has_tools=has_tools)
    if has_tools and "tool_use" in tokenizer.chat_templates:
        return named
    return tokenizer.chat_template or named


def _compile_template(
    tokenizer: Tokenizer | None, source: str | None, *, is_given: bool = False
) -> ChatTemplate | TiercelError:
    """Compile a template, once; without a usable one of the model's, say what a chat gets to hear.

    Raises: ConfigError: one that was given cannot be used.
    """
    if tokenizer is None:
        return RequestError(
            "messages: this model is served without a tokenizer; send token ids to /v1/completions", param="messages"
        )
    if source is None:
        return RequestError(
            "messages: this model has no chat template; send a text to /v1/completions", param="messages"
        )
    try:
        return _compile(tokenizer, source)
    except ModelFileError as error:
        if is_given:
            raise ConfigError(f"chat_template: {error}") from None
        _log.warning("chats will be refused: %s", error)
        return error


def _compile(tokenizer: Tokenizer, source: str) -> ChatTemplate:
    bos = None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
    eos = tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else None
    return ChatTemplate(source, bos_token=bos, eos_token=eos)
