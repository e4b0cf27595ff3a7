"""`GET /`: the built-in page, one document with its style and script in it, so that nothing is fetched from anywhere.

The page asks the same routes as every client. It holds nothing of the server's: where a key is needed, a request
without one gets the page with status 401, and the page asks for the key.
"""

import base64
import functools
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request

    from tiercel.api.http.service import Service


@dataclass(frozen=True, slots=True)
class Page:
    """The document, and the policy under which a browser runs its own script and style and no other."""

    body: bytes
    policy: str


@functools.cache
def read_page() -> Page:
    """Put the page together from its three files."""
    folder = files("tiercel.api.http") / "assets"
    html, style, script = ((folder / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.replace("/*css*/", style).replace("/*js*/", script).encode(), policy)


def page_response(status: int = 200) -> Response:
    """Give the page."""
    page = read_page()
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": page.policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(page.body, status_code=status, headers=headers)


async def show_page(request: "Request", service: "Service") -> Response:
    """Answer `GET /`."""
    del request, service
    return page_response()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
