"""Anthropic's messages, asked with its official client: whole, and streamed at 1, 2, 3 and all tokens a step."""

import json
from contextlib import contextmanager

import anthropic
import pytest
from kit import DEADLINE_S, GatedRunner
from live import LiveServer
from scripted import MARKS, STEPS, GatedScript, Script, Scripted, _in_steps

from tiercel.api.http.running import Running

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "name": name,
        "description": "Tell something.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    for name in ("get_weather", "get_time")
]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


class Said:
    """A model that says one text, asked with the official client."""

    def __init__(self, text, **options):
        settings = {"port": 0, "shutdown_s": 0.0, "api_keys": ("k",)} | options.pop("settings", {})
        self._scripted = Scripted(text, settings=settings, **options)

    @contextmanager
    def _client(self, kind):
        rig = self._scripted._rig(kind)
        live = LiveServer(rig)
        try:
            with anthropic.Anthropic(base_url=live.url, api_key="k", max_retries=0, timeout=DEADLINE_S) as client:
                yield client, rig
            if isinstance(rig.runner, GatedRunner):
                rig.runner.open()
            rig.assert_idle()
        finally:
            live.close()
            rig.close()

    def whole(self, **fields):
        with self._client(Script) as (client, _):
            return client.messages.create(**({"model": "tiny", "messages": HI, "max_tokens": 2000} | fields))

    def streamed(self, monkeypatch, n_tokens, **fields):
        """Give the message that the client puts together, and the events it saw."""
        with self._client(GatedScript) as (client, rig), monkeypatch.context() as patch:
            patch.setattr(Running, "outputs", lambda running: _in_steps(running, rig.runner, n_tokens))
            ask = {"model": "tiny", "messages": HI, "max_tokens": 2000} | fields
            events = list(client.messages.create(**ask, stream=True))
        return put_together(events), events


def put_together(events):
    """Put a stream's events together by its rules; give it as a whole message's fields."""
    start, *others = events
    assert start.type == "message_start"
    assert start.message.content == []
    assert start.message.stop_reason is None
    blocks, is_open = [], False
    assert [event.type for event in others[-2:]] == ["message_delta", "message_stop"]
    for event in others[:-2]:
        if event.type == "content_block_start":
            assert not is_open
            assert event.index == len(blocks)
            blocks.append({**event.content_block.to_dict(), "pieces": ""})
            is_open = True
            continue
        assert is_open
        assert event.index == len(blocks) - 1
        if event.type == "content_block_stop":
            is_open = False
        else:
            add(blocks[-1], event.delta.to_dict())
    assert not is_open
    for block in blocks:
        pieces = block.pop("pieces")
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(pieces or "{}")
        else:
            assert block[block["type"]] == ""
            block[block["type"]] = pieces
    end = others[-2]
    return {
        "content": blocks,
        "stop_reason": end.delta.stop_reason,
        "stop_sequence": end.delta.stop_sequence,
        "usage": end.usage.to_dict(),
    }


def add(block, delta):
    fields = {
        "text": {"text_delta": "text"},
        "thinking": {"thinking_delta": "thinking"},
        "tool_use": {"input_json_delta": "partial_json"},
    }[block["type"]]
    if delta["type"] == "signature_delta":
        assert block["type"] == "thinking"
        block["signature"] += delta["signature"]
    else:
        block["pieces"] += delta[fields[delta["type"]]]


def assert_same(streamed, whole):
    """A stream says what the whole message says; ids are fresh in each."""
    fields = whole.to_dict()
    assert without_ids(streamed["content"]) == without_ids(fields["content"])
    for name in ("stop_reason", "stop_sequence", "usage"):
        assert streamed[name] == fields[name]


def without_ids(blocks):
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("Hello.", [("text", "Hello.")]),
        ("", [("text", "")]),
        (" \n", [("text", " \n")]),
        ("<think>\nHm, a < b.\n</think>\n\nYes.", [("thinking", "Hm, a < b."), ("text", "Yes.")]),
        ("<think>only", [("thinking", "only")]),
        (f"{WEATHER}\n{TIME}", [("get_weather", {"city": "Zürich"}), ("get_time", {})]),
        (f"Let me see. {TIME}", [("text", "Let me see."), ("get_time", {})]),
        (f"<think>a</think>\n\n{TIME}", [("thinking", "a"), ("get_time", {})]),
        (
            f"<think>a</think>b{WEATHER}{TIME}",
            [("thinking", "a"), ("text", "b"), ("get_weather", {"city": "Zürich"}), ("get_time", {})],
        ),
    ],
)
def test_an_answer_is_blocks_in_its_order_in_any_steps(monkeypatch, text, blocks):
    model = Said(text, special=MARKS)
    whole = model.whole(tools=TOOLS)
    assert [shown(block) for block in whole.content] == blocks
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny")
    assert whole.id.startswith("msg_")
    has_calls = any(block.type == "tool_use" for block in whole.content)
    assert (whole.stop_reason, whole.stop_sequence) == ("tool_use" if has_calls else "end_turn", None)
    ids = [block.id for block in whole.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)
    for n_tokens in STEPS:
        assert_same(model.streamed(monkeypatch, n_tokens, tools=TOOLS)[0], whole)


def shown(block):
    if block.type == "tool_use":
        return block.name, block.input
    if block.type == "thinking":
        assert block.signature
    return block.type, getattr(block, block.type)


def test_the_clients_own_stream_puts_the_same_message_together():
    model = Said(f"<think>a</think>b{WEATHER}", special=MARKS)
    whole = model.whole(tools=TOOLS)
    with (
        model._client(Script) as (client, _),
        client.messages.stream(model="tiny", messages=HI, max_tokens=2000, tools=TOOLS) as stream,
    ):
        final = stream.get_final_message()
    assert without_ids(final.to_dict()["content"]) == without_ids(whole.to_dict()["content"])
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize(
    ("fields", "stop"),
    [
        ({}, ("end_turn", None)),
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"stop_sequences": ["two", "three"]}, ("stop_sequence", "two")),
        ({"stop_sequences": ["never"]}, ("end_turn", None)),
    ],
)
def test_the_reason_of_an_end_is_told(monkeypatch, fields, stop):
    model = Said("one two three")
    whole = model.whole(**fields)
    assert (whole.stop_reason, whole.stop_sequence) == stop
    if stop[1]:
        assert whole.content[0].text == "one "
    for n_tokens in STEPS:
        assert_same(model.streamed(monkeypatch, n_tokens, **fields)[0], whole)


def test_an_answer_that_fills_the_context_says_so():
    model = Said("x" * 5000)
    assert model.whole(max_tokens=4096).stop_reason == "model_context_window_exceeded"


def test_a_call_that_is_cut_short_is_no_call():
    whole = Said(WEATHER).whole(tools=TOOLS, max_tokens=55)
    assert whole.stop_reason == "max_tokens"
    assert [block.type for block in whole.content] == ["text"]


@pytest.mark.parametrize("n_tokens", STEPS)
@pytest.mark.parametrize("n_cut", [len("Well. <tool_"), len("Well. <tool_call>"), len('Well. <tool_call>{"na')])
def test_a_mark_that_max_tokens_cuts_is_no_text(monkeypatch, n_tokens, n_cut):
    model = Said(f"Well. {WEATHER}")
    whole = model.whole(tools=TOOLS, max_tokens=n_cut)
    assert [shown(block) for block in whole.content] == [("text", "Well.")]
    assert whole.stop_reason == "max_tokens"
    assert_same(model.streamed(monkeypatch, n_tokens, tools=TOOLS, max_tokens=n_cut)[0], whole)


def test_what_is_hardly_a_mark_stays_text_where_it_is_cut():
    whole = Said(f"a {WEATHER}").whole(tools=TOOLS, max_tokens=len("a <to"))
    assert [shown(block) for block in whole.content] == [("text", "a <to")]
    whole = Said(f"a {WEATHER}").whole(max_tokens=len("a <tool_"))
    assert [shown(block) for block in whole.content] == [("text", "a <tool_")]


def test_only_one_call_is_given_where_calls_are_not_parallel(monkeypatch):
    model = Said(f"{WEATHER}\n{TIME}")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    whole = model.whole(tools=TOOLS, tool_choice=choice)
    assert [block.name for block in whole.content] == ["get_weather"]
    for n_tokens in STEPS:
        assert_same(model.streamed(monkeypatch, n_tokens, tools=TOOLS, tool_choice=choice)[0], whole)


def test_without_a_choice_of_tools_calls_are_text():
    whole = Said(TIME).whole(tools=TOOLS, tool_choice={"type": "none"})
    assert [shown(block) for block in whole.content] == [("text", TIME)]


def test_thinking_is_left_out_when_it_is_told_to_be():
    model = Said("<think>a</think>b", special=MARKS)
    whole = model.whole(thinking={"type": "adaptive", "display": "omitted"})
    assert [shown(block) for block in whole.content] == [("text", "b")]


def test_usage_tells_cached_tokens_apart(monkeypatch):
    long = [{"role": "user", "content": "hello " * 40}]
    with Said("ok")._client(Script) as (client, _):
        ask = {"model": "tiny", "messages": long, "max_tokens": 8}
        first, second = client.messages.create(**ask).usage, client.messages.create(**ask).usage
        counted = client.messages.count_tokens(model="tiny", messages=long)
        with client.messages.stream(**ask) as stream:
            start = next(event for event in stream if event.type == "message_start").message.usage
    assert first.cache_read_input_tokens == 0
    assert first.input_tokens == counted.input_tokens
    assert second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == counted.input_tokens
    assert (start.input_tokens, start.cache_read_input_tokens) == (second.input_tokens, second.cache_read_input_tokens)


def test_a_stream_is_named_events_with_a_ping_and_without_openais_end():
    rig = Scripted("ok")._rig(Script)
    try:
        response = rig.ask("POST", PATH, json={"messages": HI, "max_tokens": 8, "stream": True})
        rig.assert_idle()
    finally:
        rig.close()
    names = []
    for one in response.text.split("\n\n")[:-1]:
        name, data = one.split("\n")
        names.append(name.removeprefix("event: "))
        assert json.loads(data.removeprefix("data: "))["type"] == names[-1]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]


def test_count_tokens_counts_what_a_message_would_take(rig):
    ask = {"messages": HI, "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]}
    counted = rig.post(f"{PATH}/count_tokens", ask)
    answer = rig.post(PATH, ask | {"max_tokens": 4})
    usage = answer["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}
    assert (
        rig.post(f"{PATH}/count_tokens", {"messages": [{"role": "user", "content": "x" * 9000}]})["input_tokens"] > 9000
    )


def test_a_message_goes_on_with_calls_and_their_results(monkeypatch):
    with Said(f"Hm. {WEATHER}")._client(Script) as (client, _):
        ask = {"model": "tiny", "max_tokens": 2000, "tools": TOOLS}
        first = client.messages.create(messages=HI, **ask)
        call = first.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        again = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(messages=again, **ask).stop_reason == "tool_use"


@pytest.fixture
def client(make_rig):
    rig = make_rig(settings={"port": 0, "shutdown_s": 0.0, "api_keys": ("k",)})
    live = LiveServer(rig)
    with anthropic.Anthropic(base_url=live.url, api_key="k", max_retries=0, timeout=DEADLINE_S) as made:
        yield made
    rig.assert_idle()
    live.close()


def test_the_official_client_raises_its_own_errors(client):
    ask = {"model": "tiny", "messages": HI, "max_tokens": 8}
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**ask, extra_body={"temperature": 9})
    assert bad.value.body == {"type": "error", "error": {"type": "invalid_request_error", "message": str(told(bad))}}
    assert told(bad).startswith("temperature: ")
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**ask | {"model": "other"})
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as stranger:
        client.with_options(api_key="wrong").messages.create(**ask)
    assert stranger.value.body["error"]["type"] == "authentication_error"
    assert stranger.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
        client.messages.create(**ask, extra_headers={"anthropic-version": "2023-01-01"})
    message = client.messages.create(**ask, extra_headers={"x-request-id": "mine"})
    assert (message._request_id, message.id) == ("mine", "msg_mine")


def told(caught):
    return caught.value.body["error"]["message"]


def test_the_official_client_may_leave_a_stream(client):
    with client.messages.stream(model="tiny", messages=HI, max_tokens=200) as stream:
        next(iter(stream))


def test_an_error_on_the_way_is_an_event_the_client_raises(monkeypatch):
    async def fails(running):
        async for output in _in_steps(running, rig.runner, 1):
            yield output
            raise KeyError("a fault of ours")

    with Said("one two")._client(GatedScript) as (client, rig), monkeypatch.context() as patch:
        patch.setattr(Running, "outputs", fails)
        with (
            pytest.raises(anthropic.APIStatusError) as failed,
            client.messages.stream(model="tiny", messages=HI, max_tokens=8) as stream,
        ):
            list(stream)
    assert failed.value.body["error"]["type"] == "api_error"
    assert "fault" not in str(failed.value.body)


@pytest.mark.parametrize("is_stream", [True, False])
def test_half_an_answer_does_not_pass_for_one(make_rig, is_stream):
    rig = make_rig(runner=GatedRunner)
    real = rig.client.submit

    def submit(*args, **kwargs):
        handle = real(*args, **kwargs)
        handle.abort()
        rig.runner.open()
        return handle

    rig.client.submit = submit
    response = rig.ask("POST", PATH, json={"messages": HI, "max_tokens": 100, "stream": is_stream})
    if is_stream:
        assert response.text.split("\n\n")[-2].startswith("event: error\n")
    else:
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("status", "kind", "options"),
    [
        (405, "invalid_request_error", {"method": "GET"}),
        (404, "not_found_error", {"path": f"{PATH}/batches"}),
        (413, "request_too_large", {"content": b'{"a": "' + b"x" * 3000 + b'"}'}),
        (400, "invalid_request_error", {"content": b"[]"}),
        (400, "invalid_request_error", {"content": b"{"}),
        (431, "request_too_large", {"headers": {"x-long": "x" * 70_000}}),
    ],
)
def test_every_error_of_these_routes_has_anthropics_shape(make_rig, status, kind, options):
    rig = make_rig(settings={"body_bytes_max": 2000})
    headers = {"content-type": "application/json"} | options.get("headers", {})
    content = options.get("content")
    response = rig.ask(options.get("method", "POST"), options.get("path", PATH), headers=headers, content=content)
    assert response.status_code == status
    body = response.json()
    assert set(body) == {"type", "error"}
    assert body["error"].keys() == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_other_routes_keep_their_shape(rig):
    assert "request-id" not in rig.ask("GET", "/v1/models").headers
    assert rig.refused("/v1/chat/completions", {"messages": []})["param"] == "messages"


def test_a_busy_server_says_so_in_anthropics_shape(make_rig):
    rig = make_rig(settings={"n_open_max": 0})
    response = rig.ask("POST", PATH, json={"messages": HI, "max_tokens": 8})
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert response.headers["retry-after"]
    rig.service.begin_drain()
    response = rig.ask("POST", PATH, json={"messages": HI, "max_tokens": 8})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


def tool(**changes):
    return {"tools": [TOOLS[0] | changes]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
CALL = {"type": "tool_use", "id": "a", "name": "get_time", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "noon"}


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"messages": []}, "messages: it is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages"),
        (user(), "messages[0].content: it is empty"),
        (user(IMAGE), "messages[0].content[0]: got a block of type 'image'"),
        (user({"type": "document", "source": {"type": "text", "data": "x"}}), "messages[0].content[0]"),
        (user({"type": "redacted_thinking", "data": "x"}), "messages[0].content[0]"),
        (user({"type": "video"}), "messages[0].content[0].type"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "text", "text": "x", "colour": 1}), "messages[0].content[0]"),
        (user(CALL), "messages[0].content[0]: got a block of type 'tool_use'"),
        (user(RESULT), "messages[0].content[0].tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": [CALL]}]}, "messages: the last turn is a call"),
        ({"messages": [*HI, {"role": "assistant", "content": [CALL, CALL]}]}, "messages[1].content[1].id"),
        ({"messages": [*HI, {"role": "assistant", "content": [RESULT]}]}, "messages[1].content[0]"),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [CALL]},
                    {"role": "user", "content": [RESULT | {"content": [IMAGE]}]},
                ]
            },
            "messages[2].content[0].content[0]",
        ),
        ({"system": [IMAGE]}, "system"),
        ({"system": 1}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": ["x" * 1025]}, "stop_sequences"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -5}, "top_k"),
        (tool(name="a b"), "tools[0].name"),
        (tool(input_schema={"type": "array"}), "tools[0].input_schema"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        (tool() | {"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        (tool() | {"tool_choice": "auto"}, "tool_choice"),
        (tool() | {"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking.budget_tokens: got 3"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 99}, "thinking.budget_tokens"),
        ({"context_management": {"edits": 5}}, "context_management"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"metadata": {"team": "x"}}, "metadata"),
        ({"mcp_servers": []}, "mcp_servers: an unknown field"),
        ({"maxtokens": 1}, "maxtokens: an unknown field; did you mean max_tokens?"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_what_is_wrong_is_refused_by_its_field(rig, fields, message):
    body = {"messages": HI, "max_tokens": 8} | fields
    answer = rig.post(PATH, {name: value for name, value in body.items() if value is not None}, 400)
    assert answer["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {"edits": []}},
        {"metadata": {"user_id": "u"}, "service_tier": "auto"},
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        {"tools": []},
        {"cache_salt": "s", "priority": 0, "chat_template_kwargs": {"shout": "x"}},
        {"stop_sequences": [], "temperature": 0, "top_p": 0.5, "top_k": 3},
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_changes_nothing_or_is_known_is_taken(rig, fields):
    assert rig.post(PATH, {"messages": HI, "max_tokens": 4} | fields)["type"] == "message"
