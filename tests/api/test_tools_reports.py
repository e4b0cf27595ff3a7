"""Public reports about tool calls and reasoning elsewhere, each tried here. The names are rows of the reports' log."""

import asyncio
import json

import httpx
import openai
import pytest
from kit import byte_tokenizer
from scripted import HI, LIMITS, MARKS, STEPS, TEMPLATE, TOOLS, Script, Scripted, both, calls_of

PATH_CALL = '<tool_call>{"name": "f", "arguments": {"path": "a\\"b", "l": [1, {"x": null}]}}</tool_call>'


def test_l14060_a_value_is_never_guessed_before_it_is_there(monkeypatch):
    choice, streams = both(monkeypatch, Scripted(PATH_CALL), tools=TOOLS)
    final = choice["message"]["tool_calls"][0]["function"]["arguments"]
    so_far = ""
    for delta in streams[0].deltas:
        for part in delta.get("tool_calls", ()):
            so_far += part["function"].get("arguments", "")
            assert final.startswith(so_far)
    assert so_far == final


def test_l15713_a_lone_bracket_in_reasoning_is_text(monkeypatch):
    model = Scripted("<think>if a < b <</think>ok", special=MARKS)
    assert both(monkeypatch, model, tools=TOOLS)[0]["message"]["reasoning"] == "if a < b <"


def test_v10589_a_mark_and_a_name_may_be_split_anywhere(monkeypatch):
    choice, streams = both(monkeypatch, Scripted(PATH_CALL), tools=TOOLS)
    assert calls_of(choice["message"]["tool_calls"]) == [("f", {"path": 'a"b', "l": [1, {"x": None}]})]
    assert all(streamed.content == "" for streamed in streams)


def test_dynamo4723_parallel_calls_have_their_own_index_and_id(monkeypatch):
    model = Scripted(PATH_CALL + PATH_CALL)
    _, streams = both(monkeypatch, model, tools=TOOLS)
    assert all(len({call["id"] for call in streamed.calls}) == 2 for streamed in streams)


def test_v51698_the_last_step_repeats_nothing(monkeypatch):
    choice, streams = both(monkeypatch, Scripted(PATH_CALL), tools=TOOLS)
    whole = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert [streamed.calls[0]["function"]["arguments"] for streamed in streams] == [whole] * len(STEPS)


def test_v51649_odd_python_values_make_valid_json(monkeypatch):
    model = Scripted('[f(a="x\\"y", b=None, c=1e999)]', settings={"tool_call_parser": "pythonic"})
    choice, _ = both(monkeypatch, model, tools=TOOLS)
    assert calls_of(choice["message"]["tool_calls"]) == [("f", {"a": 'x"y', "b": None, "c": "1e999"})]


def test_v48171_brackets_and_lines_in_a_string_lose_no_call(monkeypatch):
    model = Scripted(
        '<|tool_call_start|>[f(a="]\n[")]<|tool_call_end|>',
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
        settings={"tool_call_parser": "lfm2"},
    )
    choice, _ = both(monkeypatch, model, tools=TOOLS)
    assert calls_of(choice["message"]["tool_calls"]) == [("f", {"a": "]\n["})]


def test_o12557_a_stream_finds_the_same_calls_and_says_so(monkeypatch):
    _, streams = both(monkeypatch, Scripted(PATH_CALL), tools=TOOLS)
    assert {streamed.finish_reason for streamed in streams} == {"tool_calls"}


def test_s7117_two_calls_of_qwen3_are_two(monkeypatch):
    text = (
        '<think>\nTwo sums.\n</think>\n\n<tool_call>\n{"name": "mul", "arguments": {"a": 3, "b": 12}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 11, "b": 49}}\n</tool_call>'
    )
    choice, _ = both(monkeypatch, Scripted(text, special=MARKS), tools=TOOLS)
    calls = calls_of(choice["message"]["tool_calls"])
    assert calls == [("mul", {"a": 3, "b": 12}), ("add", {"a": 11, "b": 49})]
    assert choice["message"]["reasoning"] == "Two sums."


def test_v13978_an_empty_list_of_calls_is_none():
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}x"
    )
    messages = [*HI, {"role": "assistant", "content": "a", "tool_calls": []}, *HI]
    assert Scripted("ok", template=template).whole(messages=messages)["choices"][0]["message"]["content"] == "ok"


def test_l13178_an_assistant_without_content_is_rendered():
    template = "{% for m in messages %}{{ m.content.strip() }}{% endfor %}x {{ tools }}"
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": ""}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert Scripted("ok", template=template).whole(messages=messages)["choices"][0]["message"]["content"] == "ok"


def test_l25895_many_large_tools_are_taken():
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "description": "x" * 99, "parameters": _large(i)}}
        for i in range(60)
    ]
    assert len(json.dumps(tools)) > 100_000
    answer = Scripted(PATH_CALL, template="{{ tools | length }}<tool_call>").whole(tools=tools)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def _large(i):
    properties = {f"p_{i}_{k}": {"type": "string", "enum": [f"value {n}" for n in range(10)]} for k in range(10)}
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize("special", [(), MARKS])
def test_v55195_reasoning_content_and_call_in_one_step_are_all_there(monkeypatch, special):
    choice, _ = both(monkeypatch, Scripted(f"<think>a</think>b{PATH_CALL}", special=special), tools=TOOLS)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("a", "b")
    assert len(choice["message"]["tool_calls"]) == 1


def test_v45687_other_tags_of_reasoning_do_not_leak(monkeypatch):
    model = Scripted("<mm:think>a</mm:think>b", settings={"reasoning_parser": "minimax_m3"})
    choice, _ = both(monkeypatch, model)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("a", "b")


def test_openais_client_reads_calls_and_reasoning(make_rig):
    text = f"<think>why</think>So.{PATH_CALL}"
    tokenizer = byte_tokenizer(TEMPLATE, MARKS)
    script = tokenizer.encode(text, add_special_tokens=False)
    rig = make_rig(runner=lambda limits: Script(limits, script), tokenizer=lambda: tokenizer, limits=LIMITS)

    async def ask():
        transport = httpx.ASGITransport(rig.app)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(base_url="http://rig/v1", api_key="x", http_client=http) as client,
        ):
            whole = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
            async with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
                streamed = await stream.get_final_completion()
        return whole.choices[0], streamed.choices[0]

    for choice in asyncio.run(ask()):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "So."
        assert choice.message.reasoning == "why"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments)["path"] == 'a"b'
