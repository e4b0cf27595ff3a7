"""Structured output through the server: every door, whole and streamed, with the official client."""

import json

import jsonschema
import openai
import pydantic
import pytest
from kit import DEADLINE_S, FakeRunner, Rig, byte_tokenizer
from live import LiveServer
from scripted import CHAT, HI, LIMITS, TEMPLATE, TOOLS, Streamed, calls_of

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}


def _schema(named):
    return {"response_format": {"type": "json_schema", "json_schema": named}}


class Place(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=5)
    n: int = pydantic.Field(ge=0, le=99)


class GetTime(pydantic.BaseModel):
    """Tell the time."""

    zone: str = pydantic.Field(max_length=4)


class Thinker(FakeRunner):
    """Thinks, says a mark, and then whatever its mask allows."""

    thought = "hm, so...</think>"

    def _run(self, plan):
        result = super()._run(plan)
        for r, s in enumerate(result.row_seq.tolist()):
            row = self._row(int(plan.seq_slot[s]))
            position = int(result.row_pos[r])
            k = position + 1 - row.n_prompt
            if plan.seq_samples[s] and k < len(self.thought):
                token = byte_tokenizer().encode(self.thought, add_special_tokens=False)[k]
                assert self._mask[token]
                result.row_token[r] = row.tokens[position + 1] = token
        return result

    def mask_of(self, plan, s, row=0):
        self._mask = super().mask_of(plan, s, row)
        return self._mask


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


def test_the_official_client_parses_a_pydantic_model_whole_and_streamed(client):
    ask = {"model": "tiny", "messages": HI, "response_format": Place, "max_tokens": 400, "seed": 4, "temperature": 1.0}
    whole = client.chat.completions.parse(**ask, n=2)
    for choice in whole.choices:
        assert isinstance(choice.message.parsed, Place)
        assert choice.finish_reason == "stop"
    with client.chat.completions.stream(**ask) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize("choice", ["required", "named"])
def test_the_official_client_parses_calls_of_strict_tools(client, choice):
    tool = openai.pydantic_function_tool(GetTime)
    named = {"type": "function", "function": {"name": "GetTime"}}
    answer = client.chat.completions.parse(
        model="tiny",
        messages=HI,
        tools=[tool],
        tool_choice=named if choice == "named" else choice,
        parallel_tool_calls=False,
        max_tokens=400,
        seed=1,
    )
    (got,) = answer.choices
    (call,) = got.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetTime)
    assert got.finish_reason == ("stop" if choice == "named" else "tool_calls")


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "qwen3_coder", "pythonic", "none"])
def test_required_calls_come_the_same_whole_and_streamed(make_rig, parser):
    rig = make_rig(
        tokenizer=lambda: byte_tokenizer(TEMPLATE), limits=LIMITS,
        settings={"tool_call_parser": parser, "reasoning_parser": "none"},
        max_num_batched_tokens=1024,
    )  # fmt: skip
    tools = [
        {"type": "function", "function": {**tool["function"], "parameters": {**SCHEMA, "additionalProperties": False}}}
        for tool in TOOLS
    ]
    ask = {"messages": HI, "tools": tools, "tool_choice": "required", "max_tokens": 900, "parallel_tool_calls": False}
    whole = rig.chat(**ask, seed=3, ignore_eos=False)["choices"][0]
    ((name, arguments),) = calls_of(whole["message"]["tool_calls"])
    assert name in ("get_weather", "get_time")
    jsonschema.validate(arguments, SCHEMA)
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == "tool_calls"
    streamed = Streamed(rig.stream(CHAT, **ask | {"ignore_eos": False}))
    assert calls_of(streamed.calls) == [(name, arguments)]
    assert streamed.finish_reason == "tool_calls"


def test_a_form_begins_behind_reasoning_and_the_answer_is_whole(make_rig):
    rig = make_rig(
        runner=Thinker, tokenizer=lambda: byte_tokenizer(TEMPLATE), limits=LIMITS, max_num_batched_tokens=1024
    )
    kwargs = {"opens": True}
    answer = rig.chat(response_format=FORMAT, max_tokens=300, chat_template_kwargs=kwargs, ignore_eos=False, seed=5)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == "hm, so..."
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_a_form_begins_at_once_without_reasoning(make_rig):
    rig = make_rig(settings={"reasoning_parser": "none"})
    message = rig.chat(response_format=FORMAT, max_tokens=200, ignore_eos=False)["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


@pytest.mark.parametrize(
    "form", [{"regex": "[0-9]{3}-[0-9]{4}"}, {"choice": ["123-4567"]}, {"grammar": 'start: /[0-9]{3}/ "-" /[0-9]{4}/'}]
)
def test_completions_take_forms_too(rig, form):
    for choice in rig.complete(structured_outputs=form, max_tokens=60, n=2)["choices"]:
        assert len(choice["text"]) == 8
        assert choice["text"][3] == "-"
        assert choice["finish_reason"] == "stop"


def test_json_objects_and_tags_come_as_asked(rig):
    answer = rig.chat(response_format={"type": "json_object"}, max_tokens=200, ignore_eos=False)
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"},
    }
    text = rig.chat(response_format=tag, max_tokens=60)["choices"][0]["message"]["content"]
    assert text.startswith("<n>")
    assert text.endswith("</n>")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (_schema({"name": "x"}), "response_format.json_schema.schema"),
        (_schema({"schema": None}), "response_format.json_schema.schema"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_wrong_forms_are_refused_by_their_field(rig, fields, param):
    assert rig.refused(CHAT, {"messages": HI, "max_tokens": 8} | fields)["param"] == param


def test_a_refused_schema_names_its_place_and_keyword(rig):
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    error = rig.refused(CHAT, {"messages": HI, "max_tokens": 8} | fields)
    assert error["param"] == "response_format.json_schema.schema"
    assert "properties/tags: uniqueItems" in error["message"]


def test_a_refused_schema_of_a_tool_names_the_tool(make_rig):
    rig = make_rig(tokenizer=lambda: byte_tokenizer(TEMPLATE), limits=LIMITS)
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    error = rig.refused(CHAT, {"messages": HI, "tools": tools, "tool_choice": "required"})
    assert error["param"] == "tools[0].function.parameters"
    assert "properties/a: not" in error["message"]
