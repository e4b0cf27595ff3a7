"""The server on a real socket: the official client, clients that go away, readers that do not read."""

import asyncio
import json
import random
import threading

import httpx
import openai
import pytest
from kit import DEADLINE_S, GatedRunner, Rig, error_of, read_frames, wait_until
from live import LiveServer, http_post, read_until

from tiercel.api.http import service as service_module

HI = [{"role": "user", "content": "hi"}]
EXTRA = {"ignore_eos": True}


@pytest.fixture(scope="module")
def shared_live():
    rig = Rig(settings={"port": 0, "shutdown_s": 0.0, "api_keys": ("k",)})
    live = LiveServer(rig)
    yield live
    live.close()
    rig.close()


@pytest.fixture
def client(shared_live):
    with openai.OpenAI(base_url=f"{shared_live.url}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S) as made:
        yield made
    shared_live.rig.assert_idle()


def test_the_official_client_chats_whole_and_streamed(client):
    ask = {"model": "tiny", "messages": HI, "max_tokens": 8, "seed": 3, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = client.chat.completions.create(**ask, extra_body=EXTRA)
    assert whole.usage.completion_tokens == 16
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert len(whole.choices[0].logprobs.content) == 8
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    texts, entries, last = ["", ""], 0, None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options=options, extra_body=EXTRA):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in whole.choices]
    assert entries == 16
    assert last.usage == whole.usage or last.usage.completion_tokens == 16


def test_the_official_client_completes_whole_and_streamed(client):
    ask = {"model": "tiny", "prompt": ["aa", "bb"], "max_tokens": 8, "seed": 3, "logprobs": 1, "echo": True}
    whole = client.completions.create(**ask, extra_body=EXTRA)
    assert [choice.text[:2] for choice in whole.choices] == ["aa", "bb"]
    assert len(whole.choices[0].logprobs.tokens) == 10
    texts = ["", ""]
    for chunk in client.completions.create(**ask, stream=True, extra_body=EXTRA):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_the_official_client_lists_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "also/tiny"]
    assert client.models.retrieve("also/tiny").id == "also/tiny"


def test_the_official_client_raises_its_own_errors(client, shared_live):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.APIStatusError) as missing:
        client.embeddings.create(model="tiny", input="x")
    assert missing.value.status_code == 501


def test_the_official_client_may_leave_a_stream(client, shared_live):
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=200, stream=True, extra_body=EXTRA)
    next(iter(stream))
    stream.close()
    shared_live.rig.assert_idle()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_frees_its_request_within_a_step(make_live, is_stream):
    live = make_live(runner=GatedRunner, async_scheduling=False)
    rig = live.rig
    body = json.dumps({"prompt": "hello", "max_tokens": 200, "stream": is_stream} | EXTRA).encode()
    with live.connection() as raw:
        raw.sendall(http_post("/v1/completions", body))
        rig.runner.let(3)
        wait_until(lambda: rig.core.snapshot.n_total_generation_tokens >= 2)
        if is_stream:
            read_until(raw, b"data: ")
    wait_until(lambda: rig.service.n_open == 0)
    n_before = rig.core.snapshot.n_total_generation_tokens
    rig.runner.let(1)  # the step that was under way
    rig.assert_idle()
    assert rig.core.snapshot.n_total_generation_tokens <= n_before + 1


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(make_live):
    live = make_live(runner=GatedRunner, max_num_seqs=1, limits={"n_slots": 1})
    rig = live.rig
    body = json.dumps({"prompt": "hello", "max_tokens": 5, "stream": True} | EXTRA).encode()
    with live.connection() as first, live.connection() as second:
        first.sendall(http_post("/v1/completions", body))
        wait_until(lambda: len(rig.client._owners) == 1)
        second.sendall(http_post("/v1/completions", body))
        wait_until(lambda: len(rig.client._owners) == 2)
        second.close()
        wait_until(lambda: rig.service.n_open == 1)
        rig.runner.open()
        read_until(first, b"[DONE]")
    rig.assert_idle()


def test_a_client_that_goes_away_while_its_prompt_is_cut_leaves_nothing(make_live, monkeypatch):
    live = make_live(runner=GatedRunner, async_scheduling=False)
    service = live.rig.service
    is_in_thread, may_go_on, is_closed = threading.Event(), threading.Event(), threading.Event()
    submit, close_unwanted = service._submit, service_module._close_unwanted

    def held(*args):
        is_in_thread.set()
        assert may_go_on.wait(DEADLINE_S)
        return submit(*args)

    def closed(work):
        close_unwanted(work)
        is_closed.set()

    monkeypatch.setattr(service, "_submit", held)
    monkeypatch.setattr(service_module, "_close_unwanted", closed)
    with live.connection() as raw:
        raw.sendall(http_post("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 200} | EXTRA).encode()))
        assert is_in_thread.wait(DEADLINE_S)
    wait_until(lambda: service.n_open == 0)
    may_go_on.set()
    assert is_closed.wait(DEADLINE_S)
    live.rig.runner.let(50)  # far fewer than it asked for
    live.rig.assert_idle()


def test_a_full_queue_sends_the_next_one_away(make_live):
    live = make_live(runner=GatedRunner, max_num_seqs=1, max_waiting=1, limits={"n_slots": 1})
    rig = live.rig
    body = json.dumps({"prompt": "hello", "max_tokens": 5} | EXTRA).encode()
    with live.connection() as first, live.connection() as second:
        first.sendall(http_post("/v1/completions", body))
        wait_until(lambda: rig.core._n_waiting == 0 and rig.client._owners)
        second.sendall(http_post("/v1/completions", body))
        wait_until(lambda: rig.core._n_waiting == 1)
        response = httpx.post(f"{live.url}/v1/completions", json={"prompt": "hello"})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert error_of(response.json(), 429)["type"] == "RateLimitError"
        rig.runner.open()
        for raw in (first, second):
            read_until(raw, b'"usage"')
    rig.assert_idle()


def test_a_body_that_never_ends_is_given_up(make_live):
    live = make_live(settings={"read_stall_s": 0.05})
    with live.connection() as raw:
        raw.sendall(http_post("/v1/completions", b'{"prompt": "x"}')[:-3])
        assert b" 408 " in read_until(raw, b"\r\n\r\n")
    live.rig.assert_idle()


def test_a_client_that_goes_away_in_mid_body_leaves_nothing(make_live):
    live = make_live()
    with live.connection() as raw:
        raw.sendall(http_post("/v1/completions", b'{"prompt": "x"}')[:-3])
        wait_until(lambda: live.rig.service.n_open == 1)
    live.rig.assert_idle()


def test_a_reader_that_takes_nothing_loses_its_request(make_live):
    limits = {"max_len_tokens": 4096, "n_pages": 4096}
    live = make_live(settings={"write_stall_s": 0.1}, limits=limits, check_each_step=False)
    ask = {"prompt": ["x"] * 8, "n": 8, "max_tokens": 400, "stream": True, "logprobs": 20, "temperature": 1.0} | EXTRA
    with live.connection(receive_bytes=4096) as raw:
        raw.sendall(http_post("/v1/completions", json.dumps(ask).encode()))
        wait_until(lambda: live.rig.service.n_open == 1)
        wait_until(lambda: live.rig.service.n_open == 0)
        wait_until(lambda: live.n_connections == 0)  # what was buffered for it is gone too
    live.rig.assert_idle()
    assert 'finished_reason="abort",model_name="tiny"} 0.0' not in live.rig.ask("GET", "/metrics").text


def test_a_slow_reader_gets_everything_in_fewer_frames(make_live):
    live = make_live(runner=GatedRunner)
    ask = {"prompt": "hello", "max_tokens": 100, "stream": True, "seed": 3, "return_token_ids": True} | EXTRA
    with live.connection() as raw:
        raw.sendall(http_post("/v1/completions", json.dumps(ask).encode()))
        live.rig.runner.open()
        data = read_until(raw, b"0\r\n\r\n").decode()
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert len(ids) == 100


def test_idle_connections_are_closed(make_live):
    live = make_live(settings={"keep_alive_s": 0})
    with live.connection() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(raw, b"200 OK")
        wait_until(lambda: live.n_connections == 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 200_000,
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 40_000,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    ],
    ids=range(6),
)
def test_what_is_not_http_is_refused_and_harms_nobody(shared_live, data):
    with shared_live.connection() as raw:
        raw.sendall(data)
        assert b" 400 " in read_until(raw, b"\r\n")
    assert httpx.get(f"{shared_live.url}/health").status_code == 200


def test_the_event_loop_never_waits_for_a_step(make_live):
    live = make_live(runner=GatedRunner)
    with live.connection() as raw:
        raw.sendall(http_post("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 4}).encode()))
        wait_until(lambda: live.rig.core.snapshot.n_running == 1 or live.rig.client._owners)
        for path in ("/health", "/metrics", "/load", "/v1/models"):
            assert httpx.get(f"{live.url}{path}").status_code == 200
        assert httpx.get(f"{live.url}/load").json() == {"server_load": 1}
        assert httpx.post(f"{live.url}/tokenize", json={"prompt": "hey"}).json()["count"] == 3
        live.rig.runner.open()
        read_until(raw, b'"usage"')


def test_many_streams_with_random_aborts_return_every_page_and_slot(make_live):
    live = make_live(limits={"n_slots": 16, "n_pages": 160})
    rng = random.Random(5)
    plans = [
        (i, rng.choice([None, None, 0, 1, 3]), rng.choice(["/v1/completions", "/v1/chat/completions"]))
        for i in range(64)
    ]
    done = asyncio.run(_ask_all(live.url, plans))
    live.rig.assert_idle()
    live.rig.core.check()
    assert all(text is None or text.endswith("[DONE]\n\n") for text in done)
    finished = [read_frames(text) for text in done if text is not None]
    assert len(finished) == sum(n_frames is None for _, n_frames, _ in plans)
    for chunks in finished:
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert live.rig.core.snapshot.n_pages_used == 0


async def _ask_all(url, plans):
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, limits=limits) as client:
        return await asyncio.gather(*(_ask_one(client, *plan) for plan in plans))


async def _ask_one(client, i, n_frames, path):
    """Read a stream to its end, or only so many frames of it; give its text if it is whole."""
    prompt = {"prompt": f"prompt {i % 7}"} if path == "/v1/completions" else {"messages": HI}
    body = prompt | {"max_tokens": 20 + i % 9, "stream": True, "n": 1 + i % 2} | EXTRA
    text = ""
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_text():
            text += piece
            if n_frames is not None and text.count("\n\n") > n_frames:
                return None
    return text if n_frames is None else None


def test_whole_answers_come_together_and_alone_the_same(make_live):
    live = make_live()
    asks = [{"prompt": f"p{i}", "max_tokens": 6, "seed": i} | EXTRA for i in range(20)]

    async def together():
        async with httpx.AsyncClient(base_url=live.url, timeout=DEADLINE_S) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=ask) for ask in asks))

    texts = [response.json()["choices"][0]["text"] for response in asyncio.run(together())]
    assert texts == [live.rig.complete(**ask)["choices"][0]["text"] for ask in asks]
