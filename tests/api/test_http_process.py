"""The server as a process: its address, its signals, its exit code."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from kit import DEADLINE_S
from live import read_until

HERE = Path(__file__).parent
PROGRAM = """
import sys
sys.path.insert(0, {here!r})
from kit import Rig
from tiercel.api.http.server import serve
from tiercel.api.http.settings import ServerSettings

def build():
    limits = {{"max_len_tokens": 4096, "n_pages": 2048}}
    rig = Rig(limits=limits, check_each_step=False)
    print("built", file=sys.stderr, flush=True)
    return rig.facade

settings = ServerSettings(served_names=("tiny",), port={port}, shutdown_s={shutdown_s})
sys.exit(serve(settings, build))
"""


class Process:
    def __init__(self, *, shutdown_s=30.0, port=0):
        code = PROGRAM.format(here=str(HERE), port=port, shutdown_s=shutdown_s)
        self.popen = subprocess.Popen([sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE, text=True)
        self.lines = []

    def wait_for_port(self):
        for line in self.popen.stderr:
            self.lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
            if found:
                return int(found[1])
        raise AssertionError(f"it ended: {''.join(self.lines)}")

    def end(self):
        """Wait for the end; return the exit code and what was said."""
        _, said = self.popen.communicate(timeout=DEADLINE_S)
        return self.popen.returncode, "".join(self.lines) + said


@pytest.fixture
def start():
    made = []

    def one(**options):
        made.append(Process(**options))
        return made[-1]

    yield one
    for process in made:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.communicate()


def open_stream(port, max_tokens):
    raw = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    raw.sendall(head.encode() + b"\r\n\r\n" + body)
    read_until(raw, b"data: ")
    return raw


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_end_and_the_process_ends_well(start, number):
    process = start()
    port = process.wait_for_port()
    with open_stream(port, 700) as raw:
        process.popen.send_signal(number)
        rest = read_until(raw, b"[DONE]")
    assert b'"finish_reason":"length"' in rest
    code, said = process.end()
    assert code == 0, said
    assert "Traceback" not in said
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def test_what_runs_too_long_after_a_signal_is_told_that_it_is_aborted(start):
    process = start(shutdown_s=0.1)
    with open_stream(process.wait_for_port(), 4000) as raw:
        process.popen.send_signal(signal.SIGTERM)
        rest = read_until(raw, b"[DONE]")
    assert b'"finish_reason":"abort"' in rest
    code, said = process.end()
    assert code == 0, said
    assert "Traceback" not in said


def test_a_second_signal_ends_the_wait(start):
    process = start(shutdown_s=600.0)
    with open_stream(process.wait_for_port(), 4000) as raw:
        process.popen.send_signal(signal.SIGTERM)
        for line in process.popen.stderr:
            if "stopping" in line:
                break
        process.popen.send_signal(signal.SIGTERM)
        assert b'"finish_reason":"abort"' in read_until(raw, b"[DONE]")
    assert process.end()[0] == 0


def test_an_idle_server_ends_at_once(start):
    process = start()
    port = process.wait_for_port()
    assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    process.popen.send_signal(signal.SIGTERM)
    code, said = process.end()
    assert (code, "Traceback" in said) == (0, False)


def test_a_port_in_use_is_told_before_anything_is_built(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = start(port=taken.getsockname()[1]).end()
    assert code == 1
    assert "in use" in said
    assert "built" not in said
