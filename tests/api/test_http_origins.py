"""What pages of other origins may do, and servers under a prefix."""

import pytest
from kit import error_of

from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError

APP = "https://app.example"
ASKS = {"origin": APP, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.fixture
def opened(make_rig):
    return make_rig(settings={"allowed_origins": (APP,), "api_keys": ("k",)})


def test_pages_of_other_origins_get_nothing_unless_told(rig):
    assert "access-control-allow-origin" not in rig.ask("GET", "/v1/models", headers={"origin": APP}).headers
    assert rig.ask("OPTIONS", "/v1/chat/completions", headers=ASKS).status_code == 405


def test_a_preflight_needs_no_key(opened):
    response = opened.ask("OPTIONS", "/v1/chat/completions", headers=ASKS)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == APP
    assert response.headers["access-control-allow-headers"] == "authorization"
    assert "POST" in response.headers["access-control-allow-methods"]


def test_options_that_is_no_preflight_needs_a_key(opened):
    assert opened.ask("OPTIONS", "/v1/chat/completions").status_code == 401
    assert opened.ask("OPTIONS", "/v1/chat/completions", headers={"origin": APP}).status_code == 401


def test_a_preflight_of_another_origin_is_refused_in_the_form_of_all_errors(opened):
    response = opened.ask("OPTIONS", "/v1/chat/completions", headers=ASKS | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers
    assert "origin" in error_of(response.json(), 400)["message"]


def test_methods_and_headers_that_are_not_named_are_refused(make_rig):
    rig = make_rig(settings={"allowed_origins": (APP,), "allowed_methods": ("GET",), "allowed_headers": ("x-a",)})
    assert rig.ask("OPTIONS", "/v1/models", headers=ASKS).status_code == 400
    asks = ASKS | {"access-control-request-method": "GET", "access-control-request-headers": "x-a"}
    assert rig.ask("OPTIONS", "/v1/models", headers=asks).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/models", {"authorization": "Bearer k"}, 200),
        ("/v1/models", {}, 401),
        ("/v1/nothing", {"authorization": "Bearer k"}, 404),
        ("/v1/models", {"authorization": "Bearer k", "x-long": "x" * 70_000}, 431),
    ],
)
def test_errors_too_may_be_read_by_the_page(opened, path, headers, status):
    response = opened.ask("GET", path, headers=headers | {"origin": APP})
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == APP
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    assert "Origin" in response.headers["vary"]


def test_streams_may_be_read_by_the_page(opened):
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    headers = {"origin": APP, "authorization": "Bearer k"}
    response = opened.ask("POST", "/v1/completions", json=body, headers=headers)
    assert response.headers["access-control-allow-origin"] == APP


def test_a_star_opens_the_server_to_every_page_without_its_cookies(make_rig):
    rig = make_rig(settings={"allowed_origins": ("*",)})
    response = rig.ask("GET", "/v1/models", headers={"origin": APP})
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers


def test_credentials_are_allowed_to_named_origins_only(make_rig):
    rig = make_rig(settings={"allowed_origins": (APP,), "allow_credentials": True})
    assert rig.ask("GET", "/v1/models", headers={"origin": APP}).headers["access-control-allow-credentials"] == "true"
    with pytest.raises(ConfigError, match="every page"):
        ServerSettings(served_names=("a",), allowed_origins=("*",), allow_credentials=True)


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://app.example/x", "", "https://"])
def test_what_is_no_origin_is_refused_at_the_start(origin):
    with pytest.raises(ConfigError, match="origin"):
        ServerSettings(served_names=("a",), allowed_origins=(origin,))


@pytest.mark.parametrize("prefix", ["", "/models/a"])
def test_behind_a_prefix_a_proxy_may_or_may_not_take_it_off(make_rig, prefix):
    rig = make_rig(settings={"root_path": "/models/a", "api_keys": ("k",)})
    assert rig.ask("GET", f"{prefix}/health").status_code == 200
    assert rig.ask("GET", f"{prefix}/v1/models").status_code == 401
    key = {"authorization": "Bearer k"}
    assert rig.ask("GET", f"{prefix}/v1/models", headers=key).status_code == 200
    body = {"prompt": "x", "max_tokens": 3}
    assert rig.ask("POST", f"{prefix}/v1/completions", json=body, headers=key).status_code == 200
    assert rig.ask("GET", f"{prefix}/docs", headers=key).status_code == 200
    assert rig.service.n_open == 0
    assert 'handler="/v1/completions"' in rig.ask("GET", "/metrics", headers=key).text


def test_the_page_is_at_the_prefix_with_and_without_its_last_slash(make_rig):
    rig = make_rig(settings={"root_path": "/models/a"})
    for path in ("/models/a", "/models/a/", "/"):
        response = rig.ask("GET", path)
        assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")


@pytest.mark.parametrize("path", ["/models/ab/health", "/models/a/models/a/health", "/models/a/../health"])
def test_a_path_that_only_resembles_the_prefix_opens_nothing(make_rig, path):
    rig = make_rig(settings={"root_path": "/models/a", "api_keys": ("k",)})
    # Written by hand: a client would tidy the path up.
    assert rig.app._keys.owner_of({"path": path, "root_path": "/models/a", "headers": []}) is None


@pytest.mark.parametrize("root_path", ["models", "/", "/models/", "/a b", "/a?b", "//"])
def test_a_prefix_that_is_no_path_is_refused(root_path):
    with pytest.raises(ConfigError, match="root_path"):
        ServerSettings(served_names=("a",), root_path=root_path)
