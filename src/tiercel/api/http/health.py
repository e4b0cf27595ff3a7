"""How the server is: alive, ready, which version, how busy, and its metrics. These wait for nothing."""

from starlette.requests import Request
from starlette.responses import Response

from tiercel import __version__
from tiercel.api.http.metrics import CONTENT_TYPE
from tiercel.api.http.responses import json_response
from tiercel.api.http.service import Service


async def health(request: Request, service: Service) -> Response:
    """Say whether every thread lives and answers; empty when they do, as vLLM's."""
    del request
    silent = service.silent_threads()
    return json_response({"status": "dead", "threads": silent}, 503) if silent else Response(status_code=200)


async def ready(request: Request, service: Service) -> Response:
    """Say whether a request that came now would be served."""
    del request
    if service.is_ready:
        return json_response({"status": "ready"})
    status = "draining" if service.is_draining else "dead"
    return json_response({"status": status}, 503)


async def version(request: Request, service: Service) -> Response:
    """Say which version this is."""
    del request, service
    return json_response({"version": __version__})


async def load(request: Request, service: Service) -> Response:
    """Say how many generation requests are under way."""
    del request
    return json_response({"server_load": service.n_open})


async def metrics(request: Request, service: Service) -> Response:
    """Give the metrics in Prometheus' text form."""
    del request
    return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})
