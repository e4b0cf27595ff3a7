"""Structured output of responses and of Anthropic's messages, with the official clients."""

import json

import anthropic
import jsonschema
import openai
import pytest
from kit import DEADLINE_S, Rig, byte_tokenizer
from live import LiveServer
from scripted import LIMITS, TEMPLATE
from test_structured import SCHEMA, GetTime, Place

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOOL = {"type": "function", "name": "GetTime", "parameters": GetTime.model_json_schema(), "strict": True}
CLAUDE_TOOL = {"name": "GetTime", "input_schema": GetTime.model_json_schema(), "strict": True}
CLAUDE_ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 800}
BAD_SCHEMA = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}


@pytest.fixture(scope="module")
def live():
    rig = Rig(
        tokenizer=lambda: byte_tokenizer(TEMPLATE),
        limits=LIMITS,
        settings={"port": 0, "shutdown_s": 0.0, "reasoning_parser": "none"},  # a fake takes any token that may
        max_num_batched_tokens=1024,
    )
    server = LiveServer(rig)
    yield server
    server.close()
    rig.close()


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0, timeout=6 * DEADLINE_S) as made:
        yield made
    live.rig.assert_idle()


@pytest.fixture
def claude(live):
    with anthropic.Anthropic(base_url=live.url, api_key="k", max_retries=0, timeout=6 * DEADLINE_S) as made:
        yield made
    live.rig.assert_idle()


def test_a_response_is_parsed_into_a_pydantic_model_whole_and_streamed(client):
    ask = {"model": "tiny", "input": "hi", "text_format": Place, "max_output_tokens": 400, "extra_body": {"seed": 4}}
    whole = client.responses.parse(**ask)
    assert isinstance(whole.output_parsed, Place)
    assert whole.text.format.name == "Place"
    with client.responses.stream(**ask) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_parsed == whole.output_parsed


def test_a_response_in_the_background_keeps_its_form(client):
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    made = client.responses.create(
        model="tiny", input="hi", text={"format": form}, background=True, stream=True, max_output_tokens=400
    )
    *_, last = made
    assert last.type == "response.completed"
    jsonschema.validate(json.loads(last.response.output_text), SCHEMA)


def test_a_response_of_a_json_object_is_one(client):
    answer = client.responses.create(
        model="tiny", input="hi", text={"format": {"type": "json_object"}}, max_output_tokens=1500
    )
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text), dict)
    else:
        assert answer.output_text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "GetTime"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "GetTime"}]},
    ],
    ids=["required", "named", "allowed"],
)
def test_a_response_that_must_call_calls_in_the_tools_form(client, choice):
    answer = client.responses.create(
        model="tiny",
        input="hi",
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=800,
    )
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "GetTime")
    GetTime.model_validate_json(call.arguments)


def test_a_message_of_a_schema_is_of_it_whole_and_streamed(claude):
    ask = CLAUDE_ASK | {"extra_body": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}}
    (block,) = claude.messages.create(**ask).content
    jsonschema.validate(json.loads(block.text), SCHEMA)
    with claude.messages.stream(**ask) as events:
        jsonschema.validate(json.loads(events.get_final_text()), SCHEMA)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "GetTime"}], ids=["any", "tool"])
def test_a_message_that_must_call_calls_in_the_tools_form(claude, choice):
    choice = choice | {"disable_parallel_tool_use": True}
    answer = claude.messages.create(**CLAUDE_ASK, tools=[CLAUDE_TOOL], tool_choice=choice)
    (block,) = answer.content
    assert (block.type, block.name, answer.stop_reason) == ("tool_use", "GetTime", "tool_use")
    GetTime.model_validate(block.input)


def test_a_refused_schema_is_named_as_each_route_calls_it(live):
    form = {"type": "json_schema", "name": "x", "schema": BAD_SCHEMA}
    error = live.rig.refused(RESPONSES, {"input": "hi", "text": {"format": form}})
    assert error["param"] == "text.format.schema"
    assert "properties/tags: uniqueItems" in error["message"]
    form = {"type": "json_schema", "schema": BAD_SCHEMA}
    answer = live.rig.post(MESSAGES, CLAUDE_ASK | {"output_config": {"format": form}}, 400)
    assert answer["error"]["message"].startswith("output_config.format.schema")
