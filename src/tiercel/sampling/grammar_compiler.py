"""Has grammars compiled in worker processes, bounded in time and memory, which are ended when they exceed either.

The library's compiled grammars cannot leave a process. So a worker compiles first, as a trial, and what it managed
within the bounds is compiled again where it is used: at most once more as long, and never without bounds.

State: idle workers, at most `GrammarLimits.n_workers` in all, started when first needed. Any thread may call `compile`;
a thread that finds all workers busy waits for one.
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO, Any, Final

import msgspec

from tiercel.sampling.grammar_limits import GrammarLimits
from tiercel.sampling.grammar_worker import CompileAnswer, CompileJob, WorkerStart, write_frame

_MODULE: Final = "tiercel.sampling.grammar_worker"


class CompileRefused(ValueError):
    """A grammar was not compiled: it is wrong, or would take too long or too much memory."""


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, start: WorkerStart) -> None:
        # Where this package was found is where the worker's is, whatever this process did to its path.
        paths = [path for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        self.is_late = False  # it was ended for taking too long by the clock
        try:
            write_frame(self._to, start)  # type: ignore[arg-type]
        except OSError:
            self.kill()
            raise

    def ask(self, job: CompileJob, wall_s: float) -> CompileAnswer | None:
        """Compile; None when the worker ended, or was ended, before it had an answer."""
        until_s = time.monotonic() + wall_s
        with contextlib.suppress(OSError):
            write_frame(self._to, job)  # type: ignore[arg-type]
            size = self._read(4, until_s)
            data = None if size is None else self._read(int.from_bytes(size, "little"), until_s)
            if data is not None:
                return msgspec.msgpack.decode(data, type=CompileAnswer)
        self.kill()
        return None

    @property
    def is_alive(self) -> bool:
        """Whether nobody has ended the process."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process, whatever it does. Idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._to, self._from):
            with contextlib.suppress(OSError):
                stream.close()

    def _read(self, n_bytes: int, until_s: float) -> bytes | None:
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        data = b""
        while len(data) < n_bytes:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                self.is_late = True
                return None
            piece = os.read(self._from.fileno(), n_bytes - len(data))
            if not piece:
                return None
            data += piece
        return data


class GrammarCompiler:
    """The workers of one model's vocabulary; `start` says what each is told first."""

    def __init__(self, start: Callable[[], WorkerStart], limits: GrammarLimits) -> None:
        self._start = start
        self._limits = limits
        self._free = threading.Semaphore(limits.n_workers)
        self._lock = threading.Lock()  # guards the next two
        self._idle: list[_Worker] = []
        self._is_closed = False
        weakref.finalize(self, _kill, self._idle)  # an engine that is dropped without `close`

    def compile(self, form: str, text: str, options: dict[str, Any]) -> CompileAnswer:
        """Compile a form as a trial; give the library's grammar and what it took.

        Raises: CompileRefused: the message says why.
        """
        cpu_s = self._limits.regex_cpu_s if form == "regex" else self._limits.compile_cpu_s
        with self._free:
            worker = self._take()
            answer = worker.ask(CompileJob(form, text, options, cpu_s), self._limits.compile_wall_s)
            if answer is not None:
                self._give(worker)
        if answer is None and worker.is_late:
            raise CompileRefused(
                f"the compiler gave no answer within {self._limits.compile_wall_s} s; make it simpler or send it again "
                "when the machine has less to do"
            )
        if answer is None:
            raise CompileRefused(
                f"it takes more than {cpu_s} s of a processor or {self._limits.worker_bytes >> 20} MiB to compile; "
                "make it simpler"
            )
        if answer.error:
            raise CompileRefused(" ".join(answer.error.split())[:300])
        return answer

    def close(self) -> None:
        """End the workers. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle = self._idle.copy()
            self._idle.clear()
        _kill(idle)

    def _take(self) -> _Worker:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None and idle.is_alive:
            return idle
        if idle is not None:
            idle.kill()  # the system, or a person, ended it while it did nothing
        return _Worker(self._start())

    def _give(self, worker: _Worker) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(worker)
                return
        worker.kill()


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()
