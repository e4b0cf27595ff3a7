"""Requests as tokens: /v1/chat/completions/render and /v1/completions/render write what would be computed, and
/inference/v1/generate computes it: token ids in, token ids out.

What a rendering answers with is what `generate` takes: the ids are those that the same request would be computed from.
Knows no text of an answer; sampling parameters have the engine's names.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http import logprobs
from tiercel.api.http.answer import Tally
from tiercel.api.http.chat import prepare_chat, priority_of
from tiercel.api.http.completions import prepare_completion
from tiercel.api.http.params import check_stream
from tiercel.api.http.reading import read
from tiercel.api.http.responses import json_response
from tiercel.api.http.running import Running, close_started, until_gone
from tiercel.api.http.schema import ChatRequest, CompletionRequest, Generation, StreamOptions
from tiercel.api.http.service import Service, Submission
from tiercel.api.http.sse import EventStream, frame
from tiercel.base.errors import RequestError
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.repetition import RepetitionDetectionParams
from tiercel.protocol.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from tiercel.protocol.outputs import CompletionOutput, RequestOutput

# Fields of SamplingParams that are the engine's own, or the route's to say.
_OWN: Final = ("output_kind", "bad_words_token_ids")
_NESTED: Final[Mapping[str, type[msgspec.Struct]]] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}
_N_TAIL: Final = 64  # tokens of a prompt that tell whether it opens reasoning


class GenerateRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None


async def render_chat_route(request: Request, service: Service) -> Response:
    """Write a chat's prompt as token ids, and its parameters; nothing is computed."""
    ask = await read(request, service, ChatRequest)
    service.check_model(ask.model)
    check_stream(ask)
    request_id: str = request.scope["state"]["request_id"]

    def work() -> dict[str, Any]:
        prepared, (one,) = prepare_chat(service, ask, request)
        rendered = _rendered(service, ask, one, f"chatcmpl-{request_id}")
        return rendered | ({"prompt_text": prepared.text} if ask.return_prompt_text else {})

    return json_response(await service.in_thread(work))


async def render_completion_route(request: Request, service: Service) -> Response:
    """Write each prompt of a completion as token ids, and its parameters; nothing is computed."""
    ask = await read(request, service, CompletionRequest)
    service.check_model(ask.model)
    check_stream(ask)
    request_id: str = request.scope["state"]["request_id"]

    def work() -> list[dict[str, Any]]:
        _, submissions = prepare_completion(service, ask, request)
        return [_rendered(service, ask, one, f"cmpl-{request_id}-{i}") for i, one in enumerate(submissions)]

    return json_response(await service.in_thread(work))


async def generate(request: Request, service: Service) -> Response:
    """Compute what follows token ids; answer with token ids."""
    ask = await read(request, service, GenerateRequest)
    service.check_model(ask.model)
    if ask.stream_options is not None and not ask.stream:
        raise RequestError(
            "stream_options: got some without a stream; stream true is needed; leave it out", param="stream_options"
        )
    request_id: str = request.scope["state"]["request_id"]
    has_form = bool(ask.sampling_params and ask.sampling_params.get("structured_outputs"))
    start = service.start(
        lambda: _prepare(service, ask, request),
        f"generate-tokens-{request_id}",
        is_stream=bool(ask.stream),
        has_form=has_form,
    )
    params, running = await until_gone(request.receive, start, on_unwanted=close_started)
    answer = _TokenAnswer(service, ask, params, f"generate-tokens-{request_id}")
    if ask.stream:
        return EventStream(
            answer.frames(running),
            on_close=lambda: answer.end(running),
            write_stall_s=service.settings.write_stall_s,
            request_id=request_id,
        )
    try:
        return json_response(await until_gone(request.receive, answer.whole(running)))
    finally:
        answer.end(running)


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Give parameters as JSON that `params_of_json` reads; what has its default is left out."""
    defaults = SamplingParams()
    given: dict[str, Any] = {}
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if name in _NESTED and value is not None:
            fields = msgspec.structs.asdict(value)
            given[name] = {key: one for key, one in fields.items() if key != "name" and one not in (None, False)}
        elif name not in _OWN and value != getattr(defaults, name):
            given[name] = msgspec.to_builtins(value, str_keys=True)
    return given | {"max_tokens": params.max_tokens}


def params_of_json(given: Mapping[str, Any]) -> SamplingParams:
    """Read parameters by the engine's names. Without `max_tokens` the answer may fill the context.

    Raises: RequestError: a name is unknown or a value wrong; `param` names it.
    """
    values = dict(given)
    for name in _OWN:
        if name in values:
            raise RequestError(f"sampling_params.{name}: it is not a client's; leave it out", param="sampling_params")
    for name, kind in _NESTED.items():
        value = values.get(name)
        if value is None:
            continue
        known = [field for field in kind.__struct_fields__ if field != "name"]
        if not isinstance(value, dict) or not set(value) <= set(known):
            raise RequestError(
                f"sampling_params.{name}: an object of {', '.join(known)} is needed", param=f"sampling_params.{name}"
            )
        values[name] = kind(**value)
    params = SamplingParams(**({"max_tokens": None} | values))
    return params if params.stop_strings else msgspec.structs.replace(params, detokenize=False)


def _rendered(service: Service, ask: Generation, one: Submission, request_id: str) -> dict[str, Any]:
    if ask.use_beam_search:
        raise RequestError(
            "use_beam_search: got true; a search has no parameters that generate takes; leave it out",
            param="use_beam_search",
        )
    context = service.engine.max_model_len
    room = context - len(one.token_ids)
    if not one.token_ids or room < 1:
        raise RequestError(
            f"prompt: {len(one.token_ids)} tokens; 1 to {context - 1} are needed, to leave room for one more",
            param="prompt",
        )
    most = one.params.max_tokens
    params = msgspec.structs.replace(one.params, max_tokens=room if most is None else min(most, room))
    rendered = {
        "request_id": request_id,
        "token_ids": one.token_ids,
        "sampling_params": params_to_json(params),
        "model": service.settings.model_id,
        "stream": bool(ask.stream),
        "cache_salt": one.cache_salt,
        "priority": one.priority,
    }
    if ask.stream_options is not None:
        rendered["stream_options"] = msgspec.structs.asdict(ask.stream_options)
    return rendered


def _prepare(service: Service, ask: GenerateRequest, request: Request) -> tuple[SamplingParams, list[Submission]]:
    params = params_of_json(ask.sampling_params or {})
    n_max = min(service.settings.n_outputs_max, service.engine.client.core.config.max_num_seqs)
    if params.n > n_max:
        raise RequestError(f"sampling_params.n: got {params.n}; 1 to {n_max} is needed", param="sampling_params.n")
    thinking = None
    tokenizer = service.engine.tokenizer
    if params.structured_outputs is not None and tokenizer is not None and service.parsers.has_reasoning:
        # As in the chat that was rendered: a form begins behind the reasoning that the prompt opens.
        size = service.engine.vocab_size
        tail = tokenizer.decode([i for i in ask.token_ids[-_N_TAIL:] if 0 <= i < size], skip_special_tokens=False)
        is_open = service.parsers.thinks_first(tail, is_enabled=None)
        thinking = service.parsers.thinking_marks(tail, is_open=is_open)
    one = Submission(
        text=None,
        token_ids=ask.token_ids,
        params=params,
        priority=priority_of(request, ask.priority),
        cache_salt=ask.cache_salt,
        thinking=thinking,
    )
    return params, [one]


class _TokenAnswer:
    """Makes one answer, whole or in frames, and keeps count."""

    def __init__(self, service: Service, ask: GenerateRequest, params: SamplingParams, request_id: str) -> None:
        self._service = service
        self._params = params
        self._id = request_id
        self._created_s = int(service.clock())
        self._tally = Tally(len(ask.token_ids))
        self._texts = logprobs.TokenTexts(service.engine.tokenizer, as_ids=True)
        options = ask.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._has_running_usage = bool(options and options.continuous_usage_stats)

    def end(self, running: Running) -> None:
        """Free the engine's request and note its size."""
        running.close()
        self._service.metrics.note_request(self._params.n, max(self._tally.n_by_choice.values(), default=0))

    async def whole(self, running: Running) -> dict[str, Any]:
        """Wait for the end; give the whole answer."""
        last: RequestOutput | None = None
        async for _, output in running.outputs():
            last = output
        assert last is not None, "generate: the engine gave no output and no error"
        self._tally.add(0, last, self._params.n)
        answer = self._around([self._choice(one) for one in last.outputs]) | {"usage": self._tally.usage()}
        answer["prompt_logprobs"] = logprobs.prompt_logprobs(last.prompt_logprobs, self._texts)
        return answer

    async def frames(self, running: Running) -> AsyncGenerator[bytes, None]:
        """Give the answer's frames as they come."""
        async for _, output in running.outputs():
            self._tally.add(0, output, self._params.n)
            chunk = self._around([self._choice(one) for one in output.outputs])
            if output.prompt_logprobs is not None:
                chunk["prompt_logprobs"] = logprobs.prompt_logprobs(output.prompt_logprobs, self._texts)
            yield frame(chunk | ({"usage": self._tally.usage()} if self._has_running_usage else {}))
        if self._has_usage:
            yield frame(self._around([]) | {"usage": self._tally.usage()})

    def _around(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = self._service.settings.model_id
        return {"request_id": self._id, "model": model, "created": self._created_s, "choices": choices}

    def _choice(self, one: "CompletionOutput") -> dict[str, Any]:
        entries = None
        if one.logprobs is not None:
            n_top = self._params.logprobs or 0
            entries = logprobs.chat_logprobs(one.logprobs, n_top, self._texts)
        return {
            "index": one.index,
            "token_ids": one.token_ids,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            "logprobs": entries,
        }
