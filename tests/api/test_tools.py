"""Tool calls of chats, whole and streamed at 1, 2, 3 and all tokens a step."""

import json

import pytest
from kit import byte_tokenizer
from scripted import CHAT, HI, MARKS, STEPS, TEMPLATE, TOOLS, Scripted, Streamed, assert_same, both, calls_of

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "n": 3}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
TWO = [("get_weather", {"city": "Zürich", "n": 3}), ("get_time", {})]
DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
K2 = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
ARGS = '{"city": "Zürich", "n": 3}'
# Parser -> what a model of it says for the two calls, and the special tokens among it.
FAMILIES = {
    "hermes": (f"{WEATHER}\n{TIME}", ()),
    "llama3_json": (
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGS}}};{{"name": "get_time", "parameters": {{}}}}',
        ("<|python_tag|>",),
    ),
    "pythonic": ('[get_weather(city="Zürich", n=3), get_time()]', ()),
    "mistral": (f"[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]get_time[ARGS]{{}}", ("[TOOL_CALLS]", "[ARGS]")),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        ("<tool_call>", "</tool_call>"),
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v31": (f"{DS[0]}{DS[1]}get_weather{DS[2]}{ARGS}{DS[3]}{DS[1]}get_time{DS[2]}{{}}{DS[3]}{DS[4]}", DS),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Zürich'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ("｜DSML｜",),
    ),
    "kimi_k2": (
        f"{K2[0]}{K2[1]}functions.get_weather:0{K2[2]}{ARGS}{K2[3]}{K2[1]}functions.get_time:1{K2[2]}{{}}{K2[3]}{K2[4]}",
        K2,
    ),
    "openai": (
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGS}<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}",
        ("<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|start|>"),
    ),
    "granite": (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGS}}}, {{"name": "get_time", "arguments": {{}}}}]',
        ("<|tool_call|>",),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_are_told_the_same_whole_and_in_any_steps(monkeypatch, family):
    text, special = FAMILIES[family]
    model = Scripted(text, special=special, settings={"tool_call_parser": family})
    whole = model.whole(tools=TOOLS)
    (choice,) = whole["choices"]
    assert calls_of(choice["message"]["tool_calls"]) == TWO
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    for n_tokens in STEPS:
        assert_same(Streamed(model.stream(monkeypatch, n_tokens, tools=TOOLS)), whole)


@pytest.mark.parametrize("special", [(), MARKS])
def test_words_before_a_call_stay_and_no_mark_leaks(monkeypatch, special):
    model = Scripted(f"Let me look.\n\n{WEATHER}", special=special)
    whole = model.whole(tools=TOOLS)
    assert whole["choices"][0]["message"]["content"] == "Let me look."
    for n_tokens in STEPS:
        streamed = Streamed(model.stream(monkeypatch, n_tokens, tools=TOOLS))
        assert_same(streamed, whole)
        assert not any("<" in (delta.get("content") or "") for delta in streamed.deltas)


def test_arguments_stream_as_they_come(monkeypatch):
    model = Scripted(WEATHER)
    streamed = Streamed(model.stream(monkeypatch, 1, tools=TOOLS))
    parts = [d["tool_calls"][0]["function"]["arguments"] for d in streamed.deltas if "tool_calls" in d]
    assert len(parts) > 20
    assert all(len(part) <= 4 for part in parts)


def test_with_tools_a_plain_answer_streams_in_pieces_and_is_untouched(monkeypatch):
    text = "Once, a < b.\n\n[And] {so} on.\n"
    model = Scripted(text)
    streamed = Streamed(model.stream(monkeypatch, 1, tools=TOOLS))
    assert (streamed.content, streamed.calls, streamed.finish_reason) == (text, [], "stop")
    assert len(streamed.deltas) > 20
    assert "tool_calls" not in model.whole(tools=TOOLS)["choices"][0]["message"]


@pytest.mark.parametrize("n_tokens", STEPS)
def test_a_call_that_max_tokens_cuts_is_delivered_and_told_as_length(monkeypatch, n_tokens):
    model = Scripted(WEATHER)
    n = len(model.script) - 20
    whole = model.whole(tools=TOOLS, max_tokens=n)["choices"][0]
    streamed = Streamed(model.stream(monkeypatch, n_tokens, tools=TOOLS, max_tokens=n))
    assert streamed.finish_reason == whole["finish_reason"] == "length"
    for calls in (streamed.calls, whole["message"]["tool_calls"]):
        (call,) = calls
        assert call["function"]["name"] == "get_weather"
        assert ARGS.startswith(call["function"]["arguments"])
        assert len(call["function"]["arguments"]) > 10


@pytest.mark.parametrize("n_tokens", STEPS)
def test_text_held_for_a_stop_string_goes_through_the_parser_at_the_end(monkeypatch, n_tokens):
    model = Scripted(WEATHER)
    streamed = Streamed(model.stream(monkeypatch, n_tokens, tools=TOOLS, stop=["</tool_call>X"]))
    assert calls_of(streamed.calls) == TWO[:1]
    assert (streamed.content, streamed.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize("n_cut", [len("Well. <tool_"), len("Well. <tool_call>"), len('Well. <tool_call>{"na')])
def test_a_mark_that_max_tokens_cuts_is_no_content(monkeypatch, n_cut):
    model = Scripted('Well. <tool_call>{"name": "get_time", "arguments": {}}</tool_call>')
    choice, _ = both(monkeypatch, model, tools=TOOLS, max_tokens=n_cut)
    assert choice["message"]["content"] == "Well."
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("n_tokens", STEPS)
def test_without_parallel_calls_only_the_first_is_given(monkeypatch, n_tokens):
    model = Scripted(f"{WEATHER}\n{TIME}")
    ask = {"tools": TOOLS, "parallel_tool_calls": False}
    whole = model.whole(**ask)
    assert calls_of(whole["choices"][0]["message"]["tool_calls"]) == TWO[:1]
    assert_same(Streamed(model.stream(monkeypatch, n_tokens, **ask)), whole)


def test_with_tool_choice_none_a_call_is_text_and_the_tools_are_shown():
    model = Scripted(TIME)
    answer = model.whole(tools=TOOLS, tool_choice="none", return_prompt_text=True)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TIME, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "get_weather get_time" in answer["prompt_text"]


def test_usage_of_a_stream_with_calls_is_the_wholes_and_grows(monkeypatch):
    model = Scripted(f"<think>a</think>{WEATHER}", special=MARKS, template=TEMPLATE)
    options = {"include_usage": True, "continuous_usage_stats": True}
    whole = model.whole(tools=TOOLS)["usage"]
    for n_tokens in STEPS:
        chunks = model.stream(monkeypatch, n_tokens, tools=TOOLS, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1]["usage"] == whole
        assert chunks[-1]["choices"] == []


def test_logprobs_and_ids_come_once_for_each_token_whatever_is_held_back(monkeypatch):
    model = Scripted(f"Hm.\n{WEATHER}", special=MARKS)
    ask = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = model.whole(**ask)["choices"][0]
    for n_tokens in STEPS:
        choices = [chunk["choices"][0] for chunk in model.stream(monkeypatch, n_tokens, **ask)]
        assert [i for c in choices for i in c.get("token_ids", [])] == whole["token_ids"]
        assert [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]] == whole["logprobs"]["content"]


def test_ids_have_the_models_form():
    def ids(family):
        text, special = FAMILIES[family]
        model = Scripted(text, special=special, settings={"tool_call_parser": family})
        return [call["id"] for call in model.whole(tools=TOOLS)["choices"][0]["message"]["tool_calls"]]

    assert ids("kimi_k2") == ["functions.get_weather:0", "functions.get_time:1"]
    assert all(len(one) == 9 and one.isalnum() for one in ids("mistral"))
    assert all(one.startswith("chatcmpl-tool-") for one in ids("hermes"))
    assert len(set(ids("hermes"))) == 2


def test_n_choices_are_parsed_each_for_itself():
    answer = Scripted(WEATHER).whole(tools=TOOLS, n=3)
    assert [calls_of(c["message"]["tool_calls"]) for c in answer["choices"]] == [TWO[:1]] * 3
    assert len({c["message"]["tool_calls"][0]["id"] for c in answer["choices"]}) == 3


def test_special_tokens_of_others_do_not_leak_when_marks_are_special(monkeypatch):
    model = Scripted(f"a<|im_start|>b {WEATHER}<|im_end|>", special=MARKS)
    whole = model.whole(tools=TOOLS)
    assert whole["choices"][0]["message"]["content"] == "ab"
    for n_tokens in STEPS:
        assert_same(Streamed(model.stream(monkeypatch, n_tokens, tools=TOOLS)), whole)
    shown = model.whole(tools=TOOLS, skip_special_tokens=False)["choices"][0]["message"]
    assert shown["content"] == "a<|im_start|>b <|im_end|>"


def test_a_faulty_parser_costs_no_request(monkeypatch, caplog):
    def fails(self, text):
        raise KeyError("a fault of ours")

    monkeypatch.setattr("tiercel.text.parsers.chain.Chain.feed", fails)
    model = Scripted(f"a {WEATHER}")
    assert model.whole(tools=TOOLS)["choices"][0]["message"]["content"] == f"a {WEATHER}"
    for n_tokens in STEPS:
        assert Streamed(model.stream(monkeypatch, n_tokens, tools=TOOLS)).content == f"a {WEATHER}"
    assert "a fault of ours" in caplog.text


def test_a_chat_goes_on_with_calls_and_their_results():
    call = {"id": "x", "type": "function", "function": {"name": "get_time", "arguments": '{"n": 1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "x", "content": "noon"},
        {"role": "assistant", "content": "So.", "tool_calls": []},
        {"role": "assistant", "content": "Hm.", "reasoning_content": "why"},
    ]
    prompt = Scripted("ok").whole(messages=messages, tools=TOOLS, return_prompt_text=True)["prompt_text"]
    assert '<tool_call>{"name": "get_time", "arguments": {"n": 1}}</tool_call>' in prompt
    assert "tool\nnoon" in prompt
    assert "So.<|im_end|>" in prompt
    assert "Hm.[why]" in prompt


def test_a_template_without_a_place_for_tools_is_told_them_in_words():
    plain = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    call = {"id": "x", "type": "function", "function": {"name": "get_time", "arguments": '{"n": 1}'}}
    messages = [
        {"role": "system", "content": "Be short."},
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "x", "content": "noon"},
        {"role": "tool", "tool_call_id": "y", "content": [{"type": "text", "text": "one"}]},
    ]
    answer = Scripted(WEATHER, template=plain).whole(messages=messages, tools=TOOLS, return_prompt_text=True)
    prompt = answer["prompt_text"]
    assert calls_of(answer["choices"][0]["message"]["tool_calls"]) == TWO[:1]
    assert prompt.startswith("<|im_start|>system\nBe short.\n\nYou can call functions")
    assert json.dumps(TOOLS[0]["function"]) in prompt
    assert prompt.count('<tool_call>\n{"name": "get_time", "arguments": {"n": 1}}\n</tool_call>') == 2
    assert "user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response>" in prompt


def test_the_developers_message_is_the_systems_where_the_template_knows_none():
    messages = [{"role": "developer", "content": "Be short."}, *HI]
    assert (
        "<|im_start|>system\nBe short."
        in Scripted("ok").whole(messages=messages, return_prompt_text=True)["prompt_text"]
    )


def function(**changes):
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}} | changes}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [function()] * 129}, "tools"),
        ({"tools": [function(description="x" * (1 << 20))]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
        ({"tools": [function(), function(name="")]}, "tools[1].function.name"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [function(name="f\n")]}, "tools[0].function.name"),
        ({"tools": [function(name=None)]}, "tools[0].function.name"),
        ({"tools": [function(description=1)]}, "tools[0].function.description"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"properties": []})]}, "tools[0].function.parameters"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": "f"}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_wrong_tools_are_refused_by_their_field(rig, fields, param):
    assert rig.refused(CHAT, {"messages": HI, "max_tokens": 8} | fields)["param"] == param


def test_a_template_in_whose_words_calls_are_unknown_says_what_to_do():
    model = Scripted("x", template="{{ tools }} {{ messages }}")
    error = model.refused(tools=TOOLS)
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    assert model.whole(tools=TOOLS, tool_choice="none")["choices"][0]["message"]["content"] == "x"
    off = Scripted("x", settings={"tool_call_parser": "none"})
    assert off.refused(tools=TOOLS)["param"] == "tools"


def test_tokenize_counts_tools_as_a_chat_does(make_rig):
    rig = make_rig(tokenizer=lambda: byte_tokenizer(TEMPLATE))
    chat = rig.chat(tools=TOOLS)["usage"]["prompt_tokens"]
    assert chat > rig.chat()["usage"]["prompt_tokens"]
    assert rig.post("/tokenize", {"messages": HI, "tools": TOOLS})["count"] == chat
    assert rig.refused("/tokenize", {"messages": HI, "tools": []})["param"] == "tools"
