"""`bench served`: what is left of the offline rate over HTTP. The same requests, all at once, offline in this process
and streamed from a server of ours in another, taking turns in one run.

Measures of a round: `offline_tok_s` and `served_tok_s`, output tokens over the time from the first request to the last
token; `served_frac`, the second over the first; `client_cpu_frac`, the part of one core that the load generator took
meanwhile (it shares the cores with the server).

Before that, the served token ids must be the offline ones, all of them; while timed, the texts must stay the same.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiercel.base.errors import RequestFailed
from tiercel.bench import burst, machine, ours
from tiercel.bench.contest import Request
from tiercel.bench.http_client import Server, read_url
from tiercel.bench.offline import Field, Told, make_row
from tiercel.bench.prompts import random_requests
from tiercel.bench.rows import OURS, Contestant, Row, spread

PATH = "/v1/completions"
_PACKAGES = ("numpy", "tokenizers", "starlette", "uvicorn", "h11", "msgspec")
_ADDRESS = re.compile(r"at (http://\S+?)/v1(?:;|$)")
# A server that asks for a key would refuse us.
_KEY_VARIABLES = ("TIERCEL_API_KEY", "VLLM_API_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWork:
    """The requests of one round; vLLM's names and meanings."""

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 128


def bench(who: Field, told: Told, work: ServedWork, *, on_note: Callable[[str], None] = lambda _: None) -> Row:
    """Measure what of the offline rate a server of the same model reaches.

    Raises: RequestFailed: the server fails, or its answers are not those of offline.
    """
    with contextlib.ExitStack() as open_:
        engine = ours.open_engine(who.model, who.options)
        open_.callback(engine.close)
        requests = random_requests(
            work.num_prompts,
            input_len=work.input_len,
            output_len=work.output_len,
            vocab_size=engine.vocab_size,
            seed=who.seed,
        )
        on_note("starting the server")
        words = serve_words(str(engine.model_path), ours.with_defaults(who.options))
        server = open_.enter_context(running_server(words, deadline_s=who.deadline_s))
        state = machine.describe()
        on_note("comparing outputs")
        digest, texts = check(engine, server, requests, who.deadline_s)
        found = []
        for i in range(who.n_warmups + who.n_rounds):
            one = take_turns(engine, server, requests, texts, is_served_first=bool(i % 2), timeout_s=who.deadline_s)
            if i >= who.n_warmups:
                found.append(one)
            on_note(f"round {i - who.n_warmups + 1} of {who.n_rounds}" if i >= who.n_warmups else "warming up")
        config = {
            "work": {**asdict(work), "n_warmups": who.n_warmups, "n_rounds": who.n_rounds, "seed": who.seed},
            "engine": dict(engine.config),
        }
    measures = {name: spread([one[name] for one in found]) for name in found[0]}
    contestant = Contestant(machine.versions(_PACKAGES), {}, measures, {"digest": digest, "n_requests": len(requests)})
    return make_row(told, config, {OURS: contestant}, {}, state)


def body_of(request: Request, *, with_ids: bool) -> bytes:
    """Return a request as the server takes it."""
    asked = {
        "prompt": list(request.token_ids),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(asked | ({"return_token_ids": True} if with_ids else {})).encode()


def check(
    engine: ours.LocalEngine, server: Server, requests: Sequence[Request], timeout_s: float
) -> tuple[str, list[str]]:
    """See that both give the same tokens; return a digest of them, and the texts.

    Raises: RequestFailed: they do not.
    """
    import hashlib

    offline = engine.generate(requests).token_ids
    answers = burst.send(server, PATH, [body_of(one, with_ids=True) for one in requests], timeout_s=timeout_s).answers
    differing = [i for i, (a, b) in enumerate(zip(offline, answers, strict=True)) if a != b.token_ids]
    if differing:
        raise RequestFailed(
            f"bench served: {len(differing)} of {len(requests)} served answers have other tokens than offline; the "
            f"first is request {differing[0]}; report this"
        )
    return hashlib.sha256(json.dumps(offline).encode()).hexdigest()[:16], [one.text for one in answers]


def take_turns(
    engine: ours.LocalEngine,
    server: Server,
    requests: Sequence[Request],
    texts: Sequence[str],
    *,
    is_served_first: bool,
    timeout_s: float,
) -> dict[str, float]:
    """Do one round, and return its measures.

    Raises: RequestFailed: a served text is not what it was.
    """
    bodies = [body_of(one, with_ids=False) for one in requests]
    if is_served_first:
        served = burst.send(server, PATH, bodies, timeout_s=timeout_s)
        offline = engine.generate(requests)
    else:
        offline = engine.generate(requests)
        served = burst.send(server, PATH, bodies, timeout_s=timeout_s)
    if [one.text for one in served.answers] != list(texts):
        raise RequestFailed("bench served: an answer changed from one round to the next; report this")
    n_out = sum(one.max_tokens for one in requests)
    offline_tok_s, served_tok_s = n_out / offline.elapsed_s, n_out / served.elapsed_s
    return {
        "offline_tok_s": offline_tok_s,
        "served_tok_s": served_tok_s,
        "served_frac": served_tok_s / offline_tok_s,
        "client_cpu_frac": served.client_cpu_s / served.elapsed_s,
    }


def serve_words(model: str, options: Mapping[str, Any]) -> list[str]:
    """Return the command that serves `model` on a free port."""
    return [sys.executable, "-m", "tiercel", "serve", model, "--port", "0", *ours.option_words(options)]


@contextlib.contextmanager
def running_server(words: Sequence[str], *, deadline_s: float) -> Iterator[Server]:
    """Run a server as a process of its own, until it says where it is; end it after use.

    Raises: RequestFailed: it ends, or says nothing for `deadline_s`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _KEY_VARIABLES}
    process = subprocess.Popen(
        list(words),
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    reader = _LineReader(process)
    reader.start()
    try:
        if not reader.has_told.wait(deadline_s):
            raise RequestFailed(f"bench served: server: stalled: no address in {deadline_s:g} s")
        if reader.url is None:
            raise RequestFailed(f"bench served: server: died: exit code {process.wait()}; it said: {reader.last_line}")
        yield read_url(reader.url)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


class _LineReader(threading.Thread):
    """Reads what a server says, to its end, so that it never waits for us; notes its address and its last line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        super().__init__(name="bench-served", daemon=True)
        assert process.stderr is not None
        self.url: str | None = None
        self.last_line = ""
        self.has_told = threading.Event()
        self._stream = process.stderr

    def run(self) -> None:
        for line in self._stream:
            self.last_line = line.strip()
            found = _ADDRESS.search(self.last_line)
            if found is not None and self.url is None:
                self.url = found.group(1)
                self.has_told.set()
        self.has_told.set()
