"""Public reports about tool calls and reasoning elsewhere, beside `test_tools_reports`; `docs/reports.md` lists all.

Where a form obliges the model, the scripted text is taken token by token by its grammar, so that it must be allowed.
"""

import json

import jsonschema
import pytest
from responding import TOOLS as RESPONSE_TOOLS
from responding import Rebuilt, Responder, plain
from scripted import MARKS, STEPS, TEMPLATE, TOOLS, Scripted, Streamed, assert_same, both, calls_of

ARGS = '{"city": "Zürich", "n": 3}'
WEATHER = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {"n": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"{WEATHER}\n{TIME}"),
        ("none", f'{{"name": "get_weather", "parameters": {ARGS}}}; {{"name": "get_time", "parameters": {{"n": 1}}}}'),
    ],
)
def test_v24509_required_calls_stream_as_they_come(monkeypatch, parser, text):
    model = Scripted(text, settings={"tool_call_parser": parser})
    choice, streams = both(monkeypatch, model, tools=TOOLS, tool_choice="required")
    assert calls_of(choice["message"]["tool_calls"]) == [
        ("get_weather", {"city": "Zürich", "n": 3}),
        ("get_time", {"n": 1}),
    ]
    pieces = [part for delta in streams[0].deltas for part in delta.get("tool_calls", ())]
    assert len(pieces) > 12
    assert {piece["index"] for piece in pieces} == {0, 1}


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_v47734_ids_of_a_mistral_model_are_nine_letters_there_and_back(monkeypatch, tool_choice):
    text = f"[TOOL_CALLS]get_weather[ARGS]{ARGS}"
    template = TEMPLATE.replace("<tool_call>{{ c.function", "<{{ c.id }}>{{ c.function")
    model = Scripted(
        text, template=template, special=("[TOOL_CALLS]", "[ARGS]"), settings={"tool_call_parser": "mistral"}
    )
    ask = {"tools": TOOLS, "tool_choice": tool_choice}
    choice, streams = both(monkeypatch, model, **ask)
    (call,) = choice["message"]["tool_calls"]
    for one in (call, *(streamed.calls[0] for streamed in streams)):
        assert len(one["id"]) == 9
        assert one["id"].isalnum()
        assert one["id"].isascii()
    history = [{"role": "user", "content": "hi"}, choice["message"]]
    history.append({"role": "tool", "tool_call_id": call["id"], "content": "rain"})
    again = model.whole(messages=history, return_prompt_text=True, **ask)
    assert f"<{call['id']}>" in again["prompt_text"]


@pytest.mark.parametrize("n_tokens", STEPS)
def test_v39584_two_calls_in_one_step_are_two_items_of_a_response(monkeypatch, n_tokens):
    model = Responder(f"{WEATHER}{TIME}")
    whole = model.whole(tools=RESPONSE_TOOLS)
    rebuilt = Rebuilt(model.stream(monkeypatch, n_tokens, tools=RESPONSE_TOOLS))
    assert [item["name"] for item in rebuilt.items] == ["get_weather", "get_time"]
    assert len({item["call_id"] for item in rebuilt.items}) == 2
    assert plain(rebuilt.last) == plain(whole)


def test_d3412_parallel_calls_have_each_a_name_once_an_index_and_an_id(monkeypatch):
    model = Scripted(f"{WEATHER}\n{TIME}")
    for n_tokens in STEPS:
        chunks = model.stream(monkeypatch, n_tokens, tools=TOOLS)
        parts = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", ())]
        named = [p for p in parts if p["function"].get("name")]
        assert [(p["index"], p["function"]["name"]) for p in named] == [(0, "get_weather"), (1, "get_time")]
        assert len({p["id"] for p in named}) == 2
        assert {p["index"] for p in parts} == {0, 1}


@pytest.mark.parametrize("n_cut", [1, 12, 25, 40])
def test_rapidmlx197_a_call_that_max_tokens_cuts_is_delivered_as_far_as_it_came(monkeypatch, n_cut):
    model = Scripted(WEATHER)
    ask = {"tools": TOOLS, "max_tokens": len(model.script) - n_cut}
    message = model.whole(**ask)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert ARGS.startswith(call["function"]["arguments"])
    for n_tokens in STEPS:
        streamed = Streamed(model.stream(monkeypatch, n_tokens, **ask))
        assert streamed.finish_reason == "length"
        assert [one["function"] for one in streamed.calls] == [call["function"]]


@pytest.mark.parametrize("text", ["<tool_call>", '<tool_call>{"name', '<tool_call>{"name": "f", "arguments": "', "a <"])
def test_l12379_what_looks_like_a_call_and_is_none_ends_no_request(monkeypatch, text):
    for special in ((), MARKS):
        choice, _ = both(monkeypatch, Scripted(text, special=special), tools=TOOLS)
        assert choice["finish_reason"] in ("stop", "tool_calls")


@pytest.mark.parametrize("parser", [None, "none"])
def test_v51858_without_reasoning_a_form_begins_with_the_first_token(monkeypatch, parser):
    settings = {"reasoning_parser": parser} if parser else None
    model = Scripted('{"n": 12}', settings=settings)
    choice, _ = both(monkeypatch, model, response_format=FORMAT)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert "reasoning" not in choice["message"]
    # What is no answer of the form cannot come first: it is masked, and another token comes.
    # One that may think could begin with that instead.
    model = Scripted('so {"n": 12}', settings={"reasoning_parser": "none"})
    other = model.whole(response_format=FORMAT)["choices"][0]["message"]
    assert other["content"].startswith("{")


@pytest.mark.parametrize("special", [(), MARKS])
def test_v51296_a_form_waits_for_reasoning_only_where_reasoning_is_on(monkeypatch, special):
    ask = {"response_format": FORMAT, "chat_template_kwargs": {"opens": True}}
    model = Scripted('so { "n": maybe</think>{"n": 12}', special=special)
    choice, _ = both(monkeypatch, model, **ask)
    assert choice["message"]["reasoning"] == 'so { "n": maybe'
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    off = Scripted('{"n": 12}', special=special)
    whole = off.whole(response_format=FORMAT, chat_template_kwargs={"enable_thinking": False})
    assert whole["choices"][0]["message"]["content"] == '{"n": 12}'


def test_v43388_the_first_token_behind_reasoning_is_already_of_the_form(monkeypatch):
    """However many tokens come at once; with a drafter this must hold within one step too."""
    model = Scripted('why</think>{"n": 7}', special=MARKS)
    ask = {"response_format": FORMAT, "chat_template_kwargs": {"opens": True}}
    whole = model.whole(**ask)
    assert whole["choices"][0]["message"]["content"] == '{"n": 7}'
    for n_tokens in STEPS:
        assert_same(Streamed(model.stream(monkeypatch, n_tokens, **ask)), whole)
