"""Connections that are too many, or that do not send what they began."""

import json
import socket

import httpx
import pytest
from kit import DEADLINE_S, GatedRunner, error_of, wait_until
from live import http_post, read_until

from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError


def test_beyond_so_many_connections_a_request_is_told_to_come_back_and_the_others_go_on(make_live):
    live = make_live(settings={"n_connections_max": 2})
    with live.connection() as first, live.connection():
        wait_until(lambda: live.rig.service.n_connections == 2)
        response = httpx.get(f"{live.url}/v1/models")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.headers["connection"] == "close"
        assert "2 are served" in error_of(response.json(), 503)["message"]
        assert httpx.get(f"{live.url}/health").status_code == 200  # a prober is not told that the server is dead
        wait_until(lambda: live.rig.service.n_connections == 2)
        first.sendall(http_post("/v1/completions", b'{"prompt": "x", "max_tokens": 2}'))
        assert b" 200 " in read_until(first, b"\r\n")
    wait_until(lambda: live.rig.service.n_connections == 0)
    assert httpx.get(f"{live.url}/v1/models").status_code == 200
    live.rig.assert_idle()


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nhost:"], ids=["nothing", "half a head"])
def test_a_connection_that_sends_no_whole_head_is_closed(make_live, data):
    live = make_live(settings={"read_stall_s": 0.05})
    with live.connection() as raw:
        raw.sendall(data)
        assert raw.recv(1) == b""
    wait_until(lambda: live.rig.service.n_connections == 0)


def test_a_head_that_comes_a_byte_at_a_time_has_no_more_time_than_another(make_live):
    live = make_live()
    with live.connection() as raw:
        wait_until(lambda: live.n_connections == 1)
        (connection,) = live.server.server_state.connections
        timer = connection._head_timer
        assert timer is not None
        for n, byte in enumerate(b"GET /health HTTP", 1):
            raw.sendall(bytes([byte]))
            wait_until(lambda n=n: len(connection.conn.trailing_data[0]) == n)
            assert connection._head_timer is timer


def test_a_later_head_on_the_same_connection_is_timed_too(make_live):
    live = make_live(settings={"read_stall_s": 0.05, "keep_alive_s": 60})
    with live.connection() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(raw, b"\r\n\r\n")
        raw.sendall(b"GET /health HTTP/1.1\r\nhost:")
        assert raw.recv(1) == b""


def test_a_request_under_way_is_not_cut_by_the_time_of_heads(make_live):
    live = make_live(settings={"read_stall_s": 0.05}, runner=GatedRunner)
    with live.connection() as raw, live.connection() as idle:
        raw.sendall(http_post("/v1/completions", b'{"prompt": "x", "max_tokens": 4}'))
        wait_until(lambda: live.rig.service.n_open == 1)
        assert idle.recv(1) == b""  # the time of heads has passed
        live.rig.runner.open()
        read_until(raw, b'"usage"')
    live.rig.assert_idle()


def test_a_server_that_takes_no_connection_is_refused():
    with pytest.raises(ConfigError, match="n_connections_max"):
        ServerSettings(served_names=("a",), n_connections_max=0)


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def test_far_too_many_connections_are_closed_unheard(make_live):
    live = make_live(settings={"n_connections_max": 1})
    opened = [socket.create_connection(("127.0.0.1", live.port), timeout=DEADLINE_S) for _ in range(140)]
    try:
        assert answer_to_health(live) == b""
    finally:
        for raw in opened:
            raw.close()
    wait_until(lambda: live.rig.service.n_connections == 0)
    assert b" 200 " in answer_to_health(live)


def answer_to_health(live):
    try:
        with live.connection() as raw:
            raw.sendall(HEALTH)
            return raw.recv(100)
    except ConnectionError:
        return b""


def test_what_is_no_http_is_refused_in_the_words_of_every_error(make_live):
    live = make_live()
    with live.connection() as raw:
        raw.sendall(b"\x16\x03\x01\r\n\r\n")
        answer = read_until(raw, b"}}")
    assert error_of(json.loads(answer.partition(b"\r\n\r\n")[2]), 400)["message"].startswith("request: ")


def test_headers_a_little_over_the_bound_are_refused_with_their_status(make_live):
    live = make_live(settings={"header_bytes_max": 4096})
    with live.connection() as raw:
        raw.sendall(HEALTH[:-2] + b"x-long: " + b"y" * 6000 + b"\r\n\r\n")
        assert b" 431 " in read_until(raw, b"}}")


def test_a_body_that_breaks_is_refused_once_and_floods_no_log(make_live, caplog):
    live = make_live()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
    )
    with live.connection() as raw:
        raw.sendall(head + b"\r\nzz\r\n")
        assert b" 400 " in read_until(raw, b"}}")
        assert raw.recv(100) == b""
    wait_until(lambda: live.n_connections == 0 and not live.server.server_state.tasks)
    assert "Traceback" not in caplog.text
    live.rig.assert_idle()


def test_an_upgrade_is_not_made_and_floods_no_log(make_live, caplog):
    live = make_live()
    with live.connection() as raw:
        raw.sendall(HEALTH[:-2] + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n")
        assert b" 200 " in read_until(raw, b"\r\n\r\n")
    assert "pgrade" not in caplog.text
