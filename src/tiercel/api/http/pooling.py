"""/v1/embeddings, /pooling, /classify, /score and /rerank: requests about texts that a pooling model reads.

Bodies are checked as strictly as those of other routes; where the model generates, they are then refused with 501. Each
text, or pair of texts, is an engine request of its own. `pooling_answers` writes what comes of them.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http import pooling_answers as answers
from tiercel.api.http.answer import request_id_of
from tiercel.api.http.chat import priority_of
from tiercel.api.http.completions import read_prompts
from tiercel.api.http.reading import read
from tiercel.api.http.responses import json_response
from tiercel.api.http.running import Running, close_started, until_gone
from tiercel.api.http.service import Service, Submission
from tiercel.base.errors import RequestError
from tiercel.protocol.outputs import RequestOutput
from tiercel.protocol.pooling import PoolingParams


class Pooling(msgspec.Struct, kw_only=True, frozen=True):
    """What all of these have in common."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    use_activation: bool | None = None


class _OfInput(Pooling, kw_only=True, frozen=True):
    """`input` has the shapes of a completion's prompt; or `messages` are one chat."""

    input: Any = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Encoded(_OfInput, kw_only=True, frozen=True):
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    dimensions: int | None = None


class EmbeddingsRequest(_Encoded, kw_only=True, frozen=True):
    """The body of /v1/embeddings."""


class PoolingRequest(_Encoded, kw_only=True, frozen=True):
    """The body of /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassifyRequest(_OfInput, kw_only=True, frozen=True):
    """The body of /classify."""


class ScoreRequest(Pooling, kw_only=True, frozen=True):
    """The body of /score: one query with each document, or as many queries as documents, by any of three names."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    items: str | list[str] | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class RerankRequest(Pooling, kw_only=True, frozen=True):
    """The body of /rerank."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_PAIRS = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items"))


async def embeddings(request: Request, service: Service) -> Response:
    """Serve /v1/embeddings."""
    ask = await _read(request, service, EmbeddingsRequest, _check_input)
    return await _answer(request, service, ask, lambda: _inputs(service, request, ask, "embed"), answers.embeddings)


async def pooling(request: Request, service: Service) -> Response:
    """Serve /pooling."""
    ask = await _read(request, service, PoolingRequest, _check_input)
    return await _answer(request, service, ask, lambda: _inputs(service, request, ask, ask.task), answers.pooling)


async def classify(request: Request, service: Service) -> Response:
    """Serve /classify."""
    ask = await _read(request, service, ClassifyRequest, _check_input)
    return await _answer(request, service, ask, lambda: _inputs(service, request, ask, "classify"), answers.classes)


async def score(request: Request, service: Service) -> Response:
    """Serve /score and /v1/score."""
    ask = await _read(request, service, ScoreRequest, _check_pairs)
    queries, documents = _pair_of(ask)
    queries = queries * (len(documents) // len(queries))
    work = lambda: _pairs(service, request, ask, queries, documents)  # noqa: E731  as in its neighbours
    return await _answer(request, service, ask, work, answers.scores)


async def rerank(request: Request, service: Service) -> Response:
    """Serve /rerank, /v1/rerank and /v2/rerank."""
    ask = await _read(request, service, RerankRequest, _check_documents)
    queries = [ask.query] * len(ask.documents)
    work = lambda: _pairs(service, request, ask, queries, ask.documents)  # noqa: E731
    return await _answer(request, service, ask, work, answers.ranks)


Handler = Callable[[Request, Service], Awaitable[Response]]
_Check = Callable[[Any, int], None]
_A = TypeVar("_A", bound=Pooling)


async def _read(request: Request, service: Service, kind: type[_A], check: _Check) -> _A:
    ask = await read(request, service, kind)
    service.check_model(ask.model)
    if ask.truncate_prompt_tokens is not None and (ask.truncate_prompt_tokens < -1 or ask.truncate_prompt_tokens == 0):
        raise _refused("truncate_prompt_tokens", f"got {ask.truncate_prompt_tokens}; -1, or 1 or more, is needed")
    check(ask, service.settings.n_prompts_max)
    if service.engine.client.pooler is None:
        raise HTTPException(
            501,
            f"model: {service.settings.model_id} generates text; {request.scope['state']['handler']} needs a "
            "model that embeds or scores; serve one",
        )
    for name in ("instruction", "chat_template_kwargs", "max_tokens_per_query", "max_tokens_per_doc"):
        if not isinstance(ask, _OfInput) and getattr(ask, name) is not None:
            raise _refused(name, "this route does not take it yet; leave it out")
    return ask


async def _answer(
    request: Request,
    service: Service,
    ask: Pooling,
    prepare: Callable[[], list[Submission]],
    write: Callable[[answers.Asked], dict[str, Any]],
) -> Response:
    request_id = request_id_of(request, ask)

    def prepared() -> tuple[list[Submission], list[Submission]]:
        submissions = prepare()
        return submissions, submissions

    start = service.start(prepared, request_id, is_stream=False)
    submissions, running = await until_gone(request.receive, start, on_unwanted=close_started)
    try:
        outputs = await until_gone(request.receive, _outputs(running, len(submissions)))
    finally:
        running.close()
    ready = [(one.pooled, output) for one, output in zip(submissions, outputs, strict=True)]
    client = service.engine.client
    assert client.pooler is not None
    asked = answers.Asked(ask, request_id, service.settings.model_id, int(service.clock()), ready, client.pooler.spec)
    return json_response(await service.in_thread(write, asked))


async def _outputs(running: Running, n: int) -> list[RequestOutput]:
    found: dict[int, RequestOutput] = {}
    async for i, output in running.outputs():
        found[i] = output
    return [found[i] for i in range(n)]


def _inputs(service: Service, request: Request, ask: _OfInput, task: Any) -> list[Submission]:
    """Prepare a request's texts. Runs on a thread of the server."""
    dimensions = ask.dimensions if isinstance(ask, _Encoded) else None
    is_framed = ask.add_special_tokens is not False
    if ask.messages is not None:
        text = service.template().render(
            ask.messages,
            add_generation_prompt=bool(ask.add_generation_prompt),
            continue_final_message=False,
            **(ask.chat_template_kwargs or {}),
        )
        return [
            _submission(service, request, ask, text, None, task, dimensions, is_framed=ask.add_special_tokens is True)
        ]
    prompts = read_prompts(ask.input, service.settings.n_prompts_max)
    return [_submission(service, request, ask, one, None, task, dimensions, is_framed=is_framed) for one in prompts]


def _pairs(service: Service, request: Request, ask: Pooling, firsts: list[str], seconds: list[str]) -> list[Submission]:
    """Prepare pairs: for a classifier of pairs as they are, else each text, once, for its vector.

    The texts of an embedder are in the order of their first use, queries before documents.
    """
    pooler = service.engine.client.pooler
    assert pooler is not None
    is_framed = ask.add_special_tokens is not False
    if "classify" in pooler.spec.tasks:
        if pooler.width != 1:
            raise _refused("model", f"it has {pooler.width} labels; a model of one is needed; use /classify")
        pairs: list[tuple[str, str | None]] = list(zip(firsts, seconds, strict=True))
        task = "classify"
    else:
        pairs = [(text, None) for text in (*firsts, *seconds)]
        task = "embed"
    return [_submission(service, request, ask, a, b, task, None, is_framed=is_framed) for a, b in pairs]


def _submission(
    service: Service,
    request: Request,
    ask: Pooling,
    prompt: str | list[int],
    second: str | None,
    task: Any,
    dimensions: int | None,
    *,
    is_framed: bool,
) -> Submission:
    params = PoolingParams(
        task=task,
        dimensions=dimensions,
        use_activation=ask.use_activation,
        truncate_prompt_tokens=ask.truncate_prompt_tokens,
        truncation_side=ask.truncation_side,
    )
    pooled = service.engine.client.prepare_pooled(
        prompt,
        params,
        second=second,
        is_framed=is_framed,
        priority=priority_of(request, ask.priority),
        cache_salt=ask.cache_salt,
    )
    one = pooled.request
    return Submission(text=one.text, token_ids=one.token_ids, params=one.params, pooled=pooled)


def _check_input(ask: _OfInput, n_max: int) -> None:
    if (ask.input is None) == (ask.messages is None):
        raise _refused("input", "one of input and messages is needed; send one")
    if isinstance(ask, _Encoded) and ask.encoding_format in ("bytes", "bytes_only"):
        raise _refused("encoding_format", f"got {ask.encoding_format!r}; float or base64 is needed")
    if isinstance(ask, _Encoded) and ask.dimensions is not None and ask.dimensions < 1:
        raise _refused("dimensions", f"got {ask.dimensions}; 1 or more is needed")
    if ask.messages is not None:
        if not ask.messages:
            raise _refused("messages", "it is empty; at least one message is needed")
        return
    try:
        inputs = read_prompts(ask.input, n_max)
    except RequestError as error:
        raise RequestError(str(error).replace("prompt", "input", 1), param="input") from None
    if not all(inputs):
        raise _refused("input", "one is empty; some text is needed")


def _pair_of(ask: ScoreRequest) -> tuple[list[str], list[str]]:
    """Return queries and documents, by whichever names they came."""
    names = next(pair for pair in _PAIRS if all(getattr(ask, name) is not None for name in pair))
    queries, documents = ([v] if isinstance(v, str) else v for v in (getattr(ask, name) for name in names))
    return queries, documents


def _check_pairs(ask: ScoreRequest, n_max: int) -> None:
    given = {name for pair in _PAIRS for name in pair if getattr(ask, name) is not None}
    pair = next((pair for pair in _PAIRS if given == set(pair)), None)
    if pair is None:
        raise _refused("queries", "queries and documents are needed, or text_1 and text_2; send those two")
    queries, documents = _pair_of(ask)
    if len(queries) not in (1, len(documents)) or not documents:
        raise _refused(pair[0], f"got {len(queries)} for {len(documents)} of {pair[1]}; 1 or as many are needed")
    if len(documents) > n_max:
        raise _refused(pair[1], f"got {len(documents)}; at most {n_max} are taken; send fewer")


def _check_documents(ask: RerankRequest, n_max: int) -> None:
    if not 0 < len(ask.documents) <= n_max:
        raise _refused("documents", f"got {len(ask.documents)}; 1 to {n_max} are taken")
    if ask.top_n is not None and ask.top_n < 0:
        raise _refused("top_n", f"got {ask.top_n}; 0 or more is needed")


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)
