"""Structured output streamed, at 1, 2, 3 and all tokens a step: what comes is what the whole answer says."""

import pytest
from scripted import MARKS, STEPS, TOOLS, Scripted, Streamed, assert_same, calls_of
from test_structured import FORMAT, SCHEMA

ANSWER = '{"city": "Bern", "n": 42}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "n": 42}}\n</tool_call>'
CLOSED = SCHEMA | {"additionalProperties": False}
STRICT = [{"type": "function", "function": tool["function"] | {"strict": True, "parameters": CLOSED}} for tool in TOOLS]


def same_in_any_steps(monkeypatch, one, **ask):
    whole = one.whole(**ask)
    for n_tokens in STEPS:
        assert_same(Streamed(one.stream(monkeypatch, n_tokens, **ask)), whole)
    (choice,) = whole["choices"]
    return choice


@pytest.mark.parametrize(
    ("text", "ask"),
    [
        (ANSWER, {"response_format": FORMAT}),
        (ANSWER, {"response_format": {"type": "json_object"}}),
        ("123-4567", {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}),
        ("Zürich", {"structured_outputs": {"choice": ["Bern", "Zürich"]}}),
        ("ab;", {"structured_outputs": {"grammar": 'start: /[a-z]+/ ";"'}}),
    ],
)
def test_a_form_comes_whole_in_any_steps_and_ends_the_answer(monkeypatch, text, ask):
    choice = same_in_any_steps(monkeypatch, Scripted(text + "}]123"), **ask)
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("special", [(), MARKS])
def test_a_form_comes_behind_reasoning_whose_marks_are_one_token_or_many(monkeypatch, special):
    one = Scripted(f"<think>Bern?</think>{ANSWER}", special=special)
    choice = same_in_any_steps(monkeypatch, one, response_format=FORMAT)
    assert choice["message"]["reasoning"] == "Bern?"
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("special", [(), MARKS])
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_strict_calls_come_whole_in_any_steps(monkeypatch, special, tool_choice):
    one = Scripted(CALL, special=special, settings={"tool_call_parser": "hermes"})
    choice = same_in_any_steps(monkeypatch, one, tools=STRICT, tool_choice=tool_choice, parallel_tool_calls=False)
    assert calls_of(choice["message"]["tool_calls"]) == [("get_weather", {"city": "Bern", "n": 42})]
    assert choice["finish_reason"] == "tool_calls"


def test_a_call_that_would_break_its_strict_schema_is_never_answered(monkeypatch):
    one = Scripted(CALL.replace("Bern", "Oslo"), settings={"tool_call_parser": "hermes"})
    for n_tokens in STEPS:
        chunks = one.stream(monkeypatch, n_tokens, tools=STRICT, tool_choice="required", parallel_tool_calls=False)
        assert "Oslo" not in "".join(call["function"]["arguments"] for call in Streamed(chunks).calls)


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_stop_string_within_a_call_ends_the_answer_as_a_stop_and_leaves_no_half_call(monkeypatch, tool_choice):
    ask = {"tools": STRICT, "tool_choice": tool_choice, "parallel_tool_calls": False, "stop": "city"}
    one = Scripted(CALL, settings={"tool_call_parser": "hermes"})
    (choice,) = one.whole(**ask)["choices"]
    assert not choice["message"].get("tool_calls")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "city")
    for n_tokens in STEPS:
        assert Streamed(one.stream(monkeypatch, n_tokens, **ask)).finish_reason == "stop"


def test_a_stop_string_behind_a_call_leaves_it_whole(monkeypatch):
    one = Scripted(CALL, settings={"tool_call_parser": "hermes"})
    choice = same_in_any_steps(monkeypatch, one, tools=TOOLS, stop="</tool_call>")
    assert calls_of(choice["message"]["tool_calls"]) == [("get_weather", {"city": "Bern", "n": 42})]
    assert choice["finish_reason"] == "tool_calls"
