"""Reasoning of chats, whole and streamed at 1, 2, 3 and all tokens a step."""

import pytest
from scripted import HI, MARKS, STEPS, TEMPLATE, TOOLS, Scripted, Streamed, assert_same, calls_of

CALL = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


def model(text, *, special=MARKS, template=TEMPLATE, **settings):
    return Scripted(text, special=special, template=template, settings=settings)


@pytest.mark.parametrize("special", [(), MARKS])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm, a < b.\n</think>\n\nYes.", "Hm, a < b.", "Yes."),
        ("<think></think>Yes.", None, "Yes."),
        ("Yes.", None, "Yes."),
        ("<think>only", "only", None),
    ],
)
def test_reasoning_is_told_apart_in_any_steps(monkeypatch, special, text, reasoning, content):
    one = model(text, special=special)
    whole = one.whole()
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    assert message.get("reasoning_content") == reasoning
    for n_tokens in STEPS:
        assert_same(Streamed(one.stream(monkeypatch, n_tokens)), whole)


def test_reasoning_content_and_call_may_come_in_one_step(monkeypatch):
    one = model(f"<think>a</think>b{CALL}")
    whole = one.whole(tools=TOOLS)
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"], calls_of(message["tool_calls"])) == ("a", "b", [("get_time", {})])
    for n_tokens in STEPS:
        assert_same(Streamed(one.stream(monkeypatch, n_tokens, tools=TOOLS)), whole)


def test_a_prompt_that_opens_the_reasoning_is_seen(monkeypatch):
    one = model("why</think>so")
    ask = {"chat_template_kwargs": {"opens": True}}
    whole = one.whole(**ask)
    assert whole["choices"][0]["message"]["reasoning"] == "why"
    for n_tokens in STEPS:
        assert_same(Streamed(one.stream(monkeypatch, n_tokens, **ask)), whole)


def test_a_users_mark_opens_nothing():
    messages = [{"role": "user", "content": "What is <think>?"}]
    assert model("A tag.").whole(messages=messages)["choices"][0]["message"]["content"] == "A tag."


def test_a_named_parser_thinks_first_unless_told_not_to():
    one = model("why</think>so", reasoning_parser="qwen3")
    assert one.whole()["choices"][0]["message"]["reasoning"] == "why"
    plain = model("so", reasoning_parser="qwen3")
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert plain.whole(**off)["choices"][0]["message"]["content"] == "so"
    assert plain.whole(reasoning_effort="low")["choices"][0]["message"]["content"] is None


def test_a_continued_message_decides_by_what_it_holds():
    def ask(begun, said):
        messages = [*HI, {"role": "assistant", "content": begun}]
        answer = model(said).whole(messages=messages, continue_final_message=True)
        message = answer["choices"][0]["message"]
        return message.get("reasoning"), message["content"]

    assert ask("<think>so far", "and on</think>done") == ("and on", "done")
    assert ask("<think>x</think>so far", " and on") == (None, " and on")


@pytest.mark.parametrize("n_tokens", STEPS)
def test_reasoning_can_be_left_out_and_is_still_counted(monkeypatch, n_tokens):
    one = model("<think>secret</think>open")
    ask = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    whole = one.whole(**ask)
    choice = whole["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "open", "refusal": None}
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    chunks = one.stream(monkeypatch, n_tokens, **ask)
    assert "secret" not in str(chunks)
    assert Streamed(chunks).content == "open"
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)


@pytest.mark.parametrize(("special", "n_reasoning"), [(MARKS, 4), ((), 4)])
def test_reasoning_tokens_are_counted_the_same_whole_and_streamed(monkeypatch, special, n_reasoning):
    one = model("<think>abcd</think>ef", special=special)
    assert one.whole()["usage"]["completion_tokens_details"] == {"reasoning_tokens": n_reasoning}
    for n_tokens in STEPS:
        chunks = one.stream(monkeypatch, n_tokens, stream_options={"include_usage": True})
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": n_reasoning}


def test_a_model_without_marks_has_no_count_and_no_reasoning():
    plain = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
    answer = Scripted("<think>a</think>b", template=plain).whole()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "<think>a</think>b", "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]


def test_the_parser_can_be_switched_off():
    answer = model("<think>a</think>b", special=(), reasoning_parser="none").whole()
    assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"


@pytest.mark.parametrize("n_tokens", STEPS)
def test_a_stop_string_inside_of_reasoning_ends_the_answer_there(monkeypatch, n_tokens):
    one = model("<think>one two three</think>four")
    whole = one.whole(stop=["two"])
    assert whole["choices"][0]["message"]["reasoning"] == "one"
    assert whole["choices"][0]["stop_reason"] == "two"
    assert_same(Streamed(one.stream(monkeypatch, n_tokens, stop=["two"])), whole)


@pytest.mark.parametrize("n_tokens", STEPS)
def test_harmonys_channels_are_read_through_the_server(monkeypatch, n_tokens):
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
    text = (
        "<|channel|>analysis<|message|>Think é.<|end|><|start|>assistant<|channel|>commentary to=functions.get_time "
        "<|constrain|>json<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>Done."
    )
    one = model(text, special=special, template=TEMPLATE)
    whole = one.whole(tools=TOOLS)
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Think é.", "Done.")
    assert calls_of(message["tool_calls"]) == [("get_time", {})]
    assert_same(Streamed(one.stream(monkeypatch, n_tokens, tools=TOOLS)), whole)
