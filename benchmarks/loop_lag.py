"""How long the server's event loop keeps others waiting, with idle connections and running streams; and how long
admission takes.

    python benchmarks/loop_lag.py MODEL [--connections 256] [--streams 32] [--seconds 10]

The server runs in a process of its own, as `tiercel serve` runs it, with one more task in its loop: it asks to be woken
every millisecond and notes how late it was. Admission is what a chat of 4,000 tokens passes before the engine has it
(read, written by the template, cut, submitted), on the server's threads; it is measured on the idle engine.

Prints one JSON object: milliseconds of lag (p50, p99, max), of admission (p50, p95), tokens a second, CPU of the load.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import statistics
import sys
import time
from typing import Any

_TICK_S = 0.001
_HEADERS: dict[str, str] = {}


def percentile(values: list[float], frac: float) -> float:
    """Give the value below which `frac` of them are, in milliseconds."""
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, int(frac * len(ordered)))], 3)


def serve(model: str, told: Any) -> None:
    """Serve, and tell the lags when asked. Runs in the child."""
    from tiercel.api.http.address import take_address
    from tiercel.api.http.app import make_app
    from tiercel.api.http.server import _Server, server_config
    from tiercel.api.http.settings import ServerSettings

    facade = build(model)
    settings = ServerSettings(served_names=("bench",), port=0, keep_alive_s=120, shutdown_s=0.0, n_open_max=1024)
    app = make_app(facade, settings)
    admitted = admission_s(app.service)
    listener = take_address(settings).listener
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            lags.append(time.perf_counter() - before - _TICK_S)

    async def answer(server: Any) -> None:
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, told.recv) == "begin":
            lags.clear()
            await loop.run_in_executor(None, told.recv)
            told.send((list(lags), admitted))
        server.should_exit = True

    async def main() -> None:
        server = _Server(server_config(app), lambda: told.send(listener.getsockname()[1]))
        tasks = [asyncio.create_task(watch()), asyncio.create_task(answer(server))]
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()

    asyncio.run(main())
    app.service.close()
    facade.close()


def build(model: str) -> Any:
    """Build the engine as the command line does."""
    from tiercel.api.http.facade import EngineFacade
    from tiercel.base.config import engine_options
    from tiercel.boot.engine import build_engine

    engine = build_engine(engine_options(model=model))
    return EngineFacade(client=engine.client, tokenizer=engine.tokenizer, close=engine.close)


def admission_s(service: Any, *, n_tokens: int = 4000, n_rounds: int = 40) -> list[float]:
    """Measure the admission of chats of `n_tokens`, each another one."""
    from tiercel.api.http.chat import _prepare
    from tiercel.api.http.reading import parse
    from tiercel.api.http.schema import ChatRequest

    class Plain:
        headers = _HEADERS

    draw, found = random.Random(0), []
    # Words that are tokens, as most of a text are.
    texts = [service.tokenizer.token_text(i) for i in range(300, 20_000)]
    words = draw.sample([text for text in texts if text[:1] == " " and text[1:].isalpha() and text.isascii()], 2000)
    for i in range(n_rounds):
        turns = [
            {"role": "user" if k % 2 == 0 else "assistant", "content": "".join(draw.choices(words, k=n_tokens // 21))}
            for k in range(21)
        ]
        body = json.dumps({"messages": turns, "max_tokens": 1, "cache_salt": str(i)}).encode()
        start = time.perf_counter()
        _, (one,) = _prepare(service, parse(body, ChatRequest), Plain())
        handle = service.engine.client.submit({"prompt": one.text, "prompt_token_ids": one.token_ids}, one.params)
        found.append(time.perf_counter() - start)
        handle.close()
        time.sleep(0.05)
    return found


async def load(port: int, n_connections: int, n_streams: int, seconds: float) -> int:
    """Hold idle connections open and keep streams running; give how many frames came."""
    idle = []
    for _ in range(n_connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        idle.append(writer)
    n_frames, end_s = 0, time.monotonic() + seconds

    async def stream(i: int) -> None:
        nonlocal n_frames
        ask = {"prompt": [1000 + i, 5, 6, 7], "max_tokens": 4000, "stream": True, "ignore_eos": True}
        content = json.dumps(ask).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}{len(content)}\r\n\r\n".encode() + content)
        while time.monotonic() < end_s:
            piece = await reader.read(65536)
            if not piece:
                raise RuntimeError(f"stream {i} ended early")
            n_frames += piece.count(b"data: ")
        writer.close()

    await asyncio.gather(*(stream(i) for i in range(n_streams)))
    for writer in idle:
        writer.close()
    return n_frames


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(args.model, there))
    child.start()
    port = here.recv()
    asyncio.run(load(port, 8, 4, 1.0))  # threads and caches are warm now
    before = resource.getrusage(resource.RUSAGE_SELF)
    here.send("begin")
    n_frames = asyncio.run(load(port, args.connections, args.streams, args.seconds))
    here.send("end")
    lags, admitted = here.recv()
    after = resource.getrusage(resource.RUSAGE_SELF)
    here.send("stop")
    child.join()
    told = {
        "connections": args.connections,
        "streams": args.streams,
        "n_lags": len(lags),
        "lag_p50_ms": percentile(lags, 0.5),
        "lag_p99_ms": percentile(lags, 0.99),
        "lag_max_ms": percentile(lags, 1.0),
        "admission_p50_ms": round(1e3 * statistics.median(admitted), 3),
        "admission_p95_ms": percentile(admitted, 0.95),
        "frames_s": round(n_frames / args.seconds, 1),
        "load_cpu_frac": round((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / args.seconds, 3),
    }
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
