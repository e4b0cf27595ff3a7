"""/openapi.json and /docs: what each route takes, from the very structs and tables that `reading` checks bodies by.

Knows no engine. The page is written here, whole, from the document: it fetches nothing and runs nothing.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tiercel import __version__
from tiercel.api.errors import ANTHROPIC_TYPES, TYPES
from tiercel.api.http import pooling
from tiercel.api.http.auth import OPEN_PATHS
from tiercel.api.http.messages.schema import CountRequest, MessagesRequest
from tiercel.api.http.responses import is_anthropic, json_response
from tiercel.api.http.responses_api.schema import ResponsesRequest
from tiercel.api.http.schema import (
    FREE,
    NO_OPS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tiercel.api.http.service import Service
from tiercel.api.http.token_routes import GenerateRequest

# Path -> the struct its body is read as.
BODIES: Final[Mapping[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions/render": CompletionRequest,
    "/inference/v1/generate": GenerateRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/embeddings": pooling.EmbeddingsRequest,
    "/pooling": pooling.PoolingRequest,
    "/classify": pooling.ClassifyRequest,
    "/score": pooling.ScoreRequest,
    "/v1/score": pooling.ScoreRequest,
    "/rerank": pooling.RerankRequest,
    "/v1/rerank": pooling.RerankRequest,
    "/v2/rerank": pooling.RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_REF: Final = "#/components/schemas/{name}"
# Routes whose answer is not JSON.
_KINDS: Final[Mapping[str, str]] = {
    "/metrics": "text/plain",
    "/metrics/": "text/plain",
    "/docs": "text/html",
    "/": "text/html",
}
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"

# Methods, path, and the handler's first line.
Listed = Iterable[tuple[str, str, str]]


def document(routes: Listed, *, has_keys: bool) -> dict[str, Any]:
    """Describe routes in OpenAPI 3.1."""
    kinds = list(dict.fromkeys(BODIES.values()))
    refs, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for ref in refs:
        _add_known_fields(components[_name_of(ref)])
    bodies = dict(zip(kinds, refs, strict=True))
    components |= {"Error": _openai_error(), "AnthropicError": _anthropic_error()}
    paths: dict[str, dict[str, Any]] = {}
    for methods, path, summary in routes:
        for method in methods.split():
            shown = path.replace(":path}", "}")
            operation = _operation(method, path, summary, has_keys=has_keys)
            if method == "POST" and path in BODIES:
                _add_body(operation, BODIES[path], bodies[BODIES[path]])
            paths.setdefault(shown, {})[method.lower()] = operation
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tiercel", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        described["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return described


def _operation(method: str, path: str, summary: str, *, has_keys: bool) -> dict[str, Any]:
    error = "AnthropicError" if is_anthropic(path) else "Error"
    kind = _KINDS.get(path, "application/json")
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method.lower()} {path}",
        "responses": {
            "200": {"description": "the answer", "content": {kind: {}}},
            "default": {"description": "an error", "content": {"application/json": {"schema": _ref(error)}}},
        },
    }
    names = [part[1:].partition(":")[0].rstrip("}") for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if has_keys and path not in OPEN_PATHS:
        operation["security"] = [{"bearer": []}, {"header": []}]
    return operation


def _add_body(operation: dict[str, Any], kind: type[msgspec.Struct], ref: Mapping[str, Any]) -> None:
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref}}}
    if "stream" in kind.__struct_fields__:
        operation["responses"]["200"]["content"]["text/event-stream"] = {}


def _add_known_fields(schema: dict[str, Any]) -> None:
    """Add the fields that are known without being the struct's, and close the object: others are refused."""
    properties = schema.setdefault("properties", {})
    for name in sorted(FREE):
        properties.setdefault(name, {"description": "accepted; it does not change the answer"})
    for name, (values, why) in sorted(NO_OPS.items()):
        properties.setdefault(name, {"enum": [None, *values], "description": why})
    schema["additionalProperties"] = False


def _name_of(ref: Mapping[str, Any]) -> str:
    """Give the name behind a reference; structs of one name have longer ones."""
    return str(ref["$ref"]).rpartition("/")[2]


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _openai_error() -> dict[str, Any]:
    fields = {
        "message": {"type": "string"},
        "type": {"type": "string", "enum": sorted(set(TYPES.values()))},
        "param": {"type": ["string", "null"]},
        "code": {"type": "integer"},
    }
    return _object(error=_object(**fields))


def _anthropic_error() -> dict[str, Any]:
    kinds = sorted({*ANTHROPIC_TYPES.values(), "invalid_request_error", "api_error"})
    inner = _object(type={"type": "string", "enum": kinds}, message={"type": "string"})
    return _object(type={"const": "error"}, error=inner)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


async def openapi(request: Request, service: Service) -> Response:
    """Give this document."""
    del service
    return json_response(request.app.state.openapi())


async def docs(request: Request, service: Service) -> Response:
    """Show this document to people."""
    del service
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
    return Response(page(request.app.state.openapi()), headers=headers, media_type="text/html")


_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0;"
    "border-top:1px solid #8884}code{font-size:.9em}summary{cursor:pointer;padding:.3rem 0}"
    ":root{color-scheme:light dark}"
)


def page(described: Mapping[str, Any]) -> str:
    """Write a document as a page."""
    schemas = described["components"]["schemas"]
    rows = [
        _route(method, path, operation, schemas)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    shapes = [f"<h3 id='{_text(name)}'>{_text(name)}</h3>{_fields(schema)}" for name, schema in schemas.items()]
    title = f"{described['info']['title']} {described['info']['version']}"
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{_text(title)}</title><style>{_STYLE}</style><h1>{_text(title)}</h1>"
        f"<p>For programs: <a href='openapi.json'>openapi.json</a></p><h2>Routes</h2>{''.join(rows)}"
        f"<h2>Shapes</h2>{''.join(shapes)}</html>"
    )


def _route(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    head = f"<code><b>{method.upper()}</b> {_text(path)}</code> {_text(operation['summary'])}"
    if "requestBody" not in operation:
        return f"<p>{head}</p>"
    name = _name_of(operation["requestBody"]["content"]["application/json"]["schema"])
    return f"<details><summary>{head}</summary>{_fields(schemas[name])}</details>"


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{_text(name)}</code>{' *' if name in required else ''}<td>{_kind(value)}"
        f"<td>{_text(value.get('description', ''))}"
        for name, value in schema.get("properties", {}).items()
    ]
    about = f"<p>{_text(schema['description'])}</p>" if "description" in schema else ""
    return f"{about}<table><tr><th>field<th>type<th>{''.join(rows)}</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = _text(_name_of(schema))
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{_text(msgspec.json.encode(one).decode())}</code>" for one in schema["enum"])
    kinds: str | Sequence[str] = schema.get("type", "any")
    name = kinds if isinstance(kinds, str) else " or ".join(kinds)
    inner = schema.get("items")
    return f"{_text(name)} of {_kind(inner)}" if isinstance(inner, Mapping) and inner else _text(name)


def _text(text: str) -> str:
    return html.escape(text)
