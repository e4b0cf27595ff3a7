"""/v1/responses, whole and streamed: items, events in OpenAI's order, tools, reasoning, log-probabilities."""

import json

import pytest
from kit import GatedRunner
from responding import LOGPROBS, RESPONSES, TOOLS, Rebuilt, Responder, plain, read_events, texts_of
from scripted import MARKS, STEPS

from tiercel.api.http import chat
from tiercel.api.http.running import Running
from tiercel.base.errors import RequestFailed

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {"n": 1}}\n</tool_call>'
CALLS = [("get_weather", '{"city": "Rome"}'), ("get_time", '{"n": 1}')]

CASES = {
    "text": ("Hello, wörld €.\n", {}, [("message", "Hello, wörld €.\n")]),
    "nothing": ("", {}, [("message", "")]),
    "white space": (" \n", {}, [("message", " \n")]),
    "white space first": ("\n\n Hi", {"tools": TOOLS}, [("message", "\n\n Hi")]),
    "reasoning": ("<think>\nhm, so\n</think>\n\nHi", {}, [("reasoning", "hm, so"), ("message", "Hi")]),
    "reasoning alone": ("<think>hm</think>", {}, [("reasoning", "hm")]),
    "a call": (WEATHER, {"tools": TOOLS}, CALLS[:1]),
    "two calls": (f"{WEATHER}\n{TIME}", {"tools": TOOLS}, CALLS),
    "text and calls": (f"Hm.\n{WEATHER}\n{TIME}", {"tools": TOOLS}, [("message", "Hm.\n"), *CALLS]),
    "all": (
        f"<think>hm</think>So:\n{WEATHER}{TIME}",
        {"tools": TOOLS},
        [("reasoning", "hm"), ("message", "So:\n"), *CALLS],
    ),
    "one call of two": (f"{WEATHER}\n{TIME}", {"tools": TOOLS, "parallel_tool_calls": False}, CALLS[:1]),
    "a mark that is none": ("a < b <tool", {"tools": TOOLS}, [("message", "a < b <tool")]),
}


def squeezed(texts):
    """Arguments as values: their white space is the model's."""
    return [
        (kind, json.dumps(json.loads(text)) if kind.startswith("get_") else text.strip() or text)
        for kind, text in texts
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_stream_says_what_the_whole_response_says_however_it_is_cut(monkeypatch, case):
    text, ask, texts = CASES[case]
    model = Responder(text, special=MARKS)
    whole = model.whole(**ask)
    assert squeezed(texts_of(whole)) == squeezed(texts)
    assert whole["status"] == "completed"
    for n_tokens in STEPS:
        rebuilt = Rebuilt(model.stream(monkeypatch, n_tokens, **ask))
        assert plain(rebuilt.last) == plain(whole)


def test_two_calls_in_one_step_are_two_items_V39584(monkeypatch):
    model = Responder(f"{WEATHER}{TIME}")
    events = model.stream(monkeypatch, None, tools=TOOLS)
    assert [item["type"] for item in Rebuilt(events).items] == ["function_call"] * 2
    assert len({item["call_id"] for item in Rebuilt(events).items}) == 2


def test_the_events_of_a_text_are_openais_in_openais_order(monkeypatch):
    events = Responder("ab").stream(monkeypatch, 1)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


@pytest.mark.parametrize("n_tokens", STEPS)
@pytest.mark.parametrize("cut", [3, 30, 60])
def test_what_max_output_tokens_cuts_is_incomplete_and_says_why(monkeypatch, n_tokens, cut):
    model = Responder(f"<think>hm, hm</think>So it is:\n{WEATHER}", special=MARKS)
    ask = {"tools": TOOLS, "max_output_tokens": cut}
    whole = model.whole(**ask)
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["output_tokens"] == cut
    assert whole["output"][-1]["status"] == "incomplete"
    assert all(item["status"] == "completed" for item in whole["output"][:-1])
    events = model.stream(monkeypatch, n_tokens, **ask)
    assert events[-1]["type"] == "response.incomplete"
    assert plain(Rebuilt(events).last) == plain(whole)


@pytest.mark.parametrize("text", ["Hello, wörld €.", f"<think>hm</think>\n\nSo €:\n{WEATHER}", "a < b"])
def test_logprobs_are_those_of_the_texts_tokens_and_of_no_others(monkeypatch, text):
    model = Responder(text, special=MARKS)
    ask = {"tools": TOOLS, "include": LOGPROBS, "top_logprobs": 2}
    whole = model.whole(**ask)
    assert whole["top_logprobs"] == 2
    (message,) = [item for item in whole["output"] if item["type"] == "message"]
    (part,) = message["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert data.decode().strip() == part["text"].strip()
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    for n_tokens in STEPS:
        assert plain(Rebuilt(model.stream(monkeypatch, n_tokens, **ask)).last) == plain(whole)


def test_without_include_there_are_no_logprobs():
    (item,) = Responder("ab").whole()["output"]
    assert item["content"][0]["logprobs"] == []


def test_logprobs_wait_for_text_that_may_be_a_stop_string(monkeypatch):
    model = Responder("abcxyz and more")
    ask = {"include": LOGPROBS, "stop": ["xyz!", "xyz "]}
    whole = model.whole(**ask)
    assert texts_of(whole) == [("message", "abc")]
    assert [entry["token"] for entry in whole["output"][0]["content"][0]["logprobs"]] == ["a", "b", "c"]
    for n_tokens in STEPS:
        assert plain(Rebuilt(model.stream(monkeypatch, n_tokens, **ask)).last) == plain(whole)


def test_usage_counts_what_was_read_cached_written_and_thought():
    model = Responder("<think>hm</think>Hi", special=MARKS)
    usage = model.whole(instructions="x" * 100)["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}
    assert usage["output_tokens"] == 7
    assert usage["total_tokens"] == usage["input_tokens"] + 7
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert 100 < usage["input_tokens_details"]["cache_write_tokens"] <= usage["input_tokens"]


def test_a_response_repeats_what_was_asked_with_defaults_filled_in():
    ask = {
        "instructions": "Be short.",
        "max_output_tokens": 9,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": TOOLS[:1],
        "tool_choice": "auto",
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
        "parallel_tool_calls": False,
    }
    answer = Responder("ok").whole(**ask)
    assert {name: answer[name] for name in ask} == ask | {"service_tier": "default"}
    plain_answer = Responder("ok").whole()
    assert plain_answer["model"] == "tiny"
    assert plain_answer["store"] is True
    assert plain_answer["tool_choice"] == "auto"
    assert plain_answer["tools"] == []
    assert plain_answer["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert plain_answer["error"] is plain_answer["incomplete_details"] is None


def prompt_of(monkeypatch, **fields):
    """Give the text of the prompt that a request becomes."""
    seen = []
    render = chat.render_chat

    def noted(*args):
        seen.append(render(*args))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(chat, "render_chat", noted)
        Responder("ok").whole(**fields)
    return seen[-1]


def test_items_become_the_messages_of_a_chat(monkeypatch):
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What time?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": None}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "get_time", "arguments": '{"n": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Sure?"},
    ]
    prompt = prompt_of(monkeypatch, input=items, instructions="Be short.")
    assert prompt == (
        "<|im_start|>system\nBe short.\n\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWhat time?<|im_end|>\n"
        '<|im_start|>assistant\nI look.<tool_call>{"name": "get_time", "arguments": {"n": 1}}</tool_call>[hm]'
        "<|im_end|>\n"
        "<|im_start|>tool\nnoon<|im_end|>\n"
        "<|im_start|>assistant\nNoon.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_reasoning_effort_reaches_the_template():
    template = "{{ reasoning_effort }} {{ enable_thinking }}{{ messages[0].content }}"
    seen = Responder("ok", template=template)
    assert seen.whole(reasoning={"effort": "none"})["usage"]["input_tokens"] == len("none Falsehi")
    assert seen.whole(reasoning={"effort": "low"})["usage"]["input_tokens"] == len("low Truehi")


def test_allowed_tools_are_the_only_ones_the_model_is_shown(monkeypatch):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    prompt = prompt_of(monkeypatch, tools=TOOLS, tool_choice=choice)
    assert "get_time" in prompt
    assert "get_weather" not in prompt


def test_truncation_auto_leaves_out_whole_turns_oldest_first_and_keeps_the_system(monkeypatch):
    turns = [
        one
        for i in range(20)
        for one in (
            {"role": "user", "content": f"question {i} " + "x" * 300},
            {"type": "function_call", "call_id": f"c{i}", "name": "get_time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": f"answer {i}"},
        )
    ]
    ask = {
        "input": [*turns, {"role": "user", "content": "last"}],
        "instructions": "Be short.",
        "max_output_tokens": 500,
    }
    error = Responder("ok").refused(**ask)
    assert error["param"] in ("prompt", "input")
    prompt = prompt_of(monkeypatch, **ask, truncation="auto")
    assert prompt.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nquestion ")
    assert "last" in prompt
    kept = [i for i in range(20) if f"question {i} " in prompt]
    assert kept == list(range(kept[0], 20))
    assert kept[0] > 0
    assert [i for i in range(20) if f"answer {i}<" in prompt] == kept


def test_a_last_turn_that_does_not_fit_is_refused_even_with_truncation():
    error = Responder("ok").refused(input="x" * 5000, truncation="auto")
    assert error["param"] in ("prompt", "input")


def failing_after_one(error):
    """Make a request's outputs end by an error after the first."""

    async def outputs(running):
        yield 0, await anext(running.handles[0])
        raise error

    return outputs


def test_an_engines_failure_is_the_streams_last_event_and_keeps_what_there_is(make_rig, monkeypatch):
    rig = make_rig(runner=GatedRunner)
    rig.runner.let(1)
    error = RequestFailed("engine: the step failed at /srv/x/y; send it again")
    monkeypatch.setattr(Running, "outputs", failing_after_one(error))
    text = rig.ask("POST", RESPONSES, json={"input": "hi", "stream": True, "max_output_tokens": 90, "seed": 3}).text
    last = Rebuilt(read_events(text)).last
    assert last["status"] == "failed"
    assert last["error"] == {"code": "server_error", "message": "engine: the step failed at <path>; send it again"}
    assert [item["status"] for item in last["output"]] == ["incomplete"]
    assert rig.ask("GET", f"{RESPONSES}/{last['id']}").json() == last
    rig.runner.open()
    rig.assert_idle()


def test_a_fault_of_ours_is_told_without_its_words(make_rig, monkeypatch, caplog):
    rig = make_rig(runner=GatedRunner)
    rig.runner.let(1)
    monkeypatch.setattr(Running, "outputs", failing_after_one(KeyError("a secret")))
    text = rig.ask("POST", RESPONSES, json={"input": "hi", "stream": True, "max_output_tokens": 90, "seed": 3}).text
    last = Rebuilt(read_events(text)).last
    assert last["status"] == "failed"
    assert "a secret" not in text
    assert "a secret" in caplog.text
    rig.runner.open()
    rig.assert_idle()


def test_a_whole_response_that_fails_is_an_error_as_on_every_route(make_rig, monkeypatch):
    rig = make_rig()
    monkeypatch.setattr(Running, "outputs", failing_after_one(RequestFailed("engine: no")))
    assert rig.refused(RESPONSES, {"input": "hi", "max_output_tokens": 9}, 500)["message"] == "engine: no"
    rig.assert_idle()


def test_with_tool_choice_none_a_call_is_text():
    assert texts_of(Responder(TIME).whole(tools=TOOLS, tool_choice="none")) == [("message", TIME)]


def test_a_client_reads_events_of_n_as_text(rig):
    text = rig.ask("POST", RESPONSES, json={"input": "hi", "stream": True, "max_output_tokens": 4, "seed": 3}).text
    assert Rebuilt(read_events(text)).last["usage"]["output_tokens"] == 4
