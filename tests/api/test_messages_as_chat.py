"""What a request for a message means as a chat."""

import msgspec
import pytest

from tiercel.api.http.messages.as_chat import as_chat
from tiercel.api.http.messages.schema import MessagesRequest

HI = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def chat_of(**fields):
    return as_chat(msgspec.convert({"messages": [HI], "max_tokens": 8} | fields, MessagesRequest))


def text(one):
    return {"type": "text", "text": one}


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("Be short.", "Be short."),
        ([text("a")], "a"),
        ([text("a"), text("b")], [text("a"), text("b")]),
        ([text("x-anthropic-billing-header: cc_version=1; cch=ab;"), text("a")], "a"),
    ],
)
def test_the_system_text_is_the_first_message(system, content):
    assert chat_of(system=system).messages == [{"role": "system", "content": content}, HI]


@pytest.mark.parametrize("system", ["", [], None, [text("x-anthropic-billing-header: x")]])
def test_no_system_text_is_no_message(system):
    assert chat_of(system=system).messages == [HI]


def test_turns_calls_and_results_keep_their_order():
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"city": "Zürich"}}
    other = {"type": "tool_use", "id": "b", "name": "g", "input": {}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages = [
        HI,
        {"role": "user", "content": [text("there")]},
        {
            "role": "assistant",
            "content": [thought, text("So. "), call],
        },
        {"role": "assistant", "content": [text("And."), other]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [text("rain"), text("wind")]},
                {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
                text("Well?"),
            ],
        },
        {"role": "system", "content": "Be short."},
        HI,
    ]
    assert chat_of(messages=messages).messages == [
        {"role": "user", "content": [text("hi"), text("there")]},
        {
            "role": "assistant",
            "content": "So. And.",
            "reasoning": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "rain\nwind"},
        {"role": "tool", "tool_call_id": "b", "name": "g", "content": "Error: no"},
        {"role": "user", "content": "Well?"},
        {"role": "system", "content": "Be short."},
        HI,
    ]


def test_a_last_turn_of_the_assistant_is_gone_on_with():
    chat = chat_of(messages=[HI, {"role": "assistant", "content": "The answer is ("}])
    assert chat.continue_final_message is True
    assert chat.add_generation_prompt is False
    assert chat.messages[-1] == {"role": "assistant", "content": "The answer is ("}


def test_sampling_has_the_same_meaning():
    chat = chat_of(
        stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=4, stream=True, cache_salt="s", priority=2, model="m"
    )
    assert (chat.stop, chat.temperature, chat.top_p, chat.top_k) == (["x"], 0.5, 0.9, 4)
    assert (chat.max_tokens, chat.stream, chat.cache_salt, chat.priority, chat.model) == (8, True, "s", 2, "m")


@pytest.mark.parametrize(
    ("choice", "meaning", "is_parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
        (None, None, None),
    ],
)
def test_tools_and_the_choice_among_them_are_a_chats(choice, meaning, is_parallel):
    chat = chat_of(tools=[TOOL | {"strict": True}], tool_choice=choice)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == meaning
    assert chat.parallel_tool_calls is is_parallel


@pytest.mark.parametrize(
    ("thinking", "is_on"), [({"type": "adaptive"}, True), ({"type": "disabled"}, False), (None, None)]
)
def test_thinking_is_the_templates_variable(thinking, is_on):
    assert chat_of(thinking=thinking).chat_template_kwargs == ({} if is_on is None else {"enable_thinking": is_on})


def test_effort_is_a_chats():
    assert chat_of(output_config={"effort": "high"}).reasoning_effort == "high"


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
            "thinking_token_budget",
            1024,
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}},
        ),
    ],
)
def test_bounds_and_forms_are_a_chats(fields, name, value):
    assert msgspec.to_builtins(getattr(chat_of(**fields), name)) == value
