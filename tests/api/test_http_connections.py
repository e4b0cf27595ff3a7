"""Connections that are too many, or that do not send what they began."""

import httpx
import pytest
from kit import GatedRunner, error_of, wait_until
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
