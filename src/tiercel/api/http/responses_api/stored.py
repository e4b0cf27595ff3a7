"""/v1/responses/{id}: what is stored, its events again, its input; cancelling and deleting it.

A response that another key made is not found, as one that never was. The parameters of a query are as strict as bodies.
"""

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http.responses import json_response
from tiercel.api.http.responses_api.asking import check_include
from tiercel.api.http.responses_api.routes import stream_of
from tiercel.api.http.responses_api.store import Record, page_of
from tiercel.api.http.running import until_gone
from tiercel.api.http.service import Service
from tiercel.base.errors import RequestError

_PAGE_MAX: Final = 100
_PAGE: Final = 20
_N_DIGITS_MAX: Final = 18


async def retrieve(request: Request, service: Service) -> Response:
    """Give a response as it is now, or its events from a number on."""
    query = _query(request, ("stream", "starting_after", "include_obfuscation"))
    record = _find(request, service)
    is_stream = _truth(query, "stream")
    if _truth(query, "include_obfuscation"):
        raise _refused("include_obfuscation", "nothing is obfuscated here; leave it out")
    if not is_stream:
        if "starting_after" in query:
            raise _refused("starting_after", "got it without a stream; add stream=true")
        return json_response(record.answer.shape())
    if record.log is None:
        raise _refused("stream", "only the events of a response made in the background are kept; leave it out")
    after = _number(query, "starting_after", -1, 0)
    if after + 1 < record.log.first:
        raise _refused(
            "starting_after", f"got {after}; the events before {record.log.first} are no longer kept; leave out stream"
        )
    return stream_of(service, record.log, after, request.scope["state"]["request_id"])


async def cancel(request: Request, service: Service) -> Response:
    """Stop a response in the background, and give what there is of it. Of one that has ended, nothing changes."""
    record = _find(request, service)
    if record.log is None:
        raise _refused("response_id", "it is not made in the background; close its connection to stop such a one")
    record.cancel()
    await until_gone(request.receive, _wait(record))
    return json_response(record.answer.shape())


async def delete(request: Request, service: Service) -> Response:
    """Forget a response; one that runs is stopped first."""
    record = _find(request, service)
    service.responses.delete(record)
    return json_response({"id": record.id, "object": "response", "deleted": True})


async def input_items(request: Request, service: Service) -> Response:
    """List what a response was made of, the conversation before it included; the newest first unless told."""
    query = _query(request, ("after", "limit", "order"))
    record = _find(request, service)
    limit = _number(query, "limit", _PAGE, 1)
    if limit > _PAGE_MAX:
        raise _refused("limit", f"got {limit}; 1 to {_PAGE_MAX} is needed")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _refused("order", f"got {order[:40]!r}; asc or desc is needed")
    after = query.get("after")
    try:
        return json_response(page_of(record.items, after=after, limit=limit, is_newest_first=order == "desc"))
    except LookupError:
        raise _refused("after", f"got {str(after)[:80]!r}, which is none of the items") from None


def _find(request: Request, service: Service) -> Record:
    return service.responses.get(request.scope["state"]["owner"], request.path_params["response_id"])


async def _wait(record: Record) -> None:
    if record.running is not None:
        await record.ended.wait()


def _query(request: Request, known: tuple[str, ...]) -> dict[str, str]:
    """Read the query's parameters; `include` is checked and has nothing to add to what is stored."""
    check_include(request.query_params.getlist("include") + request.query_params.getlist("include[]"))
    query = dict(request.query_params)
    for name in query:
        if name not in (*known, "include", "include[]"):
            raise _refused(name[:64], f"an unknown parameter; {', '.join(known)} are known")
    return query


def _truth(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise _refused(name, f"got {text[:40]!r}; true or false is needed")
    return text == "true"


def _number(query: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > _N_DIGITS_MAX or int(text) < least:
        raise _refused(name, f"got {text[:40]!r}; a number of {least} or more is needed")
    return int(text)


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)
