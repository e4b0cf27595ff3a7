"""A request with two ways to tell its length was read by one of them, and its connection went on to the next."""

import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "api"))

from kit import DEADLINE_S, Rig
from live import LiveServer

SMUGGLED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def live():
    rig = Rig(settings={"port": 0, "shutdown_s": 0.0})
    live = LiveServer(rig)
    yield live
    live.close()
    rig.close()


def test_both_lengths_are_refused_and_nothing_behind_them_is_read(live):
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", live.port), timeout=DEADLINE_S) as client:
        client.sendall(request + SMUGGLED)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"transfer-encoding; one of them" in answer
