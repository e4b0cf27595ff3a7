"""/v1/embeddings, /pooling, /classify, /score and /rerank: requests about texts that a pooling model reads.

Bodies are checked as strictly as those of other routes, and then refused with 501: the models served here generate, and
wrong numbers would be worse than none.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http.completions import read_prompts
from tiercel.api.http.reading import read
from tiercel.api.http.service import Service
from tiercel.base.errors import RequestError


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
    return await _served(request, service, EmbeddingsRequest, _check_input)


async def pooling(request: Request, service: Service) -> Response:
    """Serve /pooling."""
    return await _served(request, service, PoolingRequest, _check_input)


async def classify(request: Request, service: Service) -> Response:
    """Serve /classify."""
    return await _served(request, service, ClassifyRequest, _check_input)


async def score(request: Request, service: Service) -> Response:
    """Serve /score and /v1/score."""
    return await _served(request, service, ScoreRequest, _check_pairs)


async def rerank(request: Request, service: Service) -> Response:
    """Serve /rerank, /v1/rerank and /v2/rerank."""
    return await _served(request, service, RerankRequest, _check_documents)


Handler = Callable[[Request, Service], Awaitable[Response]]
_Check = Callable[[Any, int], None]


async def _served(request: Request, service: Service, kind: type[Pooling], check: _Check) -> Response:
    ask = await read(request, service, kind)
    service.check_model(ask.model)
    if ask.truncate_prompt_tokens is not None and ask.truncate_prompt_tokens < -1:
        raise _refused("truncate_prompt_tokens", f"got {ask.truncate_prompt_tokens}; -1 or more is needed")
    check(ask, service.settings.n_prompts_max)
    raise HTTPException(
        501,
        f"model: {service.settings.model_id} generates text; {request.scope['state']['handler']} needs a model that "
        "embeds or scores, and such models are not served yet",
    )


def _check_input(ask: _OfInput, n_max: int) -> None:
    if (ask.input is None) == (ask.messages is None):
        raise _refused("input", "one of input and messages is needed; send one")
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


def _check_pairs(ask: ScoreRequest, n_max: int) -> None:
    given = {name for pair in _PAIRS for name in pair if getattr(ask, name) is not None}
    pair = next((pair for pair in _PAIRS if given == set(pair)), None)
    if pair is None:
        raise _refused("queries", "queries and documents are needed, or text_1 and text_2; send those two")
    queries, documents = (
        [value] if isinstance(value, str) else value for value in (getattr(ask, name) for name in pair)
    )
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
