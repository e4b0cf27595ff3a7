"""Layers that tests put around the routes, by their import path."""

from starlette.responses import JSONResponse

CONSTANT = 3


class Tagging:
    """Adds a header, and looks at the request's state."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        request_id = scope["state"]["request_id"]

        async def told(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-tag", request_id.encode())]
            await send(message)

        await self.app(scope, receive, told)


async def teapot(request, call_next):
    """Answers some requests itself."""
    if request.headers.get("x-tea"):
        return JSONResponse({"tea": True}, 418)
    response = await call_next(request)
    response.headers["x-order"] = response.headers.get("x-tag", "none yet")
    return response


class Failing:
    """Raises, before or in the middle of an answer."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if (b"x-fail", b"1") in scope["headers"]:
            raise ZeroDivisionError("secret detail")
        await self.app(scope, receive, send)


class Picky:
    def __init__(self, app, more):
        raise NotImplementedError
