"""Layers of the operator's own around the routes."""

import json

import pytest
from kit import error_of
from live import http_post, read_until

from tiercel.base.errors import ConfigError


def test_a_class_sees_requests_that_have_an_id(make_rig):
    rig = make_rig(settings={"middleware": ("layers.Tagging",)})
    response = rig.ask("GET", "/v1/models", headers={"x-request-id": "mine"})
    assert response.headers["x-tag"] == "mine"


def test_a_function_may_answer_itself(make_rig):
    rig = make_rig(settings={"middleware": ("layers.teapot",)})
    assert rig.ask("GET", "/v1/models", headers={"x-tea": "1"}).json() == {"tea": True}
    assert rig.ask("GET", "/v1/models").status_code == 200


def test_the_first_is_the_outermost(make_rig):
    rig = make_rig(settings={"middleware": ("layers.teapot", "layers.Tagging")})
    response = rig.ask("GET", "/v1/models", headers={"x-request-id": "mine"})
    assert response.headers["x-order"] == "mine"
    rig = make_rig(settings={"middleware": ("layers.Tagging", "layers.teapot")})
    assert rig.ask("GET", "/v1/models").headers["x-order"] == "none yet"


def test_a_request_without_a_key_reaches_none(make_rig):
    rig = make_rig(settings={"middleware": ("layers.Tagging",), "api_keys": ("k",)})
    response = rig.ask("GET", "/v1/models")
    assert response.status_code == 401
    assert "x-tag" not in response.headers


def test_what_one_raises_is_answered_without_its_words(make_rig, caplog):
    rig = make_rig(settings={"middleware": ("layers.Failing",)})
    response = rig.ask("GET", "/v1/models", headers={"x-fail": "1", "x-request-id": "mine"})
    assert "mine" in error_of(response.json(), 500)["message"]
    assert "secret detail" not in response.text
    assert "request mine: a middleware failed" in caplog.text
    rig.assert_idle()


@pytest.mark.parametrize("layer", ["layers.Tagging", "layers.teapot"])
def test_through_one_a_stream_comes_whole_and_a_client_that_leaves_frees_it(make_live, layer):
    live = make_live(settings={"middleware": (layer,)}, limits={"max_len_tokens": 4096, "n_pages": 2048})
    ask = {"prompt": "x", "max_tokens": 20, "stream": True, "ignore_eos": True}
    with live.connection() as raw:
        raw.sendall(http_post("/v1/completions", json.dumps(ask).encode()))
        read_until(raw, b"[DONE]")
        raw.sendall(http_post("/v1/completions", json.dumps(ask | {"max_tokens": 4000}).encode()))
        read_until(raw, b"data: ")
    live.rig.assert_idle()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("layers.Nothing", "imported"),
        ("no_such_module.x", "imported"),
        ("layers", "imported"),
        ("layers.CONSTANT", "class"),
        ("layers.Picky", "class"),
    ],
)
def test_what_is_no_layer_is_refused_at_the_start(make_rig, path, why):
    with pytest.raises(ConfigError, match=why):
        make_rig(settings={"middleware": (path,)})
