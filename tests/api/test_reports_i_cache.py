"""Public reports about caches, scheduling and aborts elsewhere, each tried here on tiny pools; `docs/reports.md` lists
the rows. The fake runner's tokens depend on all that it reads through the page table, so a wrong page shows.
"""

import asyncio
import json
import random
from contextlib import suppress

import httpx
import pytest
from kit import GatedRunner, wait_until
from live import LiveServer, http_post, read_until
from scripted import CHAT, COMPLETE

from tiercel.base.errors import TiercelError

TINY = {"limits": {"n_pages": 24, "max_len_tokens": 64}, "max_num_batched_tokens": 32}
EXTRA = {"ignore_eos": True, "seed": 3, "return_token_ids": True}


def gather(rig, bodies, path=COMPLETE):
    """Ask all at once; give the answers."""

    async def ask():
        transport = httpx.ASGITransport(rig.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:
            return [r.json() for r in await asyncio.gather(*(client.post(path, json=body) for body in bodies))]

    return asyncio.run(ask())


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_v45238_a_shared_beginning_is_found_and_told(make_rig):
    rig = make_rig()
    shared = "s" * 100
    first = rig.complete(prompt=shared + "one" * 10, max_tokens=4)
    second = rig.complete(prompt=shared + "two" * 10, max_tokens=4)
    assert cached(first) == 0
    assert cached(second) == 100
    metrics = rig.ask("GET", "/metrics").text
    (hits,) = [line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total{")]
    assert float(hits.rsplit(" ", 1)[1]) == 100


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_v53912_a_cached_answer_is_the_cold_one(make_rig, async_scheduling):
    rig = make_rig(async_scheduling=async_scheduling)
    ask = {"prompt": "the same prompt, several times over", "temperature": 0, "logprobs": 3, "max_tokens": 12} | EXTRA
    cold, *warm = (rig.complete(**ask) for _ in range(4))
    assert all(cached(one) > 0 for one in warm)
    assert [one["choices"] for one in warm] == [cold["choices"]] * 3


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_v16832_v28787_preempted_requests_say_what_they_say_alone(make_rig, async_scheduling):
    """Room for one and a half, eight at once: no token is missing or twice, nor its log-probability."""
    options = {"limits": {"n_pages": 14, "max_len_tokens": 36}, "max_num_batched_tokens": 32}
    bodies = [
        EXTRA | {"prompt": f"{i}-" * 6, "max_tokens": 22, "logprobs": 2, "seed": i, "temperature": 0.9}
        for i in range(8)
    ]
    alone_rig = make_rig(async_scheduling=async_scheduling, enable_prefix_caching=False)
    alone = [alone_rig.complete(**body)["choices"] for body in bodies]
    rig = make_rig(async_scheduling=async_scheduling, **options)
    together = gather(rig, bodies)
    assert [answer["choices"] for answer in together] == alone
    assert [answer["usage"]["completion_tokens"] for answer in together] == [22] * 8
    assert rig.core.snapshot.n_total_preemptions > 0
    rig.assert_idle()
    counters = rig.ask("GET", "/metrics").text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in counters if line and not line.startswith("#")]
    assert min(values) >= 0


def test_s6888_s11970_nothing_leaks_whenever_requests_are_aborted(make_rig):
    rig = make_rig(**TINY, max_waiting=20)
    rng = random.Random(5)
    for _ in range(6):
        handles = []
        for i in range(12):
            ids = [65 + rng.randrange(3)] * rng.randrange(1, 40)
            handles.append(rig.client.submit({"prompt_token_ids": ids}))
            if i % 3 == 0:
                rng.choice(handles).abort()
        rng.shuffle(handles)
        for handle in handles:
            if rng.random() < 0.3:
                with suppress(TiercelError):
                    next(iter(handle), None)
            handle.close()
        rig.assert_idle()
    scheduler = rig.core._scheduler
    scheduler.check()
    scheduler.check_idle()
    assert rig.complete(max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
@pytest.mark.parametrize("is_stream", [True, False])
def test_v24584_a_client_that_leaves_stops_its_work(make_rig, path, is_stream):
    rig = make_rig(runner=GatedRunner, async_scheduling=False, settings={"port": 0, "shutdown_s": 0.0})
    live = LiveServer(rig)
    try:
        body = {"max_tokens": 150, "stream": is_stream, "ignore_eos": True}
        body |= {"prompt": "hello"} if path == COMPLETE else {"messages": [{"role": "user", "content": "hi"}]}
        with live.connection() as raw:
            raw.sendall(http_post(path, json.dumps(body).encode()))
            rig.runner.let(4)
            wait_until(lambda: rig.core.snapshot.n_total_generation_tokens >= 2)
            assert rig.core.snapshot.n_running == 1
            if is_stream:
                read_until(raw, b"data: ")
        wait_until(lambda: rig.service.n_open == 0)
        n_before = rig.core.snapshot.n_total_generation_tokens
        rig.runner.let(1)  # the step that was under way
        rig.assert_idle()
        assert rig.core.snapshot.n_total_generation_tokens <= n_before + 1
    finally:
        rig.runner.open()
        live.close()


def test_m244_two_sessions_with_one_beginning_each_get_their_own(make_rig):
    rig = make_rig()
    system = {"role": "system", "content": "You are brief and kind to everybody."}
    sessions = {
        name: [system, {"role": "user", "content": f"My name is {name}. Who am I?"}] for name in ("Ann", "Bob", "Cy")
    }

    def ask(messages):
        return rig.chat(messages=messages, max_tokens=10, temperature=0, return_token_ids=True)["choices"][0][
            "token_ids"
        ]

    cold = {}
    for name, messages in sessions.items():
        fresh = make_rig(enable_prefix_caching=False)
        cold[name] = fresh.chat(messages=messages, max_tokens=10, temperature=0, return_token_ids=True)["choices"][0]
    for name in ("Ann", "Bob", "Ann", "Cy", "Bob", "Cy", "Ann"):
        assert ask(sessions[name]) == cold[name]["token_ids"]


@pytest.mark.parametrize("n_steps", [1, 2, 3, 4, 5, 9])
def test_mlxomni92_what_an_aborted_answer_left_in_the_cache_is_right(make_rig, n_steps):
    """Cancelled at any step, asked again: the answer is that of a cold start, to the last token."""
    body = {"prompt": "a prompt of more than one page", "max_tokens": 20, "temperature": 0} | EXTRA
    cold = make_rig(enable_prefix_caching=False).complete(**body)["choices"]
    rig = make_rig(runner=GatedRunner, async_scheduling=n_steps % 2 == 0)
    handle = rig.client.submit(body["prompt"])
    rig.runner.let(n_steps)
    wait_until(lambda: rig.runner.n_steps_run >= n_steps)
    handle.close()
    rig.runner.open()
    rig.assert_idle()
    assert rig.complete(**body)["choices"] == cold
    longer = body | {"prompt": body["prompt"] + cold[0]["text"]}
    assert rig.complete(**longer)["usage"]["completion_tokens"] == 20
