"""/v1/models: the names this server answers to."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http.responses import json_response
from tiercel.api.http.service import Service


async def list_models(request: Request, service: Service) -> Response:
    """List every served name."""
    del request
    data = [_entry(service, name) for name in service.settings.served_names]
    return json_response({"object": "list", "data": data})


async def one_model(request: Request, service: Service) -> Response:
    """Describe one served name."""
    name = request.path_params["name"]
    if not name:  # /v1/models/: the list, whatever an empty name may mean elsewhere
        return await list_models(request, service)
    service.check_model(name)
    return json_response(_entry(service, name))


def _entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "tiercel",
        "root": service.settings.model_id,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
        "permission": [],
    }
