"""Another engine, in its own virtual environment, that takes turns with ours: a process that speaks lines of JSON.

The process is `PYTHON benchmarks/peers/loop.py NAME`. We write one line, it answers with one line:

    {"do": "load", "model": PATH, "n_threads": 2, "max_len_tokens": 512, "max_num_seqs": 1}
        -> {"versions": {...}, "config": {...}}
    {"do": "generate", "requests": [{"token_ids": [...], "max_tokens": 16}, ...]}
        -> {"token_ids": [[...], ...], "elapsed_s": 1.25, "first_token_s": [0.1, ...] or null}
    {"do": "end"} -> the process ends

or, to any of them, {"error": "why not"}. What it prints elsewhere is kept to explain a failure. Every answer has a
deadline, and every way to fail has a kind (`FAILURES`). Knows nothing of any peer's engine.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiercel.base.errors import ConfigError, RequestFailed
from tiercel.bench.contest import Request, Run

FAILURES = {
    "missing": "its interpreter or script is not there, or it says that its package is not installed",
    "refused": "it answered with an error",
    "died": "the process ended instead of answering",
    "stalled": "no answer within the deadline",
    "garbage": "an answer that is not in the protocol",
    "wrong": "outputs that cannot be right: too few tokens, too many, or not the model's",
}
# A line of 32 requests of 4096 tokens is 1 MiB; a process that prints for ever must not fill the memory.
_LONGEST_LINE_BYTES = 64 << 20
_END_S = 5.0
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class PeerFailed(RequestFailed):
    """A peer could not take its turn. `kind` is one of `FAILURES`."""

    def __init__(self, peer: str, kind: str, what: str) -> None:
        assert kind in FAILURES
        super().__init__(f"peer {peer}: {kind}: {what}")
        self.peer = peer
        self.kind = kind


def read_peer(text: str) -> tuple[str, Path]:
    """Read `NAME=PYTHON`.

    Raises: ConfigError: it is not of that form.
    """
    name, equals, python = text.partition("=")
    if not equals or not python or not name.replace("_", "").isalnum():
        raise ConfigError(f"got {text!r}; need NAME=PYTHON, as in llama_cpp=llama-venv/bin/python")
    return name, Path(python).expanduser()


def peer_command(name: str, python: Path, folder: Path) -> list[str]:
    """Return the command that starts peer `name`, whose script is in `folder`.

    Raises: ConfigError: there is no such script; the message names those there are.
    """
    script, loop = folder / f"{name}.py", folder / "loop.py"
    if not script.is_file() or not loop.is_file():
        known = sorted(path.stem for path in folder.glob("*.py") if path.stem != "loop")
        raise ConfigError(
            f"peer: got {name!r}; there is no {name}.py among the peers' scripts; known are "
            f"{', '.join(known) or 'none'}; --peers-dir says where to look"
        )
    return [str(python), str(loop), name]


def environment(n_threads: int) -> dict[str, str]:
    """Return the environment of a peer's process: ours, without what points Python at our own packages."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return kept | {"OMP_NUM_THREADS": str(n_threads)}


def about(name: str, command: Sequence[str], *, deadline_s: float = 60.0) -> dict[str, str]:
    """Return the versions of what peer `name` runs, without loading a model.

    Raises: PeerFailed: it cannot run here.
    """
    try:
        ended = subprocess.run(
            [*command, "--about"], env=environment(1), capture_output=True, timeout=deadline_s, check=False
        )
    except OSError as error:
        raise PeerFailed(name, "missing", f"its interpreter does not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PeerFailed(name, "stalled", f"no answer in {deadline_s:g} s") from None
    try:
        told = json.loads(ended.stdout)
        if "error" in told:
            raise PeerFailed(name, "missing", str(told["error"])[:500])
        return {str(package): str(version) for package, version in told["versions"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PeerFailed(name, "died", f"exit code {ended.returncode}, and no versions told") from None


class Peer:
    """One peer's process. Owned by whoever opened it; `close` ends it, and is safe at any time."""

    def __init__(self, name: str, command: Sequence[str], *, n_threads: int, deadline_s: float = 600.0) -> None:
        """Start the process.

        Raises: PeerFailed: there is no such interpreter.
        """
        self.name = name
        self.versions: Mapping[str, str] = {}
        self.config: Mapping[str, Any] = {}
        self._n_threads = n_threads
        self._deadline_s = deadline_s
        self._rest = b""
        self._is_lost = False  # it does not answer: asking it to end would only wait
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
        try:
            # A group of its own, so that ending it ends whatever it started.
            self._process = subprocess.Popen(
                list(command),
                env=environment(n_threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._said.close()
            raise PeerFailed(name, "missing", f"its interpreter does not start: {error.strerror}") from None

    def load(self, model: Path, *, max_len_tokens: int, max_num_seqs: int) -> None:
        """Let the peer load a model.

        Raises: PeerFailed: it did not.
        """
        told = self._ask(
            {
                "do": "load",
                "model": str(model),
                "n_threads": self._n_threads,
                "max_len_tokens": max_len_tokens,
                "max_num_seqs": max_num_seqs,
            }
        )
        versions, config = told.get("versions"), told.get("config")
        if not isinstance(versions, dict) or not isinstance(config, dict):
            raise PeerFailed(self.name, "garbage", "the answer to load has no versions and config")
        self.versions, self.config = versions, config

    def generate(self, requests: Sequence[Request]) -> Run:
        """Let the peer complete `requests`, greedily and to their whole length.

        Raises: PeerFailed: it did not.
        """
        asked = [{"token_ids": list(one.token_ids), "max_tokens": one.max_tokens} for one in requests]
        told = self._ask({"do": "generate", "requests": asked})
        ids, elapsed_s, first_s = told.get("token_ids"), told.get("elapsed_s"), told.get("first_token_s")
        if ids is None or elapsed_s is None or not _is_rows_of_ids(ids) or not _is_time(elapsed_s):
            raise PeerFailed(self.name, "garbage", "the answer to generate has no token_ids and elapsed_s")
        if first_s is not None and (not isinstance(first_s, list) or not all(_is_time(one) for one in first_s)):
            raise PeerFailed(self.name, "garbage", "first_token_s is no list of seconds")
        return Run(tuple(tuple(row) for row in ids), float(elapsed_s), None if first_s is None else tuple(first_s))

    def close(self) -> None:
        """End the process and what it started."""
        if self._process.stdin is not None and self._process.poll() is None and not self._is_lost:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b'{"do": "end"}\n')
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        # The group outlives its first process when that leaves children behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        end_s = time.monotonic() + self._deadline_s
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
        except OSError:
            raise self._died() from None
        line = self._read_line(end_s)
        try:
            told = json.loads(line)
        except ValueError:
            raise PeerFailed(self.name, "garbage", f"not JSON: {line[:80]!r}") from None
        if not isinstance(told, dict):
            raise PeerFailed(self.name, "garbage", f"not an object: {line[:80]!r}")
        if "error" in told:
            kind = "missing" if told.get("kind") == "missing" else "refused"
            raise PeerFailed(self.name, kind, str(told["error"])[:500])
        return told

    def _read_line(self, end_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not ready.select(left_s):
                    self._is_lost = True
                    raise PeerFailed(self.name, "stalled", f"no answer in {self._deadline_s:g} s{self._last_words()}")
                more = self._process.stdout.read(1 << 16)
                if not more:
                    raise self._died()
                self._rest += more
                if len(self._rest) > _LONGEST_LINE_BYTES:
                    raise PeerFailed(self.name, "garbage", f"a line of more than {_LONGEST_LINE_BYTES} bytes")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _died(self) -> PeerFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.poll()
        how = "closed its output" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return PeerFailed(self.name, "died", f"{how}{self._last_words()}")

    def _last_words(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 400))
        lines = self._said.read().decode(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it said: {words}" if words else ""


def _is_rows_of_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and all(type(token) is int and token >= 0 for token in row) for row in value
    )


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
