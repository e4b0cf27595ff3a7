"""/v1/chat/completions, whole and streamed, against the fake runner's known tokens."""

import pytest
from kit import Rig, ScriptedRunner, byte_tokenizer

from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import expected_tokens

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def scripted(make_rig, text, **options):
    return make_rig(runner=lambda limits: ScriptedRunner(limits, list(text.encode())), **options)


def answer_text(rig, n=8, seed=3):
    ids = rig.tokenizer.encode(PROMPT, add_special_tokens=False)
    tokens = expected_tokens(ids, n, SamplingParams(seed=seed), seed=seed, vocab_size=264)
    return rig.tokenizer.decode(tokens), tokens


def test_a_chat_is_answered_with_the_models_text_and_counts(rig):
    answer = rig.chat()
    text, _ = answer_text(rig)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["index"]) == ("length", None, 0)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (21, 8, 29)


def test_a_stream_has_its_chunks_in_order_and_says_the_same_text(rig):
    whole = rig.chat()
    chunks = rig.stream(CHAT, messages=HI, max_tokens=8, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert "usage" not in chunks[0]
    finish = chunks[-2]["choices"][0]
    assert (finish["delta"], finish["finish_reason"], finish["stop_reason"]) == ({}, "length", None)
    middle = [chunk["choices"][0] for chunk in chunks[1:-2]]
    assert all(one["finish_reason"] is None and set(one["delta"]) == {"content"} for one in middle)
    assert "".join(one["delta"]["content"] for one in middle) == whole["choices"][0]["message"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_running_usage_grows_to_the_whole(rig):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = rig.stream(CHAT, messages=HI, max_tokens=8, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_n_choices_differ_and_stream_the_same(rig):
    whole = rig.chat(n=3)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens"] == 21
    chunks = rig.stream(CHAT, messages=HI, max_tokens=8, n=3)
    streamed = ["", "", ""]
    for choice in (chunk["choices"][0] for chunk in chunks):
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts
    assert sum(chunk["choices"][0]["delta"].get("role") == "assistant" for chunk in chunks) == 3
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 3


@pytest.mark.parametrize(("top", "n_shown"), [(None, 0), (0, 0), (2, 2), (-1, 264)])
def test_logprobs_have_one_entry_a_token_with_true_bytes(make_rig, top, n_shown):
    rig = make_rig(max_logprobs=-1)
    (choice,) = rig.chat(logprobs=True, top_logprobs=top)["choices"]
    entries = choice["logprobs"]["content"]
    _, tokens = answer_text(rig)
    assert [entry["bytes"] for entry in entries] == [list(rig.tokenizer.token_bytes(i)) for i in tokens]
    for entry in entries:
        shown = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(shown) == n_shown
        assert shown == sorted(shown, reverse=True)


def test_streamed_logprobs_and_ids_are_those_of_the_whole(rig):
    ask = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = rig.chat(**ask)["choices"][0]
    chunks = rig.stream(CHAT, messages=HI, max_tokens=8, **ask)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [i for c in choices for i in c.get("token_ids", [])] == whole["token_ids"]
    assert chunks[0]["prompt_token_ids"] == rig.tokenizer.encode(PROMPT, add_special_tokens=False)


def test_tokens_can_be_written_as_ids(rig):
    entries = rig.chat(logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    _, tokens = answer_text(rig)
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in tokens]


def test_prompt_ids_text_and_logprobs_come_when_asked(rig):
    answer = rig.chat(return_token_ids=True, return_prompt_text=True, prompt_logprobs=1)
    ids = rig.tokenizer.encode(PROMPT, add_special_tokens=False)
    assert answer["prompt_token_ids"] == ids
    assert answer["prompt_text"] == PROMPT
    positions = answer["prompt_logprobs"]
    assert positions[0] is None
    assert [next(iter(one)) for one in positions[1:]] == [str(i) for i in ids[1:]]
    assert set(positions[1][str(ids[1])]) == {"logprob", "rank", "decoded_token"}


def test_a_stop_string_ends_the_text_and_is_told(make_rig):
    rig = scripted(make_rig, "one two three")
    whole = rig.chat(stop=["two", "zzz"], max_tokens=20)["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"], whole["stop_reason"]) == ("one ", "stop", "two")
    chunks = rig.stream(CHAT, messages=HI, max_tokens=20, stop="two", include_stop_str_in_output=True)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "one two"
    assert chunks[-1]["choices"][0]["stop_reason"] == "two"


def test_no_part_of_a_stop_string_is_streamed(make_rig):
    rig = scripted(make_rig, "ABCDEFGHIJ and")
    chunks = rig.stream(CHAT, messages=HI, max_tokens=20, stop=["DEFGHIJ"])
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "ABC"


def test_a_stop_token_is_told_by_its_id_and_an_end_of_sequence_is_not(make_rig):
    rig = scripted(make_rig, "abc")
    by_token = rig.chat(stop_token_ids=[ord("c")], max_tokens=20)["choices"][0]
    assert (by_token["message"]["content"], by_token["finish_reason"], by_token["stop_reason"]) == ("ab", "stop", 99)
    by_eos = rig.chat(max_tokens=20, ignore_eos=False)["choices"][0]
    assert (by_eos["message"]["content"], by_eos["finish_reason"], by_eos["stop_reason"]) == ("abc", "stop", None)


def test_a_character_is_never_split_between_chunks(make_rig):
    rig = scripted(make_rig, "a👨‍👩‍👧é")
    chunks = rig.stream(CHAT, messages=HI, max_tokens=40, ignore_eos=False)
    pieces = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert "".join(pieces) == "a👨‍👩‍👧é"
    assert not any("\ufffd" in piece for piece in pieces)


def test_max_completion_tokens_beats_max_tokens(rig):
    assert rig.chat(max_tokens=3, max_completion_tokens=5)["usage"]["completion_tokens"] == 5


def test_without_a_number_the_answer_goes_to_the_end_of_the_context(rig):
    answer = rig.chat(max_tokens=None, messages=[{"role": "user", "content": "x" * 200}])
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_models_recommendation_counts_where_the_request_is_silent(make_rig):
    rig = make_rig(defaults={"max_new_tokens": 5, "temperature": 0.0, "top_p": 7.0})
    assert rig.chat(max_tokens=None)["usage"]["completion_tokens"] == 5
    greedy = [rig.chat(seed=seed)["choices"][0]["message"]["content"] for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    warm = [rig.chat(seed=seed, temperature=1)["choices"][0]["message"]["content"] for seed in (1, 2)]
    assert warm[0] != warm[1]


def test_a_seed_repeats_an_answer(rig):
    one, two, other = (rig.chat(seed=seed)["choices"][0]["message"]["content"] for seed in (7, 7, 8))
    assert one == two != other


def test_template_variables_reach_the_template(rig):
    answer = rig.chat(chat_template_kwargs={"shout": "hey"}, return_prompt_text=True)
    assert "HEY" in answer["prompt_text"]


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_dict", "add_special_tokens", "messages", "self"])
def test_a_template_variable_that_would_steer_the_renderer_is_refused(rig, name):
    error = rig.refused("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {name: True}})
    assert error["param"] == "chat_template_kwargs"


def test_reasoning_effort_reaches_the_template(make_rig):
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    rig = make_rig(tokenizer=lambda: byte_tokenizer(template))
    assert rig.chat(reasoning_effort="none", return_prompt_text=True)["prompt_text"] == "none False"
    assert rig.chat(reasoning_effort="high", return_prompt_text=True)["prompt_text"] == "high True"


def test_the_last_message_can_be_continued_and_echoed(rig):
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    answer = rig.chat(messages=messages, continue_final_message=True, echo=True, return_prompt_text=True)
    assert answer["prompt_text"].endswith("<|im_start|>assistant\nWell, ")
    assert answer["choices"][0]["message"]["content"].startswith("Well, ")
    chunks = rig.stream(CHAT, messages=messages, continue_final_message=True, echo=True, max_tokens=4)
    assert chunks[1]["choices"][0]["delta"]["content"] == "Well, "


def test_parts_of_text_are_read(rig):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "a\nb" in rig.chat(messages=parts, return_prompt_text=True)["prompt_text"]


def test_a_long_prompt_can_be_cut_to_its_end(rig):
    long = [{"role": "user", "content": "x" * 1000}]
    answer = rig.chat(messages=long, truncate_prompt_tokens=10, return_token_ids=True)
    assert answer["prompt_token_ids"] == rig.tokenizer.encode(PROMPT, add_special_tokens=False)[-10:]
    assert rig.chat(messages=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 256 - 8
    right = rig.chat(messages=HI, truncate_prompt_tokens=3, truncation_side="right", return_token_ids=True)
    assert right["prompt_token_ids"] == rig.tokenizer.encode(PROMPT, add_special_tokens=False)[:3]


def test_a_model_without_a_template_says_so():
    rig = Rig(tokenizer=lambda: byte_tokenizer(None))
    try:
        error = rig.refused(CHAT, {"messages": HI})
        assert "no chat template" in error["message"]
    finally:
        rig.close()


def test_a_priority_is_refused_where_nobody_looks_at_it_and_taken_where_one_does(make_rig, rig):
    assert rig.refused(CHAT, {"messages": HI, "priority": 3})["param"] == "priority"
    by_priority = make_rig(scheduling_policy="priority")
    by_priority.chat(priority=3)
    by_priority.ask("POST", CHAT, json={"messages": HI, "max_tokens": 1}, headers={"x-vllm-priority": "-4"})


def test_a_salt_keeps_others_from_hitting_the_cache(make_rig):
    rig = make_rig()

    def cached(**fields):
        return rig.chat(**fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached() > 0, cached(cache_salt="mine"), cached(cache_salt="mine") > 0] == [0, True, 0, True]


def test_the_id_of_the_header_beats_the_bodys_and_a_bad_one_is_replaced(rig):
    def ask(headers, **fields):
        body = {"messages": HI, "max_tokens": 1} | fields
        response = rig.ask("POST", CHAT, json=body, headers=headers)
        return response.json()["id"], response.headers["x-request-id"]

    assert ask({"x-request-id": "mine"}, request_id="other") == ("chatcmpl-mine", "mine")
    assert ask({}, request_id="other")[0] == "chatcmpl-other"
    for bad in ("x" * 129, "a b", ""):
        shown, header = ask({"x-request-id": bad})
        assert shown == f"chatcmpl-{header}"
        assert header != bad


def test_the_same_id_twice_at_once_collides_with_nothing(rig):
    assert rig.chat(request_id="same", n=2)["id"] == rig.chat(request_id="same", n=2)["id"] == "chatcmpl-same"
