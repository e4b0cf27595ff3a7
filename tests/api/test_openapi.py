"""What the server says of itself: every route, by the types its bodies are checked with."""

import re
from html.parser import HTMLParser

import msgspec
import pytest
from kit import error_of

from tiercel.api.http.app import DOCS_ROUTES, NOT_BUILT, PAGE_ROUTES, ROUTES
from tiercel.api.http.openapi import BODIES
from tiercel.api.http.schema import FREE, NO_OPS

# POST routes that read no body.
WITHOUT_BODY = {"/ping", "/v1/responses/{response_id}/cancel"}


@pytest.fixture(scope="module")
def described(shared):
    return shared.ask("GET", "/openapi.json").json()


def test_every_route_is_described(described):
    told = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    routes = (*ROUTES, *DOCS_ROUTES, *PAGE_ROUTES)
    there = {(method, path.replace(":path", "")) for methods, path, _ in routes for method in methods.split()}
    assert told == there | {("POST", path) for path in NOT_BUILT}
    for methods in described["paths"].values():
        assert all(operation["summary"] for operation in methods.values())


def test_every_body_is_described():
    taking = {path for methods, path, _ in ROUTES if "POST" in methods.split()} - WITHOUT_BODY
    assert set(BODIES) == taking


def test_a_body_is_described_by_its_struct_and_the_tables(described):
    for path, kind in BODIES.items():
        schema = body_of(described, path)
        names = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert set(schema["properties"]) == names | FREE | set(NO_OPS)
        assert schema["additionalProperties"] is False
    chat = body_of(described, "/v1/chat/completions")
    assert chat["required"] == ["messages"]
    assert chat["properties"]["best_of"]["enum"] == [None, 1]


def body_of(described, path):
    media = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return described["components"]["schemas"][media["schema"]["$ref"].rpartition("/")[2]]


def test_every_reference_leads_somewhere(described):
    names = set(re.findall(r"'#/components/schemas/([^']+)'", str(described)))
    assert names
    assert names <= set(described["components"]["schemas"])


def test_errors_are_described_in_each_routes_shape(rig, described):
    shapes = described["components"]["schemas"]
    error = rig.post("/v1/messages", {}, 400)
    assert set(error) == set(shapes["AnthropicError"]["properties"])
    assert error["error"]["type"] in shapes["AnthropicError"]["properties"]["error"]["properties"]["type"]["enum"]
    error = rig.refused("/v1/completions", {})
    assert set(error) == set(shapes["Error"]["properties"]["error"]["properties"])


def test_keys_are_described_where_they_are_needed(make_rig):
    rig = make_rig(settings={"api_keys": ("k",)})
    described = rig.ask("GET", "/openapi.json", headers={"x-api-key": "k"}).json()
    assert set(described["components"]["securitySchemes"]) == {"bearer", "header"}
    assert "security" not in described["paths"]["/health"]["get"]
    assert described["paths"]["/v1/messages"]["post"]["security"]


class Page(HTMLParser):
    """Notes what a page would fetch, and whether its tags are its own."""

    def __init__(self):
        super().__init__()
        self.fetched = []
        self.tags = set()
        self.text = ""

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_page_fetches_nothing_and_runs_nothing(rig):
    response = rig.ask("GET", "/docs")
    assert response.headers["content-type"].startswith("text/html")
    page = Page()
    page.feed(response.text)
    assert all(one == "openapi.json" or one.startswith("#") for one in page.fetched)
    assert "script" not in page.tags
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    for path in BODIES:
        assert path in page.text
    assert "max_completion_tokens" in page.text


def test_without_docs_there_are_none(make_rig):
    rig = make_rig(settings={"has_docs": False})
    for path in ("/docs", "/openapi.json"):
        response = rig.ask("GET", path)
        assert error_of(response.json(), 404)
