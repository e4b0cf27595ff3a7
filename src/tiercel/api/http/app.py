"""The table of routes, and the app that serves them. Knows every handler and nothing of what they do.

A handler is `async (request, service) -> Response`. What it raises is answered here, once for all routes.
"""

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tiercel.api import errors
from tiercel.api.http import chat, completions, health, models, openapi, page, pooling, token_routes, tokenize
from tiercel.api.http.auth import route_path
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.gate import Gate
from tiercel.api.http.messages import handlers as messages
from tiercel.api.http.middleware import with_layers
from tiercel.api.http.responses import (
    error_response,
    http_error_response,
    json_response,
    shape_of,
    unexpected_response,
)
from tiercel.api.http.responses_api import routes as responses_routes
from tiercel.api.http.responses_api import stored
from tiercel.api.http.running import ClientGone
from tiercel.api.http.service import Service
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import TiercelError

_log = logging.getLogger(__name__)

Handler = Callable[[Request, Service], Awaitable[Response]]

ROUTES: Final[Sequence[tuple[str, str, Handler]]] = (
    ("GET", "/health", health.health),
    ("GET POST", "/ping", health.health),
    ("GET", "/ready", health.ready),
    ("GET", "/version", health.version),
    ("GET", "/load", health.load),
    ("GET", "/metrics", health.metrics),
    ("GET", "/metrics/", health.metrics),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.one_model),
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/chat/completions/render", token_routes.render_chat_route),
    ("POST", "/v1/completions/render", token_routes.render_completion_route),
    ("POST", "/inference/v1/generate", token_routes.generate),
    ("POST", "/v1/messages", messages.messages),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("POST", "/v1/responses", responses_routes.create),
    ("GET", "/v1/responses/{response_id}", stored.retrieve),
    ("DELETE", "/v1/responses/{response_id}", stored.delete),
    ("POST", "/v1/responses/{response_id}/cancel", stored.cancel),
    ("GET", "/v1/responses/{response_id}/input_items", stored.input_items),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("GET", "/tokenizer_info", tokenize.tokenizer_info),
    ("POST", "/v1/embeddings", pooling.embeddings),
    ("POST", "/pooling", pooling.pooling),
    ("POST", "/classify", pooling.classify),
    ("POST", "/score", pooling.score),
    ("POST", "/v1/score", pooling.score),
    ("POST", "/rerank", pooling.rerank),
    ("POST", "/v1/rerank", pooling.rerank),
    ("POST", "/v2/rerank", pooling.rerank),
)
DOCS_ROUTES: Final[Sequence[tuple[str, str, Handler]]] = (
    ("GET", "/openapi.json", openapi.openapi),
    ("GET", "/docs", openapi.docs),
)
PAGE_ROUTES: Final[Sequence[tuple[str, str, Handler]]] = (("GET", "/", page.show_page),)

# Routes that clients of OpenAI's and vLLM's servers know and this one does not have: better told than not found.
NOT_BUILT: Final = (
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/batch",
    "/v2/embed",
)


def make_app(engine: EngineFacade, settings: ServerSettings) -> Gate:
    """Make the ASGI app of one engine. Its `service` is closed by whoever made the app."""
    service = Service(engine, settings)
    # The engine's thread reads the listener anew each step; nothing runs yet, so nothing is missed.
    engine.client.core.set_listener(service.metrics)
    served = [*ROUTES]
    if settings.has_docs:
        served += DOCS_ROUTES
    if settings.has_page:
        served += PAGE_ROUTES
    routes = [_route(service, methods.split(), path, handler) for methods, path, handler in served]
    routes += [_route(service, ["POST"], path, _not_built) for path in NOT_BUILT]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _answer_http_error})
    app.router.redirect_slashes = False
    listed = [(methods, path, (handler.__doc__ or "").partition("\n")[0]) for methods, path, handler in served]
    missing = [("POST", path, "Not there yet.") for path in NOT_BUILT]
    # Written when somebody asks: the server's start does not wait for it.
    app.state.openapi = functools.cache(lambda: openapi.document([*listed, *missing], has_keys=bool(settings.keys)))
    return Gate(with_layers(app, settings.middleware), service)


def _route(service: Service, methods: list[str], path: str, handler: Handler) -> Route:
    async def answered(request: Request) -> Response:
        state = request.scope["state"]
        state["handler"] = path
        shape = shape_of(request.scope)
        try:
            return await handler(request, service)
        except TiercelError as error:
            return _answer(error, state["request_id"], shape)
        except HTTPException as error:
            return http_error_response(error, shape)
        except ClientGone:
            return json_response(shape(499, "client: it went away before the answer", None), 499)
        except Exception:  # noqa: BLE001  a request's boundary: logged with its id, and answered to it alone
            _log.error("request %s: %s failed", state["request_id"], path, exc_info=True)
            return unexpected_response(state["request_id"], shape)

    return Route(path, answered, methods=methods)


def _answer(error: TiercelError, request_id: str, shape: errors.Shape) -> Response:
    if errors.status_of(error) >= 500:
        _log.error("request %s: %s", request_id, error)
    else:
        _log.debug("request %s is refused: %s", request_id, error)
    return error_response(error, shape)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer what the router raises: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    shown = f"{request.method[:20]} {route_path(request.scope)[:200]}"
    if error.status_code == 404:
        # OpenAI's client wants a base URL that ends in /v1, Anthropic's adds it.
        is_twice = "/v1/v1/" in shown
        hint = "give this client the base URL without /v1" if is_twice else "see GET /v1/models, POST /v1/completions"
        error = HTTPException(404, f"route: {shown} is not one of this server's; {hint}")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        error = HTTPException(405, f"route: {shown}; {allowed} is needed", error.headers)
    return http_error_response(error, shape_of(request.scope))


async def _not_built(request: Request, service: Service) -> Response:
    del service
    message = f"route: {request.scope['state']['handler']} is not there yet; chats, completions and responses are"
    return json_response(errors.error_body(501, message), 501)
