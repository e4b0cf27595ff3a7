"""What /v1/responses refuses, each by its field; no request leaves anything behind."""

import json
import random

import pytest
from kit import error_of
from responding import LOGPROBS, RESPONSES, TOOLS, Responder
from scripted import Script, byte_tokenizer

from tiercel.api.http.responses_api.schema import ResponsesRequest


def item(**fields):
    return {"input": [fields]}


def user(*content):
    return item(role="user", content=list(content))


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
WRONG = [
    # The body's fields: a wrong type, then a wrong value.
    ({"input": 1}, "input"),
    ({"input": {}}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"model": 1}, "model"),
    ({"instructions": []}, "instructions"),
    ({"previous_response_id": 1}, "previous_response_id"),
    ({"store": "yes"}, "store"),
    ({"background": 1}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"include": "all"}, "include"),
    ({"include": [1]}, "include[0]"),
    ({"include": ["all"]}, "include[0]"),
    ({"include": [*LOGPROBS, "reasoning.encrypted_content"]}, "include[1]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"max_output_tokens": 1.5}, "max_output_tokens"),
    ({"max_output_tokens": True}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_output_tokens": 10**30}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"max_tool_calls": "1"}, "max_tool_calls"),
    ({"metadata": []}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"x" * 65: ""}}, "metadata"),
    ({"metadata": {"x": "x" * 513}}, "metadata"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ({"safety_identifier": 1}, "safety_identifier"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"service_tier": 1}, "service_tier"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"top_p": "1"}, "top_p"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"),
    ({"top_logprobs": -1, "include": LOGPROBS}, "top_logprobs"),
    ({"top_logprobs": "1", "include": LOGPROBS}, "top_logprobs"),
    ({"truncation": "left"}, "truncation"),
    ({"truncation": 1}, "truncation"),
    ({"user": 1}, "user"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
    ({"reasoning": {"mode": "pro"}}, "reasoning"),
    ({"text": "json"}, "text"),
    ({"text": {"format": "json"}}, "text.format"),
    ({"text": {"format": {}}}, "text.format.type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": []}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": "no"}}}, "text.format.strict"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "colour": 1}}}, "text.format.colour"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "text"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"minLength": "a"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "structural_tag"}}}, "text.format.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"color": "red"}}, "text"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 1}, "stop"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"presence_penalty": 9}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 200}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": "high"}, "priority"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    # Fields of OpenAI's and of chats that are not read here.
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 9}, "max_tokens"),
    ({"max_output_token": 9}, "max_output_token"),
    ({"n": 2}, "n"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    # Items.
    ({"input": [1]}, "input[0]"),
    ({"input": [None]}, "input[0]"),
    ({"input": [[]]}, "input[0]"),
    (item(), "input[0].type"),
    (item(type=1), "input[0].type"),
    (item(type="web_search_call", id="w"), "input[0].type"),
    (item(type="custom_tool_call", call_id="c"), "input[0].type"),
    (item(type="message"), "input[0].role"),
    (item(role="tool", content="x"), "input[0].role"),
    (item(role=1, content="x"), "input[0].role"),
    (item(role="user"), "input[0].content"),
    (item(role="user", content=1), "input[0].content"),
    (item(role="user", content="x", id=1), "input[0].id"),
    (item(role="user", content="x", status="done"), "input[0].status"),
    (item(role="user", content="x", colour="red"), "input[0].colour"),
    (user("x"), "input[0].content[0]"),
    (user({"type": "input_text"}), "input[0].content[0].text"),
    (user({"type": "input_text", "text": 1}), "input[0].content[0].text"),
    (user({"type": "input_text", "text": "x", "bold": True}), "input[0].content[0].bold"),
    (user({"type": "input_image", "image_url": "http://x/y.png"}), "input[0].content[0]"),
    (user({"type": "input_file", "file_id": "f"}), "input[0].content[0]"),
    (user({"type": "input_audio", "input_audio": {}}), "input[0].content[0]"),
    (user({"type": "refusal", "refusal": "no"}), "input[0].content[0]"),
    (item(type="function_call", name="f", arguments="{}"), "input[0].call_id"),
    (item(type="function_call", call_id="c", arguments="{}"), "input[0].name"),
    (item(type="function_call", call_id="c", name="f"), "input[0].arguments"),
    (item(type="function_call", call_id="c", name="f", arguments={}), "input[0].arguments"),
    (item(type="function_call", call_id="c", name="f", arguments="{"), "input[0].arguments"),
    (item(type="function_call", call_id="c", name="f", arguments="[]"), "input[0].arguments"),
    (item(type="function_call_output", call_id="c", output="x"), "input[0].call_id"),
    ({"input": [CALL, {"type": "function_call_output", "output": "x"}]}, "input[1].call_id"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": {}}]}, "input[1].output"),
    (item(type="reasoning", summary="x"), "input[0].summary"),
    (item(type="reasoning", summary=["x"]), "input[0].summary[0]"),
    (item(type="reasoning", content=[{"type": "text", "text": "x"}]), "input[0].content[0]"),
    (item(type="reasoning", summary=[], encrypted_content="x"), "input[0].encrypted_content"),
    (item(type="item_reference"), "input[0].id"),
    (item(type="item_reference", id="msg_none"), "input[0].id"),
    (item(id="msg_none"), "input[0].id"),
    # Tools.
    ({"tools": "f"}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [*TOOLS, {"type": "file_search", "vector_store_ids": []}]}, "tools[2].type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": "f", "strict": "no"}]}, "tools[0].strict"),
    ({"tools": [{"type": "function", "name": "f", "description": 1}]}, "tools[0].description"),
    ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": TOOLS * 65}, "tools"),
    ({"tool_choice": 1}, "tool_choice"),
    ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}, "tools": TOOLS}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "other"}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice.mode"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}, "tools": TOOLS}, "tool_choice.tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}, "tools": TOOLS},
        "tool_choice.tools[0]",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_what_is_wrong_is_refused_by_its_field(rig, fields, param):
    error = rig.refused(RESPONSES, {"input": "hi", "max_output_tokens": 8} | fields)
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"include": ["file_search_call.results", "message.input_image.image_url"]},
        {"reasoning": {"summary": "auto"}},
        {"reasoning": {}},
        {"text": {}},
        {"text": {"format": None}},
        {"metadata": None},
        {"max_tool_calls": 1},
        {"prompt_cache_retention": "24h"},
        {"input": [{"role": "assistant", "content": "x", "phase": None}]},
        {"input": [{"role": "user", "content": []}]},
        {"input": [CALL | {"caller": {"type": "direct"}, "namespace": None, "async": None}]},
        {
            "input": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": None}
            ]
        },
        {"input": ""},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_changes_nothing_is_taken(rig, fields):
    assert rig.post(RESPONSES, {"input": "hi", "max_output_tokens": 4} | fields)["object"] == "response"


def test_an_answer_that_ended_inside_a_call_cannot_be_gone_on_with():
    text = '<tool_call>\n{"name": "get_time", "arguments": {"n": 1}}\n</tool_call>'
    model = Responder(text)
    rig = model._rig(Script)
    try:
        ask = {"input": "hi", "tools": TOOLS, "max_output_tokens": len(text) - 20}
        first = rig.post(RESPONSES, ask)
        assert first["output"][-1]["status"] == "incomplete"
        error = rig.refused(RESPONSES, ask | {"previous_response_id": first["id"]})
        assert error["param"] == "previous_response_id"
        rig.assert_idle()
    finally:
        rig.close()


def test_too_many_items_and_parts_are_refused_before_they_are_read(rig):
    assert rig.refused(RESPONSES, {"input": [{}] * 10_001})["param"] == "input"
    assert rig.refused(RESPONSES, user(*[{}] * 1001))["param"] == "input[0].content"


def test_a_model_without_a_template_has_no_responses(make_rig):
    rig = make_rig(tokenizer=lambda: byte_tokenizer(None))
    assert rig.refused(RESPONSES, {"input": "hi"})["param"] == "input"
    rig = make_rig(tokenizer=None)
    assert rig.refused(RESPONSES, {"input": "hi"})["param"] == "input"


def test_an_unknown_model_is_not_found(rig):
    assert rig.refused(RESPONSES, {"input": "hi", "model": "other"}, 404)["param"] == "model"


FIELDS = (*ResponsesRequest.__struct_fields__, "conversation", "n", "x")
WORDS = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "item_reference",
    "user",
    "assistant",
    "system",
)
WORDS += (
    "input_text",
    "output_text",
    "refusal",
    "reasoning_text",
    "function",
    "allowed_tools",
    "auto",
    "c",
    "{}",
    "f",
    "",
)
KEYS = ("type", "id", "role", "content", "call_id", "name", "arguments", "output", "summary", "text", "status", "tools")
KEYS += ("mode", "effort", "format", "parameters", "strict", "include_obfuscation")


def some_value(draw, depth=0):
    """Draw JSON that is near to what bodies hold."""
    kind = draw.randrange(10 if depth < 4 else 7)
    if kind < 3:
        return draw.choice(WORDS)
    if kind < 7:
        return (None, draw.choice((0, 1, -1, 2**63, 10**400)), draw.choice((0.5, 1e308)), draw.random() < 0.5)[kind - 3]
    if kind == 7:
        return [some_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(KEYS): some_value(draw, depth + 1) for _ in range(draw.randrange(6))}


def test_no_body_is_answered_with_a_fault_of_ours(rig):
    draw = random.Random(7)
    statuses = set()
    for _ in range(600):
        body = {"input": "hi", "max_output_tokens": 2}
        body |= {draw.choice(FIELDS): some_value(draw) for _ in range(draw.randrange(1, 4))}
        if draw.random() < 0.5:
            body["input"] = [some_value(draw, 1) for _ in range(draw.randrange(1, 4))]
        body["background"] = None
        response = rig.ask("POST", RESPONSES, json=body)
        statuses.add(response.status_code)
        if response.status_code != 200:
            assert response.status_code in (400, 404, 501), (body, response.text)
            error_of(response.json(), response.status_code)
    assert {200, 400} <= statuses
