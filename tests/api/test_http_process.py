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
from live import http_post, read_until

HERE = Path(__file__).parent
PROGRAM = """
import sys
sys.path.insert(0, {here!r})
from kit import FakeRunner, Rig
from tiercel.api.http import server
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError

class Dying(FakeRunner):
    def collect(self):
        if self.n_steps_run > 40:
            raise SystemError("the very reason")
        return super().collect()

take = server.take_address

def take_and_tell(settings):
    address = take(settings)
    print("bound to", address.url, file=sys.stderr, flush=True)
    return address

server.take_address = take_and_tell

def build():
    {before}
    limits = {{"max_len_tokens": 4096, "n_pages": 2048}}
    rig = Rig(runner={runner}, limits=limits, check_each_step=False)
    print("built", file=sys.stderr, flush=True)
    return rig.facade, settings

settings = ServerSettings(**({{"served_names": ("tiny",), "port": 0}} | {settings}))
try:
    code = server.serve(settings, build)
except ConfigError as error:
    print(f"tiercel: {{error}}", file=sys.stderr)
    code = 2
sys.exit(code)
"""
# What a build does first: it says so, and waits for a line.
WAIT = "print('loading', file=sys.stderr, flush=True); sys.stdin.readline()"


class Process:
    def __init__(self, *, before="pass", runner="FakeRunner", **settings):
        code = PROGRAM.format(here=str(HERE), before=before, runner=runner, settings=settings)
        words = [sys.executable, "-W", "error", "-c", code]
        self.popen = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines = []

    def wait_for(self, pattern):
        for line in self.popen.stderr:
            self.lines.append(line)
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"it ended: {''.join(self.lines)}")

    def wait_for_port(self):
        return int(self.wait_for(r"tiny at http://127\.0\.0\.1:(\d+)/v1")[1])

    def end(self):
        """Wait for the end; return the exit code and what was said."""
        _, said = self.popen.communicate(timeout=6 * DEADLINE_S)  # it may have to start first
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


def test_a_signal_ends_a_server_whose_log_nobody_reads_any_more(start):
    process = start()
    process.wait_for_port()
    process.popen.stdin.close()
    process.popen.stderr.close()
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(timeout=6 * DEADLINE_S) == 0


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


def test_a_second_server_on_a_port_is_told_before_it_loads(start):
    """V#8204: it was told after minutes of loading."""
    port = start().wait_for_port()
    code, said = start(port=port).end()
    assert code == 1
    assert "in use" in said
    assert "--port" in said
    assert "built" not in said


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
def test_who_asks_while_a_model_is_loaded_waits_for_the_answer(start, path):
    process = start(before=WAIT)
    port = int(process.wait_for(r"bound to http://127\.0\.0\.1:(\d+)/v1")[1])
    process.wait_for("loading")
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        raw.settimeout(0.05)
        with pytest.raises(TimeoutError):
            raw.recv(1)
        raw.settimeout(DEADLINE_S)
        process.popen.stdin.write("\n")
        process.popen.stdin.flush()
        assert b" 200 " in read_until(raw, b"\r\n")


def test_a_signal_while_a_model_is_loaded_ends_it_and_leaves_no_socket(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = start(uds="s.sock", before=WAIT)
    process.wait_for("loading")
    process.popen.send_signal(signal.SIGTERM)
    code, said = process.end()
    assert code == 0, said
    assert "Traceback" not in said
    assert "stopped before it served" in said
    assert not (tmp_path / "s.sock").exists()


def test_a_unix_socket_is_told_and_removed_by_a_signal(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = start(uds="s.sock")
    process.wait_for(r"tiny at s\.sock")
    with httpx.Client(transport=httpx.HTTPTransport(uds="s.sock"), base_url="http://uds") as client:
        assert client.get("/ready").status_code == 200
    process.popen.send_signal(signal.SIGTERM)
    assert process.end()[0] == 0
    assert not (tmp_path / "s.sock").exists()


def test_what_is_in_a_unix_sockets_way_is_told_before_it_loads(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.sock").write_text("precious")
    code, said = start(uds="s.sock").end()
    assert code == 1
    assert "no socket" in said
    assert "built" not in said


def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_reason_last(start):
    code, said = start(before="raise ConfigError('model: the very reason')").end()
    assert code != 0
    assert said.strip().splitlines()[-1] == "tiercel: model: the very reason"


def test_a_certificate_that_is_missing_is_told_before_it_loads(start):
    code, said = start(ssl_certfile="none.pem").end()
    assert code == 2
    assert "ssl_certfile" in said.strip().splitlines()[-1]
    assert "built" not in said


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_engine_that_dies_fails_what_runs_and_ends_the_process(start, is_stream):
    process = start(runner="Dying")
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": is_stream, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", process.wait_for_port()), timeout=DEADLINE_S) as raw:
        raw.sendall(http_post("/v1/completions", body))
        told = read_until(raw, b"[DONE]" if is_stream else b'"code":500')
    assert told.startswith(b"HTTP/1.1 200 " if is_stream else b"HTTP/1.1 500 ")
    assert b'"code":500' in told
    code, said = process.end()
    assert code == 1, said
    assert "the very reason" in said
    assert said.strip().splitlines()[-1].startswith("tiercel serve: the engine has died")
